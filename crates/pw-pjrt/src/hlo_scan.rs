//! What the optimized HLO module says about an executable.
//!
//! A scan of the wire: the top-level fields are read, and of the instructions only opcode and
//! custom-call target. Nothing is decoded in full, and nothing is written.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::{PjrtError, Result};
use crate::types::BufferType;
use crate::wire::{Value, fields, push_ints};

/// A parameter or result of the module, per shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ShapeInfo {
    pub(crate) element_type: BufferType,
    pub(crate) dims: Vec<i64>,
    /// 0 device, 5 pinned host, 6 unpinned host.
    pub(crate) memory_space: i64,
}

impl ShapeInfo {
    pub(crate) fn memory_kind(&self) -> &'static str {
        match self.memory_space {
            5 => "pinned_host",
            6 => "unpinned_host",
            _ => "device",
        }
    }
}

/// What the scan found.
#[derive(Debug, Default)]
pub(crate) struct Module {
    pub(crate) name: String,
    pub(crate) params: Vec<ShapeInfo>,
    pub(crate) results: Vec<ShapeInfo>,
    pub(crate) donated: BTreeSet<u32>,
    /// Classic `OpSharding` bytes of the root, as in the module: bare or a tuple.
    pub(crate) output_sharding: Option<Vec<u8>>,
    pub(crate) param_shardings: Vec<Vec<u8>>,
    pub(crate) collectives: BTreeMap<String, u32>,
    pub(crate) uses_partition_id: bool,
    pub(crate) custom_call_targets: BTreeSet<String>,
}

/// The `HloModuleProto` in an optimized program of the given format.
pub(crate) fn module_bytes<'a>(program: &'a [u8], format: &str) -> Result<&'a [u8]> {
    match format {
        "hlo" => Ok(program),
        "hlo_with_config" => {
            let mut module = None;
            fields(program, |number, value| {
                if let (1, Value::Bytes(bytes)) = (number, value) {
                    module = Some(bytes);
                }
                Ok(())
            })?;
            module.ok_or_else(|| PjrtError::internal("optimized program without a module"))
        }
        _ => Err(PjrtError::unimplemented(format!("optimized program of format {format:?}"))),
    }
}

/// Scans an `HloModuleProto`.
pub(crate) fn scan(bytes: &[u8]) -> Result<Module> {
    let mut module = Module::default();
    scan_module(bytes, &mut module)?;
    Ok(module)
}

fn scan_module(bytes: &[u8], module: &mut Module) -> Result<()> {
    fields(bytes, |number, value| {
        let Value::Bytes(bytes) = value else { return Ok(()) };
        match number {
            1 => module.name = lossy(bytes),
            3 => scan_computation(bytes, module)?,
            4 => scan_program_shape(bytes, module)?,
            8 => scan_aliases(bytes, &mut module.donated)?,
            12 => module.output_sharding = Some(bytes.to_vec()),
            14 => module.param_shardings.push(bytes.to_vec()),
            _ => {}
        }
        Ok(())
    })
}

fn scan_computation(bytes: &[u8], module: &mut Module) -> Result<()> {
    fields(bytes, |number, value| match (number, value) {
        (2, Value::Bytes(instruction)) => scan_instruction(instruction, module),
        _ => Ok(()),
    })
}

fn scan_instruction(bytes: &[u8], module: &mut Module) -> Result<()> {
    let mut opcode: &[u8] = &[];
    let mut target: &[u8] = &[];
    fields(bytes, |number, value| {
        match (number, value) {
            (2, Value::Bytes(b)) => opcode = b,
            (28, Value::Bytes(b)) => target = b,
            _ => {}
        }
        Ok(())
    })?;
    let opcode = lossy(opcode);
    if opcode == "custom-call" && !target.is_empty() {
        module.custom_call_targets.insert(lossy(target));
    }
    module.uses_partition_id |= opcode == "partition-id" || opcode == "replica-id";
    if let Some(collective) = collective(&opcode) {
        *module.collectives.entry(collective.to_owned()).or_default() += 1;
    }
    Ok(())
}

