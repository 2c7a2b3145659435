//! What was sent on a connection and not acknowledged, so that it can be sent again. Pure.
//!
//! Bytes of one direction are counted from 0, over one TCP connection after the other. Large pieces are the sender's own
//! memory, which is let go when they are acknowledged.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::frame::HEADER;
use super::outbox::Frame;
use super::{DownloadSource, FIRST_BYTES};

/// From so many bytes on, nothing new is sent before something was acknowledged.
pub(super) const KEPT_BYTES_MAX: usize = 16 << 20;

/// What a piece costs beside its bytes.
pub(super) const PIECE_BYTES: usize = 128;

/// Smaller bodies are copied, together with their headers: fewer pieces, and what they were part of is let go at once.
const COPIED_BYTES: usize = 4 << 10;

/// Bytes in memory that somebody else may need back.
#[derive(Clone)]
pub(super) enum Piece {
    Bytes(Bytes),
    Source(Arc<dyn DownloadSource>, Range<usize>),
}

impl Piece {
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Piece::Bytes(bytes) => bytes,
            Piece::Source(source, range) => &source.bytes()[range.clone()],
        }
    }

    fn len(&self) -> usize {
        match self {
            Piece::Bytes(bytes) => bytes.len(),
            Piece::Source(_, range) => range.len(),
        }
    }

    fn skip(&mut self, count: usize) {
        match self {
            Piece::Bytes(bytes) => bytes.advance(count),
            Piece::Source(_, range) => range.start += count,
        }
    }

    /// A source is waited for, so a receiver acknowledges the end of each transfer that is not copied here: see
    /// `Header::is_last`.
    fn is_copied(&self) -> bool {
        match self {
            Piece::Bytes(bytes) => bytes.len() < COPIED_BYTES,
            Piece::Source(_, range) => range.len() < FIRST_BYTES,
        }
    }
}

/// The bytes of these frames, in as few pieces as can be.
pub(super) fn encode(frames: &[Frame], pieces: &mut Vec<Piece>) {
    let copied = |frame: &Frame| HEADER + if frame.body.is_copied() { frame.body.len() } else { 0 };
    let mut plain = BytesMut::with_capacity(frames.iter().map(copied).sum());
    for frame in frames {
        plain.put_slice(&frame.header.encode());
        if frame.body.is_copied() {
            plain.put_slice(frame.body.bytes());
        } else {
            pieces.push(Piece::Bytes(plain.split().freeze()));
            pieces.push(frame.body.clone());
        }
    }
    if !plain.is_empty() {
        pieces.push(Piece::Bytes(plain.freeze()));
    }
}

#[derive(Default)]
pub(super) struct Kept {
    acknowledged: u64,
    sent: u64,
    /// Everything from `acknowledged` to `sent`.
    pieces: VecDeque<Piece>,
    bytes: usize,
}

impl Kept {
    pub(super) fn has_room(&self) -> bool {
        self.bytes < KEPT_BYTES_MAX
    }

    pub(super) fn push(&mut self, piece: Piece) {
        self.sent += piece.len() as u64;
        self.bytes += PIECE_BYTES + piece.len();
        self.pieces.push_back(piece);
    }

    /// The other side has everything up to `count`. Gives back what need not be kept any more; an acknowledgement that was
    /// on its way while a later one came is none.
    pub(super) fn acknowledge(&mut self, count: u64) -> Result<Vec<Piece>, String> {
        if count > self.sent {
            return Err(format!("it acknowledges {count} bytes, of {} that were sent", self.sent));
        }
        let mut more = count.saturating_sub(self.acknowledged);
        self.acknowledged += more;
        let mut done = Vec::new();
        while let Some(first) = self.pieces.front_mut()
            && more > 0
        {
            let length = first.len() as u64;
            if more < length {
                first.skip(more as usize);
                self.bytes -= more as usize;
                break;
            }
            more -= length;
            self.bytes -= PIECE_BYTES + length as usize;
            done.extend(self.pieces.pop_front());
        }
        Ok(done)
    }

