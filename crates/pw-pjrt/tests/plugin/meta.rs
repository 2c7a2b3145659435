//! Metadata of the kinds of programs that JAX makes.

use pw_pjrt::{ArrayMeta, ExecMeta, MemoryStats, Plugin, code};

use crate::{client, compile, is_new, plugin};

fn meta(plugin: Plugin, name: &str, devices: i64) -> ExecMeta {
    compile(&client(plugin, devices), name).meta().unwrap()
}

/// `OpSharding` bytes of a tiling over all eight devices in order, `<=[8]`.
fn tiled8(dims: &[u8]) -> String {
    let tiles: String = dims.iter().map(|d| format!("{d:02x}")).collect();
    format!("08031a{:02x}{tiles}4a0108520100", dims.len())
}

/// One line per array: type, global dims / shard dims, kind, layout, sharding bytes in hex.
fn show(arrays: &[ArrayMeta]) -> Vec<String> {
    let line = |a: &ArrayMeta| {
        let sharding =
            a.sharding.as_ref().map_or("-".to_owned(), |bytes| bytes.iter().map(|b| format!("{b:02x}")).collect::<Vec<_>>().join(""));
        format!(
            "{:?} {:?} / {:?} {} {} [{sharding}]",
            a.element_type,
            a.global_dims,
            a.shard_dims,
            a.memory_kind,
            a.layout.as_deref().unwrap_or("none"),
        )
    };
    arrays.iter().map(line).collect()
}

#[test]
fn one_device() {
    let Some(plugin) = plugin() else { return };
    let m = meta(plugin, "two1", 1);
    assert_eq!((m.name.as_str(), m.num_replicas, m.num_partitions), ("jit__lambda", 1, 1));
    assert_eq!(show(&m.params), ["F32 [2, 3] / [2, 3] device {1,0} [-]", "F32 [3, 2] / [3, 2] device {1,0} [-]"]);
    assert_eq!(
        show(&m.outputs),
        ["F32 [2, 2] / [2, 2] device {1,0} [-]", "F32 [] / [] device {} [-]", "S32 [3, 2] / [3, 2] device {1,0} [-]",]
    );
    // Two arguments of 24 bytes; 16 + 4 + 24 bytes of outputs and a table of three pointers.
    assert_eq!((m.memory.argument, m.memory.output, m.memory.temp, m.memory.alias), (48, 68, 0, 0));
    assert_eq!((m.donated, m.code_size), (vec![], 0));
    assert!(m.collectives.is_empty() && m.custom_call_targets.is_empty());
    assert!(!m.fingerprint.is_empty() && !m.uses_partition_id);
}

#[test]
fn eight_devices_without_and_with_collectives() {
    let Some(plugin) = plugin() else { return };
    let m = meta(plugin, "add8", 8);
    assert_eq!((m.num_replicas, m.num_partitions), (1, 8));
    let line = format!("F32 [16, 3] / [2, 3] device {{1,0}} [{}]", tiled8(&[8, 1]));
    assert_eq!(show(&m.params), [line.as_str()]);
    assert_eq!(show(&m.outputs), [line.as_str()]);
    assert!(!m.has_collectives());

    let m = meta(plugin, "psum8", 8);
    assert_eq!(m.collectives, [("all-reduce".to_owned(), 1)]);
    assert_eq!(show(&m.outputs), ["F32 [4] / [4] device {0} []"]);
    assert_eq!(m.params[0].global_dims, [32]);
}

#[test]
fn replicated_and_partially_replicated() {
    let Some(plugin) = plugin() else { return };
    let m = meta(plugin, "replicated8", 8);
    assert_eq!(show(&m.outputs), ["F32 [16, 3] / [16, 3] device {1,0} []", "F32 [] / [] device {} []"]);
    assert_eq!(m.collectives, [("all-gather".to_owned(), 1), ("all-reduce".to_owned(), 1)]);

    let m = meta(plugin, "partial42", 8);
    // [4,1,2] with the last one replicated.
    assert_eq!(show(&m.params), ["Bf16 [8, 6] / [2, 6] device {1,0} [08031a0304010230014a0108520100]"]);
    // [2,4] over a transposed mesh.
    assert_eq!(show(&m.outputs), ["Bf16 [6, 8] / [3, 2] device {1,0} [08031a0202044a02040252020100]"]);
}

