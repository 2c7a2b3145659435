//! A client's TCP connection, which can be ended from elsewhere: HTTP/2 has no way to end a stream whose other side takes
//! nothing any more.

use std::io;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tonic::transport::server::Connected;

pub(crate) struct Connection {
    tcp: TcpStream,
    handle: ConnectionHandle,
}

/// Comes with every request of the connection.
#[derive(Clone)]
pub(crate) struct ConnectionHandle(Option<Arc<std::net::TcpStream>>);

impl ConnectionHandle {
    /// Ends the connection and everything on it.
    pub(crate) fn end(&self) {
        if let Some(tcp) = &self.0 {
            // It may have ended by itself.
            let _ = tcp.shutdown(Shutdown::Both);
        }
    }
}

impl Connection {
    pub(crate) fn new(tcp: TcpStream) -> Connection {
        let twin = tcp.as_fd().try_clone_to_owned().ok().map(|fd| Arc::new(std::net::TcpStream::from(fd)));
        Connection { tcp, handle: ConnectionHandle(twin) }
    }
}

impl Connected for Connection {
    type ConnectInfo = ConnectionHandle;

    fn connect_info(&self) -> ConnectionHandle {
        self.handle.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_read(cx, buf)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.tcp).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_shutdown(cx)
    }

    fn poll_write_vectored(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bufs: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.tcp).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.tcp.is_write_vectored()
    }
}
