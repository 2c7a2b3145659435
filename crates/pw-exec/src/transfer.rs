//! Copies, host writes and host reads, and moves between workers: a send here, a host write there. They start when what they need is there, in grant order among those that can,
//! and hold no place in a device's queue.

use std::collections::BTreeMap;
use std::sync::Arc;

use pw_types::dtype::describe;
use pw_types::{BufferId, Cause, Code, CopyShards, DType, Dims, Handle, HostRead, HostWrite, Region, RunId, SendShards, SessionId, Status};
use rustc_hash::FxHashMap;
use smallvec::{SmallVec, smallvec};

use crate::core::{ExecCore, finished};
use crate::event::{BackingKey, ExecEffect, Part, StartCopy, StartCopyItem, StartRead, StartSend, StartWrite};
use crate::node::{NodeKey, Work};
use crate::program::Recent;
use crate::table::{ELSEWHERE, Inspected, Spec, Specs};

/// How many detached sessions are remembered, for commands of theirs that come late.
const DETACHED_MAX: usize = 1024;

/// No array has more shards.
const SHARDS_MAX: u32 = 1 << 16;

/// Where an upload and the command that wants it meet. Entries leave when both have come, or with the session.
#[derive(Debug)]
pub(crate) struct Uploads {
    pub(crate) sessions: FxHashMap<SessionId, BTreeMap<Handle, Upload>>,
    detached: Recent<SessionId>,
    /// Of each worker that sends here, the last of its buffers that was asked for: they are named in the order in which
    /// they are asked for, so nobody will ask for an earlier one.
    asked: FxHashMap<SessionId, Handle>,
}

#[derive(Debug)]
pub(crate) enum Upload {
    /// The bytes are here; nobody has asked yet.
    Landed,
    Failed(Arc<Status>),
    /// This write waits for it.
    Wanted(NodeKey),
    /// Nobody will ask.
    Abandoned,
}

impl Default for Uploads {
    fn default() -> Uploads {
        Uploads { sessions: FxHashMap::default(), detached: Recent::new(DETACHED_MAX), asked: FxHashMap::default() }
    }
}

impl Uploads {
    /// Another worker's buffer whose time is over.
    fn is_over(&self, sender: SessionId, buffer: Handle) -> bool {
        self.asked.get(&sender).is_some_and(|&last| buffer <= last)
    }

    /// The buffers of a move are asked for.
    fn ask(&mut self, write: &HostWrite) {
        if write.sender.is_worker()
            && let Some(last) = write.sources.iter().map(|s| s.buffer).max()
        {
            let asked = self.asked.entry(write.sender).or_insert(last);
            *asked = last.max(*asked);
        }
    }

    pub(crate) fn attach(&mut self, session: SessionId) {
        self.detached.remove(session);
    }

    fn forget(&mut self, session: SessionId, buffer: Handle) {
        if let Some(uploads) = self.sessions.get_mut(&session) {
            uploads.remove(&buffer);
            if uploads.is_empty() {
                self.sessions.remove(&session);
            }
        }
    }

    /// The write `key` (`None`: never admitted) ended without its bytes: those that are here go, those that come will go.
    pub(crate) fn abandon(&mut self, write: &HostWrite, key: Option<NodeKey>, fx: &mut Vec<ExecEffect>) {
        let session = write.sender;
        // A worker's buffer that comes later is over.
        let detached = self.detached.contains(session) || session.is_worker();
        let uploads = self.sessions.entry(session).or_default();
        for source in &write.sources {
            let buffer = source.buffer;
            match uploads.get(&buffer) {
                Some(Upload::Wanted(owner)) if Some(*owner) != key => continue,
                Some(Upload::Landed) => fx.push(ExecEffect::DropUpload { session, buffer }),
                Some(Upload::Wanted(_) | Upload::Abandoned) | None if !detached => {
                    uploads.insert(buffer, Upload::Abandoned);
                    continue;
                }
                Some(_) | None => {}
            }
            uploads.remove(&buffer);
        }
        if uploads.is_empty() {
            self.sessions.remove(&session);
        }
    }
}

