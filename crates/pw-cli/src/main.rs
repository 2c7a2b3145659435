//! The one binary `pathways`: starts and looks at clusters. Everything that decides lives in the other crates.

mod bench;
mod build;
mod cluster;
mod controller;
mod local;
mod plugin;
mod replay;
mod sim;
mod status;
mod worker;

use clap::{Parser, Subcommand};

/// Also what the plugin and every other library of the process allocates with.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Drive the accelerators of many hosts from one unchanged JAX program.
#[derive(Parser)]
#[command(name = "pathways", version, propagate_version = true, max_term_width = 110, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  One machine, one command:
    pathways local --workers 1 --devices 8 -- python train.py
  A cluster:
    pathways controller --insecure                                    # on one host
    pathways worker --controller HOST:29001 --insecure                # on every host with devices
    JAX_PLATFORMS=proxy JAX_BACKEND_TARGET=grpc://HOST:29000 python train.py
  Who is there, and what is each client doing:
    pathways status";

#[derive(Subcommand)]
enum Command {
    /// Start a whole cluster on this machine, run a command on it, then stop everything
    ///
    /// A worker that ends is started again: the arrays that lived there are lost, its devices work again for new ones. One that ends
    /// at once five times in a row, by itself, stays down.
    Local(local::Args),
    /// Run the controller: it serves JAX clients and orders the workers
    Controller(controller::Args),
    /// Run a worker: it owns this host's devices and obeys the controller
    Worker(worker::Args),
    /// Show the workers and the client sessions of a running controller
    Status(status::Args),
    /// Run the controller's core over a recorded event log and compare every turn
    Replay(replay::Args),
    /// Run the whole system's cores in simulation, with faults, and check the invariants
    Sim(sim::Args),
    /// Measure this build beside its peers, on this machine
    Bench(bench::Args),
}

fn main() -> std::process::ExitCode {
    let cli = Cli::parse();
    let result = match cli.command {
        Command::Local(args) => local::run(args),
        Command::Controller(args) => controller::run(args),
        Command::Worker(args) => worker::run(args),
        Command::Status(args) => status::run(args),
        Command::Replay(args) => replay::run(args),
        Command::Sim(args) => sim::run(args),
        Command::Bench(args) => bench::run(args),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("pathways: {error:#}");
            std::process::ExitCode::FAILURE
        }
    }
}

/// Logs go to standard error; `RUST_LOG` chooses how much.
fn start_logging() {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "warn".into());
    let ansi = std::io::IsTerminal::is_terminal(&std::io::stderr());
    let _ = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(ansi).with_target(false).try_init();
}
