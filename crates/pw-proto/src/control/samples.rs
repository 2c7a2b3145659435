//! Values of every kind, for tests.

use std::sync::Arc;

use bytes::Bytes;
use pw_types::*;

use super::frames::*;

/// How many variants an enum has.
pub(super) trait Variants {
    const COUNT: usize;
}

/// All values of an enum without fields.
pub(super) trait All: Sized + 'static {
    const ALL: &[Self];
}

const SESSION: SessionId = SessionId(0xfeed_0000_0000_0001);
const LIFE: Incarnation = Incarnation(u64::MAX - 3);
const TRAFFIC: Traffic = Traffic { from_clients: 1, to_clients: 0, from_workers: u64::MAX, to_workers: 3 };

pub(super) fn statuses() -> Vec<Status> {
    let lost = Cause::HostLost { slot: HostSlot(3), incarnation: LIFE };
    let causes = [Cause::Unspecified, lost, Cause::OutOfMemory, Cause::Cancelled, Cause::Limit];
    let codes = (0..=16).map(|number| Status::new(Code::from_number(number), format!("text {number}, ä")));
    codes.chain(causes.map(|cause| Status::internal("").with_cause(cause))).collect()
}

fn status() -> Status {
    Status::new(Code::DataLoss, "worker 1 is lost").with_cause(Cause::HostLost { slot: HostSlot(1), incarnation: LIFE })
}

fn handles(count: u64) -> Vec<Handle> {
    (0..count).map(|i| Handle(i * FIRST_SERVER_HANDLE)).collect()
}

fn devices(count: u32) -> Vec<VirtualDeviceId> {
    (0..count).map(VirtualDeviceId).collect()
}

fn sharding(partition: Partition, memory_kind: Option<&str>) -> Sharding {
    Sharding { devices: devices(4), partition, memory_kind: memory_kind.map(str::to_owned) }
}

fn tiled() -> Partition {
    Partition::Tiled(Tiling { tiles: vec![2, 1], replicas: 2, assignment: vec![0, 2, 1, 3] })
}

fn spec(partition: Partition) -> ArraySpec {
    ArraySpec { dtype: DType::BF16, dims: vec![8, 0, i64::MAX], sharding: sharding(partition, Some("pinned_host")) }
}

fn source(byte_strides: Option<Vec<i64>>) -> HostSource {
    HostSource { buffer: Handle(9), dtype: DType::F32, dims: vec![2, 3], byte_strides }
}

fn device() -> WorkerDevice {
    WorkerDevice {
        kind: "cpu".into(),
        debug_string: "TFRT_CPU_0".into(),
        memory_kinds: vec!["device".into(), "pinned_host".into()],
        default_memory_kind: "device".into(),
        memory_bytes: Some(0),
    }
}

fn info() -> WorkerInfo {
    WorkerInfo {
        host: "host".into(),
        pid: 77,
        build: "0.1.0 abc".into(),
        platform_name: "cpu".into(),
        platform_version: "1".into(),
        data_address: "127.0.0.1:5".into(),
        gang_address: "127.0.0.1:6".into(),
        island: 2,
        devices: vec![device(), WorkerDevice { memory_bytes: None, ..device() }],
        test_targets: vec!["pw.sleep_us".into()],
    }
}

pub(super) fn report() -> CompileReport {
    let value = |op_sharding| ValueSpec {
        dtype: DType::F8E4M3B11FNUZ,
        shard_dims: vec![4],
        dims: vec![8],
        layout: "{0}".into(),
        memory_kind: "device".into(),
        op_sharding,
    };
    CompileReport {
        name: "jit_f".into(),
        fingerprint: Bytes::from_static(&[0, 255, 1]),
        replicas: 1,
        partitions: 2,
        parameters: vec![value(None), value(Some(Bytes::new()))],
        outputs: vec![value(Some(Bytes::from_static(b"sharding")))],
        donated: vec![0],
        memory: CompiledMemory { arguments: 1, outputs: 2, aliased: 3, temporaries: 4, generated_code: u64::MAX },
        layouts_error: Some(status()),
        collectives: 5,
        host_callbacks: true,
    }
}

