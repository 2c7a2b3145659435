//! `cargo xtask`: the project's tasks, on the standard library alone so that it builds in seconds.
//!
//! Each task has its file; `run` holds what they share about starting programs. Nothing here is part of the product.

mod accept;
mod demo;
mod run;
mod setup;
mod suite;
mod tidy;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const HELP: &str = "\
cargo xtask TASK

  setup    build the binary and make a virtual environment with JAX; the other tasks do it first where it is missing
  demo     train a small GPT on pathways clusters on this machine, beside stock JAX, and compare
  test     everything that must pass: format, lints, tidy, Rust tests, Python tests
  tidy     the rules of the house: who imports whom, where unsafe may stand, sizes, headers, links
  accept   longer checks, and some against material from outside the repo, such as JAX's own tests

`cargo xtask TASK --help` says more. A fresh machine needs Rust, Python 3.11 or newer with venv, and Linux on x86-64.";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (task, rest) = match args.split_first() {
        Some((task, rest)) => (task.as_str(), rest),
        None => ("--help", &[][..]),
    };
    let root = root();
    let wants_help = rest.iter().any(|a| a == "--help" || a == "-h");
    let result = match task {
        "setup" => help_or(wants_help, setup::HELP, || setup::task(&root, rest)),
        "demo" => help_or(wants_help, demo::HELP, || demo::task(&root, rest)),
        "test" => help_or(wants_help, suite::HELP, || suite::task(&root, rest)),
        "tidy" => help_or(wants_help, tidy::HELP, || tidy::task(&root, rest)),
        "accept" => accept::task(&root, rest),
        "--help" | "-h" | "help" => help_or(true, HELP, || Ok(())),
        other => Err(format!("there is no task '{other}'\n\n{HELP}")),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("xtask: {message}");
            ExitCode::FAILURE
        }
    }
}

fn help_or(wants_help: bool, help: &str, task: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    if wants_help {
        // A reader that closes early, such as `head`, is no failure.
        let _ = writeln!(std::io::stdout(), "{help}");
        return Ok(());
    }
    task()
}

/// The checkout: the folder above this crate's.
fn root() -> PathBuf {
    let manifest = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_else(|_| env!("CARGO_MANIFEST_DIR").to_owned());
    Path::new(&manifest).parent().map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}
