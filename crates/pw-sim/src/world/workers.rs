//! Workers of the simulated cluster: they come and go, and frames reach them and leave them.

use bytes::Bytes;
use pw_exec::ExecEvent;
use pw_proto::control::{ControllerFrame, Wire, WorkerFrame};
use pw_types::*;

use super::{Action, Data, World};
use crate::failure::{Check, Invariant, violation};
use crate::gang::Posted;
use crate::link::Link;
use crate::plant::Plant;
use crate::worker::{Moved, Surroundings, Worker};

impl World {
    pub(super) fn join(&mut self, slot: usize) {
        self.next_incarnation += 1;
        let incarnation = Incarnation(self.next_incarnation);
        let host = HostSlot(slot as u32);
        let mut worker = Worker::new(host, incarnation, self.devices, self.ahead_max, self.programs.clone());
        worker.eager = self.options.plant == Some(Plant::EagerThread);
        // It finds the cache of its earlier life, or is another machine.
        if self.rng.per_mille(600) {
            worker.compiled.clone_from(&self.caches[slot]);
        }
        self.workers[slot] = Some(worker);
        let wide = self.options.plant == Some(Plant::WideMemory);
        let device = WorkerDevice {
            kind: "fake".to_owned(),
            debug_string: "fake".to_owned(),
            memory_kinds: vec!["device".to_owned(), "pinned_host".to_owned()],
            default_memory_kind: "device".to_owned(),
            memory_bytes: self.memory.map(|bytes| if wide { bytes * 2 } else { bytes }),
        };
        let info = WorkerInfo {
            host: format!("host{slot}"),
            pid: 100 + slot as u32,
            build: String::new(),
            platform_name: "fake".to_owned(),
            platform_version: "1".to_owned(),
            data_address: data_address(slot as u32, incarnation),
            gang_address: gang_address(slot as u32, incarnation),
            island: 0,
            devices: vec![device; self.devices],
            test_targets: Vec::new(),
        };
        let hello = Event::WorkerHello { connection: self.next_incarnation, incarnation, wanted_slot: Some(host), info };
        self.post(hello);
    }

    pub(super) fn kill(&mut self, slot: HostSlot) {
        let Some(worker) = self.workers[slot.0 as usize].take() else { return };
        self.caches[slot.0 as usize].clone_from(&worker.compiled);
        self.say(|| format!("worker {slot} is killed"));
        self.summary.killed += 1;
        self.summary.launches += worker.launches;
        let incarnation = worker.incarnation;
        self.model.killed.insert((slot, incarnation));
        // Its connections to the others end behind what it has sent.
        for other in (0..self.connections.len()).filter(|&other| other != slot.0 as usize) {
            let life = self.connections[other].incarnation;
            self.data(HostSlot(other as u32), life, Data::Detach(SessionId::of_worker(incarnation)));
            // Without a word of a machine that is gone, nothing breaks.
            if self.rng.per_mille(500) {
                self.post_to(HostSlot(other as u32), life, Data::Broken(slot));
            }
        }
        // The last frames may still come, or not; the loss is noticed behind them.
        if self.rng.per_mille(500) {
            self.connections[slot.0 as usize].incarnation = Incarnation(0);
        }
        let lost = Event::WorkerLost { slot, incarnation, reason: "killed".to_owned() };
        let noticed = self.connections[slot.0 as usize].reports.arrival(self.agenda.now, &mut self.rng);
        self.agenda.at(noticed, Action::Inbox(lost));
    }

    pub(super) fn with_worker(
        &mut self,
        slot: HostSlot,
        incarnation: Incarnation,
        act: impl FnOnce(&mut Worker, &mut Surroundings) -> Check,
    ) -> Check {
        let Some(worker) = &mut self.workers[slot.0 as usize] else { return Ok(()) };
        if worker.incarnation != incarnation {
            return Ok(());
        }
        let mut around = Surroundings {
            rng: &mut self.rng,
            model: &mut self.model,
            notes: Vec::new(),
            offers: Vec::new(),
            moves: Vec::new(),
            posted: Vec::new(),
            reports: Vec::new(),
        };
        act(worker, &mut around)?;
        let Surroundings { notes, offers, moves, posted, mut reports, .. } = around;
        for (delay, note) in notes {
            self.agenda.after(delay, Action::Worker(slot, incarnation, note));
        }
        self.planter.reports(&mut reports, &self.model);
        let (seq, ack) = (worker.sent + 1, worker.received);
        let mut sent = Vec::new();
        let connection = &mut self.connections[slot.0 as usize];
        for offer in offers {
            let at = connection.offers.arrival(self.agenda.now, &mut self.rng);
            self.agenda.at(at, Action::Offer(offer));
        }
        for Moved { address, sender, buffer, content } in moves {
            let to = (0..).zip(&self.connections).find(|(slot, c)| data_address(*slot, c.incarnation) == address);
            if let Some((slot, incarnation)) = to.map(|(slot, c)| (HostSlot(slot), c.incarnation)) {
                sent.push((slot, incarnation, Data::Put { session: sender, buffer, content }));
            }
        }
        let connection = &mut self.connections[slot.0 as usize];
        if !reports.is_empty() {
            worker.sent = seq;
            let at = connection.reports.arrival(self.agenda.now, &mut self.rng);
            let frame = WorkerFrame { seq, ack, incarnation, reports };
            let bytes = frame.to_bytes();
            self.say(|| format!("worker {slot} sends {:?}", frame.reports));
            self.agenda.at(at, Action::FromWorker(slot, incarnation, bytes));
        }
        for (slot, incarnation, data) in sent {
            self.summary.moves += 1;
            self.data(slot, incarnation, data);
        }
        for posted in posted {
            self.post_operands(slot, incarnation, posted);
        }
        Ok(())
    }

