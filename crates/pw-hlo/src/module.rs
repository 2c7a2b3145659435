//! A module as far as the rewrite looks at it: its computations, their instructions and its schedule.

use std::collections::BTreeMap;

use crate::error::{HloError, Result};
use crate::wire::{Field, fields, put_bytes, put_int};

/// Field numbers of `HloModuleProto`.
pub(crate) const MODULE_COMPUTATIONS: u32 = 3;
pub(crate) const MODULE_SCHEDULE: u32 = 7;
pub(crate) const MODULE_DEVICE_ASSIGNMENT: u32 = 15;

/// Field numbers of `HloComputationProto`.
pub(crate) const COMPUTATION_INSTRUCTIONS: u32 = 2;
const COMPUTATION_ID: u32 = 5;
const COMPUTATION_ROOT: u32 = 6;

/// Field numbers of `HloInstructionProto`.
pub(crate) mod field {
    pub(crate) const NAME: u32 = 1;
    pub(crate) const OPCODE: u32 = 2;
    pub(crate) const SHAPE: u32 = 3;
    pub(crate) const PARAMETER: u32 = 9;
    pub(crate) const TUPLE_INDEX: u32 = 13;
    pub(crate) const DIMENSIONS: u32 = 14;
    pub(crate) const CHANNEL: u32 = 26;
    pub(crate) const TARGET: u32 = 28;
    pub(crate) const ID: u32 = 35;
    pub(crate) const OPERANDS: u32 = 36;
    pub(crate) const CONTROL: u32 = 37;
    pub(crate) const CALLED: u32 = 38;
    pub(crate) const BACKEND_CONFIG: u32 = 43;
    pub(crate) const ALL_REDUCE_ID: u32 = 45;
    pub(crate) const GROUPS: u32 = 49;
    pub(crate) const PAIRS: u32 = 52;
    pub(crate) const CONSTRAIN_LAYOUT: u32 = 56;
    pub(crate) const OPERAND_SHAPES: u32 = 57;
    pub(crate) const SIDE_EFFECT: u32 = 65;
    pub(crate) const GLOBAL_IDS: u32 = 71;
    pub(crate) const API_VERSION: u32 = 77;
    pub(crate) const GROUP_LIST: u32 = 87;
    pub(crate) const IOTA_GROUPS: u32 = 92;
    pub(crate) const MESH_GROUPS: u32 = 93;
    pub(crate) const BACKEND_PAYLOAD: u32 = 99;
}

/// An instruction. Ids are unique in the module, and opaque.
#[derive(Debug, Clone)]
pub(crate) struct Instruction<'a> {
    /// The message.
    pub(crate) raw: &'a [u8],
    pub(crate) id: i64,
    pub(crate) name: &'a str,
    pub(crate) opcode: &'a str,
    pub(crate) operands: Vec<i64>,
    /// Instructions that must be done before.
    pub(crate) control: Vec<i64>,
    /// Computations it runs.
    pub(crate) called: Vec<i64>,
}

impl<'a> Instruction<'a> {
    fn read(raw: &'a [u8]) -> Result<Self> {
        let mut read = Instruction { raw, id: 0, name: "", opcode: "", operands: Vec::new(), control: Vec::new(), called: Vec::new() };
        for f in fields(raw) {
            let f = f?;
            match f.number {
                field::NAME => read.name = f.text()?,
                field::OPCODE => read.opcode = f.text()?,
                field::ID => read.id = f.int()?,
                field::OPERANDS => f.push_ints(&mut read.operands)?,
                field::CONTROL => f.push_ints(&mut read.control)?,
                field::CALLED => f.push_ints(&mut read.called)?,
                _ => {}
            }
        }
        if read.opcode.is_empty() {
            return Err(HloError::malformed(format!("the instruction {:?} has no opcode", read.name)));
        }
        Ok(read)
    }

    /// The first field of a number.
    pub(crate) fn field(&self, number: u32) -> Result<Option<Field<'a>>> {
        fields(self.raw).find(|f| f.as_ref().map_or(true, |f| f.number == number)).transpose()
    }

    /// The message of its shape.
    pub(crate) fn shape(&self) -> Result<&'a [u8]> {
        let shape = self.field(field::SHAPE)?;
        shape.ok_or_else(|| HloError::malformed(format!("{:?} has no shape", self.name)))?.bytes()
    }

    /// A refusal of this instruction.
    pub(crate) fn unsupported(&self, why: impl Into<String>) -> HloError {
        HloError::Unsupported { name: self.name.to_owned(), op: self.opcode.to_owned(), why: why.into() }
    }
}

