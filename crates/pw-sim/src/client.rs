//! A random client: what a program might ask, in the order in which it asks.
//!
//! It believes that every request succeeds, so that errors meet requests that follow from them. Handles are its own,
//! except for those of executables and of a first run's results.

use std::collections::BTreeMap;

use bytes::Bytes;
use pw_types::*;

use crate::program::{ITEM_BYTES, Programs, SIZES};
use crate::rng::Rng;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Layout {
    Replicated,
    Tiled,
    /// Parts of equal size in an unknown place.
    Even,
}

/// An array as the client believes it to be.
#[derive(Clone, Debug)]
struct Array {
    handle: Handle,
    n: i64,
    layout: Layout,
    kind: Option<String>,
    devices: Vec<VirtualDeviceId>,
}

#[derive(Clone, Debug)]
struct Executable {
    handle: Handle,
    program: usize,
    devices: Vec<VirtualDeviceId>,
    ran: bool,
}

enum Awaited {
    Compile { program: usize, devices: Vec<VirtualDeviceId> },
    FirstRun { arrays: Vec<Array> },
}

/// A request, and the host buffers that go with it.
pub(crate) struct Outgoing {
    pub(crate) op: OpId,
    pub(crate) request: Request,
    /// Handle and size of what is streamed.
    pub(crate) streams: Vec<(Handle, u64)>,
}

pub(crate) struct Client {
    programs: Programs,
    devices_per_worker: usize,
    /// Physical device of each virtual one; empty until the session is open.
    pub(crate) devices: Vec<PhysicalDeviceId>,
    arrays: Vec<Array>,
    /// Handles that were given away or deleted.
    stale: Vec<Handle>,
    executables: Vec<Executable>,
    statuses: Vec<Handle>,
    awaited: BTreeMap<OpId, Awaited>,
    /// What an error to a request is about: arrays, and an executable.
    blamed: BTreeMap<OpId, (Vec<Handle>, Option<Handle>)>,
    next_handle: u64,
    next_op: u64,
    next_launch: i32,
    streams: Vec<(Handle, u64)>,
    /// A program that it wants to run as soon as it has the arguments.
    wanted: Option<Handle>,
    /// Requests that it will still make.
    pub(crate) left: u32,
    /// More arrays than this are given up.
    arrays_max: usize,
    /// So many programs of 1000 go to devices anywhere.
    spread: u64,
}

impl Client {
    pub(crate) fn new(programs: Programs, devices_per_worker: usize, left: u32, number: u32, rng: &mut Rng) -> Client {
        Client {
            programs,
            devices_per_worker,
            devices: Vec::new(),
            arrays: Vec::new(),
            stale: Vec::new(),
            executables: Vec::new(),
            statuses: Vec::new(),
            awaited: BTreeMap::new(),
            blamed: BTreeMap::new(),
            next_handle: 0,
            next_op: 0,
            next_launch: (number as i32) << 20,
            streams: Vec::new(),
            wanted: None,
            left,
            arrays_max: rng.between(6, 30) as usize,
            spread: rng.pick(&[100, 300, 950]),
        }
    }

    pub(crate) fn ready(&mut self, view: &SessionView) {
        self.devices = view.devices.iter().map(|d| d.physical).collect();
    }

    pub(crate) fn answer(&mut self, op: OpId, result: &Result<Reply, Status>) {
        let (arrays, executable) = self.blamed.remove(&op).unwrap_or_default();
        // Mostly it learns from an error; what it keeps leads to more of them.
        if let Err(status) = result
            && !op.0.is_multiple_of(6)
        {
            self.arrays.retain(|a| !arrays.contains(&a.handle));
            self.stale.extend(arrays);
            if matches!(status.code, Code::Internal | Code::Unavailable) {
                self.executables.retain(|e| Some(e.handle) != executable);
            }
        }
        match (self.awaited.remove(&op), result) {
            (Some(Awaited::Compile { program, devices }), Ok(Reply::Compile(reply))) => {
                self.executables.push(Executable { handle: reply.executable, program, devices, ran: false });
            }
            (Some(Awaited::FirstRun { arrays }), Ok(Reply::Execute(reply))) => {
                for (mut array, made) in arrays.into_iter().zip(&reply.outputs) {
                    array.handle = made.array;
                    self.arrays.push(array);
                }
                self.statuses.extend((reply.status.0 != 0).then_some(reply.status));
            }
            _ => {}
        }
    }

