//! From the configuration to a serving worker: plugin, threads, data plane, controller.
//!
//! The thread that runs [`run`] serves the control stream and [`Exec`]; device threads, transfers, compiles and the data
//! plane have their own.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use pw_exec::{ExecConfig, ExecCore};
use pw_linalg::Choice;
use pw_net::data::DataServer;
use pw_net::gang::GangNet;
use pw_pjrt::Client;
use pw_types::{Incarnation, WorkerDevice, WorkerInfo};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::cache::Cache;
use crate::child::open_plugin;
use crate::compiler::{ChildSlot, Compiler};
use crate::device::Clock;
use crate::error::WorkerError;
use crate::exec::{Exec, ExecSender, Message, Outlets};
use crate::host_callback::{Callbacks, Calls};
use crate::peers::Peers;
use crate::sink::Sink;
use crate::stream::{Link, Stream};
use crate::transfer::Transfers;
use crate::{compiler, describe, device, programs, targets, transfer};

/// Launches that one device thread may hold.
const AHEAD_MAX: u32 = 32;

/// XLA recurses deeply.
const STACK_BYTES: usize = 8 << 20;

#[derive(Clone, Debug)]
pub struct WorkerConfig {
    /// `HOST:PORT`.
    pub controller: String,
    pub token: String,
    pub plugin: PathBuf,
    /// `None` = as many as the plugin makes.
    pub devices: Option<u32>,
    /// Bytes per device that the controller may hand out.
    pub device_memory: Option<u64>,
    pub cache_dir: PathBuf,
    /// Programs may call `pw.sleep_us`.
    pub test_targets: bool,
    /// For the targets of linear algebra.
    pub lapack: Choice,
    pub island: u32,
    pub slot: Option<u32>,
    /// Where the data plane listens; port 0 = any.
    pub listen_data: SocketAddr,
    /// Port, of the same address, for the operands of collectives; 0 = any.
    pub gang_port: u16,
    /// What others are told in place of that, `HOST:PORT`.
    pub advertise: Option<String>,
    /// Name of this machine, for people, and for edges where `listen_data` names no address.
    pub host: String,
    pub build: String,
    /// Starts the compile child.
    pub compile_child: Vec<OsString>,
    /// End when this process is no longer the parent.
    pub parent_pid: Option<u32>,
}

/// Serves until the controller, the parent or the plugin is lost; that is always an error. Dropping the future is the
/// orderly way to end a worker; the process should exit then, since a device may be in the middle of a run.
///
/// `TF_CPP_MIN_LOG_LEVEL` must be set before the process starts threads.
pub async fn run(config: WorkerConfig) -> Result<(), WorkerError> {
    let (plugin, devices, test_targets) = (config.plugin.clone(), config.devices, config.test_targets);
    let (cache_dir, lapack) = (config.cache_dir.clone(), config.lapack.clone());
    let opened = tokio::task::spawn_blocking(move || {
        let (client, targets) = open_plugin(&plugin, devices, test_targets, &lapack)?;
        let cache = Cache::open(&cache_dir, &plugin, &targets).map_err(|source| WorkerError::Cache { path: cache_dir, source })?;
        Ok((client, cache))
    });
    let (client, cache) = opened.await.map_err(|e| WorkerError::Fatal(format!("loading the plugin: {e}")))??;

    let address = config.listen_data;
    let listener = TcpListener::bind(address).await.and_then(TcpListener::into_std);
    let listener = listener.map_err(|source| WorkerError::Listen { address, source })?;
    let bound = listener.local_addr().map_err(|source| WorkerError::Listen { address, source })?;
    let gang_address = SocketAddr::new(address.ip(), config.gang_port);
    let incarnation = new_incarnation();
    let listening = GangNet::listen(gang_address, incarnation, config.token.clone());
    let (gang, gang_bound) = listening.map_err(|source| WorkerError::ListenGang { address: gang_address, source })?;
    let info = describe(&config, &client, bound, gang_bound);
    // Before the controller knows of this worker, whatever it needs is there.
    let Parts { exec, messages, link, ending: _ending } = start(&config, client, cache, listener, gang)?;
    let stream = Stream::register(&config, info, incarnation).await?.serve(link);
    tokio::pin!(stream);
    tokio::select! {
        result = &mut stream => result,
        // What was fatal has been told to the stream.
        () = exec.serve(messages) => stream.await,
    }
}

