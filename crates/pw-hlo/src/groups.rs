//! Who takes part in a collective: the four encodings of groups, and what their numbers mean.

use std::collections::BTreeMap;

use crate::error::{HloError, Result};
use crate::module::{Instruction, field};
use crate::wire::fields;

/// How many devices run a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Devices {
    pub(crate) replicas: u32,
    pub(crate) partitions: u32,
}

impl Devices {
    pub(crate) fn members(self) -> u32 {
        self.replicas * self.partitions
    }
}

/// What the numbers in groups and pairs are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ids {
    /// Replicas; each partition does it on its own.
    Replicas,
    /// Partitions; each replica does it on its own.
    Partitions,
    /// Replicas; all partitions of a group's replicas do it together.
    ReplicasOfAllPartitions,
    /// Members.
    Members,
}

impl Ids {
    /// How many numbers there are.
    fn count(self, devices: Devices) -> u32 {
        match self {
            Ids::Replicas | Ids::ReplicasOfAllPartitions => devices.replicas,
            Ids::Partitions => devices.partitions,
            Ids::Members => devices.members(),
        }
    }

    fn check(self, id: i64, devices: Devices) -> std::result::Result<u32, String> {
        let count = self.count(devices);
        u32::try_from(id).ok().filter(|&id| id < count).ok_or_else(|| format!("it names {id} of {count}"))
    }
}

/// Why groups are not understood.
type Reason<T> = std::result::Result<T, String>;

/// The groups of an instruction, of members, each in the order of ranks. Every member is in exactly one.
pub(crate) fn groups_of(instruction: &Instruction<'_>, ids: Ids, devices: Devices) -> Result<Vec<Vec<u32>>> {
    let mut listed: Vec<Vec<i64>> = Vec::new();
    for f in fields(instruction.raw) {
        let f = f?;
        // A newer encoding, where there are two, says it all.
        match f.number {
            field::GROUPS => listed.push(ints(f.bytes()?)?),
            field::GROUP_LIST => listed = fields(f.bytes()?).map(|g| ints(g?.bytes()?)).collect::<Result<_>>()?,
            field::IOTA_GROUPS => listed = iota_groups(f.bytes()?)?,
            field::MESH_GROUPS => listed = mesh_groups(f.bytes()?)?,
            _ => {}
        }
    }
    listed.retain(|group| !group.is_empty());
    if listed.is_empty() {
        listed.push((0..i64::from(ids.count(devices))).collect());
    }
    members_of(&listed, ids, devices).map_err(|why| instruction.unsupported(why))
}

/// Groups of members for groups of ids.
fn members_of(listed: &[Vec<i64>], ids: Ids, devices: Devices) -> Reason<Vec<Vec<u32>>> {
    let Devices { replicas, partitions } = devices;
    let mut groups = Vec::new();
    for group in listed {
        let group: Vec<u32> = group.iter().map(|&id| ids.check(id, devices)).collect::<Reason<_>>()?;
        let each = |f: &dyn Fn(u32) -> u32| group.iter().map(|&id| f(id)).collect::<Vec<u32>>();
        match ids {
            Ids::Replicas => groups.extend((0..partitions).map(|p| each(&|id| id * partitions + p))),
            Ids::Partitions => groups.extend((0..replicas).map(|r| each(&|id| r * partitions + id))),
            Ids::ReplicasOfAllPartitions => {
                groups.push(group.iter().flat_map(|id| (0..partitions).map(move |p| id * partitions + p)).collect());
            }
            Ids::Members => groups.push(group),
        }
    }
    let mut seen = vec![false; devices.members() as usize];
    for &member in groups.iter().flatten() {
        if std::mem::replace(&mut seen[member as usize], true) {
            return Err(format!("member {member} is in two groups"));
        }
    }
    match seen.iter().position(|&s| !s) {
        Some(member) => Err(format!("member {member} is in no group")),
        None => Ok(groups),
    }
}