/// The collective that an opcode is or starts; `-done` halves are not counted.
fn collective(opcode: &str) -> Option<&str> {
    let base = opcode.strip_suffix("-start").unwrap_or(opcode);
    const NAMES: [&str; 10] = [
        "all-reduce",
        "all-gather",
        "all-to-all",
        "ragged-all-to-all",
        "reduce-scatter",
        "collective-permute",
        "collective-broadcast",
        "send",
        "recv",
        "collective-reduce",
    ];
    NAMES.contains(&base).then_some(base)
}

fn scan_program_shape(bytes: &[u8], module: &mut Module) -> Result<()> {
    fields(bytes, |number, value| {
        match (number, value) {
            (1, Value::Bytes(shape)) => module.params.push(leaf(shape)?),
            (2, Value::Bytes(shape)) => leaves(shape, &mut module.results)?,
            _ => {}
        }
        Ok(())
    })
}

const TUPLE: u64 = 13;

/// The leaves of a result shape: itself, or the elements of a tuple.
fn leaves(shape: &[u8], out: &mut Vec<ShapeInfo>) -> Result<()> {
    let mut element_type = 0;
    let mut elements = Vec::new();
    fields(shape, |number, value| {
        match (number, value) {
            (2, Value::Varint(v)) => element_type = v,
            (4, Value::Bytes(b)) => elements.push(b),
            _ => {}
        }
        Ok(())
    })?;
    if element_type != TUPLE {
        out.push(leaf(shape)?);
        return Ok(());
    }
    elements.into_iter().try_for_each(|element| {
        out.push(leaf(element)?);
        Ok(())
    })
}

fn leaf(shape: &[u8]) -> Result<ShapeInfo> {
    let mut code = 0;
    let mut dims = Vec::new();
    let mut memory_space = 0;
    fields(shape, |number, value| {
        match (number, value) {
            (2, Value::Varint(v)) => code = v,
            (3, v) => push_ints(&mut dims, v)?,
            (5, Value::Bytes(layout)) => fields(layout, |number, value| {
                if let (8, Value::Varint(v)) = (number, value) {
                    memory_space = v as i64;
                }
                Ok(())
            })?,
            _ => {}
        }
        Ok(())
    })?;
    let element_type = u32::try_from(code)
        .ok()
        .and_then(BufferType::from_xla)
        .ok_or_else(|| PjrtError::unimplemented(format!("HLO element type {code}")))?;
    Ok(ShapeInfo { element_type, dims, memory_space })
}

/// The parameters that an output aliases. `buffer_donor` is another field and not looked at:
/// a donor that found no output keeps its buffer.
fn scan_aliases(bytes: &[u8], donated: &mut BTreeSet<u32>) -> Result<()> {
    fields(bytes, |number, value| {
        let (1, Value::Bytes(entry)) = (number, value) else { return Ok(()) };
        let mut parameter = 0;
        fields(entry, |number, value| {
            if let (2, Value::Varint(v)) = (number, value) {
                parameter = v as u32;
            }
            Ok(())
        })?;
        donated.insert(parameter);
        Ok(())
    })
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// An `OpSharding`, as far as shapes need it.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct OpSharding {
    kind: u64,
    tile_dims: Vec<i64>,
    pub(crate) tuple: Vec<Vec<u8>>,
    pub(crate) is_tuple: bool,
    /// The mesh-axes form, which the clients must not see.
    named: Option<Vec<u8>>,
}

const SHARDING_TUPLE: u64 = 2;
const SHARDING_OTHER: u64 = 3;

