//! Tests of the encodings of groups and of their modes.

use super::*;
use crate::wire::{put_bytes, put_int};

fn message(parts: &[(u32, &[u8])]) -> Vec<u8> {
    let mut out = Vec::new();
    parts.iter().for_each(|(number, bytes)| put_bytes(&mut out, *number, bytes));
    out
}

/// Groups of an instruction that has one field of groups.
fn groups(number: u32, bytes: &[u8], ids: Ids, replicas: u32, partitions: u32) -> Result<Vec<Vec<u32>>> {
    let raw = message(&[(number, bytes)]);
    let instruction = Instruction { raw: &raw, id: 1, name: "x", opcode: "all-reduce", operands: vec![], control: vec![], called: vec![] };
    groups_of(&instruction, ids, Devices { replicas, partitions })
}

#[test]
fn modes_give_members() {
    let list = message(&[(1, &message(&[(1, &[0, 2])])), (1, &message(&[(1, &[3, 1])]))]);
    let of = |ids, replicas, partitions| groups(field::GROUP_LIST, &list, ids, replicas, partitions).unwrap();
    assert_eq!(of(Ids::Members, 2, 2), [[0, 2], [3, 1]]);
    assert_eq!(of(Ids::Replicas, 4, 1), [[0, 2], [3, 1]]);
    assert_eq!(of(Ids::Replicas, 4, 2), [[0, 4], [1, 5], [6, 2], [7, 3]]);
    assert_eq!(of(Ids::Partitions, 2, 4), [[0, 2], [4, 6], [3, 1], [7, 5]]);
    assert_eq!(of(Ids::ReplicasOfAllPartitions, 4, 2), [[0, 1, 4, 5], [6, 7, 2, 3]]);
    let refused = |ids, replicas, partitions| groups(field::GROUP_LIST, &list, ids, replicas, partitions).unwrap_err().to_string();
    assert!(refused(Ids::Members, 3, 1).ends_with("it names 3 of 3"));
    assert!(refused(Ids::Members, 5, 1).ends_with("member 4 is in no group"));
    assert!(refused(Ids::Replicas, 5, 2).ends_with("member 8 is in no group"));
}

#[test]
fn nothing_is_one_group_of_all() {
    let of = |ids, replicas, partitions| groups(field::GROUP_LIST, &[], ids, replicas, partitions).unwrap();
    assert_eq!(of(Ids::Members, 2, 2), [[0, 1, 2, 3]]);
    assert_eq!(of(Ids::Replicas, 2, 2), [[0, 2], [1, 3]]);
    assert_eq!(of(Ids::Partitions, 2, 2), [[0, 1], [2, 3]]);
    assert_eq!(of(Ids::ReplicasOfAllPartitions, 2, 2), [[0, 1, 2, 3]]);
}

#[test]
fn the_old_list() {
    let old = message(&[(field::GROUPS, &[10, 2, 0, 1]), (field::GROUPS, &[8, 2, 8, 3])]);
    let instruction = Instruction { raw: &old, id: 1, name: "x", opcode: "all-reduce", operands: vec![], control: vec![], called: vec![] };
    assert_eq!(groups_of(&instruction, Ids::Members, Devices { replicas: 1, partitions: 4 }).unwrap(), [[0, 1], [2, 3]]);
}

fn iota(groups: i64, ranks: i64, dims: &[u8], permutation: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    put_int(&mut out, 1, groups);
    put_int(&mut out, 2, ranks);
    put_bytes(&mut out, 3, dims);
    put_bytes(&mut out, 4, permutation);
    out
}

#[test]
fn iotas() {
    let of = |list: Vec<u8>| groups(field::IOTA_GROUPS, &list, Ids::Members, 1, 8);
    assert_eq!(of(iota(2, 4, &[8], &[0])).unwrap(), [[0, 1, 2, 3], [4, 5, 6, 7]]);
    assert_eq!(of(iota(4, 2, &[2, 4], &[1, 0])).unwrap(), [[0, 4], [1, 5], [2, 6], [3, 7]]);
    // [2][2][2] as (1, 0, 2): a b c -> b a c.
    assert_eq!(of(iota(2, 4, &[2, 2, 2], &[1, 0, 2])).unwrap(), [[0, 1, 4, 5], [2, 3, 6, 7]]);
    assert_eq!(of(iota(2, 4, &[4, 2], &[])).unwrap(), [[0, 1, 2, 3], [4, 5, 6, 7]]);
    for wrong in
        [iota(2, 3, &[8], &[0]), iota(2, 4, &[8], &[1]), iota(2, 4, &[2, 4], &[0, 0]), iota(0, 4, &[8], &[0]), iota(2, 4, &[0], &[0])]
    {
        assert!(matches!(of(wrong), Err(HloError::Malformed(_))));
    }
}

