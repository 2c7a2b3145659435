//! Arrays with parts on two workers, one of which fails; and room that a failure makes. Found by the simulator.

use super::*;

/// Two workers with one device each, and an array with a part of 32 bytes on each.
pub(super) fn two_workers() -> (World, RunId) {
    let mut w = World::new(1, Some(64));
    let info = worker(1, Some(64));
    w.turn([Event::WorkerHello { connection: 2, incarnation: Incarnation(2), wanted_slot: None, info }]);
    w.open(A, "a", 1);
    let run = w.upload(A, 1, 16, 2);
    (w, run)
}

pub(super) fn finished(slot: u32, run: RunId, result: Result<(), Status>) -> Event {
    let report = Report::Finished { run, device_ns: 0, result };
    Event::Report { slot: HostSlot(slot), incarnation: Incarnation(u64::from(slot) + 1), report }
}

pub(super) fn reserved(w: &mut World) -> [u64; 2] {
    w.turn([Event::StatusQuery { query: 1 }]);
    let Effect::Status { report, .. } = &w.fx[0] else { panic!("{:?}", w.fx) };
    [report.workers[0].bytes_reserved[0], report.workers[1].bytes_reserved[0]]
}

fn second_is_lost() -> Event {
    Event::WorkerLost { slot: HostSlot(1), incarnation: Incarnation(2), reason: "killed".into() }
}

#[test]
fn a_new_life_is_not_asked_for_what_the_old_one_promised() {
    let (mut w, run) = two_workers();
    let parts = Request::Disassemble { array: Handle(1), results: vec![Handle(2), Handle(3)], copy: CopySemantics::ReuseInput };
    assert!(w.ask(A, parts).unwrap().is_ok());
    let again = Event::WorkerHello { connection: 3, incarnation: Incarnation(3), wanted_slot: None, info: worker(1, Some(64)) };
    w.turn([second_is_lost(), again]);
    // The first worker is still at its part of the run.
    let read = Request::CopyToHost { array: Handle(3), host_buffer: Handle(9), byte_strides: None };
    assert_eq!(error(w.ask(A, read)).code, Code::DataLoss);
    assert!(w.commands().is_empty(), "{:?}", w.commands());
    w.turn([finished(0, run, Ok(()))]);
    w.core.audit().unwrap();
}

#[test]
fn the_part_of_a_living_worker_is_held_until_it_is_freed() {
    let (mut w, run) = two_workers();
    assert_eq!(reserved(&mut w), [32, 32]);
    w.turn([finished(0, run, Ok(())), second_is_lost()]);
    assert_eq!(reserved(&mut w), [32, 0]);
    w.ask(A, destruct(&[1]));
    assert_eq!(w.commands(), [Command::Free { buffers: vec![BufferId { run, output: 0 }] }]);
    assert_eq!(reserved(&mut w), [0, 0]);
}

#[test]
fn a_failed_part_takes_no_memory() {
    let (mut w, run) = two_workers();
    w.turn([finished(1, run, Err(Status::internal("no")))]);
    assert_eq!(reserved(&mut w), [32, 0]);
    w.turn([finished(0, run, Ok(()))]);
    assert_eq!(reserved(&mut w), [32, 0]);
    w.core.audit().unwrap();
    w.ask(A, destruct(&[1]));
    assert_eq!(reserved(&mut w), [0, 0]);
    w.core.audit().unwrap();
}

#[test]
fn room_that_a_failure_makes_is_given_in_the_same_turn() {
    let mut w = World::new(1, Some(96));
    w.open(A, "a", 1);
    w.open(B, "b", 1);
    let greedy = w.compile(B, 1, report("greedy", 8, 1, &[], 300));
    w.upload(A, 1, 8, 1);
    w.upload(A, 2, 8, 1);
    w.upload(B, 1, 8, 1);
    // A waits for what B's run will let go; B's run is looked at later, and fails.
    let (_, execute) = w.event(B, run(greedy, 1, 5));
    let (_, forget) = w.event(B, destruct(&[1]));
    let (_, upload) = w.event(A, make(3, 8, 1));
    w.turn([execute, forget, upload]);
    let commands = w.commands();
    assert!(matches!(commands[..], [Command::Free { .. }, Command::HostWrite(_)]), "{commands:?}");
}

#[test]
fn a_worker_that_comes_back_loads_what_sessions_still_name() {
    let mut w = World::new(1, None);
    w.open(A, "a", 1);
    let f = w.compile(A, 1, report("f", 8, 1, &[], 0));
    let first = w.upload(A, 1, 8, 1);
    w.done(first);
    w.turn([Event::WorkerLost { slot: HostSlot(0), incarnation: Incarnation(1), reason: "killed".into() }]);
    assert_eq!(error(w.ask(A, run(f, 1, 2))).code, Code::Unavailable);
    let hello = |life| Event::WorkerHello { connection: life, incarnation: Incarnation(life), wanted_slot: None, info: worker(1, None) };
    w.turn([hello(2)]);
    let commands = w.commands();
    let [Command::Load { executable, fingerprint, gang: None }] = &commands[..] else { panic!("{commands:?}") };
    assert_eq!(fingerprint, &Bytes::from_static(b"f"));
    let executable = *executable;
    let says = |life, report| Event::Report { slot: HostSlot(0), incarnation: Incarnation(life), report };
    // The run waits for the program, and is sent once it is there.
    w.upload(A, 3, 8, 1);
    w.ask(A, run(f, 3, 0)).unwrap().unwrap();
    assert!(w.commands().is_empty());
    // Another machine has no such thing in its cache.
    w.turn([says(2, Report::Loaded { executable, result: Err(Status::not_found("not in the cache")) })]);
    let commands = w.commands();
    assert!(matches!(&commands[..], [Command::Compile(c)] if c.executable == executable), "{commands:?}");
    w.turn([says(2, Report::Compiled { executable, result: Ok(report("f", 8, 1, &[], 0)) })]);
    assert!(matches!(w.commands()[..], [Command::Load { .. }]));
    w.turn([says(2, Report::Loaded { executable, result: Ok(()) })]);
    assert!(matches!(w.commands()[..], [Command::Launch(_)]), "{:?}", w.commands());
    w.core.audit().unwrap();
}

/// A client aborts where this question is refused.
#[test]
fn a_layout_is_asked_of_whoever_is_left() {
    let (mut w, _) = two_workers();
    let second = Request::DefaultLayout { dtype: DType::F32, dims: vec![8], device: VirtualDeviceId(1), memory_kind: String::new() };
    let asked = |w: &World| match &w.commands()[..] {
        [Command::DefaultLayout { query, .. }] => *query,
        other => panic!("{other:?}"),
    };
    let (op, event) = w.event(A, second.clone());
    w.turn([event]);
    let first_query = asked(&w);
    w.turn([second_is_lost()]);
    let query = asked(&w);
    assert_ne!(query, first_query);
    let report = Report::DefaultLayout { query, result: Ok("{0}".into()) };
    w.turn([Event::Report { slot: HostSlot(0), incarnation: Incarnation(1), report }]);
    assert_eq!(w.reply(op), Some(Ok(Reply::DefaultLayout("{0}".into()))));
    // Known now, whatever is lost.
    assert_eq!(w.ask(A, second), Some(Ok(Reply::DefaultLayout("{0}".into()))));
}
