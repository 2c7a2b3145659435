//! Conversions of the closed enums that cross a seam, and of the frames around them.

use std::sync::Arc;

use pw_types::*;

use super::convert::{Convert, field, messages, must_be_there, required, result, union};
use super::frames::*;
use super::{DecodeError, Reason, pb};

messages! {
    NodeOrder = pb::NodeOrder { run, seq, previous, session }
    Segment = pb::Segment { buffer, first, count }
    Argument = pb::Argument { segments, donate }
    Region = pb::Region { start, dims }
    CompileCommand = pb::CompileCommand { executable, program, options, devices, replicas, partitions }
    Launch = pb::Launch { order, executable, arguments, launch_id }
    CopyItem = pb::CopyItem { source, device }
    CopyShards = pb::CopyShards { order, items, memory_kind }
    HostWriteTarget = pb::HostWriteTarget { shard, device, region }
    HostWriteSource = pb::HostWriteSource { buffer, dtype, dims, byte_strides, targets }
    HostWrite = pb::HostWrite { order, sender, sources, memory_kind, shards }
    SendItem = pb::SendItem { source, buffer }
    SendShards = pb::SendShards { order, address, receiver, sender, items }
    HostReadPiece = pb::HostReadPiece { source, region }
    HostRead = pb::HostRead { order, buffer, dtype, dims, byte_strides, pieces }

    HostSource = pb::HostSource { buffer, dtype, dims, byte_strides }
    UploadShard = pb::UploadShard { source, positions }
    ShardedUpload = pb::ShardedUpload { array, spec, shards }
    Interval = pb::Interval { start, end, step }
    RemapMapping = pb::RemapMapping { input, output, from, to }
    RemapPlan = pb::RemapPlan { outputs, mappings }
    CompileRequest = pb::CompileRequest { program, options, devices, replicas, partitions }
    ExecuteRequest = pb::ExecuteRequest { executable, arguments, results, status, fill_status, launch_id, non_donatable }

    CompileReply = pb::CompileReply { executable, name, devices, fingerprint }
    ExecuteOutput = pb::ExecuteOutput { array, dtype, dims, op_sharding, devices, memory_kind }
    ExecuteReply = pb::ExecuteReply { status, outputs }

    LogRecord = pb::LogRecord { time, event, effects_digest }
    ControllerFrame = pb::ControllerFrame { seq, ack, incarnation, commands }
    WorkerFrame = pb::WorkerFrame { seq, ack, incarnation, reports }
    CompileChildRequest = pb::CompileChildRequest { id, program, options, devices, replicas, partitions }
    CompileChildResponse = pb::CompileChildResponse { id, result }
}

result!(Arc<CompileReport>, pb::CompileResult, pb::compile_result::Kind);
result!(String, pb::LayoutResult, pb::layout_result::Kind);
result!(Description, pb::DescriptionResult, pb::description_result::Kind);
result!(Reply, pb::ReplyResult, pb::reply_result::Kind);
result!(CompiledProgram, pb::CompiledProgramResult, pb::compiled_program_result::Kind);

union! {
    Command = pb::Command, kind: pb::command::Kind {
        one [Compile, Launch, Copy, HostWrite, HostRead, Send]
        fields [
            Load = pb::command::Load { executable, fingerprint, gang },
            Unload = pb::command::Unload { executable },
            Free = pb::command::Free { buffers },
            Cancel = pb::command::Cancel { runs, status },
            DefaultLayout = pb::command::DefaultLayout { query, dtype, dims },
            Describe = pb::command::Describe { query, fingerprint, question },
        ]
        none []
    }
}

union! {
    Report = pb::Report, kind: pb::report::Kind {
        one [Traffic]
        fields [
            Compiled = pb::report::Compiled { executable, result },
            Loaded = pb::report::Loaded { executable, result },
            Finished = pb::report::Finished { run, device_ns, result },
            DefaultLayout = pb::report::DefaultLayout { query, result },
            Described = pb::report::Described { query, result },
            Memory = pb::report::Memory { bytes_in_use },
            Late = pb::report::Late { run, on },
        ]
        none []
    }
}
must_be_there!(Report, pb::Report);

union! {
    MemoryTarget = pb::MemoryTarget, target: pb::memory_target::Target {
        one [Kind]
        fields []
        none [Keep, Default]
    }
}
must_be_there!(MemoryTarget, pb::MemoryTarget);