fn describe(config: &WorkerConfig, client: &Client, bound: SocketAddr, gang_bound: SocketAddr) -> WorkerInfo {
    let devices = client.devices().iter().map(|device| WorkerDevice {
        kind: device.kind.clone(),
        debug_string: device.debug_string.clone(),
        memory_kinds: device.memories.iter().map(|m| m.kind.clone()).collect(),
        default_memory_kind: device.default_memory_kind.clone(),
        memory_bytes: config.device_memory,
    });
    let reach =
        |bound: SocketAddr| if bound.ip().is_unspecified() { format!("{}:{}", config.host, bound.port()) } else { bound.to_string() };
    // Gangs are reached at the same name, each at its own port.
    let advertised = |port: u16| config.advertise.as_ref().and_then(|a| a.rsplit_once(':')).map(|(host, _)| format!("{host}:{port}"));
    WorkerInfo {
        host: config.host.clone(),
        pid: std::process::id(),
        build: config.build.clone(),
        platform_name: client.platform_name().to_owned(),
        platform_version: client.platform_version().to_owned(),
        data_address: config.advertise.clone().unwrap_or_else(|| reach(bound)),
        gang_address: advertised(gang_bound.port()).unwrap_or_else(|| reach(gang_bound)),
        island: config.island,
        devices: devices.collect(),
        test_targets: targets::for_tests(config.test_targets).iter().map(|&t| t.to_owned()).collect(),
    }
}

/// A number that no other life of a worker has.
fn new_incarnation() -> Incarnation {
    use std::hash::{BuildHasher, Hasher};
    let mut hasher = std::hash::RandomState::new().build_hasher();
    hasher.write_u32(std::process::id());
    hasher.write_u128(std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_nanos()));
    Incarnation(hasher.finish().max(1))
}

/// Ends what does not end with the process.
struct Ending {
    child: ChildSlot,
    /// Carries the data plane; there until the end.
    data: Option<Runtime>,
}

impl Drop for Ending {
    fn drop(&mut self) {
        self.child.close();
        if let Some(data) = self.data.take() {
            data.shutdown_background();
        }
    }
}

/// Memory of transfers that nobody has used for so long goes back to the system.
const KEEP_BLOCKS: Duration = Duration::from_secs(2);

async fn trim() {
    let mut tick = tokio::time::interval(KEEP_BLOCKS / 2);
    loop {
        tick.tick().await;
        pw_pjrt::trim_blocks(KEEP_BLOCKS);
    }
}

/// All that a worker is made of.
struct Parts {
    exec: Exec,
    messages: UnboundedReceiver<Message>,
    link: Link,
    ending: Ending,
}

/// Array bytes have threads of their own: commands do not wait behind them.
fn data_runtime() -> Result<Runtime, WorkerError> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime.worker_threads((cores / 4).clamp(1, 4)).thread_name("data").enable_all();
    runtime.build().map_err(|source| WorkerError::Thread { source })
}

