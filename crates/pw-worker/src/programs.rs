//! Loading: from the cache into the serving process, on a thread of its own.

use std::sync::Arc;
use std::sync::mpsc::Receiver;

use bytes::Bytes;
use pw_exec::{Form, LoadedProgram};
use pw_pjrt::Client;
use pw_types::{ExecutableId, Status};

use crate::cache::Cache;
use crate::device::Program;
use crate::exec::{ExecSender, Message};
use crate::{convert, targets};

pub(crate) struct LoadJob {
    pub(crate) executable: ExecutableId,
    pub(crate) fingerprint: Bytes,
}

/// Serves loads until nobody can ask for any.
pub(crate) fn serve(jobs: &Receiver<LoadJob>, cache: &Cache, client: &Client, exec: &ExecSender) {
    while let Ok(LoadJob { executable, fingerprint }) = jobs.recv() {
        let result = load(&fingerprint, cache, client);
        exec.send(Message::Loaded { executable, result });
    }
}

fn load(key: &[u8], cache: &Cache, client: &Client) -> Result<Arc<Program>, Status> {
    let report = cache.report(key).ok_or_else(|| cache.missing(key))?;
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
    if executable.num_outputs() != report.outputs.len() {
        cache.forget(key);
        let text = format!("{} has {} outputs, its report {}", report.name, executable.num_outputs(), report.outputs.len());
        return Err(Status::internal(text));
    }
    let single = cache.single(key).and_then(|single| client.deserialize_and_load(&single).ok());
    let loaded = LoadedProgram { devices, form: Form::Gang, report: Arc::new(report) };
    Ok(Arc::new(Program::new(Arc::new(loaded), executable, single)))
}
