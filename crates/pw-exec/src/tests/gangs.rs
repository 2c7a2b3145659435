//! One worker's part of programs over several: outputs with shards elsewhere, and runs that are given up.

use std::sync::Arc;

use super::*;
use crate::LoadedProgram;

/// `f32[4]` on these devices, as these of three members.
fn part(devices: &[u32], members: &[u32], parameters: u32, donated: &[u32]) -> Arc<LoadedProgram> {
    let local = LoadedProgram::clone(&program(devices, parameters, 1, donated));
    Arc::new(LoadedProgram { members: members.to_vec(), total: 3, ..local })
}

fn load(s: &mut Script, id: u64, program: Arc<LoadedProgram>) -> Vec<String> {
    let peer = GangPeer { slot: HostSlot(1), incarnation: Incarnation(2), address: "b:2".to_owned(), members: vec![] };
    let gang = Some(GangPart { members: 3, here: vec![], others: vec![peer] });
    let mut said = s.command(Command::Load { executable: ExecutableId(id), fingerprint: Bytes::new(), gang });
    said.extend(s.event(ExecEvent::Loaded { executable: ExecutableId(id), result: Ok(program) }));
    said
}

/// A launch with these shards of output 0 of a run.
fn launch(s: &mut Script, run: u64, executable: u64, source: u64, shards: &[u32]) -> Vec<String> {
    let order = s.order(run);
    let segments = shards.iter().map(|&first| Segment { buffer: id(source), first, count: 1 }).collect();
    let arguments = vec![Argument { segments, donate: false }];
    s.command(Command::Launch(Launch { order, executable: ExecutableId(executable), arguments, launch_id: 0 }))
}

#[test]
fn the_others_are_known_before_the_program_is_there() {
    let mut s = Script::new(2);
    let program = part(&[0, 1], &[0, 2], 0, &[]);
    assert_eq!(load(&mut s, 1, program), ["neighbours 1", "load e1", "loaded e1 true"]);
    // Loaded already; but they may be somewhere else now.
    let gang = Some(GangPart { members: 3, here: vec![], others: vec![] });
    let again = s.command(Command::Load { executable: ExecutableId(1), fingerprint: Bytes::new(), gang });
    assert_eq!(again, ["neighbours 0", "loaded e1 true"]);
}

#[test]
fn a_part_names_its_members_in_order() {
    let mut s = Script::new(2);
    for (devices, members) in [(&[0, 1][..], &[1, 0][..]), (&[0, 1], &[1, 3]), (&[0, 1], &[1]), (&[0, 0], &[0, 1])] {
        let said = load(&mut s, 1, part(devices, members, 0, &[]));
        assert_eq!(said.last().unwrap(), "loaded e1 false", "{members:?} on {devices:?}");
    }
}

#[test]
fn an_output_has_shards_elsewhere_which_nobody_here_can_read() {
    let mut s = Script::new(2);
    load(&mut s, 1, part(&[1, 0], &[0, 2], 0, &[]));
    load(&mut s, 2, part(&[1, 0], &[0, 2], 1, &[]));
    assert_eq!(s.launch(10, 1, 0, &[]), ["launch r10 on 0: -> b0"]);
    assert_eq!(s.done(10), ["finished r10"]);
    // Only what is here takes memory.
    assert_eq!(s.core.bytes_in_use(), [16, 16]);
    // Its own shards are the argument of the next.
    assert_eq!(launch(&mut s, 11, 2, 10, &[0, 2]), ["launch r11 on 0: b0[0+1]+b0[2+1] -> b1"]);
    assert_eq!(s.done(11), ["finished r11"]);
    assert_eq!(s.read(12, 11), ["read r12 b1[0+1]"]);
    let elsewhere = "Internal: shard 1 of buffer 10.0 is on another worker";
    assert_eq!(launch(&mut s, 13, 2, 10, &[0, 1]), ["abandon r13".to_owned(), format!("finished r13: {elsewhere}")]);
    let order = s.order(14);
    let item = CopyItem { source: ShardId { buffer: id(10), shard: 1 }, device: 0 };
    let copy = s.command(Command::Copy(CopyShards { order, items: vec![item], memory_kind: None }));
    assert_eq!(copy, [format!("finished r14: {elsewhere}")]);
    s.event(ExecEvent::ReadDone { run: RunId(12), bytes: 0, result: Ok(()) });
    [10, 11, 13, 14].into_iter().for_each(|run| drop(s.free(run)));
    assert_eq!(s.core.leftovers(), None);
}

#[test]
fn a_part_takes_one_shard_for_each_member_here() {
    let mut s = Script::new(2);
    load(&mut s, 1, part(&[0, 1], &[0, 2], 1, &[]));
    s.array(10, &[0, 1]);
    let all = launch(&mut s, 11, 1, 10, &[0]);
    assert_eq!(all[0], "abandon r11");
    assert!(all[1].starts_with("finished r11: InvalidArgument"), "{all:?}");
}

#[test]
fn a_run_that_does_not_start_is_given_up() {
    let mut s = Script::new(1);
    load(&mut s, 1, part(&[0], &[1], 1, &[]));
    // Its program is not here.
    assert_eq!(s.launch(10, 9, 0, &[])[0], "abandon r10");
    // It waits, and is cancelled.
    s.write(11, 11, &[0]);
    assert_eq!(s.launch(12, 1, 1, &[11]), NOTHING);
    let text = "Cancelled: nobody wants it";
    assert_eq!(s.cancel(12), ["abandon r12".to_owned(), format!("finished r12: {text}")]);
}

#[test]
fn a_run_whose_input_fails_is_given_up() {
    let mut s = Script::new(1);
    load(&mut s, 1, part(&[0], &[1], 1, &[]));
    s.write(11, 11, &[0]);
    s.launch(12, 1, 1, &[11]);
    assert_eq!(s.land(11), ["write r11"]);
    let failed = s.event(ExecEvent::WriteDone { run: RunId(11), result: Err(Arc::new(Status::internal("no"))) });
    assert_eq!(failed, ["finished r11: Internal: no", "abandon r12", "finished r12: Internal: no"]);
    // Named when it has failed.
    assert_eq!(s.launch(13, 1, 1, &[11]), ["abandon r13", "finished r13: Internal: no"]);
}

#[test]
fn a_cancelled_run_that_is_under_way_ends_by_itself() {
    let mut s = Script::new(1);
    load(&mut s, 1, part(&[0], &[1], 0, &[]));
    s.launch(10, 1, 0, &[]);
    assert_eq!(s.cancel(10), ["abandon r10"]);
    assert_eq!(s.failed(10, "given up"), ["abandon r10", "finished r10: Internal: given up"]);
    // Its operands may have been there already.
    s.launch(11, 1, 0, &[]);
    assert_eq!(s.cancel(11), ["abandon r11"]);
    assert_eq!(s.done(11), ["finished r11"]);
    // Long over, and of one worker alone.
    assert_eq!(s.cancel(11), NOTHING);
    s.program(2, &[0], 0, 1, &[]);
    s.launch(12, 2, 0, &[]);
    assert_eq!(s.cancel(12), NOTHING);
    assert_eq!(s.failed(12, "no"), ["finished r12: Internal: no"]);
}
