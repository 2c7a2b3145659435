//! `pathways bench dispatch`.

use std::collections::BTreeMap;

use anyhow::Result;
use serde_json::{Value, json};

use super::lab::{Client, Cluster, Lab, NullServer};
use super::machine::{self, Usage, Watch};
use super::report::{Spread, Table, goal, number};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    pub(super) common: super::Common,
    /// Print CPU time and sleeps per call of each thread of controller, worker and client
    #[arg(long)]
    threads: bool,
    /// Only metrics whose name contains this
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
}

/// Seconds of a window.
const WINDOW: f64 = 0.4;

/// One call of the Fused program holds so many computations.
const FUSED: f64 = 128.0;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Side {
    Pathways,
    Stock,
    Null,
}

use Side::{Null, Pathways, Stock};

struct Metric {
    name: &'static str,
    /// What the client is told, without devices and seconds.
    request: Value,
    /// Computations per call.
    scale: f64,
    /// Whether larger is better; else it is a time in µs.
    rate: bool,
    sides: &'static [Side],
    goals: &'static [Goal],
}

struct Goal {
    devices: u32,
    peer: Side,
    need: Need,
    later: bool,
}

#[derive(Clone, Copy)]
enum Need {
    /// Ratio to the peer of a rate.
    Ratio(f64),
    /// Microseconds more than the peer.
    Plus(f64),
}

const fn now(devices: u32, peer: Side, need: Need) -> Goal {
    Goal { devices, peer, need, later: false }
}

const fn later(devices: u32, peer: Side, need: Need) -> Goal {
    Goal { devices, peer, need, later: true }
}

fn metrics() -> Vec<Metric> {
    const ALL: &[Side] = &[Pathways, Stock, Null];
    let rate = |name, program: &str, sides, goals| Metric {
        name,
        request: json!({"do": "rate", "program": program}),
        scale: 1.0,
        rate: true,
        sides,
        goals,
    };
    let time = |name, request, goals| Metric { name, request, scale: 1.0, rate: false, sides: ALL, goals };
    vec![
        rate("OpByOp /s", "opbyop", ALL, const { &[now(8, Stock, Need::Ratio(0.85)), later(8, Stock, Need::Ratio(1.6))] }),
        Metric { scale: FUSED, ..rate("Fused /s", "fused", &[Pathways, Stock], const { &[later(8, Stock, Need::Ratio(4.0))] }) },
        rate(
            "add /s",
            "add",
            ALL,
            const {
                &[
                    now(1, Null, Need::Ratio(0.8)),
                    now(8, Null, Need::Ratio(0.8)),
                    later(1, Null, Need::Ratio(0.85)),
                    later(8, Null, Need::Ratio(0.85)),
                ]
            },
        ),
        Metric {
            request: json!({"do": "rate", "program": "add", "wait_every": 0}),
            ..rate("add, not waited for /s", "add", &[Pathways, Null], &[])
        },
        rate("add, 100 arguments /s", "add100", &[Pathways, Null], const { &[later(1, Null, Need::Ratio(0.85))] }),
        time("OpByOp, call and wait µs", json!({"do": "call_and_wait", "program": "opbyop"}), &[]),
        time("add, call and wait µs", json!({"do": "call_and_wait", "program": "add"}), &[]),
        time(
            "wait for a ready value µs",
            json!({"do": "wait_ready"}),
            const { &[later(1, Null, Need::Plus(20.0)), later(8, Null, Need::Plus(20.0))] },
        ),
        time("fetch 4 B of a ready array µs", json!({"do": "fetch"}), &[]),
        time("upload 4 B and wait µs", json!({"do": "upload"}), &[]),
    ]
}

/// What one side has given in one window.
struct Sample {
    value: f64,
    calls: f64,
    others: f64,
    /// By role: the server's first process, the worker, the client.
    usage: BTreeMap<(&'static str, String), Usage>,
}

struct Bench<'a> {
    lab: &'a Lab,
    clusters: BTreeMap<u32, Cluster>,
    null: NullServer,
    clients: BTreeMap<(Side, u32), Client>,
}

