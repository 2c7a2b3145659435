//! A collective cut into parts that can be done at the same time.

use crate::collective::{Collective, Op};
use crate::error::Result;
use crate::kernel::combine::{Combine, combiner};
use crate::kernel::{check, exchange, gather, reduce_to_all, scatter, source};

/// Cuts are at multiples of this, so that elements stay whole and aligned.
const CUT: usize = 64;

/// A part of a collective. Parts are independent of one another.
#[derive(Debug)]
pub struct Part<'a> {
    work: Vec<Work<'a>>,
}

impl Part<'_> {
    /// Does it.
    pub fn run(self) {
        self.work.into_iter().for_each(Work::run);
    }
}

#[derive(Debug)]
enum Work<'a> {
    /// All targets become the reduction of the sources, which have their length: one is copied, none is zeros.
    Piece { combine: Option<Combine>, sources: Vec<&'a [u8]>, targets: Vec<&'a mut [u8]> },
    /// Some runs of an array: the operands of all ranks, the results of some.
    Runs { kind: Kind, chunk: usize, operands: Vec<&'a [u8]>, results: Vec<(usize, &'a mut [u8])> },
}

/// A collective of which runs of chunks are independent.
#[derive(Debug, Clone, Copy)]
enum Kind {
    Gather,
    Scatter(Combine),
    Exchange,
}

impl Work<'_> {
    fn run(self) {
        match self {
            Work::Piece { combine: Some(combine), sources, mut targets } => {
                let Some((first, others)) = targets.split_first_mut() else { return };
                let copy =
                    |range: std::ops::Range<usize>, value: &[u8]| others.iter_mut().for_each(|t| t[range.clone()].copy_from_slice(value));
                reduce_to_all(combine, sources.len(), |rank| sources[rank], first, copy);
            }
            Work::Piece { combine: None, sources, targets } => match sources.first() {
                Some(source) => targets.into_iter().for_each(|t| t.copy_from_slice(source)),
                None => targets.into_iter().for_each(|t| t.fill(0)),
            },
            Work::Runs { kind, chunk, operands, results } => {
                let operand = |rank: usize| operands[rank];
                for (to, result) in results {
                    match kind {
                        Kind::Gather => gather(chunk, operands.len(), operand, result),
                        Kind::Scatter(combine) => scatter(combine, chunk, operands.len(), to, operand, result),
                        Kind::Exchange => exchange(chunk, operands.len(), to, operand, result),
                    }
                }
            }
        }
    }
}

/// Cuts a collective of one group into parts that each write about `part_bytes` bytes. All parts together do what
/// [`perform`](crate::kernel::perform) does, which takes the same memory and fails for the same reasons.
pub fn parts<'a>(
    collective: &Collective,
    group: &[u32],
    operands: Vec<Vec<&'a [u8]>>,
    results: Vec<Vec<&'a mut [u8]>>,
    part_bytes: usize,
) -> Result<Vec<Part<'a>>> {
    check(collective, group, &operands, &results)?;
    let ranks = group.len();
    let mut cutter = Cutter { done: Vec::new(), open: Vec::new(), bytes: 0, part_bytes };
    let mut rest = results;
    for (at, array) in collective.arrays.iter().enumerate() {
        let operand = |rank: usize| operands[rank][at];
        let here = rest.iter_mut().enumerate().filter(|(_, result)| !result.is_empty());
        let mut targets: Vec<(usize, &'a mut [u8])> = here.map(|(to, result)| (to, std::mem::take(&mut result[at]))).collect();
        if targets.is_empty() {
            continue;
        }
        let chunk = array.chunk as usize;
        // Only where all are needed.
        let all = || (0..ranks).map(operand).collect::<Vec<_>>();
        match &collective.op {
            Op::AllReduce(reduce) => cutter.pieces(combiner(*reduce, array.element), &all(), &mut slices(&mut targets)),
            Op::AllGather => cutter.runs(Kind::Gather, chunk, &all(), targets),
            Op::ReduceScatter(reduce) => {
                if let Some(combine) = combiner(*reduce, array.element) {
                    cutter.runs(Kind::Scatter(combine), chunk, &all(), targets);
                }
            }
            Op::AllToAll { tuple: false } => cutter.runs(Kind::Exchange, chunk, &all(), targets),
            Op::AllToAll { tuple: true } => {
                targets.iter_mut().for_each(|(to, target)| cutter.pieces(None, &[operands[at][*to]], &mut [target]));
            }
            Op::Permute(pairs) => {
                for (to, target) in &mut targets {
                    let from: Vec<&[u8]> = source(pairs, group, *to).map(operand).into_iter().collect();
                    cutter.pieces(None, &from, &mut [target]);
                }
            }
            Op::Broadcast => cutter.pieces(None, &[operand(0)], &mut slices(&mut targets)),
        }
    }
    Ok(cutter.finish())
}