impl ExecCore {
    pub(crate) fn arrive_copy(&mut self, copy: CopyShards, fx: &mut Vec<ExecEffect>) {
        let CopyShards { order, items, memory_kind } = copy;
        let id = BufferId { run: order.run, output: 0 };
        if let Some(item) = items.iter().find(|i| i.device as usize >= self.devices.len()) {
            let status = Arc::new(Status::internal(format!("copy to device {} of {}", item.device, self.devices.len())));
            let output = self.table.create(id, Specs::Same(unknown()), items.iter().map(|_| 0));
            return self.refuse(order, &[output], status, fx);
        }
        let sources: Result<Vec<Part>, _> = items.iter().map(|i| self.readable(i.source.buffer, i.source.shard)).collect();
        let sources = match sources {
            Ok(sources) => sources,
            Err(status) => {
                let output = self.table.create(id, Specs::Same(unknown()), items.iter().map(|i| i.device));
                return self.refuse(order, &[output], status, fx);
            }
        };
        let mut specs = Vec::with_capacity(items.len());
        let mut starts = Vec::with_capacity(items.len());
        for (item, part) in items.iter().zip(&sources) {
            let kind = memory_kind.as_ref().unwrap_or(&self.config.default_memory_kinds[item.device as usize]);
            let spec = self.table.get(part.backing).specs.of(part.first);
            specs.push(Arc::new(Spec { memory_kind: kind.clone(), ..Spec::clone(spec) }));
            starts.push(StartCopyItem { backing: part.backing, shard: part.first, device: item.device, memory_kind: kind.clone() });
        }
        let output = self.table.create(id, Specs::Each(specs), items.iter().map(|i| i.device));
        let start = StartCopy { run: order.run, items: starts, output };
        let key = self.admit(order, smallvec![output], Work::Copy(Arc::new(start)));
        self.try_transfer(key, fx);
    }

    pub(crate) fn arrive_write(&mut self, write: HostWrite, fx: &mut Vec<ExecEffect>) {
        let order = write.order;
        self.uploads.ask(&write);
        let id = BufferId { run: order.run, output: 0 };
        let shards = match self.write_shards(&write) {
            Ok(shards) => shards,
            Err(status) => {
                self.uploads.abandon(&write, None, fx);
                let output = self.table.create(id, Specs::Same(unknown()), (0..write.shards.min(SHARDS_MAX)).map(|_| 0));
                return self.refuse(order, &[output], Arc::new(status), fx);
            }
        };
        let (devices, specs): (Vec<u32>, Vec<Arc<Spec>>) = shards.into_iter().unzip();
        let output = self.table.create(id, Specs::Each(specs), devices.into_iter());
        if let Err(status) = self.uploads_possible(&write) {
            self.uploads.abandon(&write, None, fx);
            return self.refuse(order, &[output], status, fx);
        }
        let sources: SmallVec<[Handle; 4]> = write.sources.iter().map(|s| s.buffer).collect();
        let sender = write.sender;
        let start = Arc::new(StartWrite { command: write, output });
        let key = self.admit(order, smallvec![output], Work::Write { start, missing: 0 });
        let uploads = self.uploads.sessions.entry(sender).or_default();
        let mut missing = 0;
        for buffer in sources {
            if !matches!(uploads.get(&buffer), Some(Upload::Landed)) {
                uploads.insert(buffer, Upload::Wanted(key));
                missing += 1;
            }
        }
        if let Some(Work::Write { missing: m, .. }) = self.nodes.get_mut(key).map(|n| &mut n.work) {
            *m = missing;
        }
        self.try_transfer(key, fx);
    }

