//! Kernels against a model that goes element by element, on random collectives.

use half::{bf16, f16};

use super::*;
use crate::collective::{Element, Reduce};

/// A small generator of numbers.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 11
    }

    fn below(&mut self, bound: usize) -> usize {
        self.next() as usize % bound
    }

    fn of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
    }
}

const ELEMENTS: [Element; 16] = [
    Element::Pred,
    Element::S8,
    Element::S16,
    Element::S32,
    Element::S64,
    Element::U8,
    Element::U16,
    Element::U32,
    Element::U64,
    Element::F16,
    Element::Bf16,
    Element::F32,
    Element::F64,
    Element::C64,
    Element::C128,
    Element::Other(20),
];

fn width(element: Element) -> usize {
    element.bits().unwrap() as usize / 8
}

/// Numbers that every type but the truth values can hold, so that the model may compute with wide ones.
fn value(random: &mut Random, element: Element) -> Vec<u8> {
    let small = random.below(5) as i8;
    match element {
        Element::Pred => vec![small as u8 & 1],
        Element::F16 => f16::from_f32(f32::from(small) - 1.5).to_ne_bytes().to_vec(),
        Element::Bf16 => bf16::from_f32(f32::from(small) - 1.5).to_ne_bytes().to_vec(),
        Element::F32 => (f32::from(small) - 1.1).to_ne_bytes().to_vec(),
        Element::F64 => (f64::from(small) - 1.1).to_ne_bytes().to_vec(),
        Element::C64 => [f32::from(small), 1.3].iter().flat_map(|v| v.to_ne_bytes()).collect(),
        Element::C128 => [f64::from(small), 1.3].iter().flat_map(|v| v.to_ne_bytes()).collect(),
        _ => (0..width(element)).map(|_| random.next() as u8).collect(),
    }
}

/// Two elements reduced, by wide arithmetic.
fn model_reduce(reduce: Reduce, element: Element, a: &[u8], b: &[u8]) -> Vec<u8> {
    let float = |a: f64, b: f64| match reduce {
        Reduce::Add => a + b,
        Reduce::Multiply => a * b,
        Reduce::Min => a.min(b),
        _ => a.max(b),
    };
    let single = |a: f32, b: f32| float(f64::from(a), f64::from(b)) as f32;
    let read32 = |b: &[u8]| f32::from_ne_bytes(b[..4].try_into().unwrap());
    let read64 = |b: &[u8]| f64::from_ne_bytes(b[..8].try_into().unwrap());
    let two = |b: &[u8]| [b[0], b[1]];
    match element {
        Element::F16 => {
            f16::from_f32(single(f16::from_ne_bytes(two(a)).to_f32(), f16::from_ne_bytes(two(b)).to_f32())).to_ne_bytes().to_vec()
        }
        Element::Bf16 => {
            bf16::from_f32(single(bf16::from_ne_bytes(two(a)).to_f32(), bf16::from_ne_bytes(two(b)).to_f32())).to_ne_bytes().to_vec()
        }
        Element::F32 => single(read32(a), read32(b)).to_ne_bytes().to_vec(),
        Element::F64 => float(read64(a), read64(b)).to_ne_bytes().to_vec(),
        Element::C64 | Element::C128 => {
            let half = a.len() / 2;
            let read = |b: &[u8]| if half == 4 { f64::from(read32(b)) } else { read64(b) };
            let round = |v: f64| if half == 4 { f64::from(v as f32) } else { v };
            let (a, b) = ([read(a), read(&a[half..])], [read(b), read(&b[half..])]);
            let parts = match reduce {
                Reduce::Add => [a[0] + b[0], a[1] + b[1]],
                _ => [round(a[0] * b[0]) - round(a[1] * b[1]), round(a[0] * b[1]) + round(a[1] * b[0])],
            };
            parts.iter().flat_map(|v| if half == 4 { (*v as f32).to_ne_bytes().to_vec() } else { v.to_ne_bytes().to_vec() }).collect()
        }
        _ => {
            let signed = matches!(element, Element::S8 | Element::S16 | Element::S32 | Element::S64);
            let read = |b: &[u8]| {
                let negative = signed && b.last().is_some_and(|top| top & 0x80 != 0);
                let mut wide = [if negative { 0xff } else { 0 }; 16];
                wide[..b.len()].copy_from_slice(b);
                i128::from_le_bytes(wide)
            };
            let (x, y) = (read(a), read(b));
            let truth = element == Element::Pred;
            let value = match reduce {
                Reduce::Add if truth => x | y,
                Reduce::Add => x + y,
                Reduce::Multiply => x.wrapping_mul(y),
                Reduce::Min => x.min(y),
                Reduce::Max => x.max(y),
                Reduce::And => x & y,
                Reduce::Or => x | y,
                Reduce::Xor => x ^ y,
            };
            value.to_le_bytes()[..a.len()].to_vec()
        }
    }
}

