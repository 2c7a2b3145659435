//! Shardings and array specs.

use bytes::Bytes;
use prost::Message;
use pw_types::{ArraySpec, Code, Dims, Partition, Sharding, Status, VirtualDeviceId};

use super::{dtype, pb, tiles};

const SINGLE: &str = "xla::ifrt::SingleDeviceSharding";
const HLO: &str = "xla::ifrt::HloSharding";
const EVEN: &str = "xla::ifrt::ConcreteEvenSharding";
const CONCRETE: &str = "xla::ifrt::ConcreteSharding";
const OPAQUE: &str = "xla::ifrt::OpaqueSharding";

pub(super) fn parse<M: Message + Default>(data: Bytes, what: &str) -> Result<M, Status> {
    M::decode(data).map_err(|error| Status::invalid(format!("{what} cannot be decoded: {error}")))
}

/// The dimensions of a shape: none negative, and their product fits 63 bits.
pub(super) fn dims(shape: Option<&pb::ShapeProto>) -> Result<Dims, Status> {
    checked_dims(shape.map(|shape| shape.dims.clone()).unwrap_or_default())
}

pub(super) fn checked_dims(dims: Dims) -> Result<Dims, Status> {
    // Also the bytes of the widest element must be countable.
    match pw_types::dtype::host_bytes(pw_types::DType::C128, &dims) {
        Some(bytes) if i64::try_from(bytes).is_ok() => Ok(dims),
        _ => Err(Status::invalid(format!("the dimensions {dims:?} are negative or too large"))),
    }
}

pub(super) fn device(id: i32) -> Result<VirtualDeviceId, Status> {
    u32::try_from(id).map(VirtualDeviceId).map_err(|_| Status::invalid(format!("there is no device {id}")))
}

pub(super) fn devices(ids: &[i32]) -> Result<Vec<VirtualDeviceId>, Status> {
    ids.iter().map(|&id| device(id)).collect()
}

fn device_list(list: Option<pb::DeviceListProto>) -> Result<Vec<VirtualDeviceId>, Status> {
    let list = list.unwrap_or_default();
    if list.device_ids.is_empty() {
        return Err(Status::invalid("a sharding names no devices"));
    }
    devices(&list.device_ids)
}

/// Absent and empty both mean the device's default memory.
fn kind(kind: Option<String>) -> Option<String> {
    kind.filter(|kind| !kind.is_empty())
}

/// Reads the sharding of an array of these dimensions.
pub fn decode_sharding(proto: Option<&pb::ShardingProto>, dims: &[i64]) -> Result<Sharding, Status> {
    let serialized = proto.and_then(|proto| proto.serialized_sharding.as_ref()).ok_or_else(|| Status::invalid("a sharding is missing"))?;
    let data = serialized.data.clone();
    match serialized.type_name.as_str() {
        SINGLE => {
            let proto: pb::SingleDeviceShardingProto = parse(data, SINGLE)?;
            let devices = vec![device(proto.device_id)?];
            Ok(Sharding { devices, partition: Partition::Replicated, memory_kind: kind(proto.memory_kind) })
        }
        HLO => {
            let proto: pb::HloShardingProto = parse(data, HLO)?;
            let devices = device_list(proto.devices)?;
            let op: pb::OpSharding = parse(proto.xla_op_sharding.unwrap_or_default(), "xla.OpSharding")?;
            let partition = tiles::partition(&op, dims, devices.len())?;
            Ok(Sharding { devices, partition, memory_kind: kind(proto.memory_kind) })
        }
        EVEN => {
            let proto: pb::ConcreteEvenShardingProto = parse(data, EVEN)?;
            let devices = device_list(proto.devices)?;
            let shard_dims = self::dims(proto.shard_shape.as_ref())?;
            let replicated = proto.is_fully_replicated || devices.len() == 1;
            let partition = if replicated { Partition::Replicated } else { Partition::Even { shard_dims } };
            Ok(Sharding { devices, partition, memory_kind: kind(proto.memory_kind) })
        }
        CONCRETE => {
            let proto: pb::ConcreteShardingProto = parse(data, CONCRETE)?;
            let devices = device_list(proto.devices)?;
            let shapes = proto.shard_shapes.iter().map(|shape| self::dims(Some(shape))).collect::<Result<Vec<Dims>, _>>()?;
            let partition = match shapes.split_first() {
                Some((first, rest)) if shapes.len() == devices.len() && rest.iter().all(|shape| shape == first) => {
                    Partition::Even { shard_dims: first.clone() }
                }
                _ => return Err(Status::unimplemented("shards of different or dynamic shapes are not served")),
            };
            Ok(Sharding { devices, partition, memory_kind: kind(proto.memory_kind) })
        }
        OPAQUE => {
            let proto: pb::OpaqueShardingProto = parse(data, OPAQUE)?;
            let devices = device_list(proto.devices)?;
            Ok(Sharding { devices, partition: Partition::Opaque, memory_kind: kind(proto.memory_kind) })
        }
        other => Err(Status::unimplemented(format!("shardings of type {other:?} are not served"))),
    }
}

/// Writes a sharding as the client expects it of outputs: one device plainly, several with their operation sharding.
pub fn encode_sharding(devices: &[VirtualDeviceId], op_sharding: Option<&Bytes>, memory_kind: &str) -> pb::ShardingProto {
    let memory_kind = Some(memory_kind).filter(|kind| !kind.is_empty()).map(str::to_owned);
    let ids: Vec<i32> = devices.iter().map(|id| id.0 as i32).collect();
    let (type_name, data) = match (&ids[..], op_sharding) {
        (&[device_id], None) => (SINGLE, pb::SingleDeviceShardingProto { version_number: 0, device_id, memory_kind }.encode_to_vec()),
        _ => {
            let devices = Some(pb::DeviceListProto { version_number: 0, device_ids: ids });
            let xla_op_sharding = Some(op_sharding.cloned().unwrap_or_default());
            (HLO, pb::HloShardingProto { version_number: 0, devices, memory_kind, xla_op_sharding }.encode_to_vec())
        }
    };
    pb::ShardingProto { serialized_sharding: Some(pb::Serialized { type_name: type_name.to_owned(), data: data.into() }) }
}

/// Reads an array spec. `placed`: the array is made here, so a layout that is not the default must be refused.
pub fn array_spec(proto: Option<&pb::ArraySpecProto>, placed: bool) -> Result<ArraySpec, Status> {
    let proto = proto.ok_or_else(|| Status::invalid("an array spec is missing"))?;
    if placed && proto.layout.as_ref().is_some_and(|layout| !layout.is_empty()) {
        return Err(Status::new(Code::Unimplemented, "arrays with a layout of their own are not served"));
    }
    let dims = dims(proto.shape.as_ref())?;
    let sharding = decode_sharding(proto.sharding.as_ref(), &dims)?;
    Ok(ArraySpec { dtype: dtype::decode(proto.dtype.as_ref())?, dims, sharding })
}
