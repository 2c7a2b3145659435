//! Event scripts: events in, effects out, through a small world that plays the edge and the workers.

mod describe;
mod gangs;
mod moves;
mod parts;
mod specs;

use std::sync::Arc;

use bytes::Bytes;
use pw_types::*;

use crate::{Core, CoreConfig, Effect, Effects};

/// A core with a clock, and the effects of its last turn.
struct World {
    core: Core,
    now: u64,
    fx: Vec<Effect>,
    next_op: u64,
}

const A: SessionId = SessionId(10);
const B: SessionId = SessionId(11);

fn worker(devices: usize, memory: Option<u64>) -> WorkerInfo {
    let device = WorkerDevice {
        kind: "cpu".into(),
        debug_string: "cpu".into(),
        memory_kinds: vec!["device".into(), "pinned_host".into()],
        default_memory_kind: "device".into(),
        memory_bytes: memory,
    };
    WorkerInfo {
        host: "h".into(),
        pid: 7,
        build: String::new(),
        platform_name: "cpu".into(),
        platform_version: "test".into(),
        data_address: "h:1".into(),
        gang_address: "h:2".into(),
        island: 0,
        devices: vec![device; devices],
        test_targets: vec![],
    }
}

fn value(n: i64, shards: i64) -> ValueSpec {
    ValueSpec {
        dtype: DType::F32,
        shard_dims: vec![n / shards],
        dims: vec![n],
        layout: "{0}".into(),
        memory_kind: "device".into(),
        op_sharding: (shards > 1).then(|| Bytes::from_static(b"tiled")),
    }
}

/// `f32[n] → f32[n]` over `shards` devices, argument 0 donated or not.
fn report(name: &str, n: i64, shards: i64, donated: &[u32], temporaries: u64) -> Arc<CompileReport> {
    Arc::new(CompileReport {
        name: name.into(),
        fingerprint: Bytes::copy_from_slice(name.as_bytes()),
        replicas: 1,
        partitions: shards as u32,
        parameters: vec![value(n, shards)],
        outputs: vec![value(n, shards)],
        donated: donated.to_vec(),
        memory: CompiledMemory { temporaries, ..Default::default() },
        layouts_error: None,
        collectives: 0,
        host_callbacks: false,
    })
}

impl World {
    fn new(devices: usize, memory: Option<u64>) -> World {
        let mut world = World { core: Core::new(CoreConfig::default()), now: 0, fx: vec![], next_op: 0 };
        world.turn([Event::WorkerHello { connection: 1, incarnation: Incarnation(1), wanted_slot: None, info: worker(devices, memory) }]);
        world
    }

    fn turn(&mut self, events: impl IntoIterator<Item = Event>) {
        let mut fx = Effects::default();
        self.now += 1;
        for event in events {
            self.core.handle(Time(self.now), event, &mut fx);
        }
        self.core.handle(Time(self.now), Event::EndOfTurn, &mut fx);
        self.fx = fx.list;
    }

    fn open(&mut self, session: SessionId, name: &str, weight: u32) {
        let options = SessionOptions { name: name.into(), weight, devices: None };
        self.turn([Event::SessionOpened { session, options }]);
        assert!(self.fx.iter().any(|e| matches!(e, Effect::Edge(ToEdge::SessionReady(v)) if v.session == session)), "{:?}", self.fx);
    }

    fn event(&mut self, session: SessionId, request: Request) -> (OpId, Event) {
        self.next_op += 1;
        let op = OpId(self.next_op);
        (op, Event::Request { session, op, bytes: 100, request })
    }

    /// One request in one turn; the answer, if it came in that turn.
    fn ask(&mut self, session: SessionId, request: Request) -> Option<Result<Reply, Status>> {
        let (op, event) = self.event(session, request);
        self.turn([event]);
        self.reply(op)
    }

