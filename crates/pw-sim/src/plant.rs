//! Planted bugs: one message is dropped, doubled or changed on its way, to show that a checker notices.

use std::collections::{BTreeMap, BTreeSet};

use pw_core::Effect;
use pw_types::*;

use crate::failure::Invariant;
use crate::gang::Operands;
use crate::model::{Model, Work};
use crate::order::consumed;
use crate::rng::Rng;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Plant {
    /// A `Free` is lost.
    DropFree,
    /// A backing is freed while a handle or a queued node needs it.
    FreeEarly,
    /// Two commands of a host change places.
    SwapGrants,
    /// As [`Plant::SwapGrants`], with the chain repaired: a consumer goes before its producer.
    ConsumerFirst,
    /// An argument with another owner is donated.
    ForceDonate,
    LoseReply,
    DoubleReply,
    /// Two inputs of a command change places.
    WrongShard,
    /// A `Finished` is lost: the reservation leaks.
    HideFinished,
    DoubleFinished,
    /// A run that went well is reported as failed.
    PoisonBystander,
    /// A run that failed is reported as done.
    SwallowFault,
    /// Bytes of an upload are lost.
    LoseUpload,
    /// The core believes in a wider window.
    WideWindow,
    /// The core believes in more memory.
    WideMemory,
    /// A device thread does not wait for its devices.
    EagerThread,
    /// A worker gets two gangs in another order than the others.
    SwapGangs,
    /// Members of a failed gang are not told.
    MissCancel,
    /// A gang is given the operands of another run.
    StrayOperands,
}

impl Plant {
    pub const ALL: [Plant; 19] = [
        Plant::DropFree,
        Plant::FreeEarly,
        Plant::SwapGrants,
        Plant::ConsumerFirst,
        Plant::ForceDonate,
        Plant::LoseReply,
        Plant::DoubleReply,
        Plant::WrongShard,
        Plant::HideFinished,
        Plant::DoubleFinished,
        Plant::PoisonBystander,
        Plant::SwallowFault,
        Plant::LoseUpload,
        Plant::WideWindow,
        Plant::WideMemory,
        Plant::EagerThread,
        Plant::SwapGangs,
        Plant::MissCancel,
        Plant::StrayOperands,
    ];

    /// The checker for it, and others that may notice first.
    pub fn finders(self) -> &'static [Invariant] {
        use Invariant::*;
        match self {
            Plant::DropFree => &[A7References, Memory],
            Plant::FreeEarly => &[A7References],
            Plant::SwapGrants | Plant::ConsumerFirst | Plant::EagerThread => &[A4Order],
            Plant::ForceDonate => &[A7Donation],
            Plant::LoseReply | Plant::DoubleReply => &[A9Answers],
            Plant::WrongShard | Plant::StrayOperands => &[Values],
            Plant::HideFinished | Plant::LoseUpload => &[A4Progress],
            Plant::MissCancel => &[A4Progress, A7References],
            Plant::SwapGangs => &[A4Progress, A4Order],
            Plant::DoubleFinished => &[A9Finished],
            Plant::PoisonBystander | Plant::SwallowFault => &[A9Faults],
            Plant::WideWindow => &[Window],
            Plant::WideMemory => &[Memory],
        }
    }
}

/// Does it, once in a run, somewhere.
pub(crate) struct Planter {
    plant: Option<Plant>,
    /// Opportunities to let pass.
    skip: u64,
    /// The last operands that a worker was sent by another, of each shape.
    last: BTreeMap<(HostSlot, HostSlot, Vec<usize>), Vec<Vec<u64>>>,
}

impl Planter {
    pub(crate) fn new(plant: Option<Plant>, seed: u64) -> Planter {
        let rare = matches!(plant, Some(Plant::SwallowFault | Plant::WrongShard | Plant::SwapGangs));
        let skip = Rng::new(seed ^ 0x70_6c61_6e74).below(if rare { 2 } else { 12 });
        Planter { plant, skip, last: BTreeMap::new() }
    }

    /// An opportunity is there: is it taken?
    fn now(&mut self) -> bool {
        if self.skip > 0 {
            self.skip -= 1;
            return false;
        }
        self.plant = None;
        true
    }

    fn candidate(&mut self, list: &[Effect], from: usize, fits: impl Fn(&Effect) -> bool) -> Option<usize> {
        let found = (from..list.len()).find(|&i| fits(&list[i]))?;
        self.now().then_some(found)
    }

