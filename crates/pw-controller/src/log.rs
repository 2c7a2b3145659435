//! The event log: every event with its time, and the digest of each turn's effects (invariant A3).
//!
//! File: a text header with the core's configuration, then [`LogRecord`]s, each behind its length (u32, little endian).

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use pw_core::{Core, CoreConfig, Effects};
use pw_proto::control::{LogRecord, Wire};
use pw_types::{Event, Time};

const MAGIC: &[u8; 8] = b"PWLOG001";
const RECORD_BYTES_MAX: u32 = 1 << 30;

/// Why a log cannot be written or replayed.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    #[error("cannot create the event log {path}")]
    Create { path: PathBuf, source: io::Error },
    #[error("cannot read the event log {path}")]
    Read { path: PathBuf, source: io::Error },
    #[error("{path} is not an event log of this version")]
    NotALog { path: PathBuf },
    #[error("record {index} of {path} is broken: {reason}")]
    Broken { path: PathBuf, index: u64, reason: String },
    #[error(
        "turn {turn} (record {index}) had effects {expected:016x} when recorded and {found:016x} now; the first difference is in this turn"
    )]
    Differs { turn: u64, index: u64, expected: u64, found: u64 },
}

pub struct LogWriter {
    file: BufWriter<File>,
}

impl LogWriter {
    pub fn create(path: &Path, config: &CoreConfig) -> Result<LogWriter, LogError> {
        let open = || -> io::Result<LogWriter> {
            let mut file = BufWriter::new(File::create(path)?);
            let header = header(config);
            file.write_all(MAGIC)?;
            file.write_all(&(header.len() as u32).to_le_bytes())?;
            file.write_all(header.as_bytes())?;
            file.flush()?;
            Ok(LogWriter { file })
        };
        open().map_err(|source| LogError::Create { path: path.to_owned(), source })
    }

    /// Appends one event; the end of a turn brings the digest of its effects and reaches the file at once.
    pub fn write(&mut self, time: Time, event: Event, effects_digest: Option<u64>) -> io::Result<()> {
        let bytes = LogRecord { time, event, effects_digest }.to_bytes();
        self.file.write_all(&(bytes.len() as u32).to_le_bytes())?;
        self.file.write_all(&bytes)?;
        if effects_digest.is_some() { self.file.flush() } else { Ok(()) }
    }
}

fn header(c: &CoreConfig) -> String {
    format!(
        "expect_workers={}\nsession_wait_ns={}\nwindow_ns={}\nwindow_gangs_min={}\nwindow_gangs_max={}\nqueued_max={}\nqueued_bytes_max={}\nbuild={}\n",
        c.expect_workers, c.session_wait_ns, c.window_ns, c.window_gangs_min, c.window_gangs_max, c.queued_max, c.queued_bytes_max, c.build
    )
}

fn parse_header(text: &str) -> Option<CoreConfig> {
    let mut config = CoreConfig::default();
    for line in text.lines() {
        let (key, value) = line.split_once('=')?;
        match key {
            "expect_workers" => config.expect_workers = value.parse().ok()?,
            "session_wait_ns" => config.session_wait_ns = value.parse().ok()?,
            "window_ns" => config.window_ns = value.parse().ok()?,
            "window_gangs_min" => config.window_gangs_min = value.parse().ok()?,
            "window_gangs_max" => config.window_gangs_max = value.parse().ok()?,
            "queued_max" => config.queued_max = value.parse().ok()?,
            "queued_bytes_max" => config.queued_bytes_max = value.parse().ok()?,
            "build" => config.build = value.to_owned(),
            _ => return None,
        }
    }
    Some(config)
}

/// What a replay went through without a difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplaySummary {
    pub events: u64,
    pub turns: u64,
    pub effects: u64,
}

