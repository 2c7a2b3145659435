//! The end of a node: its outputs become ready or poisoned, and who waits is answered, exactly once (invariant A9).

use std::sync::Arc;

use pw_types::{Command, Handle, HostSlot, Incarnation, Reply, Report, RunId, Status, Time};

use crate::directory::{BackingState, Entry};
use crate::graph::{Node, NodeState, Waiter, Work};
use crate::session::{Pending, StatusHandle};
use crate::{Core, Effect, Effects, LayoutAnswer};
use smallvec::SmallVec;

/// What a worker has sent before it ended its part of a run may be on its way for so long: as long as a broken connection
/// may take to come back.
const ON_THE_WAY_NS: u64 = 10_000_000_000;

impl Core {
    /// What a worker says. A report about something forgotten is recognised by its id and ignored.
    pub(crate) fn report(&mut self, slot: HostSlot, incarnation: Incarnation, report: Report, fx: &mut Effects) {
        if !self.members.worker(slot).is_some_and(|w| w.alive && w.incarnation == incarnation) {
            return;
        }
        match report {
            Report::Finished { run, device_ns, result } => self.run_finished(slot, incarnation, run, device_ns, result, fx),
            Report::Compiled { executable, result } => self.compiled(slot, executable, result, fx),
            Report::Loaded { executable, result } => self.loaded(slot, executable, result, fx),
            Report::DefaultLayout { query, result } => {
                let Some((key, _)) = self.layout_queries.remove(&query) else { return };
                let answer = match &result {
                    Ok(layout) => self.layouts.insert(key, LayoutAnswer::Known(layout.clone())),
                    Err(_) => self.layouts.remove(&key),
                };
                if let Some(LayoutAnswer::Asked(waiting)) = answer {
                    for at in waiting {
                        self.answer(at, result.clone().map(Reply::DefaultLayout), fx);
                    }
                }
            }
            Report::Described { query, result } => self.described(query, result, fx),
            Report::Late { run, on } => self.late(slot, run, on, fx),
            Report::Traffic(traffic) => self.members.workers[slot.0 as usize].traffic = traffic,
            Report::Memory { bytes_in_use } => {
                let worker = &mut self.members.workers[slot.0 as usize];
                if bytes_in_use.len() == worker.devices.len() {
                    worker.bytes_in_use = bytes_in_use;
                }
            }
        }
    }

    fn run_finished(
        &mut self,
        slot: HostSlot,
        incarnation: Incarnation,
        run: RunId,
        device_ns: u64,
        result: Result<(), Status>,
        fx: &mut Effects,
    ) {
        let Some(node) = self.nodes.get_mut(&run) else { return };
        let NodeState::Granted { hosts } = &mut node.state else { return };
        let before = hosts.len();
        hosts.retain(|h| *h != (slot, incarnation));
        if hosts.len() == before {
            return;
        }
        let last = hosts.is_empty();
        if !last {
            node.ended.push((slot, self.now));
        }
        node.device_ns = node.device_ns.max(device_ns);
        let device_ns = node.device_ns;
        // The other end of a move, or the other members of a gang, would wait for ever.
        let other_end = match &node.work {
            Work::Move { .. } | Work::Launch { .. } if result.is_err() => hosts.clone(),
            _ => SmallVec::new(),
        };
        if let Err(status) = result {
            let reason = node.reason.take();
            let fault = node.fault.get_or_insert_with(|| reason.unwrap_or_else(|| Arc::new(status))).clone();
            for key in node.outputs.clone() {
                self.unreserve_part(key, slot);
            }
            self.cancel_at(&other_end, run, &fault, fx);
        }
        self.members.workers[slot.0 as usize].granted -= 1;
        if last {
            self.finish(run, Some(device_ns), fx);
        }
    }

