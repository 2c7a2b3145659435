//! The object directory: every backing, who owns it, and the logical arrays that are made of backings (invariant A7).
//!
//! A backing lives while a handle or a node that is not granted refers to it. The ledger counts it from the grant
//! of the node that makes it until its last reference goes: order time, not wall time.

use std::sync::Arc;

use pw_types::{ArraySpec, BufferId, DType, Dims, HostSlot, Incarnation, Partition, SessionId, Status, VirtualDeviceId, dtype::describe};
use slotmap::SlotMap;
use smallvec::SmallVec;

use crate::membership::DeviceKey;

slotmap::new_key_type! {
    /// A backing in the directory; stale keys are recognised.
    pub(crate) struct BackingKey;
}

/// What one node output is, over all its devices.
pub(crate) struct Backing {
    pub(crate) id: BufferId,
    pub(crate) state: BackingState,
    /// The node that makes it has its place in the order, and its command went out.
    pub(crate) granted: bool,
    /// Segments of live arrays.
    pub(crate) handle_refs: u32,
    /// Nodes that consume it and are not granted.
    pub(crate) queued_refs: u32,
    pub(crate) owner: SessionId,
    /// Who made it, for messages: a program's name, or `upload`, `copy`.
    pub(crate) label: Arc<str>,
    pub(crate) dtype: DType,
    pub(crate) shard_dims: Arc<[i64]>,
    /// Device of each shard.
    pub(crate) devices: Arc<[DeviceKey]>,
    /// Hosts that hold a part, with the life of the worker that was told.
    pub(crate) hosts: SmallVec<[(HostSlot, Incarnation); 1]>,
    /// Those of them that failed to make theirs.
    pub(crate) failed: SmallVec<[HostSlot; 1]>,
    /// Bytes of one shard in the ledger; 0 where it lies in host memory.
    pub(crate) ledger_bytes: u64,
    /// The ledger counts it now.
    pub(crate) counted: bool,
}

#[derive(Clone)]
pub(crate) enum BackingState {
    Promised,
    Ready,
    Poisoned(Arc<Status>),
}

/// Shards `first .. first + count` of a backing, part of a logical array.
#[derive(Clone, Copy)]
pub(crate) struct Piece {
    pub(crate) backing: BackingKey,
    pub(crate) first: u32,
    pub(crate) count: u32,
}

/// A logical buffer: the shards of its pieces one after the other.
#[derive(Clone)]
pub(crate) struct Array {
    pub(crate) dtype: DType,
    /// Global dimensions.
    pub(crate) dims: Arc<[i64]>,
    pub(crate) partition: Arc<Partition>,
    pub(crate) memory_kind: Option<Arc<str>>,
    /// Where the shards really are, in shard order.
    pub(crate) devices: Arc<[VirtualDeviceId]>,
    pub(crate) pieces: SmallVec<[Piece; 1]>,
}

/// What a client's array handle stands for.
pub(crate) enum Entry {
    Array(Array),
    /// Made by a request that failed.
    Poisoned(Arc<Status>),
    /// Deleted or donated; the handle lives until it is destructed.
    Deleted,
}

impl Array {
    pub(crate) fn shards(&self) -> usize {
        self.devices.len()
    }

    /// Shard `index` as a piece of one.
    pub(crate) fn shard(&self, index: usize) -> Option<Piece> {
        let mut left = index as u32;
        for piece in &self.pieces {
            if left < piece.count {
                return Some(Piece { backing: piece.backing, first: piece.first + left, count: 1 });
            }
            left -= piece.count;
        }
        None
    }

    /// The spec, for planning.
    pub(crate) fn spec(&self) -> ArraySpec {
        ArraySpec {
            dtype: self.dtype,
            dims: self.dims.to_vec(),
            sharding: pw_types::Sharding {
                devices: self.devices.to_vec(),
                partition: (*self.partition).clone(),
                memory_kind: self.memory_kind.as_deref().map(str::to_owned),
            },
        }
    }
}

/// Adds a piece, joining it to the last one where they touch, so that an array stays a short list.
pub(crate) fn push_piece(pieces: &mut SmallVec<[Piece; 1]>, piece: Piece) {
    if let Some(last) = pieces.last_mut()
        && last.backing == piece.backing
        && last.first + last.count == piece.first
    {
        last.count += piece.count;
        return;
    }
    pieces.push(piece);
}

#[derive(Default)]
pub(crate) struct Directory {
    pub(crate) backings: SlotMap<BackingKey, Backing>,
}

impl Directory {
    pub(crate) fn get(&self, key: BackingKey) -> &Backing {
        &self.backings[key]
    }

    pub(crate) fn add_handle_refs(&mut self, array: &Array) {
        for piece in &array.pieces {
            self.backings[piece.backing].handle_refs += 1;
        }
    }

    /// The first fault among an array's backings.
    pub(crate) fn fault(&self, array: &Array) -> Option<Arc<Status>> {
        array.pieces.iter().find_map(|p| match &self.backings[p.backing].state {
            BackingState::Poisoned(status) => Some(status.clone()),
            _ => None,
        })
    }
}

/// Bytes that one shard takes on a device: types below a byte are packed.
pub(crate) fn device_bytes(dtype: DType, dims: &[i64]) -> Option<u64> {
    let elements = pw_types::dtype::element_count(dims)?;
    match dtype {
        DType::S4 | DType::U4 | DType::F4E2M1FN => Some(elements.div_ceil(2)),
        DType::S2 | DType::U2 => Some(elements.div_ceil(4)),
        _ => elements.checked_mul(dtype.host_bytes()),
    }
}

/// `200 MiB`, `1.5 GiB`: for messages.
pub(crate) fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 || value.fract() == 0.0 { format!("{value:.0} {}", UNITS[unit]) } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// `f32[8,16] of jit_f`.
pub(crate) fn describe_backing(backing: &Backing) -> String {
    let dims: Dims = backing.shard_dims.to_vec();
    format!("{} from {}", describe(backing.dtype, &dims), backing.label)
}
