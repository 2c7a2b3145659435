//! Tests against a real plugin: `PATHWAYS_PLUGIN`, or the one in the workspace's `.venv`.
//! Without either they print why they do nothing.

mod run;

use std::path::{Path, PathBuf};

use pw_pjrt::{Client, ClientOptions, LoadedExecutable, Plugin};

/// The programs of `tests/data` with their replicas and partitions.
pub(crate) const PROGRAMS: &[(&str, u32, u32)] = &[
    ("psum8", 1, 8),
    ("gather24", 1, 8),
    ("scatter8", 1, 8),
    ("alltoall8", 1, 8),
    ("permute8", 1, 8),
    ("loop8", 1, 8),
    ("variadic24", 1, 8),
    ("index24", 1, 8),
    ("cond8", 1, 8),
    ("kinds8", 1, 8),
    ("layers24", 1, 8),
    ("any24", 1, 8),
    ("reshard24", 1, 8),
    ("replicas42", 4, 2),
    ("floats8", 8, 1),
    ("integers8", 8, 1),
    ("others8", 8, 1),
];

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

pub(crate) fn client(plugin: Plugin) -> Client {
    let options = ClientOptions { device_count: Some(8), asynchronous: Some(false), process_id: None };
    plugin.create_client(&options).unwrap()
}

pub(crate) fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

/// The program as the plugin itself runs it on eight devices.
pub(crate) fn compile(client: &Client, name: &str) -> LoadedExecutable {
    let program = std::fs::read(data(&format!("{name}.vhlo"))).unwrap();
    let options = std::fs::read(data(&format!("{name}.opts"))).unwrap();
    client.compile(&program, "mlir", &options).unwrap()
}

/// Makes `NAME.bin` of every program of `tests/data`.
#[test]
#[ignore = "writes tests/data"]
fn record() {
    let Some(plugin) = plugin() else { return };
    let client = client(plugin);
    for (name, _, _) in PROGRAMS {
        std::fs::write(data(&format!("{name}.bin")), compile(&client, name).optimized_hlo().unwrap()).unwrap();
    }
}
