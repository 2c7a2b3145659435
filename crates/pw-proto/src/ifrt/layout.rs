//! XLA layout text, e.g. `{1,0:T(8,128)E(4)S(5)}`, to its message.

use super::pb::{XlaLayoutProto, XlaTileProto};

/// Reads the text that plugins give for layouts. `None` when it is of another form.
pub fn layout_from_text(text: &str) -> Option<XlaLayoutProto> {
    let inner = text.trim().strip_prefix('{')?.strip_suffix('}')?;
    let (order, rest) = inner.split_once(':').unwrap_or((inner, ""));
    let mut layout = XlaLayoutProto { minor_to_major: numbers(order)?, ..Default::default() };
    let mut rest = rest;
    while let Some(property) = rest.chars().next() {
        rest = &rest[property.len_utf8()..];
        match property {
            'T' => {
                // One letter introduces all tiles: T(8,128)(2,1).
                let mut tiles = 0;
                while rest.starts_with('(') {
                    let dimensions = numbers(group(&mut rest)?)?;
                    layout.tiles.push(XlaTileProto { dimensions });
                    tiles += 1;
                }
                if tiles == 0 {
                    return None;
                }
            }
            'E' => layout.element_size_in_bits = group(&mut rest)?.parse().ok()?,
            'S' => layout.memory_space = group(&mut rest)?.parse().ok()?,
            _ => return None,
        }
    }
    Some(layout)
}

/// The text inside the parentheses that `rest` starts with.
fn group<'a>(rest: &mut &'a str) -> Option<&'a str> {
    let (inside, after) = rest.strip_prefix('(')?.split_once(')')?;
    *rest = after;
    Some(inside)
}

fn numbers(text: &str) -> Option<Vec<i64>> {
    if text.is_empty() {
        return Some(Vec::new());
    }
    // `*` is a dimension that takes what is left; XLA writes it as the smallest integer.
    text.split(',').map(|number| if number == "*" { Some(i64::MIN) } else { number.trim().parse().ok() }).collect()
}
