//! The rewrite of a module.

use std::collections::BTreeMap;

use crate::COLLECTIVE;
use crate::chain::Communicating;
use crate::collective::Collective;
use crate::delay::{Fresh, delay};
use crate::error::{HloError, Result};
use crate::groups::Devices;
use crate::lower::{Class, call, classify, describe};
use crate::module::{
    COMPUTATION_INSTRUCTIONS, Computation, Instruction, MODULE_COMPUTATIONS, MODULE_DEVICE_ASSIGNMENT, MODULE_SCHEDULE, Module,
    write_schedule,
};
use crate::shape::Shape;
use crate::wire::{fields, put_bytes};

/// A program for one device at a time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rewritten {
    /// The `HloModuleProto`, with a schedule if it had one.
    pub module: Vec<u8>,
    /// Its collectives, by key.
    pub collectives: Vec<Collective>,
    /// Whether it calls for the partition or replica number.
    pub asks_who: bool,
}

/// Rewrites an optimized `HloModuleProto`, scheduled or not, that is partitioned for `replicas` × `partitions`
/// devices. Fails on communication that is not understood.
pub fn rewrite(module: &[u8], replicas: u32, partitions: u32) -> Result<Rewritten> {
    if replicas.checked_mul(partitions).is_none_or(|members| members == 0) {
        return Err(HloError::malformed(format!("{replicas} replicas of {partitions} partitions")));
    }
    let read = Module::read(module)?;
    let mut work = Rewriter {
        communicating: Communicating::find(&read)?,
        module: &read,
        devices: Devices { replicas, partitions },
        fresh: Fresh::of(&read),
        added: BTreeMap::new(),
        collectives: Vec::new(),
        asks_who: false,
    };
    let rewritten = (0..read.computations.len()).map(|at| work.computation(at)).collect::<Result<Vec<_>>>()?;
    let mut rewritten = rewritten.iter();
    let mut out = Vec::with_capacity(module.len() + module.len() / 4);
    for f in fields(module) {
        let f = f?;
        match f.number {
            MODULE_COMPUTATIONS => rewritten.next().iter().for_each(|computation| put_bytes(&mut out, MODULE_COMPUTATIONS, computation)),
            MODULE_SCHEDULE if !work.added.is_empty() => {}
            // It names the devices of the gang; the program is for any device.
            MODULE_DEVICE_ASSIGNMENT => {}
            _ => out.extend_from_slice(f.raw),
        }
    }
    if !work.added.is_empty() && !read.schedule.is_empty() {
        let with_added = |id: &i64| work.added.get(id).into_iter().flatten().copied().chain([*id]).collect::<Vec<i64>>();
        let schedule = read.schedule.iter().map(|(&computation, ids)| (computation, ids.iter().flat_map(with_added).collect()));
        put_bytes(&mut out, MODULE_SCHEDULE, &write_schedule(&schedule.collect()));
    }
    Ok(Rewritten { module: out, collectives: work.collectives, asks_who: work.asks_who })
}

struct Rewriter<'m, 'a> {
    module: &'m Module<'a>,
    communicating: Communicating,
    devices: Devices,
    fresh: Fresh,
    /// New instructions, by the one that they stand before.
    added: BTreeMap<i64, Vec<i64>>,
    collectives: Vec<Collective>,
    asks_who: bool,
}

impl Rewriter<'_, '_> {
    fn computation(&mut self, at: usize) -> Result<Vec<u8>> {
        let (order, before) = self.communicating.chain(self.module, at)?;
        let module = self.module;
        let computation = &module.computations[at];
        let mut out = Vec::with_capacity(computation.raw.len() + 64);
        let mut order = order.into_iter();
        for f in fields(computation.raw) {
            let f = f?;
            if f.number != COMPUTATION_INSTRUCTIONS {
                out.extend_from_slice(f.raw);
            } else if let Some(next) = order.next() {
                let at = &computation.instructions[next];
                self.instruction(computation, at, before.get(&at.id).copied(), &mut out)?;
            }
        }
        Ok(out)
    }

    /// Appends an instruction, and what it needs to come after the one `before`, to the message of its computation.
    fn instruction(&mut self, computation: &Computation<'_>, at: &Instruction<'_>, before: Option<i64>, out: &mut Vec<u8>) -> Result<()> {
        if let Some(before) = before.map(|id| computation.get(id)).transpose()?
            && !Shape::read(before.shape()?)?.has_array()
        {
            return Err(at.unsupported(format!("{:?}, which must be done before it, has no result to wait for", before.name)));
        }
        let message = match (classify(at.opcode), before) {
            (Class::Collective, _) => {
                let collective = describe(self.module, computation, at, self.devices)?;
                let attributes = format!("{{cfg = \"{}\", key = {} : i64}}", collective.to_text(), self.collectives.len());
                self.collectives.push(collective);
                call(at, COLLECTIVE, &attributes, true, before)?
            }
            (Class::Who(target), _) => {
                self.asks_who = true;
                call(at, target, "{}", false, None)?
            }
            (Class::Unknown, _) => return Err(at.unsupported("this kind of communication is not known")),
            (Class::Local, None) => at.raw.to_vec(),
            (Class::Local, Some(before)) => {
                let delayed = delay(self.module, computation, at, before, &mut self.fresh)?;
                delayed.added.iter().for_each(|(_, message)| put_bytes(out, COMPUTATION_INSTRUCTIONS, message));
                self.added.insert(at.id, delayed.added.iter().map(|(id, _)| *id).collect());
                delayed.message
            }
        };
        put_bytes(out, COMPUTATION_INSTRUCTIONS, &message);
        Ok(())
    }
}
