//! The pure core, the store of real buffers, and the hands that carry out what the core orders. It shares a thread with
//! the control stream, so that no command and no report waits for a thread to wake.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use pw_exec::{BackingKey, ExecCore, ExecEffect, ExecEvent, StartLaunch, StartRead, StartWrite};
use pw_net::gang::GangNet;
use pw_pjrt::AlignedBlock;
use pw_types::{Command, CompileCommand, DType, Dims, ExecutableId, Handle, Report, SessionId, Status};
use rustc_hash::FxHashMap;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};

use crate::convert;
use crate::describe::DescribeJob;
use crate::device::{Clock, DeviceJob, Program};
use crate::launch::{self, LaunchJob};
use crate::peers::Peers;
use crate::programs::LoadJob;
use crate::store::Store;
use crate::transfer::{self, TransferJob, Transfers};

/// Messages of one turn; reports leave between turns.
const TURN_MAX: usize = 256;

/// Time of one turn that may go into launches on the spot.
const BRIEF_LAUNCHES: Duration = Duration::from_micros(500);

/// Memory of this size and more is given back on another thread: it takes the kernel milliseconds.
const SLOW_DROP_BYTES: u64 = 1 << 20;

pub(crate) enum Message {
    /// A frame of the controller.
    Commands(Vec<Command>),
    Event(ExecEvent),
    /// Device threads have finished a launch.
    LaunchDone {
        start: Arc<StartLaunch>,
        event: ExecEvent,
    },
    Landed {
        session: SessionId,
        buffer: Handle,
        block: AlignedBlock,
    },
    Loaded {
        executable: ExecutableId,
        result: Result<Arc<Program>, Status>,
    },
}

/// The way in, from any thread. Sending to one that has ended does nothing: the process is ending too.
#[derive(Clone)]
pub(crate) struct ExecSender(pub(crate) UnboundedSender<Message>);

impl ExecSender {
    pub(crate) fn send(&self, message: Message) {
        let _ = self.0.send(message);
    }
}

/// Where effects go.
pub(crate) struct Outlets {
    /// By device.
    pub(crate) devices: Vec<Sender<DeviceJob>>,
    pub(crate) clock: Arc<Clock>,
    pub(crate) transfers: Transfers,
    pub(crate) peers: Peers,
    pub(crate) gang: GangNet,
    pub(crate) uploads: Sender<TransferJob>,
    pub(crate) copies: Sender<TransferJob>,
    pub(crate) compiles: Sender<CompileCommand>,
    pub(crate) loads: Sender<LoadJob>,
    pub(crate) questions: Sender<DescribeJob>,
    /// Things whose end takes long.
    pub(crate) drops: Sender<Box<dyn Send>>,
    pub(crate) reports: UnboundedSender<Vec<Report>>,
    pub(crate) fatal: UnboundedSender<String>,
}

pub(crate) struct Exec {
    core: ExecCore,
    store: Store,
    blocks: FxHashMap<(SessionId, Handle), AlignedBlock>,
    programs: FxHashMap<ExecutableId, Arc<Program>>,
    outlets: Outlets,
    /// Launches that each device thread has.
    outstanding: Vec<u32>,
    /// What is left of [`BRIEF_LAUNCHES`].
    brief_left: Duration,
    effects: Vec<ExecEffect>,
    /// Answers to effects that were carried out at once.
    answers: VecDeque<ExecEvent>,
    reports: Vec<Report>,
    stopped: bool,
}

impl Exec {
    pub(crate) fn new(core: ExecCore, outlets: Outlets) -> Exec {
        Exec {
            core,
            store: Store::default(),
            blocks: FxHashMap::default(),
            programs: FxHashMap::default(),
            outstanding: vec![0; outlets.devices.len()],
            brief_left: BRIEF_LAUNCHES,
            outlets,
            effects: Vec::new(),
            answers: VecDeque::new(),
            reports: Vec::new(),
            stopped: false,
        }
    }

