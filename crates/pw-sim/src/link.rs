//! Time and delivery: events in the order of their time, and links that delay but never reorder.

use std::collections::BTreeMap;

use crate::rng::Rng;

/// What will happen, by time; what is due at the same time happens in the order in which it was said.
pub(crate) struct Agenda<T> {
    pub(crate) now: u64,
    entries: BTreeMap<(u64, u64), T>,
    next: u64,
}

impl<T> Agenda<T> {
    pub(crate) fn new() -> Agenda<T> {
        Agenda { now: 0, entries: BTreeMap::new(), next: 0 }
    }

    pub(crate) fn after(&mut self, delay: u64, what: T) {
        self.at(self.now + delay, what);
    }

    pub(crate) fn at(&mut self, time: u64, what: T) {
        self.next += 1;
        self.entries.insert((time.max(self.now), self.next), what);
    }

    /// The next thing; the clock jumps to it.
    pub(crate) fn pop(&mut self) -> Option<T> {
        let ((time, _), what) = self.entries.pop_first()?;
        self.now = time;
        Some(what)
    }
}

/// One direction of a connection.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Link {
    free_at: u64,
}

impl Link {
    /// When something sent now arrives: after everything that was sent before.
    pub(crate) fn arrival(&mut self, now: u64, rng: &mut Rng) -> u64 {
        let delay = match rng.below(100) {
            0..=1 => rng.between(1_000_000, 8_000_000),
            2..=19 => rng.between(50_000, 500_000),
            _ => rng.between(1_000, 60_000),
        };
        self.free_at = self.free_at.max(now + delay) + 1;
        self.free_at
    }
}