    /// A member of a gang waits long for another worker. Where that one has ended its part of the run some time ago, and
    /// so has sent all that it ever will, it will not come.
    fn late(&mut self, slot: HostSlot, run: RunId, on: HostSlot, fx: &mut Effects) {
        let Some(node) = self.nodes.get(&run) else { return };
        let NodeState::Granted { hosts } = &node.state else { return };
        let waits = hosts.iter().any(|(s, _)| *s == slot);
        let long_ago = |&(ended, at): &(HostSlot, Time)| ended == on && self.now.0.saturating_sub(at.0) >= ON_THE_WAY_NS;
        if !waits || node.fault.is_some() || !node.ended.iter().any(long_ago) {
            return;
        }
        let (hosts, name) = (hosts.clone(), self.label(run));
        let text = format!(
            "the devices of {name} do not meet in a collective: worker {slot} waits there, but worker {on} has ended its part without \
             it; all devices must come to the same collectives, also those inside a `cond` or a `while_loop`"
        );
        let status = Arc::new(Status::internal(text));
        self.nodes.get_mut(&run).expect("just seen").fault = Some(status.clone());
        self.cancel_at(&hosts, run, &status, fx);
    }

    /// Tells these workers to skip the run, or to give it up, and why.
    pub(crate) fn cancel_at(&self, hosts: &[(HostSlot, Incarnation)], run: RunId, why: &Status, fx: &mut Effects) {
        for &(slot, incarnation) in hosts {
            let command = Command::Cancel { runs: vec![run], status: why.clone() };
            fx.list.push(Effect::Send { slot, incarnation, command });
        }
    }

    /// Ends a granted node. `device_ns` = measured device time, if it ran.
    pub(crate) fn finish(&mut self, run: RunId, device_ns: Option<u64>, fx: &mut Effects) {
        let mut node = self.nodes.remove(&run).expect("the caller has it");
        self.dirty = true;
        if let Some(session) = self.sessions.get_mut(&node.session) {
            session.running -= 1;
        }
        if let Work::Launch { executable, .. } = node.work {
            self.leave_windows(&node, |slot| !node.lost.contains(&slot));
            let measured = device_ns.filter(|_| node.fault.is_none());
            if let Some(session) = self.sessions.get_mut(&node.session) {
                let actual = measured.unwrap_or(0);
                session.device_ns += actual;
                let weight = session.weight();
                let estimated = node.cost_ns * 1024 / weight;
                session.virtual_ns = (session.virtual_ns + actual * 1024 / weight).saturating_sub(estimated);
                session.unsettled_ns = session.unsettled_ns.saturating_sub(estimated);
            }
            if let (Some(ns), Some(entry)) = (measured, self.executables.get_mut(executable)) {
                entry.measure(ns);
            }
            self.release_executable(executable, fx);
        }
        if let Work::HostWrite { buffers, .. } = &node.work
            && let Some(session) = self.sessions.get_mut(&node.session)
        {
            for (buffer, _) in buffers {
                session.uploads.remove(buffer);
            }
        }
        let result = match node.fault.take() {
            None => Ok(()),
            Some(fault) => Err(fault),
        };
        self.settle(&mut node, result, fx);
    }

    /// A gang is no longer under way on the workers that are `meant`.
    pub(crate) fn leave_windows(&mut self, node: &Node, meant: impl Fn(HostSlot) -> bool) {
        for &device in node.devices.iter() {
            if meant(self.members.slot_of(device)) {
                let state = &mut self.members.devices[device as usize];
                state.window_ns -= node.cost_ns;
                state.window_gangs -= 1;
            }
        }
    }

