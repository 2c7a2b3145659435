//! A real worker, with a real plugin, under a controller played by the test. Not run where no plugin is found: set
//! `PATHWAYS_PLUGIN`, or have the workspace's `.venv`.
//!
//! It has its own `main`, since the worker's compile child must be a program, and this is one.

mod callbacks;
mod cases;
mod controller;
mod programs;

use std::path::{Path, PathBuf};

use pw_worker::{CompileOnlyConfig, compile_only};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|a| a == "compile-child") {
        let [_, plugin, cache_dir, devices, test_targets] = &arguments[..] else { panic!("compile-child: {arguments:?}") };
        let config = CompileOnlyConfig {
            plugin: plugin.into(),
            devices: devices.parse().ok(),
            cache_dir: cache_dir.into(),
            test_targets: test_targets == "true",
            lapack: Default::default(),
        };
        compile_only(config).expect("the compile child");
        return;
    }
    // What test runners ask for.
    if arguments.iter().any(|a| a == "--list") {
        println!("shell: test");
        return;
    }
    if std::env::var_os("TF_CPP_MIN_LOG_LEVEL").is_none() {
        // The plugin reads it when it is loaded, and changing the environment of a running program is unsafe.
        let mut again = std::process::Command::new(std::env::current_exe().expect("this program"));
        let status = again.args(&arguments).env("TF_CPP_MIN_LOG_LEVEL", "3").status().expect("this program runs");
        std::process::exit(status.code().unwrap_or(1));
    }
    let Some(plugin) = find_plugin() else {
        println!("skipped: no PJRT plugin in PATHWAYS_PLUGIN or in .venv");
        return;
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    runtime.block_on(cases::all(&plugin, arguments.iter().any(|a| a == "--bench")));
    println!("ok");
    // Device threads end with the process.
    std::process::exit(0);
}

fn find_plugin() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("PATHWAYS_PLUGIN") {
        return Some(path.into());
    }
    let lib = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv/lib");
    let pythons = std::fs::read_dir(lib).ok()?.flatten();
    pythons.map(|python| python.path().join("site-packages/lammps_jax_pjrt_cpu/pjrt_c_api_cpu_plugin.so")).find(|p| p.exists())
}
