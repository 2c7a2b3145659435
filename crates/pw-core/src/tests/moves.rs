//! Moves between workers: who is told what, and what happens when one of the two ends goes.

use super::parts::{finished, two_workers};
use super::*;

/// An array of one shard on worker 0, ready; and the commands of its copy to worker 1.
fn copy_to_the_other() -> (World, Vec<Command>) {
    let (mut w, run) = two_workers();
    w.turn([finished(0, run, Ok(())), finished(1, run, Ok(()))]);
    let parts = Request::Disassemble { array: Handle(1), results: vec![Handle(2), Handle(3)], copy: CopySemantics::ReuseInput };
    w.ask(A, parts).unwrap().unwrap();
    let copy = Request::CopyArrays {
        arrays: vec![Handle(2)],
        results: vec![Handle(4)],
        devices: vec![VirtualDeviceId(1)],
        memory: MemoryTarget::Keep,
        copy: CopySemantics::ReuseInput,
    };
    w.ask(A, copy).unwrap().unwrap();
    let commands = w.commands();
    (w, commands)
}

fn ready(w: &mut World) -> Result<Reply, Status> {
    w.ask(A, Request::CheckValueReady { values: vec![Handle(4)] }).expect("an answer at once")
}

fn lost(slot: u32) -> Event {
    Event::WorkerLost { slot: HostSlot(slot), incarnation: Incarnation(u64::from(slot) + 1), reason: "killed".into() }
}

#[test]
fn both_ends_get_their_share_in_one_turn() {
    let (mut w, commands) = copy_to_the_other();
    let (mut sends, mut writes) = (Vec::new(), Vec::new());
    for command in commands {
        match command {
            Command::Send(send) => sends.push(send),
            Command::HostWrite(write) => writes.push(write),
            other => panic!("{other:?}"),
        }
    }
    let ([send], [write]) = (&sends[..], &writes[..]) else { panic!("{sends:?} {writes:?}") };
    assert_eq!((send.order.run, send.order.seq), (write.order.run, write.order.seq));
    assert_eq!(send.address, "h:1");
    assert_eq!((send.sender, write.sender), (SessionId::of_worker(Incarnation(1)), SessionId::of_worker(Incarnation(1))));
    assert_eq!(send.items[0].buffer, write.sources[0].buffer);
    assert_eq!((write.sources[0].dims.clone(), write.shards), (vec![8], 1));
    assert_eq!(super::parts::reserved(&mut w), [32, 64]);
    w.turn([finished(1, send.order.run, Ok(())), finished(0, send.order.run, Ok(()))]);
    assert_eq!(ready(&mut w), Ok(Reply::CheckValueReady));
    w.core.audit().unwrap();
}

#[test]
fn a_sender_that_dies_poisons_what_has_not_arrived_by_its_name() {
    let (mut w, commands) = copy_to_the_other();
    let run = commands[0].order().unwrap().run;
    // The receiver notices the end of the connection before the controller does.
    w.turn([finished(1, run, Err(Status::new(Code::Cancelled, "the connection ended"))), lost(0)]);
    let status = ready(&mut w).unwrap_err();
    assert_eq!((status.code, status.message.contains("worker 0")), (Code::DataLoss, true), "{status:?}");
    // Worker 1 keeps its own shard only.
    assert_eq!(super::parts::reserved(&mut w), [0, 32]);
    w.core.audit().unwrap();
}

#[test]
fn what_has_arrived_survives_its_sender() {
    let (mut w, commands) = copy_to_the_other();
    let run = commands[0].order().unwrap().run;
    w.turn([finished(1, run, Ok(())), lost(0)]);
    assert_eq!(ready(&mut w), Ok(Reply::CheckValueReady));
    w.core.audit().unwrap();
}

#[test]
fn the_other_end_is_told_that_one_has_failed() {
    for (failed, told) in [(0, 1), (1, 0)] {
        let (mut w, commands) = copy_to_the_other();
        let run = commands[0].order().unwrap().run;
        w.turn([finished(failed, run, Err(Status::internal("boom")))]);
        let cancel = Effect::Send {
            slot: HostSlot(told),
            incarnation: Incarnation(u64::from(told) + 1),
            command: Command::Cancel { runs: vec![run], status: Status::internal("boom") },
        };
        assert!(w.fx.contains(&cancel), "{:?}", w.fx);
        w.turn([finished(told, run, Err(Status::new(Code::Cancelled, "cancelled")))]);
        assert_eq!(ready(&mut w).unwrap_err().message, "boom");
        w.core.audit().unwrap();
    }
}

#[test]
fn a_fetch_gathers_the_parts_of_other_workers_in_host_memory() {
    let (mut w, run) = two_workers();
    w.turn([finished(0, run, Ok(())), finished(1, run, Ok(()))]);
    let fetch = Request::CopyToHost { array: Handle(1), host_buffer: Handle(9), byte_strides: None };
    assert_eq!(w.ask(A, fetch), None);
    let commands = w.commands();
    let [Command::HostWrite(write), Command::Send(_), Command::HostRead(read), Command::Free { .. }] = &commands[..] else {
        panic!("{commands:?}")
    };
    assert_eq!(write.memory_kind.as_deref(), Some("pinned_host"));
    assert_eq!(read.pieces[0].source.buffer.run, run);
    assert_eq!(read.pieces[1].source.buffer.run, write.order.run);
    assert_eq!(super::parts::reserved(&mut w), [32, 32]);
}
