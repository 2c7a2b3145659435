//! Rewrites of real modules (`tests/data`) and of hand-made ones.

use std::collections::BTreeMap;

use crate::collective::Collective;
use crate::error::HloError;
use crate::module::{Module, field};
use crate::rewrite::{Rewritten, rewrite};
use crate::wire::{fields, put_bytes, put_int};

macro_rules! data {
    ($name:literal) => {
        include_bytes!(concat!("../tests/data/", $name, ".bin")).as_slice()
    };
}

/// Rewrites a module and checks what holds for each: no collective is left, keys and texts are those of the
/// list, everything else is kept, and the calls form chains. Gives the texts.
fn check(module: &[u8], replicas: u32, partitions: u32) -> Vec<String> {
    let rewritten = rewrite(module, replicas, partitions).unwrap();
    check_attributes(&rewritten);
    let (old, new) = (Module::read(module).unwrap(), Module::read(&rewritten.module).unwrap());
    assert!(old.schedule.keys().eq(new.schedule.keys()));
    let new_schedule = &new.schedule;
    for (old_computation, new) in old.computations.iter().zip(&new.computations) {
        assert_eq!((old_computation.id, old_computation.root), (new.id, new.root));
        if let Some(schedule) = new_schedule.get(&new.id) {
            let kept: Vec<i64> = schedule.iter().copied().filter(|id| old_computation.index.contains_key(id)).collect();
            assert_eq!(Some(&kept), old.schedule.get(&old_computation.id));
            assert_eq!(schedule.len(), new.instructions.len());
        }
        for i in &old_computation.instructions {
            let j = new.get(i.id).unwrap();
            assert_eq!(i.name, j.name);
            if !matches!(i.opcode, "while" | "conditional" | "call") {
                assert!(j.operands.starts_with(&i.operands) && j.operands.len() <= i.operands.len() + 1, "{}", i.name);
            }
            let kept = [field::NAME, field::SHAPE, field::ID, 7, 8, 40, 68, 82];
            let of = |raw| fields(raw).map(|f| f.unwrap()).filter(|f| kept.contains(&f.number)).map(|f| f.raw).collect::<Vec<_>>();
            assert_eq!(of(i.raw), of(j.raw));
            if i.opcode == j.opcode && i.operands == j.operands {
                assert_eq!(j.raw, i.raw, "{} is changed", i.name);
            }
        }
    }
    check_chains(&new);
    // Once more: there is nothing left to do.
    let again = rewrite(&rewritten.module, replicas, partitions).unwrap();
    assert_eq!(again.module, rewritten.module);
    assert_eq!((again.collectives.len(), again.asks_who), (0, false));
    rewritten.collectives.iter().map(Collective::to_text).collect()
}

fn check_attributes(rewritten: &Rewritten) {
    let module = Module::read(&rewritten.module).unwrap();
    let mut keys = Vec::new();
    for i in module.computations.iter().flat_map(|c| &c.instructions) {
        let number = |n| i.field(n).unwrap().map(|f| f.int().unwrap());
        match i.field(field::TARGET).unwrap().map(|f| f.text().unwrap()) {
            Some(crate::COLLECTIVE) => {
                let text = i.field(field::BACKEND_CONFIG).unwrap().unwrap().text().unwrap();
                let (cfg, key) = text.strip_prefix("{cfg = \"").unwrap().split_once("\", key = ").unwrap();
                let key: usize = key.strip_suffix(" : i64}").unwrap().parse().unwrap();
                assert_eq!(Collective::parse(cfg).unwrap(), rewritten.collectives[key]);
                assert_eq!((number(field::API_VERSION), number(field::SIDE_EFFECT)), (Some(4), Some(1)));
                assert_eq!((i.opcode, number(field::CHANNEL), number(field::GLOBAL_IDS)), ("custom-call", None, None));
                assert!(i.called.is_empty());
                keys.push(key);
            }
            Some(crate::PARTITION_ID | crate::REPLICA_ID) => {
                assert!(rewritten.asks_who);
                assert_eq!((number(field::API_VERSION), number(field::SIDE_EFFECT)), (Some(4), None));
            }
            _ => {}
        }
    }
    assert!(keys.iter().copied().eq(0..rewritten.collectives.len()));
}

