//! `pathways bench copy`.

use std::collections::BTreeMap;

use anyhow::Result;
use serde_json::{Value, json};

use super::lab::{Client, Cluster, Lab, NullServer};
use super::machine::{self, Watch};
use super::report::{Spread, Table, goal, mib, number};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    pub(super) common: super::Common,
    /// MiB of the array that is sent and fetched
    #[arg(long, value_name = "MIB", default_value_t = 256)]
    mib: u64,
    /// Uploads that are parked
    #[arg(long, value_name = "N", default_value_t = 70)]
    parked: u64,
}

const SCRIPT: &str = "transfer.py";

/// Bytes for the growth of the controller.
const GROWTH_BYTES: u64 = 1 << 30;

const GROWTH_GOAL: u64 = 100 << 20;

/// The windows of the edge (pw-edge/src/lib.rs), for the null server.
const EDGE_WINDOWS: [&str; 6] = ["--stream-window", "2097152", "--connection-window", "2147483647", "--frame", "1048576"];

/// More than this lets the client have that many stores under way; its own default is lower.
const STORES: (&str, &str) = ("IFRT_PROXY_GRPC_MAX_ONGOING_HOST_BUFFER_STORES", "256");

pub(super) fn run(args: &Args, lab: &Lab) -> Result<Value> {
    let bulk = bulk(args, lab)?;
    let parked = parked(args, lab)?;
    Ok(json!({"bench": "copy", "rounds": lab.rounds, "quick": lab.quick, "bulk": bulk, "parked": parked}))
}

struct Side {
    name: &'static str,
    client: Client,
    /// Its server processes.
    servers: Vec<u32>,
    up: Vec<f64>,
    down: Vec<f64>,
    /// Seconds of CPU per GB of each server process.
    up_cpu: Vec<Vec<f64>>,
    down_cpu: Vec<Vec<f64>>,
}

impl Side {
    fn new(name: &'static str, client: Client, servers: Vec<u32>) -> Side {
        Side { name, client, servers, up: Vec::new(), down: Vec::new(), up_cpu: Vec::new(), down_cpu: Vec::new() }
    }

    /// GB/s, CPU seconds per GB of each server, and the cores that others used.
    fn transfer(&mut self, what: &str, bytes: u64) -> Result<(f64, Vec<f64>, f64)> {
        let gigabytes = bytes as f64 / 1e9;
        let cpu = || -> Vec<u64> { self.servers.iter().map(|&pid| machine::cpu_ns(pid)).collect() };
        let own: Vec<u32> = self.servers.iter().copied().chain([self.client.pid()]).collect();
        let (watch, before) = (Watch::start(&own), cpu());
        let answer = self.client.ask(&json!({"do": what}))?;
        let used = self.servers.iter().zip(&before).map(|(&pid, b)| machine::cpu_ns(pid).saturating_sub(*b) as f64 / 1e9 / gigabytes);
        let used = used.collect();
        Ok((gigabytes / answer["seconds"].as_f64().unwrap_or(f64::NAN), used, watch.others()))
    }
}

/// The median of each server process.
fn costs(rounds: &[Vec<f64>]) -> String {
    let servers = rounds.first().map_or(0, Vec::len);
    let medians: Vec<String> = (0..servers).map(|s| number(Spread::of(rounds.iter().map(|r| r[s])).median)).collect();
    medians.join(" + ")
}

