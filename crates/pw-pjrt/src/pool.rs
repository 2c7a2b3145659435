//! Mapped memory that blocks gave back, kept for the blocks that come next: the kernel takes as long to make fresh pages
//! as a transfer takes to fill them.

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Bytes that are kept; beyond them the oldest go.
const KEPT_BYTES_MAX: usize = 1 << 30;

/// From this size on the kernel is asked for huge pages.
const HUGE_FROM: usize = 4 << 20;

/// A mapping of this process.
pub(crate) struct Mapping {
    pub(crate) at: NonNull<u8>,
    pub(crate) len: usize,
}

// SAFETY: a mapping is plain memory that its holder owns.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Zeros.
    pub(crate) fn fresh(len: usize) -> Option<Mapping> {
        // SAFETY: a fresh private mapping; no file, no fixed address.
        let at = unsafe {
            libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
        };
        if at == libc::MAP_FAILED {
            return None;
        }
        if len >= HUGE_FROM {
            // SAFETY: the mapping is ours. Where it is refused, small pages do as well.
            unsafe { libc::madvise(at, len, libc::MADV_HUGEPAGE) };
        }
        NonNull::new(at.cast()).map(|at| Mapping { at, len })
    }

    fn unmap(self) {
        // SAFETY: made by `fresh` with this size, and nobody else has it.
        unsafe { libc::munmap(self.at.as_ptr().cast(), self.len) };
    }
}

/// Ordered by the time at which they were given back.
static KEPT: Mutex<VecDeque<(Instant, Mapping)>> = Mutex::new(VecDeque::new());

fn kept() -> MutexGuard<'static, VecDeque<(Instant, Mapping)>> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A kept mapping of at least `len` bytes that is not much larger, with whatever is in it.
pub(crate) fn take(len: usize) -> Option<Mapping> {
    let mut kept = kept();
    let fits = |mapping: &Mapping| mapping.len >= len && mapping.len - len <= len / 4;
    let (place, _) = kept.iter().enumerate().filter(|(_, (_, mapping))| fits(mapping)).min_by_key(|(_, (_, mapping))| mapping.len)?;
    kept.remove(place).map(|(_, mapping)| mapping)
}

/// Keeps a mapping for a while.
pub(crate) fn give(mapping: Mapping) {
    if mapping.len > KEPT_BYTES_MAX {
        return mapping.unmap();
    }
    let mut kept = kept();
    kept.push_back((Instant::now(), mapping));
    let mut bytes: usize = kept.iter().map(|(_, mapping)| mapping.len).sum();
    let mut gone = Vec::new();
    while bytes > KEPT_BYTES_MAX
        && let Some((_, oldest)) = kept.pop_front()
    {
        bytes -= oldest.len;
        gone.push(oldest);
    }
    drop(kept);
    gone.into_iter().for_each(Mapping::unmap);
}

/// Gives memory of blocks that has not been used again for `age` back to the system; the bytes that are still kept.
pub fn trim_blocks(age: Duration) -> usize {
    let mut kept = kept();
    let old = kept.iter().take_while(|(since, _)| since.elapsed() >= age).count();
    let gone: Vec<_> = kept.drain(..old).collect();
    let bytes = kept.iter().map(|(_, mapping)| mapping.len).sum();
    drop(kept);
    gone.into_iter().for_each(|(_, mapping)| mapping.unmap());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::AlignedBlock;

    /// One test, since all share the pool.
    #[test]
    fn blocks_are_kept_for_a_while() {
        const LEN: usize = 3 << 20;
        let mut block = AlignedBlock::zeroed(LEN);
        block.fill(7);
        let at = block.as_ptr();
        drop(block);
        let larger = AlignedBlock::to_fill(2 * LEN);
        assert_ne!(larger.as_ptr(), at, "the kept one is too small");
        let much_smaller = AlignedBlock::to_fill(LEN / 2);
        assert_ne!(much_smaller.as_ptr(), at, "the kept one is too large");
        let again = AlignedBlock::to_fill(LEN - 4096);
        assert_eq!((again.as_ptr(), again.len()), (at, LEN - 4096));
        drop((larger, much_smaller, again));
        // What is asked to be zero is.
        assert!(AlignedBlock::zeroed(LEN).iter().all(|&b| b == 0));
        assert!(trim_blocks(Duration::from_secs(3600)) >= LEN);
        assert_eq!(trim_blocks(Duration::ZERO), 0);
    }
}
