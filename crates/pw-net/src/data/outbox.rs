//! What waits to be written on one connection, and the writing of it. Edge and worker use the same.
//!
//! Order: control frames first, in theirs; then first frames of transfers (small); then the others take turns, a slice
//! each. One write holds at most about a slice, so whatever comes in waits for one slice at most.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use pw_types::{Handle, SessionId};
use tokio::sync::{Notify, watch};
use tokio::task::JoinError;

use super::frame::{HEADER, Header, Key};
use super::kept::Piece;
use super::wire::{Outgoing, Wire};
use super::{FIRST_BYTES, SLICE_BYTES};

/// Most frames of one write, counted up to and including each class, so that none shuts out the ones below it. A frame
/// is two buffers of the system call, which takes 1024.
const CONTROL_PER_WRITE: usize = 128;
const FRESH_PER_WRITE: usize = 192;
const FRAMES_PER_WRITE: usize = 256;

/// Bytes of first frames in one write that also has to serve transfers under way.
const FIRST_BYTES_PER_WRITE: usize = 4 * FIRST_BYTES;

/// How long what is being written may take when the connection is to end, so that the end can be told.
const LAST_WRITE: Duration = Duration::from_secs(1);

/// A frame to write.
pub(super) struct Frame {
    pub(super) header: Header,
    pub(super) body: Piece,
}

impl Frame {
    /// A frame that is no part of a transfer's bytes.
    pub(super) fn control(kind: super::frame::Kind, key: Key, value: u64, body: Bytes) -> Frame {
        Frame { header: Header::new(kind, key, value, body.len()), body: Piece::Bytes(body) }
    }
}

/// A transfer under way.
pub(super) trait Flow {
    /// The first frame has not been made yet.
    fn is_fresh(&self) -> bool;
    /// Has something to send now.
    fn is_ready(&self) -> bool;
    /// Bytes that it holds, for a bound.
    fn waiting_bytes(&self) -> usize;
    /// Has sent everything.
    fn is_finished(&self) -> bool;
    /// The next frame of a ready flow, its body at most `limit` bytes.
    fn next(&mut self, key: Key, limit: usize) -> Frame;
}

pub(super) struct Queues<F> {
    control: VecDeque<Frame>,
    flows: BTreeMap<Key, Entry<F>>,
    fresh: VecDeque<Key>,
    turns: VecDeque<Key>,
    /// Of all flows.
    waiting_bytes: usize,
}

struct Entry<F> {
    flow: F,
    /// Stands in `fresh` or `turns`.
    queued: bool,
}

impl<F: Flow> Queues<F> {
    pub(super) fn push(&mut self, frame: Frame) {
        self.control.push_back(frame);
    }

    pub(super) fn control_len(&self) -> usize {
        self.control.len()
    }

    pub(super) fn flows_len(&self) -> usize {
        self.flows.len()
    }

    /// Adds a transfer; whoever had its name before is given back.
    pub(super) fn insert(&mut self, key: Key, flow: F) -> Option<F> {
        let old = self.remove(key);
        self.waiting_bytes += flow.waiting_bytes();
        self.flows.insert(key, Entry { flow, queued: false });
        self.enqueue(key);
        old
    }

    pub(super) fn remove(&mut self, key: Key) -> Option<F> {
        let entry = self.flows.remove(&key)?;
        if entry.queued {
            self.fresh.retain(|k| *k != key);
            self.turns.retain(|k| *k != key);
        }
        self.waiting_bytes -= entry.flow.waiting_bytes();
        Some(entry.flow)
    }

    /// All transfers of a session.
    pub(super) fn remove_session(&mut self, session: SessionId) -> Vec<F> {
        let keys: Vec<Key> = self.flows.range((session, Handle(0))..=(session, Handle(u64::MAX))).map(|(key, _)| *key).collect();
        keys.into_iter().filter_map(|key| self.remove(key)).collect()
    }

    /// Everything.
    pub(super) fn clear(&mut self) -> Vec<F> {
        self.control.clear();
        self.fresh.clear();
        self.turns.clear();
        self.waiting_bytes = 0;
        std::mem::take(&mut self.flows).into_values().map(|entry| entry.flow).collect()
    }

    pub(super) fn waiting_bytes(&self) -> usize {
        self.waiting_bytes
    }

    pub(super) fn get(&self, key: Key) -> Option<&F> {
        self.flows.get(&key).map(|entry| &entry.flow)
    }

    /// Changes a transfer, which may make it ready.
    pub(super) fn update<R>(&mut self, key: Key, change: impl FnOnce(&mut F) -> R) -> Option<R> {
        let flow = &mut self.flows.get_mut(&key)?.flow;
        self.waiting_bytes -= flow.waiting_bytes();
        let result = change(flow);
        self.waiting_bytes += flow.waiting_bytes();
        self.enqueue(key);
        Some(result)
    }

    fn enqueue(&mut self, key: Key) {
        let Some(entry) = self.flows.get_mut(&key) else { return };
        if entry.queued || !entry.flow.is_ready() {
            return;
        }
        entry.queued = true;
        if entry.flow.is_fresh() { self.fresh.push_back(key) } else { self.turns.push_back(key) }
    }

