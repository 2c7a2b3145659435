//! The one total order of grants (invariant A4): which node is granted next, and the commands that follow from it.
//!
//! Policy: equal (weighted) shares of device time per session. A node is granted after everything that it consumes;
//! never more than a window of device time is granted ahead per device; memory is judged in order time.

use std::sync::Arc;

use pw_types::{
    Argument, BufferId, Command, CopyShards, GrantSeq, HostRead, HostReadPiece, HostSlot, HostWrite, Incarnation, Launch, NodeOrder, RunId,
    Segment, SessionId, ShardId, Status, ToEdge,
};
use smallvec::SmallVec;

use crate::directory::{BackingKey, BackingState, Piece};
use crate::executables::ExecutableState;
use crate::graph::{Node, NodeState, Work};
use crate::membership::DeviceKey;
use crate::{Core, Effect, Effects};

/// How far behind a blocked node the queue of a session is searched for work on other devices.
const LOOKAHEAD: usize = 64;
/// Transfers of one session that may be granted and not finished.
const TRANSFERS_MAX: u32 = 4096;

/// Why a node cannot be granted now.
enum Verdict {
    Grant,
    /// An input or its program is not there yet.
    Inputs,
    /// The window of a device is full.
    Window,
    /// A device has no room, but others' queued nodes will make some.
    Memory,
    Fail(Arc<Status>),
}

/// What the search of one session found.
#[derive(PartialEq, Eq, Clone, Copy)]
enum Found {
    Granted,
    Nothing,
    /// Only memory is missing: its oldest such node.
    Memory(RunId),
}

impl Core {
    /// Grants as long as anything can be granted, the session with the least device time first.
    pub(crate) fn grant_all(&mut self, fx: &mut Effects) {
        let mut open: Vec<SessionId> = self.sessions.iter().filter(|(_, s)| !s.queued.is_empty()).map(|(&id, _)| id).collect();
        let mut starved: Vec<(SessionId, RunId)> = Vec::new();
        let mut progress_elsewhere = false;
        while !open.is_empty() {
            let next = open.iter().enumerate().min_by_key(|(_, id)| (self.sessions[id].virtual_ns, **id)).map(|(i, _)| i);
            let index = next.expect("not empty");
            let session = open[index];
            match self.grant_one(session, fx) {
                Found::Granted => {
                    if self.sessions[&session].queued.is_empty() {
                        open.swap_remove(index);
                    }
                }
                Found::Nothing => {
                    progress_elsewhere |= !self.sessions[&session].queued.is_empty();
                    open.swap_remove(index);
                }
                Found::Memory(run) => {
                    starved.push((session, run));
                    open.swap_remove(index);
                }
            }
        }
        // If everybody who waits, waits for memory, no grant will ever free any: the oldest fails (invariant A8).
        if !progress_elsewhere && let Some(&(session, run)) = starved.iter().min_by_key(|(_, run)| *run) {
            let status = match self.missing_memory(run) {
                Some((device, wanted)) => self.exhausted(device, wanted, &self.label(run)),
                // A node that failed after this one was looked at has made room; nothing else would wake us.
                None => return self.grant_all(fx),
            };
            self.sessions.get_mut(&session).expect("just searched").queued.retain(|&r| r != run);
            self.drop_queued_node(run, &status, fx);
            self.grant_all(fx);
        }
    }

    /// Grants the first node of a session that can be granted, looking past blocked ones on other devices.
    fn grant_one(&mut self, session: SessionId, fx: &mut Effects) -> Found {
        let mut blocked: SmallVec<[DeviceKey; 16]> = SmallVec::new();
        let mut waiting_for_memory = None;
        let mut position = 0;
        while position < LOOKAHEAD {
            let Some(&run) = self.sessions[&session].queued.get(position) else { break };
            match self.verdict(run, &blocked) {
                Verdict::Grant => {
                    self.sessions.get_mut(&session).expect("just searched").queued.remove(position);
                    self.grant(run, fx);
                    return Found::Granted;
                }
                Verdict::Fail(status) => {
                    self.sessions.get_mut(&session).expect("just searched").queued.remove(position);
                    self.drop_queued_node(run, &status, fx);
                    continue;
                }
                Verdict::Memory => {
                    waiting_for_memory.get_or_insert(run);
                }
                Verdict::Inputs | Verdict::Window => {}
            }
            for &device in self.nodes[&run].devices.iter() {
                if !blocked.contains(&device) {
                    blocked.push(device);
                }
            }
            position += 1;
        }
        match waiting_for_memory {
            // The head decides: what stands before the starved node may still free memory.
            Some(run) if self.sessions[&session].queued.front() == Some(&run) => Found::Memory(run),
            _ => Found::Nothing,
        }
    }