    /// Device and kind of every shard of the array; those that no source goes to are made by other workers.
    fn write_shards(&self, write: &HostWrite) -> Result<Vec<(u32, Arc<Spec>)>, Status> {
        if write.shards > SHARDS_MAX {
            return Err(Status::internal(format!("an array of {} shards", write.shards)));
        }
        let mut shards = vec![None; write.shards as usize];
        for source in &write.sources {
            let whole = describe(source.dtype, &source.dims);
            for target in &source.targets {
                if target.device as usize >= self.devices.len() {
                    return Err(Status::internal(format!("write to device {} of {}", target.device, self.devices.len())));
                }
                let dims = match &target.region {
                    None => &source.dims,
                    Some(region) if inside(region, &source.dims) => &region.dims,
                    Some(region) => return Err(Status::invalid(format!("{region:?} does not lie in {whole}"))),
                };
                let kind = write.memory_kind.as_ref().unwrap_or(&self.config.default_memory_kinds[target.device as usize]);
                let spec = Spec { dtype: source.dtype, dims: dims.clone(), memory_kind: kind.clone() };
                match shards.get_mut(target.shard as usize) {
                    Some(slot @ None) => *slot = Some((target.device, Arc::new(spec))),
                    _ => return Err(Status::internal(format!("shard {} of {} is written twice or unknown", target.shard, write.shards))),
                }
            }
        }
        let elsewhere = unknown();
        Ok(shards.into_iter().map(|s| s.unwrap_or_else(|| (ELSEWHERE, elsewhere.clone()))).collect())
    }

    /// An error where some source has failed or can no longer come.
    fn uploads_possible(&self, write: &HostWrite) -> Result<(), Arc<Status>> {
        let session = write.sender;
        let uploads = self.uploads.sessions.get(&session);
        let twice = |buffer| Arc::new(Status::internal(format!("host buffer {buffer} of session {session} is used twice")));
        for (index, source) in write.sources.iter().enumerate() {
            if write.sources[..index].iter().any(|s| s.buffer == source.buffer) {
                return Err(twice(source.buffer));
            }
            match uploads.and_then(|u| u.get(&source.buffer)) {
                Some(Upload::Landed) => {}
                Some(Upload::Failed(status)) => return Err(status.clone()),
                None if !self.uploads.detached.contains(session) => {}
                None => return Err(session_ended(session, source.buffer)),
                Some(Upload::Wanted(_) | Upload::Abandoned) => return Err(twice(source.buffer)),
            }
        }
        Ok(())
    }

    pub(crate) fn arrive_read(&mut self, read: HostRead, fx: &mut Vec<ExecEffect>) {
        let order = read.order;
        match self.read_sources(&read) {
            Ok(sources) => {
                let key = self.admit(order, SmallVec::new(), Work::Read { command: read, sources });
                self.try_transfer(key, fx);
            }
            Err(status) => {
                fx.push(ExecEffect::ReadFailed { session: order.session, buffer: read.buffer, status: status.clone() });
                self.refuse(order, &[], status, fx);
            }
        }
    }

    fn read_sources(&self, read: &HostRead) -> Result<Vec<Part>, Arc<Status>> {
        let mut sources = Vec::with_capacity(read.pieces.len());
        for piece in &read.pieces {
            let part = self.readable(piece.source.buffer, piece.source.shard)?;
            let spec = self.table.get(part.backing).specs.of(part.first);
            let dims = match &piece.region {
                None => &read.dims,
                Some(region) if inside(region, &read.dims) => &region.dims,
                Some(region) => return Err(Arc::new(Status::invalid(format!("{region:?} does not lie in {:?}", read.dims)))),
            };
            let token = spec.dtype == DType::Token;
            if !token && (spec.dtype != read.dtype || spec.dims != *dims) {
                let (wanted, given) = (describe(read.dtype, dims), describe(spec.dtype, &spec.dims));
                return Err(Arc::new(Status::invalid(format!("read of buffer {}: wanted {wanted}, it is {given}", piece.source.buffer))));
            }
            sources.push(part);
        }
        Ok(sources)
    }

    pub(crate) fn arrive_send(&mut self, send: SendShards, fx: &mut Vec<ExecEffect>) {
        let (order, command) = (send.order, Arc::new(send));
        let sources: Result<Vec<Part>, _> = command.items.iter().map(|i| self.readable(i.source.buffer, i.source.shard)).collect();
        match sources {
            Ok(sources) => {
                let key = self.admit(order, SmallVec::new(), Work::Send(Arc::new(StartSend { command, sources })));
                self.try_transfer(key, fx);
            }
            Err(status) => {
                fx.push(ExecEffect::SendFailed { command, status: status.clone() });
                self.refuse(order, &[], status, fx);
            }
        }
    }