    /// Decides the outputs of a node that is out of the graph, and answers its waiters.
    pub(crate) fn settle(&mut self, node: &mut Node, result: Result<(), Arc<Status>>, fx: &mut Effects) {
        for &key in &node.outputs {
            let Some(backing) = self.directory.backings.get_mut(key) else { continue };
            if matches!(backing.state, BackingState::Promised) {
                backing.state = match &result {
                    Ok(()) => BackingState::Ready,
                    Err(fault) => BackingState::Poisoned(fault.clone()),
                };
            }
            backing.granted = true;
            // A failed part says nothing about the parts on other workers: those are held until they are freed.
            if result.is_err() && backing.hosts.len() <= 1 {
                self.unreserve(key);
            }
            self.free_if_unused(key, fx);
        }
        for &key in &node.waiters {
            match &result {
                Ok(()) => {
                    let Some(waiter) = self.waiters.get_mut(key) else { continue };
                    waiter.remaining -= 1;
                    if waiter.remaining == 0 {
                        let at = self.waiters.remove(key).expect("just looked up").request;
                        self.answer(at, Ok(Reply::CheckValueReady), fx);
                    }
                }
                Err(fault) => {
                    if let Some(waiter) = self.waiters.remove(key) {
                        self.answer(waiter.request, Err((**fault).clone()), fx);
                    }
                }
            }
        }
        if let Some(op) = node.answers {
            let at = Pending { session: node.session, op };
            self.answer(at, result.clone().map(|()| Reply::CopyToHost).map_err(|fault| (*fault).clone()), fx);
        }
        if let Some(handle) = node.status
            && let Some(session) = self.sessions.get_mut(&node.session)
            && let Some(state) = session.statuses.get_mut(&handle)
        {
            let before = std::mem::replace(state, StatusHandle::Done(result.clone()));
            if let StatusHandle::Asked(op, reply) = before {
                session.statuses.remove(&handle);
                let at = Pending { session: node.session, op };
                self.answer(at, result.map(|()| reply).map_err(|fault| (*fault).clone()), fx);
            }
        }
    }

    /// Answers when all values are computed, or with the first fault.
    pub(crate) fn check_value_ready(&mut self, at: Pending, values: &[Handle], fx: &mut Effects) {
        let session = &self.sessions[&at.session];
        let mut runs: Vec<RunId> = Vec::new();
        for handle in values {
            let array = match session.arrays.get(handle) {
                Some(Entry::Array(array)) => array,
                Some(Entry::Poisoned(fault)) => return self.answer(at, Err((**fault).clone()), fx),
                Some(Entry::Deleted) => return self.answer(at, Err(Status::invalid(format!("array {handle} has been deleted"))), fx),
                None => return self.answer(at, Err(Status::not_found(format!("array handle {handle} does not exist"))), fx),
            };
            for piece in &array.pieces {
                let backing = self.directory.get(piece.backing);
                match &backing.state {
                    BackingState::Ready => {}
                    BackingState::Poisoned(fault) => return self.answer(at, Err((**fault).clone()), fx),
                    BackingState::Promised => runs.push(backing.id.run),
                }
            }
        }
        runs.sort_unstable();
        runs.dedup();
        if runs.is_empty() {
            return self.answer(at, Ok(Reply::CheckValueReady), fx);
        }
        let key = self.waiters.insert(Waiter { request: at, remaining: runs.len() as u32 });
        for run in runs {
            self.nodes.get_mut(&run).expect("a promised backing has a node").waiters.push(key);
        }
    }

    /// Destructive read of an execution's status; answers with `reply` when it has finished.
    pub(crate) fn await_status(&mut self, at: Pending, handle: Handle, reply: Reply, fx: &mut Effects) {
        let session = self.sessions.get_mut(&at.session).expect("the request's session");
        match session.statuses.get_mut(&handle) {
            None => self.answer(at, Err(Status::not_found(format!("status handle {handle} does not exist"))), fx),
            Some(StatusHandle::Asked(..)) => {
                self.answer(at, Err(Status::invalid(format!("status handle {handle} is already being waited for"))), fx)
            }
            Some(state @ StatusHandle::Pending) => *state = StatusHandle::Asked(at.op, reply),
            Some(StatusHandle::Done(result)) => {
                let result = result.clone();
                session.statuses.remove(&handle);
                self.answer(at, result.map(|()| reply).map_err(|fault| (*fault).clone()), fx)
            }
        }
    }
}
