//! Running an executable, and the context that a run carries to the handlers it calls.

use std::any::Any;
use std::ffi::c_int;
use std::sync::Arc;

use crate::abi::{self, EXT_FFI, Padded, Ptr};
use crate::buffer::Buffer;
use crate::client::Client;
use crate::error::{PjrtError, Result};
use crate::event::Event;
use crate::executable::LoadedExecutable;
use crate::ffi::FfiType;
use crate::plugin::{Api, Handle, Plugin};

/// Byte offset of the function in the FFI extension.
const USER_DATA_ADD: usize = 32;

/// What handlers find behind a context: any shared value.
pub type UserData = Arc<dyn Any + Send + Sync>;

struct ContextInner {
    api: &'static Api,
    raw: Handle,
    /// The plugin holds the addresses of these, so they stay where they are.
    user_data: Box<[UserData]>,
}

impl Drop for ContextInner {
    fn drop(&mut self) {
        // SAFETY: ours, and no run uses it any more: a run holds a clone until it is done.
        unsafe { self.api.release::<abi::ExecuteContextDestroy>(|a| a.context = self.raw.0) }
    }
}

/// Values for the handlers of a run, by type. Clones are the same context, which may serve many
/// runs.
#[derive(Clone)]
pub struct ExecuteContext {
    inner: Arc<ContextInner>,
}

impl std::fmt::Debug for ExecuteContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExecuteContext").field("values", &self.inner.user_data.len()).finish()
    }
}

impl ExecuteContext {
    pub(crate) fn empty(api: &'static Api) -> Result<Self> {
        // SAFETY: no pointers go in.
        let raw = unsafe { api.call::<abi::ExecuteContextCreate>(|_| {})?.context };
        if raw.is_null() {
            return Err(PjrtError::internal("the plugin created a null context"));
        }
        let inner = ContextInner { api, raw: Handle(raw), user_data: Box::default() };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// A context with one value per type, as handlers see them by `CallFrame::user_data`.
    pub fn new(plugin: Plugin, values: Vec<(FfiType, UserData)>) -> Result<Self> {
        let mut context = Self::empty(plugin.api)?;
        let add =
            plugin.api.extension_fn(EXT_FFI, USER_DATA_ADD).ok_or_else(|| PjrtError::unimplemented("the plugin has no FFI user data"))?;
        let inner = Arc::get_mut(&mut context.inner).expect("just made");
        let (types, values): (Vec<FfiType>, Vec<UserData>) = values.into_iter().unzip();
        inner.user_data = values.into();
        for (ffi_type, value) in types.into_iter().zip(&inner.user_data) {
            // SAFETY: the values live, in place, as long as the context.
            unsafe {
                plugin.api.call_fn::<abi::FfiUserDataAdd>(add, |a| {
                    a.context = inner.raw.0;
                    a.type_id = ffi_type.id();
                    a.data = (&raw const *value).cast_mut().cast();
                })?;
            }
        }
        Ok(context)
    }
}

/// How to run.
#[derive(Debug, Clone, Copy, Default)]
pub struct ExecuteOptions<'a> {
    /// Arguments that must not be donated although the program would.
    pub non_donatable: &'a [i64],
    /// Run on this device only (index into `Client::devices`), with one argument list. For
    /// executables of one partition, such as `LoadedExecutable::per_device` gives.
    pub only_device: Option<usize>,
    /// Values for handlers.
    pub context: Option<&'a ExecuteContext>,
    /// Number of the launch, equal on all processes.
    pub launch_id: i32,
}

/// A run in progress, or done.
#[derive(Debug)]
pub struct Execution {
    /// Outputs, per device in the order of the argument lists.
    pub outputs: Vec<Vec<Buffer>>,
    /// Completion, per device.
    pub done: Vec<Event>,
}

