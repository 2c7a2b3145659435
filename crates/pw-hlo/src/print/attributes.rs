//! What stands behind the operands of an instruction.

use super::sharding::{groups, iota_groups, mesh_groups};
use super::{Names, braces, escaped, joined, shape, sharding};
use crate::error::Result;
use crate::message::Message;
use crate::module::{Instruction, field};

/// Field numbers of `HloInstructionProto`, beside those that the rewrite knows.
const METADATA: u32 = 7;
pub(super) const LITERAL: u32 = 8;
const FUSION_KIND: u32 = 11;
const TUPLE_INDEX: u32 = 13;
const WINDOW: u32 = 15;
const CONVOLUTION: u32 = 16;
const SLICES: u32 = 17;
const DYNAMIC_SLICE_SIZES: u32 = 20;
const PADDING: u32 = 21;
const DOT: u32 = 30;
const FFT_TYPE: u32 = 31;
const FFT_LENGTH: u32 = 32;
const GATHER: u32 = 33;
const GATHER_SIZES: u32 = 34;
const SHARDING: u32 = 40;
const SCATTER: u32 = 48;
const FEATURE_GROUPS: u32 = 50;
const PRECISION: u32 = 51;
const BATCH_GROUPS: u32 = 58;
const TRIANGULAR: u32 = 59;
const IS_STABLE: u32 = 60;
const CHOLESKY: u32 = 62;
const DIRECTION: u32 = 63;
const DELTA: u32 = 66;
const SORTED: u32 = 67;
const FRONTEND: u32 = 68;
const UNIQUE: u32 = 69;
const RNG_ALGORITHM: u32 = 70;
const COMPARISON_TYPE: u32 = 72;
const OUTPUT_ALIASING: u32 = 74;

/// The attributes of an instruction, in the order of the text.
pub(super) fn of(at: &Instruction<'_>, message: &Message<'_>, names: &Names<'_>) -> Result<Vec<String>> {
    let mut out = Vec::new();
    own(at, message, &mut out)?;
    called(at, names, &mut out);
    if let Some(placed) = message.message(SHARDING)? {
        out.push(format!("sharding={}", sharding::text(&placed)?));
    }
    if let Some(attributes) = message.message(FRONTEND)? {
        out.extend(Some(frontend(&attributes)?).filter(|text| !text.is_empty()));
    }
    if !at.control.is_empty() {
        let before: Vec<String> = at.control.iter().map(|&id| names.instruction(id)).collect();
        out.push(format!("control-predecessors={{{}}}", before.join(", ")));
    }
    if let Some(metadata) = message.message(METADATA)? {
        let text = metadata_text(&metadata)?;
        if !text.is_empty() {
            out.push(format!("metadata={{{text}}}"));
        }
    }
    let config = message.bytes(field::BACKEND_CONFIG)?;
    if !config.is_empty() {
        out.push(format!("backend_config={}", structured(config)));
    }
    Ok(out)
}

/// `frontend_attributes={a="b",c={d}}`; empty where there are none.
pub(super) fn frontend(attributes: &Message<'_>) -> Result<String> {
    let mut entries = attributes.messages(1)?.iter().map(|e| Ok((e.text(1)?, e.text(2)?))).collect::<Result<Vec<_>>>()?;
    entries.sort_unstable();
    let entries: Vec<String> = entries.iter().map(|(key, value)| format!("{key}={}", structured(value.as_bytes()))).collect();
    Ok(if entries.is_empty() { String::new() } else { format!("frontend_attributes={{{}}}", entries.join(",")) })
}

/// What has a structure stands as it is, everything else between quotes.
fn structured(value: &[u8]) -> String {
    match std::str::from_utf8(value) {
        Ok(text) if text.starts_with('{') => text.to_owned(),
        _ => format!("\"{}\"", escaped(value)),
    }
}