    fn reply(&self, wanted: OpId) -> Option<Result<Reply, Status>> {
        self.fx.iter().find_map(|e| match e {
            Effect::Edge(ToEdge::Reply { op, result, .. }) if *op == wanted => Some(result.clone()),
            _ => None,
        })
    }

    fn commands(&self) -> Vec<Command> {
        let commands = self.fx.iter().filter_map(|e| match e {
            Effect::Send { command, .. } => Some(command.clone()),
            _ => None,
        });
        commands.collect()
    }

    fn say(&mut self, report: Report) {
        self.turn([Event::Report { slot: HostSlot(0), incarnation: Incarnation(1), report }]);
    }

    fn done(&mut self, run: RunId) {
        self.say(Report::Finished { run, device_ns: 1_000_000, result: Ok(()) });
    }

    /// Compiles and loads; the session's handle.
    fn compile(&mut self, session: SessionId, devices: u32, report: Arc<CompileReport>) -> Handle {
        let request = CompileRequest {
            program: Bytes::copy_from_slice(report.name.as_bytes()),
            options: Bytes::new(),
            devices: (0..devices).map(VirtualDeviceId).collect(),
            replicas: 1,
            partitions: devices,
        };
        let (op, event) = self.event(session, Request::Compile(request));
        self.turn([event]);
        if let Some(Ok(Reply::Compile(reply))) = self.reply(op) {
            return reply.executable;
        }
        let commands = self.commands();
        let [Command::Compile(c)] = &commands[..] else { panic!("{commands:?}") };
        let executable = c.executable;
        self.say(Report::Compiled { executable, result: Ok(report) });
        let Some(Ok(Reply::Compile(reply))) = self.reply(op) else { panic!("{:?}", self.fx) };
        assert!(matches!(self.commands()[..], [Command::Load { .. }]));
        self.say(Report::Loaded { executable, result: Ok(()) });
        reply.executable
    }

    fn upload(&mut self, session: SessionId, handle: u64, n: i64, devices: u32) -> RunId {
        let reply = self.ask(session, make(handle, n, devices));
        assert_eq!(reply, Some(Ok(Reply::MakeArray(Handle(handle)))));
        self.last_run()
    }

    fn last_run(&self) -> RunId {
        self.commands().iter().rev().find_map(Command::order).expect("a node was granted").run
    }
}

fn make(handle: u64, n: i64, devices: u32) -> Request {
    let shards = devices.max(1);
    let partition = match shards {
        1 => Partition::Replicated,
        _ => Partition::Tiled(Tiling { tiles: vec![shards], replicas: 1, assignment: (0..shards).collect() }),
    };
    let sharding = Sharding { devices: (0..shards).map(VirtualDeviceId).collect(), partition, memory_kind: None };
    Request::MakeArray {
        array: Handle(handle),
        spec: ArraySpec { dtype: DType::F32, dims: vec![n], sharding },
        source: HostSource { buffer: Handle(handle), dtype: DType::F32, dims: vec![n], byte_strides: None },
    }
}

fn run(executable: Handle, argument: u64, result: u64) -> Request {
    Request::Execute(ExecuteRequest {
        executable,
        arguments: vec![Handle(argument)],
        results: if result == 0 { vec![] } else { vec![Handle(result)] },
        status: Handle(0),
        fill_status: false,
        launch_id: 0,
        non_donatable: vec![],
    })
}

fn destruct(handles: &[u64]) -> Request {
    Request::DestructArrays { arrays: handles.iter().map(|&h| Handle(h)).collect() }
}

fn error(reply: Option<Result<Reply, Status>>) -> Status {
    reply.expect("an answer").expect_err("an error")
}

