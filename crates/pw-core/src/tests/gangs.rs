//! Programs over several workers: compiled by one first, loaded by all, launched with each host's own shards, and what
//! happens when a part of them fails.

use super::parts::finished;
use super::*;

/// Two workers with two devices each; virtual devices 0 and 1 are of worker 0.
fn two_by_two() -> World {
    let mut w = World::new(2, Some(1 << 10));
    let info = WorkerInfo { gang_address: "g:2".into(), ..worker(2, Some(1 << 10)) };
    w.turn([Event::WorkerHello { connection: 2, incarnation: Incarnation(2), wanted_slot: None, info }]);
    w.open(A, "a", 1);
    w
}

fn says(slot: u32, report: Report) -> Event {
    Event::Report { slot: HostSlot(slot), incarnation: Incarnation(u64::from(slot) + 1), report }
}

fn compiled(slot: u32, executable: ExecutableId, result: Result<Arc<CompileReport>, Status>) -> Event {
    says(slot, Report::Compiled { executable, result })
}

fn loaded(slot: u32, executable: ExecutableId, result: Result<(), Status>) -> Event {
    says(slot, Report::Loaded { executable, result })
}

fn lost(slot: u32) -> Event {
    Event::WorkerLost { slot: HostSlot(slot), incarnation: Incarnation(u64::from(slot) + 1), reason: "killed".into() }
}

fn hello(slot: u32, life: u64, address: &str) -> Event {
    let info = WorkerInfo { gang_address: address.into(), ..worker(2, Some(1 << 10)) };
    Event::WorkerHello { connection: life, incarnation: Incarnation(life), wanted_slot: Some(HostSlot(slot)), info }
}

fn compile_on(devices: &[u32]) -> Request {
    Request::Compile(CompileRequest {
        program: Bytes::from_static(b"f"),
        options: Bytes::new(),
        devices: devices.iter().map(|&d| VirtualDeviceId(d)).collect(),
        replicas: 1,
        partitions: devices.len() as u32,
    })
}

/// Commands with the worker that gets each.
fn sent(w: &World) -> Vec<(u32, Command)> {
    let commands = w.fx.iter().filter_map(|e| match e {
        Effect::Send { slot, command, .. } => Some((slot.0, command.clone())),
        _ => None,
    });
    commands.collect()
}

fn cancelled(w: &World) -> Vec<(u32, RunId)> {
    let runs = sent(w).into_iter().filter_map(|(slot, c)| if let Command::Cancel { runs, .. } = c { Some((slot, runs)) } else { None });
    runs.flat_map(|(slot, runs)| runs.into_iter().map(move |run| (slot, run))).collect()
}

/// Compiled on both, not loaded: its id and the session's handle.
fn compile(w: &mut World, devices: &[u32], donated: &[u32]) -> (ExecutableId, Handle) {
    let report = report("f", 8, devices.len() as i64, donated, 0);
    let (op, event) = w.event(A, compile_on(devices));
    w.turn([event]);
    let [(first, Command::Compile(command))] = &sent(w)[..] else { panic!("{:?}", w.fx) };
    let (first, id) = (*first, command.executable);
    assert!(command.devices.is_empty(), "it is for members, not for devices");
    w.turn([compiled(first, id, Ok(report.clone()))]);
    let [(second, Command::Compile(command))] = &sent(w)[..] else { panic!("{:?}", w.fx) };
    let second = *second;
    assert_eq!((second, command.executable), (1 - first, id));
    w.turn([compiled(second, id, Ok(report))]);
    let Some(Ok(Reply::Compile(reply))) = w.reply(op) else { panic!("{:?}", w.fx) };
    (id, reply.executable)
}

fn gang(w: &mut World, devices: &[u32], donated: &[u32]) -> (ExecutableId, Handle) {
    let (id, handle) = compile(w, devices, donated);
    w.turn([loaded(0, id, Ok(())), loaded(1, id, Ok(()))]);
    (id, handle)
}

fn make_on(handle: u64, n: i64, devices: &[u32]) -> Request {
    let Request::MakeArray { array, spec, source } = make(handle, n, devices.len() as u32) else { unreachable!() };
    let devices = devices.iter().map(|&d| VirtualDeviceId(d)).collect();
    Request::MakeArray { array, spec: ArraySpec { sharding: Sharding { devices, ..spec.sharding }, ..spec }, source }
}

fn upload_on(w: &mut World, handle: u64, n: i64, devices: &[u32]) -> RunId {
    w.ask(A, make_on(handle, n, devices)).unwrap().unwrap();
    w.last_run()
}

