//! Event scripts: events in, effects out.

mod gangs;

use bytes::Bytes;
use pw_types::*;

use crate::ExecEvent;
use crate::script::{SENDER, SESSION, Script, id, per_device, program};

const NOTHING: [&str; 0] = [];

#[test]
fn a_launch_runs_when_its_upload_has_been_written() {
    let mut s = Script::new(2);
    s.program(1, &[0, 1], 1, 1, &[]);
    assert_eq!(s.write(10, 100, &[0, 1]), NOTHING);
    assert_eq!(s.launch(11, 1, 2, &[10]), NOTHING);
    assert_eq!(s.land(100), ["write r10"]);
    let written = s.event(ExecEvent::WriteDone { run: RunId(10), result: Ok(vec![16, 16]) });
    assert_eq!(written, ["finished r10", "launch r11 on 0: b0[0+2] -> b1"]);
    assert_eq!(s.done(11), ["finished r11"]);
    assert_eq!(s.core.bytes_in_use(), [32, 32]);
}

#[test]
fn an_upload_may_come_before_its_command() {
    let mut s = Script::new(1);
    assert_eq!(s.land(100), NOTHING);
    assert_eq!(s.write(10, 100, &[0]), ["write r10"]);
}

#[test]
fn a_chain_is_handed_ahead_on_one_thread_up_to_the_bound() {
    let mut s = Script::with_ahead(2, 2);
    s.program(1, &[0, 1], 1, 1, &[]);
    s.array(10, &[0, 1]);
    assert_eq!(s.launch(11, 1, 2, &[10]), ["launch r11 on 0: b0[0+2] -> b1"]);
    assert_eq!(s.launch(12, 1, 2, &[11]), ["launch r12 on 0: b1[0+2] -> b2"]);
    assert_eq!(s.launch(13, 1, 2, &[12]), NOTHING);
    assert_eq!(s.done(11), ["finished r11", "launch r13 on 0: b2[0+2] -> b3"]);
}

#[test]
fn a_queue_in_another_threads_hands_is_waited_for() {
    let mut s = Script::new(3);
    s.program(1, &[0, 1], 0, 1, &[]);
    s.program(2, &[1, 2], 0, 1, &[]);
    s.program(3, &[2], 0, 1, &[]);
    assert_eq!(s.launch(11, 1, 2, &[]), ["launch r11 on 0: -> b0"]);
    assert_eq!(s.launch(12, 2, 2, &[]), NOTHING);
    // Device 2 is idle, but its queue is served in grant order.
    assert_eq!(s.launch(13, 3, 1, &[]), NOTHING);
    assert_eq!(s.done(11), ["finished r11", "launch r12 on 1: -> b1"]);
    // Device 2's next launch belongs to another thread than r12.
    assert_eq!(s.done(12), ["finished r12", "launch r13 on 2: -> b2"]);
}

#[test]
fn per_device_launches_overlap_and_may_end_in_another_order() {
    let mut s = Script::new(3);
    s.load(1, per_device(&[0, 1], 0, 1, &[]));
    s.load(2, per_device(&[1, 2], 0, 1, &[]));
    s.program(3, &[2], 0, 1, &[]);
    assert_eq!(s.launch(11, 1, 2, &[]), ["launch r11 on 0+1: -> b0"]);
    // Device 1's thread has r11 before it; device 2's may begin at once.
    assert_eq!(s.launch(12, 2, 2, &[]), ["launch r12 on 1+2: -> b1"]);
    assert_eq!(s.launch(13, 3, 1, &[]), ["launch r13 on 2: -> b2"]);
    // Device 0 is slow with r11.
    assert_eq!(s.done(12), ["finished r12"]);
    assert_eq!(s.done(13), ["finished r13"]);
    assert_eq!(s.done(11), ["finished r11"]);
    assert_eq!(s.core.counts(), (3, 0));
}