fn order() -> NodeOrder {
    NodeOrder { run: RunId(5), seq: GrantSeq(6), previous: GrantSeq(0), session: SESSION }
}

fn shard(shard: u32) -> ShardId {
    ShardId { buffer: BufferId { run: RunId(1), output: 2 }, shard }
}

pub(super) fn commands() -> Vec<Command> {
    let region = Region { start: vec![0, 4], dims: vec![2, 4] };
    let target = HostWriteTarget { shard: 0, device: 1, region: None };
    let write = HostWriteSource {
        buffer: Handle(3),
        dtype: DType::S4,
        dims: vec![],
        byte_strides: Some(vec![]),
        targets: vec![target.clone(), HostWriteTarget { region: Some(region.clone()), ..target }],
    };
    let piece = HostReadPiece { source: shard(1), region: None };
    let read = HostRead {
        order: order(),
        buffer: Handle(4),
        dtype: DType::C128,
        dims: vec![4, 8],
        byte_strides: Some(vec![-8, 0]),
        pieces: vec![piece.clone(), HostReadPiece { region: Some(region), ..piece }],
    };
    let compile = CompileCommand {
        executable: ExecutableId(1),
        program: Bytes::from_static(b"module"),
        options: Bytes::new(),
        devices: vec![1, 0],
        replicas: 2,
        partitions: 1,
    };
    let segment = Segment { buffer: BufferId { run: RunId(9), output: 0 }, first: 1, count: 2 };
    let launch = Launch {
        order: order(),
        executable: ExecutableId(7),
        arguments: vec![Argument { segments: vec![segment, segment], donate: true }, Argument { segments: vec![], donate: false }],
        launch_id: -1,
    };
    let copy = CopyShards { order: order(), items: vec![CopyItem { source: shard(0), device: 3 }], memory_kind: Some("device".into()) };
    let items = vec![SendItem { source: shard(3), buffer: Handle(u64::MAX) }];
    let send = SendShards { order: order(), address: "host:1".into(), receiver: Incarnation(8), sender: SessionId(9), items };
    vec![
        Command::Compile(compile),
        Command::Load { executable: ExecutableId(1), fingerprint: Bytes::from_static(b"f"), gang: None },
        Command::Load { executable: ExecutableId(2), fingerprint: Bytes::from_static(b"g"), gang: Some(gang()) },
        Command::Unload { executable: ExecutableId(u64::MAX) },
        Command::Launch(launch),
        Command::Copy(copy.clone()),
        Command::Copy(CopyShards { memory_kind: None, ..copy }),
        Command::HostWrite(HostWrite { order: order(), sender: SESSION, sources: vec![write], memory_kind: None, shards: 2 }),
        Command::Send(send),
        Command::HostRead(read.clone()),
        Command::HostRead(HostRead { byte_strides: None, ..read }),
        Command::Free { buffers: vec![BufferId { run: RunId(1), output: 0 }, BufferId { run: RunId(0), output: 1 }] },
        Command::Cancel { runs: vec![RunId(1), RunId(2)], status: status() },
        Command::Describe { query: 1, fingerprint: Bytes::from_static(b"f"), question: Question::Text },
        Command::Describe { query: 2, fingerprint: Bytes::new(), question: Question::Cost },
        Command::DefaultLayout { query: 1, dtype: DType::Pred, dims: vec![1] },
    ]
}

fn costs() -> Description {
    let cost = |name: &str, value| Cost { name: name.into(), value };
    Description::Cost(vec![cost("flops", 1024.0), cost("optimal_seconds", -0.5)])
}

