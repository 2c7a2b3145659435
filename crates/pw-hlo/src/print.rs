//! The text of an optimized module, as XLA writes it.
//!
//! What this does not know of an instruction is left out of its line; opcode, name, shape, operands and called computations are always there.

mod attributes;
mod literal;
mod shape;
mod sharding;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use crate::error::Result;
use crate::message::Message;
use crate::module::{Computation, Instruction, Module};

#[cfg(test)]
mod tests;

/// Field numbers of `HloModuleProto`.
mod module {
    pub(super) const NAME: u32 = 1;
    pub(super) const ENTRY: u32 = 6;
    pub(super) const PROGRAM_SHAPE: u32 = 4;
    pub(super) const SCHEDULE: u32 = 7;
    pub(super) const ALIASES: u32 = 8;
    pub(super) const DONORS: u32 = 18;
    pub(super) const STACK_FRAMES: u32 = 17;
    pub(super) const FRONTEND: u32 = 19;
}

/// Field numbers of `HloComputationProto`.
mod computation {
    pub(super) const NAME: u32 = 1;
    pub(super) const PROGRAM_SHAPE: u32 = 4;
    pub(super) const THREAD: u32 = 8;
}

/// The text of a serialized `HloModuleProto`.
pub fn print(raw: &[u8]) -> Result<String> {
    let read = Module::read(raw)?;
    let message = Message::read(raw)?;
    let names = Names::of(&read)?;
    let mut out = String::new();
    header(&message, &mut out)?;
    let entry = message.int(module::ENTRY)?;
    let apart = inside_others(&read);
    let mut done = false;
    for at in &read.computations {
        if done {
            out.push('\n');
        }
        done = true;
        let order = if apart.contains(&at.id) { None } else { read.schedule.get(&at.id) };
        print_computation(at, order, at.id == entry, &names, &mut out)?;
    }
    out.push('\n');
    Ok(out)
}

/// What instructions refer to by number.
struct Names<'a> {
    computations: BTreeMap<i64, &'a str>,
    instructions: BTreeMap<i64, &'a str>,
}