impl LoadedExecutable {
    /// Runs it. `args` has one list per device, in the order of `addressable_device_ids`, or one
    /// list if `only_device` is set.
    ///
    /// The call may run the whole program before it returns, and it may block. An error comes
    /// from here, or from the events in the result. The plugin checks the *bytes* of each
    /// argument, not its type or shape: compare with `ExecMeta::params` first.
    pub fn execute(&self, args: &[Vec<&Buffer>], options: ExecuteOptions<'_>) -> Result<Execution> {
        let client = self.client();
        if options.only_device.is_some() && self.num_devices() > 1 {
            // The CPU plugin counts this as the launch of a gang of which the others never come:
            // every later launch of a gang waits for ever.
            return Err(PjrtError::invalid(format!(
                "only_device on an executable of {} devices; use LoadedExecutable::per_device",
                self.num_devices()
            )));
        }
        let num_devices = if options.only_device.is_some() { 1 } else { self.num_devices() };
        let num_args = check_arguments(client, args, num_devices)?;
        let execute_device = match options.only_device {
            None => std::ptr::null_mut(),
            Some(index) => client.raw_device(index)?,
        };
        let context = options.context.or(client.inner.default_context.as_ref());

        let raw_args: Vec<Vec<Ptr>> = args.iter().map(|list| list.iter().map(|b| b.raw()).collect()).collect();
        let argument_lists: Vec<*const Ptr> = raw_args.iter().map(|list| list.as_ptr()).collect();
        let num_outputs = self.num_outputs();
        let mut raw_outputs = vec![vec![std::ptr::null_mut(); num_outputs]; num_devices];
        let output_lists: Vec<*mut Ptr> = raw_outputs.iter_mut().map(|list| list.as_mut_ptr()).collect();
        let mut events: Vec<Ptr> = vec![std::ptr::null_mut(); num_devices];

        let mut run = Padded::<abi::RawExecuteOptions>::new();
        run.args.launch_id = options.launch_id as c_int;
        run.args.non_donatable = options.non_donatable.as_ptr();
        run.args.num_non_donatable = options.non_donatable.len();
        run.args.context = context.map_or(std::ptr::null_mut(), |c| c.inner.raw.0);
        // SAFETY: the lists have `num_devices` entries of `num_args` and `num_outputs` each, and
        // live over the call; the buffers are borrowed; the context is kept below.
        unsafe {
            client.inner.api.call::<abi::LoadedExecutableExecute>(|a| {
                a.executable = self.raw();
                a.options = &raw const run.args;
                a.argument_lists = argument_lists.as_ptr();
                a.num_devices = num_devices;
                a.num_args = num_args;
                a.output_lists = output_lists.as_ptr();
                a.device_complete_events = events.as_mut_ptr();
                a.execute_device = execute_device;
            })?;
        }
        let done: Vec<Event> = events.into_iter().map(|raw| Event::from_raw(client.inner.api, raw)).collect();
        if let Some(context) = options.context {
            keep_until_done(context, &done);
        }
        // Take over every output before looking for a fault, so that none leaks.
        let outputs: Vec<Vec<Result<Buffer>>> =
            raw_outputs.into_iter().map(|list| list.into_iter().map(|raw| Buffer::from_raw(client, raw)).collect()).collect();
        let outputs = outputs.into_iter().map(|list| list.into_iter().collect()).collect::<Result<_>>()?;
        Ok(Execution { outputs, done })
    }
}

/// Holds a context for runs that have not finished yet.
fn keep_until_done(context: &ExecuteContext, done: &[Event]) {
    for event in done.iter().filter(|e| !e.is_ready()) {
        event.keep_until_ready(context.clone());
    }
}

/// One list per device, all of one length, all of this client.
fn check_arguments(client: &Client, args: &[Vec<&Buffer>], num_devices: usize) -> Result<usize> {
    if args.len() != num_devices {
        return Err(PjrtError::invalid(format!("{} argument lists for {num_devices} devices", args.len())));
    }
    let num_args = args.first().map_or(0, Vec::len);
    if args.iter().any(|list| list.len() != num_args) {
        return Err(PjrtError::invalid("argument lists of different lengths"));
    }
    let foreign = |b: &&Buffer| !Arc::ptr_eq(&b.client().inner, &client.inner);
    if args.iter().flatten().any(foreign) {
        return Err(PjrtError::invalid("an argument belongs to another client"));
    }
    Ok(num_args)
}