#[test]
fn donation_and_its_left_over() {
    let Some(plugin) = plugin() else { return };
    let m = meta(plugin, "donate1", 1);
    assert_eq!(m.donated, [0]);
    assert_eq!((m.memory.argument, m.memory.output, m.memory.alias), (512, 256, 256));
    let m = meta(plugin, "leftover8", 8);
    assert_eq!(m.donated, [0]);
    assert_eq!(m.params.iter().map(|p| p.global_dims[0]).collect::<Vec<_>>(), [16, 32]);
}

#[test]
fn host_memory() {
    let Some(plugin) = plugin() else { return };
    if !is_new(plugin) {
        eprintln!("skipped in part: this plugin has no programs with host memory");
        return;
    }
    let m = meta(plugin, "host1", 1);
    assert_eq!(show(&m.outputs), ["F32 [4] / [4] pinned_host {0} [-]", "F32 [4] / [4] device {0} [-]"]);
    let client = client(plugin, 1);
    let x = crate::run::upload(&client, &[1., 2., 3., 4.], &[4], 0);
    let run = compile(&client, "host1").execute(&[vec![&x]], Default::default()).unwrap();
    assert_eq!(run.outputs[0][0].memory_kind().unwrap(), "pinned_host");
    assert_eq!(crate::f32s(&run.outputs[0][0].to_vec().unwrap()), [2., 4., 6., 8.]);
}

#[test]
fn no_outputs() {
    let Some(plugin) = plugin() else { return };
    for (name, devices) in [("noout1", 1), ("noout8", 8)] {
        let client = client(plugin, devices);
        let exe = compile(&client, name);
        let m = exe.meta().unwrap();
        assert_eq!((m.params.len(), m.outputs.len(), exe.num_outputs()), (1, 0, 0));
        let dims = m.params[0].shard_dims.clone();
        let data = vec![0.; dims[0] as usize];
        let shards: Vec<_> = (0..devices as usize).map(|d| crate::run::upload(&client, &data, &dims, d)).collect();
        let lists: Vec<_> = shards.iter().map(|b| vec![b]).collect();
        let run = exe.execute(&lists, Default::default()).unwrap();
        run.done.iter().for_each(|e| e.wait().unwrap());
        assert!(run.outputs.iter().all(Vec::is_empty));
    }
}

#[test]
fn small_odd_and_empty_types() {
    let Some(plugin) = plugin() else { return };
    let m = meta(plugin, "int4", 1);
    assert_eq!(show(&m.params), ["S4 [3, 5] / [3, 5] device {1,0:E(4)} [-]"]);
    assert_eq!(m.params, m.outputs);
    assert_eq!(m.memory, MemoryStats { argument: 8, output: 8, peak: 16, ..Default::default() });
    let m = meta(plugin, "mixed", 1);
    assert_eq!(show(&m.params), ["Pred [3] / [3] device {0} [-]", "C64 [] / [] device {} [-]", "F32 [0, 4] / [0, 4] device {1,0} [-]",]);
    assert_eq!(show(&m.outputs), ["Pred [3] / [3] device {0} [-]", "C64 [] / [] device {} [-]", "F32 [] / [] device {} [-]",]);
}

#[test]
fn cost_is_told_or_unimplemented() {
    let Some(plugin) = plugin() else { return };
    match compile(&client(plugin, 1), "two1").cost_analysis() {
        Ok(figures) => assert!(figures.iter().any(|(name, value)| name == "flops" && *value > 0.0), "{figures:?}"),
        Err(error) => assert_eq!(error.code, code::UNIMPLEMENTED),
    }
}
