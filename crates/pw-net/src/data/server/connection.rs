//! One edge's connection at a worker: the greeting, also of one that broke and comes back, the reading of uploads, the
//! clearing up.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, MutexGuard};

use bytes::Bytes;
use pw_types::{Cause, Code, Handle, SessionId, Status};
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use super::{CONNECTIONS_MAX, Connection, Shared};
use crate::data::frame::{HEADER, Header, Key, Kind, decode_status, encode_status};
use crate::data::outbox::{Outbox, writer_ended};
use crate::data::wire::Incoming;
use crate::data::{UploadSink, UploadTarget};
use crate::{NetError, magic};

/// Small, so that little of a big upload is copied, yet many small ones come in one read.
const READ_BUFFER: usize = 16 << 10;

/// Uploads of one connection under way.
const UPLOADS_MAX: usize = 16 << 10;

const TOKEN_BYTES_MAX: u32 = 4 << 10;

/// Serves one TCP connection: a new connection to its end, or one that had broken and goes on.
pub(super) async fn serve(mut tcp: TcpStream, peer: String, shared: &Shared) {
    let served = match greet(&mut tcp, &peer, &shared.token).await {
        Ok(hello) if hello.kind == Kind::Hello => serve_new(tcp, &peer, &hello, shared).await,
        Ok(resume) => take_back(tcp, &peer, &resume, shared).await,
        Err(error) => Err(error),
    };
    if let Err(error) = served {
        tracing::warn!(peer, "a data-plane connection was refused: {}", error.chain());
    }
}

async fn greet(tcp: &mut TcpStream, peer: &str, token: &str) -> Result<Header, NetError> {
    magic::DATA.accept(tcp, peer).await?;
    let (header, theirs) = magic::within(peer, "show its token", read_token(tcp, peer)).await??;
    if !magic::same_secret(token.as_bytes(), &theirs) {
        return Err(refuse(tcp, peer, Code::Unauthenticated, "the token is wrong".to_owned()).await);
    }
    Ok(header)
}

/// Says so to the other side and gives the error for this one.
async fn refuse(tcp: &mut TcpStream, peer: &str, code: Code, why: String) -> NetError {
    let status = encode_status(&Status::new(code, why.clone()));
    let header = Header::new(Kind::Refused, (SessionId(0), Handle(0)), 0, status.len());
    match tcp.write_all(&[&header.encode()[..], &status].concat()).await {
        Ok(()) => NetError::Protocol { peer: peer.to_owned(), what: why },
        Err(source) => NetError::Io { peer: peer.to_owned(), what: "answer", source },
    }
}

async fn welcome(tcp: &mut TcpStream, peer: &str, received: u64) -> Result<(), NetError> {
    let answer = Header::new(Kind::Welcome, (SessionId(0), Handle(0)), received, 0).encode();
    tcp.write_all(&answer).await.map_err(|source| NetError::Io { peer: peer.to_owned(), what: "answer", source })
}

async fn read_token(tcp: &mut TcpStream, peer: &str) -> Result<(Header, Bytes), NetError> {
    let failed = |source| NetError::Io { peer: peer.to_owned(), what: "read the token of", source };
    let protocol = |what| NetError::Protocol { peer: peer.to_owned(), what };
    let mut header = [0; HEADER];
    tcp.read_exact(&mut header).await.map_err(failed)?;
    let header = Header::decode(&header).map_err(protocol)?;
    if !matches!(header.kind, Kind::Hello | Kind::Resume) || header.body > TOKEN_BYTES_MAX {
        return Err(protocol(format!("{:?} of {} bytes in place of a token", header.kind, header.body)));
    }
    let mut token = vec![0; header.body as usize];
    tcp.read_exact(&mut token).await.map_err(failed)?;
    Ok((header, token.into()))
}

