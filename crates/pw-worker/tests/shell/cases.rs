//! What is shown of the shell.

use std::path::{Path, PathBuf};
use std::process::Command as Process;
use std::time::{Duration, Instant};

use pw_types::*;
use pw_worker::{WorkerError, run};

use crate::controller::{Controller, config};
use crate::{callbacks, programs};

pub(crate) async fn all(plugin: &Path, bench: bool) {
    let cache = Folder::new();
    let unreachable = tokio::spawn(run(config(plugin, &cache.0, "127.0.0.1:1".to_owned(), false)));
    let mut c = Controller::start(plugin, &cache.0, true).await;
    assert_eq!(c.info.devices.len(), 4);
    assert_eq!(c.info.test_targets, ["pw.sleep_us"]);
    if bench {
        rates(&mut c).await;
        return;
    }
    println!("compiles");
    compiles(&mut c).await;
    println!("replicated");
    replicated(&mut c).await;
    println!("sharded");
    sharded(&mut c).await;
    println!("donated");
    donated(&mut c).await;
    println!("copies");
    copies(&mut c).await;
    println!("faults");
    faults(&mut c).await;
    println!("uploads");
    uploads(&mut c).await;
    println!("callbacks");
    callbacks::all(&mut c).await;
    c.send(vec![Command::DefaultLayout { query: 5, dtype: DType::F32, dims: vec![2, 3] }]).await;
    assert_eq!(c.report().await, Report::DefaultLayout { query: 5, result: Ok("{1,0}".to_owned()) });
    println!("described");
    described(&mut c).await;
    println!("child_dies");
    child_dies(&mut c).await;
    println!("ends");
    chain_breaks(c).await;
    targets_are_refused(plugin, &cache.0).await;
    controller_lost(plugin, &cache.0).await;
    let error = unreachable.await.expect("no panic").expect_err("nobody there");
    assert!(error.to_string().starts_with("worker cannot reach controller at 127.0.0.1:1"), "{error}");
}

/// The text is that of the plugin's own program, collectives included, whichever form runs.
async fn described(c: &mut Controller) {
    let program = c.compile(50, programs::sum(4), &[0, 1, 2, 3]).await.expect("it compiles");
    c.send(vec![Command::Describe { query: 6, fingerprint: program.fingerprint.clone(), question: Question::Text }]).await;
    match c.report().await {
        Report::Described { query: 6, result: Ok(Description::Text(text)) } => {
            assert!(text.starts_with("HloModule jit_sum, is_scheduled=true") && text.contains("all-reduce("), "{text}");
        }
        other => panic!("{other:?}"),
    }
    c.send(vec![Command::Describe { query: 7, fingerprint: program.fingerprint.clone(), question: Question::Cost }]).await;
    match c.report().await {
        Report::Described { query: 7, result: Ok(Description::Cost(costs)) } => {
            assert!(costs.iter().any(|cost| cost.name == "flops" && cost.value >= 1.0), "{costs:?}");
        }
        other => panic!("{other:?}"),
    }
    c.send(vec![Command::Describe { query: 8, fingerprint: b"nothing".to_vec().into(), question: Question::Text }]).await;
    match c.report().await {
        Report::Described { query: 8, result: Err(status) } => assert_eq!(status.code, Code::NotFound),
        other => panic!("{other:?}"),
    }
}

struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        Folder(std::env::temp_dir().join(format!("pathways-worker-test-{}", std::process::id())))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

const ALL: [u32; 4] = [0, 1, 2, 3];

fn everywhere() -> Vec<(u32, Option<Region>)> {
    ALL.map(|d| (d, None)).to_vec()
}

/// Two elements for each device.
fn split() -> Vec<(u32, Option<Region>)> {
    ALL.map(|d| (d, Some(Region { start: vec![2 * i64::from(d)], dims: vec![2] }))).to_vec()
}

