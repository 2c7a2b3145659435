//! `cargo xtask tidy`: the rules of the house as checks. It reads files only, so it is as quick as a test.
//!
//! `imports` holds who may use whom; `code` what Rust files may say; `text` what any file may say. Each finding names file and line.

mod code;
mod imports;
mod text;

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use crate::run;

pub(crate) const HELP: &str = "\
cargo xtask tidy

Checks the rules that the compiler does not:
  - crates use only the crates below them (docs/ARCHITECTURE.md), the cores use nothing that reaches outside
  - `unsafe` stands only in pw-pjrt, in the bindings of pw-linalg, under crates/testing, and in one shared-memory file of pw-net
  - the cores name no clock, socket, file, thread, process, environment or random source
  - every Rust file begins with a `//!` header; no todo!, unimplemented! or dbg! is left
  - files stay below 1200 lines (from 800 on there is a warning)
  - relative links in Markdown lead somewhere
  - no path of one machine and no host of a package registry is written down";

/// Something that breaks a rule.
#[derive(Debug, PartialEq)]
struct Finding {
    file: PathBuf,
    line: usize,
    message: String,
    /// Worth a look, but not a failure.
    warning: bool,
}

impl Finding {
    fn error(file: &Path, line: usize, message: impl Into<String>) -> Self {
        Self { file: file.to_path_buf(), line, message: message.into(), warning: false }
    }

    fn warning(file: &Path, line: usize, message: impl Into<String>) -> Self {
        Self { warning: true, ..Self::error(file, line, message) }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.warning { "warning" } else { "error" };
        write!(f, "{kind}: {}:{}: {}", self.file.display(), self.line, self.message)
    }
}

pub(crate) fn task(root: &Path, args: &[String]) -> Result<(), String> {
    if let Some(arg) = args.first() {
        return Err(format!("tidy takes no argument, got '{arg}'"));
    }
    let (files, findings) = check(root)?;
    for finding in &findings {
        println!("{finding}");
    }
    let errors = findings.iter().filter(|f| !f.warning).count();
    run::say(&format!("tidy: {files} files, {errors} errors, {} warnings", findings.len() - errors));
    if errors == 0 { Ok(()) } else { Err(format!("{errors} rules are broken")) }
}

/// All findings of a checkout, and how many files were read.
fn check(root: &Path) -> Result<(usize, Vec<Finding>), String> {
    let mut paths = Vec::new();
    walk(root, Path::new(""), &mut paths)?;
    paths.sort();
    let mut findings = Vec::new();
    let mut read = 0;
    for path in &paths {
        let Ok(content) = fs::read_to_string(root.join(path)) else { continue };
        read += 1;
        let extension = path.extension().and_then(|e| e.to_str()).unwrap_or("");
        if extension == "rs" {
            findings.extend(code::check(path, &content));
        }
        if extension == "md" {
            findings.extend(text::check_links(root, path, &content));
        }
        if path.ends_with("Cargo.toml") {
            findings.extend(imports::check(path, &content));
        }
        findings.extend(text::check_length(path, &content));
        findings.extend(text::check_places(root, path, &content));
    }
    Ok((read, findings))
}

/// Every file of the checkout but what git ignores: builds, environments, caches.
fn walk(root: &Path, folder: &Path, paths: &mut Vec<PathBuf>) -> Result<(), String> {
    let entries = fs::read_dir(root.join(folder)).map_err(|e| format!("{}: {e}", root.join(folder).display()))?;
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let ignored = name == "target" || name == ".git" || name == "__pycache__" || name == ".pytest_cache" || name.starts_with(".venv");
        let Ok(kind) = entry.file_type() else { continue };
        if ignored || name.ends_with(".egg-info") {
            continue;
        }
        let path = folder.join(&name);
        if kind.is_dir() {
            walk(root, &path, paths)?;
        } else if kind.is_file() {
            paths.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The house itself is in order: so `cargo test` holds it too.
    #[test]
    fn this_checkout_is_tidy() {
        let (files, findings) = check(&crate::root()).unwrap();
        assert!(files > 20, "{files} files");
        let errors: Vec<String> = findings.iter().filter(|f| !f.warning).map(Finding::to_string).collect();
        assert!(errors.is_empty(), "\n{}", errors.join("\n"));
    }
}