#[test]
fn a_session_waits_for_workers_and_then_says_who_is_missing() {
    let mut core = Core::new(CoreConfig { expect_workers: 2, session_wait_ns: 5_000_000_000, ..Default::default() });
    let mut fx = Effects::default();
    core.handle(Time(0), Event::SessionOpened { session: A, options: SessionOptions::default() }, &mut fx);
    core.handle(Time(0), Event::EndOfTurn, &mut fx);
    assert_eq!(fx.list, []);
    assert_eq!(core.next_deadline(), Some(Time(5_000_000_000)));
    core.handle(Time(5_000_000_000), Event::Tick, &mut fx);
    core.handle(Time(5_000_000_000), Event::EndOfTurn, &mut fx);
    let [Effect::Edge(ToEdge::SessionRefused { status, .. })] = &fx.list[..] else { panic!("{fx:?}") };
    assert!(status.message.starts_with("0 of 2 workers are registered after waiting 5 s"), "{status}");
    assert_eq!(core.next_deadline(), None);
}

#[test]
fn more_devices_than_there_are_is_refused_by_number() {
    let mut w = World::new(2, None);
    let options = SessionOptions { name: "big".into(), weight: 1, devices: Some(3) };
    w.turn([Event::SessionOpened { session: A, options }]);
    let [Effect::Edge(ToEdge::SessionRefused { status, .. })] = &w.fx[..] else { panic!("{:?}", w.fx) };
    assert_eq!(status.code, Code::ResourceExhausted);
    assert!(status.message.contains("asks for 3 devices") && status.message.contains("2 devices on 1 workers"), "{status}");
}

#[test]
fn first_execute_makes_handles_and_the_next_takes_the_clients() {
    let mut w = World::new(2, None);
    w.open(A, "a", 1);
    let f = w.compile(A, 2, report("f", 8, 2, &[], 0));
    let up = w.upload(A, 1, 8, 2);
    let Some(Ok(Reply::Execute(reply))) = w.ask(A, run(f, 1, 0)) else { panic!() };
    assert_eq!(reply.status, Handle(0));
    assert_eq!(reply.outputs.len(), 1);
    assert!(reply.outputs[0].array.0 > FIRST_SERVER_HANDLE);
    assert_eq!(reply.outputs[0].dims, [8]);
    let commands = w.commands();
    let [Command::Launch(launch)] = &commands[..] else { panic!("{commands:?}") };
    let up = BufferId { run: up, output: 0 };
    assert_eq!(launch.arguments, [Argument { segments: vec![Segment { buffer: up, first: 0, count: 2 }], donate: false }]);
    assert_eq!((launch.order.seq, launch.order.previous), (GrantSeq(2), GrantSeq(1)), "the chain of this host");

    assert_eq!(w.ask(A, run(f, 1, 5)), Some(Ok(Reply::Execute(ExecuteReply { status: Handle(0), outputs: vec![] }))));
    let second = w.last_run();
    let check = Request::CheckValueReady { values: vec![Handle(5)] };
    let (op, event) = w.event(A, check);
    w.turn([event]);
    assert_eq!(w.reply(op), None, "not computed yet");
    w.done(second);
    assert_eq!(w.reply(op), Some(Ok(Reply::CheckValueReady)));
}

#[test]
fn a_wrong_argument_fails_at_once_and_poisons_what_follows() {
    let mut w = World::new(1, None);
    w.open(A, "a", 1);
    let f = w.compile(A, 1, report("f", 8, 1, &[], 0));
    w.upload(A, 1, 4, 1);
    let status = error(w.ask(A, run(f, 1, 5)));
    assert_eq!(status.message, "argument 0 of f: f32[8] is wanted, f32[4] was given");
    let derived = error(w.ask(A, run(f, 5, 6)));
    assert_eq!(derived, status);
    assert_eq!(error(w.ask(A, Request::CheckValueReady { values: vec![Handle(6)] })), status);
    assert!(w.commands().is_empty());
}

