//! The first eight bytes of every connection: what it is and which version. The dialer speaks first and waits for the
//! answer, so that both sides learn of a difference before anything else is sent. A stray client of another protocol
//! is not answered at all.

use std::io::{Read, Write};
use std::net::{SocketAddr, ToSocketAddrs};
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
pub(crate) const GANG: Magic = Magic { stream: "gang stream", tag: *b"PWGANG", version: 1 };
pub(crate) const DATA: Magic = Magic { stream: "data plane", tag: *b"PWDATA", version: 2 };

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

    /// As [`Magic::dial`], on a socket that blocks; the read and write timeouts of a greeting are still set.
    pub(crate) fn dial_blocking(&self, address: &str) -> Result<std::net::TcpStream, NetError> {
        let connect = |source| NetError::Connect { peer: address.to_owned(), source };
        let failed = |source| NetError::Io { peer: address.to_owned(), what: "greet", source };
        let addresses: Vec<SocketAddr> = address.to_socket_addrs().map_err(connect)?.collect();
        let mut last = std::io::Error::new(std::io::ErrorKind::NotFound, "the name has no address");
        for address in addresses {
            match std::net::TcpStream::connect_timeout(&address, GREETING) {
                Ok(mut tcp) => {
                    prepare_blocking(&tcp).map_err(failed)?;
                    tcp.write_all(&self.bytes()).map_err(failed)?;
                    let mut theirs = [0; LENGTH];
                    tcp.read_exact(&mut theirs).map_err(failed)?;
                    self.check(&address.to_string(), theirs)?;
                    return Ok(tcp);
                }
                Err(error) => last = error,
            }
        }
        Err(connect(last))
    }

    /// As [`Magic::accept`], on a socket that blocks.
    pub(crate) fn accept_blocking(&self, tcp: &mut std::net::TcpStream, peer: &str) -> Result<(), NetError> {
        let failed = |source| NetError::Io { peer: peer.to_owned(), what: "read the greeting of", source };
        prepare_blocking(tcp).map_err(failed)?;
        let mut theirs = [0; LENGTH];
        tcp.read_exact(&mut theirs).map_err(failed)?;
        if theirs.starts_with(b"PW") {
            tcp.write_all(&self.bytes()).map_err(failed)?;
        }
        self.check(peer, theirs)
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
    let socket = SockRef::from(tcp);
    keep_alive(&socket);
}

/// The same; steps of the greeting are bounded until the timeouts are taken away.
fn prepare_blocking(tcp: &std::net::TcpStream) -> std::io::Result<()> {
    keep_alive(&SockRef::from(tcp));
    tcp.set_read_timeout(Some(GREETING))?;
    tcp.set_write_timeout(Some(GREETING))
}

/// Compares without telling by its time how much was right.
pub fn same_secret(ours: &[u8], theirs: &[u8]) -> bool {
    let difference = ours.iter().zip(theirs).fold(0, |all, (a, b)| all | (a ^ b));
    ours.len() == theirs.len() && difference == 0
}

fn keep_alive(socket: &SockRef<'_>) {
    let keepalive = TcpKeepalive::new().with_time(Duration::from_secs(10)).with_interval(Duration::from_secs(5));
    for result in [socket.set_tcp_nodelay(true), socket.set_tcp_keepalive(&keepalive)] {
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