fn metadata_text(metadata: &Message<'_>) -> Result<String> {
    let mut parts = Vec::new();
    for (number, name) in [(1, "op_type"), (2, "op_name"), (3, "source_file")] {
        let text = metadata.text(number)?;
        if !text.is_empty() {
            parts.push(format!("{name}=\"{}\"", escaped(text.as_bytes())));
        }
    }
    let lines = [(4, "source_line"), (17, "source_end_line"), (18, "source_column"), (19, "source_end_column"), (15, "stack_frame_id")];
    for (number, name) in lines {
        let value = metadata.int(number)?;
        if value != 0 {
            parts.push(format!("{name}={value}"));
        }
    }
    for (number, name) in [(12, "deduplicated_name"), (16, "scheduling_name")] {
        let text = metadata.text(number)?;
        if !text.is_empty() {
            parts.push(format!("{name}=\"{}\"", escaped(text.as_bytes())));
        }
    }
    Ok(parts.join(" "))
}

fn called(at: &Instruction<'_>, names: &Names<'_>, out: &mut Vec<String>) {
    let all: Vec<String> = at.called.iter().map(|&id| names.computation(id)).collect();
    match (at.opcode, &all[..]) {
        (_, []) => {}
        ("while", [body, condition]) => out.extend([format!("condition={condition}"), format!("body={body}")]),
        ("select-and-scatter", [select, scatter]) => out.extend([format!("select={select}"), format!("scatter={scatter}")]),
        ("conditional", all) => out.push(format!("branch_computations={{{}}}", all.join(", "))),
        ("custom-call", all) => out.push(format!("called_computations={{{}}}", all.join(", "))),
        (
            "call" | "map" | "reduce" | "reduce-window" | "all-reduce" | "all-reduce-start" | "reduce-scatter" | "scatter" | "sort"
            | "topk",
            [one, ..],
        ) => out.push(format!("to_apply={one}")),
        (_, all) => out.push(format!("calls={}", all.join(", "))),
    }
}

/// Fields that every instruction may have are told apart by its opcode.
fn own(at: &Instruction<'_>, m: &Message<'_>, out: &mut Vec<String>) -> Result<()> {
    let dimensions = |out: &mut Vec<String>| -> Result<()> {
        out.push(format!("dimensions={}", braces(&m.ints(field::DIMENSIONS)?)));
        Ok(())
    };
    match at.opcode {
        "broadcast" | "transpose" | "reverse" | "concatenate" | "reduce" | "map" => dimensions(out)?,
        "get-dimension-size" | "set-dimension-size" => dimensions(out)?,
        "sort" => {
            dimensions(out)?;
            flag(m, IS_STABLE, "is_stable", out)?;
        }
        "iota" => out.push(format!("iota_dimension={}", joined(&m.ints(field::DIMENSIONS)?, ","))),
        "get-tuple-element" => out.push(format!("index={}", m.int(TUPLE_INDEX)?)),
        "slice" => out.push(format!("slice={}", slices(m)?)),
        "dynamic-slice" => out.push(format!("dynamic_slice_sizes={}", braces(&m.ints(DYNAMIC_SLICE_SIZES)?))),
        "pad" => out.push(format!("padding={}", padding(m)?)),
        "reduce-precision" => out.push(format!("exponent_bits={}, mantissa_bits={}", m.int(18)?, m.int(19)?)),
        "compare" => {
            out.push(format!("direction={}", m.text(DIRECTION)?));
            let kind = m.text(COMPARISON_TYPE)?;
            if kind == "TOTALORDER" {
                out.push(format!("type={kind}"));
            }
        }
        "fusion" => {
            aliasing(m, out)?;
            out.push(format!("kind={}", m.text(FUSION_KIND)?));
        }
        "dot" => {
            dot(m, out)?;
            precision(m, out)?;
        }
        "convolution" => {
            window(m, out)?;
            convolution(m, out)?;
            precision(m, out)?;
        }
        "reduce-window" | "select-and-scatter" => window(m, out)?,
        "gather" => gather(m, out)?,
        "scatter" => scatter(m, out)?,
        "custom-call" => custom_call(m, out)?,
        "rng" => out.push(format!("distribution={}", if m.int(23)? == 2 { "rng_normal" } else { "rng_uniform" })),
        "rng-get-and-update-state" => out.push(format!("delta={}", m.int(DELTA)?)),
        "rng-bit-generator" => {
            let name = ["rng_default", "rng_three_fry", "rng_philox"].get(m.int(RNG_ALGORITHM)? as usize).copied();
            out.push(format!("algorithm={}", name.unwrap_or("rng_default")));
        }
        "fft" => {
            let name = ["FFT", "IFFT", "RFFT", "IRFFT"].get(m.int(FFT_TYPE)? as usize).copied().unwrap_or("FFT");
            out.push(format!("fft_type={name}, fft_length={}", braces(&m.ints(FFT_LENGTH)?)));
        }
        "cholesky" => {
            if let Some(options) = m.message(CHOLESKY)? {
                flag(&options, 1, "lower", out)?;
            }
        }
        "triangular-solve" => triangular(m, out)?,
        _ => collective(at, m, out)?,
    }
    Ok(())
}

