//! `cargo xtask demo`: the main job on clusters on this machine, beside stock JAX, and whether the numbers agree.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::{run, setup};

pub(crate) const HELP: &str = "\
cargo xtask demo [ARGUMENTS FOR examples/train_gpt.py]

Sets up what is missing, then trains a character-level GPT on the source of Python's own standard library, in two parts:
  1. data-parallel over the four devices of two workers (`pathways local --workers 2 --devices 2`), every step one program over
     both, and by the same script on stock JAX with four CPU devices;
  2. its first 80 steps again as a pipeline of two stages, one on each worker, beside part 1.
Shows progress, a sample of what the model writes and whether the losses agree; the results go to target/demo/. Under three
minutes on two cores after the set-up. `--steps 50` is a quick look.";

const WORKERS: usize = 2;
/// Of each worker.
const DEVICES: usize = 2;
/// The pipeline is shown, not trained to the end.
const PIPELINE_STEPS: usize = 80;
const LIMIT: Duration = Duration::from_secs(900);
/// Losses agree when they are equal to four digits.
const RELATIVE_DIFFERENCE_MAX: f64 = 2e-4;

pub(crate) fn task(root: &Path, args: &[String]) -> Result<(), String> {
    let ready = setup::ensure(root)?;
    run::say(&format!("part 1: training on a pathways cluster, data-parallel over {WORKERS} workers with {DEVICES} devices each"));
    let ours = train(root, "pathways", "train_gpt.py", &mut cluster(root, &ready), args)?;

    run::say(&format!("the same script on stock JAX: one process, {} CPU devices", WORKERS * DEVICES));
    let mut stock = Command::new(&ready.python);
    stock_jax(&mut stock, WORKERS * DEVICES);
    let theirs = train(root, "stock", "train_gpt.py", &mut stock, args)?;

    run::say("part 2: the same model as a pipeline of two stages, one on each worker");
    let mut pipeline = vec!["--stop".to_owned(), PIPELINE_STEPS.to_string(), "--beside".to_owned()];
    pipeline.push(root.join("target/demo/pathways/losses.json").display().to_string());
    pipeline.extend_from_slice(args);
    let piped = train(root, "pipeline", "pipeline_gpt.py", &mut cluster(root, &ready), &pipeline)?;

    if ours.losses.len() != theirs.losses.len() {
        return Err(format!("{} losses on pathways, {} on stock JAX", ours.losses.len(), theirs.losses.len()));
    }
    compare(["pathways", "stock JAX"], &ours, &theirs)?;
    compare(["two stages", "one stage"], &piped, &ours)?;
    let [plot, sample] = ["pipeline/loss.png", "pathways/sample.txt"].map(|f| setup::short(root, &root.join("target/demo").join(f)));
    println!("\nThe loss curves are in {plot}, a sample of what the model writes in {sample}.");
    Ok(())
}

/// A cluster for a Python program.
fn cluster(root: &Path, ready: &setup::Ready) -> Command {
    let mut cluster = Command::new(&ready.pathways);
    cluster.args(["local", "--workers", &WORKERS.to_string(), "--devices", &DEVICES.to_string(), "--port", "0"]);
    cluster.arg("--cache-dir").arg(root.join("target/cache")).arg("--").arg(&ready.python);
    cluster
}

/// The environment of the stock peer. It sizes its threads by NPROC, and with fewer threads than devices it can starve itself.
pub(crate) fn stock_jax(command: &mut Command, devices: usize) {
    command.env("JAX_PLATFORMS", "cpu").env("NPROC", "16").env_remove("JAX_BACKEND_TARGET");
    command.env("XLA_FLAGS", format!("--xla_force_host_platform_device_count={devices}"));
}

struct Trained {
    losses: Vec<f64>,
    devices: f64,
    tokens_per_second: f64,
    seconds: f64,
}

