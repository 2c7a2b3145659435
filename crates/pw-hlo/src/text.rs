//! The text form of a collective, as it stands in an attribute of its call: no quotes, no backslashes.
//!
//! `all-reduce.add;f32:1x64,s32:1x8;0,1,2,3/4,5,6,7`: operation, arrays as element:outer x chunk bytes, groups.
//! A permutation names its pairs: `permute.0>1,1>0;…`.

use std::fmt::Display;

use crate::collective::{Array, Collective, Element, Op, Reduce};
use crate::error::{HloError, Result};

impl Collective {
    /// The text form.
    pub fn to_text(&self) -> String {
        let op = match &self.op {
            Op::AllReduce(reduce) => format!("all-reduce.{}", short(*reduce)),
            Op::AllGather => "all-gather".to_owned(),
            Op::ReduceScatter(reduce) => format!("reduce-scatter.{}", short(*reduce)),
            Op::AllToAll { tuple } => format!("all-to-all.{}", if *tuple { "tuple" } else { "array" }),
            Op::Permute(pairs) => format!("permute.{}", join(pairs.iter().map(|(from, to)| format!("{from}>{to}")), ",")),
            Op::Broadcast => "broadcast".to_owned(),
        };
        let arrays = join(self.arrays.iter().map(|a| format!("{}:{}x{}", a.element.name(), a.outer, a.chunk)), ",");
        let groups = join(self.groups.iter().map(|group| join(group, ",")), "/");
        format!("{op};{arrays};{groups}")
    }

    /// Reads the text form. Fails on any other text.
    pub fn parse(text: &str) -> Result<Collective> {
        parse(text).map_err(|why| HloError::Text { text: text.to_owned(), why })
    }
}

fn short(reduce: Reduce) -> &'static str {
    Reduce::ALL.iter().find(|(r, _, _)| *r == reduce).map_or("", |(_, _, short)| short)
}

fn join<T: Display>(parts: impl IntoIterator<Item = T>, between: &str) -> String {
    let mut text = String::new();
    for (at, part) in parts.into_iter().enumerate() {
        if at > 0 {
            text.push_str(between);
        }
        text.push_str(&part.to_string());
    }
    text
}

type Parsed<T> = std::result::Result<T, String>;

fn parse(text: &str) -> Parsed<Collective> {
    let mut parts = text.split(';');
    let mut part = |what: &str| parts.next().ok_or_else(|| format!("no {what}"));
    let op = parse_op(part("operation")?)?;
    let arrays = list(part("arrays")?, ',', parse_array)?;
    let groups = list(part("groups")?, '/', |group| list(group, ',', number::<u32>))?;
    if parts.next().is_some() {
        return Err("more than three parts".to_owned());
    }
    Ok(Collective { op, groups, arrays })
}

fn parse_op(text: &str) -> Parsed<Op> {
    let (name, rest) = text.split_once('.').map_or((text, None), |(name, rest)| (name, Some(rest)));
    let reduce = || {
        let found = Reduce::ALL.iter().find(|(_, _, short)| Some(*short) == rest);
        found.map(|(reduce, _, _)| *reduce).ok_or_else(|| format!("no such reduction: {rest:?}"))
    };
    match (name, rest) {
        ("all-reduce", _) => Ok(Op::AllReduce(reduce()?)),
        ("reduce-scatter", _) => Ok(Op::ReduceScatter(reduce()?)),
        ("all-gather", None) => Ok(Op::AllGather),
        ("broadcast", None) => Ok(Op::Broadcast),
        ("all-to-all", Some("tuple")) => Ok(Op::AllToAll { tuple: true }),
        ("all-to-all", Some("array")) => Ok(Op::AllToAll { tuple: false }),
        ("permute", Some(pairs)) => Ok(Op::Permute(list(pairs, ',', |pair| {
            let (from, to) = pair.split_once('>').ok_or_else(|| format!("{pair:?} is no pair"))?;
            Ok((number(from)?, number(to)?))
        })?)),
        _ => Err(format!("no such operation: {text:?}")),
    }
}

fn parse_array(text: &str) -> Parsed<Array> {
    let (element, size) = text.split_once(':').ok_or_else(|| format!("{text:?} is no array"))?;
    let (outer, chunk) = size.split_once('x').ok_or_else(|| format!("{size:?} is no size"))?;
    let element = Element::from_name(element).ok_or_else(|| format!("no such element type: {element:?}"))?;
    Ok(Array { element, outer: number(outer)?, chunk: number(chunk)? })
}

/// A list; nothing between two separators, or nothing at all, is only allowed as the whole.
fn list<T>(text: &str, separator: char, item: impl Fn(&str) -> Parsed<T>) -> Parsed<Vec<T>> {
    if text.is_empty() {
        return Ok(Vec::new());
    }
    text.split(separator).map(item).collect()
}

fn number<T: std::str::FromStr>(text: &str) -> Parsed<T> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    text.parse().ok().filter(|_| digits).ok_or_else(|| format!("{text:?} is no number here"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_comes_back() {
        let array = |element, outer, chunk| Array { element, outer, chunk };
        let f32s = vec![array(Element::F32, 3, 64)];
        let cases = [
            (
                Op::AllReduce(Reduce::Add),
                vec![vec![0, 2], vec![1, 3]],
                vec![array(Element::F32, 1, 64), array(Element::Bf16, 1, 0)],
                "all-reduce.add;f32:1x64,bf16:1x0;0,2/1,3",
            ),
            (Op::ReduceScatter(Reduce::Max), vec![vec![0, 1]], f32s.clone(), "reduce-scatter.max;f32:3x64;0,1"),
            (Op::AllGather, vec![vec![1, 0]], vec![array(Element::Other(20), 2, 5)], "all-gather;t20:2x5;1,0"),
            (Op::AllToAll { tuple: true }, vec![vec![0]], f32s.clone(), "all-to-all.tuple;f32:3x64;0"),
            (Op::AllToAll { tuple: false }, vec![vec![0]], f32s.clone(), "all-to-all.array;f32:3x64;0"),
            (Op::Permute(vec![(0, 1), (1, 0)]), vec![vec![0, 1]], f32s.clone(), "permute.0>1,1>0;f32:3x64;0,1"),
            (Op::Permute(vec![]), vec![vec![0, 1]], f32s.clone(), "permute.;f32:3x64;0,1"),
            (Op::Broadcast, vec![vec![0, 1]], f32s, "broadcast;f32:3x64;0,1"),
        ];
        for (op, groups, arrays, text) in cases {
            let collective = Collective { op, groups, arrays };
            assert_eq!(collective.to_text(), text);
            assert_eq!(Collective::parse(text), Ok(collective));
        }
        for (reduce, _, short) in Reduce::ALL {
            assert_eq!(parse_op(&format!("all-reduce.{short}")), Ok(Op::AllReduce(reduce)));
        }
    }

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "",
            "all-reduce;f32:1x4;0",
            "all-reduce.sum;f32:1x4;0",
            "all-gather.add;f32:1x4;0",
            "all-gather;f32:1x4",
            "all-gather;f32:1x4;0;",
            "all-gather;f33:1x4;0",
            "all-gather;f32:1;0",
            "all-gather;f32:1x-4;0",
            "all-gather;f32:1x+4;0",
            "all-gather;f32:1x4;0,,1",
            "all-gather;f32:1x4;0,4294967296",
            "permute.1;f32:1x4;0,1",
            "permute;f32:1x4;0,1",
        ] {
            assert!(matches!(Collective::parse(text), Err(HloError::Text { .. })), "{text}");
        }
    }
}