#[test]
fn both_forms_share_devices_by_turns() {
    let mut s = Script::new(2);
    s.load(1, per_device(&[0, 1], 1, 1, &[]));
    s.program(2, &[0, 1], 1, 1, &[]);
    s.array(10, &[0, 1]);
    assert_eq!(s.launch(11, 1, 2, &[10]), ["launch r11 on 0+1: b0[0+2] -> b1"]);
    assert_eq!(s.launch(12, 1, 2, &[11]), ["launch r12 on 0+1: b1[0+2] -> b2"]);
    // Device 1's queue is with its own thread, and a gang would run there from thread 0.
    assert_eq!(s.launch(13, 2, 2, &[12]), NOTHING);
    assert_eq!(s.launch(14, 1, 2, &[13]), NOTHING);
    assert_eq!(s.done(11), ["finished r11"]);
    assert_eq!(s.done(12), ["finished r12", "launch r13 on 0: b2[0+2] -> b3"]);
    assert_eq!(s.done(13), ["finished r13", "launch r14 on 0+1: b3[0+2] -> b4"]);
}

#[test]
fn brief_launches_wait_for_their_threads_to_be_free_and_then_need_one() {
    let mut s = Script::new(2);
    s.load(1, per_device(&[0, 1], 0, 1, &[]));
    assert_eq!(s.launch(11, 1, 2, &[]), ["launch r11 on 0+1: -> b0"]);
    assert_eq!(s.launch(12, 1, 2, &[]), ["launch r12 on 0+1: -> b1"]);
    // Now it is known how short they are, but r12 was sent off as one that may be long: it is followed.
    assert_eq!(s.done_soon(11), ["finished r11"]);
    assert_eq!(s.launch(13, 1, 2, &[]), ["launch r13 on 0+1: -> b2"]);
    assert_eq!(s.done_soon(12), ["finished r12"]);
    // r13 is short: worth waiting for.
    assert_eq!(s.launch(14, 1, 2, &[]), NOTHING);
    assert_eq!(s.launch(15, 1, 2, &[]), NOTHING);
    assert_eq!(s.done_soon(13), ["finished r13", "launch r14 on 0: -> b3", "launch r15 on 0: -> b4"]);
}

#[test]
fn a_brief_launch_follows_long_ones_and_long_ones_wait_for_it() {
    let mut s = Script::new(2);
    s.load(1, per_device(&[0, 1], 0, 1, &[]));
    s.load(2, per_device(&[0, 1], 0, 1, &[]));
    s.launch(10, 1, 2, &[]);
    s.done_soon(10);
    assert_eq!(s.launch(11, 2, 2, &[]), ["launch r11 on 0+1: -> b1"]);
    assert_eq!(s.launch(12, 1, 2, &[]), ["launch r12 on 0+1: -> b2"]);
    assert_eq!(s.done(11), ["finished r11"]);
    assert_eq!(s.done_soon(12), ["finished r12"]);
    assert_eq!(s.launch(13, 1, 2, &[]), ["launch r13 on 0: -> b3"]);
    // Device 1 is in the hands of thread 0.
    assert_eq!(s.launch(14, 2, 2, &[]), NOTHING);
    assert_eq!(s.done_soon(13), ["finished r13", "launch r14 on 0+1: -> b4"]);
}

#[test]
fn the_bound_on_what_is_ahead_holds_for_every_member() {
    let mut s = Script::with_ahead(2, 1);
    s.load(1, per_device(&[0, 1], 0, 1, &[]));
    s.program(2, &[1], 0, 1, &[]);
    s.launch(11, 2, 1, &[]);
    assert_eq!(s.launch(12, 1, 2, &[]), NOTHING);
    assert_eq!(s.done(11), ["finished r11", "launch r12 on 0+1: -> b1"]);
}

