//! Compares our `proto/ifrt` with the descriptors that the installed jaxlib carries: numbers, types, labels, oneofs.
//!
//! `cargo xtask setup` installs one under `.venv`. Without it there is nothing to compare with: the test says so and passes,
//! or fails if `PATHWAYS_REQUIRE_JAXLIB` is set.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use prost::Message;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorProto};

/// Packages of the client in which a message of ours is looked for, in this order.
const PACKAGES: [&str; 5] = ["xla.ifrt.proxy", "xla.ifrt", "xla.ifrt.proto", "tensorflow", "xla"];

/// Messages that have another name here, since all of ours share a package.
const RENAMED: [(&str, &str); 2] = [("XlaLayoutProto", "xla.LayoutProto"), ("XlaTileProto", "xla.TileProto")];

/// Enum values of newer jaxlibs than the pinned one.
const NEWER: [&str; 2] = ["KIND_F6E2M3FN", "KIND_F6E3M2FN"];

#[test]
fn proto_matches_jaxlib() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let Some(library) = jaxlib(&root.join(".venv")) else {
        assert!(std::env::var_os("PATHWAYS_REQUIRE_JAXLIB").is_none(), "no jaxlib under .venv; run `cargo xtask setup`");
        eprintln!("proto_matches_jaxlib: not compared, there is no jaxlib under .venv (`cargo xtask setup` makes it)");
        return;
    };
    let data = std::fs::read(&library).expect("the library can be read");
    let theirs = Index::new(&embedded(&data));
    let folder = root.join("proto");
    let files = ["ifrt/value.proto", "ifrt/grpc.proto", "ifrt/session.proto"].map(|file| folder.join(file));
    let ours = protox::compile(files, [&folder]).expect("our schema compiles").file;

    let mut problems = Vec::new();
    let mut compared = 0;
    for file in &ours {
        for message in &file.message_type {
            compared += compare(message, message.name(), &theirs, &mut problems);
        }
    }
    every_request_is_known(&ours, &theirs, &mut problems);
    assert!(problems.is_empty(), "differences to {}:\n{}", library.display(), problems.join("\n"));
    assert!(compared > 300, "only {compared} fields were compared");
}

fn jaxlib(venv: &Path) -> Option<PathBuf> {
    let versions = std::fs::read_dir(venv.join("lib")).ok()?;
    let candidates = versions.filter_map(|entry| Some(entry.ok()?.path().join("site-packages/jaxlib/libjax_common.so")));
    candidates.into_iter().find(|path| path.is_file())
}

/// All messages and enums of the client, by full name.
struct Index {
    messages: BTreeMap<String, DescriptorProto>,
    enums: BTreeMap<String, EnumDescriptorProto>,
}

impl Index {
    fn new(files: &[FileDescriptorProto]) -> Index {
        let mut index = Index { messages: BTreeMap::new(), enums: BTreeMap::new() };
        for file in files {
            for message in &file.message_type {
                index.add(format!("{}.{}", file.package(), message.name()), message);
            }
            for found in &file.enum_type {
                index.enums.insert(format!("{}.{}", file.package(), found.name()), found.clone());
            }
        }
        index
    }

    fn add(&mut self, name: String, message: &DescriptorProto) {
        for nested in &message.nested_type {
            self.add(format!("{name}.{}", nested.name()), nested);
        }
        for found in &message.enum_type {
            self.enums.insert(format!("{name}.{}", found.name()), found.clone());
        }
        self.messages.insert(name, message.clone());
    }

    /// The client's name for a message or enum of ours, `path` without its package.
    fn name(&self, path: &str) -> Option<String> {
        if let Some((_, name)) = RENAMED.iter().find(|(ours, _)| *ours == path) {
            return Some((*name).to_owned());
        }
        let mut names = PACKAGES.iter().map(|package| format!("{package}.{path}"));
        names.find(|name| self.messages.contains_key(name) || self.enums.contains_key(name))
    }
}

/// Number of fields compared.
fn compare(ours: &DescriptorProto, path: &str, theirs: &Index, problems: &mut Vec<String>) -> usize {
    let Some(message) = theirs.name(path).and_then(|name| theirs.messages.get(&name)) else {
        problems.push(format!("{path}: the client has no such message"));
        return 0;
    };
    for field in &ours.field {
        let place = format!("{path}.{}", field.name());
        match message.field.iter().find(|other| other.number() == field.number()) {
            None => problems.push(format!("{place}: the client has no field {}", field.number())),
            Some(other) => compare_field(&place, (ours, field), (message, other), theirs, problems),
        }
    }
    for found in &ours.enum_type {
        let path = format!("{path}.{}", found.name());
        compare_enum(found, &path, theirs, problems);
    }
    let nested = ours.nested_type.iter().map(|nested| compare(nested, &format!("{path}.{}", nested.name()), theirs, problems));
    ours.field.len() + nested.sum::<usize>()
}

