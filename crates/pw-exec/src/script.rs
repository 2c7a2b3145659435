//! Scripts for tests: short ways to say commands and events, and effects as one line of text each.

use std::sync::Arc;

use bytes::Bytes;
use pw_types::*;

use crate::{ExecConfig, ExecCore, ExecEffect, ExecEvent, Form, LoadedProgram, Part};

pub(crate) struct Script {
    pub(crate) core: ExecCore,
    seq: u64,
}

pub(crate) const SESSION: SessionId = SessionId(7);

/// Another worker's name.
pub(crate) const SENDER: SessionId = SessionId(1 << 63);

impl Script {
    pub(crate) fn new(devices: usize) -> Script {
        Script::with_ahead(devices, 32)
    }

    pub(crate) fn with_ahead(devices: usize, ahead_max: u32) -> Script {
        let config = ExecConfig { default_memory_kinds: vec!["device".to_owned(); devices], ahead_max };
        Script { core: ExecCore::new(config), seq: 0 }
    }

    /// Plays one event and gives its effects, one per line. The books are checked each time.
    pub(crate) fn event(&mut self, event: ExecEvent) -> Vec<String> {
        let mut fx = Vec::new();
        self.core.handle(event, &mut fx);
        self.core.audit().expect("the books balance");
        fx.iter().map(render).collect()
    }

    pub(crate) fn command(&mut self, command: Command) -> Vec<String> {
        self.event(ExecEvent::Command(command))
    }

    pub(crate) fn order(&mut self, run: u64) -> NodeOrder {
        let previous = GrantSeq(self.seq);
        self.seq += 1;
        NodeOrder { run: RunId(run), seq: GrantSeq(self.seq), previous, session: SESSION }
    }

    /// Loads executable `id` with `f32[4]` parameters and outputs on these devices.
    pub(crate) fn program(&mut self, id: u64, devices: &[u32], parameters: u32, outputs: u32, donated: &[u32]) {
        self.load(id, program(devices, parameters, outputs, donated));
    }

    pub(crate) fn load(&mut self, id: u64, program: Arc<LoadedProgram>) {
        self.command(Command::Load { executable: ExecutableId(id), fingerprint: Bytes::new(), gang: None });
        self.event(ExecEvent::Loaded { executable: ExecutableId(id), result: Ok(program) });
    }

    /// A host write of `f32[4]` to each of these devices from host buffer `buffer`.
    pub(crate) fn write(&mut self, run: u64, buffer: u64, devices: &[u32]) -> Vec<String> {
        let targets = (0..).zip(devices).map(|(shard, &device)| HostWriteTarget { shard, device, region: None }).collect();
        let source = HostWriteSource { buffer: Handle(buffer), dtype: DType::F32, dims: vec![4], byte_strides: None, targets };
        let shards = u32::try_from(devices.len()).unwrap();
        let order = self.order(run);
        self.command(Command::HostWrite(HostWrite { order, sender: SESSION, sources: vec![source], memory_kind: None, shards }))
    }

    /// A host write that is there at once.
    pub(crate) fn array(&mut self, run: u64, devices: &[u32]) {
        self.land(run);
        assert_eq!(self.write(run, run, devices), [format!("write r{run}")]);
        self.event(ExecEvent::WriteDone { run: RunId(run), result: Ok(vec![16; devices.len()]) });
    }

    pub(crate) fn land(&mut self, buffer: u64) -> Vec<String> {
        self.event(ExecEvent::Landed { session: SESSION, buffer: Handle(buffer), bytes: 0 })
    }

    /// A launch whose arguments are all shards of output 0 of these runs; a negative run is donated.
    pub(crate) fn launch(&mut self, run: u64, executable: u64, shards: u32, arguments: &[i64]) -> Vec<String> {
        let order = self.order(run);
        let arguments = arguments
            .iter()
            .map(|&a| Argument { segments: vec![Segment { buffer: id(a.unsigned_abs()), first: 0, count: shards }], donate: a < 0 })
            .collect();
        self.command(Command::Launch(Launch { order, executable: ExecutableId(executable), arguments, launch_id: 0 }))
    }