    fn verdict(&self, run: RunId, blocked: &[DeviceKey]) -> Verdict {
        let node = &self.nodes[&run];
        for &input in &node.inputs {
            let backing = self.directory.get(input);
            match &backing.state {
                BackingState::Poisoned(fault) => return Verdict::Fail(fault.clone()),
                _ if !backing.granted => return Verdict::Inputs,
                // A part has failed, so all of it will; nor is there memory to reuse where that was.
                _ if !backing.failed.is_empty() => {
                    if let Some(fault) = self.nodes.get(&backing.id.run).and_then(|n| n.fault.clone()) {
                        return Verdict::Fail(fault);
                    }
                }
                _ => {}
            }
        }
        if node.devices.iter().any(|d| blocked.contains(d)) {
            return Verdict::Window;
        }
        match &node.work {
            Work::Launch { executable, .. } => {
                let Some(entry) = self.executables.get(*executable) else {
                    return Verdict::Fail(Arc::new(Status::internal("the program is not in the compile table")));
                };
                match &entry.state {
                    ExecutableState::Loaded => {}
                    ExecutableState::Failed(status) | ExecutableState::Lost(status) => return Verdict::Fail(status.clone()),
                    _ => return Verdict::Inputs,
                }
                let estimate = entry.estimate_ns;
                for &device in node.devices.iter() {
                    let state = &self.members.devices[device as usize];
                    let room = state.window_gangs < self.config.window_gangs_min
                        || (state.window_ns + estimate <= self.config.window_ns && state.window_gangs < self.config.window_gangs_max);
                    if !room {
                        return Verdict::Window;
                    }
                }
            }
            _ => {
                if self.sessions.get(&node.session).is_some_and(|s| s.running >= TRANSFERS_MAX) {
                    return Verdict::Window;
                }
            }
        }
        for &device in node.devices.iter() {
            if let Err(status) = self.alive_worker(self.members.slot_of(device)) {
                return Verdict::Fail(Arc::new(status));
            }
        }
        if let Some((device, wanted)) = self.missing_memory(run) {
            let free = self.free_bytes(device).unwrap_or(u64::MAX);
            if free.saturating_add(self.releasable(device, node.session)) >= wanted {
                return Verdict::Memory;
            }
            return Verdict::Fail(self.exhausted(device, wanted, &self.label(run)));
        }
        Verdict::Grant
    }

    /// The first device that has no room for a node, and how much the node needs there.
    fn missing_memory(&self, run: RunId) -> Option<(DeviceKey, u64)> {
        let node = self.nodes.get(&run)?;
        let (temporaries, reused) = match &node.work {
            Work::Launch { executable, arguments, .. } => {
                let report = self.executables.get(*executable)?.report.as_ref()?;
                let reused: u64 =
                    arguments.iter().filter(|(p, given)| *given && self.sole_use(node, p)).map(|(p, _)| self.piece_bytes(p)).sum();
                (report.memory.temporaries, reused)
            }
            _ => (0, 0),
        };
        if node.outputs.is_empty() && temporaries == 0 {
            return None;
        }
        let outputs = |device: DeviceKey| -> u64 {
            let backings = node.outputs.iter().filter_map(|&k| self.directory.backings.get(k));
            backings.map(|b| b.ledger_bytes * b.devices.iter().filter(|&&d| d == device).count() as u64).sum()
        };
        node.devices.iter().find_map(|&device| {
            let free = self.free_bytes(device)?;
            let wanted = (outputs(device) + temporaries).saturating_sub(reused);
            (wanted > free).then_some((device, wanted))
        })
    }

