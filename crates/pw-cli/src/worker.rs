//! `pathways worker`, and the compile child that it starts.

use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use pw_worker::{CompileOnlyConfig, LapackChoice, WorkerConfig};

use crate::{cluster, plugin};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The controller's worker port
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:29001", env = "PATHWAYS_CONTROLLER", hide_env_values = true)]
    controller: String,
    /// Number of devices, where the plugin lets one choose (CPU)
    #[arg(long, value_name = "D", value_parser = clap::value_parser!(u32).range(1..=4096))]
    devices: Option<u32>,
    /// Memory per device that programs and arrays may use, e.g. 256MiB; not limited by default on CPU
    #[arg(long, value_name = "BYTES", value_parser = cluster::parse_bytes)]
    device_memory: Option<u64>,
    /// PJRT plugin (a shared library); found in the Python environment if not given
    #[arg(long, value_name = "PATH", env = "PATHWAYS_PLUGIN")]
    plugin: Option<PathBuf>,
    /// LAPACK for linear algebra on CPU (a shared library with 32-bit integers), or `none` [default: that of a scipy beside the
    /// plugin, else the system's]
    #[arg(long, value_name = "PATH", env = "PATHWAYS_LAPACK", default_value = "", hide_default_value = true)]
    lapack: String,
    /// Where compiled programs are kept [default: $XDG_CACHE_HOME/pathways-rs]
    #[arg(long, value_name = "DIR")]
    cache_dir: Option<PathBuf>,
    /// Island of this worker: workers with the same number share a fast interconnect
    #[arg(long, default_value_t = 0)]
    island: u32,
    /// Slot to take in the cluster; any free one by default
    #[arg(long)]
    slot: Option<u32>,
    /// Address for array bytes from and to the controller's edge; anything but loopback needs --token or --insecure
    #[arg(long, default_value = "127.0.0.1")]
    listen: IpAddr,
    /// Port for array bytes; 0 = any free one
    #[arg(long, default_value_t = 0)]
    data_port: u16,
    /// Port for the operands of collectives from other workers, at the same address; 0 = any free one
    #[arg(long, default_value_t = 0)]
    gang_port: u16,
    /// Where the controller and the other workers reach this worker for array bytes, if that is not the address and port that it
    /// listens on: behind NAT, in a container, through a proxy. For collectives the others come to the same host, at --gang-port
    #[arg(long, value_name = "HOST:PORT", value_parser = host_and_port)]
    advertise: Option<String>,
    /// Secret of the controller
    #[arg(long, env = "PATHWAYS_TOKEN", hide_env_values = true, default_value = "")]
    token: String,
    /// Listen beyond loopback without a token
    #[arg(long)]
    insecure: bool,
    /// Accept programs that name the test targets (pw.sleep_us)
    #[arg(long)]
    test_targets: bool,
    /// Serve compile requests on standard input: what a worker starts beside itself
    #[arg(long, hide = true)]
    compile_only: bool,
    #[arg(long, hide = true)]
    parent_pid: Option<u32>,
}

pub(crate) fn run(args: Args) -> Result<ExitCode> {
    if let Some(code) = quiet_plugin()? {
        return Ok(code);
    }
    crate::start_logging();
    let plugin = plugin::find(args.plugin.clone(), None)?;
    let cache_dir = cluster::cache_dir(args.cache_dir.clone())?;
    let Ok(lapack) = args.lapack.parse::<LapackChoice>();
    if args.compile_only {
        let config = CompileOnlyConfig { plugin, devices: args.devices, cache_dir, test_targets: args.test_targets, lapack };
        pw_worker::compile_only(config)?;
        return Ok(ExitCode::SUCCESS);
    }
    cluster::check_exposure("the worker", args.listen, &args.token, args.insecure)?;
    let mut compile_child: Vec<OsString> = vec![std::env::current_exe()?.into(), "worker".into(), "--compile-only".into()];
    compile_child.extend(["--plugin".into(), plugin.clone().into(), "--cache-dir".into(), cache_dir.clone().into()]);
    compile_child.extend(["--lapack".into(), args.lapack.into()]);
    if let Some(devices) = args.devices {
        compile_child.extend(["--devices".into(), devices.to_string().into()]);
    }
    if args.test_targets {
        compile_child.push("--test-targets".into());
    }
    let config = WorkerConfig {
        controller: args.controller,
        token: args.token,
        plugin,
        devices: args.devices,
        device_memory: args.device_memory,
        cache_dir,
        test_targets: args.test_targets,
        lapack,
        island: args.island,
        slot: args.slot,
        listen_data: SocketAddr::new(args.listen, args.data_port),
        gang_port: args.gang_port,
        advertise: args.advertise,
        host: cluster::host_name(),
        build: crate::build::id().to_owned(),
        compile_child,
        parent_pid: args.parent_pid,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let result = runtime.block_on(async {
        tokio::select! {
            biased;
            // Asked to stop: at once, so that nothing is said about connections that end with the cluster.
            _ = cluster::stop_signal() => std::process::exit(0),
            result = pw_worker::run(config) => {
                // A controller that is stopped together with this worker goes first: that is no failure.
                let _ = tokio::time::timeout(std::time::Duration::from_secs(3), cluster::stop_signal()).await.map(|_| std::process::exit(0));
                result.context("the worker stops")
            }
        }
    });
    // Device threads may be inside the plugin; the process ends without waiting for them.
    runtime.shutdown_background();
    result?;
    Ok(ExitCode::SUCCESS)
}

fn host_and_port(text: &str) -> Result<String, String> {
    match text.rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && port.parse().is_ok_and(|port: u16| port > 0) => Ok(text.to_owned()),
        _ => Err("not of the form HOST:PORT".to_owned()),
    }
}

/// The plugin reads its log level from the environment when it is loaded: run again with it set.
fn quiet_plugin() -> Result<Option<ExitCode>> {
    const LEVEL: &str = "TF_CPP_MIN_LOG_LEVEL";
    if std::env::var_os(LEVEL).is_some() {
        return Ok(None);
    }
    use std::os::unix::process::CommandExt;
    let error = std::process::Command::new(std::env::current_exe()?).args(std::env::args_os().skip(1)).env(LEVEL, "3").exec();
    Err(error).context("cannot start the worker")
}