#[test]
fn a_launch_that_waits_for_data_holds_up_its_own_devices_only() {
    let mut s = Script::new(2);
    s.program(1, &[0], 1, 1, &[]);
    s.program(2, &[1], 0, 1, &[]);
    s.program(3, &[0], 0, 1, &[]);
    s.write(10, 100, &[0]);
    assert_eq!(s.launch(11, 1, 1, &[10]), NOTHING);
    assert_eq!(s.launch(12, 2, 1, &[]), ["launch r12 on 1: -> b2"]);
    assert_eq!(s.launch(13, 3, 1, &[]), NOTHING);
    s.land(100);
    let written = s.event(ExecEvent::WriteDone { run: RunId(10), result: Ok(vec![16]) });
    assert_eq!(written, ["finished r10", "launch r11 on 0: b0[0+1] -> b1", "launch r13 on 0: -> b3"]);
}

#[test]
fn a_failed_launch_poisons_what_depends_on_it_and_nothing_else() {
    let mut s = Script::with_ahead(1, 1);
    s.program(1, &[0], 1, 1, &[]);
    s.array(10, &[0]);
    s.launch(11, 1, 1, &[10]);
    s.launch(12, 1, 1, &[11]);
    s.launch(13, 1, 1, &[10]);
    s.read(14, 12);
    let effects = s.failed(11, "boom");
    let expected = [
        "finished r11: Internal: boom",
        "finished r12: Internal: boom",
        "launch r13 on 0: b0[0+1] -> b3",
        "read failed h14: Internal: boom",
        "finished r14: Internal: boom",
    ];
    assert_eq!(effects, expected);
    assert_eq!(s.done(13), ["finished r13"]);
    // Arriving later changes nothing.
    assert_eq!(s.launch(15, 1, 1, &[12]), ["finished r15: Internal: boom"]);
}

#[test]
fn handed_ahead_launches_report_the_poison_they_met() {
    let mut s = Script::new(1);
    s.program(1, &[0], 1, 1, &[]);
    s.array(10, &[0]);
    s.launch(11, 1, 1, &[10]);
    s.launch(12, 1, 1, &[11]);
    assert_eq!(s.failed(11, "boom"), ["finished r11: Internal: boom"]);
    assert_eq!(s.failed(12, "boom"), ["finished r12: Internal: boom"]);
    assert_eq!(s.core.counts(), (3, 0));
}

#[test]
fn cancel_ends_what_has_not_started() {
    let mut s = Script::with_ahead(2, 1);
    s.program(1, &[0, 1], 0, 1, &[]);
    s.program(2, &[1], 1, 1, &[]);
    s.launch(11, 1, 2, &[]);
    s.launch(12, 1, 2, &[]);
    s.array(20, &[1]);
    s.launch(13, 2, 1, &[20]);
    s.launch(14, 1, 2, &[]);
    assert_eq!(s.cancel(11), NOTHING);
    assert_eq!(s.cancel(12), ["finished r12: Cancelled: nobody wants it"]);
    assert_eq!(s.cancel(12), NOTHING);
    assert_eq!(s.done(11), ["finished r11", "launch r13 on 1: b2[0+1] -> b3"]);
    assert_eq!(s.done(13), ["finished r13", "launch r14 on 0: -> b4"]);
}

#[test]
fn cancel_fails_a_write_that_waits_for_bytes_and_drops_them_when_they_come() {
    let mut s = Script::new(1);
    s.program(1, &[0], 1, 1, &[]);
    s.write(10, 100, &[0]);
    s.launch(11, 1, 1, &[10]);
    let text = "Cancelled: nobody wants it";
    assert_eq!(s.cancel(10), [format!("finished r10: {text}"), format!("finished r11: {text}")]);
    assert_eq!(s.land(100), ["drop upload h100"]);
}

#[test]
fn a_failed_upload_poisons() {
    let mut s = Script::new(1);
    let failure = |b| ExecEvent::UploadFailed { session: SESSION, buffer: Handle(b), status: Status::invalid("too short") };
    s.write(10, 100, &[0]);
    assert_eq!(s.event(failure(100)), ["finished r10: InvalidArgument: too short"]);
    assert_eq!(s.event(failure(101)), NOTHING);
    assert_eq!(s.write(11, 101, &[0]), ["finished r11: InvalidArgument: too short"]);
    assert_eq!(s.read(12, 11), ["read failed h12: InvalidArgument: too short", "finished r12: InvalidArgument: too short"]);
}