fn train(root: &Path, name: &str, script: &str, command: &mut Command, args: &[String]) -> Result<Trained, String> {
    let out = root.join("target/demo").join(name);
    fs::create_dir_all(&out).map_err(|e| format!("{}: {e}", out.display()))?;
    let json = out.join("losses.json");
    let _ = fs::remove_file(&json);
    command.arg(root.join("examples").join(script)).arg("--out").arg(&out).arg("--json").arg(&json).args(args);
    let start = Instant::now();
    let status = run::passed_through(command, LIMIT)?;
    if !status.success() {
        return Err(format!("the training on {name} ended with {status}; its message is above"));
    }
    let text = fs::read_to_string(&json).map_err(|e| format!("{}: {e}", json.display()))?;
    let number = |key| numbers(&text, key).first().copied().ok_or(format!("{}: no {key}", json.display()));
    Ok(Trained {
        losses: numbers(&text, "losses"),
        devices: number("devices")?,
        tokens_per_second: number("tokens_per_second")?,
        seconds: start.elapsed().as_secs_f64(),
    })
}

/// The number or the list of numbers behind `"key":` in the script's JSON.
fn numbers(json: &str, key: &str) -> Vec<f64> {
    let Some((_, rest)) = json.split_once(&format!("\"{key}\":")) else { return Vec::new() };
    let rest = rest.trim_start();
    let values = match rest.strip_prefix('[') {
        Some(list) => list.split(']').next().unwrap_or(""),
        None => rest.split([',', '}']).next().unwrap_or(""),
    };
    values.split(',').filter_map(|v| v.trim().parse().ok()).collect()
}

/// Two runs side by side, over the steps that both have.
fn compare(titles: [&str; 2], ours: &Trained, theirs: &Trained) -> Result<(), String> {
    let steps = ours.losses.len().min(theirs.losses.len());
    let last = steps.checked_sub(1).ok_or("no losses")?;
    let (step, worst) = worst_difference(&ours.losses, &theirs.losses);
    println!("\n                     {:>10} {:>11}", titles[0], titles[1]);
    println!("devices              {:>10} {:>11}", ours.devices, theirs.devices);
    println!("loss, first step     {:>10.4} {:>11.4}", ours.losses[0], theirs.losses[0]);
    println!("loss, step {steps:<10}{:>10.4} {:>11.4}", ours.losses[last], theirs.losses[last]);
    println!("tokens per second    {:>10.0} {:>11.0}", ours.tokens_per_second, theirs.tokens_per_second);
    println!("steps in all         {:>10} {:>11}", ours.losses.len(), theirs.losses.len());
    println!("seconds in all       {:>10.1} {:>11.1}", ours.seconds, theirs.seconds);
    if worst > RELATIVE_DIFFERENCE_MAX {
        return Err(format!(
            "the losses DO NOT agree: step {} gives {} on {} and {} on {}",
            step + 1,
            ours.losses[step],
            titles[0],
            theirs.losses[step],
            titles[1]
        ));
    }
    println!("The losses of {steps} steps agree: the largest relative difference is {worst:.1e} (step {}).", step + 1);
    Ok(())
}

/// Where two lists of losses differ most in what both have, and by how much relative to the second. What is no number differs infinitely.
fn worst_difference(ours: &[f64], theirs: &[f64]) -> (usize, f64) {
    let differences = ours.iter().zip(theirs).map(|(a, b)| {
        let d = (a - b).abs() / b.abs();
        if d.is_finite() { d } else { f64::INFINITY }
    });
    differences.enumerate().fold((0, 0.0), |worst, (i, d)| if d > worst.1 { (i, d) } else { worst })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_script_writes() {
        let json = r#"{"devices": 4, "sample": "a, [b]", "tokens_per_second": 12.5, "losses": [4.5, 1e-1, NaN]}"#;
        assert_eq!(numbers(json, "devices"), [4.0]);
        assert_eq!(numbers(json, "tokens_per_second"), [12.5]);
        assert_eq!(numbers(json, "losses")[..2], [4.5, 0.1]);
        assert!(numbers(json, "losses")[2].is_nan());
        assert!(numbers(json, "other").is_empty());
    }

    #[test]
    fn finds_the_worst_step() {
        assert_eq!(worst_difference(&[1.0, 2.0], &[1.0, 2.0]), (0, 0.0));
        assert_eq!(worst_difference(&[1.0, 2.2, 3.0], &[1.0, 2.0, 3.1]).0, 1);
        assert_eq!(worst_difference(&[1.0, f64::NAN], &[1.0, 2.0]), (1, f64::INFINITY));
        assert_eq!(worst_difference(&[1.0, 2.0], &[1.0, 2.0, 9.0]), (0, 0.0));
    }
}
