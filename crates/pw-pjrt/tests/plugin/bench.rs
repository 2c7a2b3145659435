//! Times of launches, printed; run with `--ignored --nocapture`.

use std::time::Instant;

use pw_pjrt::{Buffer, ExecuteOptions};

use crate::run::upload;
use crate::{client, compile, plugin};

fn report(what: &str, mut run: impl FnMut()) {
    for _ in 0..200 {
        run();
    }
    let mut us: Vec<f64> = (0..2000)
        .map(|_| {
            let start = Instant::now();
            run();
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    us.sort_by(f64::total_cmp);
    println!("{what}: min {:.1} us, median {:.1} us", us[0], us[us.len() / 2]);
}

#[test]
#[ignore = "a measurement"]
fn launches() {
    let Some(plugin) = plugin() else { return };
    let one = client(plugin, 1);
    let add1 = compile(&one, "add1");
    let x = upload(&one, &[1.; 4], &[4], 0);
    report("1 device, add of 4 floats", || {
        let run = add1.execute(&[vec![&x]], ExecuteOptions::default()).unwrap();
        run.done[0].wait().unwrap();
    });

    let client = client(plugin, 8);
    let start = Instant::now();
    let add8 = compile(&client, "add8");
    println!("x+1 for 8 devices: {:?} to compile", start.elapsed());
    let shards: Vec<Buffer> = (0..8).map(|d| upload(&client, &[1.; 6], &[2, 3], d)).collect();
    let lists: Vec<Vec<&Buffer>> = shards.iter().map(|b| vec![b]).collect();
    let all = || {
        let run = add8.execute(&lists, ExecuteOptions::default()).unwrap();
        run.done.iter().for_each(|e| e.wait().unwrap());
    };
    let start = Instant::now();
    let per_device = add8.per_device().unwrap();
    println!("per-device form of x+1: {:?} to compile", start.elapsed());
    let bytes = per_device.serialize().unwrap();
    let start = Instant::now();
    drop(client.deserialize_and_load(&bytes).unwrap());
    println!("and {:?} to load its {} bytes", start.elapsed(), bytes.len());
    let one_by_one = || {
        for d in 0..8 {
            let only = ExecuteOptions { only_device: Some(d), ..Default::default() };
            let run = per_device.execute(&lists[d..=d], only).unwrap();
            run.done[0].wait().unwrap();
        }
    };
    for _ in 0..3 {
        report("8 devices, x+1, one Execute", all);
        report("8 devices, x+1, 8 x only_device (per-device form), one thread", one_by_one);
    }
    let psum8 = compile(&client, "psum8");
    let shards: Vec<Buffer> = (0..8).map(|d| upload(&client, &[1.; 4], &[4], d)).collect();
    let lists: Vec<Vec<&Buffer>> = shards.iter().map(|b| vec![b]).collect();
    report("8 devices, psum, one Execute", || {
        let run = psum8.execute(&lists, ExecuteOptions::default()).unwrap();
        run.done.iter().for_each(|e| e.wait().unwrap());
    });
    let block = std::sync::Arc::new(pw_pjrt::AlignedBlock::zeroed(64 << 20));
    block.iter().step_by(4096).for_each(|b| assert_eq!(*b, 0));
    let dims = [16 << 20];
    let f32 = pw_pjrt::BufferType::F32;
    let up = || {
        let part = pw_pjrt::HostBytes::shared(block.clone(), 0..64 << 20).unwrap();
        one.buffer_from_host(part, f32, &dims, None, 0, None).unwrap()
    };
    let start = Instant::now();
    let big = up();
    println!("64 MB upload in place: {:?}", start.elapsed());
    let start = Instant::now();
    let _copied = one.buffer_from_slice(&block, f32, &dims, 0, None).unwrap();
    println!("64 MB upload, copying: {:?}", start.elapsed());
    let mut out = vec![1u8; 64 << 20];
    let start = Instant::now();
    big.to_host(&mut out).unwrap();
    println!("64 MB to_host: {:?}", start.elapsed());
    let start = Instant::now();
    let view = big.host_view().unwrap().unwrap();
    println!("64 MB host_view: {:?}", start.elapsed());
    drop(view);
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmRSS")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
#[ignore = "a measurement"]
fn leaks() {
    let Some(plugin) = plugin() else { return };
    let client = client(plugin, 8);
    let exe = compile(&client, "leftover8");
    let add = compile(&client, "add8").per_device().unwrap();
    let block = std::sync::Arc::new(pw_pjrt::AlignedBlock::zeroed(4096));
    let context = pw_pjrt::ExecuteContext::new(plugin, vec![]).unwrap();
    let x = upload(&client, &[1.; 6], &[2, 3], 3);
    let only = ExecuteOptions { only_device: Some(3), context: Some(&context), ..Default::default() };
    let steps: [(&str, &dyn Fn()); 5] = [
        ("meta", &|| drop(exe.meta().unwrap())),
        ("execute", &|| drop(add.execute(&[vec![&x]], only).unwrap())),
        ("upload in place and view", &|| {
            let part = pw_pjrt::HostBytes::shared(block.clone(), 0..4096).unwrap();
            let f32 = pw_pjrt::BufferType::F32;
            let b = client.buffer_from_host(part, f32, &[1024], None, 0, None).unwrap();
            assert_eq!(b.host_view().unwrap().unwrap().len(), 4096);
        }),
        ("error", &|| drop(client.deserialize_and_load(b"garbage").err())),
        ("layout", &|| {
            client.default_layout(pw_pjrt::BufferType::F32, &[2, 3]).unwrap();
        }),
    ];
    for (what, step) in steps {
        (0..500).for_each(|_| step());
        let before = resident_kib();
        (0..2000).for_each(|_| step());
        println!("{what}: {} KiB more after 2000 times", resident_kib() - before);
    }
    assert_eq!(std::sync::Arc::strong_count(&block), 1);
}
