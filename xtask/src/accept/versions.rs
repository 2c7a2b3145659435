//! One program with several JAX releases against one running server.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::{run, setup};

pub(super) const HELP: &str = "\
cargo xtask accept jax-versions [--version VERSION]...

For each release (default 0.8.0 and 0.11.2) makes an environment under target/accept/venv-VERSION with what the package index has
for it, not pinned by hash, and runs smoke.py and callbacks.py of tests/e2e/programs with it, all on one `pathways local --workers 1 --devices 4`, beside
the environments of the set-up. A release that none of the found interpreters can install is reported as not run.";

const RELEASES: [&str; 2] = ["0.8.0", "0.11.2"];

/// What every release runs, and what each prints at its end.
const PROGRAMS: [&str; 2] = ["smoke.py", "callbacks.py"];
const DONE: [&str; 2] = ["smoke ok", "callbacks ok"];
const LIMIT: Duration = Duration::from_secs(600);

pub(super) fn task(root: &Path, args: &[String]) -> Result<(), String> {
    let mut releases = Vec::new();
    for pair in args.chunks(2) {
        match pair {
            [flag, version] if flag == "--version" => releases.push(version.clone()),
            _ => return Err(format!("unknown option {}\n\n{HELP}", pair[0])),
        }
    }
    if releases.is_empty() {
        releases = RELEASES.map(str::to_owned).to_vec();
    }
    let ready = setup::ensure(root)?;
    let bases: Vec<&PathBuf> = std::iter::once(&ready.python).chain(&ready.other_python).collect();
    let mut pythons: Vec<PathBuf> = bases.iter().map(|b| (*b).clone()).collect();
    let mut not_run = Vec::new();
    for release in &releases {
        match bases.iter().find_map(|base| environment(root, base, release)) {
            Some(python) => pythons.push(python),
            None => not_run.push(release.clone()),
        }
    }

    // One server, all clients: the shell's `&&` runs them one after the other under the same `pathways local`.
    let programs = PROGRAMS.map(|name| root.join("tests/e2e/programs").join(name));
    let all = pythons.iter().flat_map(|python| programs.iter().map(move |program| (python, program)));
    let runs: Vec<String> = all.map(|(python, program)| format!("'{}' '{}'", python.display(), program.display())).collect();
    let mut command = Command::new(&ready.pathways);
    command.args(["local", "--workers", "1", "--devices", "4", "--port", "0", "--cache-dir"]).arg(root.join("target/cache"));
    command.args(["--", "sh", "-c", &runs.join(" && ")]);
    command.env("PATHWAYS_PLUGIN", plugin(root, &ready.python)?);
    let mut passed = 0;
    let status = run::shown(&mut command, LIMIT, |line| passed += usize::from(DONE.iter().any(|done| line.starts_with(done))))?;
    for release in &not_run {
        run::say(&format!("jax {release}: not run, no interpreter that was found here can install it"));
    }
    println!("\n{passed} passed, {} failed, {} skipped", runs.len() - passed, not_run.len() * PROGRAMS.len());
    if status.success() && passed == runs.len() { Ok(()) } else { Err(format!("a release does not work ({status})")) }
}

/// The interpreter of an environment with that release; none where this base cannot have it.
fn environment(root: &Path, base: &Path, release: &str) -> Option<PathBuf> {
    let dir = root.join(format!("target/accept/venv-{release}"));
    let python = dir.join("bin/python");
    let version = "import importlib.metadata as m; print(m.version('jaxlib'))";
    if run::output(Command::new(&python).args(["-c", version])).as_deref() == Some(release) {
        return Some(python);
    }
    let _ = fs::remove_dir_all(&dir);
    run::output(Command::new(base).args(["-m", "venv"]).arg(&dir))?;
    let (jax, jaxlib) = (format!("jax=={release}"), format!("jaxlib=={release}"));
    let mut pip = Command::new(&python);
    pip.args(["-m", "pip", "install", "--disable-pip-version-check", "--only-binary=:all:", &jax, &jaxlib]);
    run::quiet(root, &format!("venv-{release}"), &format!("installing jax {release}"), &mut pip).ok()?;
    Some(python)
}

fn plugin(root: &Path, python: &Path) -> Result<PathBuf, String> {
    let script = "import importlib.util as u; print(u.find_spec('lammps_jax_pjrt_cpu').submodule_search_locations[0])";
    let folder = run::output(Command::new(python).args(["-c", script])).ok_or("the plugin's wheel is missing: run setup again")?;
    let file = Path::new(&folder).join("pjrt_c_api_cpu_plugin.so");
    if file.exists() { Ok(file) } else { Err(format!("{} is missing", setup::short(root, &file))) }
}
