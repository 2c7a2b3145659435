//! `pathways bench transfer`.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::lab::{Client, Cluster, Lab};
use super::machine::{self, Watch};
use super::report::{Spread, Table, goal, number};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    pub(super) common: super::Common,
    /// MiB of the large array
    #[arg(long, value_name = "MIB", default_value_t = 512)]
    mib: u64,
    /// Number of the small arrays
    #[arg(long, value_name = "N", default_value_t = 5000)]
    arrays: u64,
    /// Bytes of each small array, over the devices of a worker
    #[arg(long, value_name = "BYTES", default_value_t = 4096)]
    bytes_each: u64,
    /// Devices of each of the two workers
    #[arg(long, value_name = "D", default_value_t = 4)]
    devices: u32,
}

/// What one write of the raw stream takes.
const RAW_WRITE: usize = 1 << 20;

/// Bytes that the payload may grow by on its way: headers of TCP and ours, commands and answers.
const LINK_GOAL: f64 = 1.02;

pub(super) fn run(args: &Args, lab: &Lab) -> Result<Value> {
    let cluster = Cluster::with_workers(lab, 2, args.devices, &[])?;
    let mut client = Client::of(lab, &cluster, "moves", "moves.py", &[])?;
    let prepared = json!({
        "do": "prepare", "devices": args.devices, "mib": args.mib, "arrays": args.arrays, "bytes_each": args.bytes_each
    });
    client.ask(&prepared)?;
    let large_bytes = args.mib << 20;
    let mut raw = RawStream::open(large_bytes as usize)?;
    raw.run()?;
    let mut own: Vec<u32> = cluster.worker_pids();
    own.extend([cluster.controller_pid(), client.pid(), std::process::id()]);

    let (mut ours, mut theirs, mut many, mut equal, mut link) = (Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let (mut quiet, mut windows) = (0, 0);
    let mut seconds = |what: &str| -> Result<(f64, f64)> {
        let watch = Watch::start(&own);
        let answer = client.ask(&json!({"do": "move", "what": what}))?;
        Ok((answer["seconds"].as_f64().unwrap_or(f64::NAN), watch.others()))
    };
    for _ in 0..lab.rounds {
        let before = machine::loopback_bytes();
        let (taken, others) = seconds("large")?;
        if let (Some(before), Some(after)) = (before, machine::loopback_bytes()) {
            link.push(after.saturating_sub(before) as f64 / large_bytes as f64);
        }
        ours.push(large_bytes as f64 / 1e9 / taken);
        theirs.push(large_bytes as f64 / 1e9 / raw.run()?);
        let (small, small_others) = seconds("many")?;
        let (one, one_others) = seconds("equal")?;
        many.push(small);
        equal.push(one);
        quiet += [others, small_others, one_others].into_iter().filter(|&o| machine::is_quiet(o)).count();
        windows += 3;
    }
    drop(client);

    let median = |values: &[f64]| Spread::of(values.iter().copied()).median;
    let (rate, cost) = (Spread::of_ratios(&ours, &theirs), Spread::of_ratios(&many, &equal));
    println!("\nfrom worker to worker over loopback, {} devices each, medians of {} rounds", args.devices, lab.rounds);
    let mut table = Table::new(&["", "pathways", "beside it", "ratio (least to greatest)", "goal"]);
    table.row(vec![
        format!("one array of {} MiB, GB/s", args.mib),
        number(median(&ours)),
        format!("raw TCP {}", number(median(&theirs))),
        rate.text(),
        goal("≥ 0.9", rate.median >= 0.9),
    ]);
    table.row(vec![
        format!("{} arrays of {} B, ms", args.arrays, args.bytes_each),
        number(median(&many) * 1e3),
        format!("one array of as many bytes {}", number(median(&equal) * 1e3)),
        cost.text(),
        goal("≤ 3", cost.median <= 3.0),
    ]);
    table.print();
    if !link.is_empty() {
        let link = Spread::of(link.iter().copied());
        println!(
            "bytes over loopback for each byte of the large array: {}; through controller or client they would be 2 or more; {}",
            link.text(),
            goal("≤ 1.02", link.median <= LINK_GOAL)
        );
    }
    println!("quiet windows: {quiet} of {windows}");
    Ok(json!({
        "bench": "transfer", "rounds": lab.rounds, "quick": lab.quick, "mib": args.mib, "arrays": args.arrays,
        "gb_per_s": ours, "raw_gb_per_s": theirs, "many_s": many, "equal_s": equal, "link_bytes_per_byte": link
    }))
}

/// One stream from a thread of this process to another, each with memory that it has used before.
struct RawStream {
    send: TcpStream,
    receive: TcpStream,
    source: Vec<u8>,
    target: Vec<u8>,
}

impl RawStream {
    fn open(bytes: usize) -> Result<RawStream> {
        let listener = TcpListener::bind("127.0.0.1:0").context("no port for the raw stream")?;
        let send = TcpStream::connect(listener.local_addr()?)?;
        let (receive, _) = listener.accept()?;
        send.set_nodelay(true)?;
        Ok(RawStream { send, receive, source: vec![1; bytes], target: vec![0; bytes] })
    }

    /// Seconds until all bytes have arrived.
    fn run(&mut self) -> Result<f64> {
        let RawStream { send, receive, source, target } = self;
        let began = Instant::now();
        std::thread::scope(|scope| {
            let sending = scope.spawn(|| source.chunks(RAW_WRITE).try_for_each(|part| send.write_all(part)));
            receive.read_exact(target)?;
            sending.join().expect("it does not panic")?;
            Ok(began.elapsed().as_secs_f64())
        })
    }
}