async fn serve_new(mut tcp: TcpStream, peer: &str, hello: &Header, shared: &Shared) -> Result<(), NetError> {
    let connection = Arc::new(Connection { peer: peer.to_owned(), outbox: Outbox::new() });
    let _listed = match shared.list(hello.session, &connection) {
        Ok(listed) => listed,
        Err(why) => return Err(refuse(&mut tcp, peer, Code::ResourceExhausted, why).await),
    };
    welcome(&mut tcp, peer, 0).await?;
    let wire = &connection.outbox.wire;
    wire.open(wire.suspend("it was not there yet"), tcp, 0).map_err(|what| NetError::Protocol { peer: peer.to_owned(), what })?;
    tracing::debug!(peer, "an edge has come");
    let writer = Arc::clone(&connection);
    let mut writer = tokio::spawn(async move { writer.outbox.write_to_end().await });
    let mut uploads = Uploads { shared, connection: &connection, sink: &*shared.sink, open: BTreeMap::new(), scrap: Vec::new() };
    let mut stop = shared.stop.subscribe();
    let why = tokio::select! {
        why = connection.outbox.wait_closed() => why,
        why = uploads.read_all(BufReader::with_capacity(READ_BUFFER, Incoming(Arc::clone(wire)))) => why,
        why = wire.given_up() => why,
        ended = &mut writer => writer_ended(ended),
        _ = stop.wait_for(|stop| *stop) => "the worker ends".to_owned(),
    };
    connection.outbox.close(&why);
    wire.close();
    uploads.end(&why);
    Ok(())
}

/// Gives a TCP connection to the connection that it belongs to, whose task goes on with it.
async fn take_back(mut tcp: TcpStream, peer: &str, resume: &Header, shared: &Shared) -> Result<(), NetError> {
    let Some(connection) = shared.connections().get(&resume.session).cloned() else {
        let why = "this worker does not know the connection, or has given it up";
        return Err(refuse(&mut tcp, peer, Code::NotFound, why.to_owned()).await);
    };
    let wire = &connection.outbox.wire;
    if let Err(why) = wire.check(resume.value) {
        return Err(refuse(&mut tcp, peer, Code::InvalidArgument, why).await);
    }
    let attempt = wire.suspend("it has opened a new one");
    welcome(&mut tcp, peer, attempt.received).await?;
    match wire.open(attempt, tcp, resume.value) {
        Ok(()) => tracing::info!(peer, "a connection for array bytes broke and is there again; nothing is lost"),
        Err(why) => connection.outbox.close(&format!("it broke the protocol: {why}")),
    }
    Ok(())
}

/// A connection that may be asked for by its name, until this is dropped.
struct Listed<'a> {
    shared: &'a Shared,
    name: SessionId,
}

impl Drop for Listed<'_> {
    fn drop(&mut self) {
        self.shared.connections().remove(&self.name);
    }
}

impl Shared {
    fn list(&self, name: SessionId, connection: &Arc<Connection>) -> Result<Listed<'_>, String> {
        let mut connections = self.connections();
        if connections.len() >= CONNECTIONS_MAX {
            return Err(format!("there are {CONNECTIONS_MAX} connections already"));
        }
        if connections.contains_key(&name) {
            return Err(format!("there is a connection {} already", name.0));
        }
        connections.insert(name, Arc::clone(connection));
        Ok(Listed { shared: self, name })
    }

    fn connections(&self) -> MutexGuard<'_, BTreeMap<SessionId, Arc<Connection>>> {
        self.connections.lock().expect("nothing panics while it holds the connections")
    }
}

/// What the reader of a connection knows.
struct Uploads<'a> {
    shared: &'a Shared,
    connection: &'a Arc<Connection>,
    sink: &'a dyn UploadSink,
    open: BTreeMap<Key, Upload>,
    /// For bytes that nobody wants.
    scrap: Vec<u8>,
}

struct Upload {
    /// `None` = refused: its bytes are thrown away.
    target: Option<Box<dyn UploadTarget>>,
    total: u64,
    received: u64,
}

/// Why the reading of a connection ends.
enum End {
    /// The edge has said so.
    Told,
    Io(io::Error),
    Protocol(String),
}

