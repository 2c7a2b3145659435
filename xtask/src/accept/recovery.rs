//! Kills of workers, many of them: the end-to-end test of recovery in its long form.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::{run, setup};

pub(super) const HELP: &str = "\
cargo xtask accept recovery [--rounds N]

Kills one of three workers with SIGKILL, N times (default 100) in turn, under a client with live arrays on all of them. In every
round the others must go on, what the killed one held must answer DATA_LOSS, and its device must work again for new arrays under
the programs that were compiled before. Prints how long each round took until then.";

/// For each round, and to begin with.
const SECONDS_PER_ROUND: u64 = 10;

pub(super) fn task(root: &Path, args: &[String]) -> Result<(), String> {
    let rounds = match args {
        [] => 100,
        [flag, count] if flag == "--rounds" => {
            count.parse::<u64>().ok().filter(|n| *n > 0).ok_or_else(|| format!("{count} is no number of rounds"))?
        }
        _ => return Err(format!("unknown option {}\n\n{HELP}", args[0])),
    };
    let ready = setup::ensure(root)?;
    let mut command = Command::new(&ready.python);
    command.args(["-m", "pytest", "-q", "-s", "-c"]).arg(root.join("tests/pytest.ini")).arg(root.join("tests/e2e/test_recovery.py"));
    command.env("PATHWAYS_TEST_ROUNDS", rounds.to_string()).env("PATHWAYS_BIN", &ready.pathways);
    let status = run::shown(&mut command, Duration::from_secs(60 + rounds * SECONDS_PER_ROUND), |_| {})?;
    if status.success() { Ok(()) } else { Err(format!("recovery does not work ({status})")) }
}
