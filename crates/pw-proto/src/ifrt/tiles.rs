//! `xla.OpSharding` to a grid of tiles.

use pw_types::{Partition, Status, Tiling};

use super::pb;
use pb::op_sharding::Type;

/// What an operation sharding says about an array of these dimensions over `devices` devices.
pub(super) fn partition(op: &pb::OpSharding, dims: &[i64], devices: usize) -> Result<Partition, Status> {
    if let Some(named) = &op.named_sharding {
        return named_partition(named, dims, devices);
    }
    match Type::try_from(op.r#type).unwrap_or(Type::Unknown) {
        Type::Replicated => Ok(Partition::Replicated),
        _ if devices == 1 && op.tile_assignment_dimensions.iter().all(|&n| n == 1) => Ok(Partition::Replicated),
        // The whole array is on one of the devices: not a shape that the shards have in common.
        Type::Maximal => Ok(Partition::Opaque),
        // Every device has its own value of the full shape.
        Type::Manual | Type::Unreduced => Ok(Partition::Even { shard_dims: dims.to_vec() }),
        Type::Other => tiled(op, dims, devices),
        Type::Tuple | Type::Unknown => Err(Status::invalid("a sharding of an array is of tuple or unknown type")),
    }
}

fn tiled(op: &pb::OpSharding, dims: &[i64], devices: usize) -> Result<Partition, Status> {
    let grid = counts(&op.tile_assignment_dimensions)?;
    let trailing = op.last_tile_dims.len() + usize::from(op.replicate_on_last_tile_dim);
    let rank = grid.len().checked_sub(trailing).filter(|&rank| rank == dims.len()).ok_or_else(|| {
        Status::invalid(format!(
            "a sharding with tile dimensions {:?} does not fit an array of rank {}",
            op.tile_assignment_dimensions,
            dims.len()
        ))
    })?;
    let total = product(&grid).filter(|&total| total == devices).ok_or_else(|| {
        Status::invalid(format!("a sharding with tile dimensions {:?} does not fit {devices} devices", op.tile_assignment_dimensions))
    })?;
    let assignment = if !op.tile_assignment_devices.is_empty() {
        counts_from_zero(&op.tile_assignment_devices)?
    } else if !op.iota_reshape_dims.is_empty() {
        let perm: Vec<i64> = op.iota_transpose_perm.iter().map(|&n| i64::from(n)).collect();
        iota(&counts(&op.iota_reshape_dims)?, &perm)?
    } else if total == 1 {
        vec![0]
    } else {
        return Err(Status::invalid("a tiled sharding names no devices"));
    };
    let same = op.last_tile_dims.iter().all(|&kind| kind == Type::Replicated as i32);
    finish(&grid[..rank], assignment, same, dims, devices)
}

/// `same`: devices of one tile hold the same value.
fn finish(tiles: &[usize], assignment: Vec<u32>, same: bool, dims: &[i64], devices: usize) -> Result<Partition, Status> {
    let mut seen = vec![false; devices];
    if assignment.len() != devices
        || !assignment.iter().all(|&at| seen.get_mut(at as usize).is_some_and(|seen| !std::mem::replace(seen, true)))
    {
        return Err(Status::invalid("a sharding does not name each of its devices once"));
    }
    let mut shard_dims = Vec::with_capacity(dims.len());
    for (&dim, &tiles) in dims.iter().zip(tiles) {
        if dim % tiles as i64 != 0 {
            return Err(Status::unimplemented(format!("a dimension of {dim} elements cannot be split evenly into {tiles} shards")));
        }
        shard_dims.push(dim / tiles as i64);
    }
    if !same {
        return Ok(Partition::Even { shard_dims });
    }
    let count: usize = tiles.iter().product();
    if count == 1 {
        return Ok(Partition::Replicated);
    }
    let tiles = tiles.iter().map(|&n| n as u32).collect();
    Ok(Partition::Tiled(Tiling { tiles, replicas: (devices / count) as u32, assignment }))
}

