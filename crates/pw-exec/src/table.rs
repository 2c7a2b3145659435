//! The buffer table: backings, the state of their shards, who holds them, and the bytes they take.
//!
//! A backing is held by its entry in the index (until `Free`) and by every unfinished command that reads or makes it.
//! When the last hold goes, the shell drops it and the ledger gives its bytes back.

use std::sync::Arc;

use pw_types::{BufferId, Code, DType, Dims, RunId, Status};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::event::{BackingKey, ExecEffect, Part};
use crate::node::NodeKey;

/// What a shard is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Spec {
    pub(crate) dtype: DType,
    pub(crate) dims: Dims,
    pub(crate) memory_kind: String,
}

#[derive(Clone, Debug)]
pub(crate) enum ShardState {
    Pending,
    Ready {
        bytes: u64,
    },
    Poisoned(Arc<Status>),
    /// Its storage went into an output.
    Gone,
    /// It lives on another worker.
    Elsewhere,
}

/// The device of a shard that lives on another worker.
pub(crate) const ELSEWHERE: u32 = u32::MAX;

#[derive(Clone, Debug)]
pub(crate) struct Shard {
    pub(crate) device: u32,
    pub(crate) state: ShardState,
}

/// Kinds of the shards of one backing.
#[derive(Clone, Debug)]
pub(crate) enum Specs {
    Same(Arc<Spec>),
    Each(Vec<Arc<Spec>>),
}

impl Specs {
    pub(crate) fn of(&self, shard: u32) -> &Arc<Spec> {
        match self {
            Specs::Same(spec) => spec,
            Specs::Each(specs) => &specs[shard as usize],
        }
    }
}

#[derive(Debug)]
pub(crate) struct Backing {
    pub(crate) id: BufferId,
    pub(crate) specs: Specs,
    pub(crate) shards: SmallVec<[Shard; 8]>,
    /// What makes it; stale once it is made.
    pub(crate) producer: Option<NodeKey>,
    /// The launch that may take its storage. Nothing later may name it.
    pub(crate) donated_to: Option<RunId>,
    /// Unfinished transfers that read it.
    pub(crate) readers: u32,
    /// In the index.
    listed: bool,
    /// The shell has heard of it.
    exported: bool,
    holds: u32,
    /// Nodes to look at again when something changes here.
    waiters: Vec<NodeKey>,
    /// The last launch that looked here, to notice a backing that it names twice.
    stamp: u64,
}

#[derive(Debug)]
pub(crate) struct Table {
    entries: Vec<Option<Backing>>,
    free: Vec<u32>,
    index: FxHashMap<BufferId, BackingKey>,
    bytes: Vec<u64>,
    /// Waiters of what changed since they were last taken.
    woken: Vec<NodeKey>,
    stamp: u64,
}

impl Table {
    pub(crate) fn new(devices: usize) -> Table {
        Table { entries: Vec::new(), free: Vec::new(), index: FxHashMap::default(), bytes: vec![0; devices], woken: Vec::new(), stamp: 0 }
    }

    /// A new backing, listed, with a second hold for the command that makes it. Shards of device [`ELSEWHERE`] are
    /// made by another worker.
    pub(crate) fn create(&mut self, id: BufferId, specs: Specs, devices: impl Iterator<Item = u32>) -> BackingKey {
        let backing = Backing {
            id,
            specs,
            shards: devices
                .map(|device| Shard { device, state: if device == ELSEWHERE { ShardState::Elsewhere } else { ShardState::Pending } })
                .collect(),
            producer: None,
            donated_to: None,
            readers: 0,
            listed: true,
            exported: false,
            holds: 2,
            waiters: Vec::new(),
            stamp: 0,
        };
        let key = match self.free.pop() {
            Some(index) => {
                self.entries[index as usize] = Some(backing);
                BackingKey(index)
            }
            None => {
                self.entries.push(Some(backing));
                BackingKey(u32::try_from(self.entries.len() - 1).expect("fewer than 2^32 backings"))
            }
        };
        self.index.insert(id, key);
        key
    }

    pub(crate) fn find(&self, id: BufferId) -> Option<BackingKey> {
        self.index.get(&id).copied()
    }

    pub(crate) fn get(&self, key: BackingKey) -> &Backing {
        self.entries[key.0 as usize].as_ref().expect("a held backing exists")
    }

    pub(crate) fn get_mut(&mut self, key: BackingKey) -> &mut Backing {
        self.entries[key.0 as usize].as_mut().expect("a held backing exists")
    }

    pub(crate) fn hold(&mut self, key: BackingKey) {
        self.get_mut(key).holds += 1;
    }

    /// The shell gets to see this backing.
    pub(crate) fn export(&mut self, key: BackingKey) {
        self.get_mut(key).exported = true;
    }

