//! Schedules taken step by step in a model: processes with a value per unit, and messages that wait for whom they are sent to.

use std::collections::BTreeMap;

use super::*;

const METHODS: [Method; 5] = [Method::Raw, Method::Scatter, Method::Chain, Method::Ring, Method::Halving];

/// Small numbers that are not, over and over.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }

    /// Of very different sizes, so that the order of a sum shows.
    fn value(&mut self) -> f32 {
        (self.below(2_000_001) as f32 / 1e6 - 1.0) * 10f32.powi(self.below(9) as i32 - 4)
    }
}

#[derive(Default)]
struct Process {
    steps: Vec<Step>,
    next: usize,
    held: Vec<Option<f32>>,
    finished: Vec<u32>,
    /// By rank and unit.
    operands: BTreeMap<(usize, u64), f32>,
    sent: u64,
}

struct World {
    homes: Vec<usize>,
    processes: Vec<Process>,
    /// By sender, receiver and tag.
    messages: BTreeMap<(usize, usize, u32), Vec<f32>>,
}

impl World {
    fn new(method: Method, homes: &[usize], operands: &[Vec<f32>], block: u64) -> World {
        let units = operands[0].len();
        let process = |me: usize| {
            let here = homes.iter().enumerate().filter(|(_, home)| **home == me);
            let of = |(rank, _): (usize, &usize)| (0..).zip(&operands[rank]).map(move |(unit, &value)| ((rank, unit), value));
            Process {
                steps: all_reduce(method, homes, me, units as u64, block),
                held: vec![None; units],
                finished: vec![0; units],
                operands: here.flat_map(of).collect(),
                ..Process::default()
            }
        };
        let count = homes.iter().max().unwrap() + 1;
        World { homes: homes.to_vec(), processes: (0..count).map(process).collect(), messages: BTreeMap::new() }
    }

    fn can_go(&self, at: usize) -> bool {
        let process = &self.processes[at];
        match process.steps.get(process.next) {
            None => false,
            Some(Step::Receive { from, tag, .. } | Step::ReceiveOperand { from, tag, .. }) => {
                self.messages.contains_key(&(*from, at, *tag))
            }
            Some(_) => true,
        }
    }

    fn take(&mut self, at: usize) {
        let process = &mut self.processes[at];
        let step = process.steps[process.next].clone();
        process.next += 1;
        let span = |block: &Units| block.start as usize..block.end as usize;
        let mut post = |to: usize, tag: u32, values: Vec<f32>| {
            assert_ne!(to, at);
            process.sent += values.len() as u64;
            assert!(self.messages.insert((at, to, tag), values).is_none(), "{tag} from {at} to {to} twice");
        };
        match step {
            Step::Fold { block, ranks, begin } => {
                assert!(!ranks.is_empty());
                for unit in block {
                    let mut value = process.held[unit as usize].filter(|_| !begin);
                    assert!(begin || value.is_some(), "nothing is held");
                    for rank in ranks.clone() {
                        let operand = process.operands[&(rank, unit)];
                        value = Some(value.map_or(0.0 + operand, |value| value + operand));
                        if self.homes[rank] != at {
                            process.operands.remove(&(rank, unit));
                        }
                    }
                    process.held[unit as usize] = value;
                }
            }
            Step::SendOperand { to, tag, rank, block } => {
                assert_eq!(self.homes[rank], at);
                post(to, tag, block.map(|unit| process.operands[&(rank, unit)]).collect());
            }
            Step::ReceiveOperand { from, tag, rank, block } => {
                assert_eq!(self.homes[rank], from);
                let values = self.messages.remove(&(from, at, tag)).unwrap();
                assert_eq!(values.len(), span(&block).len());
                block.zip(values).for_each(|(unit, value)| assert!(process.operands.insert((rank, unit), value).is_none()));
            }
            Step::Send { to, tag, block } => post(to, tag, process.held[span(&block)].iter().map(|value| value.unwrap()).collect()),
            Step::Receive { from, tag, block, incoming } => {
                let values = self.messages.remove(&(from, at, tag)).unwrap();
                assert_eq!(values.len(), span(&block).len());
                for (held, value) in process.held[span(&block)].iter_mut().zip(values) {
                    *held = match incoming {
                        Incoming::Replaces => Some(value),
                        Incoming::Folds => Some(held.expect("something is held") + value),
                    };
                }
            }
            Step::Finish { block } => process.finished[span(&block)].iter_mut().for_each(|times| *times += 1),
        }
    }

    /// In any order that there may be.
    fn run(&mut self, random: &mut Random) {
        loop {
            let able: Vec<usize> = (0..self.processes.len()).filter(|&at| self.can_go(at)).collect();
            let Some(&at) = able.get(random.below(able.len().max(1) as u64) as usize) else { break };
            // Some run ahead of the others.
            for _ in 0..=random.below(20) {
                if self.can_go(at) {
                    self.take(at);
                }
            }
        }
        for (at, process) in self.processes.iter().enumerate() {
            assert_eq!(process.next, process.steps.len(), "process {at} waits in {:?}", process.steps.get(process.next));
        }
        assert!(self.messages.is_empty(), "sent and not received");
    }
}