async fn compiles(c: &mut Controller) {
    let report = c.program(1, programs::add_one(4), &ALL).await;
    assert_eq!((report.name.as_str(), report.partitions, report.collectives), ("jit_add_one", 4, 0));
    assert_eq!((report.parameters[0].dtype, &report.parameters[0].shard_dims[..]), (DType::F32, &[4][..]));
    assert_eq!(report.outputs[0].memory_kind, "device");
    assert_eq!(report.fingerprint.len(), 32);
    // Out of the cache.
    assert_eq!(c.compile(1, programs::add_one(4), &ALL).await, Ok(report.clone()));
    let other = c.compile(2, programs::add_one(4), &[3, 2, 1, 0]).await.expect("it compiles");
    assert_ne!(report.fingerprint, other.fingerprint);
    let broken = c.compile(3, b"module { no }".to_vec(), &ALL).await.unwrap_err();
    assert!(!broken.message.is_empty() && broken.code != Code::Unavailable, "{broken}");
    c.send(vec![Command::Load { executable: ExecutableId(9), fingerprint: vec![7; 32].into(), gang: None }]).await;
    let Report::Loaded { result: Err(missing), .. } = c.report().await else { panic!("nothing to load") };
    assert_eq!(missing.code, Code::NotFound);
}

async fn replicated(c: &mut Controller) {
    let x = c.upload(&[1.0, 2.0, 3.0, 4.0], &[4], everywhere()).await;
    let (y, launch) = c.launch(1, &[(x, 4, false)]);
    let (z, again) = c.launch(1, &[(y, 4, false)]);
    c.send(vec![launch, again]).await;
    assert!(c.finished(y).await.expect("it runs") > 0);
    c.finished(z).await.expect("it runs");
    for shard in 0..4 {
        assert_eq!(c.fetch(z, &[4], None, &[(shard, None)]).await, Ok(vec![3.0, 4.0, 5.0, 6.0]));
    }
    assert_eq!(c.fetch(x, &[4], None, &[(2, None)]).await, Ok(vec![1.0, 2.0, 3.0, 4.0]));
    let (wrong, launch) = c.launch(1, &[(x, 3, false)]);
    c.send(vec![launch]).await;
    assert_eq!(c.finished(wrong).await.unwrap_err().code, Code::InvalidArgument);
    c.free(&[x, y, z, wrong]).await;
}

async fn sharded(c: &mut Controller) {
    let report = c.program(10, programs::sum(4), &ALL).await;
    assert!(report.collectives > 0);
    assert_eq!((&report.parameters[0].dims[..], &report.parameters[0].shard_dims[..]), (&[8][..], &[2][..]));
    assert!(report.parameters[0].op_sharding.is_some());
    let data: Vec<f32> = (0..8u8).map(f32::from).collect();
    let x = c.upload(&data, &[8], split()).await;
    let (y, launch) = c.launch(10, &[(x, 4, false)]);
    c.send(vec![launch]).await;
    c.finished(y).await.expect("it runs");
    assert_eq!(c.fetch(y, &[], None, &[(3, None)]).await, Ok(vec![28.0]));
    let pieces = split();
    assert_eq!(c.fetch(x, &[8], None, &pieces).await, Ok(data.clone()));
    let strided = c.fetch(x, &[8], Some(vec![8]), &pieces).await.expect("fetched");
    assert_eq!(strided.len(), 15);
    assert_eq!(strided.iter().copied().step_by(2).collect::<Vec<_>>(), data);
    // Members that do not depend on one another run in both ways after some launches; the values stay.
    c.program(11, programs::count_up(4), &ALL).await;
    for _ in 0..12 {
        let (y, launch) = c.launch(11, &[]);
        c.send(vec![launch]).await;
        c.finished(y).await.expect("it runs");
        assert_eq!(c.fetch(y, &[8], None, &pieces).await, Ok(data.clone()));
        c.free(&[y]).await;
    }
    // Columns of a matrix: strided regions.
    let matrix: Vec<f32> = (0..12u8).map(f32::from).collect();
    let columns = [0u32, 1].map(|d| (d, Some(Region { start: vec![0, 2 * i64::from(d)], dims: vec![3, 2] })));
    let m = c.upload(&matrix, &[3, 4], columns.to_vec()).await;
    assert_eq!(c.fetch(m, &[3, 2], None, &[(1, None)]).await, Ok(vec![2.0, 3.0, 6.0, 7.0, 10.0, 11.0]));
    assert_eq!(c.fetch(m, &[3, 4], None, &columns).await, Ok(matrix));
    c.free(&[x, y, m]).await;
}

