//! Numbers of the frames on a control stream, one [`Sequence`] per side and life of a worker. Pure.
//!
//! Invariants: frames of one direction are numbered from 1 without a gap; a frame of another incarnation is refused;
//! what the peer has not acknowledged is kept, up to a bound, so that it can be sent again.

use std::collections::VecDeque;

use pw_types::Incarnation;

/// The head of every frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stamp {
    pub seq: u64,
    pub ack: u64,
    pub incarnation: Incarnation,
}

/// What a frame that was accepted is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Incoming {
    Next,
    Heartbeat,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SequenceError {
    #[error("a frame of incarnation {theirs}, not {ours}")]
    OtherIncarnation { ours: Incarnation, theirs: Incarnation },
    #[error("frame {got} where {expected} is due")]
    OutOfOrder { expected: u64, got: u64 },
    #[error("acknowledges frame {ack}, of {sent} that were sent")]
    WrongAck { ack: u64, sent: u64 },
    #[error("wants to go on behind frame {ack}; {acknowledged} was acknowledged and {sent} sent before")]
    WrongResumption { ack: u64, acknowledged: u64, sent: u64 },
    #[error("{limit} frames are not acknowledged")]
    Full { limit: usize },
}

/// `T` is what is kept of a frame until it is acknowledged, so that it can be sent again.
#[derive(Debug)]
pub struct Sequence<T> {
    incarnation: Incarnation,
    received: u64,
    /// The highest `received` that the peer has been told.
    told: u64,
    acknowledged: u64,
    /// Frames `acknowledged + 1 ..`, in order.
    kept: VecDeque<T>,
    limit: usize,
}

impl<T> Sequence<T> {
    /// At most `limit` frames wait for their acknowledgement.
    pub fn new(incarnation: Incarnation, limit: usize) -> Sequence<T> {
        Sequence { incarnation, received: 0, told: 0, acknowledged: 0, kept: VecDeque::new(), limit }
    }

    pub fn has_room(&self) -> bool {
        self.kept.len() < self.limit
    }

    /// Makes the next frame and keeps it.
    pub fn send(&mut self, make: impl FnOnce(Stamp) -> T) -> Result<&T, SequenceError> {
        if !self.has_room() {
            return Err(SequenceError::Full { limit: self.limit });
        }
        let stamp = Stamp { seq: self.sent() + 1, ..self.heartbeat() };
        self.kept.push_back(make(stamp));
        Ok(self.kept.back().expect("just added"))
    }

    /// Stamp of an empty frame, which only carries the acknowledgement.
    pub fn heartbeat(&mut self) -> Stamp {
        self.told = self.received;
        Stamp { seq: self.sent(), ack: self.received, incarnation: self.incarnation }
    }

    /// Checks a frame of the peer; `empty` = nothing in it.
    pub fn receive(&mut self, stamp: Stamp, empty: bool) -> Result<Incoming, SequenceError> {
        if stamp.incarnation != self.incarnation {
            return Err(SequenceError::OtherIncarnation { ours: self.incarnation, theirs: stamp.incarnation });
        }
        let next = self.received + 1;
        let incoming = match stamp.seq {
            seq if seq == next => Incoming::Next,
            seq if seq == self.received && empty => Incoming::Heartbeat,
            got => return Err(SequenceError::OutOfOrder { expected: next, got }),
        };
        if stamp.ack > self.sent() {
            return Err(SequenceError::WrongAck { ack: stamp.ack, sent: self.sent() });
        }
        self.acknowledge(stamp.ack);
        self.received = stamp.seq;
        Ok(incoming)
    }

    /// A frame that is sent again says what was acknowledged when it was made.
    fn acknowledge(&mut self, ack: u64) {
        if let Some(more) = ack.checked_sub(self.acknowledged) {
            self.kept.drain(..more as usize);
            self.acknowledged = ack;
        }
    }

    /// The connection broke and is there again; the peer has taken the frames up to `ack`. What it has not taken is to be
    /// sent again, before anything else: [`Sequence::unacknowledged`].
    pub fn resume(&mut self, ack: u64) -> Result<(), SequenceError> {
        if ack < self.acknowledged || ack > self.sent() {
            return Err(SequenceError::WrongResumption { ack, acknowledged: self.acknowledged, sent: self.sent() });
        }
        self.acknowledge(ack);
        Ok(())
    }

    /// Number of the last frame received.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Number of the last frame sent.
    pub fn sent(&self) -> u64 {
        self.acknowledged + self.kept.len() as u64
    }

    /// Frames received that the peer does not know of yet: a reason to send a heartbeat.
    pub fn acks_owed(&self) -> u64 {
        self.received - self.told
    }