    /// Changes what the core has just said.
    pub(crate) fn effects(&mut self, list: &mut Vec<Effect>, from: usize, model: &Model) {
        match self.plant {
            Some(Plant::DropFree) => {
                if let Some(at) = self.candidate(list, from, |e| matches!(e, Effect::Send { command: Command::Free { .. }, .. })) {
                    list.remove(at);
                }
            }
            Some(Plant::LoseReply) => {
                if let Some(at) = self.candidate(list, from, |e| matches!(e, Effect::Edge(ToEdge::Reply { .. }))) {
                    list.remove(at);
                }
            }
            Some(Plant::DoubleReply) => {
                if let Some(at) = self.candidate(list, from, |e| matches!(e, Effect::Edge(ToEdge::Reply { .. }))) {
                    list.push(list[at].clone());
                }
            }
            Some(Plant::MissCancel) => list.retain(|effect| match effect {
                Effect::Send { command: Command::Cancel { runs, .. }, .. } => !runs.iter().any(|&run| is_gang(model, run)),
                _ => true,
            }),
            Some(Plant::FreeEarly) => self.free_early(list, model),
            Some(Plant::SwapGrants) => self.swap(list, from, false),
            Some(Plant::ConsumerFirst) => self.swap(list, from, true),
            Some(Plant::ForceDonate) => self.donate(list, from, model),
            Some(Plant::WrongShard) => {
                if let Some(at) = self.candidate(list, from, |e| command_of(e).is_some_and(|c| mixed(c).is_some()))
                    && let Effect::Send { command, .. } = &mut list[at]
                {
                    *command = mixed(command).expect("just seen");
                }
            }
            _ => {}
        }
    }

    fn free_early(&mut self, list: &mut Vec<Effect>, model: &Model) {
        for slot in 0.. {
            let Some(host) = model.order.hosts().get(slot) else { return };
            let needed = host.live.keys().find(|id| {
                let output = &model.nodes[id.run.0 as usize - 1].outputs[id.output as usize];
                output.handles > 0 || output.queued > 0
            });
            if let Some(&id) = needed
                && host.alive
                && self.now()
            {
                let command = Command::Free { buffers: vec![id] };
                return list.push(Effect::Send { slot: HostSlot(slot as u32), incarnation: host.incarnation, command });
            }
        }
    }

    fn swap(&mut self, list: &mut [Effect], from: usize, consumer_first: bool) {
        for first in from..list.len() {
            let Some((slot, order)) = node_of(&list[first]) else { continue };
            let next = (first + 1..list.len()).find(|&i| node_of(&list[i]).is_some_and(|(s, _)| s == slot));
            let Some(second) = next else { continue };
            if consumer_first {
                let makes = |c: &Command| consumed(c).iter().any(|id| id.run == order.run);
                if !command_of(&list[second]).is_some_and(makes) {
                    continue;
                }
            }
            if !self.now() {
                continue;
            }
            let other = node_of(&list[second]).expect("just seen").1;
            if consumer_first {
                let (early, late) = ((order.seq, order.previous), (other.seq, other.previous));
                set_order(&mut list[second], early);
                set_order(&mut list[first], late);
            }
            list.swap(first, second);
            return;
        }
    }

    fn donate(&mut self, list: &mut [Effect], from: usize, model: &Model) {
        for effect in &mut list[from..] {
            let Effect::Send { command: Command::Launch(launch), .. } = effect else { continue };
            for argument in launch.arguments.iter_mut().filter(|a| !a.donate) {
                let shared = argument.segments.iter().any(|s| {
                    let output = &model.nodes[s.buffer.run.0 as usize - 1].outputs[s.buffer.output as usize];
                    output.handles > 0 || output.queued > 1
                });
                if shared && self.now() {
                    argument.donate = true;
                    return;
                }
            }
        }
    }

    /// Changes what a worker is sent.
    pub(crate) fn commands(&mut self, slot: HostSlot, list: &mut Vec<Command>, model: &Model) {
        if self.plant != Some(Plant::SwapGangs) {
            return;
        }
        for late in 1..list.len() {
            for early in 0..late {
                if deadlocks(slot, &list[early], &list[late], model) && depends_on_none(&list[late], &list[early..late]) && self.now() {
                    let mut orders: Vec<NodeOrder> = list.iter().filter_map(Command::order).collect();
                    let command = list.remove(late);
                    list.insert(early, command);
                    orders.reverse();
                    let places = list.iter_mut().filter(|c| c.order().is_some());
                    places.for_each(|c| orders.pop().into_iter().for_each(|o| set_command_order(c, (o.seq, o.previous))));
                    return;
                }
            }
        }
    }

