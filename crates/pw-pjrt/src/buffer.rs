//! Device buffers: upload, download, copies, views.
//!
//! Invariants:
//! 1. Host memory that a plugin uses in place lives until the plugin says that it is done.
//! 2. While a `HostView` exists its bytes are neither freed nor written.
//! 3. Host data is dense and row-major; types under eight bits take one byte per element there.

use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::abi::{self, Ptr};
use crate::client::Client;
use crate::error::{PjrtError, Result};
use crate::event::Event;
use crate::host::HostBytes;
use crate::plugin::{Handle, slice};
use crate::types::{BufferType, element_count};

struct Inner {
    client: Client,
    raw: Handle,
    /// Views that exist. The plugin's own count of references is not for several threads at once, so it gets one for all
    /// views, under this lock.
    views: Mutex<usize>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: ours, and not used again.
        unsafe { self.client.inner.api.release::<abi::BufferDestroy>(|a| a.buffer = self.raw.0) }
    }
}

/// A buffer on a device. Clones are the same buffer; the memory goes with the last one, or with
/// `delete` or a donation before.
#[derive(Clone)]
pub struct Buffer {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer").field("element_type", &self.element_type()).field("dims", &self.dims()).finish_non_exhaustive()
    }
}

impl Client {
    /// Uploads an array to a device.
    ///
    /// Aligned, dense bytes of a type of eight bits or more are used in place, without a copy.
    /// `byte_strides` are those of the host array, in bytes, one per dimension; `None` is dense
    /// row-major. `memory_kind` `None` is the default one.
    pub fn buffer_from_host(
        &self,
        data: HostBytes,
        element_type: BufferType,
        dims: &[i64],
        byte_strides: Option<&[i64]>,
        device: usize,
        memory_kind: Option<&str>,
    ) -> Result<Buffer> {
        let strides = check_host(data.len(), element_type, dims, byte_strides)?;
        let in_place = strides.is_none() && data.is_aligned() && !data.is_empty() && !element_type.is_sub_byte();
        let semantics = match (in_place, data.is_exclusive()) {
            (false, _) => abi::HOST_ONLY_DURING_CALL,
            (true, false) => abi::HOST_IMMUTABLE_ZERO_COPY,
            (true, true) => abi::HOST_MUTABLE_ZERO_COPY,
        };
        // SAFETY: `check_host` bounded what is read; the block is kept below until done.
        let (buffer, done) =
            unsafe { self.upload(data.as_ptr(), semantics, (element_type, dims), strides.unwrap_or(&[]), device, memory_kind)? };
        if in_place {
            done.keep_until_ready(data.into_block());
        }
        Ok(buffer)
    }

    /// Uploads an array by copying it before the call returns.
    pub fn buffer_from_slice(
        &self,
        data: &[u8],
        element_type: BufferType,
        dims: &[i64],
        device: usize,
        memory_kind: Option<&str>,
    ) -> Result<Buffer> {
        check_host(data.len(), element_type, dims, None)?;
        // SAFETY: the bytes are read during the call only, and `check_host` bounded them.
        unsafe { self.upload(data.as_ptr(), abi::HOST_ONLY_DURING_CALL, (element_type, dims), &[], device, memory_kind) }
            .map(|(buffer, _)| buffer)
    }

    /// # Safety
    /// `data` is valid for what dims and strides reach, for as long as `semantics` says.
    unsafe fn upload(
        &self,
        data: *const u8,
        semantics: std::ffi::c_int,
        (element_type, dims): (BufferType, &[i64]),
        strides: &[i64],
        device: usize,
        memory_kind: Option<&str>,
    ) -> Result<(Buffer, Event)> {
        let raw_device = self.raw_device(device)?;
        let memory = match memory_kind {
            None => std::ptr::null_mut(),
            Some(kind) => self.raw_memory(device, Some(kind))?,
        };
        // SAFETY: the caller's promise; dims and strides live over the call.
        let args = unsafe {
            self.inner.api.call::<abi::ClientBufferFromHostBuffer>(|a| {
                a.client = self.inner.raw.0;
                a.data = data.cast();
                a.element_type = element_type.pjrt();
                a.dims = dims.as_ptr();
                a.num_dims = dims.len();
                // Not just any pointer with a length of zero: some plugins look at it alone.
                if !strides.is_empty() {
                    a.byte_strides = strides.as_ptr();
                }
                a.num_byte_strides = strides.len();
                a.semantics = semantics;
                a.device = raw_device;
                a.memory = memory;
            })?
        };
        let done = Event::from_raw(self.inner.api, args.done_with_host_buffer);
        Ok((Buffer::from_raw(self, args.buffer)?, done))
    }

