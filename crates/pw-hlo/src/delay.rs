//! Instructions that run collectives (loops, conditionals, calls) made to wait for what must be done before.
//!
//! A collective's own call takes the result of the one before as one more operand. These cannot: their operands are
//! those of the computations that they run. So an operand that they surely read goes through a call that copies it
//! ([`crate::AFTER`]) and has the result of the one before as its second argument.

use std::collections::BTreeSet;

use crate::AFTER;
use crate::error::{HloError, Result};
use crate::lower::put_call;
use crate::module::{Computation, Instruction, Module, field};
use crate::shape::Shape;
use crate::wire::{fields, put_bytes, put_int};

/// Ids and names that no instruction has yet.
#[derive(Debug)]
pub(crate) struct Fresh {
    ids: BTreeSet<i64>,
    names: BTreeSet<String>,
}

impl Fresh {
    pub(crate) fn of(module: &Module<'_>) -> Fresh {
        let all = || module.computations.iter().flat_map(|c| &c.instructions);
        Fresh { ids: all().map(|i| i.id).collect(), names: all().map(|i| i.name.to_owned()).collect() }
    }

    /// An id near those of the computation: its upper half may say which one it is.
    fn id(&mut self, computation: &Computation<'_>) -> i64 {
        let mut id = computation.index.keys().next_back().copied().unwrap_or(0);
        while !self.ids.insert(id) {
            id = id.wrapping_add(1);
        }
        id
    }

    fn name(&mut self, stem: &str) -> String {
        let free = (0_u64..).map(|number| format!("{stem}.{number}")).find(|name| !self.names.contains(name));
        let name = free.expect("there are more numbers than names");
        self.names.insert(name.clone());
        name
    }
}

/// An instruction that waits.
#[derive(Debug)]
pub(crate) struct Delayed {
    /// New instructions, to stand before it, with their ids.
    pub(crate) added: Vec<(i64, Vec<u8>)>,
    /// Its message.
    pub(crate) message: Vec<u8>,
}

/// Makes `at` of a computation wait for the instruction `before`.
pub(crate) fn delay(
    module: &Module<'_>,
    computation: &Computation<'_>,
    at: &Instruction<'_>,
    before: i64,
    fresh: &mut Fresh,
) -> Result<Delayed> {
    let mut making = Making { computation, added: Vec::new(), fresh };
    let mut operands = at.operands.clone();
    match at.opcode {
        "while" => {
            let &[state] = operands.as_slice() else { return Err(at.unsupported("it has not one operand")) };
            let read = read_by_condition(module, at)?;
            operands[0] = making.state_after(at, state, &read, before)?;
        }
        // Its first operand says which branch runs.
        "conditional" => {
            let &chosen = operands.first().ok_or_else(|| at.unsupported("it has no operand"))?;
            operands[0] = making.after(computation.get(chosen)?.shape()?, chosen, before);
        }
        _ => {
            let place = read_by_call(module, computation, at)?;
            operands[place] = making.after(computation.get(operands[place])?.shape()?, operands[place], before);
        }
    }
    let mut message = Vec::with_capacity(at.raw.len() + 8);
    for f in fields(at.raw) {
        let f = f?;
        if f.number != field::OPERANDS {
            message.extend_from_slice(f.raw);
        }
    }
    operands.iter().for_each(|&operand| put_int(&mut message, field::OPERANDS, operand));
    Ok(Delayed { added: making.added, message })
}

struct Making<'m, 'a> {
    computation: &'m Computation<'a>,
    added: Vec<(i64, Vec<u8>)>,
    fresh: &'m mut Fresh,
}

impl Making<'_, '_> {
    fn add(&mut self, stem: &str, shape: &[u8], operands: &[i64], rest: impl FnOnce(&mut Vec<u8>)) -> i64 {
        let id = self.fresh.id(self.computation);
        let mut message = Vec::new();
        put_bytes(&mut message, field::NAME, self.fresh.name(stem).as_bytes());
        put_bytes(&mut message, field::SHAPE, shape);
        put_int(&mut message, field::ID, id);
        operands.iter().for_each(|&operand| put_int(&mut message, field::OPERANDS, operand));
        rest(&mut message);
        self.added.push((id, message));
        id
    }

