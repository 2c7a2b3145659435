//! `cargo xtask accept`: longer checks against material that is not part of the repo.

mod expected;
mod jax_tests;
mod recovery;
mod versions;

use std::path::Path;

pub(crate) const HELP: &str = "\
cargo xtask accept SUITE [OPTIONS]

  jax-tests     JAX's own test files, compared test by test with stock JAX
  jax-versions  a small program with several JAX releases against one running server
  recovery      one of three workers is killed, again and again, under live arrays

`cargo xtask accept SUITE --help` says more.";

pub(crate) fn task(root: &Path, args: &[String]) -> Result<(), String> {
    let Some((suite, rest)) = args.split_first() else { return Err(format!("which suite?\n\n{HELP}")) };
    let wants_help = rest.iter().any(|a| a == "--help" || a == "-h");
    match suite.as_str() {
        "jax-tests" => crate::help_or(wants_help, jax_tests::HELP, || jax_tests::task(root, rest)),
        "jax-versions" => crate::help_or(wants_help, versions::HELP, || versions::task(root, rest)),
        "recovery" => crate::help_or(wants_help, recovery::HELP, || recovery::task(root, rest)),
        "--help" | "-h" => crate::help_or(true, HELP, || Ok(())),
        other => Err(format!("there is no suite '{other}'\n\n{HELP}")),
    }
}
