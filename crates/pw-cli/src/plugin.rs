//! Finding the PJRT plugin: `--plugin`, `PATHWAYS_PLUGIN`, or a wheel in a Python environment nearby.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

/// Wheels that carry a plugin, and where in them it lies.
const WHEELS: [(&str, &str); 1] = [("lammps-jax-pjrt-cpu", "lammps_jax_pjrt_cpu/pjrt_c_api_cpu_plugin.so")];

/// The plugin to load. `python` = a program of the environment to look in, e.g. the client's interpreter.
pub(crate) fn find(given: Option<PathBuf>, python: Option<&Path>) -> Result<PathBuf> {
    if let Some(path) = given {
        return Ok(path);
    }
    let mut environments: Vec<PathBuf> = Vec::new();
    environments.extend(std::env::var_os("VIRTUAL_ENV").map(PathBuf::from));
    environments.extend(python.and_then(|p| p.parent()).and_then(Path::parent).map(Path::to_owned));
    if let Ok(executable) = std::env::current_exe() {
        // target/release/pathways of a checkout, or bin/pathways of an environment.
        environments.extend(executable.ancestors().skip(2).take(2).map(|a| a.join(".venv")));
        environments.extend(executable.ancestors().nth(2).map(Path::to_owned));
    }
    environments.extend(std::env::current_dir().ok().map(|d| d.join(".venv")));
    for environment in &environments {
        if let Some(found) = in_environment(environment) {
            return Ok(found);
        }
    }
    let looked: Vec<String> = environments.iter().map(|e| e.display().to_string()).collect();
    bail!(
        "no PJRT plugin found; give --plugin PATH or PATHWAYS_PLUGIN, or install one of the wheels it can come from ({}) \
         into the Python environment in use (looked in {})",
        WHEELS.map(|(name, _)| name).join(", "),
        if looked.is_empty() { "none".to_owned() } else { looked.join(", ") }
    )
}

fn in_environment(environment: &Path) -> Option<PathBuf> {
    let mut libraries: Vec<PathBuf> = std::fs::read_dir(environment.join("lib")).ok()?.flatten().map(|e| e.path()).collect();
    libraries.sort();
    let candidates = libraries.iter().flat_map(|l| WHEELS.iter().map(move |(_, file)| l.join("site-packages").join(file)));
    candidates.into_iter().find(|c| c.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plugin_is_found_in_the_environment_of_the_interpreter() {
        let root = std::env::temp_dir().join(format!("pw-plugin-{}", std::process::id()));
        let wheel = root.join("lib/python3.99/site-packages/lammps_jax_pjrt_cpu");
        std::fs::create_dir_all(&wheel).unwrap();
        std::fs::write(wheel.join("pjrt_c_api_cpu_plugin.so"), b"").unwrap();
        assert_eq!(in_environment(&root), Some(wheel.join("pjrt_c_api_cpu_plugin.so")));
        assert_eq!(in_environment(&root.join("other")), None);
        assert_eq!(find(Some("given.so".into()), None).unwrap(), PathBuf::from("given.so"));
        std::fs::remove_dir_all(&root).unwrap();
    }
}