#[test]
fn a_fault_at_the_worker_reaches_waiters_and_later_readers_once() {
    let mut w = World::new(1, None);
    w.open(A, "a", 1);
    let f = w.compile(A, 1, report("f", 8, 1, &[], 0));
    w.upload(A, 1, 8, 1);
    w.ask(A, run(f, 1, 5));
    let first = w.last_run();
    w.ask(A, run(f, 5, 6));
    let second = w.last_run();
    let (op, event) = w.event(A, Request::CheckValueReady { values: vec![Handle(5), Handle(6)] });
    w.turn([event]);
    let fault = Status::internal("the handler failed");
    w.say(Report::Finished { run: first, device_ns: 0, result: Err(fault.clone()) });
    assert_eq!(w.reply(op), Some(Err(fault.clone())));
    w.say(Report::Finished { run: second, device_ns: 0, result: Err(fault.clone()) });
    assert_eq!(w.reply(op), None, "answered already");
    assert_eq!(error(w.ask(A, Request::CheckValueReady { values: vec![Handle(6)] })), fault);
}

#[test]
fn donation_needs_a_sole_owner() {
    let mut w = World::new(1, None);
    w.open(A, "a", 1);
    let f = w.compile(A, 1, report("f", 8, 1, &[0], 0));
    let donates = |w: &World| match &w.commands()[0] {
        Command::Launch(l) => l.arguments[0].donate,
        other => panic!("{other:?}"),
    };
    w.upload(A, 1, 8, 1);
    w.ask(A, run(f, 1, 2));
    assert!(donates(&w));
    assert_eq!(w.ask(A, Request::IsArrayDeleted { array: Handle(1) }), Some(Ok(Reply::IsArrayDeleted(true))));
    // A second owner of the backing: the plugin must not reuse it.
    w.ask(A, Request::FullyReplicatedShard { array: Handle(2), result: Handle(3), copy: CopySemantics::ReuseInput });
    w.ask(A, run(f, 2, 4));
    assert!(!donates(&w));
    assert_eq!(w.ask(A, run(f, 3, 5)).unwrap().err(), None, "the other owner still has it");
    let reuse = error(w.ask(A, run(f, 1, 6)));
    assert_eq!(reuse.message, "array 1 has been deleted or donated");
}

#[test]
fn memory_is_freed_in_order_time_and_exhaustion_lists_the_holders() {
    // 8 floats = 32 bytes a piece; room for three.
    let mut w = World::new(1, Some(96));
    w.open(A, "hoarder", 1);
    w.open(B, "victim", 1);
    let f = w.compile(A, 1, report("f", 8, 1, &[], 0));
    w.upload(A, 1, 8, 1);
    // A chain whose intermediate results are dropped runs for ever, although nothing has finished.
    for i in 0..10 {
        assert!(w.ask(A, run(f, if i == 0 { 1 } else { 100 + i - 1 }, 100 + i)).unwrap().is_ok());
        if i > 0 {
            w.ask(A, destruct(&[100 + i - 1]));
        }
    }
    w.upload(A, 2, 8, 1);
    let _ = w.ask(B, make(3, 8, 1));
    let status = error(w.ask(B, Request::CheckValueReady { values: vec![Handle(3)] }));
    assert_eq!(status.code, Code::ResourceExhausted);
    assert_eq!(status.cause, Cause::OutOfMemory);
    let lines: Vec<&str> = status.message.lines().collect();
    assert_eq!(lines[0], "out of memory on worker 0 device 0: an upload needs 32 B, 0 B of 96 B are free");
    assert_eq!(lines[1], "  96 B held by 'hoarder' in 3 arrays:");
    assert_eq!(lines[2], "    64 B in 2 × f32[8] from upload");
    assert_eq!(lines[3], "    32 B in 1 × f32[8] from f");
    w.ask(A, destruct(&[1]));
    w.upload(B, 4, 8, 1);
}

#[test]
fn temporaries_alone_do_not_exhaust() {
    let mut w = World::new(1, Some(200));
    w.open(A, "a", 1);
    let f = w.compile(A, 1, report("f", 8, 1, &[0], 120));
    w.upload(A, 1, 8, 1);
    for i in 1..20 {
        assert!(w.ask(A, run(f, i, i + 1)).unwrap().is_ok());
    }
    let too_big = w.compile(A, 1, report("g", 8, 1, &[], 300));
    let _ = w.ask(A, run(too_big, 20, 30));
    let status = error(w.ask(A, Request::CheckValueReady { values: vec![Handle(30)] }));
    assert!(status.message.starts_with("out of memory on worker 0 device 0: g needs 332 B"), "{status}");
}