    /// Works turn by turn until something fatal happens. Others have their turns between two of its own.
    pub(crate) async fn serve(mut self, mut messages: UnboundedReceiver<Message>) {
        let mut batch = Vec::with_capacity(TURN_MAX);
        while !self.stopped && messages.recv_many(&mut batch, TURN_MAX).await > 0 {
            batch.drain(..).for_each(|message| self.take(message));
            self.step(ExecEvent::EndOfTurn);
            self.brief_left = BRIEF_LAUNCHES;
            if !self.reports.is_empty() {
                // Nobody listens: the connection is gone and the process ends.
                let _ = self.outlets.reports.send(std::mem::take(&mut self.reports));
            }
            tokio::task::yield_now().await;
        }
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::Commands(commands) => commands.into_iter().for_each(|command| self.step(ExecEvent::Command(command))),
            Message::LaunchDone { start, event } => {
                start.threads().iter().for_each(|&thread| self.outstanding[thread as usize] -= 1);
                self.step(event);
            }
            Message::Event(event) => self.step(event),
            Message::Landed { session, buffer, block } => {
                let bytes = block.len() as u64;
                self.blocks.insert((session, buffer), block);
                self.step(ExecEvent::Landed { session, buffer, bytes });
            }
            Message::Loaded { executable, result } => {
                let result = result.map(|program| {
                    let loaded = program.loaded.clone();
                    self.programs.insert(executable, program);
                    loaded
                });
                self.step(ExecEvent::Loaded { executable, result });
            }
        }
    }

    fn step(&mut self, event: ExecEvent) {
        self.answers.push_back(event);
        while let Some(event) = self.answers.pop_front() {
            let mut effects = std::mem::take(&mut self.effects);
            self.core.handle(event, &mut effects);
            for effect in effects.drain(..) {
                self.carry_out(effect);
            }
            self.effects = effects;
        }
    }

    fn carry_out(&mut self, effect: ExecEffect) {
        match effect {
            ExecEffect::Launch(start) => self.launch(start),
            ExecEffect::Copy(start) => {
                let sources = start.items.iter().map(|i| self.store.get(i.backing)).collect();
                let output = self.store.create(start.output, start.items.len());
                self.transfer(TransferJob::Copy { start, sources, output });
            }
            ExecEffect::Write(start) => self.write(start),
            ExecEffect::Read(start) => self.read(start),
            ExecEffect::Send(start) => {
                let sources: Vec<_> = start.sources.iter().map(|part| (self.store.get(part.backing), part.first)).collect();
                let bytes = sources.iter().map(|(stored, shard)| transfer::shard_bytes(stored, *shard)).collect();
                self.outlets.peers.send(&start, bytes);
            }
            ExecEffect::SendFailed { command, status } => self.outlets.peers.fail(command, status),
            ExecEffect::StopSend { run } => self.outlets.peers.stop(run),
            ExecEffect::ReadFailed { session, buffer, status } => {
                self.outlets.transfers.data.offer_failed(session, buffer, Status::clone(&status));
            }
            ExecEffect::Drop { backing } => self.forget(backing),
            ExecEffect::DropUpload { session, buffer } => drop(self.blocks.remove(&(session, buffer))),
            ExecEffect::Compile(command) => self.send("compile", |o| o.compiles.send(command).is_ok()),
            ExecEffect::Neighbours(gang) => {
                gang.others.iter().for_each(|peer| self.outlets.gang.neighbour(peer.slot, peer.incarnation, &peer.address))
            }
            ExecEffect::Abandon { run, status } => self.outlets.gang.abandon(run.0, status),
            ExecEffect::Load { executable, fingerprint, gang } => {
                self.send("load", |o| o.loads.send(LoadJob { executable, fingerprint, gang }).is_ok());
            }
            ExecEffect::Unload { executable } => {
                if let Some(program) = self.programs.remove(&executable) {
                    self.send("drop", |o| o.drops.send(Box::new(program)).is_ok());
                }
            }
            ExecEffect::Describe { query, fingerprint, question } => {
                self.send("describe", |o| o.questions.send(DescribeJob { query, fingerprint, question }).is_ok());
            }
            ExecEffect::Layout { query, dtype, dims } => {
                let result = self.layout(dtype, &dims);
                self.answers.push_back(ExecEvent::Layout { query, result });
            }
            ExecEffect::Report(report) => self.reports.push(report),
            ExecEffect::Fatal(text) => self.die(text),
        }
    }

    /// Puts something into the queue of a thread, which lives as long as this one.
    fn send(&mut self, what: &str, send: impl FnOnce(&Outlets) -> bool) {
        if !send(&self.outlets) {
            self.die(format!("the {what} thread has ended"));
        }
    }

    fn die(&mut self, text: String) {
        self.stopped = true;
        let _ = self.outlets.fatal.send(text);
    }

    fn launch(&mut self, start: Arc<StartLaunch>) {
        let Some(program) = self.programs.get(&start.executable).cloned() else {
            return self.die(format!("executable {} is launched but not here", start.executable));
        };
        let sources = start.parts.iter().map(|part| self.store.get(part.backing)).collect();
        let shards = start.program.total as usize;
        let outputs = start.outputs.iter().map(|&key| self.store.create(key, shards)).collect();
        // Threads less to wake. They have nothing, so nobody else is on these devices.
        let idle = start.threads().iter().all(|&thread| self.outstanding[thread as usize] == 0);
        let at_once = idle && start.brief && !self.brief_left.is_zero();
        let job = LaunchJob::new(start.clone(), program, sources, outputs);
        if at_once {
            let begun = Instant::now();
            let done = launch::run_all(job, &self.outlets.clock);
            self.brief_left = self.brief_left.saturating_sub(begun.elapsed());
            if let Message::LaunchDone { event, .. } = done {
                self.answers.push_back(event);
            }
            return;
        }
        start.threads().iter().for_each(|&thread| self.outstanding[thread as usize] += 1);
        if start.one_thread {
            return self.send("device", |o| o.devices[start.thread as usize].send(DeviceJob::All(job)).is_ok());
        }
        // None is left here: the last hold that goes is the one that says how the launch ended.
        let jobs = std::iter::repeat_n(Arc::new(job), start.program.devices.len());
        self.send("device", |o| {
            let mut members = start.program.devices.iter().zip(jobs).enumerate();
            members.all(|(member, (&device, job))| o.devices[device as usize].send(DeviceJob::Member(job, member)).is_ok())
        });
    }

    fn write(&mut self, start: Arc<StartWrite>) {
        let session = start.command.sender;
        let blocks: Option<Vec<AlignedBlock>> =
            start.command.sources.iter().map(|source| self.blocks.remove(&(session, source.buffer))).collect();
        let Some(blocks) = blocks else {
            return self.die(format!("run {} wants an upload that is not here", start.command.order.run));
        };
        let output = self.store.create(start.output, start.command.shards as usize);
        self.transfer(TransferJob::Write { start, blocks, output });
    }

    fn read(&mut self, start: Arc<StartRead>) {
        let sources = start.sources.iter().map(|part| self.store.get(part.backing)).collect();
        self.transfer(TransferJob::Read { start, sources });
    }

    fn transfer(&mut self, job: TransferJob) {
        if job.is_small() {
            let answer = self.outlets.transfers.run(job);
            self.answers.push_back(answer);
        } else if matches!(job, TransferJob::Write { .. }) {
            self.send("upload", |o| o.uploads.send(job).is_ok());
        } else {
            self.send("copy", |o| o.copies.send(job).is_ok());
        }
    }

    fn forget(&mut self, backing: BackingKey) {
        let Some(stored) = self.store.remove(backing) else { return };
        if stored.bytes() >= SLOW_DROP_BYTES {
            self.send("drop", |o| o.drops.send(Box::new(stored)).is_ok());
        }
    }

    fn layout(&self, dtype: DType, dims: &Dims) -> Result<String, Status> {
        let element_type = convert::buffer_type(dtype)?;
        self.outlets.transfers.client.default_layout(element_type, dims).map_err(convert::status)
    }
}