    /// What the peer has not acknowledged, with its numbers, oldest first.
    pub fn unacknowledged(&self) -> impl Iterator<Item = (u64, &T)> {
        (self.acknowledged + 1..).zip(&self.kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIFE: Incarnation = Incarnation(7);

    fn stamp(seq: u64, ack: u64) -> Stamp {
        Stamp { seq, ack, incarnation: LIFE }
    }

    #[test]
    fn two_sides_agree() {
        let mut controller = Sequence::new(LIFE, 4);
        let mut worker = Sequence::new(LIFE, 4);
        for turn in 1..=10u64 {
            let sent = *controller.send(|stamp| stamp).unwrap();
            assert_eq!(sent, stamp(turn, turn - 1));
            assert_eq!(worker.receive(sent, false), Ok(Incoming::Next));
            assert_eq!(worker.acks_owed(), 1);
            let answer = *worker.send(|stamp| stamp).unwrap();
            assert_eq!(answer, stamp(turn, turn));
            assert_eq!(worker.acks_owed(), 0);
            assert_eq!(controller.receive(answer, false), Ok(Incoming::Next));
            assert_eq!(controller.unacknowledged().count(), 0);
        }
    }

    #[test]
    fn unacknowledged_frames_are_kept_and_bounded() {
        let mut side = Sequence::new(LIFE, 3);
        for kept in ["a", "b", "c"] {
            assert_eq!(side.send(|_| kept), Ok(&kept));
        }
        assert_eq!(side.send(|_| "d"), Err(SequenceError::Full { limit: 3 }));
        assert_eq!(side.receive(stamp(0, 2), true), Ok(Incoming::Heartbeat));
        assert_eq!(side.unacknowledged().collect::<Vec<_>>(), [(3, &"c")]);
        let mut stamped = None;
        side.send(|stamp| {
            stamped = Some(stamp);
            "d"
        })
        .unwrap();
        assert_eq!(stamped, Some(stamp(4, 0)));
        assert_eq!(side.sent(), 4);
    }

    #[test]
    fn wrong_frames_are_refused_and_change_nothing() {
        let mut side = Sequence::new(LIFE, 3);
        side.send(|_| ()).unwrap();
        assert_eq!(side.receive(stamp(1, 0), false), Ok(Incoming::Next));
        let other = Stamp { incarnation: Incarnation(8), ..stamp(2, 0) };
        assert_eq!(side.receive(other, false), Err(SequenceError::OtherIncarnation { ours: LIFE, theirs: Incarnation(8) }));
        assert_eq!(side.receive(stamp(3, 0), false), Err(SequenceError::OutOfOrder { expected: 2, got: 3 }));
        assert_eq!(side.receive(stamp(1, 0), false), Err(SequenceError::OutOfOrder { expected: 2, got: 1 }));
        assert_eq!(side.receive(stamp(2, 2), false), Err(SequenceError::WrongAck { ack: 2, sent: 1 }));
        assert_eq!(side.receive(stamp(2, 1), false), Ok(Incoming::Next));
    }

    #[test]
    fn what_was_on_its_way_is_sent_again() {
        let mut controller = Sequence::new(LIFE, 9);
        let mut worker = Sequence::new(LIFE, 9);
        for _ in 0..5 {
            controller.send(|stamp| stamp).unwrap();
        }
        worker.send(|stamp| stamp).unwrap();
        let frames: Vec<Stamp> = controller.unacknowledged().map(|(_, &frame)| frame).collect();
        frames[..2].iter().for_each(|&frame| assert_eq!(worker.receive(frame, false), Ok(Incoming::Next)));
        // The connection breaks; both say what they have.
        controller.resume(worker.received()).unwrap();
        worker.resume(controller.received()).unwrap();
        let again: Vec<Stamp> = controller.unacknowledged().map(|(_, &frame)| frame).collect();
        assert_eq!(again, frames[2..]);
        // A frame of before the break acknowledges less than is known now.
        let back: Vec<Stamp> = worker.unacknowledged().map(|(_, &frame)| frame).collect();
        back.iter().for_each(|&frame| assert_eq!(controller.receive(frame, false), Ok(Incoming::Next)));
        again.iter().for_each(|&frame| assert_eq!(worker.receive(frame, false), Ok(Incoming::Next)));
        assert_eq!((worker.received(), controller.received()), (5, 1));
        assert_eq!(controller.resume(1), Err(SequenceError::WrongResumption { ack: 1, acknowledged: 2, sent: 5 }));
        assert_eq!(controller.resume(6), Err(SequenceError::WrongResumption { ack: 6, acknowledged: 2, sent: 5 }));
    }
}