/// Plays two sessions that keep their queues full; returns how many runs each was granted.
fn shares(weights: [u32; 2], runs: usize) -> [usize; 2] {
    let mut w = World::new(1, None);
    let mut granted = [0, 0];
    let mut outstanding = std::collections::VecDeque::new();
    let mut count = |w: &World, outstanding: &mut std::collections::VecDeque<RunId>| {
        for command in w.commands() {
            if let Command::Launch(l) = command {
                granted[(l.order.session == B) as usize] += 1;
                outstanding.push_back(l.order.run);
            }
        }
    };
    for (session, name, weight) in [(A, "a", weights[0]), (B, "b", weights[1])] {
        w.open(session, name, weight);
        let f = w.compile(session, 1, report("f", 8, 1, &[], 0));
        w.upload(session, 1, 8, 1);
        for i in 0..runs as u64 {
            w.ask(session, run(f, 1, 100 + i));
            count(&w, &mut outstanding);
        }
    }
    for _ in 0..runs {
        let run = outstanding.pop_front().expect("something runs");
        w.done(run);
        count(&w, &mut outstanding);
    }
    granted
}

#[test]
fn shares_are_equal_or_by_weight() {
    // Each run takes 1 ms and 20 ms are granted ahead; the first session fills the first window alone.
    let [a, b] = shares([1, 1], 400);
    assert!(a.abs_diff(b) <= 22, "{a} and {b}");
    let [a, b] = shares([1, 3], 400);
    assert!((3 * a).abs_diff(b) <= 80, "{a} and {b}");
}

/// Who has worked alone, or was granted much on an estimate, owes the others nothing for it.
#[test]
fn a_past_alone_is_no_debt() {
    let mut w = World::new(1, None);
    let mut programs = [0, 0].map(Handle);
    for (session, name) in [(A, "a"), (B, "b")] {
        w.open(session, name, 1);
        programs[(session == B) as usize] = w.compile(session, 1, report("f", 8, 1, &[], 0));
        let upload = w.upload(session, 1, 8, 1);
        w.done(upload);
    }
    let mut outstanding = std::collections::VecDeque::new();
    let mut granted = [0, 0];
    let mut count = |w: &World, outstanding: &mut std::collections::VecDeque<RunId>| {
        for command in w.commands() {
            if let Command::Launch(l) = command {
                granted[(l.order.session == B) as usize] += 1;
                outstanding.push_back(l.order.run);
            }
        }
        granted
    };
    for i in 0..300 {
        w.ask(A, run(programs[0], 1, 100 + i));
        count(&w, &mut outstanding);
    }
    while let Some(run) = outstanding.pop_front() {
        w.done(run);
        count(&w, &mut outstanding);
    }
    for (session, program) in [(B, programs[1]), (A, programs[0])] {
        for i in 0..300 {
            w.ask(session, run(program, 1, 1000 + i));
            count(&w, &mut outstanding);
        }
    }
    let mut now = [0, 0];
    for _ in 0..200 {
        w.done(outstanding.pop_front().expect("something runs"));
        now = count(&w, &mut outstanding);
    }
    let (a, b) = (now[0] - 300, now[1]);
    assert!(i32::abs_diff(a, b) <= 44, "{a} and {b}");
}

#[test]
fn no_more_than_a_window_is_granted_ahead() {
    let mut w = World::new(1, None);
    w.open(A, "a", 1);
    let f = w.compile(A, 1, report("f", 8, 1, &[], 0));
    w.upload(A, 1, 8, 1);
    let mut launched = 0;
    for i in 0..100 {
        w.ask(A, run(f, 1, 10 + i));
        launched += w.commands().len();
    }
    assert_eq!(launched, 20, "20 ms of runs that are taken for 1 ms each");
}

