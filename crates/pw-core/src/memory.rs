//! The order-time ledger: what gang k uses for the last time is free for gang k + 1, a pure function of the grant order.

use std::collections::BTreeMap;
use std::sync::Arc;

use pw_types::{Cause, Code, HostSlot, SessionId, Status};

use crate::Core;
use crate::directory::{BackingKey, BackingState, describe_backing, human_bytes};
use crate::membership::DeviceKey;

impl Core {
    /// Bytes that may still be reserved on a device; `None` = no limit.
    pub(crate) fn free_bytes(&self, device: DeviceKey) -> Option<u64> {
        let device = &self.members.devices[device as usize];
        device.limit.map(|limit| limit.saturating_sub(device.reserved))
    }

    /// Puts a backing into the ledger.
    pub(crate) fn reserve(&mut self, key: BackingKey) {
        let backing = &mut self.directory.backings[key];
        assert!(!backing.counted, "backing {} counted twice", backing.id);
        backing.counted = true;
        for &device in backing.devices.iter() {
            self.members.devices[device as usize].reserved += backing.ledger_bytes;
        }
    }

    /// Takes a backing out of the ledger. What a lost worker held went out with the worker.
    pub(crate) fn unreserve(&mut self, key: BackingKey) {
        let backing = &mut self.directory.backings[key];
        if !std::mem::take(&mut backing.counted) {
            return;
        }
        for &device in backing.devices.iter() {
            if !self.members.still_holds(backing, device) {
                continue;
            }
            let reserved = &mut self.members.devices[device as usize].reserved;
            *reserved = reserved.checked_sub(backing.ledger_bytes).expect("the ledger never holds less than its backings");
        }
    }

    /// A worker failed to make its part: that part takes nothing.
    pub(crate) fn unreserve_part(&mut self, key: BackingKey, slot: HostSlot) {
        let Some(backing) = self.directory.backings.get_mut(key) else { return };
        for &device in backing.devices.iter() {
            if backing.counted && self.members.slot_of(device) == slot && self.members.still_holds(backing, device) {
                self.members.devices[device as usize].reserved -= backing.ledger_bytes;
            }
        }
        backing.failed.push(slot);
    }

    /// Bytes on `device` that other sessions' queued nodes will let go when they are granted.
    pub(crate) fn releasable(&self, device: DeviceKey, asking: SessionId) -> u64 {
        let held = self.directory.backings.values().filter(|b| {
            b.counted && b.handle_refs == 0 && b.queued_refs > 0 && b.owner != asking && !matches!(b.state, BackingState::Poisoned(_))
        });
        held.filter(|b| b.devices.contains(&device)).map(|b| b.ledger_bytes).sum()
    }

    /// RESOURCE_EXHAUSTED with who holds how much of the device, biggest first.
    pub(crate) fn exhausted(&self, device: DeviceKey, wanted: u64, what: &str) -> Arc<Status> {
        let state = &self.members.devices[device as usize];
        let limit = state.limit.unwrap_or(u64::MAX);
        /// Bytes and number of arrays, by what they are.
        type Kinds = BTreeMap<String, (u64, u64)>;
        let mut holders: BTreeMap<SessionId, (u64, u64, Kinds)> = BTreeMap::new();
        for backing in self.directory.backings.values().filter(|b| b.counted) {
            let shards = backing.devices.iter().filter(|&&d| d == device && self.members.still_holds(backing, d)).count() as u64;
            if shards == 0 || backing.ledger_bytes == 0 {
                continue;
            }
            let (bytes, arrays, kinds) = holders.entry(backing.owner).or_default();
            *bytes += backing.ledger_bytes * shards;
            *arrays += 1;
            let kind = kinds.entry(describe_backing(backing)).or_default();
            kind.0 += backing.ledger_bytes * shards;
            kind.1 += 1;
        }
        let mut holders: Vec<_> = holders.into_iter().collect();
        holders.sort_by_key(|(_, (bytes, _, _))| std::cmp::Reverse(*bytes));
        let mut text = format!(
            "out of memory on {}: {what} needs {}, {} of {} are free",
            state.physical,
            human_bytes(wanted),
            human_bytes(limit.saturating_sub(state.reserved)),
            human_bytes(limit)
        );
        for (session, (bytes, arrays, kinds)) in holders.iter().take(8) {
            let name = self.sessions.get(session).map_or("(ended)", |s| s.options.name.as_str());
            text.push_str(&format!("\n  {} held by '{name}' in {arrays} arrays:", human_bytes(*bytes)));
            let mut kinds: Vec<_> = kinds.iter().collect();
            kinds.sort_by_key(|(_, (bytes, _))| std::cmp::Reverse(*bytes));
            for (kind, (bytes, count)) in kinds.iter().take(5) {
                text.push_str(&format!("\n    {} in {count} × {kind}", human_bytes(*bytes)));
            }
            if kinds.len() > 5 {
                text.push_str(&format!("\n    and {} other shapes", kinds.len() - 5));
            }
        }
        if holders.len() > 8 {
            text.push_str(&format!("\n  and {} more sessions", holders.len() - 8));
        }
        Arc::new(Status::new(Code::ResourceExhausted, text).with_cause(Cause::OutOfMemory))
    }
}
