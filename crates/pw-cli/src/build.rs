//! What build this is. Controller and workers must be equal.

use std::io::Read;
use std::sync::OnceLock;

/// Version and a checksum of this very binary.
pub(crate) fn id() -> &'static str {
    static ID: OnceLock<String> = OnceLock::new();
    ID.get_or_init(|| {
        let checksum = || -> std::io::Result<u32> {
            // The running image, even where the file has been replaced by a new build.
            let mut file = std::fs::File::open("/proc/self/exe").or_else(|_| std::fs::File::open(std::env::current_exe()?))?;
            let mut hasher = crc32fast::Hasher::new();
            let mut buffer = vec![0; 1 << 20];
            loop {
                match file.read(&mut buffer)? {
                    0 => return Ok(hasher.finalize()),
                    n => hasher.update(&buffer[..n]),
                }
            }
        };
        let version = env!("CARGO_PKG_VERSION");
        checksum().map_or_else(|_| version.to_owned(), |sum| format!("{version}+{sum:08x}"))
    })
}