fn mesh(sizes: &[i64], rest: &[(u32, &[u8])]) -> Vec<u8> {
    let mut out = Vec::new();
    for &size in sizes {
        let mut axis = message(&[(1, b"name")]);
        put_int(&mut axis, 2, size);
        put_bytes(&mut out, 1, &axis);
    }
    out.extend(message(rest));
    out
}

fn axis(index: i64, sub: Option<(i64, i64)>) -> Vec<u8> {
    let mut out = Vec::new();
    put_int(&mut out, 1, index);
    if let Some((before, size)) = sub {
        let mut message = Vec::new();
        put_int(&mut message, 1, before);
        put_int(&mut message, 2, size);
        put_bytes(&mut out, 2, &message);
    }
    out
}

fn along(mesh: Vec<u8>, axes: &[Vec<u8>]) -> Result<Vec<Vec<u32>>> {
    let mut list = Vec::new();
    put_bytes(&mut list, 1, &mesh);
    axes.iter().for_each(|axis| put_bytes(&mut list, 2, axis));
    groups(field::MESH_GROUPS, &list, Ids::Members, 1, 8)
}

#[test]
fn mesh_axes() {
    let of = |axes: &[Vec<u8>]| along(mesh(&[2, 2, 2], &[]), axes).unwrap();
    assert_eq!(of(&[axis(2, None)]), [[0, 1], [2, 3], [4, 5], [6, 7]]);
    assert_eq!(of(&[axis(0, None)]), [[0, 4], [1, 5], [2, 6], [3, 7]]);
    assert_eq!(of(&[axis(0, None), axis(2, None)]), [[0, 1, 4, 5], [2, 3, 6, 7]]);
    assert_eq!(of(&[axis(2, None), axis(0, None)]), [[0, 4, 1, 5], [2, 6, 3, 7]]);
    assert_eq!(of(&[]), [[0], [1], [2], [3], [4], [5], [6], [7]]);
}

#[test]
fn parts_of_mesh_axes() {
    let of = |axes: &[Vec<u8>]| along(mesh(&[8], &[]), axes).unwrap();
    assert_eq!(of(&[axis(0, Some((1, 2)))]), [[0, 4], [1, 5], [2, 6], [3, 7]]);
    assert_eq!(of(&[axis(0, Some((2, 2)))]), [[0, 2], [1, 3], [4, 6], [5, 7]]);
    assert_eq!(of(&[axis(0, Some((4, 2)))]), [[0, 1], [2, 3], [4, 5], [6, 7]]);
    assert_eq!(of(&[axis(0, Some((2, 4)))]), [[0, 1, 2, 3], [4, 5, 6, 7]]);
    assert_eq!(of(&[axis(0, Some((4, 2))), axis(0, Some((1, 2)))]), [[0, 4, 1, 5], [2, 6, 3, 7]]);
    assert!(along(mesh(&[8], &[]), &[axis(0, Some((2, 4))), axis(0, Some((4, 2)))]).is_err(), "overlapping");
    assert!(along(mesh(&[8], &[]), &[axis(0, Some((3, 2)))]).is_err());
    assert!(along(mesh(&[8], &[]), &[axis(1, None)]).is_err());
    assert!(along(mesh(&[0], &[]), &[axis(0, None)]).is_err());
}

#[test]
fn mesh_devices_in_another_order() {
    let listed = mesh(&[2, 4], &[(2, &[7, 6, 5, 4, 3, 2, 1, 0])]);
    assert_eq!(along(listed, &[axis(0, None)]).unwrap(), [[7, 3], [6, 2], [5, 1], [4, 0]]);
    // The devices [4][2] transposed to [2][4].
    let transposed = mesh(&[2, 4], &[(3, &message(&[(1, &[4, 2]), (2, &[1, 0])]))]);
    assert_eq!(along(transposed, &[axis(1, None)]).unwrap(), [[0, 2, 4, 6], [1, 3, 5, 7]]);
    assert!(along(mesh(&[2, 4], &[(2, &[0, 1])]), &[axis(0, None)]).is_err());
}
