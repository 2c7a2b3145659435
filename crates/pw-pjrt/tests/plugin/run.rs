//! Loading, compiling, executing.

use std::path::Path;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use pw_pjrt::{Buffer, BufferType, ClientOptions, ExecuteOptions, PjrtError, Plugin, code};

use crate::{bytes_of, client, compile, f32s, is_new, options, plugin};

#[test]
fn load_errors_name_the_path_and_the_reason() {
    let e = Plugin::load(Path::new("/nonexistent/plugin.so")).unwrap_err();
    assert_eq!(e.code, code::NOT_FOUND);
    assert!(e.message.contains("/nonexistent/plugin.so"), "{e}");
    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
    let e = Plugin::load(&text).unwrap_err();
    assert!(e.message.contains("Cargo.toml is not a loadable shared library"), "{e}");
    let other = ["/lib/x86_64-linux-gnu/libm.so.6", "/lib64/libm.so.6", "/usr/lib/libm.so.6"];
    if let Some(other) = other.iter().map(Path::new).find(|p| p.exists()) {
        let e = Plugin::load(other).unwrap_err();
        assert!(e.message.contains("libm.so.6 has no symbol GetPjrtApi"), "{e}");
    }
}

#[test]
fn describes_plugin_client_and_devices() {
    let Some(plugin) = plugin() else { return };
    assert_eq!(plugin.api_version().0, 0);
    let names: Vec<_> = plugin.extensions().iter().map(|e| e.name()).collect();
    assert!(names.contains(&"Layouts") && names.contains(&"Ffi"), "{names:?}");
    let again = Plugin::load(plugin.path()).unwrap();
    assert_eq!(again.extensions(), plugin.extensions());

    let client = client(plugin, 3);
    assert_eq!(client.platform_name(), "cpu");
    assert!(!client.platform_version().is_empty());
    assert_eq!(client.process_index(), 0);
    let devices = client.devices();
    assert_eq!(devices.iter().map(|d| d.id).collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(devices.iter().map(|d| d.local_hardware_id).collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(devices[1].kind, "cpu");
    assert!(devices[1].debug_string.ends_with('1'), "{:?}", devices[1]);
    let kinds: Vec<_> = devices[2].memories.iter().map(|m| m.kind.as_str()).collect();
    assert_eq!(devices[2].default_memory_kind, kinds[0]);
    if is_new(plugin) {
        assert_eq!(kinds, ["device", "pinned_host", "unpinned_host"]);
        assert_eq!(devices[2].memories.iter().map(|m| m.id).collect::<Vec<_>>(), [6, 7, 8]);
    }
    assert_eq!(client.default_layout(BufferType::F32, &[2, 3]).unwrap(), "{1,0}");
    assert_eq!(client.default_layout(BufferType::F32, &[]).unwrap(), "{}");
    let packed = if is_new(plugin) { "{0:E(4)}" } else { "{0}" };
    assert_eq!(client.default_layout(BufferType::S4, &[8]).unwrap(), packed);
    assert_eq!(client.default_layout(BufferType::Token, &[]).unwrap_err().code, code::INVALID_ARGUMENT);
}

#[test]
fn a_process_id_is_honoured_or_refused() {
    let Some(plugin) = plugin() else { return };
    let options = ClientOptions { device_count: Some(2), asynchronous: None, process_id: Some(3) };
    match plugin.create_client(&options) {
        Ok(client) => {
            assert_eq!(client.process_index(), 3);
            assert_eq!(client.devices()[1].id, 3 * 2048 + 1);
            assert_eq!(client.devices()[1].local_hardware_id, 1);
            assert_eq!(client.device_index(3 * 2048 + 1), Some(1));
        }
        Err(e) => {
            assert!(!is_new(plugin));
            assert!(e.message.contains("ignores process_id"), "{e}");
        }
    }
}

#[test]
fn runs_a_program_on_one_device() {
    let Some(plugin) = plugin() else { return };
    let client = client(plugin, 1);
    let exe = compile(&client, "two1");
    let x = upload(&client, &[1., 2., 3., 4., 5., 6.], &[2, 3], 0);
    let y = upload(&client, &[1., 0., 0., 1., 1., 1.5], &[3, 2], 0);
    let run = exe.execute(&[vec![&x, &y]], ExecuteOptions::default()).unwrap();
    run.done[0].wait().unwrap();
    let [product, sum, cast] = &run.outputs[0][..] else { panic!("three outputs") };
    assert_eq!(f32s(&product.to_vec().unwrap()), [4., 6.5, 10., 14.]);
    assert_eq!(f32s(&sum.to_vec().unwrap()), [21.]);
    assert_eq!(sum.dims().unwrap(), [0i64; 0]);
    assert_eq!(cast.element_type().unwrap(), BufferType::S32);
    assert_eq!(cast.dims().unwrap(), [3, 2]);
    let cast: Vec<i32> = cast.to_vec().unwrap().chunks_exact(4).map(|c| i32::from_le_bytes(c.try_into().unwrap())).collect();
    assert_eq!(cast, [1, 0, 0, 1, 1, 1]);
}

#[test]
fn runs_on_eight_devices_at_once() {
    let Some(plugin) = plugin() else { return };
    let client = client(plugin, 8);
    let exe = compile(&client, "add8");
    assert_eq!(exe.addressable_device_ids(), [0, 1, 2, 3, 4, 5, 6, 7]);
    let shards: Vec<Buffer> = (0..8).map(|d| upload(&client, &[d as f32; 6], &[2, 3], d)).collect();
    let lists: Vec<Vec<&Buffer>> = shards.iter().map(|b| vec![b]).collect();
    let run = exe.execute(&lists, ExecuteOptions::default()).unwrap();
    for (d, outputs) in run.outputs.iter().enumerate() {
        run.done[d].wait().unwrap();
        assert_eq!(f32s(&outputs[0].to_vec().unwrap()), [d as f32 + 1.; 6]);
        assert_eq!(outputs[0].device_index().unwrap(), d);
        assert_eq!(outputs[0].device_id().unwrap(), d as i32);
    }
    let only = ExecuteOptions { only_device: Some(5), ..Default::default() };
    let e = exe.execute(&lists[5..6], only).unwrap_err();
    assert!(e.message.contains("per_device"), "{e}");

    let psum = compile(&client, "psum8");
    let shards: Vec<Buffer> = (0..8).map(|d| upload(&client, &[d as f32, 1., 2., 3.], &[4], d)).collect();
    let lists: Vec<Vec<&Buffer>> = shards.iter().map(|b| vec![b]).collect();
    let run = psum.execute(&lists, ExecuteOptions::default()).unwrap();
    for outputs in &run.outputs {
        assert_eq!(f32s(&outputs[0].to_vec().unwrap()), [28., 8., 16., 24.]);
    }
    assert!(psum.per_device().is_err());
}

#[test]
fn a_program_without_collectives_runs_device_by_device() {
    let Some(plugin) = plugin() else { return };
    let client = client(plugin, 8);
    let whole = compile(&client, "add8");
    let one = whole.per_device().unwrap();
    let shards: Vec<Buffer> = (0..8).map(|d| upload(&client, &[d as f32; 6], &[2, 3], d)).collect();
    for d in [5, 5, 0, 7, 1] {
        let only = ExecuteOptions { only_device: Some(d), ..Default::default() };
        let run = one.execute(&[vec![&shards[d]]], only).unwrap();
        run.done[0].wait().unwrap();
        assert_eq!(f32s(&run.outputs[0][0].to_vec().unwrap()), [d as f32 + 1.; 6]);
        assert_eq!(run.outputs[0][0].device_index().unwrap(), d);
    }
    // Runs of the whole are not held up by it.
    let lists: Vec<Vec<&Buffer>> = shards.iter().map(|b| vec![b]).collect();
    let run = whole.execute(&lists, ExecuteOptions::default()).unwrap();
    run.done.iter().for_each(|e| e.wait().unwrap());
    // It travels, and donation is the same.
    let loaded = client.deserialize_and_load(&one.serialize().unwrap()).unwrap();
    let only = ExecuteOptions { only_device: Some(3), ..Default::default() };
    let run = loaded.execute(&[vec![&shards[3]]], only).unwrap();
    assert_eq!(f32s(&run.outputs[0][0].to_vec().unwrap()), [4.; 6]);
    let donor = compile(&client, "donate1").per_device().unwrap();
    let a = upload(&client, &[1.; 64], &[64], 6);
    let b = upload(&client, &[2.; 64], &[64], 6);
    let only = ExecuteOptions { only_device: Some(6), ..Default::default() };
    let run = donor.execute(&[vec![&a, &b]], only).unwrap();
    assert_eq!(f32s(&run.outputs[0][0].to_vec().unwrap()), [3.; 64]);
    assert!(a.is_deleted().unwrap() && !b.is_deleted().unwrap());
}

#[test]
fn wrong_calls_are_errors_with_a_text() {
    let Some(plugin) = plugin() else { return };
    let client = client(plugin, 2);
    let opts = options("add1");
    let e = client.compile(b"module { garbage", "mlir", &opts).unwrap_err();
    assert!(e.code != 0 && e.message.contains("garbage"), "{e}");
    assert!(client.compile(b"", "nonsense", &opts).is_err());
    assert!(client.deserialize_and_load(b"garbage").is_err());

    let exe = compile(&client, "add1");
    let x = upload(&client, &[1.; 4], &[4], 0);
    let short = upload(&client, &[1.; 3], &[3], 0);
    let there = upload(&client, &[1.; 4], &[4], 1);
    let run = |args: &[Vec<&Buffer>]| exe.execute(args, ExecuteOptions::default()).unwrap_err();
    assert!(run(&[]).message.contains("0 argument lists for 1 devices"));
    assert!(run(&[vec![&x], vec![&x]]).message.contains("2 argument lists"));
    let e: Vec<PjrtError> = [vec![], vec![&x, &x], vec![&short], vec![&there]].into_iter().map(|a| run(&[a])).collect();
    assert!(e.iter().all(|e| e.code == code::INVALID_ARGUMENT), "{e:?}");
    let other = crate::client(plugin, 1);
    let foreign = upload(&other, &[1.; 4], &[4], 0);
    assert!(run(&[vec![&foreign]]).message.contains("another client"));
    let elsewhere = ExecuteOptions { only_device: Some(1), ..Default::default() };
    let e = exe.execute(&[vec![&there]], elsewhere).unwrap_err();
    assert_eq!(e.code, code::INVALID_ARGUMENT, "{e}");
    let here = ExecuteOptions { only_device: Some(0), ..Default::default() };
    exe.execute(&[vec![&x]], here).unwrap();
    exe.execute(&[vec![&x]], here).unwrap().done[0].wait().unwrap();
    assert_eq!(exe.per_device().unwrap().num_devices(), 0);
    let far = ExecuteOptions { only_device: Some(9), ..Default::default() };
    assert!(exe.execute(&[vec![&x]], far).is_err());
}

#[test]
fn donation_takes_the_input_unless_told_otherwise() {
    let Some(plugin) = plugin() else { return };
    let client = client(plugin, 1);
    let exe = compile(&client, "donate1");
    let a = upload(&client, &[1.; 64], &[64], 0);
    let b = upload(&client, &[2.; 64], &[64], 0);
    let kept = ExecuteOptions { non_donatable: &[0], ..Default::default() };
    let run = exe.execute(&[vec![&a, &b]], kept).unwrap();
    run.done[0].wait().unwrap();
    assert!(!a.is_deleted().unwrap());
    assert_eq!(f32s(&a.to_vec().unwrap()), [1.; 64]);

    let at = a.unsafe_pointer().unwrap();
    let run = exe.execute(&[vec![&a, &b]], ExecuteOptions::default()).unwrap();
    run.done[0].wait().unwrap();
    assert!(a.is_deleted().unwrap() && !b.is_deleted().unwrap());
    assert_eq!(run.outputs[0][0].unsafe_pointer().unwrap(), at);
    assert_eq!(f32s(&run.outputs[0][0].to_vec().unwrap()), [3.; 64]);
    let e = exe.execute(&[vec![&a, &b]], ExecuteOptions::default()).unwrap_err();
    assert_eq!(e.code, code::INVALID_ARGUMENT);
    assert!(a.to_vec().is_err());
}

#[test]
fn a_left_over_donor_is_not_deleted() {
    let Some(plugin) = plugin() else { return };
    let client = client(plugin, 8);
    let exe = compile(&client, "leftover8");
    let a: Vec<Buffer> = (0..8).map(|d| upload(&client, &[1., 2.], &[2], d)).collect();
    let b: Vec<Buffer> = (0..8).map(|d| upload(&client, &[1.; 4], &[4], d)).collect();
    let lists: Vec<Vec<&Buffer>> = a.iter().zip(&b).map(|(a, b)| vec![a, b]).collect();
    let run = exe.execute(&lists, ExecuteOptions::default()).unwrap();
    for d in 0..8 {
        run.done[d].wait().unwrap();
        assert!(a[d].is_deleted().unwrap() && !b[d].is_deleted().unwrap());
        assert_eq!(f32s(&run.outputs[d][0].to_vec().unwrap()), [2., 4.]);
        assert_eq!(f32s(&run.outputs[d][1].to_vec().unwrap()), [32.]);
    }
}

#[test]
fn a_serialized_executable_runs_in_another_client() {
    let Some(plugin) = plugin() else { return };
    let (bytes, meta) = {
        let client = client(plugin, 8);
        let exe = compile(&client, "add8");
        (exe.serialize().unwrap(), exe.meta().unwrap())
    };
    let client = client(plugin, 8);
    let exe = client.deserialize_and_load(&bytes).unwrap();
    assert_eq!(exe.meta().unwrap(), meta);
    let x: Vec<Buffer> = (0..8).map(|d| upload(&client, &[1.; 6], &[2, 3], d)).collect();
    let lists: Vec<Vec<&Buffer>> = x.iter().map(|b| vec![b]).collect();
    let run = exe.execute(&lists, ExecuteOptions::default()).unwrap();
    // The handles of the client and the executable may go first.
    drop((client, exe, x));
    assert_eq!(f32s(&run.outputs[7][0].to_vec().unwrap()), [2.; 6]);
}

#[test]
fn events_tell_success_later_and_errors() {
    let Some(plugin) = plugin() else { return };
    let options = ClientOptions { device_count: Some(1), asynchronous: Some(true), process_id: None };
    let client = plugin.create_client(&options).unwrap();
    let exe = compile(&client, "heavy");
    let x = upload(&client, &vec![0.01; 256 * 256], &[256, 256], 0);
    let run = exe.execute(&[vec![&x]], ExecuteOptions::default()).unwrap();
    let (tell, told) = mpsc::channel();
    run.done[0].on_ready(Box::new(move |r| tell.send(r).unwrap()));
    run.outputs[0][0].ready_event().unwrap().wait().unwrap();
    assert_eq!(told.recv_timeout(Duration::from_secs(60)).unwrap(), Ok(()));
    run.done[0].wait().unwrap();
    assert!(run.done[0].is_ready());
    run.done[0].wait().unwrap();
    // A callback that panics does not take the process down.
    run.done[0].on_ready(Box::new(|_| panic!("expected by the test")));

    let bad = PjrtError::new(code::CANCELLED, "peer died");
    let broken = client.error_buffer(&bad, BufferType::F32, &[4], 0, None).unwrap();
    let e = broken.ready_event().unwrap().wait().unwrap_err();
    assert_eq!(e.code, code::CANCELLED);
    assert!(e.message.contains("peer died"), "{e}");
    assert!(broken.to_vec().unwrap_err().message.contains("peer died"));
    let (tell, told) = mpsc::channel();
    broken.ready_event().unwrap().on_ready(Box::new(move |r| tell.send(r).unwrap()));
    let e = told.recv_timeout(Duration::from_secs(60)).unwrap().unwrap_err();
    assert!(e.message.contains("peer died"), "{e}");
    let add = compile(&client, "add1");
    let e = match add.execute(&[vec![&broken]], ExecuteOptions::default()) {
        Err(e) => e,
        Ok(run) => run.outputs[0][0].to_vec().unwrap_err(),
    };
    assert!(e.message.contains("peer died"), "{e}");
}

#[test]
fn a_token_parameter_takes_an_empty_pred_and_its_own_output() {
    let Some(plugin) = plugin() else { return };
    let client = client(plugin, 1);
    let text = "module @tok { func.func public @main(%t: !stablehlo.token, %x: tensor<2xf32>) -> \
        (!stablehlo.token, tensor<2xf32>) { %y = stablehlo.add %x, %x : tensor<2xf32> \
        return %t, %y : !stablehlo.token, tensor<2xf32> } }";
    let exe = client.compile(text.as_bytes(), "mlir", &options("add1")).unwrap();
    let meta = exe.meta().unwrap();
    assert_eq!(meta.params[0].element_type, BufferType::Token);
    assert_eq!(meta.outputs[0].element_type, BufferType::Token);
    assert_eq!(meta.outputs[0].global_dims, [0i64; 0]);
    let token = client.buffer_from_slice(&[], BufferType::Pred, &[0], 0, None).unwrap();
    let x = upload(&client, &[1., 2.], &[2], 0);
    let run = exe.execute(&[vec![&token, &x]], ExecuteOptions::default()).unwrap();
    let run = exe.execute(&[vec![&run.outputs[0][0], &run.outputs[0][1]]], ExecuteOptions::default()).unwrap();
    assert_eq!(f32s(&run.outputs[0][1].to_vec().unwrap()), [4., 8.]);
    assert_eq!(run.outputs[0][0].to_vec().unwrap(), [0u8; 0]);
}

#[test]
fn handles_cross_threads() {
    let Some(plugin) = plugin() else { return };
    let client = client(plugin, 8);
    let exe = compile(&client, "add8").per_device().unwrap();
    let start = Instant::now();
    std::thread::scope(|scope| {
        for d in 0..8 {
            let (client, exe) = (client.clone(), exe.clone());
            scope.spawn(move || {
                for i in 0..50 {
                    let x = upload(&client, &[i as f32; 6], &[2, 3], d);
                    let only = ExecuteOptions { only_device: Some(d), ..Default::default() };
                    let run = exe.execute(&[vec![&x]], only).unwrap();
                    run.done[0].wait().unwrap();
                    assert_eq!(f32s(&run.outputs[0][0].to_vec().unwrap()), [i as f32 + 1.; 6]);
                }
            });
        }
    });
    println!("8 threads x 50 runs: {:?}", start.elapsed());
}

pub(crate) fn upload(client: &pw_pjrt::Client, data: &[f32], dims: &[i64], device: usize) -> Buffer {
    client.buffer_from_slice(&bytes_of(data), BufferType::F32, dims, device, None).unwrap()
}