pub(super) fn run(args: &Args, lab: &Lab) -> Result<Value> {
    let mut bench = Bench::start(lab)?;
    let mut figures = Vec::new();
    let mut windows = (0, 0);
    for devices in [8, 1] {
        println!(
            "\n1 worker × {devices} devices, medians of {} rounds; ratios are medians over the rounds (least to greatest)",
            lab.rounds
        );
        let mut table = Table::new(&["", "pathways", "stock", "null", "of stock", "of null", "goal"]);
        let mut costs = Table::new(&["CPU µs per call", "controller+edge", "worker", "client", "null server", "its client", "of null"]);
        let mut details = Vec::new();
        for metric in metrics() {
            if args.only.as_ref().is_some_and(|only| !metric.name.contains(only.as_str())) {
                continue;
            }
            let samples = bench.measure(&metric, devices)?;
            windows.0 += samples.values().flatten().filter(|s| machine::is_quiet(s.others)).count();
            windows.1 += samples.values().flatten().count();
            table.row(row(&metric, devices, &samples));
            if metric.rate {
                costs.row(cost_row(metric.name, &samples));
            }
            if args.threads && metric.rate {
                details.push((metric.name, samples[&Pathways].iter().map(|s| (s.calls, s.usage.clone())).collect::<Vec<_>>()));
            }
            figures.push(figure(&metric, devices, &samples));
        }
        table.print();
        println!();
        costs.print();
        details.iter().for_each(|(name, usage)| print_threads(name, usage));
    }
    println!("\nquiet windows (others use < 0.15 cores): {} of {}", windows.0, windows.1);
    println!("goal for later: controller+edge CPU ≤ 1.3 × the null server's; ratios ≥ are of rates, + is µs above the null server");
    Ok(json!({"bench": "dispatch", "rounds": lab.rounds, "quick": lab.quick, "figures": figures}))
}

