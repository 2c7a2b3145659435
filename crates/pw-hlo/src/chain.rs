//! The order of the collectives of a computation.

use std::collections::BTreeMap;

use crate::error::{HloError, Result};
use crate::lower::{Class, classify};
use crate::module::{Computation, Module};

/// Which instructions of which computations are collectives or run some, by their indices.
#[derive(Debug)]
pub(crate) struct Communicating {
    marked: Vec<Vec<bool>>,
}

impl Communicating {
    /// Finds them. Refuses those in computations that cannot hold a call: fusions, reducers, asynchronous ones.
    pub(crate) fn find(module: &Module<'_>) -> Result<Self> {
        let mut marked: Vec<Vec<bool>> =
            module.computations.iter().map(|c| c.instructions.iter().map(|i| classify(i.opcode) == Class::Collective).collect()).collect();
        // Whether a computation asks who it is, which must not happen in a fusion either.
        let asks = |at: usize| module.computations[at].instructions.iter().any(|i| matches!(classify(i.opcode), Class::Who(_)));
        loop {
            let mut changed = false;
            for (at, computation) in module.computations.iter().enumerate() {
                for (index, instruction) in computation.instructions.iter().enumerate() {
                    for called in &instruction.called {
                        let called = module.at(*called)?;
                        let runs_calls = matches!(instruction.opcode, "while" | "conditional" | "call");
                        let communicates = marked[called].contains(&true);
                        if !runs_calls && (communicates || asks(called)) {
                            return Err(instruction.unsupported("it holds a collective, or asks for a partition"));
                        }
                        if communicates && !marked[at][index] {
                            marked[at][index] = true;
                            changed = true;
                        }
                    }
                }
            }
            if !changed {
                return Ok(Self { marked });
            }
        }
    }

    /// The order of a computation's instructions in the rewritten message, as indices, and for each that is chained
    /// to another the one that must be done before it, both by id.
    pub(crate) fn chain(&self, module: &Module<'_>, at: usize) -> Result<(Vec<usize>, BTreeMap<i64, i64>)> {
        let computation = &module.computations[at];
        let mut order: Vec<usize> = (0..computation.instructions.len()).collect();
        let marked = &self.marked[at];
        if marked.iter().filter(|m| **m).count() < 2 {
            return Ok((order, BTreeMap::new()));
        }
        if let Some(schedule) = module.schedule.get(&computation.id) {
            let scheduled = indices(computation, schedule)?;
            let of = |order: &[usize]| order.iter().copied().filter(|&i| marked[i]).collect::<Vec<_>>();
            // A predecessor must stand before its successor in the message.
            if of(&scheduled) != of(&order) {
                order = scheduled;
            }
        }
        check_topological(computation, &order)?;
        let chained: Vec<i64> = order.iter().filter(|&&i| marked[i]).map(|&i| computation.instructions[i].id).collect();
        Ok((order, chained.windows(2).map(|pair| (pair[1], pair[0])).collect()))
    }
}

/// A schedule as indices; it must name every instruction once.
fn indices(computation: &Computation<'_>, schedule: &[i64]) -> Result<Vec<usize>> {
    let found: Option<Vec<usize>> = schedule.iter().map(|id| computation.index.get(id).copied()).collect();
    let incomplete = || HloError::malformed(format!("the schedule of computation {} is not of its instructions", computation.id));
    let found = found.ok_or_else(incomplete)?;
    let mut sorted = found.clone();
    sorted.sort_unstable();
    if sorted.into_iter().eq(0..computation.instructions.len()) { Ok(found) } else { Err(incomplete()) }
}

/// Every operand and control predecessor must come before: else an edge could close a circle.
fn check_topological(computation: &Computation<'_>, order: &[usize]) -> Result<()> {
    let mut place = vec![0; order.len()];
    order.iter().enumerate().for_each(|(at, &index)| place[index] = at);
    for (index, instruction) in computation.instructions.iter().enumerate() {
        for id in instruction.operands.iter().chain(&instruction.control) {
            let before = computation.index.get(id).is_some_and(|&i| place[i] < place[index]);
            if !before {
                return Err(HloError::malformed(format!("{:?} stands before what it needs", instruction.name)));
            }
        }
    }
    Ok(())
}
