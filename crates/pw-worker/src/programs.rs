//! Loading: from the cache into the serving process, on a thread of its own.

use std::sync::Arc;
use std::sync::mpsc::Receiver;

use bytes::Bytes;
use pw_exec::{Form, LoadedProgram};
use pw_pjrt::{Client, LoadedExecutable};
use pw_types::{CompileReport, ExecutableId, Status};

use crate::cache::Cache;
use crate::device::{Program, Runner};
use crate::exec::{ExecSender, Message};
use crate::gang::Gang;
use crate::host_callback::Callbacks;
use crate::per_device::{self, MemberProgram, PerDevice};
use crate::{convert, targets};

pub(crate) struct LoadJob {
    pub(crate) executable: ExecutableId,
    pub(crate) fingerprint: Bytes,
}

/// Serves loads until nobody can ask for any.
pub(crate) fn serve(jobs: &Receiver<LoadJob>, cache: &Cache, client: &Client, callbacks: &Callbacks, exec: &ExecSender) {
    while let Ok(LoadJob { executable, fingerprint }) = jobs.recv() {
        let result = load(&fingerprint, cache, client, callbacks);
        exec.send(Message::Loaded { executable, result });
    }
}

fn load(key: &[u8], cache: &Cache, client: &Client, callbacks: &Callbacks) -> Result<Arc<Program>, Status> {
    let report = cache.report(key).ok_or_else(|| cache.missing(key))?;
    let callbacks = report.host_callbacks.then_some(callbacks);
    if let Some(program) = per_device(key, cache, client, &report, callbacks) {
        return Ok(program);
    }
    let program = cache.program(key).ok_or_else(|| cache.missing(key))?;
    let executable = client.deserialize_and_load(&program).map_err(|error| {
        // What this plugin does not take would be found again and again. For want of a LAPACK only others can use it.
        let status = convert::status(error);
        let mut status = targets::without_lapack(&status).unwrap_or_else(|| {
            cache.forget(key);
            status
        });
        status.message = format!("cannot load {}: {}", report.name, status.message);
        status
    })?;
    let devices: Vec<u32> = executable.devices().iter().map(|&d| d as u32).collect();
    check_outputs(&executable, &report).inspect_err(|_| cache.forget(key))?;
    let gang = Gang::new(executable, callbacks).map_err(convert::status)?;
    let loaded = LoadedProgram { devices, form: Form::Gang, report: Arc::new(report) };
    Ok(Arc::new(Program::new(Arc::new(loaded), Runner::Gang(gang))))
}

/// The form for one device at a time, where the compile process has made one and this process can run it.
fn per_device(key: &[u8], cache: &Cache, client: &Client, report: &CompileReport, callbacks: Option<&Callbacks>) -> Option<Arc<Program>> {
    if !per_device::is_possible() {
        return None;
    }
    let MemberProgram { devices, collectives, executable } = MemberProgram::decode(&cache.member(key)?)?;
    let loaded = client.deserialize_and_load(&executable).map_err(convert::status).and_then(|executable| {
        check_outputs(&executable, report)?;
        PerDevice::new(executable, devices.len(), collectives, callbacks).map_err(convert::status)
    });
    match loaded {
        Ok(program) => {
            let loaded = LoadedProgram { devices, form: Form::PerDevice, report: Arc::new(report.clone()) };
            Some(Arc::new(Program::new(Arc::new(loaded), Runner::PerDevice(program))))
        }
        Err(error) => {
            tracing::warn!(%error, program = %report.name, "the form for one device at a time cannot be loaded; the plugin's own is used");
            None
        }
    }
}

fn check_outputs(executable: &LoadedExecutable, report: &CompileReport) -> Result<(), Status> {
    if executable.num_outputs() == report.outputs.len() {
        return Ok(());
    }
    Err(Status::internal(format!("{} has {} outputs, its report {}", report.name, executable.num_outputs(), report.outputs.len())))
}