/// Run, first shard, count.
type Segments = Vec<(RunId, u32, u32)>;

/// By worker: the segments of the only argument of a launch.
fn launched(w: &World) -> Vec<(u32, Segments)> {
    let launches = sent(w).into_iter().filter_map(|(slot, c)| match c {
        Command::Launch(launch) => {
            let segments = launch.arguments[0].segments.iter().map(|s| (s.buffer.run, s.first, s.count)).collect();
            Some((slot, segments))
        }
        _ => None,
    });
    launches.collect()
}

fn execute(w: &mut World, program: Handle, argument: u64, result: u64) -> RunId {
    w.ask(A, run(program, argument, result)).unwrap().unwrap();
    w.last_run()
}

fn check(w: &mut World, handle: u64) -> Option<Result<Reply, Status>> {
    w.ask(A, Request::CheckValueReady { values: vec![Handle(handle)] })
}

#[test]
fn one_worker_compiles_first_then_the_others_and_all_load() {
    let mut w = two_by_two();
    let (id, program) = compile(&mut w, &[2, 0, 3, 1], &[]);
    let loads: Vec<(u32, ExecutableId, GangPart)> = sent(&w)
        .into_iter()
        .map(|(slot, c)| match c {
            Command::Load { executable, gang: Some(gang), .. } => (slot, executable, gang),
            other => panic!("{other:?}"),
        })
        .collect();
    let member = |member, device| GangMember { member, device };
    let peer = |slot, address: &str, members| {
        let (slot, incarnation) = (HostSlot(slot), Incarnation(u64::from(slot) + 1));
        GangPeer { slot, incarnation, address: address.into(), members }
    };
    let second = GangPart { members: 4, here: vec![member(0, 0), member(2, 1)], others: vec![peer(0, "h:2", vec![1, 3])] };
    let first = GangPart { members: 4, here: vec![member(1, 0), member(3, 1)], others: vec![peer(1, "g:2", vec![0, 2])] };
    assert_eq!(loads, [(1, id, second), (0, id, first)]);
    // A run waits until all have it.
    upload_on(&mut w, 1, 8, &[2, 0, 3, 1]);
    w.ask(A, run(program, 1, 2)).unwrap().unwrap();
    assert_eq!(launched(&w), []);
    w.turn([loaded(1, id, Ok(()))]);
    assert_eq!(launched(&w), []);
    w.turn([loaded(0, id, Ok(()))]);
    assert_eq!(launched(&w).len(), 2);
    w.core.audit().unwrap();
}

#[test]
fn workers_that_compile_to_different_things_fail_the_compile() {
    let mut w = two_by_two();
    let (op, event) = w.event(A, compile_on(&[0, 2]));
    w.turn([event]);
    let [(0, Command::Compile(command))] = &sent(&w)[..] else { panic!("{:?}", w.fx) };
    let id = command.executable;
    w.turn([compiled(0, id, Ok(report("f", 8, 2, &[], 0)))]);
    let other = CompileReport { fingerprint: Bytes::from_static(b"g"), ..CompileReport::clone(&report("f", 8, 2, &[], 0)) };
    w.turn([compiled(1, id, Ok(Arc::new(other)))]);
    let status = error(w.reply(op));
    assert_eq!((status.code, &status.message[..]), (Code::Internal, "worker 1 has compiled f to something else than the others"));
    assert_eq!(sent(&w), []);
    // The next request tries again.
    w.ask(A, compile_on(&[0, 2]));
    assert!(matches!(&sent(&w)[..], [(0, Command::Compile(c))] if c.executable != id), "{:?}", w.fx);
}

#[test]
fn a_load_that_fails_on_one_worker_fails_the_program() {
    let mut w = two_by_two();
    let (id, program) = compile(&mut w, &[0, 2], &[]);
    upload_on(&mut w, 1, 8, &[0, 2]);
    w.ask(A, run(program, 1, 2)).unwrap().unwrap();
    w.turn([loaded(0, id, Ok(())), loaded(1, id, Err(Status::internal("no")))]);
    assert_eq!(sent(&w), [(0, Command::Unload { executable: id })]);
    assert_eq!(error(check(&mut w, 2)), Status::internal("no"));
    assert_eq!(error(w.ask(A, run(program, 1, 3))), Status::internal("no"));
    w.core.audit().unwrap();
}