fn start(
    config: &WorkerConfig,
    client: Client,
    cache: Cache,
    listener: std::net::TcpListener,
    gang: GangNet,
) -> Result<Parts, WorkerError> {
    let (exec, messages) = unbounded_channel();
    let exec = ExecSender(exec);
    let (fatal, fatal_out) = unbounded_channel();
    let spawn = |name: String, body: Box<dyn FnOnce() + Send>| {
        let alarm = Alarm { name: name.clone(), fatal: fatal.clone() };
        let guarded = move || {
            let _alarm = alarm;
            body();
        };
        let thread = std::thread::Builder::new().name(name).stack_size(STACK_BYTES).spawn(guarded);
        thread.map(drop).map_err(|source| WorkerError::Thread { source })
    };
    let calls = Arc::new(Calls::default());
    let runtime = data_runtime()?;
    let data = {
        let _guard = runtime.enter();
        let listener = TcpListener::from_std(listener).map_err(|source| WorkerError::Listen { address: config.listen_data, source })?;
        DataServer::start(listener, config.token.clone(), Arc::new(Sink::new(exec.clone(), calls.clone())))
    };
    runtime.spawn(trim());
    let callbacks = Callbacks { calls, data: data.clone() };
    let transfers = Transfers { client: client.clone(), data };

    let count = client.devices().len();
    let clock = Arc::new(Clock::new(count));
    let mut devices = Vec::with_capacity(count);
    for index in 0..count {
        let (sender, jobs) = channel();
        let (clock, exec) = (clock.clone(), exec.clone());
        spawn(format!("device-{index}"), Box::new(move || device::serve(&jobs, &clock, &exec)))?;
        devices.push(sender);
    }
    let mover = |jobs: Receiver<_>| {
        let (transfers, exec) = (transfers.clone(), exec.clone());
        Box::new(move || transfer::serve(&jobs, &transfers, &exec))
    };
    let (uploads, jobs) = channel();
    spawn("upload".to_owned(), mover(jobs))?;
    let (copies, jobs) = channel();
    spawn("copy".to_owned(), mover(jobs))?;
    let (drops, dropped): (Sender<_>, Receiver<_>) = channel();
    spawn("drop".to_owned(), Box::new(move || dropped.into_iter().for_each(drop)))?;

    let (loads, jobs) = channel();
    let (load_cache, load_client, load_exec) = (cache.clone(), client.clone(), exec.clone());
    let load_net = gang.clone();
    spawn("load".to_owned(), Box::new(move || programs::serve(&jobs, &load_cache, &load_client, &callbacks, &load_net, &load_exec)))?;
    let (questions, jobs) = channel();
    let (describe_cache, describe_client, describe_exec) = (cache.clone(), client.clone(), exec.clone());
    spawn("describe".to_owned(), Box::new(move || describe::serve(&jobs, &describe_cache, &describe_client, &describe_exec)))?;
    let (compiles, jobs) = channel();
    let child = ChildSlot::default();
    let device_ids = client.devices().iter().map(|d| d.id).collect();
    let compiler = Arc::new(Compiler { command: config.compile_child.clone(), cache, device_ids, slot: child.clone() });
    let (misses, missed) = channel();
    let (front, front_exec) = (compiler.clone(), exec.clone());
    spawn("compile-cache".to_owned(), Box::new(move || compiler::serve(&jobs, &misses, &front, &front_exec)))?;
    let compile_exec = exec.clone();
    spawn("compile".to_owned(), Box::new(move || compiler::serve_misses(&missed, &compiler, &compile_exec)))?;

    let default_memory_kinds = client.devices().iter().map(|d| d.default_memory_kind.clone()).collect();
    let core = ExecCore::new(ExecConfig { default_memory_kinds, ahead_max: AHEAD_MAX });
    let (reports, reports_out) = unbounded_channel();
    let peers = Peers::new(config.token.clone(), exec.clone(), runtime.handle().clone());
    let outlets = Outlets {
        devices,
        clock,
        transfers,
        peers,
        gang,
        uploads,
        copies,
        compiles,
        loads,
        questions,
        drops,
        reports,
        fatal: fatal.clone(),
    };
    let link = Link { exec, reports: reports_out, fatal: fatal_out };
    Ok(Parts { exec: Exec::new(core, outlets), messages, link, ending: Ending { child, data: Some(runtime) } })
}

/// A thread that panics takes the worker with it: nobody else would do its work.
struct Alarm {
    name: String,
    fatal: tokio::sync::mpsc::UnboundedSender<String>,
}

impl Drop for Alarm {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = self.fatal.send(format!("thread {} panicked", self.name));
        }
    }
}