#[test]
fn a_session_that_goes_takes_its_uploads_with_it() {
    let mut s = Script::new(1);
    s.land(100);
    s.write(10, 101, &[0]);
    let gone = s.event(ExecEvent::SessionDetached { session: SESSION });
    let text = "Cancelled: session 7 ended before its host buffer 101 had arrived";
    assert_eq!(gone, [format!("finished r10: {text}"), "drop upload h100".to_owned()]);
    let late = s.write(11, 102, &[0]);
    assert_eq!(late, ["finished r11: Cancelled: session 7 ended before its host buffer 102 had arrived"]);
}

#[test]
fn free_works_behind_the_last_use() {
    let mut s = Script::with_ahead(1, 1);
    s.program(1, &[0], 1, 1, &[]);
    s.array(10, &[0]);
    s.launch(11, 1, 1, &[10]);
    s.launch(12, 1, 1, &[10]);
    assert_eq!(s.free(10), NOTHING);
    assert_eq!(s.free(11), NOTHING);
    assert_eq!(s.launch(13, 1, 1, &[10]), ["finished r13: NotFound: buffer 10.0 is not on this worker"]);
    assert_eq!(s.done(11), ["drop b1", "finished r11", "launch r12 on 0: b0[0+1] -> b2"]);
    assert_eq!(s.done(12), ["drop b0", "finished r12"]);
    assert_eq!(s.free(12), ["drop b2"]);
    assert_eq!(s.core.bytes_in_use(), [0]);
    // What the shell never saw is not dropped there: the refused r13.
    assert_eq!(s.free(13), NOTHING);
    assert_eq!(s.core.counts(), (0, 0));
}

#[test]
fn donation_takes_the_storage() {
    let mut s = Script::new(1);
    s.program(1, &[0], 2, 1, &[0]);
    s.array(10, &[0]);
    s.array(20, &[0]);
    // Only parameter 0 can be donated.
    assert_eq!(s.launch(11, 1, 1, &[-10, -20]), ["launch r11 on 0: !b0[0+1] b1[0+1] -> b2"]);
    let refused = s.launch(12, 1, 1, &[20, 10]);
    assert_eq!(refused, ["finished r12: FailedPrecondition: buffer 10.0 has been donated to run 11"]);
    assert_eq!(s.core.bytes_in_use(), [32]);
    assert_eq!(s.done(11), ["finished r11"]);
    assert_eq!(s.core.bytes_in_use(), [32]);
    assert_eq!(s.free(10), ["drop b0"]);
    assert_eq!(s.core.bytes_in_use(), [32]);
}

#[test]
fn an_argument_given_twice_is_not_donated() {
    let mut s = Script::new(1);
    s.program(1, &[0], 2, 1, &[0, 1]);
    s.array(10, &[0]);
    assert_eq!(s.launch(11, 1, 1, &[-10, -10]), ["launch r11 on 0: b0[0+1] b0[0+1] -> b1"]);
}

#[test]
fn donation_waits_for_transfers_that_were_granted_before() {
    let mut s = Script::new(2);
    s.program(1, &[0], 1, 1, &[0]);
    s.array(10, &[0]);
    assert_eq!(s.read(11, 10), ["read r11 b0[0+1]"]);
    assert_eq!(s.copy(12, 10, &[1]), ["copy r12 to [1]"]);
    assert_eq!(s.launch(13, 1, 1, &[-10]), NOTHING);
    assert_eq!(s.event(ExecEvent::ReadDone { run: RunId(11), bytes: 0, result: Ok(()) }), ["finished r11"]);
    let copied = s.event(ExecEvent::CopyDone { run: RunId(12), result: Ok(vec![16]) });
    assert_eq!(copied, ["finished r12", "launch r13 on 0: !b0[0+1] -> b2"]);
}