    /// A buffer that is in error from the start: whatever uses it fails with this error.
    pub fn error_buffer(
        &self,
        error: &PjrtError,
        element_type: BufferType,
        dims: &[i64],
        device: usize,
        memory_kind: Option<&str>,
    ) -> Result<Buffer> {
        element_count(dims)?;
        if element_type == BufferType::Token {
            return Err(PjrtError::invalid("a token in error is a PRED[0] array in error"));
        }
        let memory = self.raw_memory(device, memory_kind)?;
        let order = abi::row_major(dims.len());
        let layout = abi::dense_layout(&order);
        // SAFETY: all pointers live over the call.
        let args = unsafe {
            self.inner.api.call::<abi::ClientCreateErrorBuffer>(|a| {
                a.client = self.inner.raw.0;
                a.code = error.code;
                a.message = error.message.as_ptr().cast();
                a.message_size = error.message.len();
                a.dims = dims.as_ptr();
                a.num_dims = dims.len();
                a.element_type = element_type.pjrt();
                a.layout = &raw const layout.args;
                a.memory = memory;
            })?
        };
        Buffer::from_raw(self, args.buffer)
    }
}

/// Checks that a host array is inside its bytes. Gives the strides where they are not those of a
/// dense array.
fn check_host<'a>(len: usize, element_type: BufferType, dims: &[i64], byte_strides: Option<&'a [i64]>) -> Result<Option<&'a [i64]>> {
    if element_type == BufferType::Token {
        return Err(PjrtError::invalid("a token has no bytes to upload; pass a PRED[0] array"));
    }
    let dense = element_type.host_size(dims)?;
    let strides = match byte_strides {
        Some(strides) if strides.len() != dims.len() => {
            return Err(PjrtError::invalid(format!("{} strides for {} dimensions", strides.len(), dims.len())));
        }
        Some(strides) if !is_dense(element_type, dims, strides) => Some(strides),
        _ => None,
    };
    let needed = match strides {
        None => Some(dense),
        Some(_) if dense == 0 => Some(0),
        Some(strides) => {
            let mut reach = element_type.host_bytes();
            for (&stride, &dim) in strides.iter().zip(dims) {
                let stride =
                    usize::try_from(stride).map_err(|_| PjrtError::invalid(format!("negative byte stride {stride} is not supported")))?;
                reach = stride
                    .checked_mul(dim as usize - 1)
                    .and_then(|far| reach.checked_add(far))
                    .ok_or_else(|| PjrtError::invalid("byte strides overflow"))?;
            }
            Some(reach)
        }
    };
    match needed {
        Some(needed) if needed <= len => Ok(strides),
        needed => Err(PjrtError::invalid(format!("{element_type:?}{dims:?} needs {} bytes, got {len}", needed.unwrap_or(usize::MAX)))),
    }
}

/// Strides of dimensions of size one say nothing, nor do any strides of an empty array.
fn is_dense(element_type: BufferType, dims: &[i64], strides: &[i64]) -> bool {
    if dims.contains(&0) {
        return true;
    }
    let mut expected = element_type.host_bytes() as i64;
    for (&stride, &dim) in strides.iter().zip(dims).rev() {
        if dim != 1 && stride != expected {
            return false;
        }
        expected = expected.saturating_mul(dim);
    }
    true
}

impl Buffer {
    pub(crate) fn from_raw(client: &Client, raw: Ptr) -> Result<Self> {
        if raw.is_null() {
            return Err(PjrtError::internal("the plugin returned a null buffer"));
        }
        Ok(Self { inner: Arc::new(Inner { client: client.clone(), raw: Handle(raw), views: Mutex::new(0) }) })
    }

    pub(crate) fn raw(&self) -> Ptr {
        self.inner.raw.0
    }

    /// The client it belongs to.
    pub fn client(&self) -> &Client {
        &self.inner.client
    }

