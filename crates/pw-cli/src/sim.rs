//! `pathways sim`.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use anyhow::{Result, bail};
use pw_sim::{Options, Plant};

/// Simulates whole clusters: the real controller and worker cores with their real encoding, on a fake clock, fake links, devices
/// and clients, with workers killed and clients gone. Every run is played from its seed alone, and every invariant is checked.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Play this one seed
    #[arg(long, value_name = "N", conflicts_with_all = ["seeds", "first"])]
    seed: Option<u64>,
    /// Play so many seeds
    #[arg(long, value_name = "COUNT", default_value_t = pw_sim::CI_SEEDS)]
    seeds: u64,
    /// First seed of `--seeds`
    #[arg(long, value_name = "N", default_value_t = 0)]
    first: u64,
    /// Requests of each client; 0 = the seed chooses, as for the sizes below
    #[arg(long, value_name = "COUNT", default_value_t = 0)]
    steps: u32,
    /// Workers
    #[arg(long, value_name = "COUNT", default_value_t = 0)]
    workers: u32,
    /// Devices of each worker
    #[arg(long, value_name = "COUNT", default_value_t = 0)]
    devices: u32,
    /// Client sessions
    #[arg(long, value_name = "COUNT", default_value_t = 0)]
    sessions: u32,
    /// Plant this bug, to see it found (`list` names them)
    #[arg(long, value_name = "BUG")]
    plant: Option<String>,
    /// Print every message
    #[arg(long)]
    verbose: bool,
}

pub(crate) fn run(args: Args) -> Result<ExitCode> {
    let plant = match args.plant.as_deref() {
        None => None,
        Some("list") => {
            Plant::ALL.iter().for_each(|plant| println!("{plant:?}"));
            return Ok(ExitCode::SUCCESS);
        }
        Some(name) => match Plant::ALL.into_iter().find(|p| format!("{p:?}").eq_ignore_ascii_case(name)) {
            Some(plant) => Some(plant),
            None => bail!("there is no bug '{name}' to plant; `--plant list` names them"),
        },
    };
    let options = Options {
        seed: args.seed.unwrap_or(args.first),
        steps: args.steps,
        workers: args.workers,
        devices: args.devices,
        sessions: args.sessions,
        plant,
        verbose: args.verbose,
    };
    let count = if args.seed.is_some() { 1 } else { args.seeds };
    let seeds = options.seed..options.seed.saturating_add(count);
    let mut played = 0;
    let terminal = std::io::stderr().is_terminal();
    let result = pw_sim::run_seeds(seeds, &options, |summary| {
        played += 1;
        if terminal {
            eprint!("\rseed {} ({played} of {count}) ", summary.seed);
            let _ = std::io::stderr().flush();
        }
    });
    if terminal {
        eprintln!();
    }
    match result {
        Ok(total) => {
            println!("{played} seeds kept every invariant: {total}");
            Ok(ExitCode::SUCCESS)
        }
        Err(failure) => {
            println!("{failure}");
            Ok(ExitCode::FAILURE)
        }
    }
}
