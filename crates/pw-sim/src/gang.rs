//! A worker's part of a launch over several workers: what its members have goes to the others, what theirs have is
//! awaited, and only then does the device time of the members here begin. They hold their devices meanwhile.

use std::collections::BTreeMap;
use std::sync::Arc;

use pw_types::*;

use crate::failure::{Check, Invariant, violation};
use crate::worker::{Job, Surroundings, Worker};

/// The arguments of one worker's members in a run, on their way to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Operands {
    pub(crate) run: RunId,
    pub(crate) from: HostSlot,
    /// By argument, by member of the sender.
    pub(crate) tokens: Vec<Vec<u64>>,
}

/// Operands that are sent to the worker at an address.
#[derive(Debug)]
pub(crate) struct Posted {
    pub(crate) to: HostSlot,
    pub(crate) address: String,
    pub(crate) operands: Operands,
}

/// Where operands of other workers come in.
#[derive(Default)]
pub(crate) struct Mail {
    /// Of programs over several workers.
    pub(crate) parts: BTreeMap<ExecutableId, Arc<GangPart>>,
    /// Where the others take operands.
    addresses: BTreeMap<HostSlot, String>,
    /// Nobody has asked for these yet.
    waiting: BTreeMap<(RunId, HostSlot), Operands>,
    abandoned: BTreeMap<RunId, Arc<Status>>,
}

impl Mail {
    pub(crate) fn neighbours(&mut self, gang: &GangPart) {
        self.addresses.extend(gang.others.iter().map(|peer| (peer.slot, peer.address.clone())));
    }

    /// Operands that nobody will take.
    pub(crate) fn left(&self) -> usize {
        self.waiting.len()
    }
}

impl Worker {
    /// All members here are there.
    pub(crate) fn exchange(&mut self, job: &mut Job, around: &mut Surroundings) -> Check {
        let run = job.start.run;
        let Some(part) = self.mail.parts.get(&job.start.executable).cloned() else {
            return violation(Invariant::A4Order, format!("worker {}: run {run} has no gang", self.slot));
        };
        if around.rng.per_mille(self.programs[job.program].fails_per_mille / 2) {
            return self.fails_by_itself(job, around);
        }
        // Nothing is sent: another life of a worker may be where one was that had a part in it.
        if let Some(status) = self.mail.abandoned.get(&run) {
            job.fails = Some(status.clone());
            return Ok(());
        }
        let own = |of: &Vec<u64>| part.here.iter().map(|m| of[m.member as usize]).collect();
        let operands = Operands { run, from: self.slot, tokens: job.tokens.iter().map(own).collect() };
        for peer in &part.others {
            let address = self.mail.addresses[&peer.slot].clone();
            around.posted.push(Posted { to: peer.slot, address, operands: operands.clone() });
            job.missing.insert(peer.slot);
        }
        for peer in &part.others {
            if let Some(operands) = self.mail.waiting.remove(&(run, peer.slot)) {
                take(job, &part, &operands);
            }
        }
        if job.missing.is_empty() { self.draw(job, around) } else { Ok(()) }
    }

    /// Operands come from another worker, maybe before the run and maybe long after it.
    pub(crate) fn operands(&mut self, operands: Operands, around: &mut Surroundings) -> Check {
        let (run, from) = (operands.run, operands.from);
        if self.mail.abandoned.contains_key(&run) {
            return Ok(());
        }
        let awaited = self.jobs.get(&run).is_some_and(|job| job.missing.contains(&from));
        if !awaited {
            return match self.mail.waiting.insert((run, from), operands) {
                None => Ok(()),
                Some(_) => violation(Invariant::Wire, format!("worker {from} sends worker {} its part of run {run} twice", self.slot)),
            };
        }
        let mut job = self.jobs.remove(&run).expect("just seen");
        let part = self.mail.parts[&job.start.executable].clone();
        take(&mut job, &part, &operands);
        if job.missing.is_empty() {
            self.draw(&mut job, around)?;
            self.release(&job, job.start.threads(), around);
        }
        self.jobs.insert(run, job);
        Ok(())
    }

    /// Who waits for operands in this run fails with this status, and those that come are dropped.
    pub(crate) fn abandon(&mut self, run: RunId, status: &Arc<Status>, around: &mut Surroundings) {
        self.mail.abandoned.entry(run).or_insert_with(|| status.clone());
        self.mail.waiting.retain(|(of, _), _| *of != run);
        self.end_wait(run, status, around);
    }

    /// The connection of another worker is gone: who waits for it waits no longer. Who comes to wait later is not told.
    pub(crate) fn broken(&mut self, from: HostSlot, around: &mut Surroundings) {
        let waiting = self.jobs.iter().filter(|(_, job)| job.missing.contains(&from)).map(|(&run, _)| run);
        for run in waiting.collect::<Vec<_>>() {
            let status = Status::new(Code::Unavailable, format!("worker {from} broke off in a collective"));
            self.end_wait(run, &status, around);
        }
    }

    fn end_wait(&mut self, run: RunId, status: &Status, around: &mut Surroundings) {
        let Some(mut job) = self.jobs.remove(&run) else { return };
        if !job.missing.is_empty() {
            job.missing.clear();
            job.fails = Some(Arc::new(status.clone()));
            self.release(&job, job.start.threads(), around);
        }
        self.jobs.insert(run, job);
    }
}

fn take(job: &mut Job, part: &GangPart, operands: &Operands) {
    job.missing.remove(&operands.from);
    let peer = part.others.iter().find(|peer| peer.slot == operands.from).expect("only members of the gang send");
    for (all, theirs) in job.tokens.iter_mut().zip(&operands.tokens) {
        peer.members.iter().zip(theirs).for_each(|(&member, &token)| all[member as usize] = token);
    }
}