#[test]
fn a_client_that_goes_leaves_nothing() {
    let mut w = World::new(1, Some(1 << 20));
    w.open(A, "a", 1);
    w.open(B, "b", 1);
    let f = w.compile(A, 1, report("f", 8, 1, &[], 0));
    w.upload(A, 1, 8, 1);
    w.upload(B, 1, 8, 1);
    let mut running = vec![];
    for i in 0..100 {
        w.ask(A, run(f, 1, 10 + i));
        running.extend(w.commands().iter().filter_map(Command::order).map(|o| o.run));
    }
    w.turn([Event::SessionClosed { session: A, reason: "gone".into() }]);
    let cancelled: Vec<RunId> =
        w.commands().into_iter().flat_map(|c| if let Command::Cancel { runs, .. } = c { runs } else { vec![] }).collect();
    assert!(running.iter().all(|r| cancelled.contains(r)));
    for run in cancelled {
        w.say(Report::Finished { run, device_ns: 0, result: Err(Status::new(Code::Cancelled, "cancelled")) });
    }
    w.turn([Event::StatusQuery { query: 1 }]);
    let Effect::Status { report, .. } = &w.fx[0] else { panic!() };
    assert_eq!(report.sessions.iter().map(|s| (s.name.as_str(), s.held_bytes)).collect::<Vec<_>>(), [("b", 32)]);
    assert_eq!(report.workers[0].bytes_reserved, [32]);
    assert_eq!(w.core.nodes.len(), 1, "only b's upload goes on");
    assert_eq!(w.core.directory.backings.len(), 1);
    assert_eq!(report.executables, 1, "compiled code stays");
}

#[test]
fn a_lost_worker_poisons_what_lived_there_and_nothing_else() {
    let mut w = World::new(1, None);
    w.turn([Event::WorkerHello { connection: 2, incarnation: Incarnation(2), wanted_slot: None, info: worker(1, None) }]);
    w.open(A, "a", 1);
    let make_on = |handle: u64, device: u32| {
        let sharding = Sharding { devices: vec![VirtualDeviceId(device)], partition: Partition::Replicated, memory_kind: None };
        Request::MakeArray {
            array: Handle(handle),
            spec: ArraySpec { dtype: DType::F32, dims: vec![8], sharding },
            source: HostSource { buffer: Handle(handle), dtype: DType::F32, dims: vec![8], byte_strides: None },
        }
    };
    w.ask(A, make_on(1, 0));
    let first = w.last_run();
    w.done(first);
    w.ask(A, make_on(2, 1));
    let second = w.last_run();
    w.turn([Event::Report {
        slot: HostSlot(1),
        incarnation: Incarnation(2),
        report: Report::Finished { run: second, device_ns: 0, result: Ok(()) },
    }]);
    w.turn([Event::WorkerLost { slot: HostSlot(1), incarnation: Incarnation(2), reason: "killed".into() }]);
    assert_eq!(w.ask(A, Request::CheckValueReady { values: vec![Handle(1)] }), Some(Ok(Reply::CheckValueReady)));
    let status = error(w.ask(A, Request::CheckValueReady { values: vec![Handle(2)] }));
    assert_eq!(status.code, Code::DataLoss);
    assert!(status.message.starts_with("worker 1 (host h, pid 7) is lost: killed"), "{status}");
    let status = error(w.ask(A, make_on(3, 1)));
    assert_eq!(status.code, Code::Unavailable);
}

