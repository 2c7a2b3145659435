//! Events about workers: hello, loss; and the opening of sessions once the workers are there.

use std::sync::Arc;

use pw_types::{Cause, Code, HostSlot, Incarnation, RunId, SessionId, Status, Time, ToEdge, WorkerInfo};

use crate::directory::{BackingKey, BackingState};
use crate::executables::ExecutableState;
use crate::graph::{self, Node, NodeState, Work};
use crate::session::Pending;
use crate::{Core, Effect, Effects};

impl Core {
    pub(crate) fn worker_hello(
        &mut self,
        connection: u64,
        incarnation: Incarnation,
        wanted: Option<HostSlot>,
        info: WorkerInfo,
        fx: &mut Effects,
    ) {
        if !self.config.build.is_empty() && info.build != self.config.build {
            let status = Status::new(
                Code::FailedPrecondition,
                format!("the worker is build {}, the controller {}; both must be the same build", info.build, self.config.build),
            );
            return fx.list.push(Effect::Refuse { connection, status });
        }
        let data_address = info.data_address.clone();
        match self.members.join(incarnation, wanted, info) {
            Err(status) => fx.list.push(Effect::Refuse { connection, status }),
            Ok(slot) => {
                self.dirty = true;
                fx.list.push(Effect::Welcome { connection, slot, incarnation });
                fx.edge(ToEdge::WorkerUp { slot, incarnation, data_address });
                self.load_again(slot, incarnation, fx);
            }
        }
    }

    /// A worker is gone: exactly what lived there is poisoned, naming it; everything else runs on.
    pub(crate) fn worker_lost(&mut self, slot: HostSlot, incarnation: Incarnation, reason: &str, fx: &mut Effects) {
        let Some(worker) = self.members.workers.get_mut(slot.0 as usize) else { return };
        if !worker.alive || worker.incarnation != incarnation {
            return;
        }
        worker.alive = false;
        worker.granted = 0;
        let name = worker.describe();
        let cause = Cause::HostLost { slot, incarnation };
        let lost = Arc::new(Status::new(Code::DataLoss, format!("{name} is lost: {reason}; what it held is gone")).with_cause(cause));
        let unavailable = Arc::new(Status::new(Code::Unavailable, format!("{name} is lost: {reason}")).with_cause(cause));
        fx.edge(ToEdge::WorkerDown { slot, incarnation });

        // What it has handed to its connections may be lost with it, even if it has reported its own end: the receiver of
        // a move, or the other members of a gang, wait for that and are told.
        let concerns = |node: &Node| match &node.work {
            Work::Move { from, .. } => *from == slot,
            Work::Launch { .. } => node.devices.iter().any(|&d| self.members.slot_of(d) == slot) && !node.lost.contains(&slot),
            _ => false,
        };
        let runs: Vec<RunId> = self
            .nodes
            .iter()
            .filter(|(_, n)| matches!(&n.state, NodeState::Granted { hosts } if hosts.contains(&(slot, incarnation)) || concerns(n)))
            .map(|(&r, _)| r)
            .collect();
        for run in graph::sorted(runs) {
            let mut node = self.nodes.remove(&run).expect("just found");
            let joint = matches!(node.work, Work::Move { .. } | Work::Launch { .. });
            if node.is_gang() {
                self.leave_windows(&node, |s| s == slot);
                node.lost.push(slot);
            }
            match (&node.work, &mut node.fault) {
                // All may have arrived. If not, this is why, also where the receiver has said so before.
                (Work::Move { from, .. }, Some(fault)) if *from == slot => *fault = lost.clone(),
                (Work::Move { from, .. }, None) if *from == slot => node.reason = Some(lost.clone()),
                // The others may have noticed first.
                (Work::Launch { .. }, Some(fault)) if fault.code == Code::Unavailable => *fault = lost.clone(),
                (_, fault) => drop(fault.get_or_insert_with(|| lost.clone())),
            }
            let NodeState::Granted { hosts } = &mut node.state else { unreachable!("just seen") };
            hosts.retain(|h| *h != (slot, incarnation));
            let left = hosts.clone();
            self.nodes.insert(run, node);
            if left.is_empty() {
                self.finish(run, None, fx);
            } else if joint {
                self.cancel_at(&left, run, &lost, fx);
            }
        }
        let keys: Vec<BackingKey> =
            self.directory.backings.iter().filter(|(_, b)| b.hosts.contains(&(slot, incarnation))).map(|(k, _)| k).collect();
        for key in keys {
            // Promised ones, too: other workers may still be at their parts, but this one's will not come, and a new
            // life of it must not be asked for them.
            let backing = &mut self.directory.backings[key];
            if !matches!(backing.state, BackingState::Poisoned(_)) {
                backing.state = BackingState::Poisoned(lost.clone());
            }
            if !backing.hosts.iter().any(|&(s, i)| self.members.worker(s).is_some_and(|w| w.alive && w.incarnation == i)) {
                self.unreserve(key);
            }
        }
        for &device in &self.members.workers[slot.0 as usize].devices {
            self.members.devices[device as usize].reserved = 0;
        }
        for id in self.executables.on_host(slot) {
            let entry = self.executables.get_mut(id).expect("just listed");
            let gone = match (&entry.state, &entry.report) {
                (ExecutableState::Failed(status), _) => ExecutableState::Failed(status.clone()),
                (_, Some(_)) => ExecutableState::Lost(unavailable.clone()),
                (_, None) => ExecutableState::Failed(unavailable.clone()),
            };
            let may_return = matches!(gone, ExecutableState::Lost(_));
            let waiting = match std::mem::replace(&mut entry.state, gone) {
                ExecutableState::Compiling(waiting) => waiting,
                _ => Default::default(),
            };
            let unused = entry.refs == 0;
            let homes = entry.homes.clone();
            if !may_return {
                self.executables.forget_key(id);
            }
            for (at, _) in waiting {
                self.answer(at, Err((*unavailable).clone()), fx);
            }
            if unused {
                self.executables.forget(id);
                self.unload(id, &homes, fx);
            }
        }
        self.questions_lost(slot, &unavailable, fx);
        let mut unanswered: Vec<u64> =
            self.layout_queries.iter().filter(|(_, (_, asked))| *asked == slot).map(|(&query, _)| query).collect();
        unanswered.sort_unstable();
        for query in unanswered {
            if let Some((key, home)) = self.layout_queries.remove(&query) {
                self.ask_layout(key, home, fx);
            }
        }
        self.dirty = true;
    }