/// What a rank gets for an array, element by element.
fn model(c: &Collective, group: &[u32], operands: &[Vec<Vec<u8>>], rank: usize, at: usize) -> Vec<u8> {
    let array = c.arrays[at];
    let (outer, chunk, ranks, width) = (array.outer as usize, array.chunk as usize, group.len(), width(array.element));
    let reduced = |reduce: Reduce, start: usize| -> Vec<u8> {
        let of = |r: usize| operands[r][at][start..start + width].to_vec();
        (1..ranks).fold(of(0), |sum, r| model_reduce(reduce, array.element, &sum, &of(r)))
    };
    match &c.op {
        Op::AllReduce(reduce) => (0..outer * chunk / width).flat_map(|e| reduced(*reduce, e * width)).collect(),
        Op::ReduceScatter(reduce) => {
            let each = |run: usize| (0..chunk / width).map(move |e| (run * ranks + rank) * chunk + e * width);
            (0..outer).flat_map(each).flat_map(|start| reduced(*reduce, start)).collect()
        }
        Op::AllGather => {
            (0..outer).flat_map(|run| (0..ranks).flat_map(move |r| operands[r][at][run * chunk..][..chunk].to_vec())).collect()
        }
        Op::AllToAll { tuple: true } => operands[at][rank].clone(),
        Op::AllToAll { tuple: false } => {
            let of = |run: usize, r: usize| operands[r][at][(run * ranks + rank) * chunk..][..chunk].to_vec();
            (0..outer).flat_map(|run| (0..ranks).flat_map(move |r| of(run, r))).collect()
        }
        Op::Permute(pairs) => match pairs.iter().find(|(_, to)| *to == group[rank]) {
            Some((from, _)) => operands[group.iter().position(|m| m == from).unwrap()][at].clone(),
            None => vec![0; outer * chunk],
        },
        Op::Broadcast => operands[0][at].clone(),
    }
}

/// A random collective of one group.
fn collective(random: &mut Random) -> Collective {
    let ranks = 1 + random.below(9);
    let mut group: Vec<u32> = (0..ranks as u32).collect();
    (1..ranks).for_each(|i| group.swap(i, random.below(i + 1)));
    let reduce = Reduce::ALL[random.below(7)].0;
    let op = match random.below(7) {
        0 => Op::AllReduce(reduce),
        1 => Op::AllGather,
        2 => Op::ReduceScatter(reduce),
        3 => Op::AllToAll { tuple: true },
        4 => Op::AllToAll { tuple: false },
        5 => {
            let targets = (0..ranks as u32).filter(|_| random.below(3) > 0).collect::<Vec<_>>();
            Op::Permute(targets.into_iter().map(|to| (random.of(&group), to)).collect())
        }
        _ => Op::Broadcast,
    };
    let strided = matches!(op, Op::AllGather | Op::ReduceScatter(_) | Op::AllToAll { tuple: false });
    let mut array = || {
        let element = loop {
            let element = random.of(&ELEMENTS);
            if !matches!(op, Op::AllReduce(_) | Op::ReduceScatter(_)) || reduce.takes(element) {
                break element;
            }
        };
        let outer = if strided { random.below(6) as u64 } else { 1 };
        Array { element, outer, chunk: (random.of(&[0, 1, 2, 3, 17, 100, 300]) * width(element)) as u64 }
    };
    let arrays = match op {
        Op::AllToAll { tuple: true } => vec![array(); ranks],
        Op::AllToAll { tuple: false } => vec![array()],
        _ => (0..1 + ranks % 3).map(|_| array()).collect(),
    };
    Collective { op, groups: vec![group], arrays }
}

fn operands(c: &Collective, random: &mut Random) -> Vec<Vec<Vec<u8>>> {
    let ranks = c.groups[0].len();
    let mut operand = |array: &Array| {
        let size = c.sizes(array, ranks).unwrap().0;
        (0..size / width(array.element)).flat_map(|_| value(random, array.element)).collect::<Vec<u8>>()
    };
    (0..ranks).map(|_| c.arrays.iter().map(&mut operand).collect()).collect()
}

fn lend(memory: &[Vec<Vec<u8>>]) -> Vec<Vec<&[u8]>> {
    memory.iter().map(|rank| rank.iter().map(Vec::as_slice).collect()).collect()
}