/// What a worker says of a compile long after all have compiled is not taken for the end of its load.
#[test]
fn a_compile_that_is_reported_late_is_no_load() {
    let mut w = two_by_two();
    let (id, program) = compile(&mut w, &[0, 2], &[]);
    upload_on(&mut w, 1, 8, &[0, 2]);
    w.ask(A, run(program, 1, 2)).unwrap().unwrap();
    w.turn([loaded(0, id, Ok(())), compiled(1, id, Ok(report("f", 8, 2, &[], 0)))]);
    assert_eq!(launched(&w), []);
    w.turn([loaded(1, id, Ok(()))]);
    assert_eq!(launched(&w).len(), 2);
}

#[test]
fn a_launch_carries_the_shards_of_its_hosts_members_only() {
    let mut w = two_by_two();
    let (_, program) = gang(&mut w, &[0, 2, 1, 3], &[]);
    let up = upload_on(&mut w, 1, 8, &[0, 2, 1, 3]);
    execute(&mut w, program, 1, 2);
    // Interleaved devices: every second shard.
    assert_eq!(launched(&w), [(0, vec![(up, 0, 1), (up, 2, 1)]), (1, vec![(up, 1, 1), (up, 3, 1)])]);
    // An argument that is assembled from arrays of one worker and of both.
    let left = upload_on(&mut w, 3, 2, &[0]);
    let right = upload_on(&mut w, 4, 6, &[2, 1, 3]);
    let partition = Partition::Tiled(Tiling { tiles: vec![4], replicas: 1, assignment: vec![0, 1, 2, 3] });
    let sharding = Sharding { devices: [0, 2, 1, 3].map(VirtualDeviceId).to_vec(), partition, memory_kind: None };
    let inputs = vec![Handle(3), Handle(4)];
    let copy = CopySemantics::ReuseInput;
    w.ask(A, Request::Assemble { array: Handle(5), dtype: None, dims: vec![8], sharding, inputs, copy }).unwrap().unwrap();
    execute(&mut w, program, 5, 6);
    assert_eq!(launched(&w), [(0, vec![(left, 0, 1), (right, 1, 1)]), (1, vec![(right, 0, 1), (right, 2, 1)])]);
    w.core.audit().unwrap();
}

#[test]
fn neighbours_on_one_host_are_one_segment() {
    let mut w = two_by_two();
    let (_, program) = gang(&mut w, &[0, 1, 2, 3], &[0]);
    let up = upload_on(&mut w, 1, 8, &[0, 1, 2, 3]);
    execute(&mut w, program, 1, 2);
    assert_eq!(launched(&w), [(0, vec![(up, 0, 2)]), (1, vec![(up, 2, 2)])]);
    let donates = sent(&w).into_iter().filter_map(|(_, c)| if let Command::Launch(l) = c { Some(l.arguments[0].donate) } else { None });
    assert_eq!(donates.collect::<Vec<_>>(), [true, true]);
}

#[test]
fn a_failure_on_one_host_cancels_the_others_and_is_the_fault() {
    let mut w = two_by_two();
    let (_, program) = gang(&mut w, &[0, 2], &[]);
    upload_on(&mut w, 1, 8, &[0, 2]);
    let failed = execute(&mut w, program, 1, 2);
    let dependent = execute(&mut w, program, 2, 3);
    w.turn([finished(0, failed, Err(Status::internal("boom")))]);
    assert_eq!(cancelled(&w), [(1, failed)]);
    assert_eq!(check(&mut w, 2), None);
    let given_up = Status::new(Code::Unavailable, "the run was given up");
    w.turn([finished(1, failed, Err(given_up)), finished(0, dependent, Err(Status::internal("boom")))]);
    assert_eq!(cancelled(&w), [(1, dependent)]);
    w.turn([finished(1, dependent, Err(Status::new(Code::Cancelled, "cancelled")))]);
    for handle in [2, 3] {
        assert_eq!(error(check(&mut w, handle)), Status::internal("boom"));
    }
    w.core.audit().unwrap();
    w.ask(A, destruct(&[1, 2, 3]));
    w.core.audit().unwrap();
}