/// In the schedule, or else in the message, each call takes what the one before yields, itself or through what it
/// takes, and both have every operand and predecessor first.
fn check_chains(module: &Module<'_>) {
    let calls = |i: &crate::module::Instruction<'_>| i.field(field::TARGET).unwrap().is_some_and(|f| f.text() == Ok(crate::COLLECTIVE));
    let mut holds: BTreeMap<i64, bool> = BTreeMap::new();
    let mut ids: Vec<i64> = module.computations.iter().flat_map(|c| &c.instructions).map(|i| i.id).collect();
    let mut names: Vec<&str> = module.computations.iter().flat_map(|c| &c.instructions).map(|i| i.name).collect();
    let (all, _) = (ids.len(), (ids.sort_unstable(), names.sort_unstable()));
    ids.dedup();
    names.dedup();
    assert_eq!((ids.len(), names.len()), (all, all), "ids and names are unique");
    for c in &module.computations {
        let marked = |i: &crate::module::Instruction<'_>| calls(i) || i.called.iter().any(|id| holds.get(id) == Some(&true));
        let message: Vec<i64> = c.instructions.iter().map(|i| i.id).collect();
        let order = module.schedule.get(&c.id).unwrap_or(&message);
        for order in [&message, order] {
            let place: BTreeMap<i64, usize> = order.iter().enumerate().map(|(at, id)| (*id, at)).collect();
            for i in &c.instructions {
                assert!(i.operands.iter().chain(&i.control).all(|id| place[id] < place[&i.id]), "{}", i.name);
            }
        }
        let chained: Vec<i64> = order.iter().copied().filter(|&id| marked(c.get(id).unwrap())).collect();
        for pair in chained.windows(2) {
            let next = c.get(pair[1]).unwrap();
            if calls(next) {
                assert_eq!(next.operands.last(), Some(&pair[0]), "{}", next.name);
            } else {
                assert!(waits(c, next, pair[0]), "{}", next.name);
            }
        }
        let any = !chained.is_empty();
        holds.insert(c.id, any);
    }
}

/// Whether one of the arrays that an instruction takes is a copy made after the one `before`.
fn waits(computation: &crate::module::Computation<'_>, at: &crate::module::Instruction<'_>, before: i64) -> bool {
    let copies = |i: &crate::module::Instruction<'_>| i.field(field::TARGET).unwrap().is_some_and(|f| f.text() == Ok(crate::AFTER));
    let taken = at.operands.iter().map(|&id| computation.get(id).unwrap());
    let arrays = taken.flat_map(|i| if i.opcode == "tuple" { i.operands.clone() } else { vec![i.id] });
    arrays.map(|id| computation.get(id).unwrap()).any(|i| copies(i) && i.operands.last() == Some(&before))
}

const ALL8: &str = "0,1,2,3,4,5,6,7";
const ROWS: &str = "0,1,2,3/4,5,6,7";
const COLUMNS: &str = "0,4/1,5/2,6/3,7";

#[test]
fn one_collective_each() {
    assert_eq!(check(data!("psum8"), 1, 8), [format!("all-reduce.add;f32:1x16;{ALL8}")]);
    // f32[3,3] gathered along dimension 1, column-major: the whole operand is one chunk.
    assert_eq!(check(data!("gather24"), 1, 8), [format!("all-gather;f32:1x36;{ROWS}")]);
    // f32[3,16] to f32[3,2], column-major.
    assert_eq!(check(data!("scatter8"), 1, 8), [format!("reduce-scatter.add;f32:1x24;{ALL8}")]);
    let pieces = ["s32:1x24"; 8].join(",");
    assert_eq!(check(data!("alltoall8"), 1, 8), [format!("all-to-all.tuple;{pieces};{ALL8}")]);
    assert_eq!(check(data!("permute8"), 1, 8), [format!("permute.5>0,0>3,3>5,6>7;u8:1x5;{ALL8}")]);
    assert_eq!(check(data!("loop8"), 1, 8), [format!("all-reduce.add;f32:1x8;{ALL8}")]);
    // Groups of the partitioner, as an iota.
    assert_eq!(check(data!("layers24"), 1, 8), [format!("all-reduce.add;f32:1x64;{ROWS}")]);
}

