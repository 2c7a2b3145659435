//! Host memory for transfers.
//!
//! Invariants:
//! 1. A block starts at a multiple of 64, which is what the plugins ask of memory they use in
//!    place.
//! 2. Bytes that a plugin may write (donation reuses them) have no other owner.
//! 3. A block's memory goes to the pool only from the block that owned it.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::error::{PjrtError, Result, code};
use crate::pool::{self, Mapping};

/// Alignment that makes a transfer without a copy possible.
pub const ALIGNMENT: usize = 64;

/// From this size on a block is mapped, so that its zeros cost nothing until touched.
const MAP_FROM: usize = 256 * 1024;

/// A fixed-size, 64-byte aligned, initialised block of bytes.
pub struct AlignedBlock {
    data: NonNull<u8>,
    len: usize,
    capacity: usize,
}

// SAFETY: the block owns its bytes like a `Vec<u8>`.
unsafe impl Send for AlignedBlock {}
// SAFETY: as above.
unsafe impl Sync for AlignedBlock {}

impl std::fmt::Debug for AlignedBlock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AlignedBlock").field("len", &self.len).finish()
    }
}

impl AlignedBlock {
    /// A block of `len` zeros. Aborts where there is no memory; a size that came from elsewhere
    /// is for `try_zeroed`.
    pub fn zeroed(len: usize) -> Self {
        Self::try_zeroed(len).unwrap_or_else(|_| handle_alloc_error(Self::layout(len)))
    }

    /// A block of `len` zeros, or RESOURCE_EXHAUSTED.
    pub fn try_zeroed(len: usize) -> Result<Self> {
        if len == 0 {
            // Aligned, though it points nowhere.
            let data = NonNull::<Line>::dangling().cast();
            return Ok(Self { data, len, capacity: 0 });
        }
        let none = || PjrtError::new(code::RESOURCE_EXHAUSTED, format!("no block of {len} bytes"));
        let layout = Layout::from_size_align(len, ALIGNMENT).map_err(|_| none())?;
        if len >= MAP_FROM {
            return Mapping::fresh(len).map(|mapping| Self::mapped(mapping, len)).ok_or_else(none);
        }
        // SAFETY: the size is not zero.
        let data = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(none)?;
        Ok(Self { data, len, capacity: len })
    }

    /// A block of `len` bytes that will all be written: what is in it now is left over from an earlier one. Aborts where
    /// there is no memory.
    pub fn to_fill(len: usize) -> Self {
        match (len >= MAP_FROM).then(|| pool::take(len)).flatten() {
            Some(mapping) => Self::mapped(mapping, len),
            None => Self::zeroed(len),
        }
    }

    fn mapped(mapping: Mapping, len: usize) -> Self {
        Self { data: mapping.at, len, capacity: mapping.len }
    }

    /// A block with a copy of `bytes`.
    pub fn from_slice(bytes: &[u8]) -> Self {
        let mut block = Self::zeroed(bytes.len());
        block.copy_from_slice(bytes);
        block
    }

    /// Shortens the block; the memory stays until the block goes.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// All bytes.
    pub fn as_slice(&self) -> &[u8] {
        self
    }

    /// All bytes, to be written.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        self
    }

    /// Cuts the block into exclusive pieces, each of which a plugin may take over in place.
    /// The ranges must be inside the block and must not overlap.
    pub fn into_parts(self, ranges: &[Range<usize>]) -> Result<Vec<HostBytes>> {
        let mut sorted: Vec<&Range<usize>> = ranges.iter().filter(|r| !r.is_empty()).collect();
        sorted.sort_by_key(|r| r.start);
        if sorted.windows(2).any(|w| w[0].end > w[1].start) {
            return Err(PjrtError::invalid("parts of a block overlap"));
        }
        let block = Arc::new(self);
        ranges.iter().map(|r| HostBytes::new(block.clone(), r.clone(), true)).collect()
    }

    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len, ALIGNMENT).expect("a block is smaller than isize::MAX")
    }
}

