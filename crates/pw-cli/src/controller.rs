//! `pathways controller`.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use pw_controller::ControllerConfig;
use pw_core::CoreConfig;
use serde::{Deserialize, Serialize};

use crate::cluster;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Port for JAX clients (JAX_BACKEND_TARGET=grpc://HOST:PORT); 0 = any free one
    #[arg(long, default_value_t = 29000, env = "PATHWAYS_PORT", hide_env = true)]
    port: u16,
    /// Port for workers and `pathways status`; 0 = any free one
    #[arg(long, default_value_t = 29001)]
    worker_port: u16,
    /// Port for the host callbacks of JAX clients, which are told it; 0 = any free one
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    callback_port: u16,
    /// Address to listen on; anything but loopback needs --token or --insecure
    #[arg(long, default_value = "127.0.0.1")]
    listen: IpAddr,
    /// Secret that workers and clients must show
    #[arg(long, env = "PATHWAYS_TOKEN", hide_env_values = true, default_value = "")]
    token: String,
    /// Listen beyond loopback without a token
    #[arg(long)]
    insecure: bool,
    /// Hold new sessions until this many workers are registered
    #[arg(long, value_name = "N", default_value_t = 1)]
    expect: u32,
    /// Seconds that a session may wait for the expected workers
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    session_wait: u64,
    /// Write every event to this file, for `pathways replay`
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Run the core on a thread of its own, apart from the I/O [default: on machines with more than 4 cores]
    #[arg(long, value_name = "BOOL")]
    core_thread: Option<bool>,
    /// Print the ports as one JSON line when ready
    #[arg(long, hide = true)]
    announce: bool,
    #[arg(long, hide = true)]
    parent_pid: Option<u32>,
}

/// What `--announce` prints.
#[derive(Serialize, Deserialize)]
pub(crate) struct Announcement {
    pub(crate) clients: SocketAddr,
    pub(crate) workers: SocketAddr,
}

pub(crate) fn run(args: Args) -> Result<ExitCode> {
    crate::start_logging();
    cluster::check_exposure("the controller", args.listen, &args.token, args.insecure)?;
    cluster::watch_parent(args.parent_pid);
    // Few cores: everything on one thread, since every wake-up of another one costs more than the work that it does.
    let cores = std::thread::available_parallelism().map_or(2, |n| n.get());
    let core_thread = args.core_thread.unwrap_or(cores > 4);
    let runtime = if core_thread {
        tokio::runtime::Builder::new_multi_thread().worker_threads(cores.div_ceil(4).clamp(1, 8)).enable_all().thread_name("io").build()?
    } else {
        tokio::runtime::Builder::new_current_thread().enable_all().build()?
    };
    runtime.block_on(serve(args, core_thread))
}

async fn serve(args: Args, core_thread: bool) -> Result<ExitCode> {
    let clients = cluster::listen("JAX clients", SocketAddr::new(args.listen, args.port)).await?;
    let workers = cluster::listen("workers", SocketAddr::new(args.listen, args.worker_port)).await?;
    let callbacks = cluster::listen("host callbacks", SocketAddr::new(args.listen, args.callback_port)).await?;
    let announcement = Announcement { clients: clients.local_addr()?, workers: workers.local_addr()? };
    let core = CoreConfig {
        expect_workers: args.expect,
        session_wait_ns: args.session_wait.saturating_mul(1_000_000_000),
        build: crate::build::id().to_owned(),
        ..Default::default()
    };
    let config = ControllerConfig { core, token: args.token.clone(), record: args.record, core_thread };
    let started = pw_controller::start(config, workers)?;
    if args.announce {
        println!("{}", serde_json::to_string(&announcement)?);
    } else {
        let Announcement { clients, workers } = &announcement;
        println!("pathways controller {} is ready", crate::build::id());
        println!("  JAX clients:  JAX_PLATFORMS=proxy JAX_BACKEND_TARGET=grpc://{clients} python train.py");
        println!("  workers:      pathways worker --controller {workers}");
        println!("  status:       pathways status --controller {workers}");
    }
    let token = (!args.token.is_empty()).then(|| args.token.clone());
    let edge = pw_edge::EdgeConfig { token, data_token: args.token, ..Default::default() };
    let listeners = pw_edge::Listeners { clients, callbacks: Some(callbacks) };
    tokio::select! {
        biased;
        _ = cluster::stop_signal() => std::process::exit(0),
        served = pw_edge::serve(listeners, edge, started.events, started.from_core) => {
            served?;
            Ok(ExitCode::SUCCESS)
        }
    }
}