#[test]
fn several_collectives() {
    assert_eq!(
        check(data!("variadic24"), 1, 8),
        [format!("all-reduce.add;f32:1x24,f32:1x20;{COLUMNS}"), format!("all-reduce.max;s32:1x8;{ROWS}")]
    );
    assert_eq!(
        check(data!("kinds8"), 1, 8),
        [
            format!("all-reduce.max;f32:1x12;{ALL8}"),
            format!("all-reduce.min;s32:1x12;{ALL8}"),
            format!("all-gather;pred:1x3;{ALL8}"),
            format!("all-reduce.add;c64:1x24;{ALL8}"),
            // Of bf16, which the plugin sums as f32. Its place is that of the schedule.
            format!("all-reduce.add;f32:1x12;{ALL8}"),
        ]
    );
    assert_eq!(
        check(data!("cond8"), 1, 8),
        [format!("all-reduce.min;f32:1x12;{ALL8}"), format!("all-reduce.add;f32:1x12;{ALL8}"), format!("all-reduce.add;f32:1x12;{ALL8}"),]
    );
    // Groups named by mesh axes.
    assert_eq!(
        check(data!("any24"), 1, 8),
        [
            format!("all-reduce.or;pred:1x4;{ROWS}"),
            format!("all-reduce.and;pred:1x1;{ROWS}"),
            format!("all-reduce.mul;f32:1x12;{COLUMNS}"),
            format!("all-gather;pred:1x4;{COLUMNS}"),
            format!("all-reduce.and;pred:1x1;{COLUMNS}"),
        ]
    );
    assert_eq!(
        check(data!("reshard24"), 1, 8),
        ["all-to-all.tuple;f32:1x32,f32:1x32;0,1/2,3/4,5/6,7", "permute.0>0,1>1,4>2,5>3,2>4,3>5,6>6,7>7;f32:1x64;0,1,2,3,4,5,6,7"]
    );
}

#[test]
fn replicas_and_partitions() {
    assert_eq!(
        check(data!("replicas42"), 4, 2),
        [
            // Replicas 0 and 2, 1 and 3; each partition on its own.
            "all-reduce.add;f32:1x16;0,4/1,5/2,6/3,7",
            // With a channel: replicas 0 and 3, 1 and 2, with all their partitions.
            "all-reduce.add;f32:1x16;0,1,6,7/2,3,4,5",
            // Members.
            "all-reduce.mul;f32:1x16;0,3,5,6/1,2,4,7",
            "permute.0>2,1>3,2>4,3>5;f32:1x16;0,1,2,3,4,5,6,7",
        ]
    );
    assert!(rewrite(data!("replicas42"), 4, 2).unwrap().asks_who);
}

#[test]
fn every_reduction_of_every_type() {
    // Those of bf16 are done as f32, together with those of f32.
    let floats = check(data!("floats8"), 8, 1);
    assert_eq!(floats.len(), 12);
    assert_eq!(floats[5], format!("all-reduce.mul;f16:1x10;{ALL8}"));
    assert_eq!(floats[8], format!("all-reduce.add;f32:1x20,f32:1x20;{ALL8}"));
    let integers = check(data!("integers8"), 8, 1);
    let widths = [("s8", 5), ("s16", 10), ("s32", 20), ("s64", 40), ("u8", 5), ("u16", 10), ("u32", 20), ("u64", 40)];
    let expected =
        widths.iter().flat_map(|(e, bytes)| ["add", "mul", "min", "max"].map(|op| format!("all-reduce.{op};{e}:1x{bytes};{ALL8}")));
    assert_eq!(sorted(integers), sorted(expected.collect()));
    let others = ["add;c64:1x40", "mul;c64:1x40", "add;c128:1x80", "mul;c128:1x80"];
    let truths = ["add", "mul", "min", "max", "and", "or"].map(|op| format!("all-reduce.{op};pred:1x5;{ALL8}"));
    let expected = others.iter().map(|of| format!("all-reduce.{of};{ALL8}")).chain(truths);
    assert_eq!(sorted(check(data!("others8"), 8, 1)), sorted(expected.collect()));
}