/// Sharding by named mesh axes, as newer clients may send it.
fn named_partition(named: &pb::NamedShardingProto, dims: &[i64], devices: usize) -> Result<Partition, Status> {
    let bad = || Status::invalid("a named sharding does not fit its mesh, array or devices");
    let mesh = named.mesh.clone().unwrap_or_default();
    let axes = counts(&mesh.axes.iter().map(|axis| axis.size).collect::<Vec<_>>())?;
    if axes.is_empty() && named.dim_shardings.iter().all(|dim| dim.axes.is_empty()) {
        return Ok(Partition::Replicated);
    }
    if product(&axes) != Some(devices) || named.dim_shardings.len() != dims.len() {
        return Err(bad());
    }
    // Every axis is cut into factors at the sizes that sub-axes name, so that each factor is used as a whole.
    let references = || named.dim_shardings.iter().flat_map(|dim| &dim.axes).chain(&named.unreduced_axes).chain(&named.manual_axes);
    let mut cuts: Vec<Vec<usize>> = axes.iter().map(|&size| vec![1, size]).collect();
    for reference in references() {
        let axis = usize::try_from(reference.mesh_axis_index).ok().filter(|&n| n < axes.len()).ok_or_else(bad)?;
        if let Some(sub) = &reference.sub_axis_info {
            let pre = usize::try_from(sub.pre_size).map_err(|_| bad())?;
            let end = usize::try_from(sub.size).ok().and_then(|size| pre.checked_mul(size)).ok_or_else(bad)?;
            cuts[axis].extend([pre, end]);
        }
    }
    let mut factors = Vec::new();
    let mut ranges = Vec::new();
    for (cuts, &size) in cuts.iter_mut().zip(&axes) {
        cuts.sort_unstable();
        cuts.dedup();
        let first = factors.len();
        for pair in cuts.windows(2) {
            if pair[0] == 0 || pair[1] % pair[0] != 0 {
                return Err(bad());
            }
            factors.push(pair[1] / pair[0]);
        }
        if cuts.last() != Some(&size) {
            return Err(bad());
        }
        ranges.push(first);
    }
    let place = |reference: &pb::AxisRefProto| -> Option<std::ops::Range<usize>> {
        let axis = usize::try_from(reference.mesh_axis_index).ok()?;
        let (from, to) = match &reference.sub_axis_info {
            Some(sub) => (usize::try_from(sub.pre_size).ok()?, usize::try_from(sub.pre_size.checked_mul(sub.size)?).ok()?),
            None => (1, axes[axis]),
        };
        let index = |size| cuts[axis].iter().position(|&cut| cut == size);
        Some(ranges[axis] + index(from)?..ranges[axis] + index(to)?)
    };
    let mut order = Vec::new();
    let mut tiles = Vec::new();
    let mut used = vec![false; factors.len()];
    for dim in &named.dim_shardings {
        let mut count = 1;
        for reference in &dim.axes {
            for factor in place(reference).ok_or_else(bad)? {
                if std::mem::replace(&mut used[factor], true) {
                    return Err(bad());
                }
                count *= factors[factor];
                order.push(factor);
            }
        }
        tiles.push(count);
    }
    order.extend((0..factors.len()).filter(|&factor| !used[factor]));
    let mesh_devices = if !mesh.device_ids.is_empty() {
        counts_from_zero(&mesh.device_ids)?
    } else if let Some(iota_transform) = &mesh.iota_transform {
        iota(&counts(&iota_transform.reshape_dims)?, &iota_transform.transpose_perm)?
    } else {
        (0..devices as u32).collect()
    };
    if mesh_devices.len() != devices {
        return Err(bad());
    }
    let assignment = transposed(&mesh_devices, &factors, &order);
    finish(&tiles, assignment, named.unreduced_axes.is_empty() && named.manual_axes.is_empty(), dims, devices)
}

/// `0, 1, …` in the shape `reshape`, its axes permuted by `perm`, read row by row.
fn iota(reshape: &[usize], perm: &[i64]) -> Result<Vec<u32>, Status> {
    let bad = || Status::invalid("the iota tile assignment of a sharding is malformed");
    let total = product(reshape).filter(|&total| total <= MAX_DEVICES).ok_or_else(bad)?;
    let order: Vec<usize> = if perm.is_empty() {
        (0..reshape.len()).collect()
    } else {
        perm.iter().map(|&axis| usize::try_from(axis).map_err(|_| bad())).collect::<Result<_, _>>()?
    };
    let mut seen = vec![false; reshape.len()];
    if order.len() != reshape.len() || !order.iter().all(|&axis| seen.get_mut(axis).is_some_and(|seen| !std::mem::replace(seen, true))) {
        return Err(bad());
    }
    let values: Vec<u32> = (0..total as u32).collect();
    Ok(transposed(&values, reshape, &order))
}

/// Row-major `values` of shape `dims` with its axes in the given order.
fn transposed(values: &[u32], dims: &[usize], order: &[usize]) -> Vec<u32> {
    let mut strides = vec![1usize; dims.len()];
    for axis in (0..dims.len().saturating_sub(1)).rev() {
        strides[axis] = strides[axis + 1] * dims[axis + 1];
    }
    (0..values.len())
        .map(|at| {
            let mut left = at;
            let mut from = 0;
            for &axis in order.iter().rev() {
                from += left % dims[axis] * strides[axis];
                left /= dims[axis];
            }
            values[from]
        })
        .collect()
}

/// More devices than any session has; bounds what a malformed message can make us allocate.
const MAX_DEVICES: usize = 1 << 20;

fn product(numbers: &[usize]) -> Option<usize> {
    numbers.iter().try_fold(1usize, |total, &n| total.checked_mul(n))
}

fn counts(numbers: &[i64]) -> Result<Vec<usize>, Status> {
    numbers
        .iter()
        .map(|&n| usize::try_from(n).ok().filter(|n| (1..=MAX_DEVICES).contains(n)))
        .collect::<Option<_>>()
        .ok_or_else(|| Status::invalid("a sharding has a count below 1 or out of range"))
}

fn counts_from_zero(numbers: &[i64]) -> Result<Vec<u32>, Status> {
    numbers
        .iter()
        .map(|&n| u32::try_from(n).ok())
        .collect::<Option<_>>()
        .ok_or_else(|| Status::invalid("a sharding names a negative device"))
}