fn compare_field(
    place: &str,
    (ours_in, ours): (&DescriptorProto, &FieldDescriptorProto),
    (theirs_in, theirs): (&DescriptorProto, &FieldDescriptorProto),
    index: &Index,
    problems: &mut Vec<String>,
) {
    let embedded = ours.r#type() == Type::Bytes && theirs.r#type() == Type::Message;
    let number = ours.r#type() == Type::Int32 && theirs.r#type() == Type::Enum;
    if ours.r#type() != theirs.r#type() && !embedded && !number {
        problems.push(format!("{place}: {:?} here, {:?} there", ours.r#type(), theirs.r#type()));
    }
    if (ours.label() == Label::Repeated) != (theirs.label() == Label::Repeated) {
        problems.push(format!("{place}: one is repeated, the other is not"));
    }
    if !embedded && ours.proto3_optional() != theirs.proto3_optional() {
        problems.push(format!("{place}: only one has presence"));
    }
    if !embedded && ours.name() != theirs.name() {
        problems.push(format!("{place}: called {} there", theirs.name()));
    }
    if oneof(ours_in, ours) != oneof(theirs_in, theirs) {
        problems.push(format!("{place}: in different oneofs"));
    }
    if !ours.type_name().is_empty() {
        let path = ours.type_name().trim_start_matches(".xla.ifrt.proxy.");
        let expected = index.name(path);
        if expected.as_deref() != Some(theirs.type_name().trim_start_matches('.')) {
            problems.push(format!("{place}: of type {expected:?} here, {} there", theirs.type_name()));
        }
    }
}

fn oneof<'a>(message: &'a DescriptorProto, field: &FieldDescriptorProto) -> Option<&'a str> {
    if field.proto3_optional() {
        return None;
    }
    Some(message.oneof_decl.get(usize::try_from(field.oneof_index?).ok()?)?.name())
}

fn compare_enum(ours: &EnumDescriptorProto, path: &str, theirs: &Index, problems: &mut Vec<String>) {
    let Some(found) = theirs.name(path).and_then(|name| theirs.enums.get(&name)) else {
        problems.push(format!("{path}: the client has no such enum"));
        return;
    };
    for value in &ours.value {
        match found.value.iter().find(|other| other.name() == value.name()) {
            Some(other) if other.number() == value.number() => {}
            None if NEWER.contains(&value.name()) => {}
            _ => problems.push(format!("{path}.{}: not {} there", value.name(), value.number())),
        }
    }
}

/// What we do not serve must still be refused by name.
fn every_request_is_known(ours: &[FileDescriptorProto], theirs: &Index, problems: &mut Vec<String>) {
    let ours = ours.iter().flat_map(|file| &file.message_type).find(|message| message.name() == "IfrtRequest");
    let (Some(ours), Some(theirs)) = (ours, theirs.messages.get("xla.ifrt.proxy.IfrtRequest")) else {
        problems.push("IfrtRequest is missing".to_owned());
        return;
    };
    for field in &theirs.field {
        if !ours.field.iter().any(|other| other.number() == field.number()) {
            problems.push(format!("IfrtRequest: request {} ({}) is not known here", field.number(), field.name()));
        }
    }
}

/// File descriptors lie in the library as they are: each begins with its name as field 1.
fn embedded(data: &[u8]) -> Vec<FileDescriptorProto> {
    const END: &[u8] = b".proto";
    let mut files: BTreeMap<String, FileDescriptorProto> = BTreeMap::new();
    let mut at = 0;
    while let Some(dot) = data[at..].iter().position(|&byte| byte == b'.') {
        let dot = at + dot;
        at = dot + 1;
        if !data[dot..].starts_with(END) {
            continue;
        }
        let end = dot + END.len();
        let start = (END.len()..128).find_map(|length| {
            let name = end.checked_sub(length).filter(|&name| name >= 2)?;
            (data[name - 1] == length as u8 && data[name - 2] == 0x0a).then_some(name - 2)
        });
        let Some(start) = start else { continue };
        let Ok(file) = FileDescriptorProto::decode(&data[start..end_of_file(data, start)]) else { continue };
        if !file.message_type.is_empty() || !file.enum_type.is_empty() {
            files.insert(file.name().to_owned(), file);
        }
    }
    files.into_values().collect()
}

/// Walks the fields while they are those of a file descriptor.
fn end_of_file(data: &[u8], start: usize) -> usize {
    let mut at = start;
    loop {
        let Some((tag, mut next)) = varint(data, at) else { return at };
        let (field, wire) = (tag >> 3, tag & 7);
        if !matches!(field, 1..=12 | 14) || (field == 1 && at != start) {
            return at;
        }
        match (wire, varint(data, next)) {
            (0, Some((_, after))) => next = after,
            (2, Some((length, after))) if length <= 2_000_000 && after + length as usize <= data.len() => next = after + length as usize,
            _ => return at,
        }
        at = next;
    }
}

fn varint(data: &[u8], mut at: usize) -> Option<(u64, usize)> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = *data.get(at)?;
        at += 1;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some((value, at));
        }
    }
    None
}