    fn handle(&mut self) -> Handle {
        self.next_handle += 1;
        Handle(self.next_handle)
    }

    /// The next request; `None` = it has none now.
    pub(crate) fn step(&mut self, rng: &mut Rng) -> Option<Outgoing> {
        if self.devices.is_empty() || self.left == 0 {
            return None;
        }
        self.left -= 1;
        self.next_op += 1;
        let op = OpId(self.next_op);
        let request = self.choose(op, rng);
        self.blamed.insert(op, blamed(&request));
        Some(Outgoing { op, request, streams: std::mem::take(&mut self.streams) })
    }

    fn choose(&mut self, op: OpId, rng: &mut Rng) -> Request {
        if self.arrays.len() > self.arrays_max {
            return self.destruct(rng);
        }
        if self.wanted.is_some() && rng.per_mille(800) {
            return self.execute(op, rng);
        }
        match rng.below(1000) {
            0..=149 => self.upload(rng),
            150..=499 => self.execute(op, rng),
            500..=529 => self.compile(op, rng),
            530..=609 => self.copy(rng),
            610..=659 => self.disassemble(rng),
            660..=699 => self.assemble(rng),
            700..=729 => self.remap(rng),
            730..=749 => self.first_shard(rng),
            750..=809 => self.check_ready(rng),
            810..=904 => self.fetch(rng),
            905..=954 => self.destruct(rng),
            955..=964 => self.delete(rng),
            965..=979 => self.ask_status(rng),
            980..=984 => self.bad(rng),
            _ => self.look(rng),
        }
    }

    /// Different devices of one worker, in any order.
    fn local_devices(&self, count: usize, rng: &mut Rng) -> Vec<VirtualDeviceId> {
        let start = rng.index(self.devices.len());
        let slot = self.devices[start].slot;
        let mut local: Vec<VirtualDeviceId> =
            (0..self.devices.len()).filter(|&d| self.devices[d].slot == slot).map(|d| VirtualDeviceId(d as u32)).collect();
        if rng.per_mille(500) {
            rng.shuffle(&mut local);
        }
        local.truncate(count);
        local
    }

    fn any_devices(&self, count: usize, rng: &mut Rng) -> Vec<VirtualDeviceId> {
        let mut all: Vec<VirtualDeviceId> = (0..self.devices.len() as u32).map(VirtualDeviceId).collect();
        rng.shuffle(&mut all);
        all.truncate(count);
        all
    }

    fn upload(&mut self, rng: &mut Rng) -> Request {
        let count = rng.between(1, self.devices_per_worker as u64) as usize;
        let devices = if rng.per_mille(150) { self.any_devices(count, rng) } else { self.local_devices(count, rng) };
        let (n, tiled) = (rng.pick(&SIZES), rng.per_mille(500));
        let kind = if rng.per_mille(60) { Some("pinned_host") } else { rng.pick(&[None, Some("device")]) };
        self.upload_to(devices, n, tiled, kind.map(str::to_owned), rng)
    }

    fn upload_to(&mut self, devices: Vec<VirtualDeviceId>, n: i64, tiled: bool, kind: Option<String>, rng: &mut Rng) -> Request {
        let count = devices.len();
        let tiled = tiled && count > 1 && n % count as i64 == 0;
        let (partition, layout) = if tiled { (tiling(count, rng), Layout::Tiled) } else { (Partition::Replicated, Layout::Replicated) };
        let handle = self.handle();
        let spec = ArraySpec {
            dtype: DType::F32,
            dims: vec![n],
            sharding: Sharding { devices: devices.clone(), partition, memory_kind: kind.clone() },
        };
        self.arrays.push(Array { handle, n, layout, kind, devices });
        if rng.per_mille(300) {
            let len = if tiled { n / count as i64 } else { n };
            let shards = (0..count as u32).map(|position| {
                let source = self.source(len);
                UploadShard { source, positions: vec![position] }
            });
            let shards = shards.collect();
            return Request::MakeArraysFromShards { arrays: vec![ShardedUpload { array: handle, spec, shards }] };
        }
        let source = self.source(if rng.per_mille(10) { n + 12 } else { n });
        Request::MakeArray { array: handle, spec, source }
    }

    fn source(&mut self, n: i64) -> HostSource {
        let buffer = self.handle();
        self.streams.push((buffer, n as u64 * ITEM_BYTES));
        HostSource { buffer, dtype: DType::F32, dims: vec![n], byte_strides: None }
    }

