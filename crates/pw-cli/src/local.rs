//! `pathways local`: a whole cluster on this machine, for one command or until stopped.

use std::ffi::OsString;
use std::io::IsTerminal;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep, timeout};

use crate::controller::Announcement;
use crate::{cluster, plugin, status};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of workers (hosts)
    #[arg(long, value_name = "W", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    workers: u32,
    /// Devices per worker
    #[arg(long, value_name = "D", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    devices: u32,
    /// Memory per device that programs and arrays may use, e.g. 256MiB; not limited by default
    #[arg(long, value_name = "BYTES", value_parser = cluster::parse_bytes)]
    device_memory: Option<u64>,
    /// Port for JAX clients; 0 = any free one. Given, the other ports are any free ones [default: 29000, and 29001 for `status`]
    #[arg(long, value_name = "P")]
    port: Option<u16>,
    /// PJRT plugin (a shared library); found in the Python environment if not given
    #[arg(long, value_name = "PATH", env = "PATHWAYS_PLUGIN")]
    plugin: Option<PathBuf>,
    /// LAPACK for linear algebra (a shared library with 32-bit integers), or `none` [default: that of a scipy beside the plugin,
    /// else the system's]
    #[arg(long, value_name = "PATH", env = "PATHWAYS_LAPACK", default_value = "", hide_default_value = true)]
    lapack: String,
    /// Where compiled programs are kept [default: $XDG_CACHE_HOME/pathways-rs]
    #[arg(long, value_name = "DIR")]
    cache_dir: Option<PathBuf>,
    /// Accept programs that name the test targets (pw.sleep_us)
    #[arg(long)]
    test_targets: bool,
    /// Write the controller's events to this file, for `pathways replay`
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Seconds to wait for the cluster to come up
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    start_wait: u64,
    /// Command to run on the cluster; without it the cluster stays up until Ctrl-C
    #[arg(last = true, value_name = "CMD")]
    command: Vec<OsString>,
}

const CONTROLLER: &str = "the controller";

/// After being asked to stop, a process has so long before it is killed.
const STOP_WAIT: Duration = Duration::from_secs(5);

pub(crate) fn run(args: Args) -> Result<ExitCode> {
    crate::start_logging();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut processes = Processes::default();
        let result = tokio::select! {
            result = start_and_run(&args, &mut processes) => result,
            signal = cluster::stop_signal() => {
                processes.stop_command(signal).await;
                Ok(ended_by(signal))
            }
        };
        processes.stop().await;
        result
    })
}

/// Exit code of a program that a signal ended, as a shell gives it.
fn ended_by(signal: Signal) -> ExitCode {
    ExitCode::from(128 + signal as u8)
}

struct Process {
    name: String,
    /// Slot and start of a worker.
    worker: Option<(u32, Instant)>,
    child: Child,
}

/// Everything that was started; dropping it kills what is left.
#[derive(Default)]
struct Processes {
    cluster: Vec<Process>,
    command: Option<Process>,
}

impl Processes {
    /// Passes a signal on to the command and waits for its end. A terminal has sent Ctrl-C to the command too: then it is
    /// sent again only to a command that does not end by itself.
    async fn stop_command(&mut self, signal: Signal) {
        let Some(mut command) = self.command.take() else { return };
        let told = signal == Signal::SIGINT && std::io::stdin().is_terminal();
        if told && timeout(Duration::from_secs(1), command.child.wait()).await.is_ok() {
            return;
        }
        stop_all(vec![command], signal).await;
    }

    /// Asks the command, then the cluster, to end; kills who does not.
    async fn stop(&mut self) {
        if let Some(command) = self.command.take() {
            stop_all(vec![command], Signal::SIGTERM).await;
        }
        let mut cluster = std::mem::take(&mut self.cluster);
        // The controller first, or it would take the end of its workers for their loss.
        if cluster.first().is_some_and(|p| p.name == CONTROLLER) {
            stop_all(vec![cluster.remove(0)], Signal::SIGTERM).await;
        }
        stop_all(cluster, Signal::SIGTERM).await;
    }

    /// The first process of the cluster that ended by itself.
    fn ended(&mut self) -> Option<(Process, ExitStatus)> {
        for (index, process) in self.cluster.iter_mut().enumerate() {
            if let Ok(Some(status)) = process.child.try_wait() {
                let process = self.cluster.remove(index);
                return Some((process, status));
            }
        }
        None
    }
}

async fn stop_all(mut processes: Vec<Process>, signal: Signal) {
    for process in &processes {
        if let Some(pid) = process.child.id() {
            let _ = kill(Pid::from_raw(pid as i32), signal);
        }
    }
    let deadline = Instant::now() + STOP_WAIT;
    for process in &mut processes {
        if tokio::time::timeout_at(deadline, process.child.wait()).await.is_err() {
            let _ = process.child.kill().await;
        }
    }
}

