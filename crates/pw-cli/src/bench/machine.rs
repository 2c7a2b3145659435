//! What the kernel says about processes and the machine.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

/// Cores that others may use in a window that counts as quiet.
const QUIET_CORES: f64 = 0.15;

/// The kernel counts the machine's time in hundredths of a second.
const TICK_SECONDS: f64 = 0.01;

/// One line about the machine and how busy it is.
pub(super) fn describe() -> String {
    let cores = std::thread::available_parallelism().map_or(0, |n| n.get());
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load: Vec<&str> = load.split_whitespace().take(3).collect();
    format!("machine: {cores} cores, load average {}", load.join(" "))
}

/// CPU time and switches of one thread, or of several with one name.
#[derive(Clone, Copy, Default)]
pub(super) struct Usage {
    pub(super) cpu_ns: u64,
    /// Times that it went to sleep by itself: each needed a wake-up.
    pub(super) sleeps: u64,
}

/// Usage by name of the threads of a process; numbers at the end of a name are cut off.
pub(super) fn threads(pid: u32) -> BTreeMap<String, Usage> {
    let mut threads: BTreeMap<String, Usage> = BTreeMap::new();
    for task in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
        let read = |file: &str| fs::read_to_string(task.path().join(file)).unwrap_or_default();
        let name = read("comm").trim().trim_end_matches(|c: char| c.is_ascii_digit() || c == '-' || c == '/').to_owned();
        let usage = threads.entry(name).or_default();
        usage.cpu_ns += read("schedstat").split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(0);
        usage.sleeps += field(&read("status"), "voluntary_ctxt_switches:").unwrap_or(0);
    }
    threads
}

/// CPU time of a process, or of those of its threads that live.
pub(super) fn cpu_ns(pid: u32) -> u64 {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let of = |path: std::path::PathBuf| fs::read_to_string(path).ok()?.split_whitespace().next()?.parse::<u64>().ok();
    tasks.filter_map(|task| of(task.path().join("schedstat"))).sum()
}

/// Resident memory of a process in bytes.
pub(super) fn resident_bytes(pid: u32) -> u64 {
    field(&fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default(), "VmRSS:").unwrap_or(0) * 1024
}

pub(super) fn open_files(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
}

fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?.parse().ok()
}

/// Busy time of all cores so far.
fn busy_seconds() -> f64 {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let numbers: Vec<f64> = stat.lines().next().unwrap_or("").split_whitespace().skip(1).filter_map(|n| n.parse().ok()).collect();
    // user, nice, system, then idle and iowait, which are no work, then irq, softirq, steal.
    numbers.iter().take(8).enumerate().filter(|(i, _)| *i != 3 && *i != 4).map(|(_, n)| n * TICK_SECONDS).sum()
}

/// A window in which some processes are watched.
pub(super) struct Watch {
    own: Vec<u32>,
    began: Instant,
    busy: f64,
    cpu: f64,
}

impl Watch {
    /// `own`: the processes that belong to the bench, beside this one.
    pub(super) fn start(own: &[u32]) -> Watch {
        let own: Vec<u32> = own.iter().copied().chain([std::process::id()]).collect();
        Watch { cpu: seconds(&own), own, began: Instant::now(), busy: busy_seconds() }
    }

    /// Cores that others used since the start.
    pub(super) fn others(&self) -> f64 {
        let elapsed = self.began.elapsed().as_secs_f64();
        ((busy_seconds() - self.busy) - (seconds(&self.own) - self.cpu)).max(0.0) / elapsed.max(TICK_SECONDS)
    }
}

fn seconds(pids: &[u32]) -> f64 {
    pids.iter().map(|&pid| cpu_ns(pid) as f64 / 1e9).sum()
}

pub(super) fn is_quiet(others: f64) -> bool {
    others < QUIET_CORES
}

/// The most memory that a process has while `work` runs, beyond what it had before.
pub(super) fn growth<T>(pid: u32, work: impl FnOnce() -> T) -> (T, u64) {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    let (stop, most) = (AtomicBool::new(false), AtomicU64::new(0));
    let before = resident_bytes(pid);
    let result = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                most.fetch_max(resident_bytes(pid), Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        let result = work();
        stop.store(true, Ordering::Relaxed);
        result
    });
    (result, most.load(Ordering::Relaxed).saturating_sub(before))
}

/// Bytes that went over the loopback interface so far, where the kernel tells.
pub(super) fn loopback_bytes() -> Option<u64> {
    let table = std::fs::read_to_string("/proc/net/dev").ok()?;
    let line = table.lines().find_map(|line| line.trim_start().strip_prefix("lo:"))?;
    line.split_whitespace().next()?.parse().ok()
}