#[test]
fn workers_may_come_in_any_order_of_their_slots() {
    let mut core = Core::new(CoreConfig { expect_workers: 2, ..Default::default() });
    let mut fx = Effects::default();
    let hello = |slot, devices, life| Event::WorkerHello {
        connection: life,
        incarnation: Incarnation(life),
        wanted_slot: Some(HostSlot(slot)),
        info: worker(devices, None),
    };
    core.handle(Time(0), hello(1, 3, 1), &mut fx);
    core.handle(Time(0), Event::StatusQuery { query: 1 }, &mut fx);
    let Some(Effect::Status { report, .. }) = fx.list.last() else { panic!("{fx:?}") };
    assert_eq!(report.workers.iter().map(|w| w.slot.0).collect::<Vec<_>>(), [1], "a vacant slot is nobody");
    core.handle(Time(0), hello(0, 2, 2), &mut fx);
    core.handle(Time(0), hello(0, 2, 3), &mut fx);
    let Some(Effect::Refuse { connection: 3, status }) = fx.list.last() else { panic!("{fx:?}") };
    assert_eq!(status.message, "slot 0 is taken by worker 0 (host h, pid 7) with 2 devices");
    core.handle(Time(0), Event::SessionOpened { session: A, options: SessionOptions::default() }, &mut fx);
    core.handle(Time(0), Event::EndOfTurn, &mut fx);
    let Some(Effect::Edge(ToEdge::SessionReady(view))) = fx.list.last() else { panic!("{fx:?}") };
    let places: Vec<_> = view.devices.iter().map(|d| (d.physical.slot.0, d.physical.index)).collect();
    assert_eq!(places, [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]);
}

#[test]
fn a_device_named_twice_is_refused() {
    let mut w = World::new(2, None);
    w.open(A, "a", 1);
    let devices = vec![VirtualDeviceId(1), VirtualDeviceId(1)];
    let request = CompileRequest { program: Bytes::new(), options: Bytes::new(), devices, replicas: 1, partitions: 2 };
    let status = error(w.ask(A, Request::Compile(request)));
    assert_eq!((status.code, status.message.as_str()), (Code::InvalidArgument, "the device assignment names device 1 twice"));
}

#[test]
fn shards_are_shared_between_assemble_disassemble_and_remap() {
    let mut w = World::new(2, None);
    w.open(A, "a", 1);
    let up = w.upload(A, 1, 8, 2);
    let parts = Request::Disassemble { array: Handle(1), results: vec![Handle(2), Handle(3)], copy: CopySemantics::ReuseInput };
    assert!(w.ask(A, parts).unwrap().is_ok());
    let one = |d: u32| Sharding { devices: vec![VirtualDeviceId(d)], partition: Partition::Replicated, memory_kind: None };
    let swapped = Sharding {
        devices: vec![VirtualDeviceId(1), VirtualDeviceId(0)],
        partition: Partition::Even { shard_dims: vec![4] },
        memory_kind: None,
    };
    let step = |start| Interval { start, end: start + 1, step: 1 };
    let plan = RemapPlan {
        outputs: vec![ArraySpec { dtype: DType::F32, dims: vec![8], sharding: swapped }],
        mappings: vec![
            RemapMapping { input: 0, output: 0, from: vec![step(0)], to: vec![step(1)] },
            RemapMapping { input: 1, output: 0, from: vec![step(0)], to: vec![step(0)] },
        ],
    };
    let remap =
        Request::RemapArrays { arrays: vec![Handle(2), Handle(3)], results: vec![Handle(4)], plan, copy: CopySemantics::DonateInput };
    assert!(w.ask(A, remap).unwrap().is_ok());
    assert!(w.commands().is_empty(), "nothing moves");
    let bad = Request::Assemble {
        array: Handle(5),
        dtype: None,
        dims: vec![4],
        sharding: one(0),
        inputs: vec![Handle(2)],
        copy: CopySemantics::ReuseInput,
    };
    assert_eq!(error(w.ask(A, bad)).message, "array 2 has been deleted or donated");
    w.ask(A, destruct(&[1]));
    assert!(w.commands().is_empty(), "the remapped array still owns the backing");
    w.ask(A, destruct(&[4]));
    assert_eq!(w.commands(), [Command::Free { buffers: vec![BufferId { run: up, output: 0 }] }]);
}