/// The pairs of a permutation as pairs of members, in ascending order of targets.
pub(crate) fn pairs_of(instruction: &Instruction<'_>, ids: Ids, devices: Devices) -> Result<Vec<(u32, u32)>> {
    let mut by_target = BTreeMap::new();
    for f in fields(instruction.raw) {
        let f = f?;
        if f.number != field::PAIRS {
            continue;
        }
        let (mut source, mut target) = (0, 0);
        for f in fields(f.bytes()?) {
            let f = f?;
            match f.number {
                1 => source = f.int()?,
                2 => target = f.int()?,
                _ => {}
            }
        }
        let of = |id| ids.check(id, devices).map_err(|why| instruction.unsupported(why));
        let (source, target) = (of(source)?, of(target)?);
        let Devices { replicas, partitions } = devices;
        let pairs: Vec<(u32, u32)> = match ids {
            Ids::Replicas => (0..partitions).map(|p| (source * partitions + p, target * partitions + p)).collect(),
            Ids::Partitions => (0..replicas).map(|r| (r * partitions + source, r * partitions + target)).collect(),
            Ids::ReplicasOfAllPartitions | Ids::Members => vec![(source, target)],
        };
        for (source, target) in pairs {
            if by_target.insert(target, source).is_some() {
                return Err(instruction.unsupported(format!("member {target} has two sources")));
            }
        }
    }
    Ok(by_target.into_iter().map(|(target, source)| (source, target)).collect())
}

/// The integers of field 1, as in `ReplicaGroup`.
fn ints(message: &[u8]) -> Result<Vec<i64>> {
    let mut out = Vec::new();
    for f in fields(message) {
        let f = f?;
        if f.number == 1 {
            f.push_ints(&mut out)?;
        }
    }
    Ok(out)
}

/// More numbers than any mesh of devices has; what a message could ask to be made is bounded by it.
const DEVICES_MAX: i64 = 1 << 24;

fn product(sizes: &[i64]) -> Result<i64> {
    let product = sizes.iter().try_fold(1_i64, |a, &s| a.checked_mul(s).filter(|p| s > 0 && *p <= DEVICES_MAX));
    product.ok_or_else(|| HloError::malformed(format!("{sizes:?} are no sizes of a device mesh")))
}

/// 0, 1, 2, … laid out in `dims`, with the dimensions then brought into the order `permutation`.
fn transposed_iota(dims: &[i64], permutation: &[i64]) -> Result<Vec<i64>> {
    let count = product(dims)?;
    let identity: Vec<i64> = (0..dims.len() as i64).collect();
    let permutation = if permutation.is_empty() { &identity } else { permutation };
    let mut sorted = permutation.to_vec();
    sorted.sort_unstable();
    if sorted != identity {
        return Err(HloError::malformed(format!("{permutation:?} permutes no {} dimensions", dims.len())));
    }
    // Steps of the source dimensions in the order of the result's.
    let steps: Vec<(i64, i64)> = permutation.iter().map(|&d| (dims[d as usize], dims[d as usize + 1..].iter().product::<i64>())).collect();
    let value = |mut at: i64| {
        steps.iter().rev().fold(0, |value, &(size, step)| {
            let digit = at % size;
            at /= size;
            value + digit * step
        })
    };
    Ok((0..count).map(value).collect())
}

/// `IotaReplicaGroupListProto`.
fn iota_groups(message: &[u8]) -> Result<Vec<Vec<i64>>> {
    let (mut groups, mut ranks, mut dims, mut permutation) = (0, 0, Vec::new(), Vec::new());
    for f in fields(message) {
        let f = f?;
        match f.number {
            1 => groups = f.int()?,
            2 => ranks = f.int()?,
            3 => f.push_ints(&mut dims)?,
            4 => f.push_ints(&mut permutation)?,
            _ => {}
        }
    }
    let ids = transposed_iota(&dims, &permutation)?;
    if product(&[groups, ranks])? != ids.len() as i64 {
        return Err(HloError::malformed(format!("{groups} groups of {ranks} out of {}", ids.len())));
    }
    Ok(ids.chunks_exact(ranks as usize).map(<[i64]>::to_vec).collect())
}

/// A part of a mesh axis: its coordinate's digit of weight `step` in base `size`.
struct AxisPart {
    axis: usize,
    size: i64,
    step: i64,
}