    /// One shard that a transfer may read: here, not donated, not poisoned.
    fn readable(&self, buffer: BufferId, shard: u32) -> Result<Part, Arc<Status>> {
        let part = self.resolve(buffer, shard, 1)?;
        self.table.inspect(part).map(|_| part)
    }

    /// Starts a transfer if it can go; if not, it waits at the backing that is in its way.
    pub(crate) fn try_transfer(&mut self, key: NodeKey, fx: &mut Vec<ExecEffect>) {
        let Some(node) = self.nodes.get(key) else { return };
        if node.started || matches!(node.work, Work::Write { missing: 1.., .. }) {
            return;
        }
        let blocked = (0..).zip(node.inputs()).skip(node.cursor as usize).find_map(|(place, part)| match self.table.inspect(part) {
            Ok(Inspected::Ready) => None,
            Ok(Inspected::Pending) => Some(Ok((place, part.backing))),
            Err(status) => Some(Err(status)),
        });
        match blocked {
            None => self.start_transfer(key, fx),
            Some(Ok((place, backing))) => self.wait(key, place, backing),
            Some(Err(status)) => self.fail(key, status, 0, fx),
        }
    }

    fn start_transfer(&mut self, key: NodeKey, fx: &mut Vec<ExecEffect>) {
        let node = self.nodes.get_mut(key).expect("a live node");
        node.started = true;
        node.outputs.iter().for_each(|&o| self.table.export(o));
        match &node.work {
            Work::Copy(start) => fx.push(ExecEffect::Copy(start.clone())),
            Work::Read { command, sources } => {
                fx.push(ExecEffect::Read(Arc::new(StartRead { command: command.clone(), sources: sources.clone() })));
            }
            Work::Write { start, .. } => {
                let session = start.command.sender;
                if let Some(uploads) = self.uploads.sessions.get_mut(&session) {
                    start.command.sources.iter().for_each(|s| drop(uploads.remove(&s.buffer)));
                    if uploads.is_empty() {
                        self.uploads.sessions.remove(&session);
                    }
                }
                fx.push(ExecEffect::Write(start.clone()));
            }
            Work::Send(start) => fx.push(ExecEffect::Send(start.clone())),
            Work::Launch(_) => unreachable!("launches have queues"),
        }
    }

    pub(crate) fn on_landed(&mut self, session: SessionId, buffer: Handle, fx: &mut Vec<ExecEffect>) {
        // It is attached again, or this came first.
        self.uploads.detached.remove(session);
        let over = self.uploads.is_over(session, buffer);
        let uploads = self.uploads.sessions.entry(session).or_default();
        match uploads.insert(buffer, Upload::Landed) {
            None if !over => {}
            None => {
                self.uploads.forget(session, buffer);
                fx.push(ExecEffect::DropUpload { session, buffer });
            }
            Some(Upload::Wanted(key)) => {
                if let Some(Work::Write { missing, .. }) = self.nodes.get_mut(key).map(|n| &mut n.work) {
                    *missing -= 1;
                }
                self.try_transfer(key, fx);
            }
            Some(Upload::Abandoned) => {
                uploads.remove(&buffer);
                fx.push(ExecEffect::DropUpload { session, buffer });
            }
            // Sent again before anybody asked: the shell has the new bytes.
            Some(Upload::Landed | Upload::Failed(_)) => {}
        }
    }

    pub(crate) fn on_upload_failed(&mut self, session: SessionId, buffer: Handle, status: Status, fx: &mut Vec<ExecEffect>) {
        let status = Arc::new(status);
        let over = self.uploads.is_over(session, buffer);
        let uploads = self.uploads.sessions.entry(session).or_default();
        match uploads.insert(buffer, Upload::Failed(status.clone())) {
            None if over => self.uploads.forget(session, buffer),
            None | Some(Upload::Failed(_)) => {}
            Some(Upload::Landed) => fx.push(ExecEffect::DropUpload { session, buffer }),
            Some(Upload::Wanted(key)) => self.fail(key, status, 0, fx),
            Some(Upload::Abandoned) => drop(uploads.remove(&buffer)),
        }
    }

