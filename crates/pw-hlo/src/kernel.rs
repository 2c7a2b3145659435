//! A collective performed on bytes: the memory of all ranks of a group is at hand.
//!
//! Invariants:
//! 1. A reduction goes in ascending order of ranks, one operand after the other, and rounds after each: the bits are
//!    those of XLA's own collectives within a process.
//! 2. All sizes are checked before anything is written.

use std::ops::Range;

use crate::collective::{Array, Collective, Op};
use crate::error::{HloError, Result};
use combine::{Combine, combiner};

pub use parts::{Part, parts};

mod combine;
mod parts;

/// What is reduced at a time, so that it is still in the cache for the next operand and the last result.
const BLOCK: usize = 32 << 10;

/// Performs a collective for one of its groups. `operands[rank][array]` and `results[rank][array]` are the memory of
/// each rank, in the order of the group. A rank without results is somebody else's to serve; one without operands must
/// not be needed for the results that are here. Fails, and writes nothing, if their sizes are not those of
/// [`Collective::sizes`].
pub fn perform(collective: &Collective, group: &[u32], operands: &[Vec<&[u8]>], results: &mut [Vec<&mut [u8]>]) -> Result<()> {
    check(collective, group, operands, results)?;
    for (at, array) in collective.arrays.iter().enumerate() {
        let chunk = array.chunk as usize;
        let operand = |rank: usize| operands[rank][at];
        match &collective.op {
            Op::AllReduce(reduce) => {
                let mut here = results.iter_mut().filter(|r| !r.is_empty());
                let Some(first) = here.next() else { continue };
                let mut others: Vec<_> = here.collect();
                let others =
                    |range: Range<usize>, value: &[u8]| others.iter_mut().for_each(|r| r[at][range.clone()].copy_from_slice(value));
                reduce_to_all(known(combiner(*reduce, array.element)), group.len(), operand, first[at], others);
            }
            Op::AllGather => here(results).for_each(|(_, result)| gather(chunk, group.len(), operand, result[at])),
            Op::ReduceScatter(reduce) => {
                let combine = known(combiner(*reduce, array.element));
                here(results).for_each(|(to, result)| scatter(combine, chunk, group.len(), to, operand, result[at]));
            }
            Op::AllToAll { tuple: false } => {
                here(results).for_each(|(to, result)| exchange(chunk, group.len(), to, operand, result[at]));
            }
            // Array `at` of a result is what rank `at` has for it.
            Op::AllToAll { tuple: true } => {
                here(results).for_each(|(to, result)| result[at].copy_from_slice(operands[at][to]));
            }
            Op::Permute(pairs) => {
                for (to, result) in here(results) {
                    match source(pairs, group, to) {
                        Some(from) => result[at].copy_from_slice(operand(from)),
                        None => result[at].fill(0),
                    }
                }
            }
            Op::Broadcast => here(results).for_each(|(_, result)| result[at].copy_from_slice(operand(0))),
        }
    }
    Ok(())
}

/// The results that are here, by rank.
fn here<'r, 'm>(results: &'r mut [Vec<&'m mut [u8]>]) -> impl Iterator<Item = (usize, &'r mut Vec<&'m mut [u8]>)> {
    results.iter_mut().enumerate().filter(|(_, r)| !r.is_empty())
}

/// The ranks whose operands the results of the rank `to` are made of.
pub fn needs(collective: &Collective, group: &[u32], to: usize) -> Vec<usize> {
    match &collective.op {
        Op::Permute(pairs) => source(pairs, group, to).into_iter().collect(),
        Op::Broadcast => vec![0],
        _ => (0..group.len()).collect(),
    }
}

/// A combiner of a checked collective.
fn known(combine: Option<Combine>) -> Combine {
    combine.expect("checked")
}

/// All results are the reduction of the operands: the first, and what `others` copies of it range by range.
fn reduce_to_all<'o>(
    combine: Combine,
    ranks: usize,
    operand: impl Fn(usize) -> &'o [u8],
    first: &mut [u8],
    mut others: impl FnMut(Range<usize>, &[u8]),
) {
    for range in blocks(0..first.len()) {
        let target = &mut first[range.clone()];
        (combine.start)(target, &operand(0)[range.clone()]);
        (1..ranks).for_each(|rank| (combine.next)(target, &operand(rank)[range.clone()]));
        others(range, target);
    }
}

/// Result `[runs][ranks][chunk]` of operands `[runs][chunk]`.
fn gather<'o>(chunk: usize, ranks: usize, operand: impl Fn(usize) -> &'o [u8], result: &mut [u8]) {
    for (run, result) in pieces(result, chunk * ranks).enumerate() {
        for (rank, piece) in pieces(result, chunk).enumerate() {
            piece.copy_from_slice(&operand(rank)[run * chunk..][..chunk]);
        }
    }
}