fn sorted(mut texts: Vec<String>) -> Vec<String> {
    texts.sort();
    texts
}

#[test]
fn questions_for_the_own_number() {
    assert_eq!(check(data!("index24"), 1, 8), [""; 0]);
    assert!(rewrite(data!("index24"), 1, 8).unwrap().asks_who);
}

#[test]
fn the_wrong_number_of_devices_is_refused() {
    let refused = |partitions| match rewrite(data!("gather24"), 1, partitions) {
        Err(HloError::Unsupported { name, op, why }) => (name, op, why),
        other => panic!("{other:?}"),
    };
    let of = |why: &str| ("all_gather.3".to_owned(), "all-gather".to_owned(), why.to_owned());
    assert_eq!(refused(4), of("it names 4 of 4"));
    assert_eq!(refused(16), of("member 8 is in no group"));
    assert!(rewrite(data!("gather24"), 0, 8).is_err());
    assert!(rewrite(data!("gather24"), 1 << 16, 1 << 16).is_err());
}

#[test]
fn no_cut_module_is_a_panic() {
    for module in [data!("cond8"), data!("any24"), data!("replicas42")] {
        for cut in (0..module.len()).step_by(7) {
            // A cut between two fields of the module is a module.
            let _ = rewrite(&module[..cut], 1, 8);
        }
    }
}

#[test]
fn no_changed_byte_is_a_panic() {
    for (module, replicas, partitions) in [(data!("any24"), 1, 8), (data!("replicas42"), 4, 2), (data!("reshard24"), 1, 8)] {
        let mut changed = module.to_vec();
        for at in (0..module.len()).step_by(3) {
            let flip = [0x01, 0x10, 0x80, 0xff][at % 4];
            changed[at] ^= flip;
            let _ = rewrite(&changed, replicas, partitions);
            changed[at] ^= flip;
        }
    }
}

/// A hand-made instruction.
struct Hand {
    message: Vec<u8>,
}

impl Hand {
    fn new(id: i64, opcode: &str, operands: &[i64], shape: &[u8]) -> Self {
        let mut message = Vec::new();
        put_bytes(&mut message, field::NAME, format!("{opcode}.{id}").as_bytes());
        put_bytes(&mut message, field::OPCODE, opcode.as_bytes());
        put_bytes(&mut message, field::SHAPE, shape);
        put_int(&mut message, field::ID, id);
        operands.iter().for_each(|&operand| put_int(&mut message, field::OPERANDS, operand));
        Hand { message }
    }

    fn int(mut self, number: u32, value: i64) -> Self {
        put_int(&mut self.message, number, value);
        self
    }

    fn bytes(mut self, number: u32, value: &[u8]) -> Self {
        put_bytes(&mut self.message, number, value);
        self
    }
}

/// f32[8] with its layout.
const F32X8: &[u8] = &[0x10, 11, 0x1a, 1, 8, 0x2a, 3, 0x0a, 1, 0];
const S32: &[u8] = &[0x10, 4];
const PRED: &[u8] = &[0x10, 1];

fn computation(id: i64, root: i64, instructions: Vec<Hand>) -> Vec<u8> {
    let mut message = Vec::new();
    instructions.iter().for_each(|i| put_bytes(&mut message, 2, &i.message));
    put_int(&mut message, 5, id);
    put_int(&mut message, 6, root);
    message
}

/// A module of the computations, with an adder as computation 1.
fn module(computations: &[Vec<u8>]) -> Vec<u8> {
    let scalar = &[0x10, 11];
    let adder = vec![
        Hand::new(10, "parameter", &[], scalar),
        Hand::new(11, "parameter", &[], scalar).int(field::PARAMETER, 1),
        Hand::new(12, "add", &[10, 11], scalar),
    ];
    let mut message = Vec::new();
    put_bytes(&mut message, 3, &computation(1, 12, adder));
    computations.iter().for_each(|c| put_bytes(&mut message, 3, c));
    put_bytes(&mut message, 4000, b"something new");
    message
}

fn parameter(id: i64) -> Hand {
    Hand::new(id, "parameter", &[], F32X8)
}

