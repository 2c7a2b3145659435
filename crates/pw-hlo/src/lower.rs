//! One collective instruction: what it does, and the call that takes its place.

use crate::collective::{Array, Collective, Op, Reduce};
use crate::error::Result;
use crate::groups::{Devices, Ids, groups_of, pairs_of};
use crate::module::{Computation, Instruction, Module, field};
use crate::shape::{Along, Shape, view};
use crate::wire::{fields, put_bytes, put_int};

/// What an opcode is to the rewrite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    /// A collective that is replaced by a call.
    Collective,
    /// A question for the own number; the text is the target.
    Who(&'static str),
    /// Communication that is not understood.
    Unknown,
    /// Anything else.
    Local,
}

/// Classifies an opcode.
pub(crate) fn classify(opcode: &str) -> Class {
    match opcode {
        "all-reduce" | "all-gather" | "reduce-scatter" | "all-to-all" | "collective-permute" | "collective-broadcast" => Class::Collective,
        "partition-id" => Class::Who(crate::PARTITION_ID),
        "replica-id" => Class::Who(crate::REPLICA_ID),
        "send" | "send-done" | "recv" | "recv-done" | "ragged-all-to-all" => Class::Unknown,
        _ => {
            let asynchronous = opcode.ends_with("-start") || opcode.ends_with("-done");
            let communicates = opcode.starts_with("all-") || opcode.starts_with("reduce-scatter") || opcode.starts_with("collective-");
            if communicates || asynchronous && opcode.contains("all-to-all") { Class::Unknown } else { Class::Local }
        }
    }
}

/// Describes a collective instruction.
pub(crate) fn describe(module: &Module<'_>, computation: &Computation<'_>, at: &Instruction<'_>, devices: Devices) -> Result<Collective> {
    let reduce_like = matches!(at.opcode, "all-reduce" | "all-gather" | "reduce-scatter");
    let int = |number| at.field(number)?.map_or(Ok(0), |f| f.int());
    let has_channel = int(field::CHANNEL)? > 0;
    let global_ids = int(field::GLOBAL_IDS)? != 0;
    let ids = match (reduce_like, global_ids, has_channel) {
        (true, true, true) => Ids::Members,
        (true, true, false) => return Err(at.unsupported("global device ids without a channel")),
        (true, false, true) => Ids::ReplicasOfAllPartitions,
        (false, _, true) => Ids::Partitions,
        (_, _, false) => Ids::Replicas,
    };
    let dimension = dimension(at)?;
    let need_dimension = || dimension.ok_or_else(|| at.unsupported("it has no dimension"));
    let (op, along) = match at.opcode {
        "all-reduce" => (Op::AllReduce(reduction(module, at)?), Along::Nothing),
        "reduce-scatter" => (Op::ReduceScatter(reduction(module, at)?), Along::Scatter(need_dimension()?)),
        "all-gather" => (Op::AllGather, Along::Gather(need_dimension()?)),
        "all-to-all" => match dimension {
            Some(d) => (Op::AllToAll { tuple: false }, Along::Exchange(d)),
            None => (Op::AllToAll { tuple: true }, Along::Nothing),
        },
        "collective-permute" => (Op::Permute(pairs_of(at, ids, devices)?), Along::Nothing),
        _ => (Op::Broadcast, Along::Nothing),
    };
    let groups = match op {
        Op::Permute(_) => vec![(0..devices.members()).collect()],
        _ => groups_of(at, ids, devices)?,
    };
    let ranks = groups[0].len();
    let sizes_matter = !matches!(op, Op::AllReduce(_) | Op::Broadcast | Op::Permute(_));
    if sizes_matter && groups.iter().any(|group| group.len() != ranks) {
        return Err(at.unsupported("its groups have different sizes"));
    }
    let arrays = arrays(computation, at, along, ranks as u64)?;
    check_arrays(&op, &arrays, ranks).map_err(|why| at.unsupported(why))?;
    Ok(Collective { op, groups, arrays })
}

fn check_arrays(op: &Op, arrays: &[Array], ranks: usize) -> std::result::Result<(), String> {
    match op {
        Op::AllReduce(reduce) | Op::ReduceScatter(reduce) => match arrays.iter().find(|a| !reduce.takes(a.element)) {
            Some(array) => Err(format!("it reduces {} by {reduce:?}", array.element.name())),
            None => Ok(()),
        },
        Op::AllToAll { tuple: true } if arrays.len() != ranks => Err(format!("{} operands for {ranks} ranks", arrays.len())),
        Op::AllToAll { tuple: true } if arrays.iter().any(|a| *a != arrays[0]) => Err("its operands differ in shape".to_owned()),
        Op::AllToAll { tuple: false } if arrays.len() != 1 => Err("several operands along a dimension".to_owned()),
        _ if arrays.is_empty() => Err("it has no operand".to_owned()),
        _ => Ok(()),
    }
}

