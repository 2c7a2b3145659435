//! Tests against a real plugin: `PATHWAYS_PLUGIN`, or the one in the workspace's `.venv`.
//! Without either they print why they do nothing.

mod bench;
mod ffi;
mod meta;
mod run;
mod transfer;

use std::path::{Path, PathBuf};

use pw_pjrt::{Client, ClientOptions, LoadedExecutable, Plugin};

/// The plugin under test.
pub(crate) fn plugin() -> Option<Plugin> {
    let path = match std::env::var_os("PATHWAYS_PLUGIN") {
        Some(path) => PathBuf::from(path),
        None => match find(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv/lib"), 6) {
            Some(path) => path,
            None => {
                eprintln!("skipped: PATHWAYS_PLUGIN is unset and .venv holds no PJRT plugin");
                return None;
            }
        },
    };
    Some(Plugin::load(&path).unwrap())
}

/// A PJRT CPU plugin below a folder.
fn find(folder: &Path, depth: usize) -> Option<PathBuf> {
    let mut entries: Vec<PathBuf> = std::fs::read_dir(folder).ok()?.flatten().map(|e| e.path()).collect();
    entries.sort();
    let named = |p: &PathBuf| {
        let name = p.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name == "pjrt_c_api_cpu_plugin.so" || name == "libpjrt_cpu.so"
    };
    if let Some(found) = entries.iter().find(|p| named(p)) {
        return Some(found.clone());
    }
    let below = |p: &PathBuf| if depth > 0 && p.is_dir() { find(p, depth - 1) } else { None };
    entries.iter().find_map(below)
}

/// A client of so many devices that runs programs on the calling thread where it can.
pub(crate) fn client(plugin: Plugin, devices: i64) -> Client {
    let options = ClientOptions { device_count: Some(devices), asynchronous: Some(false), process_id: None };
    plugin.create_client(&options).unwrap()
}

/// True for a plugin that has memory kinds and honours all options (API 0.115 at least).
pub(crate) fn is_new(plugin: Plugin) -> bool {
    plugin.api_version() >= (0, 115)
}

fn testdata(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata").join(name)).unwrap()
}

/// Compiles a program of `testdata`.
pub(crate) fn compile(client: &Client, name: &str) -> LoadedExecutable {
    let program = testdata(&format!("{name}.vhlo"));
    client.compile(&program, "mlir", &options(name)).unwrap()
}

/// JAX's options for a program of `testdata`.
pub(crate) fn options(name: &str) -> Vec<u8> {
    testdata(&format!("{name}.opts"))
}

pub(crate) fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect()
}

pub(crate) fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}
