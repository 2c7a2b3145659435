//! Checks answers (A9): one per request, errors only where something that the value depends on has failed.

use std::collections::BTreeSet;

use pw_types::*;

use crate::failure::{Check, Invariant, violation};
use crate::model::{Blame, Model, State, Then, Work};

impl Model {
    /// The core answered a request.
    pub(crate) fn answered(&mut self, id: SessionId, op: OpId, result: &Result<Reply, Status>) -> Check {
        let Some(ask) = self.asks.remove(&(id, op)) else {
            return violation(Invariant::A9Answers, format!("session {id}, op {op}: answered twice or unasked, {result:?}"));
        };
        match result {
            Ok(reply) if ask.may_succeed => self.succeeded(id, ask.name, ask.then, reply),
            Ok(_) => violation(Invariant::A9Faults, format!("session {id}: {} succeeded, wanted one of {:?}", ask.name, ask.blames)),
            Err(status) => {
                let ended = self.closing.contains(&id) && status.cause == Cause::Cancelled;
                if !ended && !ask.blames.iter().any(|b| self.matches(b, status)) {
                    let text = format!("session {id}: {} failed with {status:?}, explained by none of {:?}", ask.name, ask.blames);
                    return violation(Invariant::A9Faults, text);
                }
                self.poison(id, &ask.poisons, status);
                if let Then::Status { node } = ask.then {
                    self.forget_status(id, node);
                }
                Ok(())
            }
        }
    }

    fn succeeded(&mut self, id: SessionId, name: &str, then: Then, reply: &Reply) -> Check {
        match then {
            Then::Nothing => Ok(()),
            Then::Ready(nodes) => nodes.iter().try_for_each(|&n| self.has_done_well(n, name)),
            Then::Status { node } => {
                self.forget_status(id, node);
                self.has_done_well(node, name)
            }
            Then::Fetch { buffer, plan } => {
                self.has_done_well(plan.node.unwrap_or(usize::MAX), name)?;
                self.fetches.insert((id, buffer), plan);
                Ok(())
            }
            Then::Compile { program, devices } => match reply {
                Reply::Compile(compiled) => self.named(id, compiled.executable, program, devices),
                other => violation(Invariant::A9Answers, format!("a compile is answered with {other:?}")),
            },
            Then::Execute { outputs, status_of, named } => {
                let Reply::Execute(executed) = reply else {
                    return violation(Invariant::A9Answers, format!("an execute is answered with {reply:?}"));
                };
                let wanted = if named { 0 } else { outputs.len() };
                if executed.outputs.len() != wanted || (executed.status.0 != 0) != status_of.is_some() {
                    return violation(Invariant::A9Answers, format!("{wanted} outputs and status {status_of:?} wanted, got {executed:?}"));
                }
                for (made, array) in executed.outputs.iter().zip(outputs) {
                    self.put(id, made.array, array);
                }
                if let Some((node, _)) = status_of {
                    self.sessions.get_mut(&id).expect("it was answered").statuses.insert(executed.status, node);
                }
                Ok(())
            }
            Then::Deleted(wanted) if *reply == Reply::IsArrayDeleted(wanted) => Ok(()),
            Then::Deleted(wanted) => violation(Invariant::A9Answers, format!("deleted is {wanted}, answered {reply:?}")),
        }
    }