#[test]
fn transfers_start_in_grant_order_when_their_source_is_made() {
    let mut s = Script::new(2);
    s.program(1, &[0], 0, 1, &[]);
    s.launch(11, 1, 1, &[]);
    assert_eq!(s.copy(12, 11, &[1]), NOTHING);
    assert_eq!(s.read(13, 11), NOTHING);
    assert_eq!(s.copy(14, 12, &[0]), NOTHING);
    assert_eq!(s.done(11), ["finished r11", "copy r12 to [1]", "read r13 b0[0+1]"]);
    let copied = s.event(ExecEvent::CopyDone { run: RunId(12), result: Ok(vec![16]) });
    assert_eq!(copied, ["finished r12", "copy r14 to [0]"]);
}

#[test]
fn arguments_are_checked_before_anything_runs() {
    let mut s = Script::new(2);
    s.program(1, &[0, 1], 1, 1, &[]);
    s.array(10, &[1, 0]);
    assert_eq!(s.launch(11, 1, 2, &[]), ["finished r11: InvalidArgument: jit_f takes 1 arguments, got 0"]);
    let one = s.launch(12, 1, 1, &[10]);
    assert_eq!(one, ["finished r12: InvalidArgument: argument 0 of jit_f: 1 shards for 2 devices"]);
    let swapped = s.launch(13, 1, 2, &[10]);
    assert_eq!(swapped, ["finished r13: InvalidArgument: argument 0 of jit_f: shard 0 is on device 1, wanted on device 0"]);
    let targets = (0..2).map(|d| HostWriteTarget { shard: d, device: d, region: None }).collect();
    let source = HostWriteSource { buffer: Handle(5), dtype: DType::S32, dims: vec![2, 2], byte_strides: None, targets };
    let order = s.order(14);
    s.command(Command::HostWrite(HostWrite {
        order,
        sender: SESSION,
        sources: vec![source],
        memory_kind: Some("pinned_host".to_owned()),
        shards: 2,
    }));
    let wrong = s.launch(15, 1, 2, &[14]);
    let text = "wanted f32[4] in memory \"device\" on each device, got s32[2,2] in memory \"pinned_host\"";
    assert_eq!(wrong, [format!("finished r15: InvalidArgument: argument 0 of jit_f: {text}")]);
    let unknown = s.launch(16, 1, 2, &[99]);
    assert_eq!(unknown, ["finished r16: NotFound: buffer 99.0 is not on this worker"]);
    let dependent = s.launch(17, 1, 2, &[16]);
    assert_eq!(dependent, ["finished r17: NotFound: buffer 99.0 is not on this worker"]);
}

#[test]
fn commands_wait_behind_a_program_that_is_being_loaded() {
    let mut s = Script::new(1);
    let load = Command::Load { executable: ExecutableId(1), fingerprint: Bytes::new(), gang: None };
    assert_eq!(s.command(load.clone()), ["load e1"]);
    assert_eq!(s.launch(11, 1, 1, &[]), NOTHING);
    assert_eq!(s.free(11), NOTHING);
    let result = Ok(program(&[0], 0, 1, &[]));
    let loaded = s.event(ExecEvent::Loaded { executable: ExecutableId(1), result });
    assert_eq!(loaded, ["loaded e1 true", "launch r11 on 0: -> b0"]);
    assert_eq!(s.done(11), ["drop b0", "finished r11"]);
    assert_eq!(s.command(load), ["loaded e1 true"]);
}

#[test]
fn a_failed_load_poisons_what_depends_on_it() {
    let mut s = Script::new(1);
    s.command(Command::Load { executable: ExecutableId(1), fingerprint: Bytes::new(), gang: None });
    s.program(2, &[0], 1, 1, &[]);
    s.launch(11, 1, 1, &[]);
    s.launch(12, 2, 1, &[11]);
    let failed = s.event(ExecEvent::Loaded { executable: ExecutableId(1), result: Err(Status::internal("bad blob")) });
    assert_eq!(failed, ["loaded e1 false", "abandon r11", "finished r11: Internal: bad blob", "finished r12: Internal: bad blob"]);
    let unknown = s.launch(13, 9, 1, &[]);
    assert_eq!(unknown, ["abandon r13", "finished r13: NotFound: executable 9 is not loaded on this worker"]);
}