async fn donated(c: &mut Controller) {
    let report = c.program(12, programs::donating(4), &ALL).await;
    assert_eq!(report.donated, [0]);
    let mut x = c.upload(&[0.0; 8], &[8], split()).await;
    for _ in 0..50 {
        let (y, launch) = c.launch(12, &[(x, 4, true)]);
        c.send(vec![launch, Command::Free { buffers: vec![BufferId { run: x, output: 0 }] }]).await;
        c.finished(y).await.expect("it runs");
        x = y;
    }
    // Read in place while the storage is to be donated: the download and the result are both right.
    let order = c.order();
    let pieces = vec![HostReadPiece { source: ShardId { buffer: BufferId { run: x, output: 0 }, shard: 0 }, region: None }];
    let (buffer, dtype) = (Handle(1 << 40), DType::F32);
    let read = Command::HostRead(HostRead { order, buffer, dtype, dims: vec![2], byte_strides: None, pieces });
    let (y, launch) = c.launch(12, &[(x, 4, true)]);
    c.send(vec![read, launch]).await;
    c.finished(order.run).await.expect("read");
    c.finished(y).await.expect("it runs");
    let (wrong, launch) = c.launch(12, &[(x, 4, false)]);
    c.send(vec![launch]).await;
    assert_eq!(c.finished(wrong).await.unwrap_err().code, Code::FailedPrecondition);
    assert_eq!(c.fetch(y, &[2], None, &[(1, None)]).await, Ok(vec![51.0; 2]));
    // Not donated although the program could.
    let (z, launch) = c.launch(12, &[(y, 4, false)]);
    c.send(vec![launch]).await;
    c.finished(z).await.expect("it runs");
    assert_eq!(c.fetch(y, &[2], None, &[(1, None)]).await, Ok(vec![51.0; 2]));
    c.free(&[x, y, z, wrong]).await;
}

async fn copies(c: &mut Controller) {
    let x = c.upload(&[1.0, 2.0, 3.0, 4.0], &[4], vec![(0, None), (1, None)]).await;
    for (memory_kind, devices) in [(None, [2, 3]), (Some("pinned_host"), [1, 0]), (None, [0, 1])] {
        let order = c.order();
        let items = (0..)
            .zip(devices)
            .map(|(shard, device)| CopyItem { source: ShardId { buffer: BufferId { run: x, output: 0 }, shard }, device });
        let memory_kind = memory_kind.map(str::to_owned);
        c.send(vec![Command::Copy(CopyShards { order, items: items.collect(), memory_kind })]).await;
        c.finished(order.run).await.expect("copied");
        assert_eq!(c.fetch(order.run, &[4], None, &[(1, None)]).await, Ok(vec![1.0, 2.0, 3.0, 4.0]));
        c.free(&[order.run]).await;
    }
    c.free(&[x]).await;
}