    /// Opens the sessions that wait, once the expected workers are there, or refuses them when their time is up.
    pub(crate) fn open_sessions(&mut self, fx: &mut Effects) {
        let waiting: Vec<(SessionId, Time)> =
            self.sessions.iter().filter_map(|(&id, s)| s.opening_until.map(|until| (id, until))).collect();
        let expected = self.config.expect_workers.max(1) as usize;
        for (id, until) in waiting {
            if self.members.alive() >= expected {
                let options = self.sessions[&id].options.clone();
                match self.members.allot(&options) {
                    Err(status) => self.refuse_session(id, status, fx),
                    Ok(keys) => {
                        let view = self.members.view(id, &keys);
                        let floor = self.sessions.values().filter(|s| s.is_busy()).map(|s| s.settled_ns()).min();
                        let session = self.sessions.get_mut(&id).expect("just listed");
                        session.devices = keys.into();
                        session.opening_until = None;
                        session.virtual_ns = floor.unwrap_or(0);
                        fx.edge(ToEdge::SessionReady(view));
                    }
                }
            } else if self.now >= until {
                let dead: Vec<String> = self.members.workers.iter().filter(|w| !w.alive && !w.is_vacant()).map(|w| w.describe()).collect();
                let mut text = format!(
                    "{} of {expected} workers are registered after waiting {} s",
                    self.members.alive(),
                    self.config.session_wait_ns / 1_000_000_000
                );
                if !dead.is_empty() {
                    text.push_str(&format!("; lost: {}", dead.join(", ")));
                }
                text.push_str("; start the missing ones with `pathways worker --controller HOST:PORT`");
                self.refuse_session(id, Status::new(Code::Unavailable, text), fx);
            }
        }
    }

    fn refuse_session(&mut self, session: SessionId, status: Status, fx: &mut Effects) {
        self.sessions.remove(&session);
        fx.edge(ToEdge::SessionRefused { session, status });
    }

    /// The life of the worker in `slot`, if it is there.
    pub(crate) fn alive_worker(&self, slot: HostSlot) -> Result<Incarnation, Status> {
        match self.members.worker(slot) {
            Some(worker) if worker.alive => Ok(worker.incarnation),
            Some(worker) => Err(Status::new(Code::Unavailable, format!("{} is lost", worker.describe()))),
            None => Err(Status::internal(format!("no worker ever had slot {slot}"))),
        }
    }

    /// A host buffer that will not come: fails the upload that waits for it.
    pub(crate) fn host_buffer_failed(&mut self, session: SessionId, buffer: pw_types::Handle, status: Status, fx: &mut Effects) {
        let Some(state) = self.sessions.get_mut(&session) else { return };
        let Some(run) = state.uploads.remove(&buffer) else { return };
        let fault = Arc::new(status);
        let node = self.nodes.get_mut(&run).expect("uploads name nodes that go on");
        match &node.state {
            NodeState::Queued => {
                state.queued.retain(|&r| r != run);
                self.drop_queued_node(run, &fault, fx);
            }
            NodeState::Granted { hosts } => {
                let hosts = hosts.clone();
                node.fault.get_or_insert(fault.clone());
                self.cancel_at(&hosts, run, &fault, fx);
            }
        }
    }

    pub(crate) fn default_device_assignment(&mut self, at: Pending, replicas: u32, partitions: u32, fx: &mut Effects) {
        let have = self.sessions[&at.session].devices.len() as u64;
        let wanted = u64::from(replicas) * u64::from(partitions);
        let result = if wanted == 0 || wanted > have {
            Err(Status::invalid(format!("{replicas} replicas × {partitions} partitions need {wanted} devices; this session has {have}")))
        } else {
            let devices = (0..wanted as u32).map(pw_types::VirtualDeviceId).collect();
            Ok(pw_types::Reply::DefaultDeviceAssignment { replicas, partitions, devices })
        };
        self.answer(at, result, fx)
    }
}
