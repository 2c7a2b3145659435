//! Read-only questions of the simulator: the books counted again, and what is left over at the end.

use std::collections::BTreeMap;

use pw_types::{RunId, SessionId};
use slotmap::SecondaryMap;

use crate::Core;
use crate::directory::{BackingKey, BackingState, Entry};
use crate::graph::NodeState;

impl Core {
    /// Nodes made so far; their run ids are `1 ..=` this number.
    pub fn nodes_made(&self) -> u64 {
        self.next_run
    }

    /// Whether the node is in the graph: queued, or granted and not finished.
    pub fn knows_run(&self, run: RunId) -> bool {
        self.nodes.contains_key(&run)
    }

    /// Counts references, ledger, windows and queues again (invariants A4, A7).
    pub fn audit(&self) -> Result<(), String> {
        self.audit_references()?;
        let devices = self.members.devices.len();
        let (mut reserved, mut gangs) = (vec![0u64; devices], vec![0u32; devices]);
        for backing in self.directory.backings.values().filter(|b| b.counted) {
            let held = backing.devices.iter().filter(|&&d| self.members.still_holds(backing, d));
            held.for_each(|&d| reserved[d as usize] += backing.ledger_bytes);
        }
        let mut running: BTreeMap<SessionId, u32> = BTreeMap::new();
        self.nodes.values().filter(|n| matches!(n.state, NodeState::Granted { .. })).for_each(|node| {
            *running.entry(node.session).or_default() += 1;
            if node.is_gang() {
                let there = node.devices.iter().filter(|&&d| !node.lost.contains(&self.members.slot_of(d)));
                there.for_each(|&d| gangs[d as usize] += 1);
            }
        });
        for (device, state) in self.members.devices.iter().enumerate() {
            if state.reserved != reserved[device] {
                return Err(format!("device {device}: {} bytes reserved, {} by backings", state.reserved, reserved[device]));
            }
            if state.window_gangs != gangs[device] {
                return Err(format!("device {device}: {} gangs in the window, {} in the graph", state.window_gangs, gangs[device]));
            }
        }
        for (id, session) in &self.sessions {
            let counted = running.get(id).copied().unwrap_or(0);
            if session.running != counted {
                return Err(format!("session {id}: {} nodes running, {counted} in the graph", session.running));
            }
            for run in &session.queued {
                if !self.nodes.get(run).is_some_and(|n| matches!(n.state, NodeState::Queued)) {
                    return Err(format!("session {id}: run {run} is in the queue but not a queued node"));
                }
            }
        }
        Ok(())
    }

    fn audit_references(&self) -> Result<(), String> {
        let mut refs: SecondaryMap<BackingKey, (u32, u32)> = SecondaryMap::new();
        let mut stray = 0;
        let mut count = |key: BackingKey, handles: u32, queued: u32| {
            if !self.directory.backings.contains_key(key) {
                stray += 1;
            } else if let Some(entry) = refs.entry(key) {
                let entry = entry.or_default();
                *entry = (entry.0 + handles, entry.1 + queued);
            }
        };
        self.sessions.values().flat_map(|s| s.arrays.values()).for_each(|entry| {
            if let Entry::Array(array) = entry {
                array.pieces.iter().for_each(|p| count(p.backing, 1, 0));
            }
        });
        self.nodes.values().for_each(|node| node.inputs.iter().for_each(|&key| count(key, 0, 1)));
        if stray > 0 {
            return Err(format!("{stray} references to backings that do not exist"));
        }
        for (key, backing) in &self.directory.backings {
            let (handles, queued) = refs.get(key).copied().unwrap_or_default();
            let id = backing.id;
            if (backing.handle_refs, backing.queued_refs) != (handles, queued) {
                return Err(format!(
                    "backing {id}: {} handle and {} queued references, counted {handles} and {queued}",
                    backing.handle_refs, backing.queued_refs
                ));
            }
            if handles == 0 && queued == 0 && backing.granted {
                return Err(format!("backing {id} is granted and has no reference"));
            }
            if matches!(backing.state, BackingState::Promised) && !self.nodes.contains_key(&id.run) {
                return Err(format!("backing {id} is promised by a node that is gone"));
            }
        }
        Ok(())
    }

    /// What is left once every session has ended and every worker is silent: nothing, or this.
    pub fn leftovers(&self) -> Option<String> {
        let reserved: Vec<u64> = self.members.devices.iter().map(|d| d.reserved).collect();
        let counts = (self.sessions.len(), self.nodes.len(), self.directory.backings.len(), self.waiters.len());
        if counts == (0, 0, 0, 0) && reserved.iter().all(|&bytes| bytes == 0) {
            return None;
        }
        let (sessions, nodes, backings, waiters) = counts;
        Some(format!("{sessions} sessions, {nodes} nodes, {backings} backings, {waiters} waiters, reserved {reserved:?}"))
    }
}
