//! Layout texts, by the Layouts extension.
//!
//! A plugin without the extension, or with an older and shorter one, answers UNIMPLEMENTED.

use crate::abi::{self, EXT_LAYOUTS, Ptr};
use crate::client::Client;
use crate::error::{PjrtError, Result};
use crate::plugin::{Api, slice, text};
use crate::types::BufferType;

/// Byte offsets of the functions.
const DESTROY: usize = 24;
const SERIALIZE: usize = 32;
const CLIENT_DEFAULT: usize = 40;
const EXECUTABLE_OUTPUTS: usize = 64;
const EXECUTABLE_PARAMETERS: usize = 72;

fn missing() -> PjrtError {
    PjrtError::unimplemented("the plugin does not tell layouts")
}

pub(crate) fn default_layout(client: &Client, element_type: BufferType, dims: &[i64]) -> Result<String> {
    crate::types::element_count(dims)?;
    if element_type == BufferType::Token {
        // Some plugins abort the process over this.
        return Err(PjrtError::invalid("a token has no layout"));
    }
    let api = client.inner.api;
    let f = api.extension_fn(EXT_LAYOUTS, CLIENT_DEFAULT).ok_or_else(missing)?;
    // SAFETY: the client is alive and the dimensions live over the call.
    unsafe {
        let args = api.call_fn::<abi::ClientGetDefaultLayout>(f, |a| {
            a.client = client.inner.raw.0;
            a.element_type = element_type.pjrt();
            a.dims = dims.as_ptr();
            a.num_dims = dims.len();
        })?;
        let layout = layout_text(api, args.layout);
        if let Some(destroy) = api.extension_fn(EXT_LAYOUTS, DESTROY) {
            api.call_fn::<abi::LayoutDestroy>(destroy, |a| a.layout = args.layout)?;
        }
        layout
    }
}

/// Layouts of an executable's parameters (`true`) or outputs.
///
/// # Safety
/// `executable` is alive.
pub(crate) unsafe fn executable_layouts(api: &Api, executable: Ptr, parameters: bool) -> Result<Vec<String>> {
    let offset = if parameters { EXECUTABLE_PARAMETERS } else { EXECUTABLE_OUTPUTS };
    let f = api.extension_fn(EXT_LAYOUTS, offset).ok_or_else(missing)?;
    // SAFETY: the caller's promise; the handles in the list belong to the executable.
    unsafe {
        let args = api.call_fn::<abi::ExecutableGetLayouts>(f, |a| a.executable = executable)?;
        slice(args.layouts, args.num).iter().map(|&layout| layout_text(api, layout)).collect()
    }
}

/// # Safety
/// `layout` is alive.
unsafe fn layout_text(api: &Api, layout: Ptr) -> Result<String> {
    let f = api.extension_fn(EXT_LAYOUTS, SERIALIZE).ok_or_else(missing)?;
    // SAFETY: the caller's promise; the text is copied before its deleter runs.
    unsafe {
        let args = api.call_fn::<abi::LayoutSerialize>(f, |a| a.layout = layout)?;
        let out = text(args.bytes, args.bytes_size);
        if let Some(deleter) = args.deleter {
            deleter(args.serialized);
        }
        Ok(out)
    }
}