fn all_reduce(id: i64, operand: i64) -> Hand {
    Hand::new(id, "all-reduce", &[operand], F32X8).int(field::CALLED, 1)
}

#[test]
fn unknown_fields_and_existing_edges_are_kept() {
    let entry = computation(
        2,
        23,
        vec![
            parameter(20),
            all_reduce(21, 20)
                .bytes(5000, b"unknown")
                .bytes(7, b"metadata")
                .int(field::ALL_REDUCE_ID, 3)
                .bytes(field::BACKEND_PAYLOAD, b"x"),
            all_reduce(22, 20).int(field::CONTROL, 21),
            all_reduce(23, 20).int(field::CONTROL, 21),
        ],
    );
    let rewritten = rewrite(&module(&[entry]), 2, 1).unwrap();
    assert!(rewritten.module.ends_with(b"something new"));
    let read = Module::read(&rewritten.module).unwrap();
    let entry = &read.computations[1];
    let numbers = |id| fields(entry.get(id).unwrap().raw).map(|f| f.unwrap().number).collect::<Vec<_>>();
    assert_eq!(numbers(21), [1, 3, 35, 36, 5000, 7, 2, 28, 43, 65, 77]);
    assert_eq!((&entry.get(22).unwrap().operands, &entry.get(22).unwrap().control), (&vec![20, 21], &vec![21]));
    assert_eq!((&entry.get(23).unwrap().operands, &entry.get(23).unwrap().control), (&vec![20, 22], &vec![21]));
}

#[test]
fn what_contains_collectives_is_in_the_chain() {
    let body = computation(2, 21, vec![parameter(20), all_reduce(21, 20)]);
    let caller = computation(3, 31, vec![parameter(30), Hand::new(31, "call", &[30], F32X8).int(field::CALLED, 2)]);
    let entry = computation(
        4,
        44,
        vec![
            parameter(40),
            all_reduce(41, 40),
            Hand::new(42, "while", &[40], F32X8).int(field::CALLED, 3).int(field::CALLED, 5),
            Hand::new(43, "call", &[40], F32X8).int(field::CALLED, 1),
            all_reduce(44, 40),
        ],
    );
    let condition = computation(5, 51, vec![parameter(50), Hand::new(51, "is-it", &[50], PRED)]);
    let module = module(&[body, caller, condition, entry]);
    check(&module, 2, 1);
    let rewritten = rewrite(&module, 2, 1).unwrap();
    let read = Module::read(&rewritten.module).unwrap();
    let operands = |id| read.computations[4].get(id).unwrap().operands.clone();
    // The loop takes a copy of its state, made after 41; 45 is the first free id.
    assert_eq!([operands(41), operands(42), operands(43), operands(44)], [vec![40], vec![45], vec![40], vec![40, 42]]);
    assert_eq!(operands(45), [40, 41]);
}