/// Runs a fresh core over a log and compares the effects of every turn. A torn last record (the process was killed) ends it.
pub fn replay(path: &Path, mut progress: impl FnMut(&ReplaySummary)) -> Result<ReplaySummary, LogError> {
    let unreadable = |source| LogError::Read { path: path.to_owned(), source };
    let not_a_log = || LogError::NotALog { path: path.to_owned() };
    let mut file = BufReader::new(File::open(path).map_err(unreadable)?);
    let mut magic = [0; 8];
    if read_or_end(&mut file, &mut magic).map_err(unreadable)? != Some(()) || magic != *MAGIC {
        return Err(not_a_log());
    }
    let header = next_record(&mut file).map_err(unreadable)?.ok_or_else(not_a_log)?;
    let config = std::str::from_utf8(&header).ok().and_then(parse_header).ok_or_else(not_a_log)?;
    let mut core = Core::new(config);
    let mut fx = Effects::default();
    let mut summary = ReplaySummary { events: 0, turns: 0, effects: 0 };
    while let Some(bytes) = next_record(&mut file).map_err(unreadable)? {
        let index = summary.events;
        let record = LogRecord::from_bytes(Bytes::from(bytes)).map_err(|error| LogError::Broken {
            path: path.to_owned(),
            index,
            reason: error.to_string(),
        })?;
        core.handle(record.time, record.event, &mut fx);
        summary.events += 1;
        if let Some(expected) = record.effects_digest {
            let found = fx.digest();
            if found != expected {
                return Err(LogError::Differs { turn: summary.turns, index, expected, found });
            }
            summary.turns += 1;
            summary.effects += fx.list.len() as u64;
            fx.list.clear();
            if summary.turns.is_multiple_of(1000) {
                progress(&summary);
            }
        }
    }
    Ok(summary)
}

fn next_record(file: &mut impl Read) -> io::Result<Option<Vec<u8>>> {
    let mut length = [0; 4];
    if read_or_end(file, &mut length)?.is_none() {
        return Ok(None);
    }
    let length = u32::from_le_bytes(length);
    if length > RECORD_BYTES_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a record of {length} bytes")));
    }
    let mut bytes = Vec::new();
    file.take(u64::from(length)).read_to_end(&mut bytes)?;
    Ok((bytes.len() == length as usize).then_some(bytes))
}

/// Fills `buffer`; `None` where the file ends first.
fn read_or_end(file: &mut impl Read, buffer: &mut [u8]) -> io::Result<Option<()>> {
    match file.read_exact(buffer) {
        Ok(()) => Ok(Some(())),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use pw_types::{SessionId, SessionOptions};

    use super::*;

    fn record(path: &Path) -> CoreConfig {
        let config = CoreConfig { expect_workers: 3, build: "b".into(), ..Default::default() };
        let mut log = LogWriter::create(path, &config).unwrap();
        let mut core = Core::new(config.clone());
        for turn in 0..3u64 {
            let mut fx = Effects::default();
            let event = Event::SessionOpened { session: SessionId(turn), options: SessionOptions::default() };
            for event in [event, Event::StatusQuery { query: turn }, Event::EndOfTurn] {
                let end = event == Event::EndOfTurn;
                core.handle(Time(turn), event.clone(), &mut fx);
                log.write(Time(turn), event, end.then(|| fx.digest())).unwrap();
            }
        }
        config
    }

    #[test]
    fn a_log_replays_and_a_changed_one_is_found_out() {
        let directory = std::env::temp_dir().join(format!("pw-log-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let path = directory.join("log");
        let config = record(&path);
        assert_eq!(parse_header(&header(&config)), Some(config));
        assert_eq!(replay(&path, |_| ()).unwrap(), ReplaySummary { events: 9, turns: 3, effects: 3 });

        // The same file with one digest changed, cut short, and something else.
        let bytes = std::fs::read(&path).unwrap();
        let mut wrong = bytes.clone();
        let last = wrong.len() - 1;
        wrong[last] ^= 1;
        std::fs::write(&path, &wrong).unwrap();
        assert!(matches!(replay(&path, |_| ()), Err(LogError::Differs { turn: 2, .. } | LogError::Broken { index: 8, .. })));
        std::fs::write(&path, &bytes[..bytes.len() - 3]).unwrap();
        assert_eq!(replay(&path, |_| ()).unwrap().turns, 2);
        std::fs::write(&path, b"GET / HTTP/1.1").unwrap();
        assert!(matches!(replay(&path, |_| ()), Err(LogError::NotALog { .. })));
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
