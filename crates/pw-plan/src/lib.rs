//! Pure planning: which part of an array each shard holds.
//!
//! Owns: shard maps of shardings. Must never: know a worker, a buffer or a byte.

use pw_types::{ArraySpec, Dims, Partition, Region};

/// Why a shard has no place in its array.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PlanError {
    /// The sharding names no index map (only shapes or only devices).
    NoIndexMap,
    /// A dimension is not a multiple of its number of tiles.
    Uneven { dimension: usize, size: i64, tiles: u32 },
    /// The sharding does not fit the array or its own device list.
    Malformed(String),
}

impl std::fmt::Display for PlanError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            PlanError::NoIndexMap => write!(f, "the sharding does not say which part of the array a device holds"),
            PlanError::Uneven { dimension, size, tiles } => {
                write!(
                    f,
                    "dimension {dimension} of size {size} does not divide into {tiles} equal tiles; only even shardings are supported"
                )
            }
            PlanError::Malformed(what) => write!(f, "malformed sharding: {what}"),
        }
    }
}

impl std::error::Error for PlanError {}

/// Dimensions of one shard.
pub fn shard_dims(spec: &ArraySpec) -> Result<Dims, PlanError> {
    match &spec.sharding.partition {
        Partition::Replicated => Ok(spec.dims.clone()),
        Partition::Even { shard_dims } => Ok(shard_dims.clone()),
        Partition::Opaque => Err(PlanError::NoIndexMap),
        Partition::Tiled(tiling) => {
            if tiling.tiles.len() != spec.dims.len() {
                return Err(PlanError::Malformed(format!("{} tile counts for an array of rank {}", tiling.tiles.len(), spec.dims.len())));
            }
            let tiles = spec.dims.iter().zip(&tiling.tiles).enumerate();
            tiles
                .map(|(dimension, (&size, &tiles))| match tiles {
                    0 => Err(PlanError::Malformed(format!("no tiles along dimension {dimension}"))),
                    _ if size % i64::from(tiles) != 0 => Err(PlanError::Uneven { dimension, size, tiles }),
                    _ => Ok(size / i64::from(tiles)),
                })
                .collect()
        }
    }
}

/// The box that the shard at `position` of the device list holds; `None` = the whole array.
pub fn shard_region(spec: &ArraySpec, position: usize) -> Result<Option<Region>, PlanError> {
    let devices = spec.sharding.devices.len();
    if position >= devices {
        return Err(PlanError::Malformed(format!("shard {position} of {devices}")));
    }
    match &spec.sharding.partition {
        Partition::Replicated => Ok(None),
        Partition::Even { .. } if devices == 1 => Ok(None),
        Partition::Even { .. } | Partition::Opaque => Err(PlanError::NoIndexMap),
        Partition::Tiled(tiling) => {
            let dims = shard_dims(spec)?;
            let place = tiling.assignment.iter().position(|&d| d as usize == position);
            let place = place.ok_or_else(|| PlanError::Malformed(format!("no tile for shard {position}")))?;
            let mut tile = place / tiling.replicas.max(1) as usize;
            let mut start = vec![0; dims.len()];
            for d in (0..dims.len()).rev() {
                let tiles = tiling.tiles[d] as usize;
                start[d] = (tile % tiles) as i64 * dims[d];
                tile /= tiles;
            }
            Ok(if dims == spec.dims { None } else { Some(Region { start, dims }) })
        }
    }
}

#[cfg(test)]
mod tests {
    use pw_types::{DType, Sharding, Tiling, VirtualDeviceId};

    use super::*;

    fn spec(dims: &[i64], tiles: &[u32], replicas: u32, assignment: &[u32]) -> ArraySpec {
        ArraySpec {
            dtype: DType::F32,
            dims: dims.to_vec(),
            sharding: Sharding {
                devices: (0..assignment.len() as u32).map(VirtualDeviceId).collect(),
                partition: Partition::Tiled(Tiling { tiles: tiles.to_vec(), replicas, assignment: assignment.to_vec() }),
                memory_kind: None,
            },
        }
    }

    #[test]
    fn rows_and_columns() {
        let s = spec(&[8, 6], &[2, 2], 1, &[0, 1, 2, 3]);
        let starts: Vec<_> = (0..4).map(|p| shard_region(&s, p).unwrap().unwrap().start).collect();
        assert_eq!(starts, [[0, 0], [0, 3], [4, 0], [4, 3]]);
        assert_eq!(shard_dims(&s).unwrap(), [4, 3]);
    }

    #[test]
    fn permuted_devices_and_replicas() {
        let s = spec(&[4], &[2], 2, &[3, 1, 0, 2]);
        let starts: Vec<_> = (0..4).map(|p| shard_region(&s, p).unwrap().unwrap().start[0]).collect();
        assert_eq!(starts, [2, 0, 2, 0]);
    }

    #[test]
    fn uneven_is_refused_by_dimension() {
        let error = shard_dims(&spec(&[8, 5], &[1, 2], 1, &[0, 1])).unwrap_err();
        assert_eq!(error, PlanError::Uneven { dimension: 1, size: 5, tiles: 2 });
    }

    #[test]
    fn one_tile_is_the_whole() {
        assert_eq!(shard_region(&spec(&[8], &[1], 2, &[0, 1]), 1).unwrap(), None);
    }
}
