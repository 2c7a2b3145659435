//! The first eight bytes of every connection: what it is and which version. The dialer speaks first and waits for the
//! answer, so that both sides learn of a difference before anything else is sent. A stray client of another protocol
//! is not answered at all.

use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::NetError;

const LENGTH: usize = 8;

/// How long a peer may take for connecting and for each step of the greeting.
pub(crate) const GREETING: Duration = Duration::from_secs(10);

pub(crate) struct Magic {
    stream: &'static str,
    tag: [u8; 6],
    version: u16,
}

pub(crate) const CONTROL: Magic = Magic { stream: "control stream", tag: *b"PWCTRL", version: 1 };
pub(crate) const DATA: Magic = Magic { stream: "data plane", tag: *b"PWDATA", version: 1 };

impl Magic {
    fn bytes(&self) -> [u8; LENGTH] {
        let mut bytes = [0; LENGTH];
        bytes[..6].copy_from_slice(&self.tag);
        bytes[6..].copy_from_slice(&self.version.to_le_bytes());
        bytes
    }

    fn check(&self, peer: &str, theirs: [u8; LENGTH]) -> Result<(), NetError> {
        if theirs[..6] != self.tag {
            return Err(NetError::NotOurs { peer: peer.to_owned(), began: format!("\"{}\"", theirs.escape_ascii()) });
        }
        let version = u16::from_le_bytes([theirs[6], theirs[7]]);
        if version != self.version {
            return Err(NetError::Version { peer: peer.to_owned(), stream: self.stream, theirs: version, ours: self.version });
        }
        Ok(())
    }

    /// Connects and greets.
    pub(crate) async fn dial(&self, address: &str) -> Result<TcpStream, NetError> {
        let connect = within(address, "accept a connection", TcpStream::connect(address));
        let mut tcp = connect.await?.map_err(|source| NetError::Connect { peer: address.to_owned(), source })?;
        prepare(&tcp);
        send(&mut tcp, address, &self.bytes()).await?;
        let theirs = within(address, "greet", receive(&mut tcp, address)).await??;
        self.check(address, theirs)?;
        Ok(tcp)
    }

    /// Greets whoever has connected.
    pub(crate) async fn accept(&self, tcp: &mut TcpStream, peer: &str) -> Result<(), NetError> {
        prepare(tcp);
        let theirs = within(peer, "greet", receive(tcp, peer)).await??;
        if theirs.starts_with(b"PW") {
            send(tcp, peer, &self.bytes()).await?;
        }
        self.check(peer, theirs)
    }
}

/// Bounds one step of the greeting.
pub(crate) async fn within<F: Future>(peer: &str, what: &'static str, step: F) -> Result<F::Output, NetError> {
    let late = |_| NetError::Timeout { peer: peer.to_owned(), what, seconds: GREETING.as_secs() };
    tokio::time::timeout(GREETING, step).await.map_err(late)
}

/// No delay, and notice a peer whose machine is gone. An old kernel that refuses is no reason to fail.
fn prepare(tcp: &TcpStream) {
    let keepalive = TcpKeepalive::new().with_time(Duration::from_secs(10)).with_interval(Duration::from_secs(5));
    let socket = SockRef::from(tcp);
    for result in [tcp.set_nodelay(true), socket.set_tcp_keepalive(&keepalive)] {
        if let Err(error) = result {
            tracing::debug!(%error, "cannot set a socket option");
        }
    }
}

async fn send(tcp: &mut TcpStream, peer: &str, bytes: &[u8]) -> Result<(), NetError> {
    tcp.write_all(bytes).await.map_err(|source| NetError::Io { peer: peer.to_owned(), what: "greet", source })
}

async fn receive(tcp: &mut TcpStream, peer: &str) -> Result<[u8; LENGTH], NetError> {
    let mut bytes = [0; LENGTH];
    match tcp.read_exact(&mut bytes).await {
        Ok(_) => Ok(bytes),
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
            Err(NetError::Closed { peer: peer.to_owned(), reason: format!("it ended before the {LENGTH} bytes of a greeting") })
        }
        Err(source) => Err(NetError::Io { peer: peer.to_owned(), what: "read the greeting of", source }),
    }
}
