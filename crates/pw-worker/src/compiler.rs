//! Compiles: cleaned options, a look into the cache, else the child process. A child that dies costs one compile.

use std::ffi::OsString;
use std::io::{self, BufReader};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};

use pw_exec::ExecEvent;
use pw_proto::control::{CompileChildRequest, CompileChildResponse};
use pw_types::{Code, CompileCommand, CompileReport, ExecutableId, Status};

use crate::cache::{Cache, Key};
use crate::exec::{ExecSender, Message};
use crate::{frames, options};

/// The child, as far as others may end it.
#[derive(Clone, Default)]
pub(crate) struct ChildSlot(Arc<Mutex<Slot>>);

#[derive(Default)]
struct Slot {
    child: Option<Child>,
    closed: bool,
}

impl ChildSlot {
    /// Ends the child, now and for good. Its work is of no use to anybody.
    pub(crate) fn close(&self) {
        let mut slot = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        slot.closed = true;
        if let Some(child) = &mut slot.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    fn set(&self, mut child: Child) -> io::Result<()> {
        let mut slot = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if slot.closed {
            let _ = child.kill();
            let _ = child.wait();
            return Err(io::Error::other("the worker ends"));
        }
        slot.child = Some(child);
        Ok(())
    }

    fn is_alive(&self) -> bool {
        let mut slot = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        slot.child.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }

    fn end(&self) -> Option<ExitStatus> {
        let child = self.0.lock().unwrap_or_else(PoisonError::into_inner).child.take();
        child.and_then(|mut child| {
            let _ = child.kill();
            child.wait().ok()
        })
    }
}

pub(crate) struct Compiler {
    pub(crate) command: Vec<OsString>,
    pub(crate) cache: Cache,
    /// The plugin's id of every device.
    pub(crate) device_ids: Vec<i32>,
    pub(crate) slot: ChildSlot,
}

struct Pipes {
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

/// A compile that the cache does not answer.
pub(crate) struct Miss {
    request: CompileChildRequest,
    key: Key,
}

/// Answers compiles out of the cache and passes the others on, until nobody can ask for any.
pub(crate) fn serve(jobs: &Receiver<CompileCommand>, misses: &Sender<Miss>, compiler: &Compiler, exec: &ExecSender) {
    while let Ok(job) = jobs.recv() {
        let executable = job.executable;
        let result = match compiler.look_up(job) {
            Ok(Found::Report(report)) => Ok(report),
            Ok(Found::Miss(miss)) => match misses.send(miss) {
                Ok(()) => continue,
                Err(_) => Err(Status::internal("the compile thread has ended")),
            },
            Err(status) => Err(status),
        };
        exec.send(Message::Event(ExecEvent::Compiled { executable, result: result.map(Arc::new) }));
    }
}

/// Has the child compile, one program at a time, until nobody can ask for any.
pub(crate) fn serve_misses(misses: &Receiver<Miss>, compiler: &Compiler, exec: &ExecSender) {
    // The first program need not wait for the child to load the plugin.
    let mut pipes = compiler.spawn().ok();
    while let Ok(Miss { request, key }) = misses.recv() {
        // The same program may have been before it in the queue.
        let result = match compiler.cache.report(&key) {
            Some(report) => Ok(report),
            None => compiler.ask(&request, &mut pipes),
        };
        let executable = ExecutableId(request.id);
        exec.send(Message::Event(ExecEvent::Compiled { executable, result: result.map(Arc::new) }));
    }
}

enum Found {
    Report(CompileReport),
    Miss(Miss),
}

impl Compiler {
    fn look_up(&self, job: CompileCommand) -> Result<Found, Status> {
        let ids: Option<Vec<i32>> = match &job.devices[..] {
            // For members of a gang: the child makes a client of so many devices, which it numbers from 0.
            [] => Some((0..).take(job.partitions as usize).collect()),
            devices => devices.iter().map(|&d| self.device_ids.get(d as usize).copied()).collect(),
        };
        let known = || Status::internal(format!("devices {:?} of a worker with {}", job.devices, self.device_ids.len()));
        let options = options::clean(&job.options, &ids.ok_or_else(known)?, job.replicas, job.partitions)?;
        let gang = job.devices.is_empty();
        let key = self.cache.key(&job.program, &options, gang);
        if let Some(report) = self.cache.report(&key) {
            return Ok(Found::Report(report));
        }
        let CompileCommand { program, devices, replicas, partitions, executable, .. } = job;
        let request = CompileChildRequest { id: executable.0, program, options: options.into(), devices, replicas, partitions };
        Ok(Found::Miss(Miss { request, key }))
    }

    fn ask(&self, request: &CompileChildRequest, pipes: &mut Option<Pipes>) -> Result<CompileReport, Status> {
        let unavailable = |text| Status::new(Code::Unavailable, text);
        if pipes.is_none() || !self.slot.is_alive() {
            let command = self.command.first().cloned().unwrap_or_default();
            let started = self.spawn().map_err(|e| unavailable(format!("cannot start the compile process {}: {e}", command.display())));
            *pipes = Some(started?);
        }
        let pipe = pipes.as_mut().expect("just started");
        match exchange(pipe, request) {
            Ok(response) => response.result.map(|compiled| compiled.report),
            Err(error) => {
                *pipes = None;
                let how = match self.slot.end() {
                    Some(status) => format!("{status}"),
                    None => "it was gone already".to_owned(),
                };
                tracing::warn!(%error, %how, "the compile process died");
                Err(unavailable(format!(
                    "the compile process died while it compiled this program ({how}); other programs are not affected"
                )))
            }
        }
    }

    fn spawn(&self) -> io::Result<Pipes> {
        let (program, arguments) = self.command.split_first().ok_or_else(|| io::Error::other("no command for it"))?;
        let mut child = Command::new(program)
            .args(arguments)
            .env("TF_CPP_MIN_LOG_LEVEL", std::env::var_os("TF_CPP_MIN_LOG_LEVEL").unwrap_or_else(|| "3".into()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        self.slot.set(child)?;
        match (input, output) {
            (Some(input), Some(output)) => Ok(Pipes { input, output: BufReader::new(output) }),
            _ => Err(io::Error::other("it has no pipes")),
        }
    }
}

fn exchange(pipes: &mut Pipes, request: &CompileChildRequest) -> io::Result<CompileChildResponse> {
    frames::write(&mut pipes.input, request)?;
    match frames::read::<CompileChildResponse>(&mut pipes.output)? {
        Some(response) if response.id == request.id => Ok(response),
        Some(response) => Err(io::Error::other(format!("an answer to request {} instead of {}", response.id, request.id))),
        None => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}