/// Found by the simulator: a part that has failed holds no memory which a run could reuse.
#[test]
fn nothing_is_reused_where_a_part_has_failed() {
    let (mut w, up) = super::parts::two_workers();
    w.turn([finished(0, up, Ok(())), finished(1, up, Ok(()))]);
    let (op, event) = w.event(A, compile_on(&[0, 1]));
    w.turn([event]);
    let Some(Command::Compile(CompileCommand { executable: id, .. })) = w.commands().pop() else { panic!("{:?}", w.fx) };
    let report = report("f", 16, 2, &[0], 0);
    w.turn([compiled(0, id, Ok(report.clone())), compiled(1, id, Ok(report))]);
    let Some(Ok(Reply::Compile(CompileReply { executable: program, .. }))) = w.reply(op) else { panic!("{:?}", w.fx) };
    w.turn([loaded(0, id, Ok(())), loaded(1, id, Ok(()))]);
    let failed = execute(&mut w, program, 1, 2);
    upload_on(&mut w, 3, 16, &[0, 1]);
    assert_eq!(super::parts::reserved(&mut w), [64, 64]);
    w.turn([finished(0, failed, Err(Status::internal("boom")))]);
    upload_on(&mut w, 4, 8, &[0]);
    assert_eq!(super::parts::reserved(&mut w), [64, 64]);
    w.ask(A, run(program, 2, 5)).unwrap().unwrap();
    assert_eq!(launched(&w), []);
    // It was given the only handle.
    assert_eq!(super::parts::reserved(&mut w), [64, 32]);
    assert_eq!(error(check(&mut w, 5)), Status::internal("boom"));
}

#[test]
fn the_longest_part_is_the_device_time() {
    let mut w = two_by_two();
    let (_, program) = gang(&mut w, &[0, 2], &[]);
    upload_on(&mut w, 1, 8, &[0, 2]);
    let run = execute(&mut w, program, 1, 2);
    for (slot, device_ns) in [(1, 7_000_000), (0, 3_000_000)] {
        w.turn([says(slot, Report::Finished { run, device_ns, result: Ok(()) })]);
    }
    // 20 ms are granted ahead.
    for result in 3..9 {
        w.ask(A, super::run(program, 1, result)).unwrap().unwrap();
        assert_eq!(launched(&w).len(), if result < 5 { 2 } else { 0 }, "{result}");
    }
}

#[test]
fn a_lost_worker_poisons_the_outputs_and_cancels_the_rest() {
    let mut w = two_by_two();
    let (_, program) = gang(&mut w, &[0, 2], &[]);
    upload_on(&mut w, 1, 8, &[0, 2]);
    let run = execute(&mut w, program, 1, 2);
    w.turn([lost(1)]);
    assert_eq!(cancelled(&w), [(0, run)]);
    assert_eq!(error(check(&mut w, 2)).cause, Cause::HostLost { slot: HostSlot(1), incarnation: Incarnation(2) });
    assert_eq!(error(w.ask(A, super::run(program, 1, 3))).code, Code::Unavailable);
    w.turn([finished(0, run, Err(Status::new(Code::Unavailable, "given up")))]);
    assert_eq!(error(check(&mut w, 2)).code, Code::DataLoss);
    w.core.audit().unwrap();
}

/// Found by the simulator: what it sent last may be lost with it, and the others wait for that.
#[test]
fn a_worker_that_is_lost_behind_its_own_end_cancels_the_rest() {
    let mut w = two_by_two();
    let (_, program) = gang(&mut w, &[0, 2], &[]);
    upload_on(&mut w, 1, 8, &[0, 2]);
    let run = execute(&mut w, program, 1, 2);
    w.turn([finished(1, run, Ok(()))]);
    w.turn([lost(1)]);
    assert_eq!(cancelled(&w), [(0, run)]);
    w.turn([finished(0, run, Err(Status::new(Code::Unavailable, "given up")))]);
    assert_eq!(error(check(&mut w, 2)).code, Code::DataLoss);
    w.core.audit().unwrap();
}

#[test]
fn others_that_notice_a_loss_first_do_not_hide_whose_it_is() {
    let mut w = two_by_two();
    let (_, program) = gang(&mut w, &[0, 2], &[]);
    upload_on(&mut w, 1, 8, &[0, 2]);
    let run = execute(&mut w, program, 1, 2);
    w.turn([finished(0, run, Err(Status::new(Code::Unavailable, "the connection broke")))]);
    let (op, event) = w.event(A, Request::CheckValueReady { values: vec![Handle(2)] });
    w.turn([event, lost(1)]);
    assert_eq!(error(w.reply(op)).code, Code::DataLoss);
}