    fn post_operands(&mut self, from: HostSlot, life: Incarnation, posted: Posted) {
        let Posted { to, address, mut operands } = posted;
        let there = self.connections[to.0 as usize].incarnation;
        if gang_address(to.0, there) == address {
            self.summary.exchanges += 1;
            self.planter.operands(to, &mut operands);
            self.post_to(to, there, Data::Operands(life, operands));
        } else if self.rng.per_mille(500) {
            // Nobody listens there; or nobody says so.
            self.post_to(from, life, Data::Broken(to));
        }
    }

    /// Not behind what was sent before: runs are told apart by their names.
    fn post_to(&mut self, slot: HostSlot, incarnation: Incarnation, data: Data) {
        let at = Link::default().arrival(self.agenda.now, &mut self.rng);
        self.agenda.at(at, Action::Data(slot, incarnation, data));
    }

    pub(super) fn data_at_worker(&mut self, slot: HostSlot, incarnation: Incarnation, data: Data) -> Check {
        if let Data::Operands(life, operands) = &data
            && self.model.killed.contains(&(operands.from, *life))
            && self.rng.per_mille(500)
        {
            self.say(|| format!("lost with worker {}: {operands:?}", operands.from));
            return Ok(());
        }
        if let Data::Operands(..) | Data::Broken(_) = &data {
            self.say(|| format!("worker {slot} ({incarnation}) gets {data:?}"));
        }
        self.with_worker(slot, incarnation, |worker, around| {
            match data {
                Data::Put { session, buffer, content } => worker.landed(session, buffer, content, around),
                Data::Detach(session) => worker.inbox.push(ExecEvent::SessionDetached { session }),
                Data::Operands(_, operands) => worker.operands(operands, around)?,
                Data::Broken(from) => worker.broken(from, around),
            }
            worker.wake(around);
            Ok(())
        })
    }

    pub(super) fn frame_at_worker(&mut self, slot: HostSlot, incarnation: Incarnation, bytes: Bytes) -> Check {
        self.digest.add(&bytes);
        let frame = ControllerFrame::from_bytes(bytes).or_else(|e| violation(Invariant::Wire, e.to_string()))?;
        self.with_worker(slot, incarnation, |worker, around| {
            if frame.seq != worker.received + 1 || frame.incarnation != worker.incarnation || frame.ack > worker.sent {
                let text = format!("worker {slot} gets frame {} after {}, ack {}", frame.seq, worker.received, frame.ack);
                return violation(Invariant::Wire, text);
            }
            worker.received = frame.seq;
            worker.inbox.extend(frame.commands.into_iter().map(ExecEvent::Command));
            worker.wake(around);
            Ok(())
        })
    }

    pub(super) fn frame_at_controller(&mut self, slot: HostSlot, incarnation: Incarnation, bytes: Bytes) -> Check {
        self.digest.add(&bytes);
        self.summary.frames += 1;
        let frame = WorkerFrame::from_bytes(bytes).or_else(|e| violation(Invariant::Wire, e.to_string()))?;
        let connection = &mut self.connections[slot.0 as usize];
        if connection.incarnation != incarnation {
            return Ok(());
        }
        if frame.seq != connection.received + 1 || frame.incarnation != incarnation || frame.ack > connection.sent {
            return violation(Invariant::Wire, format!("the controller gets frame {} of worker {slot} out of turn", frame.seq));
        }
        connection.received = frame.seq;
        for report in frame.reports {
            self.post(Event::Report { slot, incarnation, report });
        }
        Ok(())
    }
}

fn data_address(slot: u32, incarnation: Incarnation) -> String {
    format!("host{slot}:{incarnation}")
}

fn gang_address(slot: u32, incarnation: Incarnation) -> String {
    format!("gang{slot}:{incarnation}")
}
