//! Executables: asked for, loaded, refused, and unloaded behind their last launch.

use std::collections::VecDeque;
use std::sync::Arc;

use pw_types::{ExecutableId, RunId, Status, ValueSpec};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::event::LoadedProgram;
use crate::table::Spec;

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
    /// By parameter: the program can reuse its storage.
    pub(crate) donates: Vec<bool>,
    /// Unfinished launches.
    pub(crate) launches: u32,
    /// Unload once there are none.
    pub(crate) unload: bool,
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
        Loaded { program, parameters, outputs, donates, launches: 0, unload: false }
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