async fn start_and_run(args: &Args, processes: &mut Processes) -> Result<ExitCode> {
    let python = args.command.first().map(Path::new).filter(|p| p.components().count() > 1);
    let plugin = plugin::find(args.plugin.clone(), python)?;
    let cache_dir = cluster::cache_dir(args.cache_dir.clone())?;
    let announcement = start_controller(args, processes).await?;
    let failures = vec![0; args.workers as usize];
    let mut workers = WorkerStart { args, controller: announcement.workers.to_string(), plugin, cache_dir, failures };
    for slot in 0..args.workers {
        processes.cluster.push(workers.start(slot)?);
    }
    wait_for_workers(args, processes, &announcement).await?;
    if args.command.is_empty() {
        stay_up(args, processes, &announcement, &mut workers).await
    } else {
        run_command(args, processes, &announcement, &mut workers).await
    }
}

fn own_command(subcommand: &str) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe().context("cannot find this program's own file")?);
    command.arg(subcommand).arg("--parent-pid").arg(std::process::id().to_string());
    // A Ctrl-C in the terminal is for the command; the cluster is stopped behind it.
    command.stdin(Stdio::null()).process_group(0).kill_on_drop(true);
    Ok(command)
}

async fn start_controller(args: &Args, processes: &mut Processes) -> Result<Announcement> {
    let mut command = own_command("controller")?;
    let (port, worker_port) = match args.port {
        Some(port) => (port, 0),
        None => (29000, 29001),
    };
    command.args(["--announce", "--port", &port.to_string(), "--worker-port", &worker_port.to_string()]);
    command.args(["--expect", &args.workers.to_string()]);
    if let Some(record) = &args.record {
        command.arg("--record").arg(record);
    }
    // The cluster is for this machine and this user's command: no secret of another one applies.
    command.env_remove("PATHWAYS_TOKEN").env_remove("PATHWAYS_PORT").env_remove("PATHWAYS_CONTROLLER");
    let mut child = command.stdout(Stdio::piped()).spawn().context("cannot start the controller")?;
    let stdout = child.stdout.take().expect("piped");
    processes.cluster.push(Process { name: CONTROLLER.to_owned(), worker: None, child });
    let mut line = String::new();
    let wait = Duration::from_secs(args.start_wait);
    match timeout(wait, BufReader::new(stdout).read_line(&mut line)).await {
        Err(_) => bail!("the controller did not come up within {} s", args.start_wait),
        Ok(Err(error)) => Err(error).context("the controller said nothing"),
        Ok(Ok(0)) => bail!("the controller ended before it was ready; its message is above"),
        Ok(Ok(_)) => serde_json::from_str(&line).with_context(|| format!("the controller announced '{}'", line.trim())),
    }
}

/// What starts the worker of a slot, at first and again.
struct WorkerStart<'a> {
    args: &'a Args,
    controller: String,
    plugin: PathBuf,
    cache_dir: PathBuf,
    /// By slot: how often in a row the worker has ended at once.
    failures: Vec<u32>,
}

/// A worker that has ended at once, by itself, so often is not started again.
const FAILURES_MAX: u32 = 5;

/// A worker that ends sooner has not come up.
const AT_ONCE: Duration = Duration::from_secs(1);

impl WorkerStart<'_> {
    fn start(&self, slot: u32) -> Result<Process> {
        let args = self.args;
        let mut command = own_command("worker")?;
        command.args(["--controller", &self.controller, "--slot", &slot.to_string()]);
        command.args(["--devices", &args.devices.to_string()]);
        command.arg("--plugin").arg(&self.plugin).arg("--cache-dir").arg(&self.cache_dir);
        command.arg("--lapack").arg(&args.lapack);
        if let Some(bytes) = args.device_memory {
            command.args(["--device-memory", &bytes.to_string()]);
        }
        if args.test_targets {
            command.arg("--test-targets");
        }
        command.env_remove("PATHWAYS_TOKEN").env_remove("PATHWAYS_PLUGIN").env_remove("PATHWAYS_LAPACK").stdout(Stdio::null());
        if std::env::var_os("TF_CPP_MIN_LOG_LEVEL").is_none() {
            command.env("TF_CPP_MIN_LOG_LEVEL", "3");
        }
        let child = command.spawn().context("cannot start a worker")?;
        Ok(Process { name: format!("worker {slot}"), worker: Some((slot, Instant::now())), child })
    }

    /// As a cluster's supervisor would: a worker that has ended is started again. What to tell the user.
    fn replace(&mut self, slot: u32, started: Instant, status: ExitStatus, processes: &mut Processes) -> String {
        let failures = &mut self.failures[slot as usize];
        // One that was killed may well come up the next time.
        let failed = started.elapsed() < AT_ONCE && status.signal().is_none();
        *failures = if failed { *failures + 1 } else { 0 };
        if *failures >= FAILURES_MAX {
            return format!("it has ended at once {FAILURES_MAX} times in a row and is not started again; its message is above");
        }
        match self.start(slot) {
            Ok(process) => {
                processes.cluster.push(process);
                "it is started again; the arrays that lived there are lost, the others go on".to_owned()
            }
            Err(error) => format!("it cannot be started again: {error:#}"),
        }
    }
}

