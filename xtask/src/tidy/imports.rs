//! Who may use whom, read from the crates' Cargo.toml files. Development dependencies are free: tests may look anywhere.

use std::path::Path;

use super::Finding;

/// For every crate, the crates directly below it; what is below those may be used too.
const BELOW: &[(&str, &[&str])] = &[
    ("pw-types", &[]),
    ("pw-pjrt", &[]),
    ("pw-hlo", &[]),
    ("pw-linalg", &["pw-pjrt"]),
    ("pw-plan", &["pw-types"]),
    ("pw-core", &["pw-plan"]),
    ("pw-exec", &["pw-plan"]),
    ("pw-proto", &["pw-types"]),
    ("pw-sim", &["pw-core", "pw-exec", "pw-proto"]),
    ("pw-net", &["pw-proto"]),
    ("pw-edge", &["pw-net"]),
    ("pw-controller", &["pw-net", "pw-core"]),
    ("pw-worker", &["pw-net", "pw-exec", "pw-plan", "pw-pjrt", "pw-linalg", "pw-hlo"]),
    ("pw-cli", &["pw-controller", "pw-edge", "pw-worker", "pw-sim"]),
    ("xtask", &[]),
];

/// The crates that never reach outside: no runtime, no operating system, no random source.
pub(super) const PURE: &[&str] = &["pw-types", "pw-plan", "pw-core", "pw-exec"];

const REACHING_OUT: &[&str] =
    &["tokio", "tokio-util", "tokio-stream", "tonic", "mio", "socket2", "libc", "nix", "rand", "getrandom", "fastrand", "tempfile"];

pub(super) fn check(path: &Path, manifest: &str) -> Vec<Finding> {
    let Some(name) = package_name(manifest) else { return Vec::new() };
    let testing = path.starts_with("crates/testing");
    let allowed = match BELOW.iter().find(|(n, _)| *n == name) {
        Some((_, direct)) => closure(direct),
        // The test-only shared libraries stand beside the house: they may use the plugin layer's types only.
        None if testing => vec!["pw-pjrt"],
        None => {
            return vec![Finding::error(path, 1, format!("the crate '{name}' has no place in the table of tidy/imports.rs"))];
        }
    };
    let mut findings = Vec::new();
    for (line, dependency) in dependencies(manifest) {
        if dependency.starts_with("pw-") && !allowed.contains(&dependency) {
            let may = if allowed.is_empty() { "none of ours".to_owned() } else { allowed.join(", ") };
            findings.push(Finding::error(path, line, format!("{name} must not use {dependency}; it may use {may}")));
        }
        if PURE.contains(&name) && REACHING_OUT.contains(&dependency) {
            findings.push(Finding::error(path, line, format!("{name} is pure and must not use {dependency}")));
        }
    }
    findings
}

fn closure(direct: &[&'static str]) -> Vec<&'static str> {
    let mut all: Vec<&'static str> = direct.to_vec();
    let mut next = 0;
    while next < all.len() {
        let below = BELOW.iter().find(|(n, _)| *n == all[next]).map_or(&[][..], |(_, b)| b);
        all.extend(below.iter().filter(|b| !all.contains(b)).copied().collect::<Vec<_>>());
        next += 1;
    }
    all
}

fn package_name(manifest: &str) -> Option<&str> {
    let (_, package) = manifest.split_once("[package]")?;
    let line = package.lines().find(|l| l.split('=').next().is_some_and(|k| k.trim() == "name"))?;
    Some(line.split('=').nth(1)?.trim().trim_matches('"'))
}

/// Names in `[dependencies]`, `[build-dependencies]` and their per-target forms, with their lines.
fn dependencies(manifest: &str) -> Vec<(usize, &str)> {
    let mut inside = false;
    let mut found = Vec::new();
    for (index, line) in manifest.lines().enumerate() {
        let line = line.trim();
        if let Some(section) = line.strip_prefix('[') {
            let section = section.trim_end_matches(']');
            inside = section.ends_with("dependencies") && !section.ends_with("dev-dependencies") && !section.starts_with("workspace");
            // The long form, [dependencies.NAME].
            let long = section.rsplit_once("dependencies.");
            found.extend(long.filter(|(t, _)| !t.ends_with("dev-") && !t.starts_with("workspace")).map(|(_, name)| (index + 1, name)));
        } else if inside && !line.starts_with('#') && line.contains('=') {
            let key = line.split('=').next().unwrap_or("").trim().trim_matches('"');
            found.push((index + 1, key.split('.').next().unwrap_or(key)));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(path: &str, manifest: &str) -> Vec<String> {
        check(Path::new(path), manifest).into_iter().map(|f| format!("{}: {}", f.line, f.message)).collect()
    }

    #[test]
    fn a_crate_may_use_all_that_is_below_it() {
        let manifest =
            "[package]\nname = \"pw-cli\"\n[dependencies]\npw-core.workspace = true\npw-types = { path = \"x\" }\nanyhow = \"1\"\n";
        assert_eq!(messages("crates/pw-cli/Cargo.toml", manifest), [""; 0]);
    }

    #[test]
    fn an_import_upwards_or_sideways_is_found() {
        let manifest = "[package]\nname = \"pw-edge\"\n\n[dependencies]\npw-net.workspace = true\npw-core.workspace = true\n";
        assert_eq!(
            messages("crates/pw-edge/Cargo.toml", manifest),
            ["6: pw-edge must not use pw-core; it may use pw-net, pw-proto, pw-types"]
        );
        let manifest = "[package]\nname = \"pw-types\"\n[target.'cfg(unix)'.dependencies.pw-plan]\npath = \"x\"\n";
        assert_eq!(messages("crates/pw-types/Cargo.toml", manifest), ["3: pw-types must not use pw-plan; it may use none of ours"]);
    }

    #[test]
    fn a_pure_crate_must_not_reach_out() {
        let manifest = "[package]\nname = \"pw-core\"\n[dependencies]\ntokio = \"1\"\n[dev-dependencies]\nrand = \"1\"\n";
        assert_eq!(messages("crates/pw-core/Cargo.toml", manifest), ["4: pw-core is pure and must not use tokio"]);
    }

    #[test]
    fn tests_may_look_anywhere_but_a_new_crate_needs_a_place() {
        let manifest = "[package]\nname = \"pw-edge\"\n[dev-dependencies]\npw-core = \"1\"\n[dev-dependencies.pw-sim]\npath = \"x\"\n";
        assert_eq!(messages("crates/pw-edge/Cargo.toml", manifest), [""; 0]);
        assert_eq!(messages("crates/pw-new/Cargo.toml", "[package]\nname = \"pw-new\"\n").len(), 1);
        assert_eq!(messages("crates/testing/pw-fake/Cargo.toml", "[package]\nname = \"pw-fake\"\n"), [""; 0]);
    }

    #[test]
    fn the_workspace_table_is_no_import() {
        assert_eq!(messages("Cargo.toml", "[workspace.dependencies]\npw-core = { path = \"crates/pw-core\" }\n"), [""; 0]);
    }
}
