//! What the commands share: addresses, tokens, the watch on a parent process, cache folder.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio::net::TcpListener;

/// Refuses to listen beyond this machine without a token.
pub(crate) fn check_exposure(what: &str, address: IpAddr, token: &str, insecure: bool) -> Result<()> {
    if address.is_loopback() || !token.is_empty() || insecure {
        return Ok(());
    }
    bail!(
        "{what} would listen on {address}, which other machines can reach, without a token; \
         set --token (or PATHWAYS_TOKEN) to the same secret on controller, workers and clients, \
         bind to 127.0.0.1, or accept the risk with --insecure"
    )
}

/// Opens a listening socket, saying what the port was for.
pub(crate) async fn listen(what: &str, address: SocketAddr) -> Result<TcpListener> {
    match TcpListener::bind(address).await {
        Ok(listener) => Ok(listener),
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
            bail!(
                "port {} for {what} is in use on {}; another controller may be running: choose another port, or 0 for any free one",
                address.port(),
                address.ip()
            )
        }
        Err(error) => Err(error).with_context(|| format!("cannot listen on {address} for {what}")),
    }
}

/// Ends this process when its parent is gone, so that nobody is left behind.
pub(crate) fn watch_parent(parent: Option<u32>) {
    let Some(parent) = parent else { return };
    let watch = move || {
        loop {
            if std::os::unix::process::parent_id() != parent {
                eprintln!("pathways: the process that started this one (pid {parent}) is gone; stopping");
                std::process::exit(3);
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    };
    std::thread::Builder::new().name("parent-watch".into()).spawn(watch).expect("the operating system gives a thread");
}

/// `--cache-dir`, else the user's cache folder.
pub(crate) fn cache_dir(given: Option<PathBuf>) -> Result<PathBuf> {
    if let Some(path) = given {
        return Ok(path);
    }
    let base = match std::env::var_os("XDG_CACHE_HOME").filter(|v| !v.is_empty()) {
        Some(base) => PathBuf::from(base),
        None => PathBuf::from(std::env::var_os("HOME").context("neither XDG_CACHE_HOME nor HOME is set; give --cache-dir")?).join(".cache"),
    };
    Ok(base.join("pathways-rs"))
}

/// This machine's name.
pub(crate) fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "localhost".to_owned() } else { name.to_owned() }
}

/// Resolves when the process is asked to stop; says by which signal.
pub(crate) async fn stop_signal() -> nix::sys::signal::Signal {
    use nix::sys::signal::Signal;
    use tokio::signal::unix::{SignalKind, signal};
    let (mut interrupt, mut terminate, mut hangup) =
        match (signal(SignalKind::interrupt()), signal(SignalKind::terminate()), signal(SignalKind::hangup())) {
            (Ok(i), Ok(t), Ok(h)) => (i, t, h),
            _ => return std::future::pending().await,
        };
    tokio::select! {
        _ = interrupt.recv() => Signal::SIGINT,
        _ = terminate.recv() => Signal::SIGTERM,
        _ = hangup.recv() => Signal::SIGHUP,
    }
}

/// `64MiB`, `1GiB`, `500000`.
pub(crate) fn parse_bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number: u64 = text[..digits].parse().map_err(|_| format!("'{text}' is not a number of bytes; write 500000, 64MiB or 1GiB"))?;
    let unit: u64 = match text[digits..].trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        other => return Err(format!("'{other}' is not a unit of bytes; use KiB, MiB, GiB (or KB, MB, GB)")),
    };
    number.checked_mul(unit).ok_or_else(|| format!("'{text}' is too large"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_with_units() {
        assert_eq!(parse_bytes("500000"), Ok(500_000));
        assert_eq!(parse_bytes("64MiB"), Ok(64 << 20));
        assert_eq!(parse_bytes("2 GB"), Ok(2_000_000_000));
        assert!(parse_bytes("lots").unwrap_err().contains("64MiB"));
        assert!(parse_bytes("3 apples").unwrap_err().contains("apples"));
    }

    #[test]
    fn only_loopback_may_go_without_a_token() {
        let open: IpAddr = "0.0.0.0".parse().unwrap();
        assert!(check_exposure("x", "127.0.0.1".parse().unwrap(), "", false).is_ok());
        assert!(check_exposure("x", open, "secret", false).is_ok());
        assert!(check_exposure("x", open, "", true).is_ok());
        assert!(check_exposure("x", open, "", false).unwrap_err().to_string().contains("PATHWAYS_TOKEN"));
    }
}