    fn api(&self) -> &'static crate::plugin::Api {
        self.inner.client.inner.api
    }

    /// Element type.
    pub fn element_type(&self) -> Result<BufferType> {
        // SAFETY: the buffer is alive, here and in the calls below.
        let args = unsafe { self.api().call::<abi::BufferElementType>(|a| a.buffer = self.raw())? };
        BufferType::checked(args.element_type)
    }

    /// Dimensions of this (shard's) array.
    pub fn dims(&self) -> Result<Vec<i64>> {
        // SAFETY: the list belongs to the buffer and is copied.
        unsafe {
            let args = self.api().call::<abi::BufferDimensions>(|a| a.buffer = self.raw())?;
            Ok(slice(args.dims, args.num_dims).to_vec())
        }
    }

    /// Kind of the memory it is in.
    pub fn memory_kind(&self) -> Result<String> {
        // SAFETY: the buffer is alive.
        let memory = unsafe { self.api().call::<abi::BufferMemory>(|a| a.buffer = self.raw())?.memory };
        self.inner.client.memory_kind_of(memory).map(str::to_owned).ok_or_else(|| PjrtError::internal("a buffer in a memory of no device"))
    }

    /// Index of its device in `Client::devices`.
    pub fn device_index(&self) -> Result<usize> {
        // SAFETY: the buffer is alive.
        let device = unsafe { self.api().call::<abi::BufferDevice>(|a| a.buffer = self.raw())?.device };
        self.inner.client.index_of(device).ok_or_else(|| PjrtError::internal("a buffer on a device of no client"))
    }

    /// The plugin's id of its device.
    pub fn device_id(&self) -> Result<i32> {
        Ok(self.inner.client.devices()[self.device_index()?].id)
    }

    /// Bytes on the device.
    pub fn on_device_size(&self) -> Result<usize> {
        // SAFETY: the buffer is alive.
        unsafe { Ok(self.api().call::<abi::BufferOnDeviceSize>(|a| a.buffer = self.raw())?.size) }
    }

    /// Bytes that `to_host` writes.
    pub fn host_size(&self) -> Result<usize> {
        self.element_type()?.host_size(&self.dims()?)
    }

    /// Fires when the contents are there, or have failed.
    pub fn ready_event(&self) -> Result<Event> {
        // SAFETY: the buffer is alive; the event is ours.
        let args = unsafe { self.api().call::<abi::BufferReadyEvent>(|a| a.buffer = self.raw())? };
        Ok(Event::from_raw(self.api(), args.event))
    }

    /// Gives the memory back, after the work that uses it.
    pub fn delete(&self) -> Result<()> {
        // SAFETY: the buffer is alive.
        unsafe { self.api().call::<abi::BufferDelete>(|a| a.buffer = self.raw()) }.map(|_| ())
    }

    /// True after `delete` or a donation.
    pub fn is_deleted(&self) -> Result<bool> {
        // SAFETY: the buffer is alive.
        let args = unsafe { self.api().call::<abi::BufferIsDeleted>(|a| a.buffer = self.raw())? };
        Ok(args.is_deleted != 0)
    }

    /// Address of the contents, meaningful once they are ready.
    pub fn unsafe_pointer(&self) -> Result<usize> {
        // SAFETY: the buffer is alive; the address is only a number here.
        unsafe { Ok(self.api().call::<abi::BufferUnsafePointer>(|a| a.buffer = self.raw())?.pointer) }
    }

    /// Copies to a memory of a device, by index and kind; `None` is the default kind.
    pub fn copy_to_memory(&self, device: usize, memory_kind: Option<&str>) -> Result<Buffer> {
        let client = &self.inner.client;
        let memory = client.raw_memory(device, memory_kind)?;
        // SAFETY: buffer and memory are alive.
        let args = unsafe {
            self.api().call::<abi::BufferCopyToMemory>(|a| {
                a.buffer = self.raw();
                a.memory = memory;
            })?
        };
        Buffer::from_raw(client, args.out)
    }

    /// Copies to the default memory of a device.
    pub fn copy_to_device(&self, device: usize) -> Result<Buffer> {
        self.copy_to_memory(device, None)
    }

    /// Waits for the contents and copies them out, dense and row-major.
    pub fn to_host(&self, dst: &mut [u8]) -> Result<()> {
        let (element_type, dims) = (self.element_type()?, self.dims()?);
        let size = element_type.host_size(&dims)?;
        if dst.len() != size {
            return Err(PjrtError::invalid(format!("{element_type:?}{dims:?} is {size} bytes, the destination {}", dst.len())));
        }
        if element_type == BufferType::Token || size == 0 {
            return self.ready_event()?.wait();
        }
        let order = abi::row_major(dims.len());
        let layout = abi::dense_layout(&order);
        // SAFETY: `dst` is exclusive and of the right size; waiting keeps it borrowed until the
        // plugin is done with it.
        unsafe {
            let args = self.api().call::<abi::BufferToHostBuffer>(|a| {
                a.src = self.raw();
                a.host_layout = &raw const layout.args;
                a.dst = dst.as_mut_ptr().cast();
                a.dst_size = dst.len();
            })?;
            Event::from_raw(self.api(), args.event).wait_named("copy to host")
        }
    }

    /// Waits for the contents and copies them out.
    pub fn to_vec(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.host_size()?];
        self.to_host(&mut bytes)?;
        Ok(bytes)
    }

    /// Waits for the contents and reads them where they are. `None` where that is not possible:
    /// not in host memory, packed, or in another order than row-major; use `to_host` then.
    pub fn host_view(&self) -> Result<Option<HostView>> {
        let element_type = self.element_type()?;
        let dims = self.dims()?;
        let len = element_type.host_size(&dims)?;
        self.ready_event()?.wait()?;
        if element_type.is_sub_byte() || !self.is_row_major(&dims)? || !self.is_on_host()? {
            return Ok(None);
        }
        if len > 0 && self.on_device_size()? < len {
            return Ok(None);
        }
        let mut views = self.views();
        if *views == 0 {
            // SAFETY: the buffer is alive; released by the drop of the last view.
            unsafe {
                self.api().call::<abi::BufferIncreaseExternalReferenceCount>(|a| {
                    a.buffer = self.raw();
                })?;
            }
        }
        *views += 1;
        drop(views);
        // From here on the drop gives the reference back.
        let mut view = HostView { buffer: self.clone(), address: 0, len };
        if len > 0 {
            view.address = self.unsafe_pointer()?;
            if view.address == 0 {
                return Ok(None);
            }
        }
        Ok(Some(view))
    }

    fn views(&self) -> MutexGuard<'_, usize> {
        self.inner.views.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_on_host(&self) -> Result<bool> {
        // SAFETY: the buffer is alive.
        let args = unsafe { self.api().call::<abi::BufferIsOnCpu>(|a| a.buffer = self.raw())? };
        Ok(args.is_on_cpu != 0)
    }

    fn is_row_major(&self, dims: &[i64]) -> Result<bool> {
        if dims.iter().filter(|&&d| d != 1).count() < 2 {
            return Ok(true);
        }
        // SAFETY: the buffer is alive and owns the lists in the result.
        unsafe {
            let args = self.api().call::<abi::BufferGetMemoryLayout>(|a| {
                a.buffer = self.raw();
                a.layout.struct_size = size_of::<abi::MemoryLayout>();
            })?;
            let layout = args.layout;
            let order = slice(layout.minor_to_major, layout.minor_to_major_size);
            Ok(layout.kind == 0 && layout.num_tiles == 0 && order == abi::row_major(dims.len()))
        }
    }
}

