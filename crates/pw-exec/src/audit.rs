//! A read-only question of the simulator: what is left over at the end.

use crate::core::ExecCore;

impl ExecCore {
    /// What is left once every session has been freed and detached: nothing, or this.
    pub fn leftovers(&self) -> Option<String> {
        let (backings, commands) = self.counts();
        let uploads = self.uploads.sessions.values().map(|u| u.len()).sum::<usize>();
        let queued: usize = self.devices.iter().map(|d| d.queue.len()).sum();
        if (backings, commands, uploads, queued) == (0, 0, 0, 0) && self.runs.is_empty() && self.bytes_in_use().iter().all(|&b| b == 0) {
            return None;
        }
        let (runs, bytes) = (self.runs.len(), self.bytes_in_use());
        Some(format!(
            "{backings} backings, {commands} commands, {uploads} uploads, {queued} in device queues, {runs} runs, bytes {bytes:?}"
        ))
    }
}
