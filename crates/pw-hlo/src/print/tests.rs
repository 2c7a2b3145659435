//! The text against that of XLA's own printer.

use crate::{cost, print};

/// The computations of a text in alphabetical order, without the stack frames: XLA numbers and orders them anew when it reads a module.
fn sorted(text: &str) -> Vec<String> {
    let tables = ["FileNames", "FunctionNames", "FileLocations", "StackFrames"];
    let parts = text.split("\n\n").map(|part| part.trim().split('\n').map(without_frame).collect::<Vec<_>>().join("\n"));
    let mut parts: Vec<String> = parts.filter(|part| !tables.iter().any(|table| part.starts_with(table))).collect();
    parts.sort_unstable();
    parts
}

fn without_frame(line: &str) -> String {
    match line.split_once(" stack_frame_id=") {
        Some((head, tail)) => format!("{head}{}", tail.trim_start_matches(|c: char| c.is_ascii_digit())),
        None => line.to_owned(),
    }
}

macro_rules! module {
    ($name:literal, $ending:literal) => {
        (&include_bytes!(concat!("../../tests/data/", $name, $ending))[..], include_str!(concat!("../../tests/data/", $name, ".txt")))
    };
}

#[test]
fn the_text_is_that_of_xla() {
    let modules = [
        module!("conv", ".module"),
        module!("control", ".module"),
        module!("index", ".module"),
        module!("literals", ".module"),
        module!("kinds8", ".bin"),
        module!("permute8", ".bin"),
        module!("reshard24", ".bin"),
    ];
    for (raw, text) in modules {
        assert_eq!(sorted(&print(raw).unwrap()), sorted(text));
    }
}

#[test]
fn damaged_modules_are_errors() {
    let (raw, _) = module!("conv", ".module");
    let broken = (1..raw.len()).filter(|&cut| print(&raw[..cut]).is_err() && cost(&raw[..cut]).is_err()).count();
    assert!(broken > raw.len() / 2, "{broken} of {}", raw.len());
}

#[test]
fn work_is_counted() {
    // 2 x 4 x 8 x 4 outputs, each of 3 x 3 x 3 products and sums, were no padding left out; all bytes are read and written once.
    let of = cost(module!("conv", ".module").0).unwrap();
    assert_eq!((of.flops, of.transcendentals, of.bytes_accessed), (13824.0, 0.0, 4.0 * (384.0 + 108.0 + 256.0)));
}
