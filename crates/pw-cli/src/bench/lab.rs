//! What benches run on: clusters, null servers and client processes, each of which ends with the value that stands for it.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use pw_types::StatusReport;
use serde_json::Value;

use super::Common;
use crate::controller::Announcement;
use crate::{cluster, plugin, status};

const START_WAIT: Duration = Duration::from_secs(60);

/// Threads that stock JAX makes; with fewer than devices it aborts inside a collective.
const STOCK_THREADS: usize = 16;

/// Where things are.
pub(super) struct Lab {
    /// This program; found once, since a build may replace the file while a bench runs.
    executable: PathBuf,
    python: PathBuf,
    plugin: PathBuf,
    cache_dir: PathBuf,
    checkout: PathBuf,
    pub(super) rounds: usize,
    pub(super) quick: bool,
}

impl Lab {
    pub(super) fn new(common: &Common) -> Result<Lab> {
        let executable = std::env::current_exe()?;
        let checkout = common.checkout.clone().or_else(|| executable.ancestors().nth(3).map(Path::to_owned)).unwrap_or_default();
        if !checkout.join("bench/served.py").is_file() {
            bail!("no bench/ with the client scripts in '{}'; give the checkout with --checkout DIR", checkout.display());
        }
        let environment = std::env::var_os("VIRTUAL_ENV").map_or_else(|| checkout.join(".venv"), PathBuf::from);
        let python = common.python.clone().unwrap_or_else(|| environment.join("bin/python"));
        if !python.is_file() {
            bail!("no Python at '{}'; run `cargo xtask setup`, or give one that has JAX with --python PATH", python.display());
        }
        Ok(Lab {
            executable,
            plugin: plugin::find(common.plugin.clone(), Some(&python))?,
            cache_dir: cluster::cache_dir(common.cache_dir.clone())?,
            python,
            checkout,
            rounds: common.rounds,
            quick: common.quick,
        })
    }

    /// The length of a window.
    pub(super) fn window(&self, seconds: f64) -> f64 {
        if self.quick { seconds / 4.0 } else { seconds }
    }
}

/// A child that is killed when it is dropped.
struct Guarded(Child);

impl Guarded {
    fn ask_to_end(&self) {
        let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.0.id() as i32), nix::sys::signal::Signal::SIGTERM);
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What a client connects to.
pub(super) trait Server {
    fn clients_port(&self) -> u16;
}

/// A controller and its workers.
pub(super) struct Cluster {
    workers: Vec<Guarded>,
    controller: Guarded,
    announcement: Announcement,
    runtime: tokio::runtime::Runtime,
}

impl Cluster {
    /// With one worker.
    pub(super) fn start(lab: &Lab, devices: u32, worker_options: &[&str]) -> Result<Cluster> {
        Cluster::with_workers(lab, 1, devices, worker_options)
    }

    /// Worker `i` is in slot `i`.
    pub(super) fn with_workers(lab: &Lab, workers: u32, devices: u32, worker_options: &[&str]) -> Result<Cluster> {
        let own = |subcommand: &str| -> Command {
            let mut command = Command::new(&lab.executable);
            command.arg(subcommand).arg("--parent-pid").arg(std::process::id().to_string()).stdin(Stdio::null());
            for variable in ["PATHWAYS_TOKEN", "PATHWAYS_PORT", "PATHWAYS_CONTROLLER", "PATHWAYS_PLUGIN"] {
                command.env_remove(variable);
            }
            command
        };
        let mut controller = own("controller");
        controller.args(["--announce", "--port", "0", "--worker-port", "0"]).stdout(Stdio::piped());
        let mut controller = Guarded(controller.spawn().context("cannot start the controller")?);
        let line = first_line(&mut controller.0)?;
        let announcement: Announcement = serde_json::from_str(&line).context("the controller ended before it was ready")?;

        let start = |slot: u32| -> Result<Guarded> {
            let mut worker = own("worker");
            worker.args(["--controller", &announcement.workers.to_string(), "--devices", &devices.to_string()]);
            worker.args(["--slot", &slot.to_string()]);
            worker.arg("--plugin").arg(&lab.plugin).arg("--cache-dir").arg(&lab.cache_dir).args(worker_options);
            worker.env("TF_CPP_MIN_LOG_LEVEL", "3").stdout(Stdio::null());
            Ok(Guarded(worker.spawn().context("cannot start a worker")?))
        };
        let workers = (0..workers).map(start).collect::<Result<Vec<_>>>()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let mut cluster = Cluster { workers, controller, announcement, runtime };
        cluster.wait()?;
        Ok(cluster)
    }

