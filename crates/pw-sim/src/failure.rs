//! What can go wrong in a run, and how it is told.

use std::fmt;

use crate::Options;

/// What a checker watches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Invariant {
    /// A4: one order of grants, unbroken chains, consumers after producers, devices serve it.
    A4Order,
    /// A4: when nothing is left to happen, nothing is unfinished.
    A4Progress,
    /// A7: no donation of what has another owner, no use after it.
    A7Donation,
    /// A7: a backing is freed once, behind its last use; nothing is left over.
    A7References,
    /// A9: every request is answered exactly once.
    A9Answers,
    /// A9: every run finishes exactly once on every host.
    A9Finished,
    /// A9: a fault reaches what depends on it and nothing else.
    A9Faults,
    /// A client reads what the reference model says.
    Values,
    /// Order-time memory stays below the limit.
    Memory,
    /// No more is granted ahead than the window.
    Window,
    /// The books of a core, counted again.
    Audit,
    /// Bytes, sequence numbers, incarnations.
    Wire,
    /// Same log, same effects.
    A3Replay,
    /// An assertion of a core.
    Panic,
}

/// A checker's finding.
#[derive(Debug)]
pub(crate) struct Violation {
    pub(crate) invariant: Invariant,
    pub(crate) text: String,
}

pub(crate) type Check<T = ()> = Result<T, Violation>;

pub(crate) fn violation<T>(invariant: Invariant, text: impl Into<String>) -> Check<T> {
    Err(Violation { invariant, text: text.into() })
}

/// A run that broke an invariant.
#[derive(Debug)]
pub struct Failure {
    pub invariant: Invariant,
    pub text: String,
    /// The last messages before it.
    pub history: Vec<String>,
    pub options: Options,
}

impl Failure {
    /// The command that plays this run again.
    pub fn command(&self) -> String {
        let Options { seed, steps, workers, devices, sessions, .. } = self.options;
        let mut text = format!("pathways sim --seed {seed}");
        for (name, value) in [("steps", steps), ("workers", workers), ("devices", devices), ("sessions", sessions)] {
            if value != 0 {
                text.push_str(&format!(" --{name} {value}"));
            }
        }
        text
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "the last messages:")?;
        self.history.iter().try_for_each(|line| writeln!(f, "  {line}"))?;
        if let Some(plant) = self.options.plant {
            writeln!(f, "planted bug: {plant:?}")?;
        }
        writeln!(f, "broken invariant {:?}: {}", self.invariant, self.text)?;
        write!(f, "play it again: {}", self.command())
    }
}

impl std::error::Error for Failure {}
