//! What any file may say: its length, the links of Markdown, and no place that exists on one machine only.

use std::path::Path;

use super::Finding;

const LINES_WARN: usize = 800;
const LINES_MAX: usize = 1200;

/// Files that people write; pins and lock files are as long as they are.
const WRITTEN: &[&str] = &["rs", "py", "proto", "md", "ts", "sh"];

pub(super) fn check_length(path: &Path, content: &str) -> Option<Finding> {
    let extension = path.extension().and_then(|e| e.to_str()).unwrap_or("");
    if !WRITTEN.contains(&extension) {
        return None;
    }
    let lines = content.lines().count();
    let text = format!("{lines} lines; a file has at most {LINES_MAX}, better {LINES_WARN}");
    match lines {
        n if n > LINES_MAX => Some(Finding::error(path, n, text)),
        n if n > LINES_WARN => Some(Finding::warning(path, n, text)),
        _ => None,
    }
}

pub(super) fn check_links(root: &Path, path: &Path, content: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut in_block = false;
    for (index, line) in content.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            in_block = !in_block;
        }
        if in_block {
            continue;
        }
        for link in links(line) {
            let target = link.split('#').next().unwrap_or("");
            if target.is_empty() || target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let folder = path.parent().unwrap_or(Path::new(""));
            if !root.join(folder).join(target).exists() {
                findings.push(Finding::error(path, index + 1, format!("the link to '{target}' leads nowhere")));
            }
        }
    }
    findings
}

/// The targets of `[text](target)` outside of code spans.
fn links(line: &str) -> Vec<&str> {
    let mut found = Vec::new();
    for (index, plain) in line.split('`').enumerate() {
        if index % 2 == 0 {
            found.extend(plain.split("](").skip(1).filter_map(|rest| rest.split([')', ' ']).next()));
        }
    }
    // A link whose text is code has its target behind the code span.
    found.extend(line.split("`](").skip(1).filter_map(|rest| rest.split([')', ' ']).next()));
    found.sort_unstable();
    found.dedup();
    found
}

/// Written in pieces, so that this file does not break its own rule.
const PLACES: &[&[&str]] = &[
    &["/wo", "rk/"],
    &["/ro", "ot/"],
    &["/ho", "me/"],
    &["/Us", "ers/"],
    &["crates", ".io"],
    &["pypi", ".org"],
    &["pythonhosted", ".org"],
    &["registry.npmjs", ".org"],
    &["deb.debian", ".org"],
];

pub(super) fn check_places(root: &Path, path: &Path, content: &str) -> Vec<Finding> {
    // The lock file names its registry in every entry: that is Cargo's own format.
    if path.ends_with("Cargo.lock") {
        return Vec::new();
    }
    let mut places: Vec<String> = PLACES.iter().map(|p| p.concat()).collect();
    if root.is_absolute() && root.components().count() > 2 {
        places.push(root.display().to_string());
    }
    let mut findings = Vec::new();
    for (index, line) in content.lines().enumerate() {
        if let Some(place) = places.iter().find(|p| line.contains(p.as_str())) {
            findings.push(Finding::error(path, index + 1, format!("'{place}' is a place outside the project")));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_files_are_found() {
        let file = Path::new("a.rs");
        assert_eq!(check_length(file, &"x\n".repeat(800)), None);
        assert!(check_length(file, &"x\n".repeat(801)).unwrap().warning);
        assert!(!check_length(file, &"x\n".repeat(1201)).unwrap().warning);
        assert_eq!(check_length(Path::new("Cargo.lock"), &"x\n".repeat(5000)), None);
    }

    #[test]
    fn a_link_must_lead_somewhere() {
        let root = crate::root();
        let text = "[a](Cargo.toml) [b](xtask/src/main.rs#top) [c](https://x.invalid/) [`d`](nowhere.md) `[e](not/a/link.md)`\n\
                    ```\n[f](in/a/block.md)\n```\n[g](#here) [h](gone/h.md)\n";
        let found: Vec<String> =
            check_links(&root, Path::new("x.md"), text).into_iter().map(|f| format!("{} {}", f.line, f.message)).collect();
        assert_eq!(found, ["1 the link to 'nowhere.md' leads nowhere", "5 the link to 'gone/h.md' leads nowhere"]);
    }

    #[test]
    fn a_place_of_one_machine_is_found() {
        let root = Path::new("/somewhere/checkout");
        let planted = ["see /wo", "rk/main\n", "fine: worker/x, home\n", "pip from pypi", ".org\n", "/somewhere/checkout/a\n"].concat();
        let lines: Vec<usize> = check_places(root, Path::new("a.md"), &planted).iter().map(|f| f.line).collect();
        assert_eq!(lines, [1, 3, 4]);
        assert!(check_places(root, Path::new("Cargo.lock"), &planted).is_empty());
    }
}
