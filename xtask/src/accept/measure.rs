//! What is measured beside stock JAX, by scripts of `bench/`. Values are checked, times are printed.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::{run, setup};

pub(super) struct Measure {
    pub(super) help: &'static str,
    script: &'static str,
}

pub(super) const MANY: Measure = Measure {
    help: "\
cargo xtask accept many [--quick]

Many small things on one worker with eight devices; every array lies on all of them:
  - 48 programs of their own, each with 1 ms of slept work on its own array, from the first call until all are done, beside the
    48 ms that they need and beside threads that only sleep; the same with tiny work instead, beside stock JAX
  - single steps before and with 100 000 live arrays, p50 and p99, beside stock JAX
  - 100 000 times an array is made and dropped: what the session holds and the memory of the worker at the begin, in the middle
    and at the end
Results are checked and a wrong one fails; times are printed with their goals, and depend on what else the machine does.
--quick takes a tenth of the arrays. About two minutes on two cores.",
    script: "many.py",
};

pub(super) const FETCH: Measure = Measure {
    help: "\
cargo xtask accept fetch [--quick]

np.asarray of an array that is ready: one of 4 bytes, and one of 16 MiB over eight devices, which belong to one worker, to two or
to four. Beside stock JAX with eight devices, a server that computes nothing, and a call that is waited for. The bytes are checked
before; then the sides take turns and their times are printed. About a minute on two cores.",
    script: "fetch.py",
};

const LIMIT: Duration = Duration::from_secs(3600);

pub(super) fn task(root: &Path, args: &[String], measure: &Measure) -> Result<(), String> {
    if let Some(unknown) = args.iter().find(|a| *a != "--quick") {
        return Err(format!("unknown option {unknown}\n\n{}", measure.help));
    }
    let ready = setup::ensure(root)?;
    let mut command = Command::new(&ready.python);
    command.arg(root.join("bench").join(measure.script)).args(args);
    command.env("PATHWAYS_BIN", &ready.pathways).env("PATHWAYS_CACHE_DIR", root.join("target/cache"));
    let status = run::shown(&mut command, LIMIT, |_| {})?;
    if !status.success() {
        return Err(format!("bench/{} ended with {status}; its message is above", measure.script));
    }
    run::say("all values were right");
    Ok(())
}