/// Loops with a tuple as state, conditionals and calls, each after a collective; scheduled.
#[test]
fn what_runs_collectives_waits_for_the_one_before() {
    let state = [&[0x10, 13, 0x22, F32X8.len() as u8], F32X8, &[0x22, S32.len() as u8], S32].concat();
    let part = |id, of, index, shape| Hand::new(id, "get-tuple-element", &[of], shape).int(field::TUPLE_INDEX, index);
    let body = vec![
        Hand::new(20, "parameter", &[], &state),
        part(21, 20, 0, F32X8),
        part(22, 20, 1, S32),
        all_reduce(23, 21),
        Hand::new(24, "tuple", &[23, 22], &state),
    ];
    let condition = vec![Hand::new(30, "parameter", &[], &state), part(31, 30, 1, S32), Hand::new(32, "is-it", &[31], PRED)];
    let branch = vec![parameter(40), all_reduce(41, 40)];
    let entry = vec![
        parameter(50),
        Hand::new(51, "parameter", &[], S32).int(field::PARAMETER, 1),
        all_reduce(52, 50),
        Hand::new(53, "tuple", &[50, 51], &state),
        Hand::new(54, "while", &[53], &state).int(field::CALLED, 2).int(field::CALLED, 3),
        Hand::new(55, "conditional", &[51, 50, 50], F32X8).int(field::CALLED, 4).int(field::CALLED, 4),
        Hand::new(56, "call", &[50], F32X8).int(field::CALLED, 4),
        all_reduce(57, 50),
    ];
    let made = [computation(2, 24, body), computation(3, 32, condition), computation(4, 41, branch), computation(9, 57, entry)];
    let mut scheduled = module(&made);
    let sequences = BTreeMap::from([(9, (50..58).collect()), (2, (20..25).collect())]);
    put_bytes(&mut scheduled, 7, &crate::module::write_schedule(&sequences));
    assert_eq!(check(&scheduled, 2, 1).len(), 4);

    let rewritten = rewrite(&scheduled, 2, 1).unwrap();
    let read = Module::read(&rewritten.module).unwrap();
    let entry = &read.computations[4];
    let operands = |id| entry.get(id).unwrap().operands.clone();
    // The parts of the state, the copy of the smaller one that the condition reads, and the new state.
    assert_eq!(
        [operands(58), operands(59), operands(60), operands(61), operands(54)],
        [vec![53], vec![53], vec![59, 52], vec![58, 60], vec![61]]
    );
    // What says which branch runs; the operand of the call; and the last one takes the call's result.
    assert_eq!([operands(62), operands(55), operands(63), operands(56)], [vec![51, 54], vec![62, 50, 50], vec![50, 55], vec![63]]);
    assert_eq!(operands(57), [50, 56]);
    assert_eq!(read.schedule[&9], [50, 51, 52, 53, 58, 59, 60, 61, 54, 62, 55, 63, 56, 57]);
    assert_eq!(read.schedule[&2], [20, 21, 22, 23, 24]);

    let mute = |instruction: Hand| {
        let entry = vec![parameter(50), Hand::new(51, "call", &[50], &[0x10, 13]).int(field::CALLED, 4), instruction];
        rewrite(&module(&[made[2].clone(), computation(9, 52, entry)]), 2, 1).unwrap_err().to_string()
    };
    let why = "is not supported: \"call.51\", which must be done before it, has no result to wait for";
    assert_eq!(mute(all_reduce(52, 50)), format!("all-reduce \"all-reduce.52\" {why}"));
    assert_eq!(mute(Hand::new(52, "call", &[50], F32X8).int(field::CALLED, 4)), format!("call \"call.52\" {why}"));

    let deaf = computation(3, 31, vec![Hand::new(30, "parameter", &[], &state), Hand::new(31, "constant", &[], PRED)]);
    let why = rewrite(&module(&[made[0].clone(), deaf, made[2].clone(), made[3].clone()]), 2, 1).unwrap_err().to_string();
    assert_eq!(why, "while \"while.54\" is not supported: it runs collectives, and its condition reads nothing");
}

