//! Checks before a launch: the plugin looks at byte counts only, so a wrong dtype, shape or memory would pass it.

use std::sync::Arc;

use pw_types::dtype::describe;
use pw_types::{Code, DType, Status};

use crate::event::Part;
use crate::program::Loaded;
use crate::table::{Spec, Table};

/// The arguments of a launch, `ends[i]` being where the parts of argument `i` end.
pub(crate) fn check_arguments(table: &Table, loaded: &Loaded, parts: &[Part], ends: &[u32]) -> Result<(), Status> {
    let report = &loaded.program.report;
    if ends.len() != loaded.parameters.len() {
        let text = format!("{} takes {} arguments, got {}", report.name, loaded.parameters.len(), ends.len());
        return Err(Status::invalid(text));
    }
    let devices = &loaded.program.devices;
    let mut start = 0;
    for (index, (wanted, &end)) in loaded.parameters.iter().zip(ends).enumerate() {
        let parts = &parts[start..end as usize];
        start = end as usize;
        let shards: u32 = parts.iter().map(|p| p.count).sum();
        if shards as usize != devices.len() {
            let text = format!("argument {index} of {}: {shards} shards for {} devices", report.name, devices.len());
            return Err(Status::invalid(text));
        }
        let mut position = 0;
        for part in parts {
            let backing = table.get(part.backing);
            for shard in part.first..part.first + part.count {
                let given = backing.specs.of(shard);
                if !Arc::ptr_eq(wanted, given) && !accepts(wanted, given) {
                    return Err(mismatch(index, &report.name, wanted, given));
                }
                let (device, expected) = (backing.shards[shard as usize].device, devices[position]);
                if device != expected {
                    let text =
                        format!("argument {index} of {}: shard {position} is on device {device}, wanted on device {expected}", report.name);
                    return Err(Status::new(Code::InvalidArgument, text));
                }
                position += 1;
            }
        }
    }
    Ok(())
}

/// An empty memory kind is one that the plugin could not tell. A token parameter takes a token or the `pred[0]`
/// that JAX makes the first one of (protocol fact).
fn accepts(wanted: &Spec, given: &Spec) -> bool {
    let kind = wanted.memory_kind.is_empty() || given.memory_kind.is_empty() || wanted.memory_kind == given.memory_kind;
    let value = match wanted.dtype {
        DType::Token => given.dtype == DType::Token || (given.dtype == DType::Pred && given.dims == [0]),
        dtype => dtype == given.dtype && wanted.dims == given.dims,
    };
    kind && value
}

fn mismatch(index: usize, name: &str, wanted: &Spec, given: &Spec) -> Status {
    let text = |s: &Spec| format!("{} in memory {:?}", describe(s.dtype, &s.dims), s.memory_kind);
    Status::invalid(format!("argument {index} of {name}: wanted {} on each device, got {}", text(wanted), text(given)))
}
