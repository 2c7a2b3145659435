//! End-to-end tests in their long form: the same file of tests, with more rounds.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::{run, setup};

/// A test of `tests/e2e` that plays as many rounds as it is told.
pub(super) struct Rounds {
    pub(super) help: &'static str,
    /// What is counted, and how many there are if nobody says.
    unit: &'static str,
    default: u64,
    /// The test, as pytest names it, below tests/e2e.
    file: &'static str,
    test: &'static str,
    /// For each round, and to begin with.
    seconds_per_round: u64,
    passed: &'static str,
    failed: &'static str,
}

pub(super) const RECOVERY: Rounds = Rounds {
    help: "\
cargo xtask accept recovery [--rounds N]

Kills one of three workers with SIGKILL, N times (default 100) in turn, under a client with live arrays on all of them. In every
round the others must go on, what the killed one held must answer DATA_LOSS, and its device must work again for new arrays under
the programs that were compiled before. Prints how long each round took until then.",
    unit: "rounds",
    default: 100,
    file: "test_recovery.py",
    test: "killed",
    seconds_per_round: 10,
    passed: "killed workers came back and nothing else was hurt",
    failed: "recovery does not work",
};

pub(super) const PIPELINE: Rounds = Rounds {
    help: "\
cargo xtask accept pipeline [--rounds N]

A pipeline of four stages, each data-parallel over two devices, by `jit` and `device_put` alone: eight micro-batches go through in
the order one-forward-one-backward, dispatched without waiting. On two workers with four devices (neighbouring stages on different
workers) and on four with two. Each of the N rounds (default 100) on each shape is a cold start: its programs are compiled for the
first time while the pipeline is already under way, in a new client every ten rounds. The gradients must equal those of one device
of stock JAX within 1e-5, and a round that takes over a minute counts as a hang. Prints how many rounds are done and how long the
longest one took; ten seconds a round are allowed for on average.",
    unit: "rounds",
    default: 100,
    file: "test_placement.py",
    test: "pipeline",
    seconds_per_round: 20,
    passed: "all cold starts gave the right gradients, none hung",
    failed: "the pipeline does not work",
};

pub(super) const SOAK: Rounds = Rounds {
    help: "\
cargo xtask accept soak [--minutes N]

Four clients with mixed work (chains, donation, collectives, moves between workers, arrays over all of them, many small ones) on
three workers with two devices, one of which is killed with SIGKILL every ten seconds or so, for N minutes (default 60). Every value
is checked; only what a killed worker held may be lost; a client without progress for 90 s hangs; at the end nothing may be left,
and the controller may not have grown. Says every minute how far it is. `PATHWAYS_TEST_SEED` chooses other work.",
    unit: "minutes",
    default: 60,
    file: "test_soak.py",
    test: "mixed",
    seconds_per_round: 65,
    passed: "no hang, no wrong value, nothing left",
    failed: "the soak found something",
};

pub(super) fn task(root: &Path, args: &[String], suite: &Rounds) -> Result<(), String> {
    let rounds = match args {
        [] => suite.default,
        [flag, count] if flag.strip_prefix("--") == Some(suite.unit) => {
            count.parse::<u64>().ok().filter(|n| *n > 0).ok_or_else(|| format!("{count} is no number of {}", suite.unit))?
        }
        _ => return Err(format!("unknown option {}\n\n{}", args[0], suite.help)),
    };
    let ready = setup::ensure(root)?;
    let mut command = Command::new(&ready.python);
    command.args(["-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-k", suite.test]);
    command.arg("-c").arg(root.join("tests/pytest.ini")).arg(root.join("tests/e2e").join(suite.file));
    command.env("PATHWAYS_TEST_ROUNDS", rounds.to_string()).env("PATHWAYS_BIN", &ready.pathways);
    let status = run::shown(&mut command, Duration::from_secs(240 + rounds * suite.seconds_per_round), |_| {})?;
    if !status.success() {
        return Err(format!("{} ({status})", suite.failed));
    }
    run::say(&format!("{rounds} {}: {}", suite.unit, suite.passed));
    Ok(())
}
