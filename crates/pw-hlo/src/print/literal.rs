//! Constants. Larger ones are left out, as XLA leaves them out of the text of a compiled program.

use super::shape::{DIMENSIONS, ELEMENT_TYPE, TUPLE};
use crate::error::Result;
use crate::message::Message;

/// Constants of more elements are not written out.
const ELEMENTS_MAX: i64 = 10;

/// `1`, `{1, 2}`, `{ { 1, 2 }, { 3, 4 } }` or `{...}`.
pub(super) fn text(literal: &Message<'_>) -> Result<String> {
    let Some(shape) = literal.message(1)? else { return Ok("{...}".to_owned()) };
    let element = shape.int(ELEMENT_TYPE)?;
    if element == TUPLE {
        let parts = literal.messages(10)?.iter().map(text).collect::<Result<Vec<_>>>()?;
        return Ok(format!("({})", parts.join(", ")));
    }
    let dims = shape.ints(DIMENSIONS)?;
    let count = dims.iter().try_fold(1_i64, |n, &d| n.checked_mul(d)).unwrap_or(i64::MAX);
    if count > ELEMENTS_MAX {
        return Ok("{...}".to_owned());
    }
    let Some(values) = values(literal, element, dims.is_empty())?.filter(|v| v.len() as i64 == count) else {
        return Ok("{...}".to_owned());
    };
    Ok(match &dims[..] {
        [] => values[0].clone(),
        dims => nested(dims, &values, true),
    })
}

fn nested(dims: &[i64], values: &[String], outermost: bool) -> String {
    match dims {
        [_] if outermost => format!("{{{}}}", values.join(", ")),
        [_] => format!("{{ {} }}", values.join(", ")),
        [first, rest @ ..] => {
            let each = values.len() / (*first).max(1) as usize;
            let parts: Vec<String> = values.chunks(each.max(1)).map(|part| nested(rest, part, false)).collect();
            format!("{{ {} }}", parts.join(", "))
        }
        [] => values.first().cloned().unwrap_or_default(),
    }
}

/// The elements as text; `None` for types that are not written out.
fn values(literal: &Message<'_>, element: i64, scalar: bool) -> Result<Option<Vec<String>>> {
    let ints = |number| Ok(Some(literal.ints(number)?.iter().map(i64::to_string).collect()));
    let bits = |number, size| literal.packed(number, size);
    let wide = |part: &[u8]| f64::from_le_bytes(part.try_into().unwrap_or_default());
    let single = |part: &[u8]| f32::from_le_bytes(part.try_into().unwrap_or_default());
    let half = |part: &[u8]| u16::from_le_bytes(part.try_into().unwrap_or_default());
    let pairs = |parts: Vec<String>| parts.chunks_exact(2).map(|p| format!("({}, {})", p[0], p[1])).collect();
    Ok(Some(match element {
        // Alone by name, in a list by number.
        1 if scalar => literal.ints(2)?.iter().map(|&v| (v != 0).to_string()).collect(),
        1 => return ints(2),
        2 => bits(15, 1)?.iter().map(|p| (p[0] as i8).to_string()).collect(),
        3 => bits(17, 2)?.iter().map(|p| (half(p) as i16).to_string()).collect(),
        4 => return ints(4),
        5 => return ints(5),
        6 => bits(3, 1)?.iter().map(|p| p[0].to_string()).collect(),
        7 => bits(16, 2)?.iter().map(|p| half(p).to_string()).collect(),
        8 => literal.ints(6)?.iter().map(|&v| (v as u32).to_string()).collect(),
        9 => literal.ints(7)?.iter().map(|&v| (v as u64).to_string()).collect(),
        10 => bits(11, 2)?
            .iter()
            .map(|p| shortest(half::f16::from_bits(half(p)).to_f64(), Digits { few: 3, all: 5 }, |v| half::f16::from_f64(v).to_f64()))
            .collect(),
        16 => bits(13, 2)?
            .iter()
            .map(|p| shortest(half::bf16::from_bits(half(p)).to_f64(), Digits { few: 2, all: 4 }, |v| half::bf16::from_f64(v).to_f64()))
            .collect(),
        11 => bits(8, 4)?.iter().map(|p| shortest(single(p).into(), SINGLE, |v| f64::from(v as f32))).collect(),
        12 => bits(9, 8)?.iter().map(|p| shortest(wide(p), DOUBLE, |v| v)).collect(),
        15 => pairs(bits(12, 4)?.iter().map(|p| shortest(single(p).into(), SINGLE, |v| f64::from(v as f32))).collect()),
        18 => pairs(bits(18, 8)?.iter().map(|p| shortest(wide(p), DOUBLE, |v| v)).collect()),
        _ => return Ok(None),
    }))
}

/// Digits that every number of a type keeps, and those that tell all its numbers apart.
#[derive(Clone, Copy)]
struct Digits {
    few: usize,
    all: usize,
}

const SINGLE: Digits = Digits { few: 6, all: 9 };
const DOUBLE: Digits = Digits { few: 15, all: 17 };

/// With few digits where they give the number again, else with all.
fn shortest(value: f64, digits: Digits, round: impl Fn(f64) -> f64) -> String {
    let short = general(value, digits.few);
    match short.parse::<f64>() {
        Ok(again) if round(again) != value && !value.is_nan() => general(value, digits.all),
        _ => short,
    }
}

/// A number with at most so many digits, in the shorter of the two notations, without trailing zeros.
fn general(value: f64, digits: usize) -> String {
    if value.is_nan() {
        return if value.is_sign_negative() { "-nan" } else { "nan" }.to_owned();
    }
    if value.is_infinite() {
        return if value < 0.0 { "-inf" } else { "inf" }.to_owned();
    }
    if value == 0.0 {
        return if value.is_sign_negative() { "-0" } else { "0" }.to_owned();
    }
    let scientific = format!("{value:.*e}", digits - 1);
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let trim = |text: &str| match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text.to_owned(),
    };
    if exponent < -4 || exponent >= digits as i32 {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{}e{sign}{:02}", trim(mantissa), exponent.abs());
    }
    trim(&format!("{value:.*}", (digits as i32 - 1 - exponent).max(0) as usize))
}

#[cfg(test)]
mod tests {
    use super::{SINGLE, general, shortest};

    #[test]
    fn numbers_are_written_in_the_shorter_notation() {
        let third = f64::from(1.0_f32 / 3.0);
        let cases = [(1.0, "1"), (-0.5, "-0.5"), (third, "0.333333343"), (1e-7, "1e-07"), (1e9, "1e+09"), (123456789.0, "123456789")];
        for (value, text) in cases {
            assert_eq!(general(value, 9), text);
        }
        let single = |value: f32| shortest(value.into(), SINGLE, |v| f64::from(v as f32));
        assert_eq!([single(-7e-9), single(1e20), single(1.0 / 3.0)], ["-7e-09", "1e+20", "0.333333343"]);
        assert_eq!([general(f64::NAN, 9), general(f64::NEG_INFINITY, 9), general(-0.0, 9)], ["nan", "-inf", "-0"]);
    }
}