impl Uploads<'_> {
    async fn read_all(&mut self, mut read: BufReader<Incoming>) -> String {
        loop {
            match self.read_frame(&mut read).await {
                Ok(()) => {}
                Err(End::Told) => return "it ended".to_owned(),
                Err(End::Protocol(what)) => return format!("it broke the protocol: {what}"),
                Err(End::Io(error)) => return format!("reading failed: {error}"),
            }
        }
    }

    async fn read_frame(&mut self, read: &mut BufReader<Incoming>) -> Result<(), End> {
        let mut header = [0; HEADER];
        read.read_exact(&mut header).await.map_err(End::Io)?;
        let header = Header::decode(&header).map_err(End::Protocol)?;
        let key = header.key();
        let mut ended = false;
        match header.kind {
            Kind::Ack => self.connection.outbox.acknowledged(header.value).map_err(End::Protocol)?,
            Kind::End => return Err(End::Told),
            Kind::PutBegin => {
                self.begin(key, header.value)?;
                ended = self.body(key, header.body as usize, read).await?;
            }
            Kind::Chunk => ended = self.body(key, header.body as usize, read).await?,
            Kind::PutAbort => {
                let mut status = vec![0; header.body as usize];
                read.read_exact(&mut status).await.map_err(End::Io)?;
                self.abort(key, decode_status(status.into()));
                ended = true;
            }
            Kind::Attach => {
                self.shared.attach(header.session, self.connection);
                self.sink.attached(header.session);
            }
            Kind::Detach => {
                self.detach(header.session);
                ended = true;
            }
            Kind::Pull => {
                let outbox = &self.connection.outbox;
                outbox.lock().update(key, |download| download.allowed = download.allowed.saturating_add(header.value));
                outbox.wake();
            }
            Kind::Drop => {
                let dropped = self.connection.outbox.lock().remove(key);
                drop(dropped);
            }
            kind => return Err(End::Protocol(format!("an edge does not send {kind:?}"))),
        }
        self.connection.outbox.took(&header, ended);
        Ok(())
    }

    fn begin(&mut self, key: Key, total: u64) -> Result<(), End> {
        let (session, buffer) = key;
        if self.open.contains_key(&key) {
            return Err(End::Protocol(format!("host buffer {buffer} of session {session} begins twice")));
        }
        let target = if self.open.len() < UPLOADS_MAX {
            let made = self.sink.begin(session, buffer, total);
            made.map_err(|status| tracing::debug!(%session, %buffer, %status, "an upload was refused")).ok()
        } else {
            let text = format!("{UPLOADS_MAX} uploads of one edge are under way");
            self.sink.failed(session, buffer, Status::new(Code::ResourceExhausted, text).with_cause(Cause::Limit));
            None
        };
        self.open.insert(key, Upload { target, total, received: 0 });
        Ok(())
    }

    /// Reads the next bytes of an upload straight into their place. True where they were the last.
    async fn body(&mut self, key: Key, length: usize, read: &mut BufReader<Incoming>) -> Result<bool, End> {
        let (session, buffer) = key;
        let Some(upload) = self.open.get_mut(&key) else {
            return Err(End::Protocol(format!("bytes of host buffer {buffer} of session {session}, which has not begun")));
        };
        let end = upload.received + length as u64;
        if end > upload.total {
            let what = format!("host buffer {buffer} of session {session} has more than its {} bytes", upload.total);
            return Err(End::Protocol(what));
        }
        let place = match &mut upload.target {
            Some(target) => target.bytes().get_mut(upload.received as usize..end as usize),
            None => {
                self.scrap.resize(length, 0);
                Some(&mut self.scrap[..])
            }
        };
        // Only a target that is shorter than it was asked to be.
        let place = place.ok_or_else(|| End::Protocol(format!("no room for host buffer {buffer} of session {session}")))?;
        read.read_exact(place).await.map_err(End::Io)?;
        upload.received = end;
        let ended = end == upload.total;
        if ended {
            let target = self.open.remove(&key).and_then(|upload| upload.target);
            if let Some(target) = target {
                self.sink.landed(session, buffer, target);
            }
        }
        Ok(ended)
    }

    fn abort(&mut self, key: Key, status: Status) {
        // A refused one has failed already; one that never began still has somebody waiting for it.
        let refused = self.open.remove(&key).is_some_and(|upload| upload.target.is_none());
        if !refused {
            self.sink.failed(key.0, key.1, status);
        }
    }

    fn detach(&mut self, session: SessionId) {
        let status = Status::new(Code::Cancelled, "the client has left").with_cause(Cause::Cancelled);
        self.fail(|key| key.0 == session, &status);
        if self.shared.detach(session, self.connection) {
            self.sink.detached(session);
        }
    }

    /// Fails the uploads under way that `which` names.
    fn fail(&mut self, which: impl Fn(&Key) -> bool, status: &Status) {
        let keys: Vec<Key> = self.open.keys().copied().filter(which).collect();
        for key in keys {
            let upload = self.open.remove(&key);
            if upload.is_some_and(|upload| upload.target.is_some()) {
                self.sink.failed(key.0, key.1, status.clone());
            }
        }
    }

    fn end(&mut self, why: &str) {
        let peer = &self.connection.peer;
        tracing::info!(peer, why, "the connection of an edge is gone");
        let status = Status::new(Code::Unavailable, format!("the connection of the edge at {peer} is gone: {why}"));
        self.fail(|_| true, &status);
        for session in self.shared.sessions_of(self.connection) {
            self.detach(session);
        }
        // Offers of sessions that another connection has taken over.
        let rest = self.connection.outbox.lock().clear();
        drop(rest);
    }
}