pub(super) fn reports() -> Vec<Report> {
    let executable = ExecutableId(4);
    vec![
        Report::Compiled { executable, result: Ok(Arc::new(report())) },
        Report::Compiled { executable, result: Err(status()) },
        Report::Loaded { executable, result: Ok(()) },
        Report::Loaded { executable, result: Err(status()) },
        Report::Finished { run: RunId(1), device_ns: 5, result: Ok(()) },
        Report::Finished { run: RunId(1), device_ns: 0, result: Err(status()) },
        Report::Described { query: 1, result: Ok(Description::Text("HloModule f".into())) },
        Report::Described { query: 2, result: Ok(costs()) },
        Report::Described { query: 3, result: Err(status()) },
        Report::DefaultLayout { query: 1, result: Ok(String::new()) },
        Report::DefaultLayout { query: 2, result: Err(status()) },
        Report::Memory { bytes_in_use: vec![0, 1, u64::MAX] },
        Report::Traffic(TRAFFIC),
        Report::Late { run: RunId(3), on: HostSlot(1) },
    ]
}

pub(super) fn requests() -> Vec<Request> {
    let (array, result) = (Handle(1), Handle(2));
    let (arrays, results) = (handles(3), handles(2));
    let even = Partition::Even { shard_dims: vec![2, 2] };
    let copy = CopySemantics::DonateInput;
    let shards = vec![UploadShard { source: source(Some(vec![4, -4])), positions: vec![0, 3] }];
    let interval = Interval { start: 0, end: 4, step: 2 };
    let mapping = RemapMapping { input: 0, output: 1, from: vec![interval], to: vec![Interval { start: -1, ..interval }] };
    let copy_arrays = |memory| Request::CopyArrays { arrays: handles(3), results: handles(2), devices: devices(2), memory, copy };
    let assemble = |dtype| Request::Assemble {
        array,
        dtype,
        dims: vec![8],
        sharding: sharding(Partition::Opaque, None),
        inputs: handles(2),
        copy: CopySemantics::ReuseInput,
    };
    let compile = CompileRequest {
        program: Bytes::from_static(b"ML\xefR"),
        options: Bytes::from_static(b"options"),
        devices: devices(2),
        replicas: 1,
        partitions: 2,
    };
    let execute = ExecuteRequest {
        executable: Handle(5),
        arguments: handles(100),
        results: vec![],
        status: Handle(0),
        fill_status: true,
        launch_id: i32::MIN,
        non_donatable: vec![0, 99],
    };
    vec![
        Request::CheckFuture { future: Handle(0) },
        Request::CheckValueReady { values: arrays.clone() },
        Request::MakeArray { array, spec: spec(Partition::Replicated), source: source(None) },
        Request::MakeArraysFromShards { arrays: vec![ShardedUpload { array, spec: spec(tiled()), shards }] },
        assemble(None),
        assemble(Some(DType::String)),
        Request::Disassemble { array, results: results.clone(), copy: CopySemantics::AlwaysCopy },
        Request::FullyReplicatedShard { array, result, copy },
        Request::CopyToHost { array, host_buffer: Handle(u64::MAX), byte_strides: Some(vec![8, 1]) },
        copy_arrays(MemoryTarget::Keep),
        copy_arrays(MemoryTarget::Default),
        copy_arrays(MemoryTarget::Kind(String::new())),
        Request::RemapArrays {
            arrays: arrays.clone(),
            results: results.clone(),
            plan: RemapPlan { outputs: vec![spec(even)], mappings: vec![mapping] },
            copy,
        },
        Request::MakeErrorArrays { arrays: arrays.clone(), status: status() },
        Request::BitcastArrays { arrays: handles(1), results: handles(1), specs: vec![spec(tiled())], copy },
        Request::DeleteArrays { arrays: arrays.clone() },
        Request::IsArrayDeleted { array },
        Request::DestructArrays { arrays: arrays.clone() },
        Request::Compile(compile),
        Request::ExecutableMetadata { executable: Handle(3) },
        Request::Execute(execute),
        Request::FetchExecuteResult { status: Handle(3) },
        Request::DestructExecutable { executable: Handle(3) },
        Request::Describe { executable: Handle(3), question: Question::Text },
        Request::Describe { executable: Handle(3), question: Question::Cost },
        Request::DefaultLayout { dtype: DType::U2, dims: vec![], device: VirtualDeviceId(1), memory_kind: "device".into() },
        Request::DefaultDeviceAssignment { replicas: 1, partitions: 8 },
        Request::Refused { status: status(), results, consumes: arrays },
    ]
}