async fn faults(c: &mut Controller) {
    c.program(20, programs::sleep(-1), &ALL).await;
    c.program(21, programs::sleep(2000), &ALL).await;
    let x = c.upload(&[1.0; 4], &[4], everywhere()).await;
    let (bad, first) = c.launch(20, &[(x, 4, false)]);
    let (depends, second) = c.launch(1, &[(bad, 4, false)]);
    let (fine, third) = c.launch(1, &[(x, 4, false)]);
    c.send(vec![first, second, third]).await;
    let status = c.finished(bad).await.unwrap_err();
    assert!(status.message.contains("jit_sleep") && status.message.contains("us = -1"), "{status}");
    assert_eq!(c.finished(depends).await, Err(status.clone()));
    c.finished(fine).await.expect("not touched by it");
    assert_eq!(c.fetch(depends, &[4], None, &[(0, None)]).await, Err(status));
    // Cancel ends what has not been handed over; more than one thread may hold has been sent.
    let mut runs = Vec::new();
    let mut commands = Vec::new();
    for _ in 0..40 {
        let (run, launch) = c.launch(21, &[(x, 4, false)]);
        runs.push(run);
        commands.push(launch);
    }
    commands.push(Command::Cancel { runs: runs.clone(), status: Status::new(Code::Cancelled, "nobody wants it") });
    c.send(commands).await;
    let (mut done, mut cancelled) = (0, 0);
    for _ in 0..40 {
        match c.report().await {
            Report::Finished { result: Ok(()), device_ns, .. } if device_ns >= 2_000_000 => done += 1,
            Report::Finished { result: Err(status), .. } if status.code == Code::Cancelled => cancelled += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((done, cancelled), (32, 8));
    runs.extend([x, bad, depends, fine]);
    c.free(&runs).await;
}

/// A session that goes while the others stay.
const LEAVER: SessionId = SessionId(78);

/// Larger than one slice of the data plane; zero-size; too short; of a session that goes.
async fn uploads(c: &mut Controller) {
    let data: Vec<f32> = (0..1_000_000u32).map(|i| i as f32).collect();
    let x = c.upload(&data, &[1000, 1000], everywhere()).await;
    assert_eq!(c.fetch(x, &[1000, 1000], None, &[(3, None)]).await, Ok(data));
    assert_eq!(c.memory, [4_000_000; 4], "all that was made before is gone");
    let empty = c.upload(&[], &[0, 3], vec![(1, None)]).await;
    assert_eq!(c.fetch(empty, &[0, 3], None, &[(0, None)]).await, Ok(vec![]));
    c.edge.attach(LEAVER).await.expect("attached");
    let mut write = |buffer: u64| {
        let order = c.order();
        let targets = vec![HostWriteTarget { shard: 0, device: 0, region: None }];
        let source = HostWriteSource { buffer: Handle(buffer), dtype: DType::F32, dims: vec![4], byte_strides: None, targets };
        (order.run, Command::HostWrite(HostWrite { order, sender: LEAVER, sources: vec![source], memory_kind: None, shards: 1 }))
    };
    let (short, command) = write(1 << 41);
    let (never, second) = write(1 << 42);
    c.send(vec![command, second]).await;
    c.edge.put_begin(LEAVER, Handle(1 << 41), 8).await.expect("begun");
    c.edge.put_chunk(LEAVER, Handle(1 << 41), vec![0; 8].into()).await.expect("sent");
    let status = c.finished(short).await.unwrap_err();
    assert!(status.message.contains("has 8 bytes, f32[4] needs 16"), "{status}");
    c.edge.detach(LEAVER).await.expect("detached");
    assert_eq!(c.finished(never).await.unwrap_err().code, Code::Cancelled);
    c.free(&[x, empty, short, never]).await;
    while c.memory.iter().any(|&bytes| bytes > 0) {
        c.receive().await;
        c.send(vec![Command::DefaultLayout { query: 0, dtype: DType::F32, dims: vec![] }]).await;
        c.report().await;
    }
}

fn compile_children() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").expect("the threads of this process").flatten();
    let children = tasks.flat_map(|task| std::fs::read_to_string(task.path().join("children")).unwrap_or_default().into_bytes());
    String::from_utf8_lossy(&children.collect::<Vec<_>>()).split_whitespace().map(str::to_owned).collect()
}

fn signal(name: &str, pid: &str) {
    assert!(Process::new("kill").args([name, pid]).status().expect("kill").success());
}

/// A child that is stopped would outlive this process.
struct Unstopped;

impl Drop for Unstopped {
    fn drop(&mut self) {
        for pid in compile_children() {
            let _ = Process::new("kill").args(["-CONT", &pid]).status();
        }
    }
}

async fn child_dies(c: &mut Controller) {
    let _cleared = Unstopped;
    // Several workers of this process have one; all of them die.
    for pid in compile_children() {
        signal("-STOP", &pid);
    }
    let killer = tokio::spawn(async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        compile_children().iter().for_each(|pid| signal("-KILL", pid));
    });
    let status = c.compile(30, programs::add_one(4), &[1, 0, 2, 3]).await.unwrap_err();
    killer.await.expect("killed");
    assert_eq!(status.code, Code::Unavailable);
    assert!(status.message.contains("compile process died") && status.message.contains("signal"), "{status}");
    c.compile(30, programs::add_one(4), &[1, 0, 2, 3]).await.expect("the next child does it");
    // One that dies while it is idle costs nothing.
    compile_children().iter().for_each(|pid| signal("-KILL", pid));
    tokio::time::sleep(Duration::from_millis(100)).await;
    c.compile(31, programs::add_one(4), &[1, 0, 3, 2]).await.expect("the next child does it");
}

