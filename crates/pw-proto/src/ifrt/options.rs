//! What must be known of `xla.CompileOptionsProto` before the worker sees it. The rest is passed on byte by byte.

use bytes::Bytes;
use prost::Message;
use pw_types::{Status, VirtualDeviceId};

use super::pb;
use super::wire::{Fields, Malformed, Value};

/// Field numbers on the way to the device assignment.
mod field {
    pub(super) const COMPILE_OPTIONS: u32 = 1;
    pub(super) const BUILD_OPTIONS: u32 = 3;
    pub(super) const NUM_REPLICAS: u32 = 4;
    pub(super) const NUM_PARTITIONS: u32 = 5;
    pub(super) const DEVICE_ASSIGNMENT: u32 = 9;
}

/// The placement that a compile asks for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CompileOptions {
    /// `xla.CompileOptionsProto`, untouched.
    pub options: Bytes,
    pub replicas: u32,
    pub partitions: u32,
    /// For each replica, for each partition.
    pub devices: Vec<VirtualDeviceId>,
}

/// Reads an `XlaCompileOptionsProto`, the payload of a compile request.
pub fn compile_options(data: Bytes) -> Result<CompileOptions, Status> {
    let bad = |_: Malformed| Status::invalid("the compile options cannot be decoded");
    let options = message(data, field::COMPILE_OPTIONS).map_err(bad)?;
    let build = message(options.clone(), field::BUILD_OPTIONS).map_err(bad)?;
    let (mut replicas, mut partitions) = (1, 1);
    for entry in Fields::of(build.clone()) {
        match entry.map_err(bad)? {
            // 0 is "not set".
            (field::NUM_REPLICAS, Value::Varint(n)) => replicas = n.max(1),
            (field::NUM_PARTITIONS, Value::Varint(n)) => partitions = n.max(1),
            _ => {}
        }
    }
    let assignment = message(build, field::DEVICE_ASSIGNMENT).map_err(bad)?;
    if assignment.is_empty() {
        return Err(Status::invalid("the compile options name no devices"));
    }
    let assignment = pb::DeviceAssignmentProto::decode(assignment).map_err(|_| bad(Malformed))?;
    let rows = &assignment.computation_devices;
    let fits = rows.len() as u64 == partitions && rows.iter().all(|row| row.replica_device_ids.len() as u64 == replicas);
    let (Ok(replicas), Ok(partitions), true) = (u32::try_from(replicas), u32::try_from(partitions), fits) else {
        return Err(Status::invalid(format!("the device assignment does not have {partitions} partitions of {replicas} replicas")));
    };
    let mut devices = Vec::with_capacity(rows.len());
    for replica in 0..replicas as usize {
        for row in rows {
            let id = row.replica_device_ids[replica];
            devices.push(VirtualDeviceId(u32::try_from(id).map_err(|_| Status::invalid(format!("there is no device {id}")))?));
        }
    }
    let mut sorted = devices.clone();
    sorted.sort_unstable();
    if sorted.windows(2).any(|pair| pair[0] == pair[1]) {
        return Err(Status::invalid("the device assignment names a device twice"));
    }
    Ok(CompileOptions { options, replicas, partitions, devices })
}

/// The embedded message of this number; its parts joined when it comes in several, empty when absent.
fn message(data: Bytes, number: u32) -> Result<Bytes, Malformed> {
    let mut found = Bytes::new();
    for entry in Fields::of(data) {
        match entry? {
            (n, Value::Len(bytes)) if n == number => found = if found.is_empty() { bytes } else { [found, bytes].concat().into() },
            _ => {}
        }
    }
    Ok(found)
}