    /// Takes the frames of one write; transfers that are sent with it go to `finished`.
    fn take(&mut self, frames: &mut Vec<Frame>, finished: &mut Vec<F>) {
        let control = self.control.len().min(CONTROL_PER_WRITE);
        frames.extend(self.control.drain(..control));
        let mut first = 0;
        while frames.len() < FRESH_PER_WRITE && first < FIRST_BYTES_PER_WRITE {
            let Some(key) = self.fresh.pop_front() else { break };
            first += self.take_frame(key, FIRST_BYTES, frames, finished);
        }
        let mut size = first;
        while frames.len() < FRAMES_PER_WRITE && size < SLICE_BYTES {
            let Some(key) = self.turns.pop_front() else { break };
            size += self.take_frame(key, SLICE_BYTES, frames, finished);
        }
    }

    fn take_frame(&mut self, key: Key, limit: usize, frames: &mut Vec<Frame>, finished: &mut Vec<F>) -> usize {
        let entry = self.flows.get_mut(&key).expect("a key in a queue has its flow");
        self.waiting_bytes -= entry.flow.waiting_bytes();
        let frame = entry.flow.next(key, limit);
        self.waiting_bytes += entry.flow.waiting_bytes();
        let size = HEADER + frame.header.body as usize;
        frames.push(frame);
        entry.queued = false;
        if entry.flow.is_finished() {
            finished.extend(self.flows.remove(&key).map(|entry| entry.flow));
        } else {
            self.enqueue(key);
        }
        size
    }
}

/// The queues of a connection, shared by those who fill them and the one who writes.
pub(super) struct Outbox<F> {
    queues: Mutex<Queues<F>>,
    /// Wakes the writer.
    filled: Notify,
    /// Wakes those who wait for room.
    pub(super) emptied: Notify,
    /// Set once: why the connection is at its end.
    closing: watch::Sender<Option<String>>,
    pub(super) wire: Arc<Wire>,
}

impl<F: Flow> Outbox<F> {
    pub(super) fn new() -> Outbox<F> {
        let queues =
            Queues { control: VecDeque::new(), flows: BTreeMap::new(), fresh: VecDeque::new(), turns: VecDeque::new(), waiting_bytes: 0 };
        let (filled, emptied) = (Notify::new(), Notify::new());
        Outbox { queues: Mutex::new(queues), filled, emptied, closing: watch::Sender::new(None), wire: Wire::new() }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Queues<F>> {
        self.queues.lock().expect("nothing panics while it holds the queues")
    }

    /// To be called after the queues were filled.
    pub(super) fn wake(&self) {
        self.filled.notify_one();
    }

    /// Ends the connection; the first reason counts.
    pub(super) fn close(&self, reason: &str) {
        self.closing.send_if_modified(|closing| {
            let first = closing.is_none();
            if first {
                *closing = Some(reason.to_owned());
            }
            first
        });
        self.filled.notify_one();
        self.emptied.notify_waiters();
    }

    pub(super) fn closed(&self) -> Option<String> {
        self.closing.borrow().clone()
    }

    /// Returns with the reason when the connection is to end.
    pub(super) async fn wait_closed(&self) -> String {
        let mut closing = self.closing.subscribe();
        // The sender is in `self`, so the wait cannot fail.
        closing.wait_for(Option::is_some).await.ok().and_then(|reason| reason.clone()).unwrap_or_default()
    }

    /// A frame was read, and what is in it was taken; `ended` with the last bytes of a transfer, or was for none.
    pub(super) fn took(&self, header: &Header, ended: bool) {
        if self.wire.took(header.is_last(ended)) {
            self.wake();
        }
    }

    /// The peer is to know what was received: it may hold memory of transfers that are given up here.
    pub(super) fn acknowledge(&self) {
        self.wire.took(true);
        self.wake();
    }

    /// The peer has so many bytes.
    pub(super) fn acknowledged(&self, count: u64) -> Result<(), String> {
        if self.wire.acknowledged(count)? {
            self.wake();
        }
        Ok(())
    }

    /// Writes until the connection is to end, over one TCP connection after the other, and tells the peer. Gives the reason.
    pub(super) async fn write_to_end(&self) -> String {
        let late = async {
            let why = self.wait_closed().await;
            tokio::time::sleep(LAST_WRITE).await;
            why
        };
        tokio::select! {
            why = late => why,
            why = self.write_all() => why,
        }
    }

    async fn write_all(&self) -> String {
        loop {
            let mut outgoing = tokio::select! {
                outgoing = self.wire.outgoing() => outgoing,
                why = self.wait_closed() => return why,
            };
            let number = outgoing.number();
            let written = tokio::select! {
                written = self.write_on(&mut outgoing) => written,
                () = self.wire.replaced(number) => continue,
            };
            match written {
                Ok(why) => return why,
                Err(error) => self.wire.broke(number, &format!("writing failed: {error}")),
            }
        }
    }

    /// Between a frame being taken and its bytes being kept nothing is awaited, so this may be dropped at any time.
    async fn write_on(&self, outgoing: &mut Outgoing) -> io::Result<String> {
        outgoing.repeat().await?;
        let mut frames = Vec::new();
        let mut finished = Vec::new();
        loop {
            if let Some(why) = self.closed() {
                // The peer may have gone first.
                let _ = outgoing.end().await;
                return Ok(why);
            }
            if self.wire.has_room() {
                self.lock().take(&mut frames, &mut finished);
            }
            let pieces = self.wire.keep(&mut frames);
            if pieces.is_empty() {
                self.filled.notified().await;
                continue;
            }
            frames.clear();
            self.emptied.notify_waiters();
            outgoing.write(&pieces).await?;
            finished.clear();
        }
    }
}

/// Why the task of a writer ended. It panics only where a source of bytes does.
pub(super) fn writer_ended(ended: Result<String, JoinError>) -> String {
    ended.unwrap_or_else(|error| {
        tracing::error!(%error, "the writer of a data-plane connection failed");
        format!("its writer failed: {error}")
    })
}

#[cfg(test)]
mod tests {
    use super::super::frame::Kind;
    use super::*;