impl<'a> Bench<'a> {
    fn start(lab: &'a Lab) -> Result<Bench<'a>> {
        let null = NullServer::start(lab, &[])?;
        let (mut clusters, mut clients) = (BTreeMap::new(), BTreeMap::new());
        for devices in [8, 1] {
            let cluster = Cluster::start(lab, devices, &[])?;
            clients.insert((Pathways, devices), Client::of(lab, &cluster, &format!("pathways-{devices}"), "dispatch.py", &[])?);
            clients.insert((Stock, devices), Client::stock(lab, devices, &format!("stock-{devices}"), "dispatch.py")?);
            clients.insert((Null, devices), Client::of(lab, &null, &format!("null-{devices}"), "dispatch.py", &[])?);
            clusters.insert(devices, cluster);
        }
        for (&(side, devices), client) in &mut clients {
            client.ask(&json!({"do": "check", "devices": devices, "computes": side != Null}))?;
        }
        Ok(Bench { lab, clusters, null, clients })
    }

    /// All rounds of one metric. Its first windows, in which programs are compiled, do not count.
    fn measure(&mut self, metric: &Metric, devices: u32) -> Result<BTreeMap<Side, Vec<Sample>>> {
        for &side in metric.sides {
            self.window(metric, devices, side, 0.05)?;
        }
        let mut samples: BTreeMap<Side, Vec<Sample>> = BTreeMap::new();
        for _ in 0..self.lab.rounds {
            for &side in metric.sides {
                let sample = self.window(metric, devices, side, self.lab.window(WINDOW))?;
                samples.entry(side).or_default().push(sample);
            }
        }
        Ok(samples)
    }

    fn window(&mut self, metric: &Metric, devices: u32, side: Side, seconds: f64) -> Result<Sample> {
        let cluster = &self.clusters[&devices];
        let client = self.clients.get_mut(&(side, devices)).expect("one for each side");
        let mut roles = vec![("client", client.pid())];
        match side {
            Pathways => roles.extend([("server", cluster.controller_pid()), ("worker", cluster.worker_pid())]),
            Null => roles.push(("server", self.null.pid())),
            Stock => {}
        }
        let mut request = metric.request.clone();
        request["devices"] = devices.into();
        request["seconds"] = seconds.into();
        let pids: Vec<u32> = roles.iter().map(|r| r.1).collect();
        let usage = || -> BTreeMap<(&'static str, String), Usage> {
            let of = |&(role, pid): &(&'static str, u32)| machine::threads(pid).into_iter().map(move |(name, u)| ((role, name), u));
            roles.iter().flat_map(of).collect()
        };
        let (watch, before) = (Watch::start(&pids), usage());
        let answer = client.ask(&request)?;
        let (others, mut after) = (watch.others(), usage());
        for (key, usage) in &mut after {
            let earlier = before.get(key).copied().unwrap_or_default();
            usage.cpu_ns = usage.cpu_ns.saturating_sub(earlier.cpu_ns);
            usage.sleeps = usage.sleeps.saturating_sub(earlier.sleeps);
        }
        let read = |name: &str| answer[name].as_f64().unwrap_or(f64::NAN);
        Ok(Sample { value: read("value") * metric.scale, calls: read("calls"), others, usage: after })
    }
}

impl Sample {
    fn cpu_us(&self, role: &str) -> f64 {
        let ns: u64 = self.usage.iter().filter(|(key, _)| key.0 == role).map(|(_, u)| u.cpu_ns).sum();
        ns as f64 / 1e3 / self.calls
    }
}

fn values(samples: &BTreeMap<Side, Vec<Sample>>, side: Side) -> Vec<f64> {
    samples.get(&side).into_iter().flatten().map(|s| s.value).collect()
}

fn row(metric: &Metric, devices: u32, samples: &BTreeMap<Side, Vec<Sample>>) -> Vec<String> {
    let median = |side| number(Spread::of(values(samples, side)).median);
    let ours = values(samples, Pathways);
    let ratio = |side| {
        let theirs = values(samples, side);
        if theirs.is_empty() { "-".to_owned() } else { Spread::of_ratios(&ours, &theirs).text() }
    };
    let goals = metric.goals.iter().filter(|g| g.devices == devices).map(|g| {
        let theirs = values(samples, g.peer);
        let peer = if g.peer == Stock { "stock" } else { "null" };
        let (text, met) = match g.need {
            Need::Ratio(r) => (format!("≥ {r} × {peer}"), Spread::of_ratios(&ours, &theirs).median >= r),
            Need::Plus(us) => {
                let more = Spread::of(ours.iter().zip(&theirs).map(|(a, b)| a - b)).median;
                (format!("≤ {peer} + {us} µs (is {more:+.0})"), more <= us)
            }
        };
        if g.later { format!("later {}", goal(&text, met)) } else { goal(&text, met) }
    });
    let goals: Vec<String> = goals.collect();
    vec![metric.name.to_owned(), median(Pathways), median(Stock), median(Null), ratio(Stock), ratio(Null), goals.join("; ")]
}

fn cost_row(name: &str, samples: &BTreeMap<Side, Vec<Sample>>) -> Vec<String> {
    let cpu = |side, role: &str| -> Vec<f64> { samples.get(&side).into_iter().flatten().map(|s| s.cpu_us(role)).collect() };
    let median = |side, role| number(Spread::of(cpu(side, role)).median);
    let (ours, theirs) = (cpu(Pathways, "server"), cpu(Null, "server"));
    let ratio = if theirs.is_empty() { "-".to_owned() } else { Spread::of_ratios(&ours, &theirs).text() };
    vec![
        name.trim_end_matches(" /s").to_owned(),
        median(Pathways, "server"),
        median(Pathways, "worker"),
        median(Pathways, "client"),
        median(Null, "server"),
        median(Null, "client"),
        ratio,
    ]
}

type Usages = [(f64, BTreeMap<(&'static str, String), Usage>)];

fn print_threads(name: &str, samples: &Usages) {
    let calls: f64 = samples.iter().map(|s| s.0).sum();
    let mut total: BTreeMap<&(&'static str, String), Usage> = BTreeMap::new();
    for (key, usage) in samples.iter().flat_map(|s| &s.1) {
        let sum = total.entry(key).or_default();
        sum.cpu_ns += usage.cpu_ns;
        sum.sleeps += usage.sleeps;
    }
    println!("\nthreads of pathways, {name}");
    let mut table = Table::new(&["process", "thread", "CPU µs per call", "sleeps per call", ""]);
    for ((role, thread), usage) in total {
        let (cpu, sleeps) = (usage.cpu_ns as f64 / 1e3 / calls, usage.sleeps as f64 / calls);
        if cpu >= 0.1 {
            let role = if *role == "server" { "controller" } else { role };
            table.row(vec![role.to_owned(), thread.clone(), number(cpu), number(sleeps), String::new()]);
        }
    }
    table.print();
}

fn figure(metric: &Metric, devices: u32, samples: &BTreeMap<Side, Vec<Sample>>) -> Value {
    let ours = values(samples, Pathways);
    let sides = samples.iter().map(|(side, list)| {
        let rounds: Vec<Value> = list
            .iter()
            .map(|s| {
                json!({
                    "value": s.value, "calls": s.calls, "others_cores": s.others, "server_cpu_us": s.cpu_us("server"),
                    "worker_cpu_us": s.cpu_us("worker"), "client_cpu_us": s.cpu_us("client"),
                })
            })
            .collect();
        let name = format!("{side:?}").to_lowercase();
        let theirs = values(samples, *side);
        (name, json!({"median": Spread::of(theirs.clone()).median, "ratio": Spread::of_ratios(&ours, &theirs), "rounds": rounds}))
    });
    let sides: serde_json::Map<String, Value> = sides.collect();
    json!({"metric": metric.name, "devices": devices, "sides": sides})
}