async fn chain_breaks(mut c: Controller) {
    c.order();
    let (_, launch) = c.launch(1, &[]);
    c.send(vec![launch]).await;
    let error = c.worker.await.expect("no panic").expect_err("it ends");
    assert!(matches!(&error, WorkerError::Fatal(text) if text.contains("broken command chain")), "{error}");
}

async fn targets_are_refused(plugin: &Path, cache: &Path) {
    let mut c = Controller::start(plugin, cache, false).await;
    assert!(c.info.test_targets.is_empty());
    let status = c.compile(1, programs::sleep(1), &ALL).await.unwrap_err();
    assert_eq!(status.code, Code::InvalidArgument);
    assert!(status.message.contains("pw.sleep_us"), "{status}");
    c.worker.abort();
}

async fn controller_lost(plugin: &Path, cache: &Path) {
    let worker = {
        let mut c = Controller::start(plugin, cache, false).await;
        // The others go here, and the connections with them.
        std::mem::replace(&mut c.worker, tokio::spawn(async { Ok(()) }))
    };
    let error = worker.await.expect("no panic").expect_err("it ends");
    assert!(matches!(error, WorkerError::Lost { .. }), "{error}");
}

/// Not a test: how fast it goes here and now.
async fn rates(c: &mut Controller) {
    c.program(1, programs::add_one(4), &ALL).await;
    c.program(2, programs::add_one(1), &[0]).await;
    c.program(3, programs::sum(4), &ALL).await;
    let x = c.upload(&[1.0; 4], &[4], everywhere()).await;
    let s = c.upload(&[1.0; 8], &[8], split()).await;
    for (name, program, source, shards, chained) in
        [("1 device, chained", 2, x, 1, true), ("4 devices, chained", 1, x, 4, true), ("4 devices, all-reduce", 3, s, 4, false)]
    {
        for (batch, count) in [(1usize, 2000usize), (16, 4000)] {
            let start = Instant::now();
            let mut last = source;
            let mut device_ns = 0;
            for _ in 0..count / batch {
                let mut commands = Vec::new();
                for _ in 0..batch {
                    let (run, launch) = c.launch(program, &[(last, shards, false)]);
                    commands.push(launch);
                    if last != source {
                        commands.push(Command::Free { buffers: vec![BufferId { run: last, output: 0 }] });
                    }
                    if chained {
                        last = run;
                    }
                }
                c.send(commands).await;
                for _ in 0..batch {
                    match c.report().await {
                        Report::Finished { result: Ok(()), device_ns: ns, .. } => device_ns += ns,
                        other => panic!("{other:?}"),
                    }
                }
            }
            let us = start.elapsed().as_secs_f64() * 1e6 / count as f64;
            println!("{name}, {batch} at a time: {us:.1} us per launch, device {:.1} us", device_ns as f64 / count as f64 / 1e3);
        }
    }
    let bytes = 256 << 20;
    let data = vec![1.0f32; bytes / 4];
    for _ in 0..3 {
        let start = Instant::now();
        let big = c.upload(&data, &[(bytes / 4) as i64], vec![(0, None)]).await;
        let up = start.elapsed();
        let start = Instant::now();
        let back = c.fetch(big, &[(bytes / 4) as i64], None, &[(0, None)]).await.expect("fetched");
        println!("256 MiB: up {up:.1?}, down {:.1?}", start.elapsed());
        assert_eq!(back.len(), data.len());
        c.free(&[big]).await;
    }
}