    pub(crate) fn copy(&mut self, run: u64, source: u64, devices: &[u32]) -> Vec<String> {
        let order = self.order(run);
        let items = (0..).zip(devices).map(|(shard, &device)| CopyItem { source: ShardId { buffer: id(source), shard }, device });
        self.command(Command::Copy(CopyShards { order, items: items.collect(), memory_kind: None }))
    }

    /// A read of shard 0 of output 0 of `source`.
    pub(crate) fn read(&mut self, run: u64, source: u64) -> Vec<String> {
        let order = self.order(run);
        let pieces = vec![HostReadPiece { source: ShardId { buffer: id(source), shard: 0 }, region: None }];
        let (buffer, dtype) = (Handle(run), DType::F32);
        self.command(Command::HostRead(HostRead { order, buffer, dtype, dims: vec![4], byte_strides: None, pieces }))
    }

    /// Shard 0 of output 0 of `source` goes to another worker.
    pub(crate) fn send(&mut self, run: u64, source: u64) -> Vec<String> {
        let order = self.order(run);
        let items = vec![SendItem { source: ShardId { buffer: id(source), shard: 0 }, buffer: Handle(run) }];
        let (address, receiver) = ("b:1".to_owned(), Incarnation(2));
        self.command(Command::Send(SendShards { order, address, receiver, sender: SENDER, items }))
    }

    /// Shard 0 of one comes from another worker.
    pub(crate) fn receive(&mut self, run: u64, device: u32) -> Vec<String> {
        let order = self.order(run);
        let targets = vec![HostWriteTarget { shard: 0, device, region: None }];
        let source = HostWriteSource { buffer: Handle(run), dtype: DType::F32, dims: vec![4], byte_strides: None, targets };
        self.command(Command::HostWrite(HostWrite { order, sender: SENDER, sources: vec![source], memory_kind: None, shards: 1 }))
    }

    pub(crate) fn free(&mut self, run: u64) -> Vec<String> {
        self.command(Command::Free { buffers: vec![id(run)] })
    }

    pub(crate) fn cancel(&mut self, run: u64) -> Vec<String> {
        self.command(Command::Cancel { runs: vec![RunId(run)], status: Status::new(Code::Cancelled, "nobody wants it") })
    }

    pub(crate) fn done(&mut self, run: u64) -> Vec<String> {
        self.done_with(run, &[16])
    }

    pub(crate) fn done_with(&mut self, run: u64, sizes: &[u64]) -> Vec<String> {
        self.event(ExecEvent::LaunchDone { run: RunId(run), device_ns: 5, busy_ns: 1_000_000, result: Ok(sizes.into()) })
    }

    /// Done after so short a time that the program counts as brief.
    pub(crate) fn done_soon(&mut self, run: u64) -> Vec<String> {
        self.event(ExecEvent::LaunchDone { run: RunId(run), device_ns: 5, busy_ns: 10, result: Ok([16].into()) })
    }

    pub(crate) fn failed(&mut self, run: u64, text: &str) -> Vec<String> {
        self.event(ExecEvent::LaunchDone { run: RunId(run), device_ns: 5, busy_ns: 5, result: Err(Arc::new(Status::internal(text))) })
    }
}

pub(crate) fn id(run: u64) -> BufferId {
    BufferId { run: RunId(run), output: 0 }
}

