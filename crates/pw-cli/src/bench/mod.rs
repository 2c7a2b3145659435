//! `pathways bench`: how fast this build is, beside peers that run at the same time on the same machine.
//!
//! A bench starts everything that it needs, asserts nothing and prints whether a goal is met. Sides take turns in short
//! windows, in client processes that stay; what is reported is the median over rounds of the ratio of neighbouring windows, so
//! that a machine that is busy with other things disturbs both sides alike.

mod clients;
mod copy;
mod dispatch;
mod lab;
mod machine;
mod report;
mod transfer;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::builder::RangedU64ValueParser;

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(clap::Subcommand)]
enum Bench {
    /// Small programs: calls per second, latencies and CPU per call, beside stock JAX and the null server
    ///
    /// Sides: `pathways` = a cluster of one worker; `stock` = JAX in one process on as many virtual CPU devices; `null` = a
    /// server that answers the same client at once and computes nothing, so what the client itself allows.
    /// OpByOp = one call per scalar mean over all devices plus 1; Fused = 128 of these in one call; add = x + 1 on one float per
    /// device. Chains are waited for every 20 calls.
    Dispatch(dispatch::Args),
    /// Large arrays: upload and fetch of 256 MiB beside the null server, parked uploads, memory of the controller
    ///
    /// The null server takes turns with two sets of HTTP/2 windows: those of the edge, and those that are best for the client.
    Copy(copy::Args),
    /// Several clients at once: shares of the devices, and what it costs the others when one is killed
    ///
    /// The programs sleep on the devices, so they cost no CPU. One client is killed with 1 GiB of arrays and 100 programs in
    /// its queue, again and again; a second one measures its steps meanwhile.
    Clients(clients::Args),
    /// Moves between two workers: one large array beside a raw TCP stream, and thousands of small ones
    ///
    /// Everything runs on this machine, so both go over loopback, and its byte counter shows that no byte of an array passes the
    /// controller or the client.
    Transfer(transfer::Args),
}

/// Options of every bench.
#[derive(clap::Args)]
struct Common {
    /// Python with JAX [default: $VIRTUAL_ENV, else .venv of the checkout]
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
    /// PJRT plugin (a shared library); found in the Python environment if not given
    #[arg(long, value_name = "PATH", env = "PATHWAYS_PLUGIN")]
    plugin: Option<PathBuf>,
    /// Where compiled programs are kept [default: $XDG_CACHE_HOME/pathways-rs]
    #[arg(long, value_name = "DIR")]
    cache_dir: Option<PathBuf>,
    /// The checkout with the client scripts in bench/ [default: the one that this binary was built in]
    #[arg(long, value_name = "DIR")]
    checkout: Option<PathBuf>,
    /// Times that each side takes its turn
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = RangedU64ValueParser::<usize>::new().range(5..))]
    rounds: usize,
    /// Short windows and few repetitions: a first look, not figures to publish
    #[arg(long)]
    quick: bool,
    /// Write all figures of all rounds to this file, too
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

pub(crate) fn run(args: Args) -> Result<ExitCode> {
    crate::start_logging();
    let common = match &args.bench {
        Bench::Dispatch(args) => &args.common,
        Bench::Copy(args) => &args.common,
        Bench::Clients(args) => &args.common,
        Bench::Transfer(args) => &args.common,
    };
    let lab = lab::Lab::new(common)?;
    println!("{}", machine::describe());
    let figures = match &args.bench {
        Bench::Dispatch(args) => dispatch::run(args, &lab)?,
        Bench::Copy(args) => copy::run(args, &lab)?,
        Bench::Clients(args) => clients::run(args, &lab)?,
        Bench::Transfer(args) => transfer::run(args, &lab)?,
    };
    println!("\n{}", machine::describe());
    if let Some(path) = &common.json {
        report::write_json(path, figures)?;
    }
    Ok(ExitCode::SUCCESS)
}
