//! Loaded executables: identity, serialisation. Running is in `execute`, metadata in `meta`.

use std::sync::Arc;

use crate::abi::{self, Ptr};
use crate::client::Client;
use crate::error::{PjrtError, Result};
use crate::plugin::{Handle, bytes, slice};

struct Inner {
    client: Client,
    raw: Handle,
    executable: Handle,
    num_outputs: usize,
    /// Indices into `Client::devices`.
    devices: Vec<usize>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        let api = self.client.inner.api;
        // SAFETY: ours, and not used again.
        unsafe {
            if !self.executable.0.is_null() {
                api.release::<abi::ExecutableDestroy>(|a| a.executable = self.executable.0);
            }
            api.release::<abi::LoadedExecutableDestroy>(|a| a.executable = self.raw.0);
        }
    }
}

/// A program, compiled and loaded on its devices. Clones are the same executable.
#[derive(Clone)]
pub struct LoadedExecutable {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for LoadedExecutable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LoadedExecutable")
            .field("devices", &self.inner.devices)
            .field("num_outputs", &self.inner.num_outputs)
            .finish_non_exhaustive()
    }
}

impl LoadedExecutable {
    pub(crate) fn from_raw(client: &Client, raw: Ptr) -> Result<Self> {
        if raw.is_null() {
            return Err(PjrtError::internal("the plugin returned a null executable"));
        }
        let null = Handle(std::ptr::null_mut());
        let mut inner = Inner { client: client.clone(), raw: Handle(raw), executable: null, num_outputs: 0, devices: Vec::new() };
        let api = client.inner.api;
        // SAFETY: the executable is alive; lists belong to it and are copied.
        unsafe {
            let a = api.call::<abi::LoadedExecutableGetExecutable>(|a| a.loaded_executable = raw)?;
            inner.executable = Handle(a.executable);
            inner.num_outputs = api.call::<abi::ExecutableNumOutputs>(|a| a.executable = inner.executable.0)?.value;
            let a = api.call::<abi::LoadedExecutableAddressableDevices>(|a| a.executable = raw)?;
            for &device in slice(a.devices, a.num_devices) {
                let index = client.index_of(device);
                inner.devices.push(index.ok_or_else(|| PjrtError::internal("an executable on a device of no client"))?);
            }
        }
        Ok(Self { inner: Arc::new(inner) })
    }

    pub(crate) fn raw(&self) -> Ptr {
        self.inner.raw.0
    }

    pub(crate) fn raw_executable(&self) -> Ptr {
        self.inner.executable.0
    }

    /// The client it was loaded by.
    pub fn client(&self) -> &Client {
        &self.inner.client
    }

    /// Number of outputs per device.
    pub fn num_outputs(&self) -> usize {
        self.inner.num_outputs
    }

    /// Number of addressable devices it runs on; 0 for one that runs on any (`per_device`).
    pub fn num_devices(&self) -> usize {
        self.inner.devices.len()
    }

    /// Indices (into `Client::devices`) of its devices, in the order of argument lists: for each
    /// replica, for each partition.
    pub fn devices(&self) -> &[usize] {
        &self.inner.devices
    }

    /// The plugin's ids of its devices, in the order of argument lists.
    pub fn addressable_device_ids(&self) -> Vec<i32> {
        let devices = self.inner.client.devices();
        self.inner.devices.iter().map(|&i| devices[i].id).collect()
    }

    /// Bytes that `Client::deserialize_and_load` takes.
    pub fn serialize(&self) -> Result<Vec<u8>> {
        // SAFETY: the executable is alive; the bytes are copied before their deleter runs.
        unsafe {
            let a = self.inner.client.inner.api.call::<abi::ExecutableSerialize>(|a| a.executable = self.raw_executable())?;
            let out = bytes(a.bytes, a.bytes_size).to_vec();
            if let Some(deleter) = a.deleter {
                deleter(a.serialized);
            }
            Ok(out)
        }
    }

    /// The plugin's fingerprint of the compiled program; not always text.
    pub fn fingerprint(&self) -> Result<Vec<u8>> {
        let api = self.inner.client.inner.api;
        // SAFETY: the executable is alive; the text is copied.
        unsafe {
            match api.call::<abi::ExecutableFingerprint>(|a| a.executable = self.raw_executable()) {
                Ok(a) => Ok(bytes(a.text, a.text_size).to_vec()),
                Err(first) => api
                    .call::<abi::LoadedExecutableFingerprint>(|a| a.executable = self.raw())
                    .map(|a| bytes(a.text, a.text_size).to_vec())
                    .map_err(|_| first),
            }
        }
    }
}
