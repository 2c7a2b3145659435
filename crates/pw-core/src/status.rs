//! The snapshot behind `pathways status`.

use std::collections::BTreeMap;

use pw_types::{SessionId, SessionStatus, StatusReport, WorkerStatus};

use crate::Core;

impl Core {
    pub(crate) fn status_report(&self) -> StatusReport {
        let mut held: BTreeMap<SessionId, (u64, u32)> = BTreeMap::new();
        for backing in self.directory.backings.values() {
            let (bytes, arrays) = held.entry(backing.owner).or_default();
            *arrays += 1;
            if backing.counted {
                *bytes += backing.ledger_bytes * backing.devices.len() as u64;
            }
        }
        let workers = self.members.workers.iter().filter(|w| !w.is_vacant()).map(|w| WorkerStatus {
            slot: w.slot,
            incarnation: w.incarnation,
            info: w.info.clone(),
            alive: w.alive,
            bytes_reserved: w.devices.iter().map(|&d| self.members.devices[d as usize].reserved).collect(),
            bytes_in_use: w.bytes_in_use.clone(),
            granted: w.granted,
            traffic: w.traffic,
        });
        let sessions = self.sessions.iter().map(|(&id, s)| {
            let (held_bytes, arrays) = held.get(&id).copied().unwrap_or_default();
            SessionStatus {
                session: id,
                name: s.options.name.clone(),
                weight: s.options.weight,
                devices: s.devices.len() as u32,
                queued: s.queued.len() as u32,
                running: s.running,
                held_bytes,
                arrays,
                device_ns: s.device_ns,
            }
        });
        StatusReport { workers: workers.collect(), sessions: sessions.collect(), executables: self.executables.len() as u32 }
    }
}
