//! The compile child: the same plugin in a process that may die. It compiles, asks the result everything that is ever
//! wanted of it, and puts both into the cache.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::mpsc;

use pw_linalg::Choice;
use pw_pjrt::{Client, ClientOptions, ExecMeta, LoadedExecutable, Plugin};
use pw_proto::control::{CompileChildRequest, CompileChildResponse, CompiledProgram};
use pw_types::{CompileReport, Status};

use crate::cache::{Cache, hex};
use crate::error::WorkerError;
use crate::per_device::{self, MemberProgram};
use crate::{convert, frames, host_callback, targets};

/// Larger programs whose devices do not depend on one another gain nothing from another form, which takes a compile.
const INDEPENDENT_HLO_BYTES_MAX: usize = 64 << 10;

#[derive(Clone, Debug)]
pub struct CompileOnlyConfig {
    pub plugin: PathBuf,
    /// As the worker's.
    pub devices: Option<u32>,
    pub cache_dir: PathBuf,
    pub test_targets: bool,
    /// As the worker's.
    pub lapack: Choice,
}

/// Serves compile requests from standard input until it ends; answers go to standard output.
///
/// `TF_CPP_MIN_LOG_LEVEL` must have been set by whoever started this process.
pub fn compile_only(config: CompileOnlyConfig) -> Result<(), WorkerError> {
    let (sender, requests) = mpsc::channel();
    // The end of the input is the end of the worker, also in the middle of a compile that takes minutes.
    std::thread::spawn(move || {
        let mut input = std::io::stdin().lock();
        while let Ok(Some(request)) = frames::read::<CompileChildRequest>(&mut input) {
            if sender.send(request).is_err() {
                break;
            }
        }
        std::process::exit(0);
    });
    let compiler = Compiler::new(&config)?;
    let mut output = std::io::stdout().lock();
    for request in requests {
        let result = compiler.compile(&request);
        let response = CompileChildResponse { id: request.id, result };
        frames::write(&mut output, &response).map_err(|source| WorkerError::Pipe { source })?;
    }
    Ok(())
}

fn client_options(devices: Option<u32>) -> ClientOptions {
    ClientOptions { device_count: devices.map(i64::from), asynchronous: Some(false), process_id: None }
}

/// The plugin with its targets, a client of it, and the names of the targets.
pub(crate) fn open_plugin(
    plugin: &std::path::Path,
    devices: Option<u32>,
    test_targets: bool,
    lapack: &Choice,
) -> Result<(Client, String), WorkerError> {
    let failed = |error| WorkerError::Plugin { path: plugin.to_owned(), status: convert::status(error) };
    let loaded = Plugin::load(plugin).map_err(failed)?;
    let client = loaded.create_client(&client_options(devices)).map_err(failed)?;
    if let Err(error) = per_device::register(loaded) {
        tracing::warn!(%error, "programs of several devices run in the plugin's own form only");
    }
    if let Err(error) = host_callback::register(loaded) {
        tracing::warn!(%error, "programs with host callbacks will not compile");
    }
    if test_targets {
        targets::register(loaded).map_err(failed)?;
    }
    let found = pw_linalg::find(lapack, plugin).map_err(|reason| WorkerError::Lapack { reason })?;
    match &found {
        Some(found) => tracing::debug!(library = %found.library.display(), "LAPACK"),
        None => tracing::info!("no LAPACK: programs with linear algebra will not compile"),
    }
    let names = targets::names(test_targets, found.is_some());
    pw_linalg::register(loaded, found.map(|f| f.lapack)).map_err(failed)?;
    Ok((client, names))
}

struct Compiler {
    client: Client,
    /// Clients for programs of gangs, by number of members.
    gangs: RefCell<BTreeMap<u32, Client>>,
    cache: Cache,
    test_targets: bool,
}

impl Compiler {
    fn new(config: &CompileOnlyConfig) -> Result<Compiler, WorkerError> {
        let (client, targets) = open_plugin(&config.plugin, config.devices, config.test_targets, &config.lapack)?;
        let cache = Cache::open(&config.cache_dir, &config.plugin, &targets)
            .map_err(|source| WorkerError::Cache { path: config.cache_dir.clone(), source })?;
        Ok(Compiler { client, gangs: RefCell::default(), cache, test_targets: config.test_targets })
    }

