//! Host buffers: which uploads have come, how long each download is. Bytes are counted and dropped; zeros are sent.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};

use bytes::{Bytes, BytesMut};
use http_body::Frame;
use rustc_hash::{FxHashMap, FxHashSet};

use crate::wire::{self, Body};

/// A session and one of its host buffers.
pub(crate) type Key = (u64, u64);

/// The field `data` of a message of a download.
const DATA_FIELD: u32 = 1;

pub(crate) struct HostBuffers {
    state: Mutex<State>,
    zeros: Bytes,
}

#[derive(Default)]
struct State {
    stored: FxHashSet<Key>,
    download_bytes: FxHashMap<Key, usize>,
    /// Sessions that wait for an upload.
    waiting: Vec<Waker>,
}

impl HostBuffers {
    pub(crate) fn new(chunk: usize) -> HostBuffers {
        HostBuffers { state: Mutex::default(), zeros: vec![0; chunk.max(1)].into() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nothing panics while it holds the state")
    }

    /// Takes an upload to its end.
    pub(crate) async fn store(&self, key: Key, mut body: Body) {
        while std::future::poll_fn(|cx| wire::poll_data(&mut body, cx)).await.is_some() {}
        let mut state = self.state();
        state.stored.insert(key);
        state.waiting.drain(..).for_each(Waker::wake);
    }

    /// Whether all these uploads have come; else `cx` is woken when one has.
    pub(crate) fn are_stored(&self, session: u64, buffers: &[u64], cx: &mut Context<'_>) -> bool {
        let mut state = self.state();
        let all = buffers.iter().all(|&buffer| state.stored.contains(&(session, buffer)));
        if !all {
            state.waiting.push(cx.waker().clone());
        }
        all
    }

    pub(crate) fn offer(&self, key: Key, bytes: usize) {
        self.state().download_bytes.insert(key, bytes);
    }

    pub(crate) fn forget(&self, key: Key) {
        let mut state = self.state();
        state.stored.remove(&key);
        state.download_bytes.remove(&key);
    }

    pub(crate) fn download(self: &Arc<Self>, key: Key) -> Zeros {
        let left = self.state().download_bytes.get(&key).copied().unwrap_or(4);
        Zeros { zeros: self.zeros.clone(), next: VecDeque::new(), left, done: false }
    }
}

/// The body of a download: messages of zeros, all slices of one block.
pub(crate) struct Zeros {
    zeros: Bytes,
    next: VecDeque<Bytes>,
    left: usize,
    done: bool,
}

impl Zeros {
    /// The head of a message, then its data.
    fn message(&mut self) {
        let length = self.left.min(self.zeros.len());
        self.left -= length;
        let mut field = BytesMut::new();
        prost::encoding::encode_key(DATA_FIELD, prost::encoding::WireType::LengthDelimited, &mut field);
        prost::encoding::encode_varint(length as u64, &mut field);
        let mut head = BytesMut::new();
        wire::write_header(field.len() + length, &mut head);
        head.extend_from_slice(&field);
        self.next.extend([head.freeze(), self.zeros.slice(..length)]);
    }
}

impl http_body::Body for Zeros {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.next.is_empty() && self.left > 0 {
            self.message();
        }
        if let Some(data) = self.next.pop_front() {
            return Poll::Ready(Some(Ok(Frame::data(data))));
        }
        let done = std::mem::replace(&mut self.done, true);
        Poll::Ready((!done).then(|| Ok(Frame::trailers(wire::trailers()))))
    }
}
