//! Executables: asked for, loaded, refused, and unloaded behind their last launch.

use std::collections::VecDeque;
use std::sync::Arc;

use pw_types::{ExecutableId, RunId, Status, ValueSpec};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::event::LoadedProgram;
use crate::table::{ELSEWHERE, Spec};

/// How many runs without known outputs are remembered, so that what names their outputs fails with their status.
const LOST_RUNS_MAX: usize = 4096;

#[derive(Debug)]
pub(crate) enum Executable {
    Loading { unload: bool },
    Loaded(Loaded),
    Failed(Arc<Status>),
}

#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) program: Arc<LoadedProgram>,
    pub(crate) parameters: Vec<Arc<Spec>>,
    pub(crate) outputs: Vec<Arc<Spec>>,
    /// Device of every shard of an output.
    pub(crate) shards: Vec<u32>,
    /// By parameter: the program can reuse its storage.
    pub(crate) donates: Vec<bool>,
    /// Unfinished launches.
    pub(crate) launches: u32,
    /// Unload once there are none.
    pub(crate) unload: bool,
    pub(crate) times: Times,
}

impl Loaded {
    pub(crate) fn new(program: Arc<LoadedProgram>) -> Loaded {
        let specs = |values: &[ValueSpec]| values.iter().map(|v| Arc::new(Spec::of_value(v))).collect::<Vec<_>>();
        let (parameters, outputs) = (specs(&program.report.parameters), specs(&program.report.outputs));
        let mut donates = vec![false; parameters.len()];
        for &index in &program.report.donated {
            if let Some(slot) = donates.get_mut(index as usize) {
                *slot = true;
            }
        }
        let mut shards = vec![ELSEWHERE; program.total as usize];
        for (&member, &device) in program.members.iter().zip(&program.devices) {
            shards[member as usize] = device;
        }
        Loaded { program, parameters, outputs, shards, donates, launches: 0, unload: false, times: Times::default() }
    }

    pub(crate) fn is_brief(&self) -> bool {
        let report = &self.program.report;
        report.collectives == 0 && !report.host_callbacks && self.times.are_brief()
    }
}

/// A launch that takes less, all members together, is not worth waking another thread for.
const BRIEF_NS: u64 = 80_000;
/// A launch that takes so long does so by itself, not because something disturbed it.
const LONG_NS: u64 = 5_000_000;
/// Launches after a long one that are not taken for brief.
const DOUBTS: u32 = 256;

/// How long the launches of a program take when nothing disturbs them: the least seen, which slowly forgets.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Times {
    least: Option<u64>,
    /// Launches to go until it can be brief again.
    doubts: u32,
}

impl Times {
    pub(crate) fn note(&mut self, ns: u64) {
        self.least = Some(self.least.map_or(ns, |least| ns.min(least + least / 64 + 1)));
        self.doubts = if ns >= LONG_NS { DOUBTS } else { self.doubts.saturating_sub(1) };
    }

    fn are_brief(self) -> bool {
        self.doubts == 0 && self.least.is_some_and(|ns| ns < BRIEF_NS)
    }
}

impl Spec {
    fn of_value(value: &ValueSpec) -> Spec {
        Spec { dtype: value.dtype, dims: value.shard_dims.clone(), memory_kind: value.memory_kind.clone() }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Executables {
    pub(crate) entries: FxHashMap<ExecutableId, Executable>,
}

/// Runs of programs that are not there: what they would have made is not known, only why it was not.
#[derive(Debug, Default)]
pub(crate) struct LostRuns {
    statuses: FxHashMap<RunId, Arc<Status>>,
    order: VecDeque<RunId>,
}

impl LostRuns {
    pub(crate) fn add(&mut self, run: RunId, status: Arc<Status>) {
        if self.order.len() == LOST_RUNS_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.statuses.remove(&oldest);
        }
        if self.statuses.insert(run, status).is_none() {
            self.order.push_back(run);
        }
    }

    pub(crate) fn get(&self, run: RunId) -> Option<&Arc<Status>> {
        self.statuses.get(&run)
    }
}

/// The last values that were added; the oldest go first.
#[derive(Debug)]
pub(crate) struct Recent<T> {
    set: FxHashSet<T>,
    order: VecDeque<T>,
    max: usize,
}

impl<T: Copy + Eq + std::hash::Hash> Recent<T> {
    pub(crate) fn new(max: usize) -> Recent<T> {
        Recent { set: FxHashSet::default(), order: VecDeque::new(), max }
    }

    pub(crate) fn add(&mut self, value: T) {
        if !self.set.insert(value) {
            return;
        }
        self.order.push_back(value);
        if self.order.len() > self.max
            && let Some(oldest) = self.order.pop_front()
        {
            self.set.remove(&oldest);
        }
    }

    pub(crate) fn remove(&mut self, value: T) {
        if self.set.remove(&value) {
            self.order.retain(|&v| v != value);
        }
    }

    pub(crate) fn contains(&self, value: T) -> bool {
        self.set.contains(&value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_forgets_slowly() {
        let mut times = Times::default();
        for ns in [900, 100, 800] {
            times.note(ns);
        }
        assert_eq!(times.least, Some(102));
        (0..1000).for_each(|_| times.note(800));
        assert_eq!(times.least, Some(800));
    }

    #[test]
    fn a_program_that_is_long_now_and_then_is_not_brief() {
        let mut times = Times::default();
        assert!(!times.are_brief(), "nothing is known");
        times.note(BRIEF_NS - 1);
        assert!(times.are_brief());
        times.note(LONG_NS);
        for _ in 0..DOUBTS {
            assert!(!times.are_brief());
            times.note(1);
        }
        assert!(times.are_brief());
    }
}