    fn compile(&mut self, op: OpId, rng: &mut Rng) -> Request {
        let program = rng.index(self.programs.len());
        let count = self.programs[program].devices as usize;
        let anywhere = count > self.devices_per_worker || rng.per_mille(self.spread);
        let mut devices = if anywhere { self.any_devices(count, rng) } else { self.local_devices(count, rng) };
        if rng.per_mille(20) && devices.len() == count {
            devices.push(VirtualDeviceId(0));
        }
        self.awaited.insert(op, Awaited::Compile { program, devices: devices.clone() });
        Request::Compile(CompileRequest {
            program: self.programs[program].bytes(),
            options: Bytes::new(),
            devices,
            replicas: 1,
            partitions: count as u32,
        })
    }

    fn execute(&mut self, op: OpId, rng: &mut Rng) -> Request {
        if self.executables.is_empty() {
            return self.compile(op, rng);
        }
        let wanted = self.wanted.take().and_then(|w| self.executables.iter().position(|e| e.handle == w));
        let which = wanted.unwrap_or_else(|| rng.index(self.executables.len()));
        let executable = self.executables[which].clone();
        let program = self.programs[executable.program].clone();
        let mut arguments = Vec::new();
        for parameter in &program.parameters {
            let layout = |a: &Array| match a.layout {
                Layout::Replicated => !parameter.tiled,
                _ => parameter.tiled,
            };
            let exact = |a: &&Array| a.n == parameter.n && a.devices == executable.devices && (a.devices.len() == 1 || layout(a));
            let near = |a: &&Array| a.n == parameter.n;
            let careless = rng.per_mille(40);
            let fits: Vec<Handle> = self.arrays.iter().filter(|a| if careless { near(a) } else { exact(a) }).map(|a| a.handle).collect();
            if fits.is_empty() {
                // What is missing is made now, and the run is for later.
                self.wanted = Some(executable.handle);
                return self.upload_to(executable.devices, parameter.n, parameter.tiled, None, rng);
            }
            arguments.push(rng.pick(&fits));
        }
        let non_donatable: Vec<u32> = (0..arguments.len() as u32).filter(|_| rng.per_mille(250)).collect();
        for index in program.donated.iter().filter(|i| !non_donatable.contains(i)) {
            self.give_up(arguments[*index as usize]);
        }
        let made = program.outputs.iter().map(|value| {
            let layout = if value.tiled && program.devices > 1 { Layout::Even } else { Layout::Replicated };
            let kind = (!value.kind.is_empty()).then(|| value.kind.to_owned());
            Array { handle: Handle(0), n: value.n, layout, kind, devices: executable.devices.clone() }
        });
        let mut made: Vec<Array> = made.collect();
        let first = !std::mem::replace(&mut self.executables[which].ran, true) || rng.per_mille(50);
        let fill_status = rng.per_mille(250);
        let mut status = Handle(0);
        let mut results = Vec::new();
        if first {
            self.awaited.insert(op, Awaited::FirstRun { arrays: made });
        } else {
            made.iter_mut().for_each(|a| a.handle = self.handle());
            results = made.iter().map(|a| a.handle).collect();
            self.arrays.extend(made);
            if fill_status {
                status = self.handle();
                self.statuses.push(status);
            }
        }
        self.next_launch += 1;
        let launch_id = self.next_launch;
        Request::Execute(ExecuteRequest {
            executable: executable.handle,
            arguments,
            results,
            status,
            fill_status,
            launch_id,
            non_donatable,
        })
    }

    /// The client counts the array as deleted, but may still name it by mistake.
    fn give_up(&mut self, handle: Handle) {
        self.arrays.retain(|a| a.handle != handle);
        self.stale.push(handle);
    }

    fn some_array(&self, rng: &mut Rng) -> Option<Array> {
        (!self.arrays.is_empty()).then(|| self.arrays[rng.index(self.arrays.len())].clone())
    }

    fn copy_semantics(rng: &mut Rng) -> CopySemantics {
        rng.pick(&[CopySemantics::AlwaysCopy, CopySemantics::ReuseInput, CopySemantics::ReuseInput, CopySemantics::DonateInput])
    }

