//! Schedules of an all-reduce over processes: what each of them folds, sends and receives, in which order.
//!
//! A group has ranks, each with an operand; a process has some of the ranks. An operand is a run of units, cut into
//! blocks. A process holds one value per unit, which steps replace or fold into.
//!
//! Invariants:
//! 1. Where each process takes its steps one after the other, and only receiving waits, all of them end.
//! 2. A message is received by whom it is sent to, once; sender, receiver and tag name it.
//! 3. At the end each process has finished each unit once, with the reduction of all operands. It is the same value
//!    everywhere; by a method that [keeps the order](Method::keeps_order), the one of the ascending order of ranks.

use std::ops::Range;

/// Part of an operand.
pub type Units = Range<u64>;

/// A way to do it. `n` are the bytes of an operand, `P` the processes, `G` the ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Method {
    /// Everybody sends all operands to everybody: one hop, `G (P - 1) n` bytes in all.
    Raw,
    /// Each block has an owner, which gets all operands of it and sends the result: two hops,
    /// `G (P - 1) / P n + (P - 1) n` bytes in all, each process the like.
    Scatter,
    /// What is reduced so far goes from process to process in ascending order of ranks, then the result: as many hops
    /// as there are runs of ranks on one process, and `P - 1` for the result; as many times `n` bytes.
    Chain,
    /// Each process reduces its own; partial results go round, then the result: `2 (P - 1)` hops, `2 (P - 1) / P n` bytes
    /// of each process.
    Ring,
    /// As [`Method::Ring`], between pairs at halved and then doubled distances: `2 log2 P` hops. Where `P` is no power
    /// of two, some send all that they have to another one first.
    Halving,
}

impl Method {
    /// Whether the result is that of one process that has all operands, bit by bit.
    pub fn keeps_order(self) -> bool {
        matches!(self, Method::Raw | Method::Scatter | Method::Chain)
    }
}

/// What comes in place of what is held, or is folded into it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Incoming {
    /// It is held from now on.
    Replaces,
    /// What is held goes first.
    Folds,
}

/// What a process does next. Processes are numbered from 0.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// The operands of these ranks are folded into what is held of the block, in ascending order; if they `begin`, in
    /// place of it. Each is here, or has been received.
    Fold { block: Units, ranks: Range<usize>, begin: bool },
    /// The operand of a rank that is here.
    SendOperand { to: usize, tag: u32, rank: usize, block: Units },
    /// The operand of a rank that is not here; it is needed for one fold of this block.
    ReceiveOperand { from: usize, tag: u32, rank: usize, block: Units },
    /// What is held.
    Send { to: usize, tag: u32, block: Units },
    /// What another process held.
    Receive { from: usize, tag: u32, block: Units, incoming: Incoming },
    /// What is held is the result, of this block.
    Finish { block: Units },
}

/// So many blocks more than the shortest way may be under way at a time.
const SLACK: usize = 2;

/// The steps of the process `me`. `homes[rank]` is the process of a rank; every process below the greatest has one.
pub fn all_reduce(method: Method, homes: &[usize], me: usize, units: u64, block: u64) -> Vec<Step> {
    let processes = homes.iter().max().map_or(0, |most| most + 1);
    let plan = Plan { homes, processes, me, units, block: block.max(1), steps: Vec::new() };
    match method {
        _ if units == 0 => Vec::new(),
        Method::Raw => plan.raw(),
        Method::Scatter => plan.scatter(),
        Method::Chain => plan.chain(),
        Method::Ring => plan.ring(),
        Method::Halving => plan.halving(),
    }
}

/// The method that keeps the order and has the least to send. [`Method::Raw`], which has the fewest hops, is not
/// considered: it is for operands so small that bytes do not matter.
pub fn fewest_bytes_in_order(homes: &[usize]) -> Method {
    let processes = homes.iter().max().map_or(0, |most| most + 1);
    // Without what both need for the results, times the number of processes. At a draw, the one with fewer hops.
    let (chain, scatter) = ((segments(homes).len() - 1) * processes, homes.len() * (processes - 1));
    if scatter <= chain { Method::Scatter } else { Method::Chain }
}

