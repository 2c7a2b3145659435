//! `pathways status`.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use pw_net::control::{self, Answer, Hello};
use pw_types::StatusReport;
use serde_json::json;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The controller's worker port
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:29001", env = "PATHWAYS_CONTROLLER", hide_env_values = true)]
    controller: String,
    /// The controller's secret
    #[arg(long, env = "PATHWAYS_TOKEN", hide_env_values = true, default_value = "")]
    token: String,
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: Args) -> Result<ExitCode> {
    crate::start_logging();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let report = runtime.block_on(fetch(&args.controller, &args.token))?;
    if args.json {
        println!("{:#}", as_json(&args.controller, &report));
    } else {
        print!("{}", as_text(&report));
    }
    Ok(ExitCode::SUCCESS)
}

/// One snapshot, within seconds or an error.
pub(crate) async fn fetch(controller: &str, token: &str) -> Result<StatusReport> {
    let ask = async {
        let (mut reader, mut writer) = control::dial(controller).await?;
        writer.send(&Hello::Status { build: crate::build::id().to_owned(), token: token.to_owned() }).await?;
        reader.next::<Answer>().await
    };
    let answer = tokio::time::timeout(Duration::from_secs(10), ask).await;
    let answer = answer.with_context(|| format!("the controller at {controller} did not answer within 10 s"))?;
    match answer.with_context(|| format!("no answer from a controller at {controller}; is it running, and is this its worker port?"))? {
        Some(Answer::Status { report }) => Ok(report),
        Some(Answer::Refused { status }) => bail!("the controller at {controller} refused: {}", status.message),
        Some(Answer::Welcome { .. }) | None => bail!("the controller at {controller} closed the connection"),
    }
}

fn as_json(controller: &str, report: &StatusReport) -> serde_json::Value {
    let workers: Vec<_> = report
        .workers
        .iter()
        .map(|w| {
            json!({
                "slot": w.slot.0, "incarnation": format!("{:016x}", w.incarnation.0), "host": w.info.host, "pid": w.info.pid,
                "island": w.info.island, "devices": w.info.devices.len(), "platform": w.info.platform_name,
                "state": if w.alive { "alive" } else { "lost" }, "granted": w.granted, "data_address": w.info.data_address,
                "bytes_reserved": w.bytes_reserved, "bytes_in_use": w.bytes_in_use,
                "bytes_moved": {
                    "from_clients": w.traffic.from_clients, "to_clients": w.traffic.to_clients,
                    "from_workers": w.traffic.from_workers, "to_workers": w.traffic.to_workers,
                },
                "bytes_limit": w.info.devices.iter().map(|d| d.memory_bytes).collect::<Vec<_>>(),
            })
        })
        .collect();
    let sessions: Vec<_> = report
        .sessions
        .iter()
        .map(|s| {
            json!({
                "session": format!("{:016x}", s.session.0), "name": s.name, "weight": s.weight, "devices": s.devices,
                "queued": s.queued, "running": s.running, "held_bytes": s.held_bytes, "arrays": s.arrays,
                "device_seconds": s.device_ns as f64 / 1e9,
            })
        })
        .collect();
    json!({ "controller": controller, "workers": workers, "sessions": sessions, "executables": report.executables })
}

fn as_text(report: &StatusReport) -> String {
    let mut text = String::new();
    let head = ["WORKER", "HOST", "PID", "ISLAND", "DEVICES", "STATE", "GRANTED", "RESERVED", "IN USE", "CLIENTS IN/OUT", "WORKERS IN/OUT"];
    let rows = report.workers.iter().map(|w| {
        let limit: Option<u64> = w.info.devices.iter().map(|d| d.memory_bytes).sum();
        let reserved = human(w.bytes_reserved.iter().sum());
        vec![
            w.slot.to_string(),
            w.info.host.clone(),
            w.info.pid.to_string(),
            w.info.island.to_string(),
            format!("{} × {}", w.info.devices.len(), w.info.platform_name),
            if w.alive { "alive" } else { "lost" }.to_owned(),
            w.granted.to_string(),
            limit.map_or(reserved.clone(), |l| format!("{reserved} of {}", human(l))),
            human(w.bytes_in_use.iter().sum()),
            format!("{} / {}", human(w.traffic.from_clients), human(w.traffic.to_clients)),
            format!("{} / {}", human(w.traffic.from_workers), human(w.traffic.to_workers)),
        ]
    });
    table(&mut text, &head, rows.collect(), "no workers are registered; start one with `pathways worker --controller HOST:29001`");
    text.push('\n');
    let head = ["SESSION", "WEIGHT", "DEVICES", "QUEUED", "RUNNING", "HELD", "ARRAYS", "DEVICE TIME"];
    let rows = report.sessions.iter().map(|s| {
        vec![
            s.name.clone(),
            s.weight.to_string(),
            s.devices.to_string(),
            s.queued.to_string(),
            s.running.to_string(),
            human(s.held_bytes),
            s.arrays.to_string(),
            format!("{:.1} s", s.device_ns as f64 / 1e9),
        ]
    });
    table(&mut text, &head, rows.collect(), "no client is connected");
    text
}

fn table(out: &mut String, head: &[&str], rows: Vec<Vec<String>>, none: &str) {
    if rows.is_empty() {
        out.push_str(none);
        out.push('\n');
        return;
    }
    let width = |column: usize| rows.iter().map(|r| r[column].chars().count()).max().unwrap_or(0).max(head[column].chars().count());
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let head = head.iter().map(|h| (*h).to_owned()).collect();
    for row in std::iter::once(&head).chain(&rows) {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(c, &w)| format!("{c}{}", " ".repeat(w - c.chars().count()))).collect();
        out.push_str(cells.join("  ").trim_end());
        out.push('\n');
    }
}

/// `1.5 GiB`.
fn human(bytes: u64) -> String {
    let mut value = bytes as f64;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if value < 1024.0 {
            return if unit == "B" || value.fract() == 0.0 { format!("{value:.0} {unit}") } else { format!("{value:.1} {unit}") };
        }
        value /= 1024.0;
    }
    format!("{value:.1} TiB")
}
