//! Shardings of instructions.

use super::{braces, joined};
use crate::error::Result;
use crate::message::Message;

/// `{replicated}`, `{devices=[8,1]<=[8]}`, `{{…}, {…}}`.
pub(super) fn text(sharding: &Message<'_>) -> Result<String> {
    Ok(match sharding.int(1)? {
        0 => "{replicated}".to_owned(),
        1 => format!("{{maximal device={}}}", joined(&sharding.ints(4)?, ",")),
        2 => {
            let parts = sharding.messages(5)?.iter().map(text).collect::<Result<Vec<_>>>()?;
            format!("{{{}}}", super::shape::listed(&parts, ", "))
        }
        4 => "{manual}".to_owned(),
        5 => "{unknown}".to_owned(),
        6 => "{unreduced}".to_owned(),
        _ => tiled(sharding)?,
    })
}

fn tiled(sharding: &Message<'_>) -> Result<String> {
    let dims = joined(&sharding.ints(3)?, ",");
    let iota = sharding.ints(9)?;
    let devices = if iota.is_empty() {
        joined(&sharding.ints(4)?, ",")
    } else {
        let order = sharding.ints(10)?;
        let identity = order.iter().enumerate().all(|(at, &dim)| at as i64 == dim);
        let transposed = if identity { String::new() } else { format!("T({})", joined(&order, ",")) };
        format!("<=[{}]{transposed}", joined(&iota, ","))
    };
    let kinds = sharding.ints(8)?;
    let kinds = kinds.iter().map(|kind| match kind {
        0 => "replicated",
        4 => "manual",
        6 => "unreduced",
        _ => "unknown",
    });
    let kinds: Vec<&str> = kinds.collect();
    let last = match (sharding.flag(6)?, kinds.is_empty()) {
        (true, _) => " last_tile_dim_replicate".to_owned(),
        (false, false) => format!(" last_tile_dims={{{}}}", kinds.join(", ")),
        (false, true) => String::new(),
    };
    Ok(format!("{{devices=[{dims}]{devices}{last}}}"))
}

/// `{{0,1},{2,3}}`, or `[2,4]<=[8]`.
pub(super) fn groups(groups: &[Message<'_>]) -> Result<String> {
    let parts = groups.iter().map(|group| Ok(braces(&group.ints(1)?))).collect::<Result<Vec<_>>>()?;
    Ok(format!("{{{}}}", parts.join(",")))
}

/// `[2,4]<=[4,2]T(1,0)`.
pub(super) fn iota_groups(list: &Message<'_>) -> Result<String> {
    let order = list.ints(4)?;
    let identity = order.iter().enumerate().all(|(at, &dim)| at as i64 == dim);
    let transposed = if identity { String::new() } else { format!("T({})", joined(&order, ",")) };
    Ok(format!("[{},{}]<=[{}]{transposed}", list.int(1)?, list.int(2)?, joined(&list.ints(3)?, ",")))
}

/// `mesh['x'=4,'y'=2] {'x'}`: the axes along which a group extends.
pub(super) fn mesh_groups(list: &Message<'_>) -> Result<String> {
    let mesh = list.message(1)?.unwrap_or_default();
    let axes = mesh.messages(1)?.iter().map(|axis| Ok((axis.text(1)?, axis.int(2)?))).collect::<Result<Vec<_>>>()?;
    let whole: Vec<String> = axes.iter().map(|(name, size)| format!("'{name}'={size}")).collect();
    let along = list.messages(2)?;
    let along = along.iter().map(|reference| {
        let name = axes.get(reference.int(1)? as usize).map_or("?", |(name, _)| name);
        Ok(match reference.message(2)? {
            Some(part) => format!("'{name}':({}){}", part.int(1)?, part.int(2)?),
            None => format!("'{name}'"),
        })
    });
    Ok(format!("mesh[{}] {{{}}}", whole.join(","), along.collect::<Result<Vec<_>>>()?.join(",")))
}
