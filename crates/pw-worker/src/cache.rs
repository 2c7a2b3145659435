//! Compiled programs on disk, by what they were made of.
//!
//! An entry is a few files, the serialized executable, its report and perhaps its form for one device, each behind a
//! digest and written under another name first, so that a reader sees a whole file or none; the report comes last. What is
//! damaged counts as absent and is written again. The executable of a program for members of a gang is empty, since nobody
//! could load it; its optimized module is there to be described.
//! Processes share a folder without talking: the same key always means the same contents.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::UNIX_EPOCH;

use bytes::Bytes;
use pw_proto::control::Wire;
use pw_types::{CompileReport, Status};
use sha2::{Digest, Sha256};

/// Part of every key: another number wherever the meaning of an entry, of any of its files, changes.
const FORMAT: &[u8] = b"pathways compiled program 6";

const DIGEST: usize = 32;

/// The fingerprint of a compiled program.
pub(crate) type Key = Bytes;

#[derive(Clone, Debug)]
pub(crate) struct Cache {
    folder: PathBuf,
    /// Digest of what is equal for all programs: format, plugin, CPU.
    base: [u8; DIGEST],
}

impl Cache {
    /// Opens the folder for programs of this plugin on this machine that may name these custom-call targets.
    pub(crate) fn open(folder: &Path, plugin: &Path, targets: &str) -> io::Result<Cache> {
        fs::create_dir_all(folder)?;
        let mut base = Sha256::new();
        let plugin = plugin_digest(folder, plugin)?;
        for part in [FORMAT, &plugin, cpu_features().as_bytes(), targets.as_bytes()] {
            add(&mut base, part);
        }
        Ok(Cache { folder: folder.to_owned(), base: base.finalize().into() })
    }

    /// The key of a program with options that have been cleaned.
    pub(crate) fn key(&self, program: &[u8], options: &[u8], gang: bool) -> Key {
        let mut hash = Sha256::new();
        let form: &[u8] = if gang { b"for members of a gang" } else { b"" };
        for part in [&self.base[..], program, options, form] {
            add(&mut hash, part);
        }
        Bytes::copy_from_slice(&hash.finalize())
    }

    pub(crate) fn report(&self, key: &[u8]) -> Option<CompileReport> {
        // A report without its program, or with a damaged one, is no entry.
        self.program(key)?;
        let body = read(&self.path(key, "report"))?;
        CompileReport::from_bytes(Bytes::from(body)).ok().filter(|r| r.fingerprint == key)
    }

    pub(crate) fn program(&self, key: &[u8]) -> Option<Vec<u8>> {
        read(&self.path(key, "program"))
    }

    /// The form for one device at a time, where there is one.
    pub(crate) fn member(&self, key: &[u8]) -> Option<Vec<u8>> {
        read(&self.path(key, "member"))
    }

    /// The optimized module of a program for members of a gang, which no worker has the devices to load as a whole.
    pub(crate) fn module(&self, key: &[u8]) -> Option<Vec<u8>> {
        read(&self.path(key, "module"))
    }

    pub(crate) fn store_module(&self, key: &[u8], module: &[u8]) -> io::Result<()> {
        write(&self.path(key, "module"), module)
    }

    pub(crate) fn store(&self, key: &[u8], program: &[u8], member: Option<&[u8]>, report: &CompileReport) -> io::Result<()> {
        write(&self.path(key, "program"), program)?;
        if let Some(member) = member {
            write(&self.path(key, "member"), member)?;
        }
        write(&self.path(key, "report"), &report.to_bytes())
    }

    /// Removes an entry that turned out to be unusable.
    pub(crate) fn forget(&self, key: &[u8]) {
        for kind in ["report", "member", "module", "program"] {
            let _ = fs::remove_file(self.path(key, kind));
        }
    }

    pub(crate) fn missing(&self, key: &[u8]) -> Status {
        Status::not_found(format!("compiled program {} is not in the cache {}", hex(key), self.folder.display()))
    }

    fn path(&self, key: &[u8], kind: &str) -> PathBuf {
        self.folder.join(format!("{}.{kind}", hex(key)))
    }
}