    /// A copy of the array `value`, made when `before` is done.
    fn after(&mut self, shape: &[u8], value: i64, before: i64) -> i64 {
        self.add("pw-after", shape, &[value, before], |message| put_call(message, AFTER, "{}", false))
    }

    /// The state of a loop, of which one array that its condition reads is such a copy: the smallest.
    fn state_after(&mut self, at: &Instruction<'_>, state: i64, read: &BTreeSet<usize>, before: i64) -> Result<i64> {
        let whole = self.computation.get(state)?.shape()?;
        if !Shape::read(whole)?.is_tuple() {
            return Ok(self.after(whole, state, before));
        }
        let elements = Shape::elements_of(whole)?;
        let mut smallest = None;
        for (index, element) in elements.iter().enumerate().filter(|(index, _)| read.contains(index)) {
            let bytes = Shape::read(element)?.bytes();
            smallest = smallest.into_iter().chain(bytes.map(|bytes| (bytes, index))).min();
        }
        let (_, copied) = smallest.ok_or_else(|| at.unsupported("it runs collectives, and its condition reads nothing"))?;
        let mut parts = Vec::with_capacity(elements.len());
        for (index, element) in elements.iter().enumerate() {
            let part = self.add("pw-part", element, &[state], |message| {
                put_bytes(message, field::OPCODE, b"get-tuple-element");
                put_int(message, field::TUPLE_INDEX, index as i64);
            });
            parts.push(if index == copied { self.after(element, part, before) } else { part });
        }
        Ok(self.add("pw-state", whole, &parts, |message| put_bytes(message, field::OPCODE, b"tuple")))
    }
}

fn number(instruction: &Instruction<'_>, of: u32) -> Result<usize> {
    let number = instruction.field(of)?.map_or(Ok(0), |f| f.int())?;
    usize::try_from(number).map_err(|_| HloError::malformed(format!("{:?} has the number {number}", instruction.name)))
}

/// Elements of a loop's state that its condition takes out. Of its two computations that is the one that yields no
/// tuple, or a tuple of another shape than the state's.
fn read_by_condition(module: &Module<'_>, at: &Instruction<'_>) -> Result<BTreeSet<usize>> {
    let state = at.shape()?;
    let mut read = BTreeSet::new();
    for &called in &at.called {
        let called = &module.computations[module.at(called)?];
        if Shape::read(called.get(called.root)?.shape()?)? == Shape::read(state)? {
            continue;
        }
        let used: BTreeSet<i64> = called.instructions.iter().flat_map(|i| i.operands.iter().copied()).chain([called.root]).collect();
        for part in called.instructions.iter().filter(|i| i.opcode == "get-tuple-element" && used.contains(&i.id)) {
            if called.get(*part.operands.first().unwrap_or(&-1))?.opcode == "parameter" {
                read.insert(number(part, field::TUPLE_INDEX)?);
            }
        }
    }
    Ok(read)
}

/// The operand of a call that its computation works on: the smallest array.
fn read_by_call(module: &Module<'_>, computation: &Computation<'_>, at: &Instruction<'_>) -> Result<usize> {
    let mut smallest = None;
    for &called in &at.called {
        let called = &module.computations[module.at(called)?];
        let passes = |opcode: &str| matches!(opcode, "tuple" | "get-tuple-element" | "bitcast");
        let used: BTreeSet<i64> =
            called.instructions.iter().filter(|i| !passes(i.opcode)).flat_map(|i| i.operands.iter().copied()).collect();
        for parameter in called.instructions.iter().filter(|i| i.opcode == "parameter" && used.contains(&i.id)) {
            let place = number(parameter, field::PARAMETER)?;
            let operand = at.operands.get(place).ok_or_else(|| at.unsupported(format!("it has no operand {place}")))?;
            let bytes = Shape::read(computation.get(*operand)?.shape()?)?.bytes();
            smallest = smallest.into_iter().chain(bytes.map(|bytes| (bytes, place))).min();
        }
    }
    smallest.map(|(_, place)| place).ok_or_else(|| at.unsupported("it runs collectives, and works on none of its operands"))
}
