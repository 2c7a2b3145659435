//! What a run of an optimized module costs on one device, counted as XLA counts it: arithmetic by elements, memory by the operands and results
//! of the instructions that a device runs one by one.
//!
//! It is an estimate: what a fusion leaves unread of an operand counts as read, and what is inside a custom call is not counted.
//! The body of a loop counts once, since nobody knows how often it runs; of branches the dearest counts.

use std::collections::BTreeMap;

use crate::error::Result;
use crate::message::Message;
use crate::module::{Instruction, Module, field};

/// Field number of the entry computation's id in `HloModuleProto`.
const ENTRY: u32 = 6;

/// Loops and calls are followed to this depth; a module cannot call itself, but damaged bytes can say so.
const DEPTH_MAX: u32 = 64;

/// Work and traffic.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Cost {
    /// Arithmetic operations.
    pub flops: f64,
    /// Operations such as `exp`, which take several of those.
    pub transcendentals: f64,
    /// Bytes read and written.
    pub bytes_accessed: f64,
}

impl Cost {
    fn add(&mut self, other: Cost) {
        self.flops += other.flops;
        self.transcendentals += other.transcendentals;
        self.bytes_accessed += other.bytes_accessed;
    }
}

/// The cost of a serialized `HloModuleProto`.
pub fn cost(raw: &[u8]) -> Result<Cost> {
    let module = Module::read(raw)?;
    let entry = Message::read(raw)?.int(ENTRY)?;
    computation(&module, entry, true, 0)
}

/// Bytes count for what runs instruction by instruction, not inside a fusion.
fn computation(module: &Module<'_>, id: i64, bytes: bool, depth: u32) -> Result<Cost> {
    let mut total = Cost::default();
    if depth > DEPTH_MAX {
        return Ok(total);
    }
    let read = &module.computations[module.at(id)?];
    let mut shapes = BTreeMap::new();
    for i in &read.instructions {
        shapes.insert(i.id, Size::of(Message::read(i.raw)?.message(field::SHAPE)?.as_ref())?);
    }
    for i in &read.instructions {
        total.add(instruction(module, i, &shapes, bytes, depth)?);
    }
    Ok(total)
}

#[derive(Debug, Clone, Default)]
struct Size {
    dims: Vec<i64>,
    elements: f64,
    bytes: f64,
}

impl Size {
    fn of(shape: Option<&Message<'_>>) -> Result<Size> {
        let Some(shape) = shape else { return Ok(Size::default()) };
        let parts = shape.messages(4)?;
        if !parts.is_empty() {
            let mut all = Size::default();
            for part in &parts {
                let part = Size::of(Some(part))?;
                all.bytes += part.bytes;
            }
            return Ok(all);
        }
        let dims = shape.ints(3)?;
        let elements: f64 = dims.iter().map(|&d| d as f64).product();
        let bits = match shape.int(2)? {
            5 | 9 | 12 | 15 => 64.0,
            18 => 128.0,
            4 | 8 | 11 => 32.0,
            3 | 7 | 10 | 16 => 16.0,
            21 | 22 | 32 => 4.0,
            26 | 27 => 2.0,
            13 | 14 | 17 => 0.0,
            _ => 8.0,
        };
        Ok(Size { dims, elements, bytes: (elements * bits / 8.0).ceil() })
    }
}

