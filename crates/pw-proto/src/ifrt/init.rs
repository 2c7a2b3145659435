//! The answer to the first request: what devices there are.

use pw_types::{OpId, SessionDevice, SessionView};

use super::{Attribute, Meta, attribute_map, pb, reply};
use pb::init_response::{Device, Memory};

/// Kinds that JAX knows, with fixed numbers; others come behind them in alphabetical order.
const KINDS: [&str; 3] = ["device", "pinned_host", "unpinned_host"];

/// The response to the request that opened the session. `callbacks` is where the client's package opens the channel for host
/// callbacks, as the name of this session.
pub fn encode_init(op: OpId, view: &SessionView, callbacks: Option<&str>, meta: Meta) -> pb::IfrtResponse {
    reply::with_body(op, meta, pb::ifrt_response::Response::InitResponse(init_response(view, callbacks)))
}

/// The devices and memories of a session. All devices are addressable, so that JAX takes the cluster for one process.
pub(super) fn init_response(view: &SessionView, callbacks: Option<&str>) -> pb::InitResponse {
    let mut other: Vec<&str> =
        view.devices.iter().flat_map(|d| &d.device.memory_kinds).map(String::as_str).filter(|kind| !KINDS.contains(kind)).collect();
    other.sort_unstable();
    other.dedup();
    let kind_id = |kind: &str| KINDS.iter().chain(&other).position(|&known| known == kind).unwrap_or(0) as i32;
    let stride = view.devices.iter().map(|d| d.device.memory_kinds.len()).max().unwrap_or(0).max(KINDS.len()) as i32;
    let memory_id = |device: &SessionDevice, index: usize| device.id.0 as i32 * stride + index as i32;

    let all_devices = view.devices.iter().map(|d| device(d, &memory_id)).collect();
    let memories = view.devices.iter().flat_map(|d| {
        let id = d.id.0 as i32;
        d.device.memory_kinds.iter().enumerate().map(move |(index, kind)| Memory {
            id: memory_id(d, index),
            memory_space_kind: kind.clone(),
            kind_id: kind_id(kind),
            device_ids: vec![id],
            debug_string: format!("{kind}[{id}]"),
            to_string: format!("Memory({kind}, device {id})"),
        })
    });
    let ids: Vec<i32> = view.devices.iter().map(|d| d.id.0 as i32).collect();
    pb::InitResponse {
        session_id: view.session.0,
        platform_name: view.platform_name.clone(),
        platform_version: view.platform_version.clone(),
        platform_id: fingerprint(&view.platform_name),
        process_index: 0,
        runtime_type: "pathways-rs".to_owned(),
        all_devices,
        primary_device_ids: ids.clone(),
        addressable_device_ids: ids,
        memories: memories.collect(),
        client_attributes: Some(attribute_map(
            [
                ("serialize_with_sdy", Attribute::Bool(true)),
                ("supports_executable_serialization", Attribute::Bool(false)),
                ("pw_session", Attribute::Int(view.session.0.cast_signed())),
            ]
            .into_iter()
            .chain(callbacks.map(|address| ("pw_control", Attribute::from(address)))),
        )),
    }
}

fn device(d: &SessionDevice, memory_id: &impl Fn(&SessionDevice, usize) -> i32) -> Device {
    let id = d.id.0 as i32;
    let default = d.device.memory_kinds.iter().position(|kind| *kind == d.device.default_memory_kind);
    let attributes = attribute_map([
        ("coords", Attribute::Ints(vec![i64::from(d.physical.index), i64::from(d.physical.slot.0), 0])),
        ("core_on_chip", Attribute::Int(0)),
        ("slice_index", Attribute::Int(i64::from(d.island))),
        ("host_slot", Attribute::Int(i64::from(d.physical.slot.0))),
        ("physical", Attribute::from(&*d.physical.to_string())),
    ]);
    Device {
        id,
        local_device_id: id,
        local_hardware_id: d.physical.index as i32,
        platform_name: d.platform_name.clone(),
        device_kind: d.device.kind.clone(),
        default_memory_id: default.map(|index| memory_id(d, index)),
        memory_ids: (0..d.device.memory_kinds.len()).map(|index| memory_id(d, index)).collect(),
        debug_string: format!("{} ({})", d.device.debug_string, d.physical),
        to_string: format!("PathwaysDevice(id={id})"),
        attributes: Some(attributes),
    }
}

/// A number for a platform's name: FNV-1a. Only equality matters.
fn fingerprint(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}