    fn piece_bytes(&self, pieces: &[Piece]) -> u64 {
        pieces.first().map_or(0, |p| self.directory.get(p.backing).ledger_bytes)
    }

    /// An argument whose backing nobody else uses, whole: it may be donated to the plugin (invariant A7).
    fn sole_use(&self, node: &Node, pieces: &[Piece]) -> bool {
        let [piece] = pieces else { return false };
        let backing = self.directory.get(piece.backing);
        let whole = piece.first == 0 && piece.count as usize == backing.devices.len();
        let mine = node.inputs.iter().filter(|&&k| k == piece.backing).count() as u32;
        whole && backing.handle_refs == 0 && backing.queued_refs == 1 && mine == 1
    }

    pub(crate) fn label(&self, run: RunId) -> String {
        match &self.nodes[&run].work {
            Work::Launch { executable, .. } => {
                self.executables.get(*executable).map_or_else(|| "program".to_owned(), |e| e.label.to_string())
            }
            Work::HostWrite { .. } => "an upload".to_owned(),
            Work::Copy { .. } | Work::Move { .. } => "a copy".to_owned(),
            Work::HostRead { .. } => "a fetch".to_owned(),
        }
    }

    /// Gives a node its place in the order and sends its commands.
    fn grant(&mut self, run: RunId, fx: &mut Effects) {
        let mut node = self.nodes.remove(&run).expect("queued nodes are in the graph");
        let seq = self.take_seq();
        let cost_ns = match &node.work {
            Work::Launch { executable, .. } => self.executables.get(*executable).map_or(0, |e| e.estimate_ns),
            _ => 0,
        };
        node.cost_ns = cost_ns;
        if let Work::Move { items, first_key, .. } = &mut node.work {
            *first_key = self.next_move_key;
            self.next_move_key += items.len() as u64;
        }
        let session = self.sessions.get_mut(&node.session).expect("a queued node has a session");
        session.queued_bytes -= u64::from(node.bytes);
        session.running += 1;
        let weighted = cost_ns * 1024 / session.weight();
        session.virtual_ns += weighted;
        session.unsettled_ns += weighted;
        if node.is_gang() {
            for &device in node.devices.iter() {
                let state = &mut self.members.devices[device as usize];
                state.window_ns += cost_ns;
                state.window_gangs += 1;
            }
        }

        let mut hosts: SmallVec<[(HostSlot, Incarnation); 1]> = SmallVec::new();
        for &device in node.devices.iter() {
            let slot = self.members.slot_of(device);
            if hosts.last().is_none_or(|(s, _)| *s != slot) && !hosts.iter().any(|(s, _)| *s == slot) {
                hosts.push((slot, self.members.workers[slot.0 as usize].incarnation));
            }
        }
        let donate: SmallVec<[bool; 8]> = match &node.work {
            Work::Launch { arguments, .. } => arguments.iter().map(|(p, given)| *given && self.sole_use(&node, p)).collect(),
            _ => SmallVec::new(),
        };
        let commands = self.commands(&node, run, seq, &hosts, &donate);
        for (slot, incarnation, command) in commands {
            fx.list.push(Effect::Send { slot, incarnation, command });
        }
        if let Work::HostWrite { buffers, hosts: shares, .. } = &node.work {
            for &(buffer, bytes) in buffers {
                let hosts = shares.iter().filter(|(_, s)| s.iter().any(|s| s.buffer == buffer)).map(|(slot, _)| *slot).collect();
                fx.edge(ToEdge::Route { session: node.session, buffer, bytes, hosts });
            }
        }
        for &key in &node.outputs {
            let backing = &mut self.directory.backings[key];
            backing.granted = true;
            backing.hosts = hosts.clone();
            if let Work::Move { from, .. } = node.work {
                backing.hosts.retain(|(slot, _)| *slot != from);
            }
        }
        // In order time the inputs' last use is over before the outputs are counted: donated memory is reused.
        let inputs = std::mem::take(&mut node.inputs);
        for &key in &inputs {
            self.drop_queued_ref(key, fx);
        }
        let outputs: SmallVec<[BackingKey; 2]> = node.outputs.clone();
        for &key in &outputs {
            self.reserve(key);
        }
        node.state = NodeState::Granted { hosts };
        self.nodes.insert(run, node);
        for &key in &outputs {
            self.free_if_unused(key, fx);
        }
    }