fn flag(m: &Message<'_>, number: u32, name: &str, out: &mut Vec<String>) -> Result<()> {
    if m.flag(number)? {
        out.push(format!("{name}=true"));
    }
    Ok(())
}

fn collective(at: &Instruction<'_>, m: &Message<'_>, out: &mut Vec<String>) -> Result<()> {
    let base = at.opcode.trim_end_matches("-start");
    let known = ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-broadcast"];
    let permute = base == "collective-permute";
    if !known.contains(&base) && !permute {
        return Ok(());
    }
    let channel = m.int(field::CHANNEL)?;
    if channel != 0 {
        out.push(format!("channel_id={channel}"));
    }
    if permute {
        let pairs = m.messages(field::PAIRS)?;
        let pairs = pairs.iter().map(|p| Ok(format!("{{{},{}}}", p.int(1)?, p.int(2)?))).collect::<Result<Vec<_>>>()?;
        out.push(format!("source_target_pairs={{{}}}", pairs.join(",")));
        return Ok(());
    }
    let text = if let Some(iota) = m.message(field::IOTA_GROUPS)? {
        iota_groups(&iota)?
    } else if let Some(mesh) = m.message(field::MESH_GROUPS)? {
        mesh_groups(&mesh)?
    } else if let Some(list) = m.message(field::GROUP_LIST)? {
        groups(&list.messages(1)?)?
    } else {
        groups(&m.messages(field::GROUPS)?)?
    };
    out.push(format!("replica_groups={text}"));
    flag(m, field::CONSTRAIN_LAYOUT, "constrain_layout", out)?;
    let dims = m.ints(field::DIMENSIONS)?;
    let before = matches!(base, "all-gather" | "all-to-all") && !dims.is_empty();
    if before {
        out.push(format!("dimensions={}", braces(&dims)));
    }
    flag(m, field::GLOBAL_IDS, "use_global_device_ids", out)?;
    if !before && !dims.is_empty() {
        out.push(format!("dimensions={}", braces(&dims)));
    }
    Ok(())
}

fn slices(m: &Message<'_>) -> Result<String> {
    let all = m.messages(SLICES)?;
    let strided = all.iter().map(|s| s.int(3)).collect::<Result<Vec<_>>>()?.iter().any(|&stride| stride != 1);
    let parts = all.iter().map(|s| {
        let (start, limit) = (s.int(1)?, s.int(2)?);
        Ok(if strided { format!("[{start}:{limit}:{}]", s.int(3)?) } else { format!("[{start}:{limit}]") })
    });
    Ok(format!("{{{}}}", parts.collect::<Result<Vec<_>>>()?.join(", ")))
}

fn padding(m: &Message<'_>) -> Result<String> {
    let Some(config) = m.message(PADDING)? else { return Ok(String::new()) };
    let dims = config.messages(1)?;
    let interior = dims.iter().map(|d| d.int(3)).collect::<Result<Vec<_>>>()?.iter().any(|&n| n != 0);
    let parts = dims.iter().map(|d| {
        let mut text = format!("{}_{}", d.int(1)?, d.int(2)?);
        if interior {
            text.push_str(&format!("_{}", d.int(3)?));
        }
        Ok(text)
    });
    Ok(parts.collect::<Result<Vec<_>>>()?.join("x"))
}