union! {
    Request = pb::Request, kind: pb::request::Kind {
        one [Compile, Execute]
        fields [
            CheckFuture = pb::request::CheckFuture { future },
            CheckValueReady = pb::request::CheckValueReady { values },
            MakeArray = pb::request::MakeArray { array, spec, source },
            MakeArraysFromShards = pb::request::MakeArraysFromShards { arrays },
            Assemble = pb::request::Assemble { array, dtype, dims, sharding, inputs, copy },
            Disassemble = pb::request::Disassemble { array, results, copy },
            FullyReplicatedShard = pb::request::FullyReplicatedShard { array, result, copy },
            CopyToHost = pb::request::CopyToHost { array, host_buffer, byte_strides },
            CopyArrays = pb::request::CopyArrays { arrays, results, devices, memory, copy },
            RemapArrays = pb::request::RemapArrays { arrays, results, plan, copy },
            MakeErrorArrays = pb::request::MakeErrorArrays { arrays, status },
            BitcastArrays = pb::request::BitcastArrays { arrays, results, specs, copy },
            DeleteArrays = pb::request::Arrays { arrays },
            IsArrayDeleted = pb::request::IsArrayDeleted { array },
            DestructArrays = pb::request::Arrays { arrays },
            ExecutableMetadata = pb::request::Executable { executable },
            FetchExecuteResult = pb::request::FetchExecuteResult { status },
            Describe = pb::request::Describe { executable, question },
            DestructExecutable = pb::request::Executable { executable },
            DefaultLayout = pb::request::DefaultLayout { dtype, dims, device, memory_kind },
            DefaultDeviceAssignment = pb::request::DefaultDeviceAssignment { replicas, partitions },
            Refused = pb::request::Refused { status, results, consumes },
        ]
        none []
    }
}
must_be_there!(Request, pb::Request);

union! {
    Reply = pb::Reply, kind: pb::reply::Kind {
        one [
            MakeArray, MakeArraysFromShards, Assemble, Disassemble, FullyReplicatedShard, CopyArrays, RemapArrays, DeleteArrays,
            IsArrayDeleted, Compile, ExecutableMetadata, Execute, DefaultLayout, MakeErrorArrays, BitcastArrays,
        ]
        fields [
            DefaultDeviceAssignment = pb::reply::DefaultDeviceAssignment { replicas, partitions, devices },
            Described = pb::reply::Described { question, result },
        ]
        none [CheckFuture, CheckValueReady, CopyToHost, DestructArrays, FetchExecuteResult, DestructExecutable]
    }
}

union! {
    ToEdge = pb::ToEdge, kind: pb::to_edge::Kind {
        one [SessionReady]
        fields [
            SessionRefused = pb::to_edge::SessionRefused { session, status },
            Reply = pb::to_edge::Answer { session, op, result },
            Consumed = pb::to_edge::Consumed { session, count },
            Pause = pb::to_edge::Pause { session, paused },
            Route = pb::to_edge::Route { session, buffer, bytes, hosts },
            Discard = pb::to_edge::Discard { session, buffer },
            CloseSession = pb::to_edge::CloseSession { session, status },
            WorkerUp = pb::to_edge::WorkerUp { slot, incarnation, data_address },
            WorkerDown = pb::to_edge::WorkerDown { slot, incarnation },
        ]
        none []
    }
}

union! {
    Event = pb::Event, kind: pb::event::Kind {
        one []
        fields [
            WorkerHello = pb::event::WorkerHello { connection, incarnation, wanted_slot, info },
            WorkerLost = pb::event::WorkerLost { slot, incarnation, reason },
            Report = pb::event::FromWorker { slot, incarnation, report },
            SessionOpened = pb::event::SessionOpened { session, options },
            SessionClosed = pb::event::SessionClosed { session, reason },
            Request = pb::event::FromClient { session, op, bytes, request },
            HostBufferFailed = pb::event::HostBufferFailed { session, buffer, status },
            StatusQuery = pb::event::StatusQuery { query },
        ]
        none [Tick, EndOfTurn]
    }
}
must_be_there!(Event, pb::Event);

union! {
    Hello = pb::Hello, kind: pb::hello::Kind {
        one []
        fields [
            Worker = pb::hello::Worker { build, token, incarnation, wanted_slot, info, resumes },
            Status = pb::hello::Query { build, token },
        ]
        none []
    }
}

union! {
    Answer = pb::Answer, kind: pb::answer::Kind {
        one []
        fields [
            Welcome = pb::answer::Welcome { slot, incarnation, received },
            Refused = pb::answer::Refused { status },
            Status = pb::answer::Snapshot { report },
        ]
        none []
    }
}
