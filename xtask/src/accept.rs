//! `cargo xtask accept`: checks that take longer than the tests, or that need material from outside the repo.

mod expected;
mod jax_tests;
mod measure;
mod rounds;
mod versions;

use std::path::Path;

pub(crate) const HELP: &str = "\
cargo xtask accept SUITE [OPTIONS]

  jax-tests     JAX's own test files, compared test by test with stock JAX
  jax-versions  a small program with several JAX releases against one running server
  recovery      one of three workers is killed, again and again, under live arrays
  pipeline      four stages over several workers, again and again from a cold start
  soak          mixed work of four clients while workers are killed, for an hour
  many          many small programs, many live arrays, many that come and go: times and memory
  fetch         what reading a small and a large array of one, two and four workers costs

`cargo xtask accept SUITE --help` says more.";

pub(crate) fn task(root: &Path, args: &[String]) -> Result<(), String> {
    let Some((suite, rest)) = args.split_first() else { return Err(format!("which suite?\n\n{HELP}")) };
    let wants_help = rest.iter().any(|a| a == "--help" || a == "-h");
    match suite.as_str() {
        "jax-tests" => crate::help_or(wants_help, jax_tests::HELP, || jax_tests::task(root, rest)),
        "jax-versions" => crate::help_or(wants_help, versions::HELP, || versions::task(root, rest)),
        "recovery" => crate::help_or(wants_help, rounds::RECOVERY.help, || rounds::task(root, rest, &rounds::RECOVERY)),
        "pipeline" => crate::help_or(wants_help, rounds::PIPELINE.help, || rounds::task(root, rest, &rounds::PIPELINE)),
        "soak" => crate::help_or(wants_help, rounds::SOAK.help, || rounds::task(root, rest, &rounds::SOAK)),
        "many" => crate::help_or(wants_help, measure::MANY.help, || measure::task(root, rest, &measure::MANY)),
        "fetch" => crate::help_or(wants_help, measure::FETCH.help, || measure::task(root, rest, &measure::FETCH)),
        "--help" | "-h" => crate::help_or(true, HELP, || Ok(())),
        other => Err(format!("there is no suite '{other}'\n\n{HELP}")),
    }
}