    /// Whether one that has the bytes up to `count` can be served from what is kept.
    pub(super) fn check(&self, count: u64) -> Result<(), String> {
        if count < self.acknowledged || count > self.sent {
            let Kept { acknowledged, sent, .. } = self;
            return Err(format!("it wants to go on behind byte {count}; {acknowledged} were acknowledged and {sent} sent before"));
        }
        Ok(())
    }

    /// What is to be sent again.
    pub(super) fn unacknowledged(&self) -> Vec<Piece> {
        self.pieces.iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::frame::{Header, Kind};
    use super::*;
    use pw_types::{Handle, SessionId};

    fn text(pieces: &[Piece]) -> Vec<u8> {
        pieces.iter().flat_map(|piece| piece.bytes().to_vec()).collect()
    }

    fn kept(parts: &[&'static str]) -> Kept {
        let mut kept = Kept::default();
        parts.iter().for_each(|part| kept.push(Piece::Bytes(Bytes::from_static(part.as_bytes()))));
        kept
    }

    #[test]
    fn any_number_of_bytes_may_have_arrived() {
        for count in 0..=9 {
            let mut kept = kept(&["abc", "d", "efghi"]);
            let done = kept.acknowledge(count).unwrap();
            assert_eq!(text(&kept.unacknowledged()), b"abcdefghi"[count as usize..]);
            assert_eq!(done.len(), [0, 0, 0, 1, 2, 2, 2, 2, 2, 3][count as usize]);
            assert_eq!(kept.bytes, kept.pieces.iter().map(|piece| PIECE_BYTES + piece.len()).sum::<usize>());
            kept.push(Piece::Bytes(Bytes::from_static(b"jk")));
            assert_eq!(text(&kept.unacknowledged()), b"abcdefghijk"[count as usize..]);
            assert_eq!(kept.sent, 11);
        }
    }

    #[test]
    fn wrong_counts_are_refused_and_change_nothing() {
        let mut kept = kept(&["abc", "def"]);
        kept.acknowledge(4).unwrap();
        assert_eq!(kept.acknowledge(7).err().unwrap(), "it acknowledges 7 bytes, of 6 that were sent");
        assert_eq!(kept.check(7).unwrap_err(), "it wants to go on behind byte 7; 4 were acknowledged and 6 sent before");
        assert_eq!(kept.check(3).unwrap_err(), "it wants to go on behind byte 3; 4 were acknowledged and 6 sent before");
        assert!(kept.acknowledge(3).unwrap().is_empty());
        assert_eq!((kept.check(4), kept.check(6)), (Ok(()), Ok(())));
        assert_eq!(text(&kept.unacknowledged()), b"ef");
    }

    #[test]
    fn small_bodies_are_copied_and_large_ones_are_not() {
        let frame = |body: Piece| Frame { header: Header::new(Kind::Chunk, (SessionId(1), Handle(2)), 0, body.len()), body };
        let large: Arc<dyn DownloadSource> = Arc::new(Bytes::from(vec![1; 2 * FIRST_BYTES]));
        let frames = [
            frame(Piece::Bytes(Bytes::from_static(b"small"))),
            frame(Piece::Source(large.clone(), 0..FIRST_BYTES - 1)),
            frame(Piece::Source(large.clone(), FIRST_BYTES..2 * FIRST_BYTES)),
            frame(Piece::Bytes(Bytes::from(vec![2; COPIED_BYTES]))),
            frame(Piece::Bytes(Bytes::from_static(b"last"))),
        ];
        let mut pieces = Vec::new();
        encode(&frames, &mut pieces);
        let all: Vec<u8> = frames.iter().flat_map(|f| [&f.header.encode()[..], f.body.bytes()].concat()).collect();
        assert!(text(&pieces) == all);
        assert_eq!(pieces.len(), 5);
        assert_eq!(pieces[1].bytes().as_ptr(), large.bytes()[FIRST_BYTES..].as_ptr());
        drop(frames);
        assert_eq!(Arc::strong_count(&large), 2);
    }

    #[test]
    fn there_is_a_bound() {
        let mut kept = Kept::default();
        let piece = Bytes::from(vec![0; 1 << 20]);
        while kept.has_room() {
            kept.push(Piece::Bytes(piece.clone()));
        }
        assert_eq!(kept.sent, 16 << 20);
        kept.acknowledge(1 << 20).unwrap();
        assert!(kept.has_room());
    }
}