/// `size=3x3 stride=2x2 pad=1_1x1_1`: what is everywhere the default is left out.
fn window(m: &Message<'_>, out: &mut Vec<String>) -> Result<()> {
    let Some(window) = m.message(WINDOW)? else { return Ok(()) };
    let dims = window.messages(1)?;
    if dims.is_empty() {
        return Ok(());
    }
    let all = |number| dims.iter().map(|d| d.int(number)).collect::<Result<Vec<i64>>>();
    let mut parts = vec![format!("size={}", joined(&all(1)?, "x"))];
    let (low, high) = (all(3)?, all(4)?);
    if all(2)?.iter().any(|&n| n != 1) {
        parts.push(format!("stride={}", joined(&all(2)?, "x")));
    }
    if low.iter().chain(&high).any(|&n| n != 0) {
        let pads: Vec<String> = low.iter().zip(&high).map(|(low, high)| format!("{low}_{high}")).collect();
        parts.push(format!("pad={}", pads.join("x")));
    }
    for (number, name) in [(6, "lhs_dilate"), (5, "rhs_dilate")] {
        if all(number)?.iter().any(|&n| n != 1) {
            parts.push(format!("{name}={}", joined(&all(number)?, "x")));
        }
    }
    if all(7)?.iter().any(|&n| n != 0) {
        parts.push(format!("rhs_reversal={}", joined(&all(7)?, "x")));
    }
    out.push(format!("window={{{}}}", parts.join(" ")));
    Ok(())
}

/// `dim_labels=b01f_01io->b01f`, and groups where there are several.
fn convolution(m: &Message<'_>, out: &mut Vec<String>) -> Result<()> {
    if let Some(numbers) = m.message(CONVOLUTION)? {
        let label = |first: (i64, char), second: (i64, char), spatial: Vec<i64>| {
            let mut labels = vec!['?'; spatial.len() + 2];
            let digits = spatial.iter().enumerate().map(|(at, &dim)| (dim, char::from_digit(at as u32, 10).unwrap_or('?')));
            for (dim, letter) in [first, second].into_iter().chain(digits) {
                if let Some(place) = labels.get_mut(dim as usize) {
                    *place = letter;
                }
            }
            labels.into_iter().collect::<String>()
        };
        let input = label((numbers.int(7)?, 'b'), (numbers.int(8)?, 'f'), numbers.ints(11)?);
        let kernel = label((numbers.int(3)?, 'i'), (numbers.int(4)?, 'o'), numbers.ints(6)?);
        let output = label((numbers.int(9)?, 'b'), (numbers.int(10)?, 'f'), numbers.ints(12)?);
        out.push(format!("dim_labels={input}_{kernel}->{output}"));
    }
    for (number, name) in [(FEATURE_GROUPS, "feature_group_count"), (BATCH_GROUPS, "batch_group_count")] {
        let count = m.int(number)?;
        if count > 1 {
            out.push(format!("{name}={count}"));
        }
    }
    Ok(())
}

fn dot(m: &Message<'_>, out: &mut Vec<String>) -> Result<()> {
    let Some(numbers) = m.message(DOT)? else { return Ok(()) };
    for (number, name, always) in
        [(3, "lhs_batch_dims", false), (1, "lhs_contracting_dims", true), (4, "rhs_batch_dims", false), (2, "rhs_contracting_dims", true)]
    {
        let dims = numbers.ints(number)?;
        if always || !dims.is_empty() {
            out.push(format!("{name}={}", braces(&dims)));
        }
    }
    Ok(())
}

fn precision(m: &Message<'_>, out: &mut Vec<String>) -> Result<()> {
    let Some(config) = m.message(PRECISION)? else { return Ok(()) };
    let operands = config.ints(1)?;
    if operands.iter().any(|&p| p != 0) {
        let names: Vec<&str> =
            operands.iter().map(|&p| ["default", "high", "highest"].get(p as usize).copied().unwrap_or("default")).collect();
        out.push(format!("operand_precision={{{}}}", names.join(",")));
    }
    Ok(())
}