    fn compile(&self, request: &CompileChildRequest) -> Result<CompiledProgram, Status> {
        let gang = request.devices.is_empty();
        let client = if gang { self.gang_client(request.partitions)? } else { self.client.clone() };
        let compiled = client.compile(&request.program, "mlir", &request.options);
        let executable = compiled.map_err(|error| targets::explain(convert::status(error), self.test_targets))?;
        let meta = executable.meta().map_err(convert::status)?;
        targets::check(&meta.custom_call_targets, self.test_targets)?;
        let key = self.cache.key(&request.program, &request.options, gang);
        let member = match self.member(&client, &executable, &meta, request) {
            Err(why) if gang => {
                let text = format!("{} cannot run on several workers: {why}; keep it on the devices of one", meta.name);
                return Err(Status::unimplemented(text));
            }
            // Without it the plugin's own form is used.
            made => made.ok(),
        };
        let report = CompileReport { fingerprint: key.clone(), ..convert::report(meta) };
        let program = if gang { Vec::new() } else { executable.serialize().map_err(convert::status)? };
        let module = if gang { Some(executable.optimized_hlo().map_err(convert::status)?) } else { None };
        let stored = module.map_or(Ok(()), |module| self.cache.store_module(&key, &module));
        let stored = stored.and_then(|()| self.cache.store(&key, &program, member.as_deref(), &report));
        stored.map_err(|error| Status::internal(format!("cannot write to the cache of compiled programs: {error}")))?;
        Ok(CompiledProgram { report, blob: hex(&key) })
    }

    /// A client of as many devices as a gang has members.
    fn gang_client(&self, members: u32) -> Result<Client, Status> {
        if let Some(client) = self.gangs.borrow().get(&members) {
            return Ok(client.clone());
        }
        let platform = self.client.platform_name();
        if platform != "cpu" {
            return Err(Status::unimplemented(format!("programs over several workers of platform {platform} are not built yet")));
        }
        let client = self.client.plugin().create_client(&client_options(Some(members))).map_err(convert::status)?;
        if let Some(odd) = (0..).zip(client.devices()).find(|(i, device)| device.id != *i) {
            return Err(Status::internal(format!("device {} of a client for compiling has id {}", odd.0, odd.1.id)));
        }
        self.gangs.borrow_mut().insert(members, client.clone());
        Ok(client)
    }

    /// The form for one device at a time, in which CPU devices run what several of them share; or why there is none.
    fn member(
        &self,
        client: &Client,
        executable: &LoadedExecutable,
        meta: &ExecMeta,
        request: &CompileChildRequest,
    ) -> Result<Vec<u8>, String> {
        let default = client.devices().first().map(|d| d.default_memory_kind.clone()).unwrap_or_default();
        let plain = meta.params.iter().chain(&meta.outputs).all(|a| a.memory_kind == default);
        let cpu = self.client.platform_name() == "cpu";
        let refused = [
            (!cpu, "only CPU devices take such programs"),
            (!per_device::is_possible(), "the plugin has no FFI extension"),
            (meta.num_partitions < 2, "it has one partition"),
            (meta.num_replicas != 1, "it has replicas"),
            (!plain, "some of its values are not in device memory"),
        ];
        if let Some((_, why)) = refused.iter().find(|(refused, _)| *refused) {
            return Err((*why).to_owned());
        }
        let hlo = executable.optimized_hlo().map_err(|error| error.to_string())?;
        if !request.devices.is_empty() && !meta.has_collectives() && hlo.len() > INDEPENDENT_HLO_BYTES_MAX {
            return Err("its devices do not depend on one another".to_owned());
        }
        let made = pw_hlo::rewrite(&hlo, 1, request.partitions).map_err(|error| error.to_string()).and_then(|rewritten| {
            let member = self.client.compile_backend(&rewritten.module).and_then(|member| member.serialize());
            let executable = member.map_err(|error| error.to_string())?;
            Ok(MemberProgram { devices: request.devices.clone(), collectives: rewritten.collectives, executable }.encode())
        });
        made.inspect_err(|error| tracing::warn!(%error, program = %meta.name, "no form for one device at a time"))
    }
}
