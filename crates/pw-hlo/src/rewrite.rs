//! The rewrite of a module.

use std::collections::BTreeMap;

use crate::COLLECTIVE;
use crate::chain::Communicating;
use crate::collective::Collective;
use crate::error::{HloError, Result};
use crate::groups::Devices;
use crate::lower::{Class, call, classify, describe};
use crate::module::{COMPUTATION_INSTRUCTIONS, Instruction, MODULE_COMPUTATIONS, MODULE_DEVICE_ASSIGNMENT, Module, field};
use crate::wire::{fields, put_bytes, put_int};

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
        collectives: Vec::new(),
        asks_who: false,
    };
    let mut out = Vec::with_capacity(module.len() + module.len() / 4);
    let mut computations = 0..read.computations.len();
    for f in fields(module) {
        let f = f?;
        match (f.number, computations.start < computations.end) {
            (MODULE_COMPUTATIONS, true) => {
                let at = computations.next().unwrap_or(0);
                put_bytes(&mut out, MODULE_COMPUTATIONS, &work.computation(at)?);
            }
            // It names the devices of the gang; the program is for any device.
            (MODULE_DEVICE_ASSIGNMENT, _) => {}
            _ => out.extend_from_slice(f.raw),
        }
    }
    Ok(Rewritten { module: out, collectives: work.collectives, asks_who: work.asks_who })
}

struct Rewriter<'m, 'a> {
    module: &'m Module<'a>,
    communicating: Communicating,
    devices: Devices,
    collectives: Vec<Collective>,
    asks_who: bool,
}

impl Rewriter<'_, '_> {
    fn computation(&mut self, at: usize) -> Result<Vec<u8>> {
        let (order, edges) = self.communicating.chain(self.module, at)?;
        let computation = &self.module.computations[at];
        let mut out = Vec::with_capacity(computation.raw.len() + 64);
        let mut order = order.into_iter();
        for f in fields(computation.raw) {
            let f = f?;
            if f.number != COMPUTATION_INSTRUCTIONS {
                out.extend_from_slice(f.raw);
            } else if let Some(next) = order.next() {
                put_bytes(&mut out, COMPUTATION_INSTRUCTIONS, &self.instruction(at, &computation.instructions[next], &edges)?);
            }
        }
        Ok(out)
    }

    fn instruction(&mut self, computation: usize, at: &Instruction<'_>, edges: &BTreeMap<i64, i64>) -> Result<Vec<u8>> {
        let edge = edges.get(&at.id).filter(|before| !at.control.contains(before));
        let mut control = at.control.clone();
        control.extend(edge);
        match classify(at.opcode) {
            Class::Collective => {
                let collective = describe(self.module, &self.module.computations[computation], at, self.devices)?;
                let attributes = format!("{{cfg = \"{}\", key = {} : i64}}", collective.to_text(), self.collectives.len());
                self.collectives.push(collective);
                call(at, COLLECTIVE, &attributes, true, &control)
            }
            Class::Who(target) => {
                self.asks_who = true;
                call(at, target, "{}", false, &control)
            }
            Class::Unknown => Err(at.unsupported("this kind of communication is not known")),
            Class::Local => {
                let mut out = at.raw.to_vec();
                edge.iter().for_each(|before| put_int(&mut out, field::CONTROL, **before));
                Ok(out)
            }
        }
    }
}
