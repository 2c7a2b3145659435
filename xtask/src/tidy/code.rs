//! What a Rust file may say. Comments and strings are blanked first, so that only code counts.

use std::path::Path;

use super::Finding;
use super::imports::PURE;

/// Where `unsafe` may stand.
const UNSAFE: &[&str] = &["crates/pw-pjrt/", "crates/pw-linalg/src/lapack", "crates/testing/", "crates/pw-net/src/shared_memory.rs"];

/// What no core may name. A trailing `::` means a path, else a word.
const OUTSIDE: &[&str] = &[
    "std::net",
    "std::fs",
    "std::thread",
    "std::process",
    "std::env",
    "std::io",
    "std::os",
    "tokio",
    "rand",
    "Instant",
    "SystemTime",
    "libc",
    "nix",
];

const UNFINISHED: &[&str] = &["todo!", "unimplemented!", "dbg!"];

pub(super) fn check(path: &Path, source: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    if !source.trim_start().starts_with("//!") {
        findings.push(Finding::error(path, 1, "no //! header that says what the file is for"));
    }
    let code = blank(source);
    let may_be_unsafe = UNSAFE.iter().any(|u| path.to_string_lossy().starts_with(u));
    let pure = PURE.iter().any(|c| path.starts_with(format!("crates/{c}/src")));
    let grouped = if pure { grouped_std(&code) } else { Vec::new() };
    for (index, line) in code.lines().enumerate() {
        let line_number = index + 1;
        if !may_be_unsafe && has_word(line, "unsafe") {
            findings.push(Finding::error(path, line_number, format!("`unsafe` may stand only in {}", UNSAFE.join(", "))));
        }
        for word in UNFINISHED.iter().filter(|w| has_word(line, w)) {
            findings.push(Finding::error(path, line_number, format!("`{word}` is left")));
        }
        if pure {
            for word in OUTSIDE.iter().filter(|w| has_word(line, w)) {
                findings.push(Finding::error(path, line_number, format!("a core must not name `{word}`: it reaches outside")));
            }
        }
    }
    for (line_number, name) in grouped {
        if OUTSIDE.contains(&name.as_str()) {
            findings.push(Finding::error(path, line_number, format!("a core must not name `{name}`: it reaches outside")));
        }
    }
    findings
}

/// Whether `text` stands in `line` with no identifier character, `!` excepted, on either side.
fn has_word(line: &str, text: &str) -> bool {
    let word = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(text)
        .any(|(at, _)| !line[..at].chars().next_back().is_some_and(word) && !line[at + text.len()..].chars().next().is_some_and(word))
}

/// `use std::{fs, net::X}` as `std::fs`, `std::net`, with the line of each.
fn grouped_std(code: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (at, opening) in code.match_indices("std::{") {
        let mut depth = 1;
        let mut name = String::new();
        for (offset, c) in code[at + opening.len()..].char_indices() {
            match c {
                '{' => depth += 1,
                '}' => depth -= 1,
                _ => {}
            }
            if depth <= 1 && (c == ',' || c == ':' || c == '}') {
                let line = code[..at + opening.len() + offset].matches('\n').count() + 1;
                if !name.trim().is_empty() {
                    found.push((line, format!("std::{}", name.trim())));
                }
                name.clear();
                // The rest of a path such as `net::X` is not a name of its own.
                if c == ':' {
                    name.push('\u{1}');
                }
            } else if depth == 1 && c == '{' || name.starts_with('\u{1}') {
                // inside or behind a path
            } else if depth == 1 {
                name.push(c);
            }
            if depth == 0 {
                break;
            }
        }
    }
    found
}

