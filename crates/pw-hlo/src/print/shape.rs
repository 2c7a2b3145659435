//! Shapes and layouts.

use std::fmt::Write;

use super::braces;
use crate::error::Result;
use crate::message::Message;

/// Names of element types by their numbers in `PrimitiveType`.
const ELEMENTS: [(i64, &str); 34] = [
    (1, "pred"),
    (2, "s8"),
    (3, "s16"),
    (4, "s32"),
    (5, "s64"),
    (6, "u8"),
    (7, "u16"),
    (8, "u32"),
    (9, "u64"),
    (10, "f16"),
    (11, "f32"),
    (12, "f64"),
    (14, "opaque"),
    (15, "c64"),
    (16, "bf16"),
    (17, "token"),
    (18, "c128"),
    (19, "f8e5m2"),
    (20, "f8e4m3fn"),
    (21, "s4"),
    (22, "u4"),
    (23, "f8e4m3b11fnuz"),
    (24, "f8e5m2fnuz"),
    (25, "f8e4m3fnuz"),
    (26, "s2"),
    (27, "u2"),
    (28, "f8e4m3"),
    (29, "f8e3m4"),
    (30, "s1"),
    (31, "u1"),
    (32, "f4e2m1fn"),
    (33, "f8e8m0fnu"),
    (35, "f6e3m2fn"),
    (36, "f6e2m3fn"),
];

pub(super) const TUPLE: i64 = 13;

/// Field numbers of `ShapeProto`.
pub(super) const ELEMENT_TYPE: u32 = 2;
pub(super) const DIMENSIONS: u32 = 3;
const TUPLE_SHAPES: u32 = 4;
const LAYOUT: u32 = 5;
const IS_DYNAMIC: u32 = 6;

pub(super) fn element_name(number: i64) -> &'static str {
    ELEMENTS.iter().find(|(n, _)| *n == number).map_or("invalid", |(_, name)| name)
}

/// `f32[8,16]{1,0}`, or `(f32[], s32[2]{0})`.
pub(super) fn text(shape: &Message<'_>, layouts: bool) -> Result<String> {
    let element = shape.int(ELEMENT_TYPE)?;
    if element == TUPLE {
        let parts = shape.messages(TUPLE_SHAPES)?.iter().map(|s| text(s, layouts)).collect::<Result<Vec<_>>>()?;
        return Ok(format!("({})", listed(&parts, ", ")));
    }
    let (dims, dynamic) = (shape.ints(DIMENSIONS)?, shape.ints(IS_DYNAMIC)?);
    let dims: Vec<String> = dims
        .iter()
        .enumerate()
        .map(|(at, dim)| match dynamic.get(at) {
            Some(&flag) if flag != 0 => format!("<={dim}"),
            _ => dim.to_string(),
        })
        .collect();
    let mut out = format!("{}[{}]", element_name(element), dims.join(","));
    if layouts && let Some(layout) = shape.message(LAYOUT)? {
        out.push_str(&layout_text(&layout)?);
    }
    Ok(out)
}

/// `{1,0}`, `{1,0:T(8,128)E(4)S(5)}`; nothing for the plain layout of a scalar.
fn layout_text(layout: &Message<'_>) -> Result<String> {
    let mut extra = String::new();
    for tile in layout.messages(6)? {
        let dims: Vec<String> = tile.ints(1)?.iter().map(|&d| if d == i64::MIN { "*".to_owned() } else { d.to_string() }).collect();
        let open = if extra.starts_with('T') { "" } else { "T" };
        let _ = write!(extra, "{open}({})", dims.join(","));
    }
    for (number, letter) in [(7, 'E'), (8, 'S')] {
        let value = layout.int(number)?;
        if value != 0 {
            let _ = write!(extra, "{letter}({value})");
        }
    }
    let order = layout.ints(1)?;
    Ok(match (order.is_empty(), extra.is_empty()) {
        (true, true) => String::new(),
        (_, true) => braces(&order),
        (true, false) => format!("{{:{extra}}}"),
        (false, false) => format!("{}:{extra}}}", braces(&order).trim_end_matches('}')),
    })
}

/// Every fifth part of a long list is numbered.
pub(super) fn listed(parts: &[String], between: &str) -> String {
    let mut out = String::new();
    for (at, part) in parts.iter().enumerate() {
        if at > 0 {
            out.push_str(between);
            if at % 5 == 0 {
                let _ = write!(out, "/*index={at}*/");
            }
        }
        out.push_str(part);
    }
    out
}
