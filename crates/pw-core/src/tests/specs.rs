//! Arrays made by a word of the client alone: with an error, or under another spec.

use super::*;

fn bitcast(array: u64, result: u64, dtype: DType, dims: Vec<i64>, devices: u32, copy: CopySemantics) -> Request {
    let Request::MakeArray { spec, .. } = make(result, dims[0], devices) else { unreachable!() };
    let specs = vec![ArraySpec { dtype, dims, ..spec }];
    Request::BitcastArrays { arrays: vec![Handle(array)], results: vec![Handle(result)], specs, copy }
}

#[test]
fn arrays_with_an_error_carry_it_wherever_they_go() {
    let mut w = World::new(1, None);
    w.open(A, "a", 1);
    let program = w.compile(A, 1, report("f", 8, 1, &[], 0));
    w.upload(A, 1, 8, 1);
    assert!(w.ask(A, run(program, 1, 0)).is_some_and(|reply| reply.is_ok()), "the first run gets its handles from here");
    let status = Status::new(Code::DataLoss, "the client's own error");
    let arrays = vec![Handle(3), Handle(4)];
    let made = w.ask(A, Request::MakeErrorArrays { arrays: arrays.clone(), status: status.clone() });
    assert_eq!(made, Some(Ok(Reply::MakeErrorArrays(arrays))));
    assert_eq!(error(w.ask(A, Request::CheckValueReady { values: vec![Handle(3)] })), status);
    let ran = error(w.ask(A, run(program, 4, 5)));
    assert_eq!(ran.code, status.code);
    assert!(ran.message.contains(&status.message), "{ran:?}");
    assert_eq!(error(w.ask(A, Request::CheckValueReady { values: vec![Handle(5)] })).code, status.code);
    assert_eq!(w.ask(A, destruct(&[3, 4, 5])), Some(Ok(Reply::DestructArrays)));
}

#[test]
fn a_bitcast_shares_the_shards() {
    let mut w = World::new(2, None);
    w.open(A, "a", 1);
    let uploaded = w.upload(A, 1, 8, 2);
    w.done(uploaded);
    // Four on each device, as one array of eight or as the same four twice.
    let mut same = bitcast(1, 2, DType::F32, vec![4], 2, CopySemantics::ReuseInput);
    let Request::BitcastArrays { specs, .. } = &mut same else { unreachable!() };
    specs[0].sharding.partition = Partition::Replicated;
    assert_eq!(w.ask(A, same), Some(Ok(Reply::BitcastArrays(vec![Handle(2)]))));
    assert_eq!(w.core.directory.backings.len(), 1);
    assert_eq!(w.ask(A, Request::CheckValueReady { values: vec![Handle(1), Handle(2)] }), Some(Ok(Reply::CheckValueReady)));

    let donated = bitcast(2, 3, DType::F32, vec![8], 2, CopySemantics::DonateInput);
    assert_eq!(w.ask(A, donated), Some(Ok(Reply::BitcastArrays(vec![Handle(3)]))));
    assert_eq!(w.ask(A, Request::IsArrayDeleted { array: Handle(2) }), Some(Ok(Reply::IsArrayDeleted(true))));
    w.ask(A, destruct(&[1, 2]));
    assert_eq!(w.commands(), []);
    w.ask(A, destruct(&[3]));
    assert!(matches!(w.commands()[..], [Command::Free { .. }]), "the last owner frees the bytes");
}

#[test]
fn a_bitcast_to_another_type_or_shape_is_refused() {
    let mut w = World::new(2, None);
    w.open(A, "a", 1);
    w.upload(A, 1, 8, 2);
    for (result, dtype, dims) in [(2, DType::S32, vec![8]), (3, DType::F32, vec![16])] {
        let status = error(w.ask(A, bitcast(1, result, dtype, dims, 2, CopySemantics::ReuseInput)));
        assert_eq!(status.code, Code::Unimplemented);
        assert!(status.message.contains("f32[4]") && status.message.contains("bitcast_convert_type"), "{status:?}");
        assert_eq!(error(w.ask(A, Request::CheckValueReady { values: vec![Handle(result)] })), status);
    }
    let status = error(w.ask(A, bitcast(1, 4, DType::F32, vec![8], 1, CopySemantics::ReuseInput)));
    assert!(status.message.contains("other devices"), "{status:?}");
    assert_eq!(error(w.ask(A, bitcast(9, 5, DType::F32, vec![8], 2, CopySemantics::ReuseInput))).code, Code::NotFound);
}
