//! The client's `xla.CompileOptionsProto`, made fit for this worker.
//!
//! The message is newer than any schema that we could carry, and a message that is decoded and encoded again loses
//! what it does not know, so this is surgery on the wire form: fields that are not named here pass as they are.
//!
//! * `debug_options` go: they are the client's complete `XLA_FLAGS`, with its paths and its number of host devices, and
//!   a partial message would turn unset fields into zeros. The plugin's own defaults hold then.
//! * `device_assignment` holds the client's device ids; it becomes the plugin's.
//! * `env_option_overrides` (`compiler_options=` of `jax.jit`) stay, except those that name files.

use pw_types::Status;

use crate::wire::{Field, fields, push_bytes, push_int, push_varint};

// CompileOptionsProto
const EXECUTABLE_BUILD_OPTIONS: u32 = 3;
const COMPILE_PORTABLE_EXECUTABLE: u32 = 4;
const MULTI_SLICE_CONFIG: u32 = 6;
const ENV_OPTION_OVERRIDES: u32 = 7;
const TARGET_CONFIG: u32 = 8;
// ExecutableBuildOptionsProto
const DEVICE_ORDINAL: u32 = 1;
const DEBUG_OPTIONS: u32 = 3;
const NUM_REPLICAS: u32 = 4;
const NUM_PARTITIONS: u32 = 5;
const DEVICE_ASSIGNMENT: u32 = 9;
const PROCESS_INDEX: u32 = 22;
const PROCESS_COUNT: u32 = 23;
const GPU_TOPOLOGY: u32 = 27;
// DeviceAssignmentProto and its ComputationDevice
const REPLICA_COUNT: u32 = 1;
const COMPUTATION_COUNT: u32 = 2;
const COMPUTATION_DEVICES: u32 = 3;
const REPLICA_DEVICE_IDS: u32 = 1;

/// Names of options with one of these in them may read or write files of the worker.
const FILE_WORDS: [&str; 9] = ["dump", "path", "dir", "file", "cache", "profile", "trace", "load", "save"];

/// Rewrites the options for these devices: the plugin's ids, for each replica, for each partition.
pub(crate) fn clean(options: &[u8], device_ids: &[i32], replicas: u32, partitions: u32) -> Result<Vec<u8>, Status> {
    if replicas != 1 {
        return Err(Status::unimplemented(format!("programs with {replicas} replicas are not served, only with partitions")));
    }
    if device_ids.len() as u64 != u64::from(replicas) * u64::from(partitions) || partitions == 0 {
        return Err(Status::internal(format!("{} devices for {replicas} replicas × {partitions} partitions", device_ids.len())));
    }
    let outer = fields(options).map_err(|_| Status::invalid("the compile options are no CompileOptionsProto"))?;
    let mut out = Vec::with_capacity(options.len());
    // A message field that comes twice means both together.
    let build: Vec<u8> =
        outer.iter().filter(|f| f.number == EXECUTABLE_BUILD_OPTIONS).filter_map(Field::bytes).flatten().copied().collect();
    push_bytes(&mut out, EXECUTABLE_BUILD_OPTIONS, &clean_build(&build, device_ids, replicas, partitions)?);
    for field in &outer {
        let keep = match field.number {
            // The executable must be bound to its devices; slices and GPUs of the client are not ours.
            EXECUTABLE_BUILD_OPTIONS | COMPILE_PORTABLE_EXECUTABLE | MULTI_SLICE_CONFIG | TARGET_CONFIG => false,
            ENV_OPTION_OVERRIDES => keep_override(field),
            _ => true,
        };
        if keep {
            out.extend_from_slice(field.raw);
        }
    }
    Ok(out)
}