pub(super) fn replies() -> Vec<Reply> {
    let compiled = CompileReply { executable: Handle(1), name: "jit_f".into(), devices: devices(2), fingerprint: Bytes::from_static(b"f") };
    let output = |op_sharding| ExecuteOutput {
        array: Handle(FIRST_SERVER_HANDLE),
        dtype: DType::F64,
        dims: vec![2],
        op_sharding,
        devices: devices(2).into(),
        memory_kind: "device".into(),
    };
    vec![
        Reply::CheckFuture,
        Reply::CheckValueReady,
        Reply::MakeArray(Handle(1)),
        Reply::MakeArraysFromShards(handles(2)),
        Reply::Assemble(Handle(0)),
        Reply::Disassemble(vec![]),
        Reply::FullyReplicatedShard(Handle(3)),
        Reply::CopyToHost,
        Reply::CopyArrays(handles(2)),
        Reply::RemapArrays(handles(1)),
        Reply::MakeErrorArrays(handles(2)),
        Reply::BitcastArrays(handles(1)),
        Reply::DeleteArrays(Handle(7)),
        Reply::IsArrayDeleted(true),
        Reply::IsArrayDeleted(false),
        Reply::DestructArrays,
        Reply::Compile(compiled),
        Reply::ExecutableMetadata(Arc::new(report())),
        Reply::Execute(ExecuteReply { status: Handle(1), outputs: vec![output(None), output(Some(Bytes::new()))] }),
        Reply::Execute(ExecuteReply { status: Handle(0), outputs: vec![] }),
        Reply::FetchExecuteResult,
        Reply::DestructExecutable,
        Reply::Described { question: Question::Cost, result: Ok(costs()) },
        Reply::Described { question: Question::Text, result: Err(status()) },
        Reply::DefaultLayout("{1,0}".into()),
        Reply::DefaultDeviceAssignment { replicas: 1, partitions: 2, devices: devices(2) },
    ]
}

pub(super) fn view() -> SessionView {
    let device = SessionDevice {
        id: VirtualDeviceId(0),
        physical: PhysicalDeviceId { slot: HostSlot(1), index: 2 },
        island: 0,
        platform_name: "cpu".into(),
        device: device(),
    };
    SessionView { session: SESSION, platform_name: "cpu".into(), platform_version: String::new(), devices: vec![device] }
}

pub(super) fn to_edge() -> Vec<ToEdge> {
    let (session, buffer) = (SESSION, Handle(5));
    let (slot, incarnation) = (HostSlot(2), LIFE);
    let mut all = vec![
        ToEdge::SessionReady(view()),
        ToEdge::SessionRefused { session, status: status() },
        ToEdge::Reply { session, op: OpId(1), result: Err(status()) },
        ToEdge::Consumed { session, count: 3 },
        ToEdge::Pause { session, paused: true },
        ToEdge::Route { session, buffer, bytes: 1 << 40, hosts: vec![HostSlot(0), HostSlot(3)] },
        ToEdge::Discard { session, buffer },
        ToEdge::CloseSession { session, status: status() },
        ToEdge::WorkerUp { slot, incarnation, data_address: "h:1".into() },
        ToEdge::WorkerDown { slot, incarnation },
    ];
    all.extend(replies().into_iter().map(|reply| ToEdge::Reply { session, op: OpId(u64::MAX), result: Ok(reply) }));
    all
}