    /// The share of each host of a granted node, chained to the node before it on that host.
    fn commands(
        &mut self,
        node: &Node,
        run: RunId,
        seq: GrantSeq,
        hosts: &[(HostSlot, Incarnation)],
        donate: &[bool],
    ) -> SmallVec<[(HostSlot, Incarnation, Command); 1]> {
        let mut commands = SmallVec::new();
        for &(slot, incarnation) in hosts {
            let worker = &mut self.members.workers[slot.0 as usize];
            let order = NodeOrder { run, seq, previous: worker.last_seq, session: node.session };
            worker.last_seq = seq;
            worker.granted += 1;
            let id = |key: BackingKey| -> BufferId { self.directory.get(key).id };
            let is_here = |device: DeviceKey| self.members.slot_of(device) == slot;
            let command = match &node.work {
                Work::Launch { executable, arguments, launch_id } => Command::Launch(Launch {
                    order,
                    executable: *executable,
                    arguments: arguments
                        .iter()
                        .zip(donate)
                        .map(|((pieces, _), &donate)| Argument {
                            segments: match hosts {
                                [_] => pieces.iter().map(|p| Segment { buffer: id(p.backing), first: p.first, count: p.count }).collect(),
                                _ => local_segments(pieces, &node.devices, is_here, id),
                            },
                            donate,
                        })
                        .collect(),
                    launch_id: *launch_id,
                }),
                Work::HostWrite { hosts, memory_kind, shards, .. } => Command::HostWrite(HostWrite {
                    order,
                    sender: node.session,
                    sources: hosts.iter().find(|(s, _)| *s == slot).map(|(_, sources)| sources.clone()).unwrap_or_default(),
                    memory_kind: memory_kind.as_deref().map(str::to_owned),
                    shards: *shards,
                }),
                Work::Copy { items, memory_kind } => Command::Copy(CopyShards {
                    order,
                    items: items.iter().map(|p| p.item(id(p.source.backing))).collect(),
                    memory_kind: memory_kind.as_deref().map(str::to_owned),
                }),
                Work::Move { from, .. } if slot == *from => self.send_command(order, &node.work),
                Work::Move { .. } => self.receive_command(order, &node.work),
                Work::HostRead { buffer, dtype, dims, byte_strides, pieces, .. } => Command::HostRead(HostRead {
                    order,
                    buffer: *buffer,
                    dtype: *dtype,
                    dims: dims.to_vec(),
                    byte_strides: byte_strides.clone(),
                    pieces: pieces
                        .iter()
                        .map(|(p, region)| HostReadPiece {
                            source: ShardId { buffer: id(p.backing), shard: p.first },
                            region: region.clone(),
                        })
                        .collect(),
                }),
            };
            commands.push((slot, incarnation, command));
        }
        commands
    }
}

/// The shards of an argument of a gang that lie on devices which are here, in order.
fn local_segments(
    pieces: &[Piece],
    devices: &[DeviceKey],
    is_here: impl Fn(DeviceKey) -> bool,
    id: impl Fn(BackingKey) -> BufferId,
) -> Vec<Segment> {
    let mut segments: Vec<Segment> = Vec::new();
    let shards = pieces.iter().flat_map(|p| (p.first..p.first + p.count).map(move |shard| (p.backing, shard)));
    for (_, (backing, shard)) in devices.iter().zip(shards).filter(|&(&device, _)| is_here(device)) {
        let buffer = id(backing);
        match segments.last_mut() {
            Some(last) if last.buffer == buffer && last.first + last.count == shard => last.count += 1,
            _ => segments.push(Segment { buffer, first: shard, count: 1 }),
        }
    }
    segments
}