    fn copy(&mut self, rng: &mut Rng) -> Request {
        let Some(first) = self.some_array(rng) else { return self.upload(rng) };
        let mut arrays = vec![first];
        if rng.per_mille(200) {
            let count = arrays[0].devices.len();
            let like = self.arrays.iter().find(|a| a.devices.len() == count && a.handle != arrays[0].handle).cloned();
            arrays.extend(like);
        }
        let count = arrays[0].devices.len();
        let devices = match rng.below(10) {
            0..=2 => Vec::new(),
            3..=6 => {
                let slot = self.devices[arrays[0].devices[0].0 as usize].slot;
                let mut local: Vec<VirtualDeviceId> =
                    (0..self.devices.len()).filter(|&d| self.devices[d].slot == slot).map(|d| VirtualDeviceId(d as u32)).collect();
                rng.shuffle(&mut local);
                local.truncate(count);
                if local.len() == count { local } else { Vec::new() }
            }
            _ => {
                let any = self.any_devices(count, rng);
                if any.len() == count { any } else { Vec::new() }
            }
        };
        let memory = match rng.below(10) {
            0..=5 => MemoryTarget::Keep,
            6..=7 => MemoryTarget::Default,
            8 => MemoryTarget::Kind("pinned_host".to_owned()),
            _ => MemoryTarget::Kind("device".to_owned()),
        };
        let copy = Client::copy_semantics(rng);
        let mut results = Vec::new();
        let handles: Vec<Handle> = arrays.iter().map(|a| a.handle).collect();
        for array in arrays {
            let handle = self.handle();
            let kind = match &memory {
                MemoryTarget::Keep => array.kind.clone(),
                MemoryTarget::Default => None,
                MemoryTarget::Kind(kind) => Some(kind.clone()),
            };
            results.push(handle);
            if copy == CopySemantics::DonateInput {
                self.give_up(array.handle);
            }
            let devices = if devices.is_empty() { array.devices.clone() } else { devices.clone() };
            self.arrays.push(Array { handle, kind, devices, ..array });
        }
        Request::CopyArrays { arrays: handles, results, devices, memory, copy }
    }

    fn disassemble(&mut self, rng: &mut Rng) -> Request {
        let many: Vec<Array> = self.arrays.iter().filter(|a| a.devices.len() > 1).cloned().collect();
        if many.is_empty() {
            return self.upload(rng);
        }
        let array = many[rng.index(many.len())].clone();
        let copy = rng.pick(&[CopySemantics::ReuseInput, CopySemantics::DonateInput]);
        if copy == CopySemantics::DonateInput {
            self.give_up(array.handle);
        }
        let len = if array.layout == Layout::Replicated { array.n } else { array.n / array.devices.len() as i64 };
        let mut results = Vec::new();
        for &device in &array.devices {
            let handle = self.handle();
            results.push(handle);
            let kind = array.kind.clone();
            self.arrays.push(Array { handle, n: len, layout: Layout::Replicated, kind, devices: vec![device] });
        }
        Request::Disassemble { array: array.handle, results, copy }
    }

    /// Arrays of one shard each, alike, on different devices.
    fn single_shards(&self, rng: &mut Rng) -> Vec<Array> {
        let mut singles: Vec<Array> = self.arrays.iter().filter(|a| a.devices.len() == 1).cloned().collect();
        rng.shuffle(&mut singles);
        let mut chosen: Vec<Array> = Vec::new();
        for single in singles {
            let alike = chosen.first().is_none_or(|c| c.n == single.n && c.kind == single.kind);
            if alike && chosen.iter().all(|c| c.devices != single.devices) && chosen.len() < 4 {
                chosen.push(single);
            }
        }
        chosen
    }

    fn assemble(&mut self, rng: &mut Rng) -> Request {
        let parts = self.single_shards(rng);
        if parts.is_empty() {
            return self.disassemble(rng);
        }
        let copy = rng.pick(&[CopySemantics::ReuseInput, CopySemantics::DonateInput]);
        let tiled = rng.per_mille(700) && parts.len() > 1;
        let count = parts.len();
        let n = if tiled { parts[0].n * count as i64 } else { parts[0].n };
        let devices: Vec<VirtualDeviceId> = parts.iter().map(|p| p.devices[0]).collect();
        let partition = if tiled { in_order(count) } else { Partition::Replicated };
        let kind = parts[0].kind.clone();
        let inputs: Vec<Handle> = parts.iter().map(|p| p.handle).collect();
        if copy == CopySemantics::DonateInput {
            inputs.iter().for_each(|&h| self.give_up(h));
        }
        let array = self.handle();
        // Parts of different arrays are no replicas, so the result is only read by parts.
        let (partition, layout) = if tiled {
            (partition, Layout::Tiled)
        } else if count == 1 {
            (partition, Layout::Replicated)
        } else {
            (Partition::Opaque, Layout::Even)
        };
        self.arrays.push(Array { handle: array, n, layout, kind: kind.clone(), devices: devices.clone() });
        let sharding = Sharding { devices, partition, memory_kind: kind };
        Request::Assemble { array, dtype: Some(DType::F32), dims: vec![n], sharding, inputs, copy }
    }

