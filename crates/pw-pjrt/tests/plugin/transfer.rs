//! Uploads, downloads, views.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use pw_pjrt::{AlignedBlock, Buffer, BufferType, Client, ClientOptions, ExecuteOptions, HostBytes};

use crate::run::upload;
use crate::{bytes_of, client, compile, f32s, is_new, plugin};

fn host(client: &Client, data: HostBytes, dims: &[i64]) -> Buffer {
    client.buffer_from_host(data, BufferType::F32, dims, None, 0, None).unwrap()
}

/// Waits until nobody holds the block any more.
fn wait_released(block: &Weak<AlignedBlock>) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while block.strong_count() > 0 {
        assert!(Instant::now() < deadline, "the block is still held");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn an_aligned_block_is_used_in_place_and_kept() {
    let Some(plugin) = plugin() else { return };
    let client = client(plugin, 1);
    let block = AlignedBlock::from_slice(&bytes_of(&[1.5; 64]));
    let at = block.as_ptr() as usize;
    let buffer = host(&client, HostBytes::owned(block), &[64]);
    buffer.ready_event().unwrap().wait().unwrap();
    assert_eq!(buffer.unsafe_pointer().unwrap(), at);
    assert_eq!(f32s(&buffer.to_vec().unwrap()), [1.5; 64]);

    // Parts of one block, one of them unaligned: that one is copied.
    let block = Arc::new(AlignedBlock::from_slice(&bytes_of(&[2.5; 64])));
    let weak = Arc::downgrade(&block);
    let at = block.as_ptr() as usize;
    let even = host(&client, HostBytes::shared(block.clone(), 64..128).unwrap(), &[16]);
    let odd = host(&client, HostBytes::shared(block.clone(), 4..68).unwrap(), &[16]);
    drop(block);
    for buffer in [&even, &odd] {
        assert_eq!(f32s(&buffer.to_vec().unwrap()), [2.5; 16]);
    }
    assert_eq!(even.unsafe_pointer().unwrap(), at + 64);
    assert_ne!(odd.unsafe_pointer().unwrap(), at + 4);
    drop(odd);
    assert_eq!(weak.strong_count(), 1);
    even.delete().unwrap();
    wait_released(&weak);
}

#[test]
fn a_shared_block_is_never_written_and_outlives_a_run() {
    let Some(plugin) = plugin() else { return };
    let options = ClientOptions { device_count: Some(1), asynchronous: Some(true), process_id: None };
    let client = plugin.create_client(&options).unwrap();
    let donate = compile(&client, "donate1");
    let block = Arc::new(AlignedBlock::from_slice(&bytes_of(&[1.; 64])));
    let a = host(&client, HostBytes::shared(block.clone(), 0..256).unwrap(), &[64]);
    let b = upload(&client, &[2.; 64], &[64], 0);
    let run = donate.execute(&[vec![&a, &b]], ExecuteOptions::default()).unwrap();
    run.done[0].wait().unwrap();
    assert_eq!(f32s(&run.outputs[0][0].to_vec().unwrap()), [3.; 64]);
    assert_eq!(f32s(&block), [1.; 64], "a shared block was written");
    assert_ne!(run.outputs[0][0].unsafe_pointer().unwrap(), block.as_ptr() as usize);

    // An exclusive one is taken over.
    let block = AlignedBlock::from_slice(&bytes_of(&[1.; 64]));
    let at = block.as_ptr() as usize;
    let a = host(&client, HostBytes::owned(block), &[64]);
    let run = donate.execute(&[vec![&a, &b]], ExecuteOptions::default()).unwrap();
    run.done[0].wait().unwrap();
    assert_eq!(run.outputs[0][0].unsafe_pointer().unwrap(), at);
    drop(a);
    assert_eq!(f32s(&run.outputs[0][0].to_vec().unwrap()), [3.; 64]);

    // The handle goes while a long run still reads the block.
    let heavy = compile(&client, "heavy");
    let block = Arc::new(AlignedBlock::from_slice(&bytes_of(&vec![0.01; 256 * 256])));
    let weak = Arc::downgrade(&block);
    let x = host(&client, HostBytes::shared(block, 0..256 * 1024).unwrap(), &[256, 256]);
    let run = heavy.execute(&[vec![&x]], ExecuteOptions::default()).unwrap();
    drop(x);
    if !run.done[0].is_ready() {
        assert_eq!(weak.strong_count(), 1, "released while a run reads it");
    }
    run.done[0].wait().unwrap();
    wait_released(&weak);
}

#[test]
fn strided_arrays_are_uploaded_dense() {
    let Some(plugin) = plugin() else { return };
    let client = client(plugin, 1);
    let data = HostBytes::copied(&bytes_of(&[0., 1., 2., 3., 4., 5.]));
    // A column-major 2x3 array.
    let buffer = client.buffer_from_host(data, BufferType::F32, &[2, 3], Some(&[4, 8]), 0, None).unwrap();
    assert_eq!(f32s(&buffer.to_vec().unwrap()), [0., 2., 4., 1., 3., 5.]);
    // One row for all.
    let data = HostBytes::copied(&bytes_of(&[7., 8.]));
    let buffer = client.buffer_from_host(data, BufferType::F32, &[3, 2], Some(&[0, 4]), 0, None).unwrap();
    assert_eq!(f32s(&buffer.to_vec().unwrap()), [7., 8., 7., 8., 7., 8.]);
    // Every second element.
    let data = HostBytes::copied(&bytes_of(&[0., 1., 2., 3., 4.]));
    let buffer = client.buffer_from_host(data, BufferType::F32, &[3], Some(&[8]), 0, None).unwrap();
    assert_eq!(f32s(&buffer.to_vec().unwrap()), [0., 2., 4.]);
    let data = HostBytes::copied(&bytes_of(&[0., 1., 2., 3.]));
    assert!(client.buffer_from_host(data, BufferType::F32, &[3], Some(&[8]), 0, None).is_err());
}

#[test]
fn odd_types_and_shapes_go_there_and_back() {
    let Some(plugin) = plugin() else { return };
    let client = client(plugin, 1);
    let round = |element_type, dims: &[i64], bytes: &[u8]| {
        let owned = HostBytes::copied(bytes);
        let buffer = client.buffer_from_host(owned, element_type, dims, None, 0, None).unwrap();
        assert_eq!(buffer.element_type().unwrap(), element_type);
        assert_eq!(buffer.dims().unwrap(), dims);
        assert_eq!(buffer.host_size().unwrap(), bytes.len());
        assert_eq!(buffer.to_vec().unwrap(), bytes);
        buffer
    };
    round(BufferType::Pred, &[3], &[1, 0, 1]);
    round(BufferType::Pred, &[0], &[]);
    round(BufferType::F32, &[4, 0, 2], &[]);
    round(BufferType::F64, &[], &1.25f64.to_le_bytes());
    round(BufferType::Bf16, &[2], &[1, 2, 3, 4]);
    round(BufferType::C128, &[1], &[9; 16]);
    round(BufferType::F8E4M3Fn, &[2, 2], &[1, 2, 3, 4]);
    let s4 = round(BufferType::S4, &[3, 5], &[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6]);
    assert_eq!(s4.on_device_size().unwrap(), 8);
    assert!(s4.host_view().unwrap().is_none());
    let exe = compile(&client, "int4");
    let run = exe.execute(&[vec![&s4]], ExecuteOptions::default()).unwrap();
    let out = run.outputs[0][0].to_vec().unwrap();
    let low: Vec<u8> = out.iter().map(|b| b & 0xf).collect();
    assert_eq!(low, [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7]);
    let e = client.buffer_from_slice(&[], BufferType::Token, &[], 0, None).unwrap_err();
    assert!(e.message.contains("token"), "{e}");
    assert!(client.buffer_from_slice(&[0; 3], BufferType::F32, &[1], 0, None).is_err());
    assert!(client.buffer_from_slice(&[0; 4], BufferType::F32, &[1], 7, None).is_err());
    let e = client.buffer_from_slice(&[0; 4], BufferType::F32, &[1], 0, Some("disk")).unwrap_err();
    assert!(e.message.contains("no memory kind \"disk\""), "{e}");
}

#[test]
fn memories_and_copies() {
    let Some(plugin) = plugin() else { return };
    let client = client(plugin, 2);
    let default = client.devices()[0].default_memory_kind.clone();
    let x = upload(&client, &[1., 2.], &[2], 0);
    assert_eq!(x.memory_kind().unwrap(), default);
    assert_eq!(x.on_device_size().unwrap(), 8);
    let there = x.copy_to_device(1).unwrap();
    assert_eq!(there.device_index().unwrap(), 1);
    assert_eq!(f32s(&there.to_vec().unwrap()), [1., 2.]);
    if is_new(plugin) {
        let pinned = x.copy_to_memory(1, Some("pinned_host")).unwrap();
        assert_eq!(pinned.memory_kind().unwrap(), "pinned_host");
        assert_eq!(f32s(&pinned.to_vec().unwrap()), [1., 2.]);
        let pinned = client.buffer_from_slice(&bytes_of(&[3.]), BufferType::F32, &[1], 0, Some("pinned_host")).unwrap();
        assert_eq!(pinned.memory_kind().unwrap(), "pinned_host");
        assert_eq!(f32s(&pinned.to_vec().unwrap()), [3.]);
    }
    x.delete().unwrap();
    assert!(x.is_deleted().unwrap());
    assert!(x.to_vec().is_err() && x.host_view().is_err() && x.copy_to_device(1).is_err());
    assert_eq!(x.dims().unwrap(), [2]);
}

#[test]
fn a_view_holds_the_bytes_against_delete_and_donation() {
    let Some(plugin) = plugin() else { return };
    let client = client(plugin, 1);
    let x = upload(&client, &[5.; 64], &[64], 0);
    let view = x.host_view().unwrap().unwrap();
    assert_eq!(f32s(&view), [5.; 64]);
    let donate = compile(&client, "donate1");
    let y = upload(&client, &[2.; 64], &[64], 0);
    let run = donate.execute(&[vec![&x, &y]], ExecuteOptions::default()).unwrap();
    run.done[0].wait().unwrap();
    assert_ne!(run.outputs[0][0].unsafe_pointer().unwrap(), view.as_ptr() as usize);
    assert_eq!(f32s(&run.outputs[0][0].to_vec().unwrap()), [7.; 64]);
    // The run copied instead of taking it over.
    assert!(!x.is_deleted().unwrap());
    assert_eq!(f32s(&view), [5.; 64]);
    drop(view);

    let x = upload(&client, &[6.; 64], &[64], 0);
    let view = x.host_view().unwrap().unwrap();
    x.delete().unwrap();
    let other = upload(&client, &[7.; 64], &[64], 0);
    assert_eq!(f32s(&view), [6.; 64]);
    drop((x, other));
    assert_eq!(f32s(&view), [6.; 64]);
    let empty = client.buffer_from_slice(&[], BufferType::F32, &[0], 0, None).unwrap();
    assert_eq!(empty.host_view().unwrap().unwrap().len(), 0);
}

/// The plugin counts views without a lock: a view that is lost there ends the process when the buffer goes.
#[test]
fn many_threads_view_one_buffer() {
    let Some(plugin) = plugin() else { return };
    let client = client(plugin, 1);
    let values: Vec<f32> = (0..64u8).map(f32::from).collect();
    for _ in 0..20 {
        let x = upload(&client, &values, &[64], 0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..2000 {
                        assert_eq!(x.host_view().unwrap().unwrap().len(), 4 * values.len());
                    }
                });
            }
        });
    }
}