impl<'a> Names<'a> {
    fn of(read: &Module<'a>) -> Result<Names<'a>> {
        let mut names = Names { computations: BTreeMap::new(), instructions: BTreeMap::new() };
        for at in &read.computations {
            names.computations.insert(at.id, Message::read(at.raw)?.text(computation::NAME)?);
            names.instructions.extend(at.instructions.iter().map(|i| (i.id, i.name)));
        }
        Ok(names)
    }

    fn computation(&self, id: i64) -> String {
        format!("%{}", self.computations.get(&id).copied().unwrap_or("?"))
    }

    fn instruction(&self, id: i64) -> String {
        format!("%{}", self.instructions.get(&id).copied().unwrap_or("?"))
    }
}

/// Bodies of fusions have no schedule of their own.
fn inside_others(read: &Module<'_>) -> BTreeSet<i64> {
    let all = read.computations.iter().flat_map(|c| &c.instructions);
    all.filter(|i| i.opcode == "fusion").flat_map(|i| i.called.iter().copied()).collect()
}

fn header(message: &Message<'_>, out: &mut String) -> Result<()> {
    let _ = write!(out, "HloModule {}", message.text(module::NAME)?);
    if message.has(module::SCHEDULE) {
        out.push_str(", is_scheduled=true");
    }
    if let Some(aliases) = message.message(module::ALIASES)? {
        let entries = aliases.messages(1)?;
        if !entries.is_empty() {
            let entries = entries.iter().map(|entry| {
                let kind = if entry.int(4)? == 2 { "must-alias" } else { "may-alias" };
                Ok(format!("{}: ({}, {}, {kind})", braces(&entry.ints(1)?), entry.int(2)?, braces(&entry.ints(3)?)))
            });
            let _ = write!(out, ", input_output_alias={{ {} }}", entries.collect::<Result<Vec<_>>>()?.join(", "));
        }
    }
    if let Some(donors) = message.message(module::DONORS)? {
        let entries = donors.messages(1)?;
        if !entries.is_empty() {
            let entries = entries.iter().map(|entry| Ok(format!("({}, {})", entry.int(1)?, braces(&entry.ints(2)?))));
            let _ = write!(out, ", buffer_donor={{ {} }}", entries.collect::<Result<Vec<_>>>()?.join(", "));
        }
    }
    if let Some(program) = message.message(module::PROGRAM_SHAPE)? {
        let parameters = program.messages(1)?.iter().map(|p| shape::text(p, true)).collect::<Result<Vec<_>>>()?;
        let result = program.message(2)?.map_or(Ok("()".to_owned()), |r| shape::text(&r, true))?;
        let _ = write!(out, ", entry_computation_layout={{({})->{result}}}", shape::listed(&parameters, ", "));
    }
    if let Some(frontend) = message.message(module::FRONTEND)? {
        let text = attributes::frontend(&frontend)?;
        if !text.is_empty() {
            let _ = write!(out, ", {text}");
        }
    }
    out.push_str("\n\n");
    if let Some(frames) = message.message(module::STACK_FRAMES)? {
        print_frames(&frames, out)?;
    }
    Ok(())
}

/// Where the instructions come from: files, functions, places in them, and stacks of these.
fn print_frames(frames: &Message<'_>, out: &mut String) -> Result<()> {
    let (files, functions) = (frames.texts(1)?, frames.texts(2)?);
    let (places, stacks) = (frames.messages(3)?, frames.messages(4)?);
    if files.is_empty() && places.is_empty() && stacks.is_empty() {
        return Ok(());
    }
    for (title, texts) in [("FileNames", files), ("FunctionNames", functions)] {
        let _ = writeln!(out, "{title}");
        for (at, text) in texts.iter().enumerate() {
            let _ = writeln!(out, "{} \"{}\"", at + 1, escaped(text.as_bytes()));
        }
        out.push('\n');
    }
    out.push_str("FileLocations\n");
    for (at, place) in places.iter().enumerate() {
        let int = |number| place.int(number);
        let _ = writeln!(
            out,
            "{} {{file_name_id={} function_name_id={} line={} end_line={} column={} end_column={}}}",
            at + 1,
            int(1)?,
            int(2)?,
            int(3)?,
            int(5)?,
            int(4)?,
            int(6)?
        );
    }
    out.push_str("\nStackFrames\n");
    // XLA writes the parent with 1 added, so that a frame without one names itself or another.
    for (at, frame) in stacks.iter().enumerate() {
        let _ = writeln!(out, "{} {{file_location_id={} parent_frame_id={}}}", at + 1, frame.int(1)?, frame.int(2)? + 1);
    }
    out.push_str("\n\n");
    Ok(())
}

fn print_computation(at: &Computation<'_>, order: Option<&Vec<i64>>, entry: bool, names: &Names<'_>, out: &mut String) -> Result<()> {
    let message = Message::read(at.raw)?;
    if entry {
        out.push_str("ENTRY ");
    }
    let _ = write!(out, "%{} ", message.text(computation::NAME)?);
    if let Some(program) = message.message(computation::PROGRAM_SHAPE)? {
        let parameters = program.messages(1)?.iter().map(|p| shape::text(p, false)).collect::<Result<Vec<_>>>()?;
        let named: Vec<String> =
            program.texts(3)?.iter().zip(&parameters).map(|(name, parameter)| format!("{name}: {parameter}")).collect();
        let result = program.message(2)?.map_or(Ok("()".to_owned()), |r| shape::text(&r, false))?;
        let _ = write!(out, "({}) -> {result} ", named.join(", "));
    }
    out.push_str("{\n");
    match order {
        Some(order) => order.iter().try_for_each(|&id| print_instruction(at.get(id)?, id == at.root, names, out))?,
        None => at.instructions.iter().try_for_each(|i| print_instruction(i, i.id == at.root, names, out))?,
    }
    out.push('}');
    let thread = message.text(computation::THREAD)?;
    if !thread.is_empty() && thread != "main" {
        let _ = write!(out, ", execution_thread=\"{thread}\"");
    }
    out.push('\n');
    Ok(())
}

fn print_instruction(at: &Instruction<'_>, root: bool, names: &Names<'_>, out: &mut String) -> Result<()> {
    let message = Message::read(at.raw)?;
    let shape = message.message(crate::module::field::SHAPE)?.map_or(Ok("()".to_owned()), |s| shape::text(&s, true))?;
    let operands = match at.opcode {
        "parameter" => message.int(crate::module::field::PARAMETER)?.to_string(),
        "constant" => message.message(attributes::LITERAL)?.map_or(Ok("{...}".to_owned()), |l| literal::text(&l))?,
        _ => shape::listed(&at.operands.iter().map(|&id| names.instruction(id)).collect::<Vec<_>>(), ", "),
    };
    let _ = write!(out, "  {}%{} = {shape} {}({operands})", if root { "ROOT " } else { "" }, at.name, at.opcode);
    for attribute in attributes::of(at, &message, names)? {
        let _ = write!(out, ", {attribute}");
    }
    out.push('\n');
    Ok(())
}

fn joined(numbers: &[i64], between: &str) -> String {
    numbers.iter().map(i64::to_string).collect::<Vec<_>>().join(between)
}

/// `{1,0}`.
fn braces(numbers: &[i64]) -> String {
    format!("{{{}}}", joined(numbers, ","))
}

/// A text between quotes, with what cannot stand there escaped.
fn escaped(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len());
    for &byte in bytes {
        match byte {
            b'\n' => out.push_str("\\n"),
            b'\r' => out.push_str("\\r"),
            b'\t' => out.push_str("\\t"),
            b'"' => out.push_str("\\\""),
            b'\'' => out.push_str("\\'"),
            b'\\' => out.push_str("\\\\"),
            0x20..0x7f => out.push(byte as char),
            _ => drop(write!(out, "\\{byte:03o}")),
        }
    }
    out
}