#[test]
fn an_argument_on_other_devices_is_moved_first() {
    let mut w = World::new(2, None);
    w.open(A, "a", 1);
    let f = w.compile(A, 1, report("f", 8, 1, &[], 0));
    let on_one = Sharding { devices: vec![VirtualDeviceId(1)], partition: Partition::Replicated, memory_kind: None };
    w.ask(
        A,
        Request::MakeArray {
            array: Handle(1),
            spec: ArraySpec { dtype: DType::F32, dims: vec![8], sharding: on_one },
            source: HostSource { buffer: Handle(1), dtype: DType::F32, dims: vec![8], byte_strides: None },
        },
    );
    assert!(w.ask(A, run(f, 1, 2)).unwrap().is_ok());
    let commands = w.commands();
    let [Command::Copy(copy), Command::Launch(launch), Command::Free { buffers }] = &commands[..] else { panic!("{commands:?}") };
    assert_eq!(copy.items.iter().map(|i| i.device).collect::<Vec<_>>(), [0]);
    let moved = BufferId { run: copy.order.run, output: 0 };
    assert_eq!(launch.arguments[0].segments[0].buffer, moved);
    assert_eq!(buffers[..], [moved]);
}

#[test]
fn a_full_queue_pauses_the_session_and_a_drained_one_resumes() {
    let mut w = World::new(1, None);
    w.core.config.queued_max = 10;
    w.open(A, "a", 1);
    let f = w.compile(A, 1, report("f", 8, 1, &[], 0));
    w.upload(A, 1, 8, 1);
    let mut paused = None;
    let mut running = std::collections::VecDeque::new();
    let mut look = |w: &World, running: &mut std::collections::VecDeque<RunId>| {
        running.extend(w.commands().iter().filter_map(Command::order).map(|o| o.run));
        for e in &w.fx {
            if let Effect::Edge(ToEdge::Pause { paused: p, .. }) = e {
                paused = Some(*p);
            }
        }
        paused
    };
    for i in 0..29 {
        w.ask(A, run(f, 1, 10 + i));
        assert_eq!(look(&w, &mut running), None);
    }
    w.ask(A, run(f, 1, 50));
    assert_eq!(look(&w, &mut running), Some(true));
    for _ in 0..5 {
        let run = running.pop_front().unwrap();
        w.done(run);
        look(&w, &mut running);
    }
    assert_eq!(look(&w, &mut running), Some(false));
}

#[test]
fn a_failed_host_buffer_fails_its_array_only() {
    let mut w = World::new(1, None);
    w.open(A, "a", 1);
    let run = w.upload(A, 1, 8, 1);
    let status = Status::new(Code::DataLoss, "12 of 32 bytes came");
    w.turn([Event::HostBufferFailed { session: A, buffer: Handle(1), status: status.clone() }]);
    assert_eq!(w.commands(), [Command::Cancel { runs: vec![run], status: status.clone() }]);
    w.say(Report::Finished { run, device_ns: 0, result: Err(Status::new(Code::Cancelled, "cancelled")) });
    assert_eq!(error(w.ask(A, Request::CheckValueReady { values: vec![Handle(1)] })), status);
}

#[test]
fn the_same_events_give_the_same_effects() {
    let script = || {
        let mut w = World::new(2, Some(1 << 16));
        let mut digests = vec![];
        w.open(A, "a", 1);
        w.open(B, "b", 2);
        for session in [A, B] {
            let f = w.compile(session, 2, report("f", 8, 2, &[0], 10));
            w.upload(session, 1, 8, 2);
            for i in 1..40 {
                w.ask(session, run(f, i, i + 1));
                digests.push(Effects { list: std::mem::take(&mut w.fx) }.digest());
            }
        }
        w.turn([Event::SessionClosed { session: A, reason: "x".into() }]);
        digests.push(Effects { list: std::mem::take(&mut w.fx) }.digest());
        digests
    };
    assert_eq!(script(), script());
}
