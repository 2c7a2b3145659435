//! Programs of the simulated world, and the tokens that stand for the values of buffers.
//!
//! A token is a hash of how a value came about. Fake devices make tokens out of the tokens they are given; the
//! reference model makes them out of the requests; a client that reads the wrong one was served wrong wiring.

use std::sync::Arc;

use bytes::Bytes;
use pw_types::{CompileReport, CompiledMemory, DType, Handle, SessionId, ValueSpec};

use crate::rng::{Rng, mix};

/// Elements are `f32`.
pub(crate) const ITEM_BYTES: u64 = 4;
pub(crate) const SIZES: [i64; 3] = [12, 24, 48];

#[derive(Clone, Debug)]
pub(crate) struct Value {
    pub(crate) n: i64,
    pub(crate) tiled: bool,
    pub(crate) kind: &'static str,
}

#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) id: u64,
    pub(crate) devices: u32,
    pub(crate) parameters: Vec<Value>,
    pub(crate) outputs: Vec<Value>,
    pub(crate) donated: Vec<u32>,
    pub(crate) temporaries: u64,
    pub(crate) compile_fails: bool,
    pub(crate) load_fails: bool,
    pub(crate) time_ns: u64,
    pub(crate) fails_per_mille: u64,
}

impl Value {
    pub(crate) fn shard_len(&self, devices: u32) -> i64 {
        if self.tiled { self.n / i64::from(devices) } else { self.n }
    }
}

impl Program {
    pub(crate) fn random(id: u64, devices_max: u32, workers: u32, rng: &mut Rng) -> Program {
        let devices = match rng.below(10) {
            0..=3 => 1,
            // Maybe more than one worker has; they divide every size.
            4..=5 => rng.pick(&[2, 3, 4, 6]).min(devices_max * workers),
            _ => rng.between(1, u64::from(devices_max)) as u32,
        };
        let value = |rng: &mut Rng| Value { n: rng.pick(&SIZES), tiled: devices > 1 && rng.per_mille(600), kind: "device" };
        let parameters: Vec<Value> = (0..rng.between(0, 3)).map(|_| value(rng)).collect();
        let outputs = (0..rng.between(1, 3))
            .map(|_| {
                let kind = if rng.per_mille(100) {
                    ""
                } else if rng.per_mille(60) {
                    "pinned_host"
                } else {
                    "device"
                };
                Value { kind, ..value(rng) }
            })
            .collect();
        let donated = (0..parameters.len() as u32).filter(|_| rng.per_mille(450)).collect();
        Program {
            id,
            devices,
            parameters,
            outputs,
            donated,
            temporaries: rng.pick(&[0, 0, 64, 200]),
            compile_fails: rng.per_mille(60),
            load_fails: rng.per_mille(40),
            time_ns: rng.pick(&[20_000, 200_000, 1_000_000, 4_000_000]),
            fails_per_mille: if rng.per_mille(200) { 150 } else { 4 },
        }
    }

    pub(crate) fn name(&self) -> String {
        format!("program{}", self.id)
    }

    /// What the client sends.
    pub(crate) fn bytes(&self) -> Bytes {
        Bytes::from(self.id.to_string())
    }

    /// The program that these bytes are.
    pub(crate) fn number(bytes: &[u8]) -> Option<usize> {
        std::str::from_utf8(bytes).ok()?.parse().ok()
    }

    pub(crate) fn compile_error(&self) -> String {
        format!("{} does not compile", self.name())
    }

    pub(crate) fn load_error(&self) -> String {
        format!("{} does not load", self.name())
    }

    pub(crate) fn report(&self) -> CompileReport {
        let spec = |v: &Value| ValueSpec {
            dtype: DType::F32,
            shard_dims: vec![v.shard_len(self.devices)],
            dims: vec![v.n],
            layout: "{0}".to_owned(),
            memory_kind: v.kind.to_owned(),
            op_sharding: (self.devices > 1).then(|| Bytes::from_static(if v.tiled { b"tiled" } else { b"" })),
        };
        CompileReport {
            name: self.name(),
            fingerprint: self.bytes(),
            replicas: 1,
            partitions: self.devices,
            parameters: self.parameters.iter().map(spec).collect(),
            outputs: self.outputs.iter().map(spec).collect(),
            donated: self.donated.clone(),
            memory: CompiledMemory { temporaries: self.temporaries, ..CompiledMemory::default() },
            layouts_error: None,
            collectives: u32::from(self.devices > 1),
            host_callbacks: false,
        }
    }

    /// Shard `position` of output `output`. Every shard of every argument goes in, as through a collective.
    pub(crate) fn output_token(&self, launch_id: i32, output: usize, position: usize, arguments: &[u64]) -> u64 {
        let place = if self.outputs[output].tiled { position as u64 } else { 0 };
        mix([self.id, launch_id as u64, output as u64, place].into_iter().chain(arguments.iter().copied()))
    }
}

pub(crate) type Programs = Arc<[Program]>;

/// The content of a host buffer.
pub(crate) fn host_token(session: SessionId, buffer: Handle) -> u64 {
    mix([1, session.0, buffer.0])
}

/// The part of a host buffer that starts at `start`; `None` = all of it.
pub(crate) fn part_token(whole: u64, start: Option<i64>) -> u64 {
    start.map_or(whole, |start| mix([2, whole, start as u64]))
}