/// Found by the simulator: the windows of a new life count nothing of the old one's.
#[test]
fn a_gang_of_an_old_life_is_not_in_the_windows_of_the_new_one() {
    let mut w = two_by_two();
    let (id, program) = gang(&mut w, &[0, 2], &[]);
    upload_on(&mut w, 1, 8, &[0, 2]);
    let old = execute(&mut w, program, 1, 2);
    w.turn([lost(1), hello(1, 3, "g:3")]);
    w.core.audit().unwrap();
    let again = |executable| Event::Report {
        slot: HostSlot(1),
        incarnation: Incarnation(3),
        report: Report::Loaded { executable, result: Ok(()) },
    };
    w.turn([loaded(0, id, Ok(())), again(id)]);
    upload_on(&mut w, 3, 8, &[0, 2]);
    execute(&mut w, program, 3, 4);
    w.turn([finished(0, old, Err(Status::new(Code::Unavailable, "given up")))]);
    w.core.audit().unwrap();
}

#[test]
fn a_program_is_loaded_again_once_all_its_workers_are_there() {
    let mut w = two_by_two();
    let (id, program) = gang(&mut w, &[0, 2], &[]);
    w.turn([lost(0)]);
    w.turn([lost(1)]);
    w.turn([hello(1, 3, "g:3")]);
    assert_eq!(sent(&w), []);
    assert_eq!(error(w.ask(A, run(program, 1, 2))).code, Code::Unavailable);
    w.turn([hello(0, 4, "g:4")]);
    let loads: Vec<(u32, String)> = sent(&w)
        .into_iter()
        .map(|(slot, c)| match c {
            Command::Load { executable, gang: Some(gang), .. } if executable == id => (slot, gang.others[0].address.clone()),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(loads, [(0, "g:3".to_owned()), (1, "g:4".to_owned())], "each hears where the other is now");
    let says = |slot, life, result: Result<(), Status>| Event::Report {
        slot: HostSlot(slot),
        incarnation: Incarnation(life),
        report: Report::Loaded { executable: id, result },
    };
    // One of them is another machine: it is compiled again, by one first.
    w.turn([says(0, 4, Ok(())), says(1, 3, Err(Status::not_found("not in the cache")))]);
    assert!(matches!(&sent(&w)[..], [(0, Command::Compile(c))] if c.executable == id), "{:?}", w.fx);
    let compiled = |slot, life| Event::Report {
        slot: HostSlot(slot),
        incarnation: Incarnation(life),
        report: Report::Compiled { executable: id, result: Ok(report("f", 8, 2, &[], 0)) },
    };
    w.turn([compiled(0, 4)]);
    assert!(matches!(&sent(&w)[..], [(1, Command::Compile(_))]), "{:?}", w.fx);
    w.turn([compiled(1, 3)]);
    assert!(matches!(&sent(&w)[..], [(0, Command::Load { .. }), (1, Command::Load { .. })]), "{:?}", w.fx);
    w.turn([says(0, 4, Ok(())), says(1, 3, Ok(()))]);
    upload_on(&mut w, 1, 8, &[0, 2]);
    execute(&mut w, program, 1, 2);
    assert_eq!(launched(&w).len(), 2);
}

/// The devices take different branches: one worker has ended its part, the other waits in a collective.
#[test]
fn who_has_ended_will_not_come_to_a_collective() {
    let mut w = two_by_two();
    let (_, program) = gang(&mut w, &[0, 2], &[]);
    upload_on(&mut w, 1, 8, &[0, 2]);
    let stuck = execute(&mut w, program, 1, 2);
    let late = |run, on| Event::Report { slot: HostSlot(1), incarnation: Incarnation(2), report: Report::Late { run, on: HostSlot(on) } };
    w.turn([late(stuck, 0)]);
    w.now += 20_000_000_000;
    w.turn([late(stuck, 0)]);
    assert_eq!(cancelled(&w), [], "a step may take long");
    w.turn([finished(0, stuck, Ok(()))]);
    w.now += 9_000_000_000;
    w.turn([late(stuck, 0)]);
    assert_eq!(cancelled(&w), [], "what it has sent may be on its way");
    w.now += 2_000_000_000;
    w.turn([late(stuck, 1), late(RunId(999), 0)]);
    assert_eq!(cancelled(&w), [], "about somebody else");
    w.turn([late(stuck, 0)]);
    assert_eq!(cancelled(&w), [(1, stuck)]);
    w.turn([late(stuck, 0)]);
    assert_eq!(cancelled(&w), [], "once");
    w.turn([finished(1, stuck, Err(Status::new(Code::Cancelled, "cancelled")))]);
    let status = error(check(&mut w, 2));
    assert!(status.message.contains("do not meet in a collective: worker 1 waits there, but worker 0"), "{status}");
    w.core.audit().unwrap();
}