    /// Who still waits for bytes of this session fails; what has landed and is wanted by nobody goes. What another worker
    /// has sent will be asked for: the command is on its way.
    pub(crate) fn on_detached(&mut self, session: SessionId, fx: &mut Vec<ExecEffect>) {
        if session.is_worker() {
            // A connection of another worker has gone; maybe it comes again with what it has not sent. If not, the sends
            // end there, or the controller hears of its loss, and cancels what waits here.
            return;
        }
        self.uploads.detached.add(session);
        let Some(uploads) = self.uploads.sessions.get(&session) else { return };
        let wanted: Vec<(NodeKey, Handle)> =
            uploads.iter().filter_map(|(&buffer, u)| if let Upload::Wanted(key) = u { Some((*key, buffer)) } else { None }).collect();
        for (key, buffer) in wanted {
            if self.nodes.get(key).is_some() {
                self.fail(key, session_ended(session, buffer), 0, fx);
            }
        }
        for (buffer, upload) in self.uploads.sessions.remove(&session).unwrap_or_default() {
            if let Upload::Landed = upload {
                fx.push(ExecEffect::DropUpload { session, buffer });
            }
        }
    }

    /// A copy or write is over.
    pub(crate) fn on_filled(&mut self, run: RunId, result: Result<Vec<u64>, Arc<Status>>, fx: &mut Vec<ExecEffect>) {
        let Some((key, Some(output))) = self.started(run).map(|key| (key, self.output_of(key))) else {
            return self.die(format!("run {run} is filled but was not started"), fx);
        };
        let sizes = match result {
            Ok(sizes) => sizes,
            Err(status) => return self.fail(key, status, 0, fx),
        };
        let shards = self.table.get(output).shards.len();
        if sizes.len() != shards {
            return self.die(format!("run {run} makes {shards} shards, {} sizes given", sizes.len()), fx);
        }
        for (shard, bytes) in (0..).zip(sizes) {
            self.table.fill(output, shard, bytes);
        }
        self.retire(key, fx);
        finished(run, 0, Ok(()), fx);
    }

    /// A read or a send is over.
    pub(crate) fn on_sent(&mut self, run: RunId, result: Result<(), Arc<Status>>, fx: &mut Vec<ExecEffect>) {
        let Some(key) = self.started(run) else {
            return self.die(format!("run {run} has been read but was not started"), fx);
        };
        match result {
            Ok(()) => {
                self.retire(key, fx);
                finished(run, 0, Ok(()), fx);
            }
            Err(status) => self.fail(key, status, 0, fx),
        }
    }

    fn started(&self, run: RunId) -> Option<NodeKey> {
        let key = self.runs.get(&run).copied()?;
        self.nodes.get(key).filter(|n| n.started && n.launch().is_none()).map(|_| key)
    }

    fn output_of(&self, key: NodeKey) -> Option<BackingKey> {
        self.nodes.get(key)?.outputs.first().copied()
    }
}

/// A transfer that could not be understood makes something of no kind.
fn unknown() -> Arc<Spec> {
    Arc::new(Spec { dtype: DType::Opaque, dims: Dims::new(), memory_kind: String::new() })
}

fn inside(region: &Region, dims: &[i64]) -> bool {
    region.start.len() == dims.len()
        && region.dims.len() == dims.len()
        && region
            .start
            .iter()
            .zip(&region.dims)
            .zip(dims)
            .all(|((&start, &size), &whole)| start >= 0 && size >= 0 && start.checked_add(size).is_some_and(|end| end <= whole))
}

fn session_ended(session: SessionId, buffer: Handle) -> Arc<Status> {
    let text = match session.is_worker() {
        true => format!("the connection of the worker that sends buffer {buffer} ended before all of it had arrived"),
        false => format!("session {session} ended before its host buffer {buffer} had arrived"),
    };
    Arc::new(Status::new(Code::Cancelled, text).with_cause(Cause::Cancelled))
}