struct Cutter<'a> {
    done: Vec<Part<'a>>,
    open: Vec<Work<'a>>,
    /// Written by `open`.
    bytes: usize,
    part_bytes: usize,
}

fn slices<'t, 'a>(targets: &'t mut [(usize, &'a mut [u8])]) -> Vec<&'t mut &'a mut [u8]> {
    targets.iter_mut().map(|(_, target)| target).collect()
}

/// Takes the first bytes off a result.
fn take<'a>(rest: &mut &'a mut [u8], bytes: usize) -> &'a mut [u8] {
    let (head, tail) = std::mem::take(rest).split_at_mut(bytes);
    *rest = tail;
    head
}

impl<'a> Cutter<'a> {
    fn push(&mut self, work: Work<'a>, bytes: usize) {
        self.open.push(work);
        self.bytes += bytes;
        if self.bytes >= self.part_bytes {
            self.close();
        }
    }

    fn close(&mut self) {
        self.bytes = 0;
        if !self.open.is_empty() {
            self.done.push(Part { work: std::mem::take(&mut self.open) });
        }
    }

    fn finish(mut self) -> Vec<Part<'a>> {
        self.close();
        self.done
    }

    /// The next bytes of the targets, as many as a source has, become the reduction of the sources.
    fn pieces(&mut self, combine: Option<Combine>, sources: &[&'a [u8]], targets: &mut [&mut &'a mut [u8]]) {
        let length = sources.first().map_or_else(|| targets.first().map_or(0, |t| t.len()), |s| s.len());
        let step = (self.part_bytes / targets.len().max(1) / CUT * CUT).max(CUT);
        for start in (0..length).step_by(step) {
            let bytes = step.min(length - start);
            let sources = sources.iter().map(|s| &s[start..start + bytes]).collect();
            let targets: Vec<&'a mut [u8]> = targets.iter_mut().map(|t| take(t, bytes)).collect();
            let written = bytes * targets.len();
            self.push(Work::Piece { combine, sources, targets }, written);
        }
    }

    /// An array whose dimension is gathered, scattered or exchanged.
    fn runs(&mut self, kind: Kind, chunk: usize, operands: &[&'a [u8]], mut results: Vec<(usize, &'a mut [u8])>) {
        let ranks = operands.len();
        let (from, to) = match kind {
            Kind::Gather => (chunk, chunk * ranks),
            Kind::Scatter(_) => (chunk * ranks, chunk),
            Kind::Exchange => (chunk * ranks, chunk * ranks),
        };
        let (runs, targets) = (results[0].1.len().checked_div(to).unwrap_or(0), results.len());
        if runs == 0 {
            return;
        }
        if to.saturating_mul(targets) > self.part_bytes {
            (0..runs).for_each(|run| {
                self.one_run(kind, chunk, &operands.iter().map(|o| &o[run * from..][..from]).collect::<Vec<_>>(), &mut results)
            });
            return;
        }
        let step = (self.part_bytes / (to * targets)).max(1);
        for start in (0..runs).step_by(step) {
            let count = step.min(runs - start);
            let operands = operands.iter().map(|o| &o[start * from..][..count * from]).collect();
            let results = results.iter_mut().map(|(rank, result)| (*rank, take(result, count * to))).collect();
            self.push(Work::Runs { kind, chunk, operands, results }, count * to * targets);
        }
    }

    /// One run that is too large for a part.
    fn one_run(&mut self, kind: Kind, chunk: usize, operands: &[&'a [u8]], results: &mut [(usize, &'a mut [u8])]) {
        let of = |operand: &'a [u8], rank: usize| &operand[rank * chunk..][..chunk];
        match kind {
            Kind::Gather => {
                for operand in operands {
                    self.pieces(None, &[operand], &mut slices(results));
                }
            }
            Kind::Scatter(combine) => {
                for (to, result) in results {
                    let sources: Vec<&[u8]> = operands.iter().map(|o| of(o, *to)).collect();
                    self.pieces(Some(combine), &sources, &mut [result]);
                }
            }
            Kind::Exchange => {
                for (to, result) in results {
                    operands.iter().for_each(|o| self.pieces(None, &[of(o, *to)], &mut [result]));
                }
            }
        }
    }
}