    /// Changes what a worker sends to another.
    pub(crate) fn operands(&mut self, to: HostSlot, operands: &mut Operands) {
        if self.plant != Some(Plant::StrayOperands) {
            return;
        }
        let shape = operands.tokens.iter().map(Vec::len).collect();
        if let Some(other) = self.last.insert((to, operands.from, shape), operands.tokens.clone()) {
            operands.tokens = other;
        }
    }

    /// Changes what a worker has just said.
    pub(crate) fn reports(&mut self, list: &mut Vec<Report>, model: &Model) {
        let Some(plant) = self.plant else { return };
        let read: BTreeSet<usize> = model.nodes.iter().flat_map(|n| n.inputs.iter().map(|i| i.0)).collect();
        for index in 0..list.len() {
            let Report::Finished { run, result, .. } = &mut list[index] else { continue };
            // Somebody must look at it: an array that nobody asks for says nothing.
            let node = run.0 as usize - 1;
            let watched = read.contains(&node) || model.is_asked_for(node);
            let taken = match plant {
                Plant::HideFinished | Plant::DoubleFinished => self.now(),
                Plant::PoisonBystander => result.is_ok() && model.is_asked_for(node) && self.now(),
                Plant::SwallowFault => result.is_err() && watched && model.is_asked_for(node) && self.now(),
                _ => return,
            };
            if !taken {
                continue;
            }
            match plant {
                Plant::HideFinished => drop(list.remove(index)),
                Plant::DoubleFinished => list.push(list[index].clone()),
                Plant::PoisonBystander => *result = Err(Status::internal("planted")),
                _ => *result = Ok(()),
            }
            return;
        }
    }

    /// Whether these bytes get lost.
    pub(crate) fn loses_upload(&mut self) -> bool {
        self.plant == Some(Plant::LoseUpload) && self.now()
    }
}

fn command_of(effect: &Effect) -> Option<&Command> {
    match effect {
        Effect::Send { command, .. } => Some(command),
        _ => None,
    }
}

fn node_of(effect: &Effect) -> Option<(HostSlot, NodeOrder)> {
    match effect {
        Effect::Send { slot, command, .. } => command.order().map(|order| (*slot, order)),
        _ => None,
    }
}

fn set_order(effect: &mut Effect, (seq, previous): (GrantSeq, GrantSeq)) {
    if let Effect::Send { command, .. } = effect {
        set_command_order(command, (seq, previous));
    }
}

fn set_command_order(command: &mut Command, (seq, previous): (GrantSeq, GrantSeq)) {
    let order = match command {
        Command::Launch(c) => &mut c.order,
        Command::Copy(c) => &mut c.order,
        Command::HostWrite(c) => &mut c.order,
        Command::HostRead(c) => &mut c.order,
        Command::Send(c) => &mut c.order,
        _ => return,
    };
    (order.seq, order.previous) = (seq, previous);
}

fn is_gang(model: &Model, run: RunId) -> bool {
    let node = &model.nodes[run.0 as usize - 1];
    matches!(node.work, Work::Launch { .. }) && model.order.slots_of(&node.devices).len() > 1
}

/// Two gangs that would wait for each other, if this worker took them in another order than the others.
fn deadlocks(slot: HostSlot, early: &Command, late: &Command, model: &Model) -> bool {
    let (Command::Launch(early), Command::Launch(late)) = (early, late) else { return false };
    let devices = |launch: &Launch| &model.nodes[launch.order.run.0 as usize - 1].devices;
    let shared: Vec<usize> = devices(early).iter().copied().filter(|d| devices(late).contains(d)).collect();
    let slots = model.order.slots_of(&shared);
    slots.len() > 1 && slots.contains(&slot) && late.arguments.iter().all(|a| !a.donate)
}

/// Whether it could as well be sent before these.
fn depends_on_none(command: &Command, before: &[Command]) -> bool {
    let made: Vec<RunId> = before.iter().filter_map(|c| c.order().map(|o| o.run)).collect();
    consumed(command).iter().all(|id| !made.contains(&id.run)) && !before.iter().any(|c| matches!(c, Command::Load { .. }))
}

/// The command with two of its inputs in each other's place, where that makes a difference.
fn mixed(command: &Command) -> Option<Command> {
    let mut command = command.clone();
    match &mut command {
        Command::HostRead(read) if read.pieces.len() > 1 && read.pieces[0].source != read.pieces[1].source => {
            let source = read.pieces[0].source;
            read.pieces[0].source = read.pieces[1].source;
            read.pieces[1].source = source;
        }
        Command::Copy(copy) if copy.items.len() > 1 && copy.items[0].source != copy.items[1].source => {
            let source = copy.items[0].source;
            copy.items[0].source = copy.items[1].source;
            copy.items[1].source = source;
        }
        _ => return None,
    }
    Some(command)
}
