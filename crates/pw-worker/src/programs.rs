//! Loading: from the cache into the serving process, on a thread of its own.

use std::sync::Arc;
use std::sync::mpsc::Receiver;

use bytes::Bytes;
use pw_exec::{Form, LoadedProgram};
use pw_net::gang::GangNet;
use pw_pjrt::{Client, LoadedExecutable};
use pw_types::{CompileReport, ExecutableId, GangPart, Status};

use crate::cache::Cache;
use crate::device::{Program, Runner};
use crate::exec::{ExecSender, Message};
use crate::gang::Gang;
use crate::host_callback::Callbacks;
use crate::per_device::{self, MemberProgram, PerDevice};
use crate::team::Team;
use crate::{convert, targets};

pub(crate) struct LoadJob {
    pub(crate) executable: ExecutableId,
    pub(crate) fingerprint: Bytes,
    /// Where other workers have members.
    pub(crate) gang: Option<Arc<GangPart>>,
}

/// Serves loads until nobody can ask for any.
pub(crate) fn serve(jobs: &Receiver<LoadJob>, cache: &Cache, client: &Client, callbacks: &Callbacks, net: &GangNet, exec: &ExecSender) {
    while let Ok(LoadJob { executable, fingerprint, gang }) = jobs.recv() {
        let result = match gang {
            Some(gang) => load_gang(&fingerprint, cache, client, callbacks, (net, exec), &gang),
            None => load(&fingerprint, cache, client, callbacks),
        };
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
    let executable = deserialize(&program, key, cache, client, &report)?;
    let devices: Vec<u32> = executable.devices().iter().map(|&d| d as u32).collect();
    let gang = Gang::new(executable, callbacks).map_err(convert::status)?;
    let loaded = LoadedProgram::local(devices, Form::Gang, Arc::new(report));
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
        let members: Vec<u32> = (0..).take(devices.len()).collect();
        let total = members.len() as u32;
        PerDevice::new(executable, (&members, total), collectives, callbacks, None).map_err(convert::status)
    });
    match loaded {
        Ok(program) => {
            let loaded = LoadedProgram::local(devices, Form::PerDevice, Arc::new(report.clone()));
            Some(Arc::new(Program::new(Arc::new(loaded), Runner::PerDevice(program))))
        }
        Err(error) => {
            tracing::warn!(%error, program = %report.name, "the form for one device at a time cannot be loaded; the plugin's own is used");
            None
        }
    }
}

/// This worker's part of a program over several.
fn load_gang(
    key: &[u8],
    cache: &Cache,
    client: &Client,
    callbacks: &Callbacks,
    (net, exec): (&GangNet, &ExecSender),
    gang: &GangPart,
) -> Result<Arc<Program>, Status> {
    let report = cache.report(key).ok_or_else(|| cache.missing(key))?;
    let program = cache.member(key).and_then(|bytes| MemberProgram::decode(&bytes)).ok_or_else(|| {
        // An entry without it serves nobody, and would be found again and again.
        cache.forget(key);
        cache.missing(key)
    })?;
    let executable = deserialize(&program.executable, key, cache, client, &report)?;
    let (members, devices): (Vec<u32>, Vec<u32>) = gang.here.iter().map(|m| (m.member, m.device)).unzip();
    let callbacks = report.host_callbacks.then_some(callbacks);
    let team = Team::new(net.clone(), gang, exec.clone());
    let runner = PerDevice::new(executable, (&members, gang.members), program.collectives, callbacks, Some(team));
    let runner = Runner::PerDevice(runner.map_err(convert::status)?);
    let loaded = LoadedProgram { devices, members, total: gang.members, form: Form::PerDevice, report: Arc::new(report) };
    Ok(Arc::new(Program::new(Arc::new(loaded), runner)))
}

/// What this plugin does not take would be found again and again, so it goes. For want of a LAPACK only others can use it.
fn deserialize(program: &[u8], key: &[u8], cache: &Cache, client: &Client, report: &CompileReport) -> Result<LoadedExecutable, Status> {
    let executable = client.deserialize_and_load(program).map_err(|error| {
        let status = convert::status(error);
        let mut status = targets::without_lapack(&status).unwrap_or_else(|| {
            cache.forget(key);
            status
        });
        status.message = format!("cannot load {}: {}", report.name, status.message);
        status
    })?;
    check_outputs(&executable, report).inspect_err(|_| cache.forget(key))?;
    Ok(executable)
}

fn check_outputs(executable: &LoadedExecutable, report: &CompileReport) -> Result<(), Status> {
    if executable.num_outputs() == report.outputs.len() {
        return Ok(());
    }
    Err(Status::internal(format!("{} has {} outputs, its report {}", report.name, executable.num_outputs(), report.outputs.len())))
}