/// The one dimension that the instruction works along.
fn dimension(at: &Instruction<'_>) -> Result<Option<usize>> {
    let mut dimensions = Vec::new();
    for f in fields(at.raw) {
        let f = f?;
        if f.number == field::DIMENSIONS {
            f.push_ints(&mut dimensions)?;
        }
    }
    match dimensions.as_slice() {
        [] => Ok(None),
        &[d] => usize::try_from(d).map(Some).map_err(|_| at.unsupported(format!("dimension {d}"))),
        _ => Err(at.unsupported(format!("it works along dimensions {dimensions:?}"))),
    }
}

fn shape_of(instruction: &Instruction<'_>) -> Result<Shape> {
    Shape::read(instruction.shape()?)
}

fn arrays(computation: &Computation<'_>, at: &Instruction<'_>, along: Along, ranks: u64) -> Result<Vec<Array>> {
    let shape = shape_of(at)?;
    let results = shape.arrays();
    if results.len() != at.operands.len() {
        return Err(at.unsupported(format!("{} operands and {} results", at.operands.len(), results.len())));
    }
    let pairs = at.operands.iter().zip(results);
    pairs
        .map(|(operand, result)| {
            let operand = shape_of(computation.get(*operand)?)?;
            view(&operand, result, along, ranks).map_err(|why| at.unsupported(why))
        })
        .collect()
}

/// The reduction that the called computation does: its root must be one operation on its two parameters.
fn reduction(module: &Module<'_>, at: &Instruction<'_>) -> Result<Reduce> {
    let &[called] = at.called.as_slice() else {
        return Err(at.unsupported(format!("it calls {} computations", at.called.len())));
    };
    let called = &module.computations[module.at(called)?];
    let root = called.get(called.root)?;
    let unknown = || at.unsupported(format!("its reduction is {:?}", root.opcode));
    let reduce = Reduce::from_opcode(root.opcode).ok_or_else(unknown)?;
    let mut numbers = Vec::new();
    for operand in &root.operands {
        let operand = called.get(*operand)?;
        if operand.opcode != "parameter" {
            return Err(at.unsupported(format!("its reduction takes a {:?}", operand.opcode)));
        }
        numbers.push(operand.field(field::PARAMETER)?.map_or(Ok(0), |f| f.int())?);
    }
    numbers.sort_unstable();
    if numbers == [0, 1] { Ok(reduce) } else { Err(at.unsupported("its reduction is not of its two parameters")) }
}

/// Fields that only a collective has, or that the call sets itself.
const DROPPED: [u32; 19] = [
    field::OPCODE,
    field::DIMENSIONS,
    field::CHANNEL,
    field::TARGET,
    field::CONTROL,
    field::CALLED,
    field::BACKEND_CONFIG,
    field::ALL_REDUCE_ID,
    field::GROUPS,
    field::PAIRS,
    field::CONSTRAIN_LAYOUT,
    field::OPERAND_SHAPES,
    field::SIDE_EFFECT,
    field::GLOBAL_IDS,
    field::API_VERSION,
    field::GROUP_LIST,
    field::IOTA_GROUPS,
    field::MESH_GROUPS,
    field::BACKEND_PAYLOAD,
];

const TYPED_FFI: i64 = 4;

/// The call in place of an instruction, with one more operand where something must be `before` it. `attributes` is the
/// text of an MLIR dictionary.
pub(crate) fn call(at: &Instruction<'_>, target: &str, attributes: &str, side_effect: bool, before: Option<i64>) -> Result<Vec<u8>> {
    let mut out = Vec::with_capacity(at.raw.len() + attributes.len() + 64);
    for f in fields(at.raw) {
        let f = f?;
        if !DROPPED.contains(&f.number) {
            out.extend_from_slice(f.raw);
        }
    }
    before.iter().for_each(|&id| put_int(&mut out, field::OPERANDS, id));
    at.control.iter().for_each(|&id| put_int(&mut out, field::CONTROL, id));
    put_call(&mut out, target, attributes, side_effect);
    Ok(out)
}

/// What makes a message a typed-FFI call.
pub(crate) fn put_call(out: &mut Vec<u8>, target: &str, attributes: &str, side_effect: bool) {
    put_bytes(out, field::OPCODE, b"custom-call");
    put_bytes(out, field::TARGET, target.as_bytes());
    put_bytes(out, field::BACKEND_CONFIG, attributes.as_bytes());
    if side_effect {
        put_int(out, field::SIDE_EFFECT, 1);
    }
    put_int(out, field::API_VERSION, TYPED_FFI);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opcodes_are_classified() {
        for opcode in ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast"] {
            assert_eq!(classify(opcode), Class::Collective);
        }
        assert_eq!(classify("partition-id"), Class::Who("pw.partition_id"));
        assert_eq!(classify("replica-id"), Class::Who("pw.replica_id"));
        for opcode in
            ["all-reduce-start", "all-gather-done", "collective-permute-start", "ragged-all-to-all", "send", "recv-done", "collective-new"]
        {
            assert_eq!(classify(opcode), Class::Unknown, "{opcode}");
        }
        for opcode in ["add", "reduce", "copy-start", "custom-call", "async-start", "while"] {
            assert_eq!(classify(opcode), Class::Local, "{opcode}");
        }
    }
}