#[test]
fn unload_works_behind_the_last_launch() {
    let mut s = Script::new(1);
    s.program(1, &[0], 0, 1, &[]);
    s.launch(11, 1, 1, &[]);
    s.launch(12, 1, 1, &[]);
    assert_eq!(s.command(Command::Unload { executable: ExecutableId(1) }), NOTHING);
    assert_eq!(s.done(11), ["finished r11"]);
    assert_eq!(s.done(12), ["unload e1", "finished r12"]);
}

#[test]
fn a_broken_chain_is_fatal() {
    let mut s = Script::new(1);
    s.array(10, &[0]);
    s.order(11);
    let broken = s.read(12, 10);
    assert_eq!(broken, ["fatal: broken command chain: run 12 has grant 3 after 2, but the last one here was 1"]);
    assert_eq!(s.read(13, 10), NOTHING);
}

#[test]
fn memory_is_reported_once_per_turn_when_it_has_changed_much() {
    let mut s = Script::new(2);
    s.program(1, &[1], 0, 1, &[]);
    s.array(10, &[0]);
    assert_eq!(s.event(ExecEvent::EndOfTurn), NOTHING);
    s.launch(11, 1, 1, &[]);
    s.done_with(11, &[2 << 20]);
    assert_eq!(s.event(ExecEvent::EndOfTurn), ["memory [16, 2097152]"]);
    assert_eq!(s.event(ExecEvent::EndOfTurn), NOTHING);
    s.free(11);
    s.free(10);
    assert_eq!(s.event(ExecEvent::EndOfTurn), ["memory [0, 0]"]);
}

#[test]
fn an_array_may_have_shards_on_other_workers() {
    let mut s = Script::new(1);
    s.program(1, &[0], 1, 1, &[]);
    let target = HostWriteTarget { shard: 1, device: 0, region: None };
    let source = HostWriteSource { buffer: Handle(5), dtype: DType::F32, dims: vec![4], byte_strides: None, targets: vec![target] };
    let order = s.order(10);
    s.command(Command::HostWrite(HostWrite { order, sender: SESSION, sources: vec![source], memory_kind: None, shards: 2 }));
    assert_eq!(s.land(5), ["write r10"]);
    s.event(ExecEvent::WriteDone { run: RunId(10), result: Ok(vec![0, 16]) });
    assert_eq!(s.core.bytes_in_use(), [16]);
    let segments = |first| vec![Argument { segments: vec![Segment { buffer: id(10), first, count: 1 }], donate: false }];
    let mut launch = |run, first| {
        let order = s.order(run);
        let launch = Launch { order, executable: ExecutableId(1), arguments: segments(first), launch_id: 0 };
        s.command(Command::Launch(launch))
    };
    assert_eq!(launch(11, 0), ["finished r11: Internal: shard 0 of buffer 10.0 is on another worker"]);
    assert_eq!(launch(12, 1), ["launch r12 on 0: b0[1+1] -> b2"]);
}

#[test]
fn writes_that_make_no_sense_are_refused() {
    let mut s = Script::new(1);
    let source = |targets| HostWriteSource { buffer: Handle(5), dtype: DType::F32, dims: vec![4], byte_strides: None, targets };
    let target = |device, start| HostWriteTarget { shard: 0, device, region: Some(Region { start: vec![start], dims: vec![2] }) };
    for (run, targets, expected) in [
        (1, vec![target(0, 3)], "InvalidArgument: Region { start: [3], dims: [2] } does not lie in f32[4]"),
        (2, vec![target(4, 0)], "Internal: write to device 4 of 1"),
        (3, vec![target(0, 0), target(0, 2)], "Internal: shard 0 of 1 is written twice or unknown"),
    ] {
        let order = s.order(run);
        let write = HostWrite { order, sender: SESSION, sources: vec![source(targets)], memory_kind: None, shards: 1 };
        assert_eq!(s.command(Command::HostWrite(write)), [format!("finished r{run}: {expected}")]);
    }
    // Its bytes come nevertheless.
    assert_eq!(s.land(5), ["drop upload h5"]);
    assert_eq!(s.core.counts().1, 0);
}