    fn forget_status(&mut self, id: SessionId, node: usize) {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.statuses.retain(|_, n| *n != node);
        }
    }

    /// A client was told that this node is done.
    fn has_done_well(&self, index: usize, name: &str) -> Check {
        let Some(node) = self.nodes.get(index) else {
            return violation(Invariant::A9Answers, format!("{name} is answered, but nothing was done for it"));
        };
        let done = |(slot, _): &(HostSlot, Incarnation)| node.truth.get(slot).is_some_and(|r| r.is_ok());
        // What the receiver of a move has, it has.
        let makes = |(slot, _): &&(HostSlot, Incarnation)| !matches!(node.work, Work::Move { from } if from == *slot);
        if !node.hosts.is_empty() && node.hosts.iter().filter(makes).all(done) {
            return Ok(());
        }
        let text = format!("{name} is answered, but run {} is {:?} with {:?} on {:?}", node.run, node.state, node.truth, node.hosts);
        violation(Invariant::A9Faults, text)
    }

    /// Whether a request waits for this node.
    pub(crate) fn is_asked_for(&self, index: usize) -> bool {
        self.asks.values().any(|ask| match &ask.then {
            Then::Ready(nodes) => nodes.contains(&index),
            Then::Status { node } => *node == index,
            Then::Fetch { plan, .. } => plan.node == Some(index),
            _ => false,
        })
    }

    fn matches(&self, blame: &Blame, status: &Status) -> bool {
        match blame {
            Blame::Exact(wanted) => wanted == status,
            Blame::Code(code) => *code == status.code,
            Blame::Node(node) => self.explains(*node, status),
        }
    }

    /// Whether the error began at this node or at something that it depends on.
    pub(crate) fn explains(&self, node: usize, status: &Status) -> bool {
        let mut seen = BTreeSet::new();
        let mut list = vec![node];
        while let Some(index) = list.pop() {
            if seen.insert(index) {
                if self.began_at(index, status) {
                    return true;
                }
                list.extend(self.nodes[index].inputs.iter().map(|(n, _)| *n));
            }
        }
        false
    }

    fn began_at(&self, index: usize, status: &Status) -> bool {
        let node = &self.nodes[index];
        let on = |slot: HostSlot| node.devices.iter().any(|&d| self.order.slot_of(d) == slot);
        match status.cause {
            Cause::HostLost { slot, incarnation } => return on(slot) && self.order.lost.contains(&(slot, incarnation)),
            Cause::OutOfMemory => return node.own_exhausted,
            _ => {}
        }
        if node.own.contains(status) {
            return true;
        }
        if status.code == Code::Unavailable {
            // The others of a gang may notice before the core does.
            let killed = node.hosts.iter().any(|h| self.killed.contains(h));
            return killed || node.devices.iter().any(|&d| self.order.ever_lost(self.order.slot_of(d)));
        }
        match &node.work {
            Work::Upload { buffers } => buffers.iter().filter_map(|&b| self.broken.get(&(node.session, b))).any(|broken| broken == status),
            Work::Launch { bad_arguments, program, .. } => {
                let program = &self.programs[*program];
                (*bad_arguments && status.code == Code::InvalidArgument)
                    || (program.load_fails && *status == Status::internal(program.load_error()))
                    // Members on other workers have failed with it.
                    || (node.hosts.len() > 1 && node.truth.values().any(|r| r.as_ref().is_err_and(|theirs| theirs == status)))
            }
            Work::Read { bad } => *bad && status.code == Code::InvalidArgument,
            Work::Copy => false,
            // One end hears what the other has failed with.
            Work::Move { .. } => node.truth.values().any(|r| r.as_ref().is_err_and(|theirs| theirs == status)),
        }
    }

    /// A worker ended a run, before anybody else hears of it.
    pub(crate) fn truth(&mut self, slot: HostSlot, run: RunId, result: &Result<(), Status>) -> Check {
        let index = self.node(run)?;
        if let Err(status) = result {
            let ended = self.closing.contains(&self.nodes[index].session) && status.cause == Cause::Cancelled;
            if !ended && !self.explains(index, status) {
                return violation(
                    Invariant::A9Faults,
                    format!("worker {slot} failed run {run} with {status:?} and nothing it needs failed"),
                );
            }
        }
        if self.nodes[index].truth.insert(slot, result.clone()).is_some() {
            return violation(Invariant::A9Finished, format!("worker {slot} ended run {run} twice"));
        }
        Ok(())
    }

    /// The bytes of a fetch came to the edge.
    pub(crate) fn fetched(&mut self, id: SessionId, buffer: Handle, got: &Result<Vec<(Option<i64>, u64)>, Status>) -> Check {
        let Some(wanted) = self.fetches.remove(&(id, buffer)) else { return Ok(()) };
        match got {
            Ok(pieces) if *pieces == wanted.pieces => Ok(()),
            Ok(pieces) => violation(
                Invariant::Values,
                format!("session {id} reads host buffer {buffer}: {pieces:x?}, by the model it is {:x?}", wanted.pieces),
            ),
            Err(status) => violation(Invariant::A9Faults, format!("host buffer {buffer} was promised and failed: {status}")),
        }
    }

    /// Nothing is left to happen: everything must have ended.
    pub(crate) fn all_done(&self) -> Check {
        for node in &self.nodes {
            if matches!(node.state, State::Queued | State::Granted) {
                let text = format!("run {} of session {} is {:?} for ever ({:?})", node.run, node.session, node.state, node.work);
                return violation(Invariant::A4Progress, text);
            }
        }
        if let Some(((id, op), ask)) = self.asks.iter().next() {
            return violation(Invariant::A9Answers, format!("session {id}, op {op}: {} is never answered", ask.name));
        }
        for (id, session) in &self.sessions {
            if session.taken != session.consumed {
                let text = format!("session {id}: {} requests taken, credit for {} given back", session.taken, session.consumed);
                return violation(Invariant::A9Answers, text);
            }
        }
        Ok(())
    }

    /// All sessions are over: every backing was freed.
    pub(crate) fn all_freed(&self, workers: usize) -> Check {
        for slot in (0..workers as u32).map(HostSlot) {
            let host = self.order.host(slot);
            if host.alive
                && let Some(id) = host.live.keys().next()
            {
                return violation(Invariant::A7References, format!("buffer {id} was never freed on worker {slot}"));
            }
        }
        Ok(())
    }
}