/// Contents of a buffer in host memory, read in place. Keeps the buffer alive; deleting it
/// meanwhile does not touch these bytes, and a run that would take it over copies it instead
/// and leaves it undeleted.
pub struct HostView {
    buffer: Buffer,
    address: usize,
    len: usize,
}

impl Deref for HostView {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: `host_view` checked size, order and place, and holds a reference that keeps the
        // memory from being freed or written.
        unsafe { std::slice::from_raw_parts(self.address as *const u8, self.len) }
    }
}

impl std::fmt::Debug for HostView {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostView").field("len", &self.len).finish_non_exhaustive()
    }
}

impl Drop for HostView {
    fn drop(&mut self) {
        let mut views = self.buffer.views();
        *views -= 1;
        if *views == 0 {
            // SAFETY: gives back the reference that the first view took; nobody takes or gives one meanwhile.
            unsafe {
                self.buffer.api().release::<abi::BufferDecreaseExternalReferenceCount>(|a| {
                    a.buffer = self.buffer.raw();
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_arrays_must_be_inside_their_bytes() {
        let f32 = BufferType::F32;
        assert_eq!(check_host(24, f32, &[2, 3], None).unwrap(), None);
        assert!(check_host(23, f32, &[2, 3], None).is_err());
        assert_eq!(check_host(24, f32, &[2, 3], Some(&[12, 4])).unwrap(), None);
        assert_eq!(check_host(24, f32, &[2, 3], Some(&[4, 8])).unwrap(), Some(&[4, 8][..]));
        assert!(check_host(23, f32, &[2, 3], Some(&[4, 8])).is_err());
        assert_eq!(check_host(4, f32, &[2, 3], Some(&[0, 0])).unwrap(), Some(&[0, 0][..]));
        assert!(check_host(24, f32, &[2, 3], Some(&[-12, 4])).is_err());
        assert!(check_host(24, f32, &[2, 3], Some(&[4])).is_err());
        assert!(check_host(64, f32, &[3, 3], Some(&[i64::MAX, i64::MAX])).is_err());
        assert_eq!(check_host(0, f32, &[0, 3], Some(&[7, 7])).unwrap(), None);
        assert_eq!(check_host(12, f32, &[1, 3], Some(&[999, 4])).unwrap(), None);
        assert!(check_host(0, BufferType::Token, &[], None).is_err());
    }
}