    fn wait(&mut self) -> Result<()> {
        let deadline = Instant::now() + START_WAIT;
        while self.status()?.workers.iter().filter(|w| w.alive).count() < self.workers.len() {
            for worker in &mut self.workers {
                if let Some(status) = worker.0.try_wait()? {
                    bail!("a worker ended ({status}); its message is above");
                }
            }
            if Instant::now() > deadline {
                bail!("the workers were not ready within {} s", START_WAIT.as_secs());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    pub(super) fn status(&self) -> Result<StatusReport> {
        self.runtime.block_on(status::fetch(&self.announcement.workers.to_string(), ""))
    }

    pub(super) fn controller_pid(&self) -> u32 {
        self.controller.0.id()
    }

    /// Of the first worker.
    pub(super) fn worker_pid(&self) -> u32 {
        self.workers[0].0.id()
    }

    pub(super) fn worker_pids(&self) -> Vec<u32> {
        self.workers.iter().map(|worker| worker.0.id()).collect()
    }
}

/// Both are told before either is gone, so that none complains about the other.
impl Drop for Cluster {
    fn drop(&mut self) {
        self.workers.iter_mut().for_each(|worker| worker.ask_to_end());
        self.controller.ask_to_end();
        std::thread::sleep(Duration::from_millis(50));
    }
}

impl Server for Cluster {
    fn clients_port(&self) -> u16 {
        self.announcement.clients.port()
    }
}

/// The server that computes nothing.
pub(super) struct NullServer {
    process: Guarded,
    port: u16,
}

impl NullServer {
    pub(super) fn start(lab: &Lab, options: &[&str]) -> Result<NullServer> {
        let program = lab.executable.with_file_name("pathways-null");
        if !program.is_file() {
            bail!("no null server at '{}'; build it with `cargo build --release --package pw-null`", program.display());
        }
        let mut command = Command::new(program);
        command.arg("--with-stdin").args(options).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = Guarded(command.spawn().context("cannot start the null server")?);
        let port = first_line(&mut process.0)?.trim().parse().context("the null server did not print its port")?;
        Ok(NullServer { process, port })
    }

    pub(super) fn pid(&self) -> u32 {
        self.process.0.id()
    }
}

impl Server for NullServer {
    fn clients_port(&self) -> u16 {
        self.port
    }
}

fn first_line(child: &mut Child) -> Result<String> {
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line)?;
    Ok(line)
}

/// A Python process that stays and does what it is told.
pub(super) struct Client {
    name: String,
    process: Guarded,
    requests: ChildStdin,
    answers: Receiver<String>,
}

impl Client {
    /// A client of a server.
    pub(super) fn of(lab: &Lab, server: &dyn Server, name: &str, script: &str, variables: &[(&str, &str)]) -> Result<Client> {
        let target = format!("grpc://127.0.0.1:{}", server.clients_port());
        let mut all = vec![("JAX_PLATFORMS", "proxy"), ("JAX_BACKEND_TARGET", target.as_str()), ("PATHWAYS_NAME", name)];
        all.extend(variables);
        Client::start(lab, name, script, &all)
    }

    /// Stock JAX in its own process.
    pub(super) fn stock(lab: &Lab, devices: u32, name: &str, script: &str) -> Result<Client> {
        let flags = format!("--xla_force_host_platform_device_count={devices}");
        let threads = STOCK_THREADS.to_string();
        Client::start(lab, name, script, &[("JAX_PLATFORMS", "cpu"), ("XLA_FLAGS", &flags), ("NPROC", &threads)])
    }

    fn start(lab: &Lab, name: &str, script: &str, variables: &[(&str, &str)]) -> Result<Client> {
        let mut command = Command::new(&lab.python);
        command.arg(lab.checkout.join("bench").join(script)).stdin(Stdio::piped()).stdout(Stdio::piped());
        for (variable, _) in std::env::vars_os() {
            let steers = ["JAX_", "XLA_", "IFRT_PROXY_", "PATHWAYS_"].iter().any(|p| variable.to_string_lossy().starts_with(p));
            if steers {
                command.env_remove(variable);
            }
        }
        let mut path = vec![lab.checkout.join("python")];
        path.extend(std::env::var_os("PYTHONPATH").iter().flat_map(std::env::split_paths));
        let path: OsString = std::env::join_paths(path)?;
        command.env("PYTHONPATH", path).env("TF_CPP_MIN_LOG_LEVEL", "2").envs(variables.iter().copied());
        let mut process = Guarded(command.spawn().with_context(|| format!("cannot start {}", lab.python.display()))?);
        let requests = process.0.stdin.take().expect("piped");
        let stdout = process.0.stdout.take().expect("piped");
        let (sender, answers) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Client { name: name.to_owned(), process, requests, answers })
    }

    pub(super) fn pid(&self) -> u32 {
        self.process.0.id()
    }

    pub(super) fn send(&mut self, request: &Value) -> Result<()> {
        writeln!(self.requests, "{request}").with_context(|| format!("the client {} has ended; its message is above", self.name))
    }

    pub(super) fn receive(&mut self, wait: Duration) -> Result<Value> {
        let name = &self.name;
        let line =
            self.answers.recv_timeout(wait).with_context(|| format!("the client {name} gave no answer within {} s", wait.as_secs()))?;
        let answer: Value = serde_json::from_str(&line).with_context(|| format!("the client {name} answered '{line}'"))?;
        match answer["error"].as_str() {
            Some(error) => bail!("the client {name} failed: {error}"),
            None => Ok(answer),
        }
    }

    pub(super) fn ask(&mut self, request: &Value) -> Result<Value> {
        self.send(request)?;
        self.receive(Duration::from_secs(120))
    }

    /// SIGKILL, at once.
    pub(super) fn kill(mut self) {
        let _ = self.process.0.kill();
    }
}