fn check(method: Method, homes: &[usize], units: u64, block: u64, random: &mut Random) -> World {
    let operands: Vec<Vec<f32>> = homes.iter().map(|_| (0..units).map(|_| random.value()).collect()).collect();
    let mut world = World::new(method, homes, &operands, block);
    world.run(random);
    for unit in 0..units as usize {
        let values = || operands.iter().map(|operand| operand[unit]);
        let ascending = values().fold(0.0, |sum, value| sum + value);
        let exact: f64 = values().map(f64::from).sum();
        let size: f64 = values().map(|value| f64::from(value.abs())).sum();
        let first = world.processes[0].held[unit].unwrap();
        for process in &world.processes {
            let held = process.held[unit].unwrap();
            assert_eq!(held.to_bits(), first.to_bits(), "{method:?} {homes:?}: another value elsewhere");
            assert_eq!(process.finished[unit], 1, "{method:?} {homes:?}: unit {unit}");
        }
        assert!((f64::from(first) - exact).abs() <= size * 1e-5, "{method:?} {homes:?}: {first} is not {exact}");
        if method.keeps_order() {
            assert_eq!(first.to_bits(), ascending.to_bits(), "{method:?} {homes:?}: not in ascending order");
        }
    }
    world
}

/// Every process has a rank, the others are anybody's.
fn scattered(processes: usize, ranks: usize, random: &mut Random) -> Vec<usize> {
    let mut homes: Vec<usize> =
        (0..ranks).map(|rank| if rank < processes { rank } else { random.below(processes as u64) as usize }).collect();
    for at in (1..ranks).rev() {
        homes.swap(at, random.below(at as u64 + 1) as usize);
    }
    homes
}

#[test]
fn every_method_gives_every_process_the_sum_of_all() {
    let mut random = Random(1);
    for processes in (1..=17).chain([31, 32, 33, 64]) {
        let each: Vec<usize> = (0..processes).collect();
        let in_order: Vec<usize> = (0..2 * processes).map(|rank| rank / 2).collect();
        let in_turn: Vec<usize> = (0..2 * processes).map(|rank| rank % processes).collect();
        let any = scattered(processes, processes + random.below(10) as usize, &mut random);
        for homes in [each, in_order, in_turn, any] {
            for method in METHODS {
                let (units, block) = (1 + random.below(100), 1 + random.below(20));
                check(method, &homes, units, block, &mut random);
            }
        }
    }
}

#[test]
fn few_units_and_none() {
    let mut random = Random(2);
    for method in METHODS {
        for units in [1, 2, 3, 7] {
            check(method, &[0, 1, 2, 3, 4, 0], units, 100, &mut random);
        }
        assert_eq!(all_reduce(method, &[0, 1], 0, 0, 1), []);
    }
}

#[test]
fn each_process_sends_what_is_said_of_its_method() {
    let mut random = Random(3);
    let sent = |method, homes: &[usize], random: &mut Random| -> Vec<u64> {
        check(method, homes, 960, 10, random).processes.iter().map(|process| process.sent).collect()
    };
    for processes in [2, 3, 4, 5, 6, 8] {
        let homes: Vec<usize> = (0..4 * processes).map(|rank| rank / 4).collect();
        let count = processes as u64;
        let share = 960 * (count - 1) / count;
        assert_eq!(sent(Method::Raw, &homes, &mut random), vec![960 * 4 * (count - 1); processes]);
        assert_eq!(sent(Method::Scatter, &homes, &mut random).iter().sum::<u64>(), count * 5 * share);
        let chain = sent(Method::Chain, &homes, &mut random);
        assert_eq!(chain.iter().sum::<u64>(), 960 * 2 * (count - 1));
        assert!(chain.iter().all(|&sent| sent <= 2 * 960));
        assert_eq!(sent(Method::Ring, &homes, &mut random), vec![2 * share; processes]);
    }
    for processes in [2, 4, 8] {
        let homes: Vec<usize> = (0..processes).collect();
        let share = 960 * (processes as u64 - 1) / processes as u64;
        assert_eq!(sent(Method::Halving, &homes, &mut random), vec![2 * share; processes]);
        assert_eq!(sent(Method::Scatter, &homes, &mut random), vec![2 * share; processes]);
    }
    // The last two of six are in nobody's stead.
    assert_eq!(sent(Method::Halving, &[0, 1, 2, 3, 4, 5], &mut random), [1440 + 960, 960, 1440 + 960, 960, 1440, 1440]);
    // There and back again: seven times between the two, and the result.
    assert_eq!(sent(Method::Chain, &[0, 1, 0, 1, 0, 1, 0, 1], &mut random), [4 * 960, 4 * 960]);
}

#[test]
fn few_blocks_of_a_chain_take_few_hops() {
    let homes: Vec<usize> = (0..8).collect();
    let receives = |steps: &[Step]| steps.iter().filter(|step| matches!(step, Step::Receive { from: 7, .. })).count();
    assert!((0..7).all(|me| receives(&all_reduce(Method::Chain, &homes, me, 10, 10)) == 1));
    assert_eq!((0..7).filter(|&me| receives(&all_reduce(Method::Chain, &homes, me, 1000, 10)) > 0).collect::<Vec<_>>(), [0]);
}

#[test]
fn the_method_follows_from_where_the_ranks_are() {
    assert_eq!(fewest_bytes_in_order(&[0, 1]), Method::Scatter);
    assert_eq!(fewest_bytes_in_order(&[0, 1, 2, 3]), Method::Scatter);
    assert_eq!(fewest_bytes_in_order(&[0, 0, 1, 1]), Method::Chain);
    assert_eq!(fewest_bytes_in_order(&[0, 1, 0, 1, 0, 1]), Method::Scatter);
    assert_eq!(fewest_bytes_in_order(&[0, 0, 0, 1, 1, 1, 2, 2, 2, 0]), Method::Chain);
}