/// A computation.
#[derive(Debug)]
pub(crate) struct Computation<'a> {
    /// The message.
    pub(crate) raw: &'a [u8],
    pub(crate) id: i64,
    pub(crate) root: i64,
    pub(crate) instructions: Vec<Instruction<'a>>,
    /// Index in `instructions`, by id.
    pub(crate) index: BTreeMap<i64, usize>,
}

impl<'a> Computation<'a> {
    fn read(raw: &'a [u8]) -> Result<Self> {
        let mut read = Computation { raw, id: 0, root: 0, instructions: Vec::new(), index: BTreeMap::new() };
        for f in fields(raw) {
            let f = f?;
            match f.number {
                COMPUTATION_INSTRUCTIONS => read.instructions.push(Instruction::read(f.bytes()?)?),
                COMPUTATION_ID => read.id = f.int()?,
                COMPUTATION_ROOT => read.root = f.int()?,
                _ => {}
            }
        }
        for (at, instruction) in read.instructions.iter().enumerate() {
            if read.index.insert(instruction.id, at).is_some() {
                return Err(HloError::malformed(format!("two instructions have the id {}", instruction.id)));
            }
        }
        Ok(read)
    }

    /// An instruction by its id.
    pub(crate) fn get(&self, id: i64) -> Result<&Instruction<'a>> {
        let at = self.index.get(&id).ok_or_else(|| HloError::malformed(format!("no instruction {id} in computation {}", self.id)))?;
        Ok(&self.instructions[*at])
    }
}

/// A module.
#[derive(Debug)]
pub(crate) struct Module<'a> {
    pub(crate) computations: Vec<Computation<'a>>,
    /// Index in `computations`, by id.
    pub(crate) index: BTreeMap<i64, usize>,
    /// Ids of the instructions of a computation in the order of execution, by its id.
    pub(crate) schedule: BTreeMap<i64, Vec<i64>>,
}

impl<'a> Module<'a> {
    /// Reads a serialized `HloModuleProto`.
    pub(crate) fn read(raw: &'a [u8]) -> Result<Self> {
        let mut read = Module { computations: Vec::new(), index: BTreeMap::new(), schedule: BTreeMap::new() };
        for f in fields(raw) {
            let f = f?;
            match f.number {
                MODULE_COMPUTATIONS => read.computations.push(Computation::read(f.bytes()?)?),
                MODULE_SCHEDULE => read_schedule(f.bytes()?, &mut read.schedule)?,
                _ => {}
            }
        }
        for (at, computation) in read.computations.iter().enumerate() {
            if read.index.insert(computation.id, at).is_some() {
                return Err(HloError::malformed(format!("two computations have the id {}", computation.id)));
            }
        }
        Ok(read)
    }

    /// Index of a computation by its id.
    pub(crate) fn at(&self, id: i64) -> Result<usize> {
        self.index.get(&id).copied().ok_or_else(|| HloError::malformed(format!("no computation {id}")))
    }
}

/// `HloScheduleProto`: a map from a computation to its sequence of instructions.
fn read_schedule(raw: &[u8], schedule: &mut BTreeMap<i64, Vec<i64>>) -> Result<()> {
    for entry in fields(raw) {
        let entry = entry?;
        if entry.number != 1 {
            continue;
        }
        let (mut computation, mut sequence) = (0, Vec::new());
        for f in fields(entry.bytes()?) {
            let f = f?;
            match f.number {
                1 => computation = f.int()?,
                2 => {
                    for id in fields(f.bytes()?) {
                        let id = id?;
                        if id.number == 1 {
                            id.push_ints(&mut sequence)?;
                        }
                    }
                }
                _ => {}
            }
        }
        schedule.insert(computation, sequence);
    }
    Ok(())
}

/// A schedule as a `HloScheduleProto`.
pub(crate) fn write_schedule(schedule: &BTreeMap<i64, Vec<i64>>) -> Vec<u8> {
    let mut out = Vec::new();
    for (&computation, ids) in schedule {
        let mut sequence = Vec::new();
        ids.iter().for_each(|&id| put_int(&mut sequence, 1, id));
        let mut entry = Vec::new();
        put_int(&mut entry, 1, computation);
        put_bytes(&mut entry, 2, &sequence);
        put_bytes(&mut out, 1, &entry);
    }
    out
}
