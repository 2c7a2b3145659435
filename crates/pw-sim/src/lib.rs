//! The mini-simulator: the real core and several real exec cores, joined by the real encoding, in a world of fake
//! clocks, links, devices and clients, all played from one seed.
//!
//! Owns: the simulated cluster (`world`, `worker`, `gang`, `edge`, `client`), the reference model that says what every request
//! must come to (`model`, `arrays`, `execute`), and the checkers, which are always on: order of grants and progress (A4),
//! donation and references (A7), answers and faults (A9), memory in order time, the window, and values. A client reads
//! tokens, which are hashes of how a value came about, and must read what the model says.
//!
//! Deterministic: the same [`Options`] give the same run, bit for bit. Knows no clock, socket, thread or file.
//! A failing run names its seed and the command that plays it again.

mod arrays;
mod client;
mod edge;
mod execute;
mod failure;
mod faults;
mod gang;
mod link;
mod model;
mod order;
mod plant;
mod program;
mod rng;
mod worker;
mod world;

#[cfg(test)]
mod tests;

use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use bytes::Bytes;
use pw_core::{Core, CoreConfig, Effects};
use pw_proto::control::{LogRecord, Wire};

pub use failure::{Failure, Invariant};
pub use plant::Plant;

use crate::failure::{Check, Violation, violation};
use crate::world::World;

/// Seeds that every change must pass.
pub const CI_SEEDS: u64 = 200;

/// One run. A size of 0 is chosen by the seed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    pub seed: u64,
    /// Requests of each client.
    pub steps: u32,
    pub workers: u32,
    /// Devices of each worker.
    pub devices: u32,
    pub sessions: u32,
    /// A bug to plant, to see it found.
    pub plant: Option<Plant>,
    /// Print every message.
    pub verbose: bool,
}

/// What happened in a run that kept every invariant; sums over several runs, too.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    pub seed: u64,
    pub workers: u32,
    pub devices: u32,
    pub sessions: u32,
    pub steps: u32,
    pub requests: u64,
    /// Requests that were answered with an error.
    pub errors: u64,
    pub nodes: u64,
    pub grants: u64,
    pub launches: u64,
    pub fetches: u64,
    /// Buffers sent from worker to worker.
    pub moves: u64,
    /// Operands of collectives sent from worker to worker.
    pub exchanges: u64,
    /// Runs that failed by themselves.
    pub faults: u64,
    /// Runs that found no memory.
    pub exhausted: u64,
    pub pauses: u64,
    pub killed: u64,
    pub vanished: u64,
    pub turns: u64,
    pub frames: u64,
    pub virtual_ns: u64,
    /// Of the event log and every frame.
    pub digest: u64,
}

impl Summary {
    /// Adds the counts of another run.
    pub fn add(&mut self, other: &Summary) {
        self.requests += other.requests;
        self.errors += other.errors;
        self.nodes += other.nodes;
        self.grants += other.grants;
        self.launches += other.launches;
        self.fetches += other.fetches;
        self.moves += other.moves;
        self.exchanges += other.exchanges;
        self.faults += other.faults;
        self.exhausted += other.exhausted;
        self.pauses += other.pauses;
        self.killed += other.killed;
        self.vanished += other.vanished;
        self.turns += other.turns;
        self.frames += other.frames;
        self.virtual_ns += other.virtual_ns;
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} requests ({} errors), {} nodes, {} grants, {} launches, {} fetches, {} moves, {} exchanges, {} faults, {} out of memory, {} pauses, \
             {} workers killed, {} clients vanished, {} turns, {} frames, {} ms simulated",
            self.requests,
            self.errors,
            self.nodes,
            self.grants,
            self.launches,
            self.fetches,
            self.moves,
            self.exchanges,
            self.faults,
            self.exhausted,
            self.pauses,
            self.killed,
            self.vanished,
            self.turns,
            self.frames,
            self.virtual_ns / 1_000_000
        )
    }
}

/// The core's configuration and every event that it was given, encoded as in an event log.
#[derive(Clone, Debug)]
pub struct Recording {
    pub config: CoreConfig,
    pub records: Vec<Bytes>,
}

/// Plays one seed. A failing one is played a second time, for its history.
pub fn run(options: &Options) -> Result<Summary, Box<Failure>> {
    let first = attempt(options, options.verbose);
    match first {
        Err(failure) if !options.verbose => Err(attempt(options, true).err().unwrap_or(failure)),
        result => result.map(|(summary, _)| summary),
    }
}

/// As [`run`], with what the core was given.
pub fn record(options: &Options) -> Result<(Summary, Recording), Box<Failure>> {
    attempt(options, options.verbose)
}

/// Plays seeds one after the other until one fails; `progress` hears of each.
pub fn run_seeds(seeds: Range<u64>, options: &Options, mut progress: impl FnMut(&Summary)) -> Result<Summary, Box<Failure>> {
    let mut total = Summary::default();
    for seed in seeds {
        let summary = run(&Options { seed, ..options.clone() })?;
        progress(&summary);
        total.add(&summary);
    }
    Ok(total)
}

fn attempt(options: &Options, trace: bool) -> Result<(Summary, Recording), Box<Failure>> {
    let mut world = World::new(options, trace);
    let result = catch_unwind(AssertUnwindSafe(|| world.run())).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
        violation(Invariant::Panic, text.unwrap_or_else(|| "a panic without text".to_owned()))
    });
    match result {
        Ok(summary) => Ok((summary, Recording { config: world.config.clone(), records: std::mem::take(&mut world.log) })),
        Err(Violation { invariant, text }) => {
            let history = world.history.iter().cloned().collect();
            Err(Box::new(Failure { invariant, text, history, options: options.clone() }))
        }
    }
}

/// Gives a fresh core the recorded events; its effects must be the recorded ones, bit for bit (A3).
pub fn replay(recording: &Recording) -> Result<(), String> {
    replay_checked(recording).map_err(|v| v.text)
}

fn replay_checked(recording: &Recording) -> Check {
    let mut core = Core::new(recording.config.clone());
    let mut fx = Effects::default();
    for (index, bytes) in recording.records.iter().enumerate() {
        let record = LogRecord::from_bytes(bytes.clone()).or_else(|e| violation(Invariant::Wire, e.to_string()))?;
        core.handle(record.time, record.event, &mut fx);
        if let Some(wanted) = record.effects_digest {
            let got = fx.digest();
            if got != wanted {
                return violation(Invariant::A3Replay, format!("record {index}: effects {got:x}, recorded {wanted:x}"));
            }
            fx.list.clear();
        }
    }
    Ok(())
}