    /// The shards of up to two arrays, dealt out to new arrays in another order.
    fn remap(&mut self, rng: &mut Rng) -> Request {
        let many: Vec<Array> = self.arrays.iter().filter(|a| a.devices.len() > 1 && a.layout != Layout::Replicated).cloned().collect();
        if many.is_empty() {
            return self.assemble(rng);
        }
        let array = many[rng.index(many.len())].clone();
        let count = array.devices.len();
        let len = array.n / count as i64;
        let mut order: Vec<usize> = (0..count).collect();
        rng.shuffle(&mut order);
        let cut = rng.between(1, count as u64) as usize;
        let copy = rng.pick(&[CopySemantics::ReuseInput, CopySemantics::DonateInput]);
        if copy == CopySemantics::DonateInput {
            self.give_up(array.handle);
        }
        let (mut outputs, mut mappings, mut results) = (Vec::new(), Vec::new(), Vec::new());
        for part in [&order[..cut], &order[cut..]].into_iter().filter(|p| !p.is_empty()) {
            let devices: Vec<VirtualDeviceId> = part.iter().map(|&i| array.devices[i]).collect();
            let n = len * part.len() as i64;
            let (partition, layout) = match part.len() {
                1 => (Partition::Replicated, Layout::Replicated),
                _ => (Partition::Even { shard_dims: vec![len] }, Layout::Even),
            };
            let output = outputs.len() as u32;
            let sharding = Sharding { devices: devices.clone(), partition, memory_kind: array.kind.clone() };
            outputs.push(ArraySpec { dtype: DType::F32, dims: vec![n], sharding });
            let one = |i: usize| Interval { start: i as i64, end: i as i64 + 1, step: 1 };
            let (from, to) = (part.iter().map(|&i| one(i)).collect(), (0..part.len()).map(one).collect());
            mappings.push(RemapMapping { input: 0, output, from, to });
            let handle = self.handle();
            results.push(handle);
            self.arrays.push(Array { handle, n, layout, kind: array.kind.clone(), devices });
        }
        Request::RemapArrays { arrays: vec![array.handle], results, plan: RemapPlan { outputs, mappings }, copy }
    }

    fn first_shard(&mut self, rng: &mut Rng) -> Request {
        let Some(array) = self.some_array(rng) else { return self.upload(rng) };
        let copy = rng.pick(&[CopySemantics::ReuseInput, CopySemantics::DonateInput]);
        if copy == CopySemantics::DonateInput {
            self.give_up(array.handle);
        }
        let result = self.handle();
        let n = if array.layout == Layout::Replicated { array.n } else { array.n / array.devices.len() as i64 };
        self.arrays.push(Array { handle: result, n, layout: Layout::Replicated, kind: array.kind, devices: array.devices[..1].to_vec() });
        Request::FullyReplicatedShard { array: array.handle, result, copy }
    }

    fn some_handles(&self, max: u64, rng: &mut Rng) -> Vec<Handle> {
        (0..rng.between(1, max)).filter_map(|_| self.some_array(rng)).map(|a| a.handle).collect()
    }

    fn check_ready(&mut self, rng: &mut Rng) -> Request {
        let mut values = self.some_handles(4, rng);
        if rng.per_mille(50) && !self.stale.is_empty() {
            values.push(rng.pick(&self.stale));
        }
        Request::CheckValueReady { values }
    }

    fn fetch(&mut self, rng: &mut Rng) -> Request {
        let Some(array) = self.some_array(rng) else { return self.upload(rng) };
        if array.layout == Layout::Even && rng.per_mille(800) {
            return self.disassemble(rng);
        }
        let host_buffer = self.handle();
        Request::CopyToHost { array: array.handle, host_buffer, byte_strides: None }
    }