/// Result `[runs][chunk]` of rank `to` of operands `[runs][ranks][chunk]`.
fn scatter<'o>(combine: Combine, chunk: usize, ranks: usize, to: usize, operand: impl Fn(usize) -> &'o [u8], result: &mut [u8]) {
    for (run, piece) in pieces(result, chunk).enumerate() {
        let start = (run * ranks + to) * chunk;
        reduce_to_all(combine, ranks, |rank| &operand(rank)[start..start + chunk], piece, |_, _| {});
    }
}

/// Result `[runs][ranks][chunk]` of rank `to` of operands of the same form.
fn exchange<'o>(chunk: usize, ranks: usize, to: usize, operand: impl Fn(usize) -> &'o [u8], result: &mut [u8]) {
    for (run, result) in pieces(result, chunk * ranks).enumerate() {
        for (rank, piece) in pieces(result, chunk).enumerate() {
            piece.copy_from_slice(&operand(rank)[(run * ranks + to) * chunk..][..chunk]);
        }
    }
}

/// The rank whose operand a permutation gives to the rank `to`.
fn source(pairs: &[(u32, u32)], group: &[u32], to: usize) -> Option<usize> {
    let at = pairs.binary_search_by_key(&group[to], |&(_, target)| target).ok()?;
    let member = pairs[at].0;
    // As a rule the group is 0, 1, 2, …
    let rank = member as usize;
    if group.get(rank) == Some(&member) { Some(rank) } else { group.iter().position(|&m| m == member) }
}

/// A result in pieces of one size, none where that is 0.
fn pieces(result: &mut [u8], size: usize) -> std::slice::ChunksExactMut<'_, u8> {
    let result = if size == 0 { &mut [] } else { result };
    result.chunks_exact_mut(size.max(1))
}

/// A range, block by block.
fn blocks(range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    range.clone().step_by(BLOCK).map(move |start| start..range.end.min(start + BLOCK))
}

/// Checks that the memory of all ranks is what the collective needs, so that nothing can fail later.
fn check(collective: &Collective, group: &[u32], operands: &[Vec<&[u8]>], results: &[Vec<&mut [u8]>]) -> Result<()> {
    let (ranks, arrays) = (group.len(), collective.arrays.len());
    if ranks == 0 || (operands.len(), results.len()) != (ranks, ranks) {
        return mismatch(format!("{} operands and {} results for {ranks} ranks", operands.len(), results.len()));
    }
    check_op(collective, group)?;
    // As a rule all are here.
    let some_elsewhere = operands.iter().any(Vec::is_empty);
    for (rank, (given, made)) in operands.iter().zip(results).enumerate() {
        if ![0, arrays].contains(&given.len()) || ![0, arrays].contains(&made.len()) {
            return mismatch(format!("rank {rank} has {} operands and {} results for {arrays}", given.len(), made.len()));
        }
        if some_elsewhere
            && !made.is_empty()
            && let Some(missing) = needs(collective, group, rank).into_iter().find(|&from| operands[from].is_empty())
        {
            return mismatch(format!("rank {rank} needs the operands of rank {missing}, which are not here"));
        }
        for (at, array) in collective.arrays.iter().enumerate() {
            let sizes = (given.get(at).map(|o| o.len()), made.get(at).map(|r| r.len()));
            let fits = |(operand, result)| sizes.0.is_none_or(|n| n == operand) && sizes.1.is_none_or(|n| n == result);
            match collective.sizes(array, ranks) {
                Some(expected) if fits(expected) => {}
                expected => {
                    let text = |size: Option<usize>| size.map_or_else(|| "none".to_owned(), |size| size.to_string());
                    let (operand, result) = (text(sizes.0), text(sizes.1));
                    return mismatch(format!("array {at} of rank {rank} has ({operand}, {result}) bytes, not {expected:?}"));
                }
            }
        }
    }
    Ok(())
}

fn check_op(collective: &Collective, group: &[u32]) -> Result<()> {
    match &collective.op {
        Op::AllReduce(reduce) | Op::ReduceScatter(reduce) => {
            let whole =
                |a: &Array| combiner(*reduce, a.element).is_some() && a.element.bits().is_some_and(|b| a.chunk.is_multiple_of(b / 8));
            match collective.arrays.iter().find(|a| !whole(a)) {
                Some(array) => mismatch(format!("no {reduce:?} of {} in chunks of {} bytes", array.element.name(), array.chunk)),
                None => Ok(()),
            }
        }
        Op::AllToAll { tuple: true } => {
            let fits = collective.arrays.len() == group.len() && collective.arrays.iter().all(|a| *a == collective.arrays[0]);
            if fits { Ok(()) } else { mismatch("an exchange needs an array of one size per rank".to_owned()) }
        }
        Op::Permute(pairs) => {
            let ascend = pairs.windows(2).all(|p| p[0].1 < p[1].1);
            let inside = |(from, to): &(u32, u32)| [from, to].into_iter().all(|m| group.get(*m as usize) == Some(m) || group.contains(m));
            if ascend && pairs.iter().all(inside) { Ok(()) } else { mismatch("pairs out of order, or not of the group".to_owned()) }
        }
        _ => Ok(()),
    }
}

fn mismatch(why: String) -> Result<()> {
    Err(HloError::Mismatch(why))
}

#[cfg(test)]
mod tests;