/// `MeshAxesReplicaGroupListProto`: a group is what differs in the named axes only; its ranks count them with
/// the last one fastest. An axis of size S with a sub-axis is [pre_size][size][rest].
fn mesh_groups(message: &[u8]) -> Result<Vec<Vec<i64>>> {
    let (mut mesh, mut references): (&[u8], Vec<&[u8]>) = (&[], Vec::new());
    for f in fields(message) {
        let f = f?;
        match f.number {
            1 => mesh = f.bytes()?,
            2 => references.push(f.bytes()?),
            _ => {}
        }
    }
    let (sizes, ids) = mesh_devices(mesh)?;
    let parts: Vec<AxisPart> = references.into_iter().map(|axis| axis_part(axis, &sizes)).collect::<Result<_>>()?;
    let ranks = product(&parts.iter().map(|p| p.size).collect::<Vec<_>>())?;

    let mut groups: BTreeMap<Vec<i64>, Vec<(i64, i64)>> = BTreeMap::new();
    for (at, &id) in ids.iter().enumerate() {
        let mut rest = at as i64;
        let mut coordinates: Vec<i64> = sizes.iter().rev().map(|size| (rest % size, rest /= size).0).collect();
        coordinates.reverse();
        let mut rank = 0;
        for part in &parts {
            let digit = coordinates[part.axis] / part.step % part.size;
            coordinates[part.axis] -= digit * part.step;
            rank = rank * part.size + digit;
        }
        groups.entry(coordinates).or_default().push((rank, id));
    }
    let ordered = groups.into_values().map(|mut group| {
        group.sort_unstable();
        let complete = group.iter().map(|(rank, _)| *rank).eq(0..ranks);
        if complete { Ok(group.into_iter().map(|(_, id)| id).collect()) } else { Err(HloError::malformed("mesh axes overlap")) }
    });
    ordered.collect()
}

/// `MeshProto`: the sizes of the axes, and the devices with the last axis fastest.
fn mesh_devices(message: &[u8]) -> Result<(Vec<i64>, Vec<i64>)> {
    let (mut sizes, mut ids, mut iota) = (Vec::new(), Vec::new(), None);
    for f in fields(message) {
        let f = f?;
        match f.number {
            1 => {
                let mut size = 0;
                for f in fields(f.bytes()?) {
                    let f = f?;
                    if f.number == 2 {
                        size = f.int()?;
                    }
                }
                sizes.push(size);
            }
            2 => f.push_ints(&mut ids)?,
            3 => iota = Some(f.bytes()?),
            _ => {}
        }
    }
    if let (Some(iota), true) = (iota, ids.is_empty()) {
        let (mut dims, mut permutation) = (Vec::new(), Vec::new());
        for f in fields(iota) {
            let f = f?;
            match f.number {
                1 => f.push_ints(&mut dims)?,
                2 => f.push_ints(&mut permutation)?,
                _ => {}
            }
        }
        ids = transposed_iota(&dims, &permutation)?;
    }
    let count = product(&sizes)?;
    if ids.is_empty() {
        ids = (0..count).collect();
    }
    if ids.len() as i64 != count {
        return Err(HloError::malformed(format!("a mesh of {sizes:?} has {} devices", ids.len())));
    }
    Ok((sizes, ids))
}

/// `AxisRefProto`.
fn axis_part(message: &[u8], sizes: &[i64]) -> Result<AxisPart> {
    let (mut axis, mut sub) = (0, None);
    for f in fields(message) {
        let f = f?;
        match f.number {
            1 => axis = f.int()?,
            2 => sub = Some(f.bytes()?),
            _ => {}
        }
    }
    let axis = usize::try_from(axis).ok().filter(|&a| a < sizes.len());
    let axis = axis.ok_or_else(|| HloError::malformed("no such mesh axis"))?;
    let Some(sub) = sub else { return Ok(AxisPart { axis, size: sizes[axis], step: 1 }) };
    let (mut before, mut size) = (0, 0);
    for f in fields(sub) {
        let f = f?;
        match f.number {
            1 => before = f.int()?,
            2 => size = f.int()?,
            _ => {}
        }
    }
    let taken = product(&[before, size])?;
    if sizes[axis] % taken != 0 {
        return Err(HloError::malformed(format!("a sub-axis [{before}][{size}] of an axis of {}", sizes[axis])));
    }
    Ok(AxisPart { axis, size, step: sizes[axis] / taken })
}

#[cfg(test)]
mod tests;