    const S: SessionId = SessionId(1);

    /// So many bytes to send.
    struct Bulk {
        begun: bool,
        left: usize,
    }

    impl Flow for Bulk {
        fn is_fresh(&self) -> bool {
            !self.begun
        }

        fn is_ready(&self) -> bool {
            !self.begun || self.left > 0
        }

        fn waiting_bytes(&self) -> usize {
            self.left
        }

        fn is_finished(&self) -> bool {
            self.begun && self.left == 0
        }

        fn next(&mut self, key: Key, limit: usize) -> Frame {
            self.begun = true;
            let length = self.left.min(limit);
            self.left -= length;
            Frame::control(Kind::Chunk, key, 0, Bytes::from(vec![0; length]))
        }
    }

    fn insert(outbox: &Outbox<Bulk>, buffer: u64, left: usize) {
        outbox.lock().insert((S, Handle(buffer)), Bulk { begun: false, left });
    }

    /// The frames of the next write as (buffer, bytes), and how many transfers it finishes.
    fn write(outbox: &Outbox<Bulk>) -> (Vec<(u64, usize)>, usize) {
        let (mut frames, mut finished) = (Vec::new(), Vec::new());
        outbox.lock().take(&mut frames, &mut finished);
        (frames.iter().map(|f| (f.header.buffer.0, f.header.body as usize)).collect(), finished.len())
    }

    #[test]
    fn transfers_take_turns_and_small_ones_overtake() {
        let outbox = Outbox::new();
        for buffer in 1..=3 {
            insert(&outbox, buffer, 3 * SLICE_BYTES);
        }
        let first = [(1, FIRST_BYTES), (2, FIRST_BYTES), (3, FIRST_BYTES)];
        assert_eq!(write(&outbox), ([&first[..], &[(1, SLICE_BYTES)]].concat(), 0));
        assert_eq!(write(&outbox), (vec![(2, SLICE_BYTES)], 0));
        // What comes now is in the very next write, whoever's turn it is.
        insert(&outbox, 9, 4);
        outbox.lock().push(Frame::control(Kind::Attach, (S, Handle(0)), 0, Bytes::new()));
        assert_eq!(write(&outbox), (vec![(0, 0), (9, 4), (3, SLICE_BYTES)], 1));
        assert_eq!(write(&outbox), (vec![(1, SLICE_BYTES)], 0));
    }

    #[test]
    fn no_class_shuts_out_another() {
        let outbox = Outbox::new();
        insert(&outbox, 1, 4 * SLICE_BYTES);
        write(&outbox);
        for _ in 0..2 * FRAMES_PER_WRITE {
            outbox.lock().push(Frame::control(Kind::Attach, (S, Handle(0)), 0, Bytes::new()));
        }
        for buffer in 100..400 {
            insert(&outbox, buffer, 4);
        }
        let (frames, finished) = write(&outbox);
        assert_eq!(finished, FRESH_PER_WRITE - CONTROL_PER_WRITE);
        assert_eq!(frames.len(), FRESH_PER_WRITE + 1);
        assert_eq!(frames.last(), Some(&(1, SLICE_BYTES)));
    }

    #[test]
    fn what_is_removed_is_not_written() {
        let outbox = Outbox::new();
        for buffer in 1..=3 {
            insert(&outbox, buffer, 10);
        }
        assert_eq!(outbox.lock().waiting_bytes(), 30);
        assert!(outbox.lock().remove((S, Handle(2))).is_some());
        insert(&outbox, 3, 5);
        assert_eq!(write(&outbox), (vec![(1, 10), (3, 5)], 2));
        insert(&outbox, 4, 10);
        assert_eq!(outbox.lock().remove_session(S).len(), 1);
        assert_eq!(write(&outbox), (vec![], 0));
        assert_eq!(outbox.lock().waiting_bytes(), 0);
    }
}
