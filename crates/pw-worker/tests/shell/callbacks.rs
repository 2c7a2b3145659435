//! Host callbacks: what reaches the edge, and how a call ends.

use bytes::Bytes;
use pw_types::*;

use crate::controller::{Controller, SESSION};
use crate::programs;

const FUNCTION: i64 = 5;

pub(crate) async fn all(c: &mut Controller) {
    let x = c.upload(&[1.0, 2.0, 3.0, 4.0], &[4], vec![(0, None)]).await;
    let report = c.program(60, programs::host_callback(1, FUNCTION), &[0]).await;
    assert!(report.host_callbacks && report.collectives == 0);
    let mut call = (0..).map(|number| Handle(FIRST_CALL_HANDLE | number));
    let mut next = || call.next().expect("there are many");

    // The plugin's own form.
    let (run, launch) = c.launch(60, &[(x, 1, false)]);
    c.send(vec![launch]).await;
    let name = next();
    assert_eq!(taken(c, name).await, encoded(&[1.0, 2.0, 3.0, 4.0]));
    answer(c, name, &[5.0, 6.0, 7.0, 8.0]).await;
    c.finished(run).await.expect("it runs");
    assert_eq!(c.fetch(run, &[4], None, &[(0, None)]).await, Ok(vec![5.0, 6.0, 7.0, 8.0]));

    // What the function raises, and an answer of another size.
    let (raises, launch) = c.launch(60, &[(x, 1, false)]);
    c.send(vec![launch]).await;
    let name = next();
    taken(c, name).await;
    c.edge.put_abort(SESSION, name, Status::internal("ValueError: user bug")).await.expect("sent");
    assert!(c.finished(raises).await.unwrap_err().message.contains("ValueError: user bug"));
    let (short, launch) = c.launch(60, &[(x, 1, false)]);
    c.send(vec![launch]).await;
    let name = next();
    taken(c, name).await;
    answer(c, name, &[5.0]).await;
    assert!(c.finished(short).await.unwrap_err().message.contains("4 bytes instead of 16"));
    // Nobody waits for this one.
    answer(c, name, &[5.0]).await;

    // Every device for itself, each on its own thread.
    let all = [0, 1, 2, 3];
    let y = c.upload(&[1.0, 2.0, 3.0, 4.0], &[4], all.map(|device| (device, None)).to_vec()).await;
    c.program(61, programs::host_callback(4, FUNCTION), &all).await;
    let (each, launch) = c.launch(61, &[(y, 4, false)]);
    c.send(vec![launch]).await;
    let names = all.map(|_| next());
    for name in names {
        taken(c, name).await;
    }
    for (name, value) in names.into_iter().zip([0.0, 1.0, 2.0, 3.0]) {
        answer(c, name, &[value; 4]).await;
    }
    c.finished(each).await.expect("it runs");
    let mut got = Vec::new();
    for shard in all {
        got.push(c.fetch(each, &[4], None, &[(shard, None)]).await.expect("it is there")[0]);
    }
    got.sort_by(f32::total_cmp);
    assert_eq!(got, [0.0, 1.0, 2.0, 3.0]);

    // The client goes while it is called, and is gone for what was queued behind.
    let (first, launch) = c.launch(60, &[(x, 1, false)]);
    let (second, queued) = c.launch(60, &[(x, 1, false)]);
    c.send(vec![launch, queued]).await;
    taken(c, next()).await;
    c.edge.detach(SESSION).await.expect("sent");
    for run in [first, second] {
        assert_eq!(c.finished(run).await.unwrap_err().code, Code::Cancelled);
    }
    c.edge.attach(SESSION).await.expect("sent");
    c.free(&[x, y, run, raises, short, each, first, second]).await;
}

async fn taken(c: &Controller, name: Handle) -> Vec<u8> {
    c.downloads.take(&c.edge, name).await.expect("a call")
}

async fn answer(c: &Controller, name: Handle, values: &[f32]) {
    let bytes: Bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>().into();
    c.edge.put_begin(SESSION, name, bytes.len() as u64).await.expect("begun");
    c.edge.put_chunk(SESSION, name, bytes).await.expect("sent");
}

/// A call with one operand: number, count, type F32, rank and dimension, and the elements.
fn encoded(values: &[f32]) -> Vec<u8> {
    let mut call = [FUNCTION.to_le_bytes(), 1u64.to_le_bytes()].concat();
    call.extend([11u32.to_le_bytes(), 1u32.to_le_bytes()].concat());
    call.extend((values.len() as u64).to_le_bytes());
    call.extend(values.iter().flat_map(|x| x.to_le_bytes()));
    call
}
