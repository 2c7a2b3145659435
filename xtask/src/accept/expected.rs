//! The lists of explained differences, `tests/jax/expected/FILE.toml`: every entry names test ids and the cause that they share.

use std::collections::BTreeMap;

/// What a list says about one test id.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Entry {
    pub(crate) cause: String,
    /// The outcome that is expected on pathways; none = the test is not run there at all.
    pub(crate) ours: Option<String>,
    /// Text that the failure's message must contain, so that an entry explains one failure and not any.
    pub(crate) contains: String,
    /// The shapes it holds for; empty = all.
    pub(crate) shapes: Vec<String>,
}

/// All entries that hold for `shape`, by test id.
///
/// The format is the part of TOML that the lists need: tables `[[difference]]` and `[[excluded]]`, keys with one string, and
/// `ids` and `shapes` with lists of strings, one line each or one string per line.
pub(crate) fn parse(text: &str, shape: &str) -> Result<BTreeMap<String, Entry>, String> {
    let mut entries = BTreeMap::new();
    for (line, table, keys) in tables(text)? {
        let one = |key: &str| keys.get(key).and_then(|v| v.first()).cloned();
        let cause = one("cause").filter(|c| !c.trim().is_empty()).ok_or(format!("line {line}: an entry without a cause"))?;
        let ids = keys.get("ids").filter(|i| !i.is_empty()).ok_or(format!("line {line}: an entry without ids"))?;
        let ours = match table.as_str() {
            "difference" => Some(one("ours").ok_or(format!("line {line}: a difference needs ours = \"failed\" or another outcome"))?),
            "excluded" => None,
            other => return Err(format!("line {line}: the table is [[difference]] or [[excluded]], not [[{other}]]")),
        };
        let shapes = keys.get("shapes").cloned().unwrap_or_default();
        if !shapes.is_empty() && !shapes.iter().any(|s| s == shape) {
            continue;
        }
        let entry = Entry { cause, ours, contains: one("contains").unwrap_or_default(), shapes };
        for id in ids {
            if entries.insert(id.clone(), entry.clone()).is_some() {
                return Err(format!("line {line}: {id} is listed twice"));
            }
        }
    }
    Ok(entries)
}

type Keys = BTreeMap<String, Vec<String>>;

fn tables(text: &str) -> Result<Vec<(usize, String, Keys)>, String> {
    let mut tables: Vec<(usize, String, Keys)> = Vec::new();
    let mut open: Option<String> = None;
    for (index, line) in text.lines().enumerate() {
        let (number, line) = (index + 1, line.trim());
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(name) = line.strip_prefix("[[").and_then(|l| l.strip_suffix("]]")) {
            tables.push((number, name.to_owned(), Keys::new()));
            continue;
        }
        let (_, _, keys) = tables.last_mut().ok_or(format!("line {number}: a key before the first [[table]]"))?;
        let (key, value) = match &open {
            Some(key) => (key.clone(), line),
            None => {
                let (key, value) = line.split_once('=').ok_or(format!("line {number}: expected key = value"))?;
                (key.trim().to_owned(), value.trim())
            }
        };
        let begins_list = open.is_none() && value.starts_with('[');
        let ends_list = value.ends_with(']') && (begins_list || open.is_some());
        keys.entry(key.clone()).or_default().extend(strings(value).map_err(|e| format!("line {number}: {e}"))?);
        open = if (begins_list || open.is_some()) && !ends_list { Some(key) } else { None };
    }
    if open.is_some() { Err("a list is not closed".to_owned()) } else { Ok(tables) }
}

/// The quoted strings of one line; `\"` and `\\` are the only escapes.
fn strings(line: &str) -> Result<Vec<String>, String> {
    let mut found = Vec::new();
    let mut characters = line.chars();
    while let Some(c) = characters.next() {
        match c {
            '#' => break,
            '"' => found.push(string(&mut characters)?),
            '[' | ']' | ',' | ' ' => {}
            other => return Err(format!("'{other}' outside of a string")),
        }
    }
    Ok(found)
}

fn string(characters: &mut std::str::Chars<'_>) -> Result<String, String> {
    let mut text = String::new();
    while let Some(c) = characters.next() {
        match c {
            '"' => return Ok(text),
            '\\' => text.extend(characters.next()),
            c => text.push(c),
        }
    }
    Err("a string is not closed".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = r#"
        # why
        [[difference]]
        cause = "the client has no dlpack: \"PjRt only\""
        ours = "failed"
        contains = "PjRt-compatible"
        ids = [
            "A::a",
            "A::b",  # both
        ]

        [[excluded]]
        cause = "kills the client"
        shapes = ["1x8", "2x4"]
        ids = ["A::c"]
    "#;

    #[test]
    fn a_list_is_read() {
        let entries = parse(LIST, "1x8").unwrap();
        assert_eq!(entries.keys().collect::<Vec<_>>(), ["A::a", "A::b", "A::c"]);
        assert_eq!(entries["A::a"].cause, "the client has no dlpack: \"PjRt only\"");
        assert_eq!(entries["A::b"].ours.as_deref(), Some("failed"));
        assert_eq!(entries["A::b"].contains, "PjRt-compatible");
        assert_eq!(entries["A::c"].ours, None);
        assert_eq!(parse(LIST, "4x2").unwrap().len(), 2);
    }

    #[test]
    fn a_list_with_a_hole_is_refused() {
        let causeless = "[[difference]]\nours = \"failed\"\nids = [\"a\"]\n";
        assert_eq!(parse(causeless, "1x8"), Err("line 1: an entry without a cause".to_owned()));
        let twice = "[[excluded]]\ncause = \"x\"\nids = [\"a\"]\n[[excluded]]\ncause = \"y\"\nids = [\"a\"]\n";
        assert_eq!(parse(twice, "1x8"), Err("line 4: a is listed twice".to_owned()));
        assert!(parse("[[excluded]]\ncause = \"x\"\nids = [\n\"a\"\n", "1x8").is_err());
        assert!(parse("[[other]]\ncause = \"x\"\nids = [\"a\"]\n", "1x8").is_err());
        assert!(parse("[[excluded]]\ncause = x\nids = [\"a\"]\n", "1x8").is_err());
    }
}