fn lend_mut(memory: &mut [Vec<Vec<u8>>]) -> Vec<Vec<&mut [u8]>> {
    memory.iter_mut().map(|rank| rank.iter_mut().map(Vec::as_mut_slice).collect()).collect()
}

/// Result memory with something in it.
fn room(c: &Collective) -> Vec<Vec<Vec<u8>>> {
    let ranks = c.groups[0].len();
    vec![c.arrays.iter().map(|array| vec![0xa5; c.sizes(array, ranks).unwrap().1]).collect(); ranks]
}

#[test]
fn random_collectives_are_as_the_model_says() {
    let mut random = Random(20_260_101);
    for case in 0..600 {
        let c = collective(&mut random);
        let group = &c.groups[0];
        let operands = operands(&c, &mut random);
        let mut results = room(&c);
        perform(&c, group, &lend(&operands), &mut lend_mut(&mut results)).unwrap();
        for (rank, results) in results.iter().enumerate() {
            for (at, result) in results.iter().enumerate() {
                assert_eq!(*result, model(&c, group, &operands, rank, at), "case {case}: {}, rank {rank}, array {at}", c.to_text());
            }
        }
        for part_bytes in [0, 64, 1000, 5000, usize::MAX] {
            let mut again = room(&c);
            let cut = parts(&c, group, lend(&operands), lend_mut(&mut again), part_bytes).unwrap();
            if part_bytes == usize::MAX {
                assert!(cut.len() <= 1, "case {case}");
            }
            cut.into_iter().rev().for_each(Part::run);
            assert_eq!(again, results, "case {case}: {} in parts of {part_bytes}", c.to_text());
        }
    }
}

#[test]
fn some_ranks_are_served_from_what_they_need() {
    let mut random = Random(20_260_202);
    for case in 0..600 {
        let c = collective(&mut random);
        let group = &c.groups[0];
        let mut operands = operands(&c, &mut random);
        let mut all = room(&c);
        perform(&c, group, &lend(&operands), &mut lend_mut(&mut all)).unwrap();
        let here: Vec<bool> = group.iter().map(|_| random.below(2) == 0).collect();
        let needed: Vec<usize> = (0..group.len()).filter(|&rank| here[rank]).flat_map(|rank| needs(&c, group, rank)).collect();
        let only = |memory: &mut Vec<Vec<Vec<u8>>>, keep: &dyn Fn(usize) -> bool| {
            memory.iter_mut().enumerate().filter(|(rank, _)| !keep(*rank)).for_each(|(_, arrays)| arrays.clear());
        };
        only(&mut operands, &|rank| needed.contains(&rank));
        only(&mut all, &|rank| here[rank]);
        let mut some = room(&c);
        only(&mut some, &|rank| here[rank]);
        let mut again = some.clone();
        perform(&c, group, &lend(&operands), &mut lend_mut(&mut some)).unwrap();
        assert_eq!(some, all, "case {case}: {}", c.to_text());
        for part_bytes in [64, 5000] {
            parts(&c, group, lend(&operands), lend_mut(&mut again), part_bytes).unwrap().into_iter().for_each(Part::run);
            assert_eq!(again, all, "case {case}: {} in parts of {part_bytes}", c.to_text());
        }
    }
}

fn one(text: &str, operands: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let c = Collective::parse(text).unwrap();
    let operands: Vec<Vec<Vec<u8>>> = operands.iter().map(|o| vec![o.clone()]).collect();
    let mut results = room(&c);
    perform(&c, &c.groups[0], &lend(&operands), &mut lend_mut(&mut results)).unwrap();
    results.into_iter().map(|mut rank| rank.remove(0)).collect()
}

fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_ne_bytes()).collect()
}

#[test]
fn sums_go_in_the_order_of_ranks() {
    // 1e8 + 1 - 1e8 + 1: only one order gives 1.
    let operands = [f32s(&[1e8]), f32s(&[1.]), f32s(&[-1e8]), f32s(&[1.])];
    assert_eq!(one("all-reduce.add;f32:1x4;3,1,0,2", &operands), vec![f32s(&[1.]); 4]);
    assert_eq!(one("reduce-scatter.add;f32:1x4;0", &operands[..1]), [f32s(&[1e8])]);
}

#[test]
fn what_xla_does_with_nan_and_zeros() {
    let of = |op: &str, a: f32, b: f32| {
        let results = one(&format!("all-reduce.{op};f32:1x4;0,1"), &[f32s(&[a]), f32s(&[b])]);
        f32::from_ne_bytes(results[1][..].try_into().unwrap())
    };
    assert!(of("add", f32::NAN, 1.).is_nan() && of("mul", 1., f32::NAN).is_nan());
    assert_eq!((of("min", f32::NAN, 1.), of("min", 1., f32::NAN), of("min", f32::NAN, f32::NAN)), (1., 1., f32::INFINITY));
    assert_eq!((of("max", f32::NAN, 1.), of("max", 1., f32::NAN), of("max", f32::NAN, f32::NAN)), (1., 1., f32::NEG_INFINITY));
    assert!(of("add", -0., -0.).is_sign_positive());
    assert!(of("max", -0., 0.).is_sign_negative() && of("min", 0., -0.).is_sign_positive());
}