    fn destruct(&mut self, rng: &mut Rng) -> Request {
        let mut arrays = self.some_handles(4, rng);
        arrays.sort_unstable();
        arrays.dedup();
        self.arrays.retain(|a| !arrays.contains(&a.handle));
        if rng.per_mille(300) && !self.stale.is_empty() {
            arrays.push(self.stale.swap_remove(rng.index(self.stale.len())));
        }
        Request::DestructArrays { arrays }
    }

    fn delete(&mut self, rng: &mut Rng) -> Request {
        let arrays = self.some_handles(2, rng);
        arrays.iter().for_each(|&h| self.give_up(h));
        Request::DeleteArrays { arrays }
    }

    fn ask_status(&mut self, rng: &mut Rng) -> Request {
        if self.statuses.is_empty() {
            return self.check_ready(rng);
        }
        let status = rng.pick(&self.statuses);
        if rng.per_mille(850) {
            self.statuses.retain(|&s| s != status);
        }
        if rng.per_mille(300) { Request::CheckFuture { future: status } } else { Request::FetchExecuteResult { status } }
    }

    /// Handles that were never there, or are no more; requests that are not understood.
    fn bad(&mut self, rng: &mut Rng) -> Request {
        let gone = if self.stale.is_empty() { Handle(1 << 40) } else { rng.pick(&self.stale) };
        let result = self.handle();
        match rng.below(4) {
            0 => Request::CopyToHost { array: gone, host_buffer: result, byte_strides: None },
            1 => Request::Disassemble { array: gone, results: vec![result], copy: CopySemantics::ReuseInput },
            2 => Request::ExecutableMetadata { executable: Handle(1 << 41) },
            3 => {
                self.stale.push(result);
                Request::MakeErrorArrays { arrays: vec![result], status: Status::invalid("an error of the client's own") }
            }
            _ => {
                self.stale.push(result);
                Request::Refused { status: Status::unimplemented("a request of the future"), results: vec![result], consumes: vec![] }
            }
        }
    }

    fn look(&mut self, rng: &mut Rng) -> Request {
        match rng.below(6) {
            5 if !self.executables.is_empty() => Request::Describe {
                executable: self.executables[rng.index(self.executables.len())].handle,
                question: rng.pick(&[Question::Text, Question::Cost]),
            },
            0 if !self.executables.is_empty() => {
                let executable = self.executables[rng.index(self.executables.len())].handle;
                Request::ExecutableMetadata { executable }
            }
            1 if self.executables.len() > 2 => {
                let executable = self.executables.swap_remove(rng.index(self.executables.len())).handle;
                Request::DestructExecutable { executable }
            }
            2 => Request::DefaultDeviceAssignment { replicas: 1, partitions: rng.between(0, 9) as u32 },
            3 => Request::DefaultLayout {
                dtype: DType::F32,
                dims: vec![rng.pick(&SIZES)],
                device: VirtualDeviceId(rng.index(self.devices.len()) as u32),
                memory_kind: "device".to_owned(),
            },
            _ => match self.some_array(rng) {
                Some(array) => Request::IsArrayDeleted { array: array.handle },
                None => Request::IsArrayDeleted { array: Handle(1 << 40) },
            },
        }
    }
}

/// The arrays and the executable that an error to this request is about.
fn blamed(request: &Request) -> (Vec<Handle>, Option<Handle>) {
    match request {
        Request::CheckValueReady { values } => (values.clone(), None),
        Request::CopyToHost { array, .. } | Request::MakeArray { array, .. } | Request::Assemble { array, .. } => (vec![*array], None),
        Request::Disassemble { results, .. } | Request::CopyArrays { results, .. } | Request::RemapArrays { results, .. } => {
            (results.clone(), None)
        }
        Request::Execute(request) => (request.results.clone(), Some(request.executable)),
        _ => (Vec::new(), None),
    }
}

/// Tiles in device order.
fn in_order(count: usize) -> Partition {
    Partition::Tiled(Tiling { tiles: vec![count as u32], replicas: 1, assignment: (0..count as u32).collect() })
}

/// Tiles in any order.
fn tiling(count: usize, rng: &mut Rng) -> Partition {
    let mut assignment: Vec<u32> = (0..count as u32).collect();
    if rng.per_mille(300) {
        rng.shuffle(&mut assignment);
    }
    Partition::Tiled(Tiling { tiles: vec![count as u32], replicas: 1, assignment })
}
