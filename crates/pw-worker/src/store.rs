//! The real buffers behind the core's backings.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use pw_exec::BackingKey;
use pw_pjrt::Buffer;
use pw_types::Status;

/// One shard: filled once, with a buffer or with why there is none.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    value: OnceLock<Result<Buffer, Arc<Status>>>,
    /// Downloads that read the storage in place; it must not be donated meanwhile.
    views: AtomicU32,
}

/// The shards of one backing. Whoever works with it holds it, so the store may forget it at any time.
#[derive(Debug)]
pub(crate) struct Stored {
    slots: Box<[Slot]>,
    bytes: AtomicU64,
}

impl Stored {
    pub(crate) fn new(shards: usize) -> Arc<Stored> {
        Arc::new(Stored { slots: (0..shards).map(|_| Slot::default()).collect(), bytes: AtomicU64::new(0) })
    }

    pub(crate) fn fill(&self, shard: usize, buffer: Buffer, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let first = self.slots[shard].value.set(Ok(buffer));
        debug_assert!(first.is_ok(), "a slot is filled once");
    }

    pub(crate) fn poison(&self, status: &Arc<Status>) {
        (0..self.slots.len()).for_each(|shard| self.poison_shard(shard, status));
    }

    /// What has been filled stays.
    pub(crate) fn poison_shard(&self, shard: usize, status: &Arc<Status>) {
        let _ = self.slots[shard].value.set(Err(status.clone()));
    }

    /// The buffer of a shard that the order says is filled by now.
    pub(crate) fn get(&self, shard: u32) -> Result<&Buffer, Arc<Status>> {
        match self.slots.get(shard as usize).and_then(|slot| slot.value.get()) {
            Some(Ok(buffer)) => Ok(buffer),
            Some(Err(status)) => Err(status.clone()),
            None => Err(Arc::new(Status::internal(format!("shard {shard} is used before it is made")))),
        }
    }

    /// Bytes of what has been filled.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn is_viewed(&self, shard: u32) -> bool {
        self.slots[shard as usize].views.load(Ordering::Acquire) > 0
    }

    pub(crate) fn view(self: &Arc<Stored>, shard: u32) -> ViewGuard {
        self.slots[shard as usize].views.fetch_add(1, Ordering::AcqRel);
        ViewGuard { stored: self.clone(), shard }
    }
}

/// While it lives the shard is not donated.
#[derive(Debug)]
pub(crate) struct ViewGuard {
    stored: Arc<Stored>,
    shard: u32,
}

impl Drop for ViewGuard {
    fn drop(&mut self) {
        self.stored.slots[self.shard as usize].views.fetch_sub(1, Ordering::AcqRel);
    }
}

/// By key. Only `Exec` touches it.
#[derive(Debug, Default)]
pub(crate) struct Store {
    entries: Vec<Option<Arc<Stored>>>,
}

impl Store {
    pub(crate) fn create(&mut self, key: BackingKey, shards: usize) -> Arc<Stored> {
        let index = key.0 as usize;
        if self.entries.len() <= index {
            self.entries.resize(index + 1, None);
        }
        let stored = Stored::new(shards);
        self.entries[index] = Some(stored.clone());
        stored
    }

    pub(crate) fn get(&self, key: BackingKey) -> Arc<Stored> {
        self.entries.get(key.0 as usize).and_then(Option::as_ref).expect("the core names backings that it has created").clone()
    }

    pub(crate) fn remove(&mut self, key: BackingKey) -> Option<Arc<Stored>> {
        self.entries.get_mut(key.0 as usize)?.take()
    }
}