#[test]
fn a_send_starts_when_its_source_is_made_and_a_donation_waits_for_it() {
    let mut s = Script::new(1);
    s.program(1, &[0], 0, 1, &[]);
    s.program(2, &[0], 1, 1, &[0]);
    s.launch(10, 1, 1, &[]);
    assert_eq!(s.send(11, 10), NOTHING);
    assert_eq!(s.launch(12, 2, 1, &[-10]), NOTHING);
    assert_eq!(s.done(10), ["finished r10", "send r11 b0[0+1]"]);
    let sent = s.event(ExecEvent::SendDone { run: RunId(11), bytes: 0, result: Ok(()) });
    assert_eq!(sent, ["finished r11", "launch r12 on 0: !b0[0+1] -> b1"]);
}

#[test]
fn the_other_worker_hears_of_a_send_that_will_not_be() {
    let mut s = Script::new(1);
    s.program(1, &[0], 0, 1, &[]);
    s.launch(10, 1, 1, &[]);
    s.send(11, 10);
    assert_eq!(s.failed(10, "boom"), ["finished r10: Internal: boom", "send failed r11: Internal: boom", "finished r11: Internal: boom"]);
    assert_eq!(s.send(12, 10), ["send failed r12: Internal: boom", "finished r12: Internal: boom"]);
    // One that is under way is given up by the shell.
    s.array(13, &[0]);
    assert_eq!(s.send(14, 13), ["send r14 b1[0+1]"]);
    assert_eq!(s.cancel(14), ["stop send r14"]);
}

#[test]
fn a_move_that_has_arrived_outlives_its_sender() {
    let mut s = Script::new(1);
    let landed = |buffer| ExecEvent::Landed { session: SENDER, buffer: Handle(buffer), bytes: 0 };
    s.event(landed(10));
    s.event(ExecEvent::SessionDetached { session: SENDER });
    // The command was slower than the bytes.
    assert_eq!(s.receive(10, 0), ["write r10"]);
    assert_eq!(s.receive(11, 0), NOTHING);
    // The controller has heard that it is gone.
    let gone = s.cancel(11);
    assert!(gone[0].starts_with("finished r11: Cancelled"), "{gone:?}");
    // Nobody will ask for this one any more.
    assert_eq!(s.event(landed(11)), ["drop upload h11"]);
    s.event(ExecEvent::WriteDone { run: RunId(10), result: Ok(vec![16]) });
    s.free(10);
    s.free(11);
    assert_eq!(s.core.leftovers(), None);
}

#[test]
fn a_move_is_received_also_after_its_sender_came_back() {
    let mut s = Script::new(1);
    assert_eq!(s.receive(10, 0), NOTHING);
    let landed = |buffer| ExecEvent::Landed { session: SENDER, buffer: Handle(buffer), bytes: 0 };
    assert_eq!(s.event(landed(10)), ["write r10"]);
    s.event(ExecEvent::WriteDone { run: RunId(10), result: Ok(vec![16]) });
    // Its connection goes: what waits and what is ordered later may come over a new one.
    s.receive(11, 0);
    assert_eq!(s.event(ExecEvent::SessionDetached { session: SENDER }), NOTHING);
    assert_eq!(s.receive(12, 0), NOTHING);
    s.event(ExecEvent::SessionAttached { session: SENDER });
    assert_eq!(s.event(landed(11)), ["write r11"]);
    assert_eq!(s.event(landed(12)), ["write r12"]);
}
