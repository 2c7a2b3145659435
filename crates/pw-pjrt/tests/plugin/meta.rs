//! Metadata of the kinds of programs that JAX makes.

use pw_pjrt::{ArrayMeta, BufferType, ExecMeta};

use crate::{client, compile, is_new, plugin};

fn meta(name: &str, devices: i64) -> Option<ExecMeta> {
    let plugin = plugin()?;
    let client = client(plugin, devices);
    Some(compile(&client, name).meta().unwrap())
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
    let Some(m) = meta("two1", 1) else { return };
    println!("{m:#?}");
}

#[test]
fn dump() {
    for (n, d) in [
        ("add8", 8),
        ("replicated8", 8),
        ("psum8", 8),
        ("partial42", 8),
        ("donate1", 1),
        ("leftover8", 8),
        ("host1", 1),
        ("noout1", 1),
        ("noout8", 8),
        ("int4", 1),
        ("mixed", 1),
    ] {
        let Some(plugin) = plugin() else { return };
        if n == "host1" && !is_new(plugin) {
            continue;
        }
        let m = meta(n, d).unwrap();
        println!(
            "== {n} {} r{} p{} donated {:?} coll {:?} cc {:?} {:?} code {} fp {}",
            m.name,
            m.num_replicas,
            m.num_partitions,
            m.donated,
            m.collectives,
            m.custom_call_targets,
            m.memory,
            m.code_size,
            m.fingerprint.len()
        );
        for p in show(&m.params) {
            println!("  in  {p}");
        }
        for p in show(&m.outputs) {
            println!("  out {p}");
        }
    }
    let _ = BufferType::F32;
}