pub(crate) fn program(devices: &[u32], parameters: u32, outputs: u32, donated: &[u32]) -> Arc<LoadedProgram> {
    let spec = ValueSpec {
        dtype: DType::F32,
        shard_dims: vec![4],
        dims: vec![4],
        layout: String::new(),
        memory_kind: "device".to_owned(),
        op_sharding: None,
    };
    let report = CompileReport {
        name: "jit_f".to_owned(),
        fingerprint: Bytes::new(),
        replicas: 1,
        partitions: u32::try_from(devices.len()).unwrap(),
        parameters: vec![spec.clone(); parameters as usize],
        outputs: vec![spec; outputs as usize],
        donated: donated.to_vec(),
        memory: CompiledMemory::default(),
        layouts_error: None,
        collectives: 0,
        host_callbacks: false,
    };
    Arc::new(LoadedProgram::local(devices.to_vec(), Form::Gang, Arc::new(report)))
}

/// The same, run by each device's own thread.
pub(crate) fn per_device(devices: &[u32], parameters: u32, outputs: u32, donated: &[u32]) -> Arc<LoadedProgram> {
    Arc::new(LoadedProgram { form: Form::PerDevice, ..LoadedProgram::clone(&program(devices, parameters, outputs, donated)) })
}

fn render(effect: &ExecEffect) -> String {
    let part = |p: &Part| format!("b{}[{}+{}]", p.backing.0, p.first, p.count);
    match effect {
        ExecEffect::Launch(l) => {
            let arguments = (0..l.arguments.len()).map(|i| {
                let parts: Vec<String> = l.argument(i).iter().map(part).collect();
                format!(" {}{}", if l.arguments[i].donate { "!" } else { "" }, parts.join("+"))
            });
            let outputs: Vec<String> = l.outputs.iter().map(|o| format!(" b{}", o.0)).collect();
            let threads: Vec<String> = l.threads().iter().map(u32::to_string).collect();
            format!("launch r{} on {}:{} ->{}", l.run, threads.join("+"), arguments.collect::<String>(), outputs.concat())
        }
        ExecEffect::Copy(c) => format!("copy r{} to {:?}", c.run, c.items.iter().map(|i| i.device).collect::<Vec<_>>()),
        ExecEffect::Write(w) => format!("write r{}", w.command.order.run),
        ExecEffect::Read(r) => format!("read r{} {}", r.command.order.run, r.sources.iter().map(part).collect::<String>()),
        ExecEffect::Send(s) => format!("send r{} {}", s.command.order.run, s.sources.iter().map(part).collect::<String>()),
        ExecEffect::SendFailed { command, status } => format!("send failed r{}: {status}", command.order.run),
        ExecEffect::StopSend { run } => format!("stop send r{run}"),
        ExecEffect::ReadFailed { buffer, status, .. } => format!("read failed h{buffer}: {status}"),
        ExecEffect::Drop { backing } => format!("drop b{}", backing.0),
        ExecEffect::DropUpload { buffer, .. } => format!("drop upload h{buffer}"),
        ExecEffect::Compile(c) => format!("compile e{}", c.executable),
        ExecEffect::Neighbours(gang) => format!("neighbours {}", gang.others.len()),
        ExecEffect::Abandon { run, .. } => format!("abandon r{run}"),
        ExecEffect::Load { executable, .. } => format!("load e{executable}"),
        ExecEffect::Unload { executable } => format!("unload e{executable}"),
        ExecEffect::Describe { query, .. } => format!("describe {query}"),
        ExecEffect::Layout { query, .. } => format!("layout {query}"),
        ExecEffect::Report(Report::Finished { run, result: Ok(()), .. }) => format!("finished r{run}"),
        ExecEffect::Report(Report::Finished { run, result: Err(status), .. }) => format!("finished r{run}: {status}"),
        ExecEffect::Report(Report::Memory { bytes_in_use }) => format!("memory {bytes_in_use:?}"),
        ExecEffect::Report(Report::Loaded { executable, result }) => format!("loaded e{executable} {}", result.is_ok()),
        ExecEffect::Report(report) => format!("report {report:?}"),
        ExecEffect::Fatal(text) => format!("fatal: {text}"),
    }
}