    /// Gives up one hold.
    pub(crate) fn release(&mut self, key: BackingKey, fx: &mut Vec<ExecEffect>) {
        let backing = self.get_mut(key);
        backing.holds -= 1;
        if backing.holds > 0 {
            return;
        }
        let backing = self.entries[key.0 as usize].take().expect("just seen");
        debug_assert!(!backing.listed, "the index is a hold");
        for shard in &backing.shards {
            if let ShardState::Ready { bytes } = shard.state {
                self.bytes[shard.device as usize] -= bytes;
            }
        }
        // Nothing that waits here can be unfinished: waiting is a hold.
        self.free.push(key.0);
        if backing.exported {
            fx.push(ExecEffect::Drop { backing: key });
        }
    }

    /// `Free`: later commands do not find it. Unknown ids are old news.
    pub(crate) fn unlist(&mut self, id: BufferId, fx: &mut Vec<ExecEffect>) {
        if let Some(key) = self.index.remove(&id) {
            self.get_mut(key).listed = false;
            self.release(key, fx);
        }
    }

    /// Fills a pending shard.
    pub(crate) fn fill(&mut self, key: BackingKey, shard: u32, bytes: u64) {
        let shard = &mut self.entries[key.0 as usize].as_mut().expect("a held backing exists").shards[shard as usize];
        if matches!(shard.state, ShardState::Elsewhere) {
            return;
        }
        debug_assert!(matches!(shard.state, ShardState::Pending), "a shard is filled once");
        shard.state = ShardState::Ready { bytes };
        self.bytes[shard.device as usize] += bytes;
    }

    /// Poisons every shard that is not made yet.
    pub(crate) fn poison(&mut self, key: BackingKey, status: &Arc<Status>) {
        for shard in &mut self.get_mut(key).shards {
            if matches!(shard.state, ShardState::Pending) {
                shard.state = ShardState::Poisoned(status.clone());
            }
        }
    }

    /// The storage of these shards has been donated.
    pub(crate) fn gone(&mut self, part: Part) {
        let Table { entries, bytes, .. } = self;
        let backing = entries[part.backing.0 as usize].as_mut().expect("a held backing exists");
        for shard in &mut backing.shards[part.first as usize..(part.first + part.count) as usize] {
            if let ShardState::Ready { bytes: size } = shard.state {
                bytes[shard.device as usize] -= size;
                shard.state = ShardState::Gone;
            }
        }
    }

    pub(crate) fn wait(&mut self, key: BackingKey, node: NodeKey) {
        self.get_mut(key).waiters.push(node);
    }

    /// Something changed here: its waiters are to be looked at again.
    pub(crate) fn wake(&mut self, key: BackingKey) {
        let Table { entries, woken, .. } = self;
        woken.append(&mut entries[key.0 as usize].as_mut().expect("a held backing exists").waiters);
    }

    pub(crate) fn take_woken(&mut self) -> Vec<NodeKey> {
        std::mem::take(&mut self.woken)
    }

    /// Starts a round of [`Table::seen`].
    pub(crate) fn new_stamp(&mut self) {
        self.stamp += 1;
    }

    /// Marks the backing; true if it was marked in this round already.
    pub(crate) fn seen(&mut self, key: BackingKey) -> bool {
        let stamp = self.stamp;
        std::mem::replace(&mut self.get_mut(key).stamp, stamp) == stamp
    }

    /// Bytes in use, by device.
    pub(crate) fn bytes(&self) -> &[u64] {
        &self.bytes
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// What the shards of a part are worth: the first poison, the first that has no storage, or fine. Pending ones
    /// are for the caller to judge: `pending` says whether one was met.
    pub(crate) fn inspect(&self, part: Part) -> Result<Inspected, Arc<Status>> {
        let backing = self.get(part.backing);
        let mut result = Inspected::Ready;
        for (i, shard) in (part.first..).zip(&backing.shards[part.first as usize..(part.first + part.count) as usize]) {
            match &shard.state {
                ShardState::Ready { .. } => {}
                ShardState::Pending => result = Inspected::Pending,
                ShardState::Poisoned(status) => return Err(status.clone()),
                ShardState::Gone => {
                    let text = format!("shard {i} of buffer {} has been donated", backing.id);
                    return Err(Arc::new(Status::new(Code::FailedPrecondition, text)));
                }
                ShardState::Elsewhere => {
                    return Err(Arc::new(Status::internal(format!("shard {i} of buffer {} is on another worker", backing.id))));
                }
            }
        }
        Ok(result)
    }

    /// For the simulator: bytes counted again from the shards.
    pub(crate) fn recount(&self) -> Vec<u64> {
        let mut bytes = vec![0; self.bytes.len()];
        for shard in self.entries.iter().flatten().flat_map(|b| &b.shards) {
            if let ShardState::Ready { bytes: size } = shard.state {
                bytes[shard.device as usize] += size;
            }
        }
        bytes
    }

    /// For the simulator: all holds, and how many of them are the index's.
    pub(crate) fn holds(&self) -> (u64, u64) {
        self.entries.iter().flatten().fold((0, 0), |(all, listed), b| (all + u64::from(b.holds), listed + u64::from(b.listed)))
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Inspected {
    Ready,
    Pending,
}
