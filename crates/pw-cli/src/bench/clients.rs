//! `pathways bench clients`.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use pw_types::StatusReport;
use serde_json::{Value, json};

use super::lab::{Client, Cluster, Lab};
use super::machine;
use super::report::{Spread, goal, mib};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    pub(super) common: super::Common,
    /// Seconds that two clients share the devices
    #[arg(long, value_name = "S", default_value_t = 20.0)]
    seconds: f64,
    /// Clients that share the devices
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(2..))]
    sharers: u32,
    /// Times that a client comes and is killed
    #[arg(long, value_name = "N", default_value_t = 20)]
    kills: u32,
}

const SCRIPT: &str = "clients.py";
const DEVICES: u32 = 8;

/// Device time of one step.
const STEP_US: u64 = 1000;

/// Device time of one of the programs that the killed client leaves in the queue.
const QUEUED_US: u64 = 20_000;
const QUEUED: u64 = 100;
const HELD_MIB: u64 = 1024;

/// Seconds for the memory to come back.
const BACK_GOAL: f64 = 5.0;

/// Seconds that the other client's step may be longer.
const PAUSE_GOAL: f64 = 0.1;

/// Bytes that count as nothing beside what the killed client holds.
const SMALL: u64 = 64 << 10;

const SHARE_GOAL: f64 = 0.05;

pub(super) fn run(args: &Args, lab: &Lab) -> Result<Value> {
    let cluster = Cluster::start(lab, DEVICES, &["--test-targets"])?;
    let shares = shares(args, lab, &cluster)?;
    let kills = kills(args, lab, &cluster)?;
    Ok(json!({"bench": "clients", "quick": lab.quick, "shares": shares, "kills": kills}))
}

fn shares(args: &Args, lab: &Lab, cluster: &Cluster) -> Result<Value> {
    let seconds = lab.window(args.seconds);
    let mut clients: Vec<(String, Client)> = Vec::new();
    for number in 1..=args.sharers {
        let name = format!("sharer-{number}");
        let client = Client::of(lab, cluster, &name, SCRIPT, &[])?;
        clients.push((name, client));
    }
    for (_, client) in &mut clients {
        client.ask(&json!({"do": "prepare", "us": STEP_US}))?;
    }
    let names: Vec<String> = clients.iter().map(|(name, _)| name.clone()).collect();
    let device_ns = |report: &StatusReport| -> Vec<f64> {
        let of = |name: &String| report.sessions.iter().find(|s| s.name == *name).map_or(f64::NAN, |s| s.device_ns as f64);
        names.iter().map(of).collect()
    };
    let before = device_ns(&cluster.status()?);
    for (_, client) in &mut clients {
        client.send(&json!({"do": "work", "us": STEP_US, "seconds": seconds}))?;
    }
    std::thread::sleep(Duration::from_secs_f64(seconds));
    let after = device_ns(&cluster.status()?);
    let mut done = Vec::new();
    for (_, client) in &mut clients {
        let answer = client.receive(Duration::from_secs(120))?;
        done.push(answer["done"].as_f64().context("a count")?);
    }
    let device: Vec<f64> = after.iter().zip(&before).map(|(a, b)| (a - b) / 1e9).collect();
    let share = |values: &[f64]| -> Vec<f64> { values.iter().map(|v| v / values.iter().sum::<f64>()).collect() };
    let (by_work, by_time) = (share(&done), share(&device));
    let fair = 1.0 / f64::from(args.sharers);
    let worst = by_work.iter().chain(&by_time).map(|s| (s / fair - 1.0).abs()).fold(0.0, f64::max);
    println!("\n{} clients, {STEP_US} µs slept per program on {DEVICES} devices, {seconds} s, all results right", args.sharers);
    for (index, (name, _)) in clients.iter().enumerate() {
        println!(
            "  {name}: {} programs = {:.1} %; device time {:.2} s = {:.1} %",
            done[index],
            by_work[index] * 100.0,
            device[index],
            by_time[index] * 100.0
        );
    }
    let rate = done.iter().sum::<f64>() / seconds;
    println!("  together {rate:.0} programs/s; {}", goal("equal shares within 5 %", worst <= SHARE_GOAL));
    Ok(json!({"seconds": seconds, "done": done, "device_seconds": device, "by_work": by_work, "by_time": by_time}))
}

/// What a cluster holds.
#[derive(Clone, Copy, PartialEq, Debug, serde::Serialize)]
struct Held {
    in_use: u64,
    reserved: u64,
    sessions: usize,
    queued: u64,
}

impl Held {
    fn of(report: &StatusReport) -> Held {
        Held {
            in_use: report.workers.iter().flat_map(|w| &w.bytes_in_use).sum(),
            reserved: report.workers.iter().flat_map(|w| &w.bytes_reserved).sum(),
            sessions: report.sessions.len(),
            queued: report.sessions.iter().map(|s| u64::from(s.queued) + u64::from(s.running)).sum(),
        }
    }
}

/// What was seen of one kill.
#[derive(serde::Serialize)]
struct Kill {
    /// What the client held when it was killed, beyond the base.
    held: u64,
    queued: u64,
    /// Seconds until its session was gone.
    gone: Option<f64>,
    /// Seconds until everything was as before.
    back: Option<f64>,
    /// Steps of the other client, in seconds: with the victim there, and the longest since the kill.
    before: f64,
    longest: f64,
}

