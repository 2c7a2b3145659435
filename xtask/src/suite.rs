//! `cargo xtask test`: everything that must pass, in one go, each part run even when an earlier one has failed.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::{run, setup, tidy};

pub(crate) const HELP: &str = "\
cargo xtask test [PART]...

Sets up what is missing, then runs: format, tidy, clippy, rust, package, e2e (all of them if no PART is named).

  format   cargo fmt --check
  tidy     the rules of the house (cargo xtask tidy --help)
  clippy   every lint is an error
  rust     cargo test of the whole workspace
  package  tests of the Python package, without a cluster
  e2e      stock JAX in real processes against real clusters on loopback

Rust parts use the release profile, so that dependencies are compiled once.";

const LIMIT: Duration = Duration::from_secs(3600);
const PARTS: [&str; 6] = ["format", "tidy", "clippy", "rust", "package", "e2e"];

pub(crate) fn task(root: &Path, args: &[String]) -> Result<(), String> {
    if let Some(unknown) = args.iter().find(|a| !PARTS.contains(&a.as_str())) {
        return Err(format!("there is no part '{unknown}'; the parts are {}", PARTS.join(", ")));
    }
    let wanted = |part: &str| args.is_empty() || args.iter().any(|a| a == part);
    let needs_setup = ["package", "e2e"].into_iter().any(wanted) || args.is_empty();
    let ready = if needs_setup { Some(setup::ensure(root)?) } else { None };
    let mut total = Counts::default();
    let mut broken = Vec::new();
    for part in PARTS.into_iter().filter(|p| wanted(p)) {
        run::say(&format!("test: {part}"));
        let start = Instant::now();
        let result = match part {
            "format" => cargo(root, &["fmt", "--all", "--check"], &mut total),
            "tidy" => tidy::task(root, &[]),
            "clippy" => {
                cargo(root, &["clippy", "--release", "--workspace", "--all-targets", "--quiet", "--", "--deny", "warnings"], &mut total)
            }
            "rust" => cargo(root, &["test", "--release", "--workspace", "--no-fail-fast"], &mut total),
            folder => pytest(root, ready.as_ref().ok_or("not set up")?, folder, &mut total),
        };
        let seconds = start.elapsed().as_secs_f64();
        match result {
            Ok(()) => run::say(&format!("test: {part}: ok in {seconds:.1} s")),
            Err(message) => {
                run::say(&format!("test: {part}: FAILED in {seconds:.1} s: {message}"));
                broken.push(part);
            }
        }
    }
    // The parts without tests of their own count when they break, so that the closing line never looks better than it is.
    let failed = total.failed + broken.iter().filter(|p| ["format", "tidy", "clippy"].contains(p)).count();
    println!("\n{} passed, {failed} failed, {} skipped", total.passed, total.skipped);
    if broken.is_empty() { Ok(()) } else { Err(format!("not passed: {}", broken.join(", "))) }
}

fn cargo(root: &Path, args: &[&str], total: &mut Counts) -> Result<(), String> {
    let status = run::shown(setup::cargo(root).args(args), LIMIT, |line| total.add_cargo(line))?;
    if status.success() { Ok(()) } else { Err(format!("cargo {} ended with {status}", args[0])) }
}

fn pytest(root: &Path, ready: &setup::Ready, folder: &str, total: &mut Counts) -> Result<(), String> {
    let mut command = Command::new(&ready.python);
    command.current_dir(root).args(["-m", "pytest", "-q", "-c", "tests/pytest.ini", "-p", "no:cacheprovider"]);
    command.arg(format!("tests/{folder}"));
    command.env("PATHWAYS_BIN", &ready.pathways).env("PATHWAYS_CACHE_DIR", root.join("target/cache"));
    if let Some(other) = &ready.other_python {
        command.env("PATHWAYS_OTHER_PYTHON", other);
    }
    let mut seen = Counts::default();
    let status = run::shown(&mut command, LIMIT, |line| seen.add_pytest(line))?;
    total.add(&seen);
    if !status.success() {
        return Err(format!("pytest ended with {status}"));
    }
    if seen.passed == 0 { Err("pytest ran no test".to_owned()) } else { Ok(()) }
}

#[derive(Default, Debug, PartialEq)]
struct Counts {
    passed: usize,
    failed: usize,
    skipped: usize,
}

impl Counts {
    /// `test result: ok. 12 passed; 0 failed; 1 ignored; …`
    fn add_cargo(&mut self, line: &str) {
        if line.starts_with("test result: ") {
            self.add_words(line, ';');
        }
    }

    /// `3 failed, 12 passed, 1 skipped in 4.51s`, bare or between `=` signs.
    fn add_pytest(&mut self, line: &str) {
        let line = line.trim_matches(['=', ' ']);
        if line.starts_with(|c: char| c.is_ascii_digit()) && line.contains(" in ") {
            self.add_words(line, ',');
        }
    }

    fn add_words(&mut self, line: &str, separator: char) {
        for piece in line.split(separator) {
            let words: Vec<&str> = piece.split_whitespace().collect();
            for pair in words.windows(2) {
                let Ok(count) = pair[0].parse::<usize>() else { continue };
                match pair[1].trim_end_matches(['s', ',']) {
                    "passed" => self.passed += count,
                    "failed" | "error" => self.failed += count,
                    "skipped" | "ignored" => self.skipped += count,
                    _ => {}
                }
            }
        }
    }

    fn add(&mut self, other: &Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_what_the_runners_print() {
        let mut counts = Counts::default();
        counts.add_cargo("test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s");
        counts.add_cargo("test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s");
        counts.add_cargo("test 7 passed ... ok");
        assert_eq!(counts, Counts { passed: 13, failed: 2, skipped: 1 });
        counts.add_pytest("==== 1 failed, 40 passed, 2 skipped, 1 warning in 112.40s (0:01:52) ====");
        counts.add_pytest("2 passed, 1 error in 3.2s");
        counts.add_pytest("assert 3 failed");
        assert_eq!(counts, Counts { passed: 55, failed: 4, skipped: 3 });
    }
}