/// A part with its length, so that no two lists of parts look alike.
fn add(hash: &mut Sha256, part: &[u8]) {
    hash.update((part.len() as u64).to_le_bytes());
    hash.update(part);
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// The body of a file whose digest is right.
fn read(path: &Path) -> Option<Vec<u8>> {
    let mut contents = fs::read(path).ok()?;
    let body = contents.get(DIGEST..)?;
    let good = Sha256::digest(body)[..] == contents[..DIGEST];
    if !good {
        tracing::warn!(path = %path.display(), "a damaged file in the cache of compiled programs is ignored");
        return None;
    }
    contents.drain(..DIGEST);
    Some(contents)
}

fn write(path: &Path, body: &[u8]) -> io::Result<()> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let unique = format!("tmp-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let temporary = path.with_extension(unique);
    let result = (|| {
        let mut file = fs::File::create(&temporary)?;
        file.write_all(&Sha256::digest(body))?;
        file.write_all(body)?;
        file.sync_data()?;
        fs::rename(&temporary, path)
    })();
    if result.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    result
}

/// Digest of the plugin's file, remembered in the folder by path, size and time: the file has hundreds of megabytes.
fn plugin_digest(folder: &Path, plugin: &Path) -> io::Result<[u8; DIGEST]> {
    let real = plugin.canonicalize()?;
    let metadata = real.metadata()?;
    let time = metadata.modified()?.duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut identity = Sha256::new();
    for part in [real.as_os_str().as_encoded_bytes(), &metadata.len().to_le_bytes(), &time.as_nanos().to_le_bytes()] {
        add(&mut identity, part);
    }
    let note = folder.join(format!("plugin-{}.digest", hex(&identity.finalize()[..8])));
    if let Some(known) = read(&note).and_then(|body| body.try_into().ok()) {
        return Ok(known);
    }
    let mut file = fs::File::open(&real)?;
    let mut hash = Sha256::new();
    io::copy(&mut file, &mut hash)?;
    let digest: [u8; DIGEST] = hash.finalize().into();
    write(&note, &digest)?;
    Ok(digest)
}

/// What the machine code of this host may use. A load does not check it.
fn cpu_features() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = |name: &str| info.lines().find(|l| l.starts_with(name)).and_then(|l| l.split_once(':')).map_or("", |(_, v)| v.trim());
    format!("{} {} {}", std::env::consts::ARCH, line("flags"), line("Features"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(fingerprint: Bytes) -> CompileReport {
        CompileReport {
            name: "jit_f".to_owned(),
            fingerprint,
            replicas: 1,
            partitions: 1,
            parameters: Vec::new(),
            outputs: Vec::new(),
            donated: Vec::new(),
            memory: Default::default(),
            layouts_error: None,
            collectives: 0,
            host_callbacks: false,
        }
    }

    #[test]
    fn entries_are_found_again_unless_damaged() {
        let folder = std::env::temp_dir().join(format!("pathways-cache-test-{}", std::process::id()));
        let plugin = std::env::current_exe().unwrap();
        let cache = Cache::open(&folder, &plugin, "").unwrap();
        let key = cache.key(b"program", b"options", false);
        assert_ne!(key, cache.key(b"programo", b"ptions", false));
        assert_eq!(key, Cache::open(&folder, &plugin, "").unwrap().key(b"program", b"options", false));
        assert_ne!(key, Cache::open(&folder, &plugin, "lapack").unwrap().key(b"program", b"options", false));
        assert!(cache.report(&key).is_none());
        let stored = report(key.clone());
        cache.store(&key, b"blob", Some(b"one"), &stored).unwrap();
        assert_eq!(cache.report(&key), Some(stored.clone()));
        assert_eq!(cache.program(&key).as_deref(), Some(&b"blob"[..]));
        assert_eq!(cache.member(&key).as_deref(), Some(&b"one"[..]));

        let path = cache.path(&key, "program");
        let mut bytes = fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&path, bytes).unwrap();
        assert!(cache.program(&key).is_none() && cache.report(&key).is_none());
        fs::write(cache.path(&key, "report"), b"short").unwrap();
        assert!(cache.report(&key).is_none());
        cache.store(&key, b"blob", Some(b"one"), &stored).unwrap();
        assert!(cache.program(&key).is_some() && cache.report(&key).is_some());
        cache.forget(&key);
        assert!(cache.report(&key).is_none());
        fs::remove_dir_all(&folder).unwrap();
    }
}