fn kills(args: &Args, lab: &Lab, cluster: &Cluster) -> Result<Value> {
    let times = if lab.quick { args.kills.min(3) } else { args.kills };
    let mut other = Client::of(lab, cluster, "other", SCRIPT, &[])?;
    let alone = steps(&other.ask(&json!({"do": "steps", "us": STEP_US, "seconds": lab.window(2.0)}))?);
    let normal = Spread::of(alone.iter().map(|s| s.1));
    wait_until(cluster, 5.0, |held| held.sessions == 1 && held.queued == 0)?;
    // The first victim also brings what stays: its programs, compiled.
    let base = Held::of(&cluster.status()?);
    let memory = |pid| machine::resident_bytes(pid);
    let processes = [("controller", cluster.controller_pid()), ("worker", cluster.worker_pid())];
    let mut marks: Vec<[(u64, usize); 2]> = Vec::new();
    let mut seen: Vec<Kill> = Vec::new();
    for _ in 0..times {
        seen.push(kill(lab, cluster, &mut other, base)?);
        // What was freed goes back to the kernel a moment later.
        std::thread::sleep(Duration::from_millis(500));
        marks.push(processes.map(|(_, pid)| (memory(pid), machine::open_files(pid))));
    }
    println!(
        "\na client with {HELD_MIB} MiB of arrays and {QUEUED} programs of {} ms in its queue is killed, {times} times",
        QUEUED_US / 1000
    );
    println!("  held at the kill: {}, {} programs left (least of all kills)", mib(least(&seen, |k| k.held)), least(&seen, |k| k.queued));
    let lost = seen.iter().filter(|k| k.back.is_none()).count();
    let back = Spread::of(seen.iter().filter_map(|k| k.back));
    let all_back = lost == 0 && back.max <= BACK_GOAL;
    println!(
        "  its session gone: median {:.2} s; worker memory as before, too: median {:.2} s, longest {:.2} s, never {lost}; {}",
        Spread::of(seen.iter().filter_map(|k| k.gone)).median,
        back.median,
        back.max,
        goal("within 5 s", all_back)
    );
    let (before, longest) = (Spread::of(seen.iter().map(|k| k.before)), Spread::of(seen.iter().map(|k| k.longest)));
    println!(
        "  steps of the other client: alone median {:.1} ms, longest {:.1} ms; beside the victim median {:.1} ms; longest from the \
         kill until all is back: median {:.1} ms, longest {:.1} ms; {}",
        normal.median * 1e3,
        normal.max * 1e3,
        before.median * 1e3,
        longest.median * 1e3,
        longest.max * 1e3,
        goal("≤ 100 ms over the step beside the victim", longest.max - before.median <= PAUSE_GOAL)
    );
    for (index, (name, _)) in processes.iter().enumerate() {
        let (first, last) = (marks[0][index], marks[marks.len() - 1][index]);
        println!("  {name} after the first and the last kill: {} and {}, {} and {} open files", mib(first.0), mib(last.0), first.1, last.1);
    }
    Ok(json!({"base": base, "normal_step": normal, "kills": seen, "marks": marks}))
}

fn least(seen: &[Kill], of: impl Fn(&Kill) -> u64) -> u64 {
    seen.iter().map(of).min().unwrap_or(0)
}

fn kill(lab: &Lab, cluster: &Cluster, other: &mut Client, base: Held) -> Result<Kill> {
    let mut victim = Client::of(lab, cluster, "victim", SCRIPT, &[])?;
    victim.ask(&json!({"do": "prepare", "us": QUEUED_US}))?;
    other.send(&json!({"do": "steps", "us": STEP_US, "seconds": 4.0}))?;
    victim.ask(&json!({"do": "burden", "mib": HELD_MIB, "us": QUEUED_US, "programs": QUEUED}))?;
    let burdened = wall();
    std::thread::sleep(Duration::from_millis(400));
    let held = Held::of(&cluster.status()?);
    let killed = wall();
    victim.kill();
    let gone = wait_until(cluster, 2.0 * BACK_GOAL, |now| now.sessions == base.sessions)?.map(|_| wall() - killed);
    // The steps of the other client hold a little, now and then.
    let as_before = |now: Held| now.sessions == base.sessions && now.in_use <= base.in_use + SMALL && now.reserved <= base.reserved + SMALL;
    let back = wait_until(cluster, 2.0 * BACK_GOAL, as_before)?.map(|_| wall() - killed);
    let end = killed + back.unwrap_or(4.0 * BACK_GOAL);
    let steps = steps(&other.receive(Duration::from_secs(120))?);
    // A step counts where any part of it lies in the span.
    let within = |from: f64, to: f64| steps.iter().filter(move |(at, took)| *at >= from && at - took <= to).map(|s| s.1);
    Ok(Kill {
        held: held.in_use.saturating_sub(base.in_use),
        queued: held.queued,
        gone,
        back,
        before: Spread::of(within(burdened, killed)).median,
        longest: Spread::of(within(killed, end + 0.2)).max,
    })
}

/// Seconds until the cluster is as wanted; `None` = not within the time.
fn wait_until(cluster: &Cluster, seconds: f64, wanted: impl Fn(Held) -> bool) -> Result<Option<f64>> {
    let began = Instant::now();
    loop {
        let elapsed = began.elapsed().as_secs_f64();
        if wanted(Held::of(&cluster.status()?)) {
            return Ok(Some(elapsed));
        }
        if elapsed > seconds {
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// End by the wall clock and length of each step.
fn steps(answer: &Value) -> Vec<(f64, f64)> {
    let pair = |step: &Value| Some((step[0].as_f64()?, step[1].as_f64()?));
    answer["steps"].as_array().into_iter().flatten().filter_map(pair).collect()
}

fn wall() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}
