//! Conversions of the values that messages are made of: status, ids, shardings, topology, compile reports.

use pw_types::*;

use super::convert::{Convert, enumeration, field, messages, must_be_there, required, union};
use super::{CompiledProgram, DecodeError, Reason, pb};

enumeration! {
    DType = pb::DType {
        Pred Pred, S2 S2, S4 S4, S8 S8, S16 S16, S32 S32, S64 S64, U2 U2, U4 U4, U8 U8, U16 U16, U32 U32, U64 U64, F4E2M1FN F4e2m1fn,
        F6E2M3FN F6e2m3fn, F6E3M2FN F6e3m2fn, F8E3M4 F8e3m4, F8E4M3 F8e4m3, F8E4M3FN F8e4m3fn, F8E4M3B11FNUZ F8e4m3b11fnuz,
        F8E4M3FNUZ F8e4m3fnuz, F8E5M2 F8e5m2, F8E5M2FNUZ F8e5m2fnuz, F8E8M0FNU F8e8m0fnu, BF16 Bf16, F16 F16, F32 F32, F64 F64, C64 C64,
        C128 C128, Token Token, String String, Opaque Opaque,
    }
}

enumeration! {
    CopySemantics = pb::CopySemantics { AlwaysCopy AlwaysCopy, ReuseInput ReuseInput, DonateInput DonateInput }
}

enumeration! {
    Question = pb::Question { Text Text, Cost Cost }
}

impl Convert<i32> for Code {
    fn encode(&self) -> i32 {
        *self as i32
    }

    fn decode(proto: i32) -> Result<Code, DecodeError> {
        let code = Code::from_number(proto);
        if code as i32 == proto { Ok(code) } else { Err(DecodeError::new(Reason::Unknown(proto.into()))) }
    }
}

/// Most statuses have no cause; it costs nothing then.
impl Convert<Option<pb::status::Cause>> for Cause {
    fn encode(&self) -> Option<pb::status::Cause> {
        use pb::status::cause::Kind;
        let kind = match self {
            Cause::Unspecified => return None,
            Cause::HostLost { slot, incarnation } => {
                Kind::HostLost(pb::status::HostLost { slot: slot.encode(), incarnation: incarnation.encode() })
            }
            Cause::OutOfMemory => Kind::OutOfMemory(pb::Empty {}),
            Cause::Cancelled => Kind::Cancelled(pb::Empty {}),
            Cause::Limit => Kind::Limit(pb::Empty {}),
        };
        Some(pb::status::Cause { kind: Some(kind) })
    }

    fn decode(proto: Option<pb::status::Cause>) -> Result<Cause, DecodeError> {
        use pb::status::cause::Kind;
        let Some(proto) = proto else { return Ok(Cause::Unspecified) };
        Ok(match proto.kind.ok_or(DecodeError::new(Reason::Missing))? {
            Kind::HostLost(lost) => Cause::HostLost { slot: HostSlot(lost.slot), incarnation: Incarnation(lost.incarnation) },
            Kind::OutOfMemory(_) => Cause::OutOfMemory,
            Kind::Cancelled(_) => Cause::Cancelled,
            Kind::Limit(_) => Cause::Limit,
        })
    }
}

impl Convert<Option<pb::Status>> for Result<(), Status> {
    fn encode(&self) -> Option<pb::Status> {
        self.as_ref().err().map(Convert::encode)
    }

    fn decode(proto: Option<pb::Status>) -> Result<Result<(), Status>, DecodeError> {
        Ok(match proto {
            None => Ok(()),
            Some(status) => Err(Status::decode(status)?),
        })
    }
}

impl Convert<pb::Strides> for Vec<i64> {
    fn encode(&self) -> pb::Strides {
        pb::Strides { bytes: self.clone() }
    }

    fn decode(proto: pb::Strides) -> Result<Vec<i64>, DecodeError> {
        Ok(proto.bytes)
    }
}

impl Convert<pb::Handles> for Vec<Handle> {
    fn encode(&self) -> pb::Handles {
        pb::Handles { handles: self.encode() }
    }

    fn decode(proto: pb::Handles) -> Result<Vec<Handle>, DecodeError> {
        Convert::decode(proto.handles)
    }
}

impl Convert<pb::Costs> for Vec<Cost> {
    fn encode(&self) -> pb::Costs {
        pb::Costs { costs: self.encode() }
    }

    fn decode(proto: pb::Costs) -> Result<Vec<Cost>, DecodeError> {
        Convert::decode(proto.costs)
    }
}

union! {
    Description = pb::Description, kind: pb::description::Kind {
        one [Text, Cost]
        fields []
        none []
    }
}
must_be_there!(Description, pb::Description);

union! {
    Partition = pb::Partition, kind: pb::partition::Kind {
        one [Tiled]
        fields [Even = pb::partition::Even { shard_dims }]
        none [Replicated, Opaque]
    }
}
must_be_there!(Partition, pb::Partition);

messages! {
    Status = pb::Status { code, message, cause }
    Cost = pb::Cost { name, value }
    PhysicalDeviceId = pb::PhysicalDeviceId { slot, index }
    BufferId = pb::BufferId { run, output }
    ShardId = pb::ShardId { buffer, shard }
    Tiling = pb::Tiling { tiles, replicas, assignment }
    Sharding = pb::Sharding { devices, partition, memory_kind }
    ArraySpec = pb::ArraySpec { dtype, dims, sharding }

    WorkerDevice = pb::WorkerDevice { kind, debug_string, memory_kinds, default_memory_kind, memory_bytes }
    WorkerInfo = pb::WorkerInfo { host, pid, build, platform_name, platform_version, data_address, gang_address, island, devices, test_targets }
    SessionOptions = pb::SessionOptions { name, weight, devices }
    SessionDevice = pb::SessionDevice { id, physical, island, platform_name, device }
    SessionView = pb::SessionView { session, platform_name, platform_version, devices }
    WorkerStatus = pb::WorkerStatus { slot, incarnation, info, alive, bytes_reserved, bytes_in_use, granted, traffic }
    Traffic = pb::Traffic { from_clients, to_clients, from_workers, to_workers }
    SessionStatus = pb::SessionStatus { session, name, weight, devices, queued, running, held_bytes, arrays, device_ns }
    GangPart = pb::GangPart { members, here, others }
    GangMember = pb::GangMember { member, device }
    GangPeer = pb::GangPeer { slot, incarnation, address, members }
    StatusReport = pb::StatusReport { workers, sessions, executables }

    ValueSpec = pb::ValueSpec { dtype, shard_dims, dims, layout, memory_kind, op_sharding }
    CompiledMemory = pb::CompiledMemory { arguments, outputs, aliased, temporaries, generated_code }
    CompileReport = pb::CompileReport {
        name, fingerprint, replicas, partitions, parameters, outputs, donated, memory, layouts_error, collectives, host_callbacks
    }
    CompiledProgram = pb::CompiledProgram { report, blob }
}
