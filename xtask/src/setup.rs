//! `cargo xtask setup`: the release binary and the virtual environments, from pinned wheels, in ignored folders only.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::run;

pub(crate) const HELP: &str = "\
cargo xtask setup

Builds `target/release/pathways` and makes `.venv` with JAX, what the demo and the tests need, an XLA CPU plugin for the
workers, and our Python package. Every wheel is pinned by hash in python/requirements-*.txt: Python 3.11 takes jax 0.10.2,
newer ones the newest. If an interpreter of the other kind is found too, a second environment (`.venv-new` or `.venv-old`)
lets the tests run several JAX versions against one server; without one those tests are reported as not run.

What is there already and was made from the same files is left alone, so a second run takes a moment.
PATHWAYS_PYTHON names the interpreter for .venv (default: python3, else the newest python3.N that runs).";

/// What a set-up checkout has.
pub(crate) struct Ready {
    /// The interpreter of the main virtual environment.
    pub(crate) python: PathBuf,
    /// The interpreter with the other JAX version, where one could be made.
    pub(crate) other_python: Option<PathBuf>,
    /// The binary.
    pub(crate) pathways: PathBuf,
}

pub(crate) fn task(root: &Path, args: &[String]) -> Result<(), String> {
    if let Some(arg) = args.first() {
        return Err(format!("setup takes no argument, got '{arg}'"));
    }
    let ready = ensure(root)?;
    run::say(&format!("ready: {} and {}", short(root, &ready.pathways), short(root, &ready.python)));
    Ok(())
}

/// Makes whatever is missing or stale. The binary and the environments are made side by side.
pub(crate) fn ensure(root: &Path) -> Result<Ready, String> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return Err("this needs Linux on x86-64: the pinned wheels exist for nothing else yet".to_owned());
    }
    let main = main_interpreter()?;
    let other = other_interpreter(&main);
    let main_env = Environment { root, dir: ".venv", interpreter: main };
    let other_env = other.map(|interpreter| Environment {
        root,
        dir: if interpreter.minor >= FIRST_NEW_MINOR { ".venv-new" } else { ".venv-old" },
        interpreter,
    });
    let (built, made) = std::thread::scope(|scope| {
        let made = scope.spawn(|| {
            main_env.ensure()?;
            other_env.as_ref().map_or(Ok(()), Environment::ensure)
        });
        let built = build(root);
        (built, made.join().unwrap_or_else(|_| Err("the set-up of the virtual environment panicked".to_owned())))
    });
    built.and(made)?;
    if other_env.is_none() {
        let (want, is) = if main_env.interpreter.minor >= FIRST_NEW_MINOR { ("3.11", "newest") } else { ("3.12 or newer", "0.10.2") };
        run::say(&format!("no Python {want} was found beside this one: only jax {is} is tested here"));
    }
    Ok(Ready {
        python: main_env.python(),
        other_python: other_env.as_ref().map(Environment::python),
        pathways: root.join("target/release/pathways"),
    })
}

fn build(root: &Path) -> Result<(), String> {
    run::quiet(
        root,
        "build",
        "building the binary (release)",
        cargo(root).args(["build", "--release", "--package", "pw-cli", "--package", "pw-sleep", "--package", "pw-null"]),
    )
}

/// Cargo for this checkout. Builds go to its own target folder whatever the user has set: the tasks look for the binary there.
pub(crate) fn cargo(root: &Path) -> Command {
    let mut command = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned()));
    command.current_dir(root).env("CARGO_TARGET_DIR", root.join("target"));
    command
}

/// `path` as a person in the checkout would write it.
pub(crate) fn short(root: &Path, path: &Path) -> String {
    path.strip_prefix(root).unwrap_or(path).display().to_string()
}

const FIRST_MINOR: u32 = 11;
const FIRST_NEW_MINOR: u32 = 12;
const LAST_MINOR: u32 = 14;

#[derive(Clone)]
struct Interpreter {
    program: PathBuf,
    version: String,
    minor: u32,
}

impl Interpreter {
    /// Runs it: a name on the path can be a stub that only prints an error.
    fn probe(program: PathBuf) -> Option<Self> {
        let script = "import sys; print('%d.%d.%d' % sys.version_info[:3])";
        let version = run::output(Command::new(&program).args(["-c", script]))?;
        let minor = version.strip_prefix("3.")?.split('.').next()?.parse().ok()?;
        Some(Self { program, version, minor })
    }
}

fn main_interpreter() -> Result<Interpreter, String> {
    if let Ok(named) = std::env::var("PATHWAYS_PYTHON") {
        let found = Interpreter::probe(PathBuf::from(&named)).ok_or(format!("PATHWAYS_PYTHON={named} does not run as Python 3"))?;
        return in_range(found).map_err(|v| format!("PATHWAYS_PYTHON is {v}; it must be 3.{FIRST_MINOR} to 3.{LAST_MINOR}"));
    }
    if let Some(Ok(found)) = Interpreter::probe(PathBuf::from("python3")).map(in_range) {
        return Ok(found);
    }
    (FIRST_MINOR..=LAST_MINOR).rev().find_map(find_minor).ok_or(format!(
        "no Python 3.{FIRST_MINOR} to 3.{LAST_MINOR} was found (looked for python3 and python3.N). \
         Install one with its venv module, or name it in PATHWAYS_PYTHON"
    ))
}