#[test]
fn refusals_name_the_instruction() {
    let refused = |instruction: Hand| {
        let entry = computation(2, 21, vec![parameter(20), instruction]);
        rewrite(&module(&[entry]), 2, 1).unwrap_err().to_string()
    };
    let with = |i: Hand, text: &str| {
        let why = refused(i);
        assert!(why.contains(text), "{why}");
    };
    assert_eq!(
        refused(Hand::new(21, "ragged-all-to-all", &[20], F32X8)),
        "ragged-all-to-all \"ragged-all-to-all.21\" is not supported: this kind of communication is not known"
    );
    with(Hand::new(21, "send", &[20], F32X8), "not known");
    with(Hand::new(21, "all-reduce-start", &[20], F32X8), "not known");
    with(Hand::new(21, "all-reduce", &[20], F32X8), "calls 0 computations");
    with(all_reduce(21, 20).int(field::CALLED, 1), "calls 2 computations");
    with(all_reduce(21, 20).int(field::GLOBAL_IDS, 1), "without a channel");
    with(all_reduce(21, 20).int(field::OPERANDS, 20), "2 operands and 1 results");
    with(Hand::new(21, "all-gather", &[20], F32X8), "no dimension");
    with(Hand::new(21, "all-gather", &[20], F32X8).int(field::DIMENSIONS, 0), "does not give");
    with(Hand::new(21, "all-to-all", &[20], F32X8), "1 operands for 2 ranks");
    with(Hand::new(21, "all-gather", &[20], F32X8).int(field::DIMENSIONS, 0).int(field::DIMENSIONS, 0), "dimensions [0, 0]");
    with(Hand::new(21, "collective-permute", &[20], F32X8).bytes(field::PAIRS, &[8, 2]), "it names 2 of 2");
    let twice = Hand::new(21, "collective-permute", &[20], F32X8).bytes(field::PAIRS, &[8, 1]).bytes(field::PAIRS, &[8, 0]);
    with(twice, "member 0 has two sources");
    // Parts of the wrong size in one group of two, another of one.
    let uneven = Hand::new(21, "all-gather", &[20], F32X8).int(field::DIMENSIONS, 0);
    let uneven = uneven.bytes(field::GROUPS, &[10, 1, 0]).bytes(field::GROUPS, &[10, 1, 0]);
    with(uneven, "member 0 is in two groups");

    let odd = computation(2, 21, vec![parameter(20), Hand::new(21, "subtract", &[20, 20], F32X8)]);
    let user = computation(3, 31, vec![parameter(30), Hand::new(31, "all-reduce", &[30], F32X8).int(field::CALLED, 2)]);
    let why = rewrite(&module(&[odd, user]), 2, 1).unwrap_err().to_string();
    assert!(why.ends_with("its reduction is \"subtract\""), "{why}");
    let same = computation(2, 21, vec![parameter(20), Hand::new(21, "add", &[20, 20], F32X8)]);
    let user = computation(3, 31, vec![parameter(30), Hand::new(31, "all-reduce", &[30], F32X8).int(field::CALLED, 2)]);
    let why = rewrite(&module(&[same, user]), 2, 1).unwrap_err().to_string();
    assert!(why.ends_with("not of its two parameters"), "{why}");

    for inner in [all_reduce(21, 20), Hand::new(21, "partition-id", &[], F32X8)] {
        let body = computation(2, 21, vec![parameter(20), inner]);
        let fused = computation(3, 31, vec![parameter(30), Hand::new(31, "fusion", &[30], F32X8).int(field::CALLED, 2)]);
        let why = rewrite(&module(&[body, fused]), 2, 1).unwrap_err().to_string();
        assert!(why.starts_with("fusion \"fusion.31\" is not supported"), "{why}");
    }
}

#[test]
fn a_chain_needs_an_order() {
    let entry = |first: Hand| computation(2, 22, vec![first, parameter(20), all_reduce(22, 20)]);
    assert!(rewrite(&module(&[entry(all_reduce(21, 20))]), 2, 1).unwrap_err().to_string().contains("before what it needs"));

    let entry = computation(2, 22, vec![parameter(20), all_reduce(21, 20), all_reduce(22, 20)]);
    let scheduled = |ids: &[u8]| {
        let mut sequence = Vec::new();
        put_bytes(&mut sequence, 1, ids);
        let mut pair = vec![8, 2];
        put_bytes(&mut pair, 2, &sequence);
        let mut schedule = Vec::new();
        put_bytes(&mut schedule, 1, &pair);
        let mut message = module(std::slice::from_ref(&entry));
        put_bytes(&mut message, 7, &schedule);
        message
    };
    assert_eq!(check(&scheduled(&[20, 21, 22]), 2, 1).len(), 2);
    // The other way round: the message is brought into the order of the schedule.
    let module = scheduled(&[20, 22, 21]);
    check(&module, 2, 1);
    let rewritten = rewrite(&module, 2, 1).unwrap();
    let read = Module::read(&rewritten.module).unwrap();
    assert_eq!(read.computations[1].instructions.iter().map(|i| i.id).collect::<Vec<_>>(), [20, 22, 21]);
    assert_eq!(read.computations[1].get(21).unwrap().operands, [20, 22]);
    for wrong in [&[20, 21][..], &[20, 21, 21], &[20, 21, 23], &[22, 20, 21]] {
        assert!(matches!(rewrite(&scheduled(wrong), 2, 1), Err(HloError::Malformed(_))), "{wrong:?}");
    }
}