#[test]
fn halves_round_after_each_step() {
    let halves = |v: f32| f16::from_f32(v).to_ne_bytes().to_vec();
    // 2048 + 1 rounds to 2048 in half precision, twice.
    assert_eq!(one("all-reduce.add;f16:1x2;0,1,2", &[halves(2048.), halves(1.), halves(1.)])[0], halves(2048.));
    assert_eq!(one("all-reduce.add;f16:1x2;0,1,2", &[halves(1.), halves(1.), halves(2048.)])[0], halves(2050.));
    let brains = |v: f32| bf16::from_f32(v).to_ne_bytes().to_vec();
    assert_eq!(one("all-reduce.add;bf16:1x2;0,1,2", &[brains(256.), brains(1.), brains(1.)])[0], brains(256.));
}

#[test]
fn large_arrays_go_block_by_block() {
    let count = 3 * BLOCK / 4 + 5;
    let values = |start: f32| f32s(&(0..count).map(|i| i as f32 + start).collect::<Vec<_>>());
    let text = format!("all-reduce.add;f32:1x{};0,1", 4 * count);
    let expected = f32s(&(0..count).map(|i| 2. * i as f32 + 3.).collect::<Vec<_>>());
    assert_eq!(one(&text, &[values(1.), values(2.)]), vec![expected; 2]);
}

#[test]
fn what_does_not_fit_is_refused_untouched() {
    let refused = |text: &str, operands: &[&[usize]], results: &[&[usize]]| {
        let c = Collective::parse(text).unwrap();
        let memory =
            |sizes: &[&[usize]]| sizes.iter().map(|rank| rank.iter().map(|&s| vec![7; s]).collect()).collect::<Vec<Vec<Vec<u8>>>>();
        let (operands, mut results) = (memory(operands), memory(results));
        let before = results.clone();
        let why = perform(&c, &c.groups[0], &lend(&operands), &mut lend_mut(&mut results)).unwrap_err();
        assert_eq!(results, before);
        assert_eq!(parts(&c, &c.groups[0], lend(&operands), lend_mut(&mut results), 64).unwrap_err(), why);
        why.to_string()
    };
    let check = |text, operands: &[&[usize]], results: &[&[usize]], why: &str| {
        let found = refused(text, operands, results);
        assert!(found.contains(why), "{found}");
    };
    check("all-reduce.add;f32:1x8;0,1", &[&[8], &[8]], &[&[8]], "2 operands and 1 results for 2 ranks");
    check("all-reduce.add;f32:1x8;0,1", &[&[8], &[]], &[&[8], &[8]], "rank 0 needs the operands of rank 1");
    check("all-reduce.add;f32:1x8;0,1", &[&[8], &[8, 8]], &[&[8], &[8]], "rank 1 has 2 operands and 1 results for 1");
    check("all-reduce.add;f32:1x8;0,1", &[&[8], &[8]], &[&[8], &[4]], "array 0 of rank 1 has (8, 4) bytes, not Some((8, 8))");
    check("all-gather;f32:1x8;0,1", &[&[8], &[8]], &[&[8], &[8]], "not Some((8, 16))");
    check("all-gather;f32:0x18446744073709551615;0,1", &[&[0], &[0]], &[&[0], &[0]], "not None");
    check("all-reduce.add;f32:1x7;0", &[&[7]], &[&[7]], "no Add of f32 in chunks of 7 bytes");
    check("all-reduce.or;f32:1x8;0", &[&[8]], &[&[8]], "no Or of f32");
    check("all-reduce.add;t20:1x8;0", &[&[8]], &[&[8]], "no Add of t20");
    check("all-to-all.tuple;f32:1x8;0,1", &[&[8], &[8]], &[&[8], &[8]], "an array of one size per rank");
    check("permute.0>1,1>0;u8:1x1;0,1", &[&[1], &[1]], &[&[1], &[1]], "out of order");
    check("permute.0>2;u8:1x1;0,1", &[&[1], &[1]], &[&[1], &[1]], "not of the group");
    let none = Collective { op: Op::Broadcast, groups: vec![], arrays: vec![] };
    assert!(perform(&none, &[], &[], &mut []).is_err());
}
