//! How one array lies over devices.

use crate::{DType, VirtualDeviceId};

/// Dimensions of an array, outermost first, in elements.
pub type Dims = Vec<i64>;

/// An array's element type, global dimensions and sharding.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct ArraySpec {
    pub dtype: DType,
    pub dims: Dims,
    pub sharding: Sharding,
}

/// Devices in shard order, and what part each one holds.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Sharding {
    /// Shard `i` lives on `devices[i]`.
    pub devices: Vec<VirtualDeviceId>,
    pub partition: Partition,
    /// `device`, `pinned_host`, `unpinned_host`; `None` is the device's default.
    pub memory_kind: Option<String>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Partition {
    /// Every device holds the whole array. Also a single device.
    Replicated,
    /// Equal tiles.
    Tiled(Tiling),
    /// Only the shape of a shard is known, not its place in the array.
    Even { shard_dims: Dims },
    /// Nothing but the devices is known.
    Opaque,
}

/// A grid of tiles over the array's dimensions.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Tiling {
    /// Number of tiles along each dimension of the array; same length as its dims.
    pub tiles: Vec<u32>,
    /// How many devices hold each tile.
    pub replicas: u32,
    /// Row-major over (tiles…, replica): the position in the device list that holds it.
    pub assignment: Vec<u32>,
}

/// What an operation may do with its input's storage.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CopySemantics {
    AlwaysCopy,
    ReuseInput,
    DonateInput,
}