fn in_range(found: Interpreter) -> Result<Interpreter, String> {
    if (FIRST_MINOR..=LAST_MINOR).contains(&found.minor) { Ok(found) } else { Err(found.version) }
}

fn other_interpreter(main: &Interpreter) -> Option<Interpreter> {
    if main.minor >= FIRST_NEW_MINOR { find_minor(11) } else { (FIRST_NEW_MINOR..=LAST_MINOR).rev().find_map(find_minor) }
}

/// `python3.N` on the path, else among the versions that pyenv keeps (its stubs on the path run only the chosen ones).
fn find_minor(minor: u32) -> Option<Interpreter> {
    let name = format!("python3.{minor}");
    let pyenv = std::env::var("PYENV_ROOT").or_else(|_| std::env::var("HOME").map(|h| format!("{h}/.pyenv"))).ok();
    let kept = pyenv.and_then(|p| fs::read_dir(format!("{p}/versions")).ok());
    let mut kept: Vec<PathBuf> = kept.into_iter().flatten().flatten().map(|v| v.path().join("bin").join(&name)).collect();
    kept.sort();
    std::iter::once(PathBuf::from(name)).chain(kept).find_map(Interpreter::probe).filter(|i| i.minor == minor)
}

struct Environment<'a> {
    root: &'a Path,
    dir: &'static str,
    interpreter: Interpreter,
}

impl Environment<'_> {
    fn python(&self) -> PathBuf {
        self.root.join(self.dir).join("bin/python")
    }

    fn ensure(&self) -> Result<(), String> {
        let wheels = self.stamp(&[self.requirements(), "requirements-plugin.txt"])?;
        if !self.stamped("wheels", &wheels) {
            self.make()?;
            self.write_stamp("wheels", &wheels)?;
        }
        let package = self.stamp(&["pyproject.toml"])?;
        if !self.stamped("package", &package) {
            self.pip("our package", &["--no-deps", "--no-build-isolation", "--editable", "python"])?;
            self.write_stamp("package", &package)?;
        }
        Ok(())
    }

    /// From nothing, so that no package of an older pin file stays behind.
    fn make(&self) -> Result<(), String> {
        let dir = self.root.join(self.dir);
        if dir.exists() {
            fs::remove_dir_all(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
        }
        let what = format!("making {} with Python {}", self.dir, self.interpreter.version);
        let log = format!("{}-make", self.dir.trim_start_matches('.'));
        let mut venv = Command::new(&self.interpreter.program);
        run::quiet(self.root, &log, &what, venv.args(["-m", "venv"]).arg(&dir))
            .map_err(|e| format!("{e}\n(Debian and Ubuntu keep venv in a package of its own, python3-venv)"))?;
        let requirements = format!("python/{}", self.requirements());
        self.pip("JAX and the test tools", &["--require-hashes", "--only-binary=:all:", "-r", &requirements])?;
        let plugin = ["--require-hashes", "--no-deps", "--only-binary=:all:", "-r", "python/requirements-plugin.txt"];
        self.pip("the XLA CPU plugin", &plugin)
    }

    fn pip(&self, what: &str, args: &[&str]) -> Result<(), String> {
        let log = format!("{}-{}", self.dir.trim_start_matches('.'), what.rsplit(' ').next().unwrap_or(what));
        let mut pip = Command::new(self.python());
        pip.current_dir(self.root).args(["-m", "pip", "install", "--disable-pip-version-check", "--no-input"]).args(args);
        run::quiet(self.root, &log, &format!("{}: installing {what}", self.dir), &mut pip)
    }

    fn requirements(&self) -> &'static str {
        if self.interpreter.minor >= FIRST_NEW_MINOR { "requirements-py312.txt" } else { "requirements-py311.txt" }
    }

    /// What an environment was made from: the interpreter, its place, and the files in full.
    fn stamp(&self, files: &[&str]) -> Result<String, String> {
        let mut stamp = format!("{} {}\n", self.interpreter.version, self.root.join(self.dir).display());
        for file in files {
            let path = self.root.join("python").join(file);
            stamp += &fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        }
        Ok(stamp)
    }

    fn stamp_path(&self, name: &str) -> PathBuf {
        self.root.join(self.dir).join(format!("xtask-{name}.stamp"))
    }

    fn stamped(&self, name: &str, stamp: &str) -> bool {
        self.python().exists() && fs::read_to_string(self.stamp_path(name)).is_ok_and(|have| have == stamp)
    }

    fn write_stamp(&self, name: &str, stamp: &str) -> Result<(), String> {
        let path = self.stamp_path(name);
        fs::write(&path, stamp).map_err(|e| format!("{}: {e}", path.display()))
    }
}