/// Runs of ranks on one process, and which.
fn segments(homes: &[usize]) -> Vec<(usize, Range<usize>)> {
    let mut at = 0;
    homes
        .chunk_by(|a, b| a == b)
        .map(|run| {
            let first = at;
            at += run.len();
            (run[0], first..at)
        })
        .collect()
}

struct Plan<'a> {
    homes: &'a [usize],
    processes: usize,
    me: usize,
    units: u64,
    block: u64,
    steps: Vec<Step>,
}

impl Plan<'_> {
    fn blocks(&self) -> u64 {
        self.units.div_ceil(self.block)
    }

    fn block(&self, index: u64) -> Units {
        index * self.block..self.units.min((index + 1) * self.block)
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let me = self.me;
        (0..self.processes).filter(move |&process| process != me)
    }

    fn raw(mut self) -> Vec<Step> {
        let (block, me) = (0..self.units, self.me);
        for to in self.others() {
            let own = (0..).zip(self.homes).filter(|(_, home)| **home == me);
            self.steps.extend(own.map(|(rank, _)| Step::SendOperand { to, tag: rank as u32, rank, block: block.clone() }));
        }
        let foreign = self.homes.iter().enumerate().filter(|(_, home)| **home != me);
        self.steps.extend(foreign.map(|(rank, &from)| Step::ReceiveOperand { from, tag: rank as u32, rank, block: block.clone() }));
        self.steps.push(Step::Fold { block: block.clone(), ranks: 0..self.homes.len(), begin: true });
        self.steps.push(Step::Finish { block });
        self.steps
    }

    /// Round after round: a block of each process.
    fn scatter(mut self) -> Vec<Step> {
        let processes = self.processes as u64;
        self.block = self.block.min(self.units.div_ceil(processes));
        let (blocks, ranks, me) = (self.blocks(), self.homes.len(), self.me);
        let rounds = blocks.div_ceil(processes);
        let tag = |of: usize, index: u64| (of as u64 * blocks + index) as u32;
        // Of the process, in a round that may be the last one.
        let owned = |round: u64, owner: usize| Some(round * processes + owner as u64).filter(|&index| index < blocks);
        for round in 0..rounds + SLACK as u64 {
            for (index, to) in self.others().filter_map(|to| Some((owned(round, to)?, to))) {
                let block = self.block(index);
                let own = (0..ranks).filter(|&rank| self.homes[rank] == me);
                let sends = own.map(|rank| Step::SendOperand { to, tag: tag(rank, index), rank, block: block.clone() });
                self.steps.extend(sends.collect::<Vec<_>>());
            }
            if let Some(index) = owned(round, me) {
                let block = self.block(index);
                for (rank, &from) in self.homes.iter().enumerate().filter(|(_, home)| **home != me) {
                    self.steps.push(Step::ReceiveOperand { from, tag: tag(rank, index), rank, block: block.clone() });
                }
                self.steps.push(Step::Fold { block: block.clone(), ranks: 0..ranks, begin: true });
                let sends = self.others().map(|to| Step::Send { to, tag: tag(ranks, index), block: block.clone() });
                self.steps.extend(sends);
                self.steps.push(Step::Finish { block });
            }
            let Some(round) = round.checked_sub(SLACK as u64) else { continue };
            for (index, from) in self.others().filter_map(|from| Some((owned(round, from)?, from))) {
                let block = self.block(index);
                self.steps.push(Step::Receive { from, tag: tag(ranks, index), block: block.clone(), incoming: Incoming::Replaces });
                self.steps.push(Step::Finish { block });
            }
        }
        self.steps
    }

    /// A block is at one stage at a time: first at those of its segments, then with those who get the result. Stage `s` of
    /// block `b` is at the time `b + s`; who takes steps in the order of time waits for earlier ones only.
    fn chain(mut self) -> Vec<Step> {
        let segments = segments(self.homes);
        let (blocks, last) = (self.blocks(), segments[segments.len() - 1].0);
        let receivers: Vec<usize> = (0..self.processes).filter(|&process| process != last).collect();
        // Few blocks do not fill a chain: each who gets the result gets it from the last one at once.
        let direct = blocks < 2 * receivers.len() as u64;
        let stages = (segments.len() + SLACK + receivers.len()) as u64;
        for time in 0..blocks + stages {
            for index in (time + 1).saturating_sub(stages)..blocks.min(time + 1) {
                let (stage, block) = ((time - index) as usize, self.block(index));
                let tag = |stage: usize| (stage as u64 * blocks + index) as u32;
                let first_result = segments.len() + SLACK;
                if let Some((process, ranks)) = segments.get(stage) {
                    if *process != self.me {
                        continue;
                    }
                    if stage > 0 {
                        let from = segments[stage - 1].0;
                        self.steps.push(Step::Receive { from, tag: tag(stage), block: block.clone(), incoming: Incoming::Replaces });
                    }
                    self.steps.push(Step::Fold { block: block.clone(), ranks: ranks.clone(), begin: stage == 0 });
                    if let Some((to, _)) = segments.get(stage + 1) {
                        self.steps.push(Step::Send { to: *to, tag: tag(stage + 1), block });
                        continue;
                    }
                    let to = receivers.iter().take(if direct { receivers.len() } else { 1 });
                    let sends = (first_result..).zip(to).map(|(stage, &to)| Step::Send { to, tag: tag(stage), block: block.clone() });
                    self.steps.extend(sends);
                    self.steps.push(Step::Finish { block });
                } else if let Some(at) = stage.checked_sub(first_result).filter(|&at| receivers.get(at) == Some(&self.me)) {
                    let from = if direct || at == 0 { last } else { receivers[at - 1] };
                    self.steps.push(Step::Receive { from, tag: tag(stage), block: block.clone(), incoming: Incoming::Replaces });
                    if let (false, Some(&to)) = (direct, receivers.get(at + 1)) {
                        self.steps.push(Step::Send { to, tag: tag(stage + 1), block: block.clone() });
                    }
                    self.steps.push(Step::Finish { block });
                }
            }
        }
        self.steps
    }

    /// The blocks of the units from `of.start` to `of.end`, at the same places whoever asks.
    fn cut(&self, of: Units) -> impl Iterator<Item = Units> + use<> {
        let (block, end) = (self.block, of.end);
        of.step_by(usize::try_from(block).unwrap_or(usize::MAX)).map(move |start| start..end.min(start.saturating_add(block)))
    }

    /// What the ranks that are here have of the block, alone.
    fn fold_own(&mut self, block: &Units) {
        let own: Vec<Range<usize>> =
            segments(self.homes).into_iter().filter(|(process, _)| *process == self.me).map(|(_, ranks)| ranks).collect();
        let folds = own.into_iter().enumerate().map(|(at, ranks)| Step::Fold { block: block.clone(), ranks, begin: at == 0 });
        self.steps.extend(folds);
    }

    /// Piece `i` of as many as there are processes.
    fn piece(&self, index: usize) -> Units {
        let at = |index: usize| (u128::from(self.units) * index as u128 / self.processes as u128) as u64;
        at(index)..at(index + 1)
    }

    fn ring(mut self) -> Vec<Step> {
        let (count, me) = (self.processes, self.me);
        let (to, from) = ((me + 1) % count, (me + count - 1) % count);
        // What goes round comes to this process as its `round`th.
        let piece = |plan: &Self, round: usize| plan.cut(plan.piece((me + 2 * count - round) % count)).collect::<Vec<_>>();
        let tags = |round: usize| (0..).map(move |index: u32| (round as u32).wrapping_mul(1 << 20).wrapping_add(index));
        for block in piece(&self, 0) {
            self.fold_own(&block);
        }
        for round in 0..2 * (count - 1) {
            let reducing = round + 1 < count;
            let (sent, received) = (piece(&self, round), piece(&self, round + 1));
            for (index, tag) in (0..sent.len().max(received.len())).zip(tags(round)) {
                if let Some(block) = sent.get(index) {
                    self.steps.push(Step::Send { to, tag, block: block.clone() });
                    if !reducing {
                        self.steps.push(Step::Finish { block: block.clone() });
                    }
                }
                if let Some(block) = received.get(index) {
                    let incoming = if reducing { Incoming::Folds } else { Incoming::Replaces };
                    if reducing {
                        self.fold_own(block);
                    }
                    self.steps.push(Step::Receive { from, tag, block: block.clone(), incoming });
                }
            }
        }
        // The one that came last goes to nobody.
        let rest = piece(&self, 2 * (count - 1)).into_iter().map(|block| Step::Finish { block });
        self.steps.extend(rest);
        self.steps
    }

    fn halving(mut self) -> Vec<Step> {
        let (count, me) = (self.processes, self.me);
        let pairing = 1 << count.ilog2();
        // The first of these, two by two: the odd one leaves all to the even one.
        let doubled = 2 * (count - pairing);
        let whole: Vec<Units> = self.cut(0..self.units).collect();
        let tags = |round: u32| (0..).map(move |index: u32| round.wrapping_mul(1 << 24).wrapping_add(index));
        for block in &whole {
            self.fold_own(block);
        }
        const LEFT: u32 = 254;
        const BACK: u32 = 255;
        if me < doubled && me % 2 == 1 {
            let to = me - 1;
            self.steps.extend(whole.iter().zip(tags(LEFT)).map(|(block, tag)| Step::Send { to, tag, block: block.clone() }));
            for (block, tag) in whole.into_iter().zip(tags(BACK)) {
                self.steps.push(Step::Receive { from: to, tag, block: block.clone(), incoming: Incoming::Replaces });
                self.steps.push(Step::Finish { block });
            }
            return self.steps;
        }
        if me < doubled {
            let from = me + 1;
            let left = whole.iter().zip(tags(LEFT));
            self.steps.extend(left.map(|(block, tag)| Step::Receive { from, tag, block: block.clone(), incoming: Incoming::Folds }));
        }
        let number = if me < doubled { me / 2 } else { me - (count - pairing) };
        let process = |number: usize| if number < doubled / 2 { 2 * number } else { number + count - pairing };
        // What is still reduced here, and what the partners of the rounds got.
        let mut mine = 0..self.units;
        let mut given = Vec::new();
        for round in 0..pairing.ilog2() {
            let distance = pairing >> (round + 1);
            let middle = mine.start + (mine.end - mine.start) / 2;
            let (low, high) = (mine.start..middle, middle..mine.end);
            let (kept, sent) = if number & distance == 0 { (low, high) } else { (high, low) };
            let partner = process(number ^ distance);
            self.swap(partner, round, (&sent, &kept), Incoming::Folds);
            given.push((partner, sent));
            mine = kept;
        }
        for (round, (partner, theirs)) in (pairing.ilog2()..).zip(given.into_iter().rev()) {
            self.swap(partner, round, (&mine, &theirs), Incoming::Replaces);
            mine = mine.start.min(theirs.start)..mine.end.max(theirs.end);
        }
        if me < doubled {
            let to = me + 1;
            self.steps.extend(whole.iter().zip(tags(BACK)).map(|(block, tag)| Step::Send { to, tag, block: block.clone() }));
        }
        self.steps.extend(whole.into_iter().map(|block| Step::Finish { block }));
        self.steps
    }

    /// With a process that does the same the other way round.
    fn swap(&mut self, with: usize, round: u32, (sent, received): (&Units, &Units), incoming: Incoming) {
        let tag = |index: usize| round.wrapping_mul(1 << 24).wrapping_add(index as u32);
        let (sent, received): (Vec<_>, Vec<_>) = (self.cut(sent.clone()).collect(), self.cut(received.clone()).collect());
        for index in 0..sent.len().max(received.len()) {
            if let Some(block) = sent.get(index) {
                self.steps.push(Step::Send { to: with, tag: tag(index), block: block.clone() });
            }
            if let Some(block) = received.get(index) {
                self.steps.push(Step::Receive { from: with, tag: tag(index), block: block.clone(), incoming });
            }
        }
    }
}

#[cfg(test)]
mod tests;
