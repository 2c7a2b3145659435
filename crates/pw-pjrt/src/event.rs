//! Events: completion of an execution, a transfer or a buffer's definition.
//!
//! Callbacks never unwind into the plugin.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::abi::{self, Ptr};
use crate::error::{PjrtError, Result};
use crate::plugin::{Api, Handle};

/// What an event calls when it fires.
pub type ReadyCallback = Box<dyn FnOnce(Result<()>) + Send + 'static>;

struct Inner {
    api: &'static Api,
    raw: Handle,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: ours, and not used again.
        unsafe { self.api.release::<abi::EventDestroy>(|a| a.event = self.raw.0) }
    }
}

/// Something that becomes ready, or fails, once. Clones are the same event.
#[derive(Clone)]
pub struct Event {
    /// `None`: was ready when it was made.
    inner: Option<Arc<Inner>>,
}

impl std::fmt::Debug for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Event").field("ready", &self.is_ready()).finish()
    }
}

struct Waiting {
    api: &'static Api,
    callback: ReadyCallback,
}

/// The plugin's side of `on_ready`.
unsafe extern "C" fn fire(error: Ptr, user_arg: Ptr) {
    // SAFETY: made by `on_ready` from a box, and called once.
    let waiting = unsafe { Box::from_raw(user_arg.cast::<Waiting>()) };
    let result = if error.is_null() {
        Ok(())
    } else {
        // SAFETY: the callback owns its error.
        Err(unsafe { waiting.api.take_error(error) })
    };
    // A panic must not reach the plugin's frames; the default hook has printed it already.
    let _ = catch_unwind(AssertUnwindSafe(|| (waiting.callback)(result)));
}

impl Event {
    /// Takes over a raw event; null means "ready".
    pub(crate) fn from_raw(api: &'static Api, raw: Ptr) -> Self {
        let inner = (!raw.is_null()).then(|| Arc::new(Inner { api, raw: Handle(raw) }));
        Self { inner }
    }

    /// True once it has fired, with or without an error. Does not block.
    pub fn is_ready(&self) -> bool {
        let Some(inner) = &self.inner else { return true };
        // SAFETY: the event is alive as long as `inner`.
        match unsafe { inner.api.call::<abi::EventIsReady>(|a| a.event = inner.raw.0) } {
            Ok(args) => args.is_ready != 0,
            // Let `wait` tell what is wrong.
            Err(_) => true,
        }
    }

    /// Blocks until it has fired, and gives its error.
    pub fn wait(&self) -> Result<()> {
        let Some(inner) = &self.inner else { return Ok(()) };
        // SAFETY: the event is alive as long as `inner`.
        unsafe { inner.api.call::<abi::EventAwait>(|a| a.event = inner.raw.0) }.map(|_| ())
    }

    /// Calls `callback` when it fires: at once on this thread, or later on a thread of the
    /// plugin. It must not block there, nor wait for other work of the same plugin.
    pub fn on_ready(&self, callback: ReadyCallback) {
        if let Err((e, callback)) = self.register(callback) {
            callback(Err(e));
        }
    }

    /// Keeps a value until it fires; for ever if the plugin does not tell when.
    pub(crate) fn keep_until_ready<T: Send + 'static>(&self, value: T) {
        if let Err((_, callback)) = self.register(Box::new(move |_| drop(value))) {
            std::mem::forget(callback);
        }
    }

    fn register(&self, callback: ReadyCallback) -> std::result::Result<(), (PjrtError, ReadyCallback)> {
        let Some(inner) = &self.inner else {
            callback(Ok(()));
            return Ok(());
        };
        let waiting = Box::into_raw(Box::new(Waiting { api: inner.api, callback }));
        // SAFETY: the event is alive; `fire` takes the box.
        let result = unsafe {
            inner.api.call::<abi::EventOnReady>(|a| {
                a.event = inner.raw.0;
                a.callback = Some(fire);
                a.user_arg = waiting.cast();
            })
        };
        match result {
            Ok(_) => Ok(()),
            // SAFETY: a refused registration does not call back, so the box is still ours.
            Err(e) => Err((e, unsafe { Box::from_raw(waiting) }.callback)),
        }
    }

    /// As `wait`, with a text of what was waited for.
    pub(crate) fn wait_named(&self, what: &str) -> Result<()> {
        self.wait().map_err(|e| PjrtError::new(e.code, format!("{what}: {}", e.message)))
    }
}