pub(super) fn events() -> Vec<Event> {
    let (session, slot, incarnation) = (SESSION, HostSlot(2), LIFE);
    let hello = |wanted_slot| Event::WorkerHello { connection: 1, incarnation, wanted_slot, info: info() };
    let options = |devices| SessionOptions { name: "train".into(), weight: 2, devices };
    let mut all = vec![
        hello(None),
        hello(Some(HostSlot(0))),
        Event::WorkerLost { slot, incarnation, reason: "lease".into() },
        Event::SessionOpened { session, options: options(None) },
        Event::SessionOpened { session, options: options(Some(0)) },
        Event::SessionClosed { session, reason: String::new() },
        Event::HostBufferFailed { session, buffer: Handle(1), status: status() },
        Event::StatusQuery { query: 1 },
        Event::Tick,
        Event::EndOfTurn,
    ];
    all.extend(reports().into_iter().map(|report| Event::Report { slot, incarnation, report }));
    all.extend(requests().into_iter().map(|request| Event::Request { session, op: OpId(1), bytes: u32::MAX, request }));
    all
}

fn gang() -> GangPart {
    GangPart {
        members: 3,
        here: vec![GangMember { member: 1, device: 0 }],
        others: vec![GangPeer { slot: HostSlot(2), incarnation: LIFE, address: "h:3".into(), members: vec![0, 2] }],
    }
}

pub(super) fn status_report() -> StatusReport {
    let worker = WorkerStatus {
        slot: HostSlot(1),
        incarnation: LIFE,
        info: info(),
        alive: true,
        bytes_reserved: vec![1, 0],
        bytes_in_use: vec![],
        granted: 7,
        traffic: TRAFFIC,
    };
    let session = SessionStatus {
        session: SESSION,
        name: "train".into(),
        weight: 1,
        devices: 2,
        queued: 3,
        running: 4,
        held_bytes: 5,
        arrays: 6,
        device_ns: 7,
    };
    StatusReport { workers: vec![worker], sessions: vec![session], executables: 8 }
}

pub(super) fn hellos() -> Vec<Hello> {
    let worker = |wanted_slot, resumes| {
        let (build, token) = ("b".into(), "t".into());
        Hello::Worker { build, token, incarnation: LIFE, wanted_slot, info: info(), resumes }
    };
    vec![worker(None, None), worker(Some(HostSlot(4)), Some(0)), Hello::Status { build: "b".into(), token: String::new() }]
}

pub(super) fn answers() -> Vec<Answer> {
    vec![
        Answer::Welcome { slot: HostSlot(0), incarnation: LIFE, received: 9 },
        Answer::Refused { status: status() },
        Answer::Status { report: status_report() },
    ]
}

pub(super) fn log_records() -> Vec<LogRecord> {
    let record = |event| LogRecord { time: Time(u64::MAX), event, effects_digest: None };
    let end = LogRecord { time: Time(0), event: Event::EndOfTurn, effects_digest: Some(0) };
    events().into_iter().map(record).chain([end]).collect()
}

pub(super) fn controller_frame() -> ControllerFrame {
    ControllerFrame { seq: 1, ack: 0, incarnation: LIFE, commands: commands() }
}

pub(super) fn worker_frame() -> WorkerFrame {
    WorkerFrame { seq: u64::MAX, ack: 1, incarnation: LIFE, reports: reports() }
}

pub(super) fn compile_child() -> (CompileChildRequest, Vec<CompileChildResponse>) {
    let request = CompileChildRequest {
        id: 1,
        program: Bytes::from_static(b"p"),
        options: Bytes::from_static(b"o"),
        devices: vec![0, 1],
        replicas: 1,
        partitions: 2,
    };
    let program = CompiledProgram { report: report(), blob: "cache/key".into() };
    (request, vec![CompileChildResponse { id: 1, result: Ok(program) }, CompileChildResponse { id: 2, result: Err(status()) }])
}