fn bulk(args: &Args, lab: &Lab) -> Result<Value> {
    let (edge_like, wide) = (NullServer::start(lab, &EDGE_WINDOWS)?, NullServer::start(lab, &[])?);
    let cluster = Cluster::start(lab, 1, &[])?;
    let mut sides = vec![
        Side::new("pathways", Client::of(lab, &cluster, "pathways", SCRIPT, &[])?, vec![cluster.controller_pid(), cluster.worker_pid()]),
        Side::new("null", Client::of(lab, &edge_like, "null", SCRIPT, &[])?, vec![edge_like.pid()]),
        Side::new("null, its windows", Client::of(lab, &wide, "null-wide", SCRIPT, &[])?, vec![wide.pid()]),
    ];
    let bytes = args.mib << 20;
    for side in &mut sides {
        side.client.ask(&json!({"do": "prepare", "mib": args.mib}))?;
    }
    let (mut quiet, mut windows) = (0, 0);
    for _ in 0..lab.rounds {
        for side in &mut sides {
            let (up, up_cpu, up_others) = side.transfer("upload", bytes)?;
            let (down, down_cpu, down_others) = side.transfer("fetch", bytes)?;
            side.up.push(up);
            side.down.push(down);
            side.up_cpu.push(up_cpu);
            side.down_cpu.push(down_cpu);
            quiet += [up_others, down_others].into_iter().filter(|&o| machine::is_quiet(o)).count();
            windows += 2;
        }
    }
    sides[0].client.ask(&json!({"do": "fetch", "check": true}))?;
    println!("\n{} MiB of one device, GB/s, medians of {} rounds; ratios over the rounds (least to greatest)", args.mib, lab.rounds);
    let mut table = Table::new(&["", "upload", "CPU s/GB", "fetch", "CPU s/GB", "upload: pathways of it", "fetch: pathways of it"]);
    let ours = (sides[0].up.clone(), sides[0].down.clone());
    for side in &sides {
        let median = |values: &[f64]| number(Spread::of(values.iter().copied()).median);
        let mut row = vec![side.name.to_owned(), median(&side.up), costs(&side.up_cpu), median(&side.down), costs(&side.down_cpu)];
        if side.name != "pathways" {
            row.extend([Spread::of_ratios(&ours.0, &side.up).text(), Spread::of_ratios(&ours.1, &side.down).text()]);
        }
        table.row(row);
    }
    table.print();
    println!("CPU of the servers: of pathways, controller + worker");
    let up = Spread::of_ratios(&ours.0, &sides[1].up).median;
    let down = Spread::of_ratios(&ours.1, &sides[1].down).median;
    println!("{}; {}", goal("upload ≥ 0.85 × null", up >= 0.85), goal("fetch ≥ 0.9 × null", down >= 0.9));
    println!("quiet windows: {quiet} of {windows}");

    let pid = cluster.controller_pid();
    let times = GROWTH_BYTES.div_ceil(bytes);
    let mut grown = BTreeMap::new();
    for what in ["upload", "fetch"] {
        let client = &mut sides[0].client;
        let (result, growth) = machine::growth(pid, || (0..times).try_for_each(|_| client.ask(&json!({"do": what})).map(drop)));
        result?;
        grown.insert(what, growth);
    }
    println!(
        "controller memory during 1 GiB: uploads +{}, fetches +{}, {} now; {}",
        mib(grown["upload"]),
        mib(grown["fetch"]),
        mib(machine::resident_bytes(pid)),
        goal("growth ≤ 100 MiB", grown.values().all(|&g| g <= GROWTH_GOAL))
    );
    let rounds = sides.iter().map(|s| (s.name.to_owned(), json!({"up": s.up, "down": s.down, "up_cpu": s.up_cpu, "down_cpu": s.down_cpu})));
    let rounds: serde_json::Map<String, Value> = rounds.collect();
    Ok(json!({"mib": args.mib, "sides": rounds, "controller_growth_bytes": grown}))
}

/// Uploads that come long before their turn, behind slept programs. Stock JAX sends in the order of its requests, so that the
/// head of a session needs an upload that comes behind parked ones is beyond it: pw-edge's own tests show that with a raw client.
fn parked(args: &Args, lab: &Lab) -> Result<Value> {
    let (each, programs, sleep_ms) = (4_u64, 40_u64, 50_u64);
    let cluster = Cluster::start(lab, 1, &["--test-targets"])?;
    let mut client = Client::of(lab, &cluster, "parked", SCRIPT, &[STORES])?;
    let request = json!({"do": "parked", "uploads": args.parked, "mib": each, "programs": programs, "sleep_ms": sleep_ms});
    let (answer, growth) = machine::growth(cluster.controller_pid(), || client.ask(&request));
    let answer = answer?;
    let seconds = |name: &str| answer[name].as_f64().unwrap_or(f64::NAN);
    println!(
        "\n{} uploads of {each} MiB behind {programs} programs of {sleep_ms} ms ({} = {}):\n\
         all asked for after {:.2} s, the first ready after {:.2} s, all ready after {:.2} s, all right; controller memory +{}",
        args.parked,
        STORES.0,
        STORES.1,
        seconds("asked"),
        seconds("first"),
        seconds("ready"),
        mib(growth)
    );
    Ok(json!({"uploads": args.parked, "mib": each, "seconds": answer, "controller_growth_bytes": growth}))
}