/// The source with comments, strings and character literals replaced by blanks; lines stay where they are.
fn blank(source: &str) -> String {
    let bytes = source.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let end = skip(bytes, at);
        if end > at {
            out.extend(bytes[at..end].iter().map(|&b| if b == b'\n' { b'\n' } else { b' ' }));
            at = end;
        } else {
            out.push(bytes[at]);
            at += 1;
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// Where the comment or literal that begins at `at` ends; `at` itself if none does.
fn skip(bytes: &[u8], at: usize) -> usize {
    let rest = &bytes[at..];
    if rest.starts_with(b"//") {
        return at + rest.iter().position(|&b| b == b'\n').unwrap_or(rest.len());
    }
    if rest.starts_with(b"/*") {
        return at + block_comment(rest);
    }
    let before = at.checked_sub(1).map(|i| bytes[i]);
    let in_word = before.is_some_and(|b| b.is_ascii_alphanumeric() || b == b'_');
    if rest[0] == b'r' && (!in_word || before == Some(b'b')) {
        let hashes = rest[1..].iter().take_while(|&&b| b == b'#').count();
        if rest.get(1 + hashes) == Some(&b'"') {
            let close: Vec<u8> = [b"\"".as_slice(), &vec![b'#'; hashes]].concat();
            let body = &rest[2 + hashes..];
            let length = body.windows(close.len()).position(|w| w == close).map_or(body.len(), |p| p + close.len());
            return at + 2 + hashes + length;
        }
    }
    match rest[0] {
        b'"' => at + 1 + escaped(&rest[1..], b'"'),
        // A quote is a character if it closes after one character or an escape; else it is a lifetime.
        b'\'' if rest.get(1) == Some(&b'\\') => at + 1 + escaped(&rest[1..], b'\''),
        b'\'' => {
            let width = rest.get(1).map_or(1, |&b| if b < 0x80 { 1 } else { usize::from(b >= 0xf0) + usize::from(b >= 0xe0) + 2 });
            if rest.get(1 + width) == Some(&b'\'') { at + 2 + width } else { at }
        }
        _ => at,
    }
}

fn escaped(body: &[u8], close: u8) -> usize {
    let mut i = 0;
    while i < body.len() && body[i] != close {
        i += if body[i] == b'\\' { 2 } else { 1 };
    }
    (i + 1).min(body.len())
}

fn block_comment(rest: &[u8]) -> usize {
    let (mut depth, mut i) = (0_usize, 0);
    while i < rest.len() {
        if rest[i..].starts_with(b"/*") {
            depth += 1;
            i += 2;
        } else if rest[i..].starts_with(b"*/") {
            depth -= 1;
            i += 2;
            if depth == 0 {
                break;
            }
        } else {
            i += 1;
        }
    }
    i.min(rest.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(path: &str, source: &str) -> Vec<String> {
        check(Path::new(path), source).into_iter().map(|f| format!("{}: {}", f.line, f.message)).collect()
    }

    #[test]
    fn only_code_counts() {
        let source = "//! unsafe\n/* unsafe /* todo!() */ unsafe */\nfn f<'a>(x: &'a str) -> char { let _ = \"unsafe \\\" dbg!\"; '\"' }\n\
                      const R: &str = r#\"unsafe \" todo!()\"#; // unsafe\n#![deny(unsafe_op_in_unsafe_fn)]\nconst B: &[u8] = br\"unsafe\";\n\
                      const C: char = 'é'; const D: char = '\\'';\n";
        assert_eq!(messages("crates/pw-core/src/a.rs", source), [""; 0]);
    }

    #[test]
    fn a_planted_unsafe_is_found_where_it_may_not_stand() {
        let source = "//! x\nfn f() {\n    unsafe { g() }\n}\n";
        assert_eq!(messages("crates/pw-worker/src/a.rs", source).len(), 1);
        assert!(messages("crates/pw-worker/src/a.rs", source)[0].starts_with("3: `unsafe` may stand only in"));
        assert_eq!(messages("crates/pw-pjrt/src/a.rs", source), [""; 0]);
        assert_eq!(messages("crates/pw-linalg/src/lapack/calls.rs", source), [""; 0]);
        assert_eq!(messages("crates/pw-linalg/src/frame.rs", source).len(), 1);
        assert_eq!(messages("crates/testing/pw-sleep/src/lib.rs", source), [""; 0]);
        assert_eq!(messages("crates/pw-net/src/shared_memory.rs", source), [""; 0]);
        assert_eq!(messages("crates/pw-net/src/lib.rs", source).len(), 1);
    }

    #[test]
    fn a_core_names_nothing_outside() {
        for line in [
            "use std::time::Instant;",
            "let now = std::time::SystemTime::now();",
            "use std::{collections::BTreeMap, fs};",
            "use std::{\n    net::{IpAddr, Ipv4Addr},\n    fmt,\n};",
            "std::thread::sleep(d);",
            "tokio::spawn(f);",
            "let x = rand::random();",
        ] {
            let source = format!("//! x\n{line}\n");
            assert_eq!(messages("crates/pw-core/src/a.rs", &source).len(), 1, "{line}");
            assert_eq!(messages("crates/pw-controller/src/a.rs", &source), [""; 0], "{line}");
        }
        let fine = "//! x\nuse std::{collections::{BTreeMap, btree_map}, fmt, time::Duration};\nlet operand = 1; // rand\n";
        assert_eq!(messages("crates/pw-core/src/a.rs", fine), [""; 0]);
    }

    #[test]
    fn what_is_unfinished_or_has_no_header_is_found() {
        assert_eq!(messages("crates/pw-cli/src/a.rs", "//! x\nfn f() { todo!() }\nfn g() { dbg!(1); }\n").len(), 2);
        assert_eq!(messages("crates/pw-cli/src/a.rs", "// x\nfn f() {}\n"), ["1: no //! header that says what the file is for"]);
    }
}