fn instruction(module: &Module<'_>, i: &Instruction<'_>, shapes: &BTreeMap<i64, Size>, bytes: bool, depth: u32) -> Result<Cost> {
    let size = |id: &i64| shapes.get(id).cloned().unwrap_or_default();
    let out = size(&i.id);
    let inner = |bytes| -> Result<Cost> {
        let mut total = Cost::default();
        for &id in &i.called {
            total.add(computation(module, id, bytes, depth + 1)?);
        }
        Ok(total)
    };
    let mut cost = Cost::default();
    match i.opcode {
        "fusion" => cost = inner(false)?,
        "while" | "call" => return inner(bytes),
        "conditional" => {
            for &id in &i.called {
                let branch = computation(module, id, bytes, depth + 1)?;
                if branch.bytes_accessed + branch.flops > cost.bytes_accessed + cost.flops {
                    cost = branch;
                }
            }
            return Ok(cost);
        }
        // A table of addresses.
        "tuple" => {
            cost.bytes_accessed = if bytes { 8.0 * i.operands.len() as f64 } else { 0.0 };
            return Ok(cost);
        }
        "parameter" | "constant" | "get-tuple-element" | "bitcast" | "after-all" => return Ok(cost),
        "sort" => cost.flops = sorted_elements(i, shapes) * sorted_elements(i, shapes).max(1.0).log2().ceil(),
        "reduce-window" => {
            let window = Message::read(i.raw)?.message(15)?.map_or(Ok(Vec::new()), |window| window.messages(1))?;
            let sizes = window.iter().map(|dim| Ok(dim.int(1)? as f64)).collect::<Result<Vec<f64>>>()?;
            let each = inner(false)?;
            let times = out.elements * (sizes.iter().product::<f64>() - 1.0).max(0.0);
            cost.flops = each.flops * times;
            cost.transcendentals = each.transcendentals * times;
        }
        "reduce" | "all-reduce" | "map" => {
            let each = inner(false)?;
            let all = i.operands.first().map_or(out.elements, |id| size(id).elements);
            let times = if i.opcode == "reduce" { (all - out.elements).max(0.0) } else { out.elements };
            cost.flops = each.flops * times;
            cost.transcendentals = each.transcendentals * times;
        }
        "dot" => {
            let contracted = Message::read(i.raw)?.message(30)?.map_or(Ok(Vec::new()), |numbers| numbers.ints(1))?;
            let left = i.operands.first().map(size).unwrap_or_default();
            let depth: f64 = contracted.iter().filter_map(|&d| left.dims.get(d as usize)).map(|&d| d as f64).product();
            cost.flops = 2.0 * out.elements * depth;
        }
        "convolution" => {
            // Each output element takes every element of the kernel that makes it.
            let kernel = i.operands.get(1).map(size).unwrap_or_default();
            let numbers = Message::read(i.raw)?.message(16)?;
            let features = numbers.map_or(Ok(0), |numbers| numbers.int(4))?;
            let features = kernel.dims.get(features as usize).copied().unwrap_or(1).max(1) as f64;
            cost.flops = 2.0 * out.elements * kernel.elements / features;
        }
        opcode if TRANSCENDENTAL.contains(&opcode) => cost.transcendentals = out.elements,
        opcode if ARITHMETIC.contains(&opcode) => cost.flops = out.elements,
        _ => {}
    }
    if bytes {
        cost.bytes_accessed = out.bytes + i.operands.iter().map(|id| size(id).bytes).sum::<f64>();
    }
    Ok(cost)
}

/// Elements of the first operand: a sort of several arrays compares the first.
fn sorted_elements(i: &Instruction<'_>, shapes: &BTreeMap<i64, Size>) -> f64 {
    i.operands.first().and_then(|id| shapes.get(id)).map_or(0.0, |size| size.elements)
}

const TRANSCENDENTAL: [&str; 15] = [
    "atan2",
    "cbrt",
    "cosine",
    "erf",
    "exponential",
    "exponential-minus-one",
    "log",
    "log-plus-one",
    "logistic",
    "power",
    "rsqrt",
    "sine",
    "sqrt",
    "tan",
    "tanh",
];

const ARITHMETIC: [&str; 32] = [
    "abs",
    "add",
    "and",
    "ceil",
    "clamp",
    "compare",
    "complex",
    "convert",
    "count-leading-zeros",
    "divide",
    "floor",
    "imag",
    "is-finite",
    "maximum",
    "minimum",
    "multiply",
    "negate",
    "not",
    "or",
    "popcnt",
    "real",
    "reduce-precision",
    "remainder",
    "round-nearest-afz",
    "round-nearest-even",
    "select",
    "shift-left",
    "shift-right-arithmetic",
    "shift-right-logical",
    "sign",
    "subtract",
    "xor",
];
