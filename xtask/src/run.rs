//! Starting programs: with a line that says what is waited for, a log for what they print, and an end to all they started.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

const POLL: Duration = Duration::from_millis(50);
const SAY_STILL: Duration = Duration::from_secs(15);
const LOG_TAIL_LINES: usize = 40;

/// Prints a line that stands out as the task's own.
pub(crate) fn say(text: &str) {
    println!("» {text}");
    let _ = io::stdout().flush();
}

/// Runs `command` with its output in a log under `target/xtask/`; says what it waits for, and shows the log's end if it fails.
pub(crate) fn quiet(root: &Path, name: &str, what: &str, command: &mut Command) -> Result<(), String> {
    let dir = root.join("target/xtask");
    fs::create_dir_all(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let log = dir.join(format!("{name}.log"));
    let out = File::create(&log).map_err(|e| format!("{}: {e}", log.display()))?;
    let err = out.try_clone().map_err(|e| format!("{}: {e}", log.display()))?;
    say(&format!("{what} …"));
    let start = Instant::now();
    let mut child = Running::start(command.stdin(Stdio::null()).stdout(out).stderr(err))?;
    let mut said = start;
    let status = loop {
        if let Some(status) = child.poll()? {
            break status;
        }
        if said.elapsed() > SAY_STILL {
            said = Instant::now();
            say(&format!("{what}: {} s so far ({})", start.elapsed().as_secs(), last_line(&log)));
        }
        std::thread::sleep(POLL);
    };
    if status.success() {
        say(&format!("{what}: done in {:.1} s", start.elapsed().as_secs_f64()));
        return Ok(());
    }
    let text = fs::read_to_string(&log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let tail = lines[lines.len().saturating_sub(LOG_TAIL_LINES)..].join("\n");
    Err(format!("{what} failed ({status}). The end of {}:\n{tail}", log.display()))
}

/// Runs `command` with its output passed on line by line; `each` sees every line of standard output. Ended after `limit`.
pub(crate) fn shown(command: &mut Command, limit: Duration, mut each: impl FnMut(&str)) -> Result<ExitStatus, String> {
    let mut running = Running::start(command.stdin(Stdio::null()).stdout(Stdio::piped()))?;
    let stdout = running.child.stdout.take().ok_or("no standard output")?;
    let (tx, rx) = mpsc::channel();
    std::thread::spawn(move || {
        let mut reader = BufReader::new(stdout);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) && tx.send(std::mem::take(&mut line)).is_ok() {}
    });
    let start = Instant::now();
    loop {
        let left = limit.saturating_sub(start.elapsed());
        match rx.recv_timeout(left) {
            Ok(line) => {
                let mut out = io::stdout().lock();
                let _ = out.write_all(&line).and_then(|()| out.flush());
                each(String::from_utf8_lossy(&line).trim_end());
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => return running.wait(limit.saturating_sub(start.elapsed())),
            Err(mpsc::RecvTimeoutError::Timeout) => return Err(running.too_long(limit)),
        }
    }
}

/// Runs `command` on this terminal, so that it can draw its own progress. Ended after `limit`.
pub(crate) fn passed_through(command: &mut Command, limit: Duration) -> Result<ExitStatus, String> {
    Running::start(command.stdin(Stdio::null()))?.wait(limit)
}

/// What `command` prints on standard output, if it runs and succeeds.
pub(crate) fn output(command: &mut Command) -> Option<String> {
    let out = command.stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    out.status.success().then(|| String::from_utf8_lossy(&out.stdout).trim().to_owned())
}

/// A child that ends when this is dropped. It stays in the task's process group, so that Ctrl-C reaches it too.
pub(crate) struct Running {
    child: Child,
    name: String,
}

impl Running {
    pub(crate) fn start(command: &mut Command) -> Result<Self, String> {
        let name = command.get_program().to_string_lossy().into_owned();
        let child = command.spawn().map_err(|e| format!("cannot start {name}: {e}"))?;
        Ok(Self { child, name })
    }

    pub(crate) fn poll(&mut self) -> Result<Option<ExitStatus>, String> {
        self.child.try_wait().map_err(|e| format!("cannot wait for {}: {e}", self.name))
    }

    fn wait(&mut self, limit: Duration) -> Result<ExitStatus, String> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.poll()? {
                return Ok(status);
            }
            if start.elapsed() > limit {
                return Err(self.too_long(limit));
            }
            std::thread::sleep(POLL);
        }
    }

    fn too_long(&self, limit: Duration) -> String {
        format!("{} was ended after {} s", self.name, limit.as_secs())
    }
}

impl Drop for Running {
    /// Asks first: `pathways local` stops what it started when it is told to end.
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        // The standard library can only kill, and `unsafe` has no place here: the shell's own kill asks.
        let ask = format!("kill -TERM {}", self.child.id());
        let _ = Command::new("sh").args(["-c", &ask]).stderr(Stdio::null()).status();
        if self.wait(Duration::from_secs(5)).is_err() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

fn last_line(log: &PathBuf) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let line = text.lines().rev().find(|l| !l.trim().is_empty()).unwrap_or("no output yet");
    line.trim().chars().take(100).collect()
}