impl OpSharding {
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self> {
        let mut sharding = Self::default();
        fields(bytes, |number, value| {
            match (number, value) {
                (1, Value::Varint(v)) => sharding.kind = v,
                (3, v) => push_ints(&mut sharding.tile_dims, v)?,
                (5, Value::Bytes(b)) => sharding.tuple.push(b.to_vec()),
                (14, Value::Bytes(b)) => sharding.named = Some(b.to_vec()),
                _ => {}
            }
            Ok(())
        })?;
        sharding.is_tuple = sharding.kind == SHARDING_TUPLE;
        Ok(sharding)
    }

    /// Global dimensions of an array whose shards have these.
    pub(crate) fn global_dims(&self, shard: &[i64]) -> Result<Vec<i64>> {
        if self.named.is_some() {
            return Err(PjrtError::unimplemented("a sharding by named axes"));
        }
        if self.kind != SHARDING_OTHER {
            return Ok(shard.to_vec());
        }
        if self.tile_dims.len() < shard.len() {
            return Err(PjrtError::internal(format!(
                "sharding of {} tile dimensions on an array of {}",
                self.tile_dims.len(),
                shard.len()
            )));
        }
        shard
            .iter()
            .zip(&self.tile_dims)
            .map(|(&d, &t)| d.checked_mul(t).ok_or_else(|| PjrtError::internal("global dimension overflows")))
            .collect()
    }

    /// Rewrites the one named form that plain programs yield, "replicated", to the classic one.
    pub(crate) fn classic(bytes: Vec<u8>) -> Result<Vec<u8>> {
        let Some(named) = Self::parse(&bytes)?.named else { return Ok(bytes) };
        let mut tiled = false;
        // dim_shardings, unreduced_axes, manual_axes; the mesh and replicated axes say nothing.
        fields(&named, |number, value| {
            let empty = value.bytes().is_some_and(<[u8]>::is_empty);
            tiled |= match number {
                2 => !empty && dim_has_axes(value)?,
                5 | 7 => true,
                _ => false,
            };
            Ok(())
        })?;
        if tiled {
            return Err(PjrtError::unimplemented("a sharding by named axes"));
        }
        Ok(Vec::new())
    }
}

fn dim_has_axes(value: Value<'_>) -> Result<bool> {
    let mut axes = false;
    if let Value::Bytes(dim) = value {
        fields(dim, |number, _| {
            axes |= number == 1;
            Ok(())
        })?;
    }
    Ok(axes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn global_shapes_of_shardings() {
        // type OTHER, tile dims [4,1,2] packed, replicate_on_last_tile_dim.
        let partial = OpSharding::parse(&[0x08, 3, 0x1a, 3, 4, 1, 2, 0x30, 1]).unwrap();
        assert_eq!(partial.global_dims(&[2, 5]).unwrap(), [8, 5]);
        assert!(partial.global_dims(&[1, 1, 1, 1]).is_err());
        let replicated = OpSharding::parse(&[]).unwrap();
        assert_eq!(replicated.global_dims(&[2, 5]).unwrap(), [2, 5]);
        let maximal = OpSharding::parse(&[0x08, 1, 0x18, 4]).unwrap();
        assert_eq!(maximal.global_dims(&[2]).unwrap(), [2]);
        let named = [0x72, 2, 0x0a, 0];
        assert!(OpSharding::parse(&named).unwrap().global_dims(&[2]).is_err());
        assert_eq!(OpSharding::classic(named.to_vec()).unwrap(), Vec::<u8>::new());
        // A dimension sharded over an axis has no classic form here.
        assert!(OpSharding::classic(vec![0x72, 6, 0x12, 4, 0x0a, 2, 0x08, 1]).is_err());
    }

    #[test]
    fn collectives_are_counted_by_their_first_half() {
        assert_eq!(collective("all-reduce"), Some("all-reduce"));
        assert_eq!(collective("all-gather-start"), Some("all-gather"));
        assert_eq!(collective("all-gather-done"), None);
        assert_eq!(collective("add"), None);
    }
}