/// Lists that are left out where they are empty.
fn batching(m: &Message<'_>, lists: [(u32, &str); 2], out: &mut Vec<String>) -> Result<()> {
    for (number, name) in lists {
        let dims = m.ints(number)?;
        if !dims.is_empty() {
            out.push(format!("{name}={}", braces(&dims)));
        }
    }
    Ok(())
}

fn gather(m: &Message<'_>, out: &mut Vec<String>) -> Result<()> {
    if let Some(numbers) = m.message(GATHER)? {
        for (number, name) in [(1, "offset_dims"), (2, "collapsed_slice_dims"), (3, "start_index_map")] {
            out.push(format!("{name}={}", braces(&numbers.ints(number)?)));
        }
        batching(&numbers, [(5, "operand_batching_dims"), (6, "start_indices_batching_dims")], out)?;
        out.push(format!("index_vector_dim={}", numbers.int(4)?));
    }
    out.push(format!("slice_sizes={}", braces(&m.ints(GATHER_SIZES)?)));
    flag(m, SORTED, "indices_are_sorted", out)
}

fn scatter(m: &Message<'_>, out: &mut Vec<String>) -> Result<()> {
    if let Some(numbers) = m.message(SCATTER)? {
        for (number, name) in [(1, "update_window_dims"), (2, "inserted_window_dims"), (3, "scatter_dims_to_operand_dims")] {
            out.push(format!("{name}={}", braces(&numbers.ints(number)?)));
        }
        batching(&numbers, [(5, "input_batching_dims"), (6, "scatter_indices_batching_dims")], out)?;
        out.push(format!("index_vector_dim={}", numbers.int(4)?));
    }
    flag(m, SORTED, "indices_are_sorted", out)?;
    flag(m, UNIQUE, "unique_indices", out)
}

fn triangular(m: &Message<'_>, out: &mut Vec<String>) -> Result<()> {
    let Some(options) = m.message(TRIANGULAR)? else { return Ok(()) };
    for (number, name) in [(1, "left_side"), (2, "lower"), (3, "unit_diagonal")] {
        flag(&options, number, name, out)?;
    }
    if let Some(name) = ["NO_TRANSPOSE", "TRANSPOSE", "ADJOINT"].get((options.int(4)? - 1) as usize) {
        out.push(format!("transpose_a={name}"));
    }
    Ok(())
}

fn aliasing(m: &Message<'_>, out: &mut Vec<String>) -> Result<()> {
    let entries = m.messages(OUTPUT_ALIASING)?;
    if !entries.is_empty() {
        let entries = entries.iter().map(|e| Ok(format!("{}: ({}, {})", braces(&e.ints(1)?), e.int(2)?, braces(&e.ints(3)?))));
        out.push(format!("output_to_operand_aliasing={{{}}}", entries.collect::<Result<Vec<_>>>()?.join(", ")));
    }
    Ok(())
}

fn custom_call(m: &Message<'_>, out: &mut Vec<String>) -> Result<()> {
    window(m, out)?;
    convolution(m, out)?;
    out.push(format!("custom_call_target=\"{}\"", escaped(m.bytes(field::TARGET)?)));
    if m.flag(field::CONSTRAIN_LAYOUT)? {
        let shapes = m.messages(field::OPERAND_SHAPES)?.iter().map(|s| shape::text(s, true)).collect::<Result<Vec<_>>>()?;
        out.push(format!("operand_layout_constraints={{{}}}", shapes.join(", ")));
    }
    flag(m, field::SIDE_EFFECT, "custom_call_has_side_effect", out)?;
    aliasing(m, out)?;
    let versions = ["STATUS_RETURNING", "STATUS_RETURNING_UNIFIED", "TYPED_FFI"];
    if let Some(version) = m.int(field::API_VERSION)?.checked_sub(2).and_then(|at| versions.get(usize::try_from(at).ok()?)) {
        out.push(format!("api_version=API_VERSION_{version}"));
    }
    Ok(())
}