/// Only for its alignment.
#[repr(align(64))]
struct Line(#[expect(dead_code)] [u8; ALIGNMENT]);

impl Drop for AlignedBlock {
    fn drop(&mut self) {
        match self.capacity {
            0 => {}
            MAP_FROM.. => pool::give(Mapping { at: self.data, len: self.capacity }),
            // SAFETY: made by `zeroed` with this size, the same way.
            len => unsafe { dealloc(self.data.as_ptr(), Self::layout(len)) },
        }
    }
}

impl Deref for AlignedBlock {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: initialised, owned, and `len` is at most the allocation.
        unsafe { std::slice::from_raw_parts(self.data.as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBlock {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr(), self.len) }
    }
}

/// Bytes on their way to a device: a range of a block.
#[derive(Debug)]
pub struct HostBytes {
    block: Arc<AlignedBlock>,
    offset: usize,
    len: usize,
    /// Nobody else can see this range, so the plugin may write it.
    exclusive: bool,
}

impl HostBytes {
    /// A whole block, given away. The plugin may use it in place and, on donation, overwrite it.
    pub fn owned(block: AlignedBlock) -> Self {
        let len = block.len;
        Self { block: Arc::new(block), offset: 0, len, exclusive: true }
    }

    /// A range of a block that others read too. The plugin may use it in place but never writes
    /// it: donating the buffer copies.
    pub fn shared(block: Arc<AlignedBlock>, range: Range<usize>) -> Result<Self> {
        Self::new(block, range, false)
    }

    /// A copy of `bytes` in a block of its own.
    pub fn copied(bytes: &[u8]) -> Self {
        Self::owned(AlignedBlock::from_slice(bytes))
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// True where the start is aligned for use in place.
    pub fn is_aligned(&self) -> bool {
        (self.as_ptr() as usize).is_multiple_of(ALIGNMENT)
    }

    pub(crate) fn is_exclusive(&self) -> bool {
        self.exclusive
    }

    pub(crate) fn as_ptr(&self) -> *const u8 {
        // SAFETY: `new` checked the range.
        unsafe { self.block.data.as_ptr().add(self.offset) }
    }

    pub(crate) fn into_block(self) -> Arc<AlignedBlock> {
        self.block
    }

    fn new(block: Arc<AlignedBlock>, range: Range<usize>, exclusive: bool) -> Result<Self> {
        if range.start > range.end || range.end > block.len {
            return Err(PjrtError::invalid(format!("bytes {range:?} are outside of a block of {}", block.len)));
        }
        Ok(Self { offset: range.start, len: range.len(), block, exclusive })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_aligned_zeroed_and_writable() {
        for len in [0, 1, 63, 4096, MAP_FROM - 1, MAP_FROM, MAP_FROM + 1] {
            let mut block = AlignedBlock::zeroed(len);
            assert!((block.as_ptr() as usize).is_multiple_of(ALIGNMENT));
            assert_eq!(block.len(), len);
            assert!(block.iter().all(|&b| b == 0));
            block.as_mut_slice().fill(7);
            assert!(block.iter().all(|&b| b == 7));
            block.truncate(len / 2);
            assert_eq!(block.len(), len / 2);
        }
    }

    #[test]
    fn too_large_a_block_is_an_error() {
        for len in [usize::MAX, isize::MAX as usize, 1 << 60] {
            let e = AlignedBlock::try_zeroed(len).unwrap_err();
            assert_eq!(e.code, code::RESOURCE_EXHAUSTED);
        }
    }

    #[test]
    fn parts_must_not_overlap() {
        let parts = AlignedBlock::zeroed(256).into_parts(&[128..256, 0..64, 64..64]).unwrap();
        assert_eq!(parts.iter().map(HostBytes::len).collect::<Vec<_>>(), [128, 64, 0]);
        assert!(parts.iter().all(HostBytes::is_exclusive));
        assert!(AlignedBlock::zeroed(256).into_parts(&[0..65, 64..128]).is_err());
        assert!(AlignedBlock::zeroed(256).into_parts(&[0..65, 0..65]).is_err());
        assert!(AlignedBlock::zeroed(256).into_parts(&[0..0, 0..257]).is_err());
        let shared = HostBytes::shared(Arc::new(AlignedBlock::zeroed(8)), 4..8).unwrap();
        assert!(!shared.is_exclusive() && !shared.is_aligned());
    }
}
