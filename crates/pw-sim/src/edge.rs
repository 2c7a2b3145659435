//! The edge: requests that wait for a paused session to go on, host buffers until they are routed, offers until they
//! are looked up.

use std::collections::{BTreeMap, VecDeque};

use pw_types::*;

use crate::failure::{Check, Invariant, violation};

#[derive(Default)]
struct Session {
    closed: bool,
    paused: bool,
    queue: VecDeque<(OpId, Request)>,
}

/// A host buffer on its way.
struct Stream {
    bytes: u64,
    content: Option<Result<u64, Status>>,
    hosts: Vec<(HostSlot, Incarnation)>,
    /// Routed or discarded.
    settled: bool,
}

type Pieces = Vec<(Option<i64>, u64)>;

#[derive(Default)]
pub(crate) struct Edge {
    sessions: BTreeMap<SessionId, Session>,
    streams: BTreeMap<(SessionId, Handle), Stream>,
    pub(crate) offers: BTreeMap<(SessionId, Handle), Result<Pieces, Status>>,
}

impl Edge {
    pub(crate) fn open(&mut self, id: SessionId) {
        self.sessions.insert(id, Session::default());
    }

    pub(crate) fn is_closed(&self, id: SessionId) -> bool {
        self.sessions.get(&id).is_none_or(|s| s.closed)
    }

    /// True if it was open.
    pub(crate) fn close(&mut self, id: SessionId) -> bool {
        let Some(session) = self.sessions.get_mut(&id).filter(|s| !s.closed) else { return false };
        session.closed = true;
        session.queue.clear();
        self.streams.retain(|(s, _), _| *s != id);
        self.offers.retain(|(s, _), _| *s != id);
        true
    }

    pub(crate) fn hold(&mut self, id: SessionId, op: OpId, request: Request) {
        self.sessions.get_mut(&id).expect("an open session").queue.push_back((op, request));
    }

    pub(crate) fn pause(&mut self, id: SessionId, paused: bool) {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.paused = paused;
        }
    }

    pub(crate) fn next_request(&mut self, id: SessionId) -> Option<(OpId, Request)> {
        self.sessions.get_mut(&id).filter(|s| !s.paused)?.queue.pop_front()
    }

    pub(crate) fn expect_stream(&mut self, id: SessionId, buffer: Handle, bytes: u64) {
        self.streams.insert((id, buffer), Stream { bytes, content: None, hosts: Vec::new(), settled: false });
    }

    /// The bytes are here; where they go now.
    pub(crate) fn arrived(&mut self, id: SessionId, buffer: Handle, content: Result<u64, Status>) -> Vec<(HostSlot, Incarnation)> {
        let Some(stream) = self.streams.get_mut(&(id, buffer)) else { return Vec::new() };
        stream.content = Some(content);
        std::mem::take(&mut stream.hosts)
    }

    /// The core wants the bytes at these workers; they are given if they are here.
    pub(crate) fn route(
        &mut self,
        id: SessionId,
        buffer: Handle,
        bytes: u64,
        hosts: &[(HostSlot, Incarnation)],
    ) -> Check<Option<Result<u64, Status>>> {
        if self.is_closed(id) {
            return Ok(None);
        }
        let Some(stream) = self.streams.get_mut(&(id, buffer)) else {
            return violation(Invariant::A9Answers, format!("host buffer {buffer} of session {id} is routed, but was never sent"));
        };
        if std::mem::replace(&mut stream.settled, true) || stream.bytes != bytes {
            let text = format!("host buffer {buffer} of session {id} is routed twice, or as {bytes} of {} bytes", stream.bytes);
            return violation(Invariant::A9Answers, text);
        }
        if stream.content.is_none() {
            stream.hosts = hosts.to_vec();
        }
        Ok(stream.content.clone())
    }

    pub(crate) fn discard(&mut self, id: SessionId, buffer: Handle) -> Check {
        if let Some(stream) = self.streams.get_mut(&(id, buffer))
            && std::mem::replace(&mut stream.settled, true)
        {
            return violation(Invariant::A9Answers, format!("host buffer {buffer} of session {id} is discarded after its end"));
        }
        Ok(())
    }

    /// Nothing is left to happen: every buffer was asked for or thrown away, every request sent.
    pub(crate) fn all_done(&self) -> Check {
        if let Some(((id, buffer), _)) = self.streams.iter().find(|(_, s)| !s.settled) {
            return violation(Invariant::A4Progress, format!("host buffer {buffer} of session {id} is neither routed nor discarded"));
        }
        match self.sessions.iter().find(|(_, s)| !s.queue.is_empty()) {
            None => Ok(()),
            Some((id, _)) => violation(Invariant::A4Progress, format!("session {id} is paused for ever")),
        }
    }
}
