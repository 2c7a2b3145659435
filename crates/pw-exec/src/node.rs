//! Commands that have arrived and are not finished, under keys that go stale when they finish.

use std::sync::Arc;

use pw_types::{GrantSeq, HostRead, RunId, SessionId};
use smallvec::SmallVec;

use crate::event::{BackingKey, Part, StartCopy, StartCopyItem, StartLaunch, StartSend, StartWrite};

/// Names a node as long as it is not finished.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct NodeKey {
    index: u32,
    generation: u32,
}

#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) run: RunId,
    pub(crate) seq: GrantSeq,
    pub(crate) session: SessionId,
    /// The shell has it.
    pub(crate) started: bool,
    /// Stands in the waiters of a backing.
    pub(crate) waits: bool,
    /// Inputs before this part are known to be usable.
    pub(crate) cursor: u32,
    pub(crate) outputs: SmallVec<[BackingKey; 2]>,
    pub(crate) work: Work,
}

#[derive(Debug)]
pub(crate) enum Work {
    Launch(Arc<StartLaunch>),
    Copy(Arc<StartCopy>),
    /// `missing` sources have not landed.
    Write {
        start: Arc<StartWrite>,
        missing: u32,
    },
    Read {
        command: HostRead,
        sources: Vec<Part>,
    },
    Send(Arc<StartSend>),
}

impl Node {
    /// The parts that this node reads.
    pub(crate) fn inputs(&self) -> impl Iterator<Item = Part> + '_ {
        let (parts, items): (&[Part], &[StartCopyItem]) = match &self.work {
            Work::Launch(start) => (&start.parts, &[]),
            Work::Copy(start) => (&[], &start.items),
            Work::Write { .. } => (&[], &[]),
            Work::Read { sources, .. } => (sources, &[]),
            Work::Send(start) => (&start.sources, &[]),
        };
        parts.iter().copied().chain(items.iter().map(|i| Part { backing: i.backing, first: i.shard, count: 1 }))
    }

    pub(crate) fn launch(&self) -> Option<&Arc<StartLaunch>> {
        match &self.work {
            Work::Launch(start) => Some(start),
            _ => None,
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Nodes {
    entries: Vec<Entry>,
    free: Vec<u32>,
    live: usize,
}

#[derive(Debug)]
struct Entry {
    generation: u32,
    node: Option<Node>,
}

impl Nodes {
    pub(crate) fn insert(&mut self, node: Node) -> NodeKey {
        self.live += 1;
        if let Some(index) = self.free.pop() {
            let entry = &mut self.entries[index as usize];
            entry.node = Some(node);
            return NodeKey { index, generation: entry.generation };
        }
        self.entries.push(Entry { generation: 0, node: Some(node) });
        NodeKey { index: u32::try_from(self.entries.len() - 1).expect("fewer than 2^32 nodes"), generation: 0 }
    }

    pub(crate) fn get(&self, key: NodeKey) -> Option<&Node> {
        self.entries.get(key.index as usize).filter(|e| e.generation == key.generation)?.node.as_ref()
    }

    pub(crate) fn get_mut(&mut self, key: NodeKey) -> Option<&mut Node> {
        self.entries.get_mut(key.index as usize).filter(|e| e.generation == key.generation)?.node.as_mut()
    }

    pub(crate) fn remove(&mut self, key: NodeKey) -> Option<Node> {
        let entry = self.entries.get_mut(key.index as usize).filter(|e| e.generation == key.generation)?;
        let node = entry.node.take()?;
        entry.generation = entry.generation.wrapping_add(1);
        self.free.push(key.index);
        self.live -= 1;
        Some(node)
    }

    pub(crate) fn len(&self) -> usize {
        self.live
    }

    /// All live nodes, in slot order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Node> {
        self.entries.iter().filter_map(|e| e.node.as_ref())
    }
}