async fn wait_for_workers(args: &Args, processes: &mut Processes, announcement: &Announcement) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(args.start_wait);
    let controller = announcement.workers.to_string();
    loop {
        if let Some((Process { name, .. }, status)) = processes.ended() {
            bail!("{name} ended before the cluster was ready ({status}); its message is above");
        }
        let report = status::fetch(&controller, "").await?;
        let alive = report.workers.iter().filter(|w| w.alive).count();
        if alive >= args.workers as usize {
            return Ok(());
        }
        if Instant::now() >= deadline {
            bail!("{alive} of {} workers were ready after {} s", args.workers, args.start_wait);
        }
        sleep(Duration::from_millis(20)).await;
    }
}

/// What a client's environment needs.
fn client_environment(announcement: &Announcement) -> Vec<(&'static str, OsString)> {
    let mut environment: Vec<(&'static str, OsString)> = vec![
        ("JAX_PLATFORMS", "proxy".into()),
        ("JAX_BACKEND_TARGET", format!("grpc://{}", announcement.clients).into()),
        ("PATHWAYS_CONTROLLER", announcement.workers.to_string().into()),
    ];
    // jaxlib warns at every connection that it is not encrypted; this one does not leave the machine.
    if std::env::var_os("TF_CPP_MIN_LOG_LEVEL").is_none() {
        environment.push(("TF_CPP_MIN_LOG_LEVEL", "2".into()));
    }
    // In a checkout the Python package need not be installed.
    let checkout = std::env::current_exe().ok().and_then(|e| e.ancestors().nth(3).map(|a| a.join("python")));
    if let Some(python) = checkout.filter(|p| p.join("pathways_rs").is_dir()) {
        let mut paths = vec![python];
        paths.extend(std::env::var_os("PYTHONPATH").iter().flat_map(std::env::split_paths));
        if let Ok(joined) = std::env::join_paths(paths) {
            environment.push(("PYTHONPATH", joined));
        }
    }
    environment
}

async fn run_command(
    args: &Args,
    processes: &mut Processes,
    announcement: &Announcement,
    workers: &mut WorkerStart<'_>,
) -> Result<ExitCode> {
    let program = &args.command[0];
    let mut command = Command::new(program);
    command.args(&args.command[1..]).envs(client_environment(announcement)).kill_on_drop(true);
    let child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            eprintln!("pathways: cannot run '{}': {error}", program.to_string_lossy());
            // As a shell: 127 = not found, 126 = cannot be run.
            return Ok(ExitCode::from(if error.kind() == std::io::ErrorKind::NotFound { 127 } else { 126 }));
        }
    };
    processes.command = Some(Process { name: program.to_string_lossy().into_owned(), worker: None, child });
    loop {
        let command = processes.command.as_mut().expect("just started");
        if let Ok(waited) = timeout(Duration::from_millis(100), command.child.wait()).await {
            let status = waited.with_context(|| format!("cannot wait for {}", command.name))?;
            processes.command = None;
            return Ok(match (status.code(), status.signal()) {
                (Some(code), _) => ExitCode::from(code as u8),
                (None, Some(signal)) => ExitCode::from(128u8.wrapping_add(signal as u8)),
                (None, None) => ExitCode::FAILURE,
            });
        }
        if let Some((Process { name, worker, .. }, status)) = processes.ended() {
            let what = match worker {
                Some((slot, started)) => workers.replace(slot, started, status, processes),
                None => "the command goes on, and will fail".to_owned(),
            };
            eprintln!("pathways: {name} ended ({status}); {what}");
        }
    }
}

async fn stay_up(args: &Args, processes: &mut Processes, announcement: &Announcement, workers: &mut WorkerStart<'_>) -> Result<ExitCode> {
    println!("{} workers with {} devices each are ready. To use them, in another terminal:", args.workers, args.devices);
    println!();
    println!("  export JAX_PLATFORMS=proxy JAX_BACKEND_TARGET=grpc://{}", announcement.clients);
    println!("  python train.py");
    println!();
    println!("  pathways status --controller {}", announcement.workers);
    println!();
    println!("Ctrl-C stops everything.");
    loop {
        sleep(Duration::from_millis(100)).await;
        if let Some((Process { name, worker, .. }, status)) = processes.ended() {
            let Some((slot, started)) = worker else { bail!("{name} ended ({status})") };
            eprintln!("pathways: {name} ended ({status}); {}", workers.replace(slot, started, status, processes));
        }
    }
}