fn clean_build(build: &[u8], device_ids: &[i32], replicas: u32, partitions: u32) -> Result<Vec<u8>, Status> {
    let inner = fields(build).map_err(|_| Status::invalid("the compile options have malformed build options"))?;
    let last = |number| inner.iter().rev().find(|f: &&Field<'_>| f.number == number).and_then(|f| f.varint());
    for (number, what, wanted) in [(NUM_REPLICAS, "replicas", replicas), (NUM_PARTITIONS, "partitions", partitions)] {
        if let Some(given) = last(number)
            && given != u64::from(wanted)
        {
            return Err(Status::invalid(format!("the compile options have {given} {what}, the request {wanted}")));
        }
    }
    let mut out = Vec::with_capacity(build.len());
    push_int(&mut out, DEVICE_ORDINAL, -1);
    push_int(&mut out, NUM_REPLICAS, i64::from(replicas));
    push_int(&mut out, NUM_PARTITIONS, i64::from(partitions));
    push_bytes(&mut out, DEVICE_ASSIGNMENT, &assignment(device_ids, replicas, partitions));
    for field in &inner {
        let ours = matches!(
            field.number,
            DEVICE_ORDINAL
                | DEBUG_OPTIONS
                | NUM_REPLICAS
                | NUM_PARTITIONS
                | DEVICE_ASSIGNMENT
                | PROCESS_INDEX
                | PROCESS_COUNT
                | GPU_TOPOLOGY
        );
        if !ours {
            out.extend_from_slice(field.raw);
        }
    }
    Ok(out)
}

fn assignment(device_ids: &[i32], replicas: u32, partitions: u32) -> Vec<u8> {
    let mut out = Vec::new();
    push_int(&mut out, REPLICA_COUNT, i64::from(replicas));
    push_int(&mut out, COMPUTATION_COUNT, i64::from(partitions));
    for partition in 0..partitions as usize {
        let mut ids = Vec::new();
        for replica in 0..replicas as usize {
            push_varint(&mut ids, i64::from(device_ids[replica * partitions as usize + partition]) as u64);
        }
        let mut computation = Vec::new();
        push_bytes(&mut computation, REPLICA_DEVICE_IDS, &ids);
        push_bytes(&mut out, COMPUTATION_DEVICES, &computation);
    }
    out
}

/// An entry of `map<string, OptionOverrideProto>`.
fn keep_override(field: &Field<'_>) -> bool {
    let Some(entry) = field.bytes().and_then(|b| fields(b).ok()) else { return false };
    let get = |number| entry.iter().rev().find(|f| f.number == number).and_then(Field::bytes).unwrap_or_default();
    let name = String::from_utf8_lossy(get(1));
    let text = fields(get(2)).unwrap_or_default().iter().any(|f| f.bytes().is_some_and(|b| b.contains(&b'/') || b.contains(&b'\\')));
    let keep = !text && !FILE_WORDS.iter().any(|word| name.contains(word));
    if !keep {
        tracing::info!(option = %name, "a compiler option that names files is left out");
    }
    keep
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What jaxlib 0.10.2 serializes for 4 partitions on devices 5, 4, 3, 2, with two `compiler_options`.
    const REAL: &[u8] = include_bytes!("testdata/compile_options_jaxlib_0_10_2.bin");

    fn find<'a>(message: &[Field<'a>], number: u32) -> Vec<Field<'a>> {
        message.iter().filter(|f| f.number == number).copied().collect()
    }

    #[test]
    fn real_options_are_rewritten_and_keep_the_rest() {
        let cleaned = clean(REAL, &[1, 0, 3, 2], 1, 4).unwrap();
        let before = fields(REAL).unwrap();
        let after = fields(&cleaned).unwrap();
        let [build] = find(&after, EXECUTABLE_BUILD_OPTIONS)[..] else { panic!("one message of build options") };
        let inner = fields(build.bytes().unwrap()).unwrap();
        assert!(find(&inner, DEBUG_OPTIONS).is_empty() && find(&inner, PROCESS_COUNT).is_empty());
        let assigned = find(&inner, DEVICE_ASSIGNMENT)[0].bytes().unwrap();
        assert_eq!(assigned, [8, 1, 16, 4, 26, 3, 10, 1, 1, 26, 3, 10, 1, 0, 26, 3, 10, 1, 3, 26, 3, 10, 1, 2]);
        // use_spmd_partitioning, both propagation flags, use_shardy_partitioner.
        let old = fields(find(&before, EXECUTABLE_BUILD_OPTIONS)[0].bytes().unwrap()).unwrap();
        for number in [6, 12, 18, 19] {
            assert!(!find(&old, number).is_empty());
            assert_eq!(find(&inner, number), find(&old, number));
        }
        // profile_version = -1.
        assert_eq!(find(&after, 5)[0].varint(), Some(u64::MAX));
        let overrides: Vec<&[u8]> = find(&after, ENV_OPTION_OVERRIDES).iter().filter_map(Field::bytes).collect();
        assert_eq!(find(&before, ENV_OPTION_OVERRIDES).len(), 2);
        assert_eq!(overrides.len(), 1);
        assert!(overrides[0].windows(24).any(|w| w == b"xla_cpu_enable_fast_math"));
        assert!(!cleaned.windows(4).any(|w| w == b"/tmp"));
    }

    #[test]
    fn unknown_fields_pass() {
        let mut options = Vec::new();
        let mut build = Vec::new();
        push_bytes(&mut build, 999, b"inner");
        push_bytes(&mut options, EXECUTABLE_BUILD_OPTIONS, &build);
        push_bytes(&mut options, 1000, b"outer");
        let cleaned = clean(&options, &[0], 1, 1).unwrap();
        let outer = fields(&cleaned).unwrap();
        assert_eq!(find(&outer, 1000)[0].bytes(), Some(&b"outer"[..]));
        let inner = fields(outer[0].bytes().unwrap()).unwrap();
        assert_eq!(find(&inner, 999)[0].bytes(), Some(&b"inner"[..]));
    }

    #[test]
    fn nothing_at_all_is_good_enough() {
        assert!(clean(&[], &[0, 1], 1, 2).is_ok());
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let code = |result: Result<Vec<u8>, Status>| result.unwrap_err().code;
        assert_eq!(code(clean(REAL, &[0, 1, 2, 3], 4, 1)), pw_types::Code::Unimplemented);
        assert_eq!(code(clean(REAL, &[0, 1], 1, 2)), pw_types::Code::InvalidArgument);
        assert_eq!(code(clean(b"\xff\xff", &[0], 1, 1)), pw_types::Code::InvalidArgument);
        for cut in 1..REAL.len() {
            let _ = clean(&REAL[..cut], &[0, 1, 2, 3], 1, 4);
        }
    }
}
