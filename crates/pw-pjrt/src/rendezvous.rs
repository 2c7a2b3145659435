//! Where the FFI calls of several devices meet: the last one to come works on the memory of all, then all go on.
//!
//! A rendezvous belongs to a program that its devices ("members") run one launch ("round") after the other, each on
//! threads of its own. It has meetings, by key, each of some of the members.
//!
//! Invariants:
//! 1. A call that waits here does not return before its memory is its own again: nobody works on it, and nobody will.
//! 2. A wait ends: the others come, or it is known that they cannot. A member that ends its round, or that waits in
//!    another meeting when every other member waits or has ended, will not come; then the round fails for all its
//!    members. No clock is involved, so a member that computes for long is waited for.
//! 3. A round that has failed lets nobody wait; later rounds do not notice.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::error::PjrtError;
use crate::ffi::{FfiError, panic_text};

/// The memory of one call, which nobody else touches during the call.
#[derive(Debug, Default)]
pub struct Lane<'a> {
    /// Arguments, in the layout that the program fixed.
    pub args: Vec<&'a [u8]>,
    /// Results, to be written.
    pub results: Vec<&'a mut [u8]>,
}

/// A lane in the hands of the meeting. The owner waits, so it is there; see invariant 1.
#[derive(Clone, Copy)]
struct Lent(*mut Lane<'static>);

// SAFETY: a lane is slices of plain bytes; whoever holds the lent one is its only user.
unsafe impl Send for Lent {}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Running,
    /// In a meeting, for others to come.
    Waiting,
    /// In a meeting, and somebody works on its lane.
    Lent,
    /// Out of the meeting it waited in, since the round has failed, and not awake yet.
    SentAway,
    Ended,
}

struct Round {
    serial: u64,
    places: Box<[Place]>,
    waiting: usize,
    ended: usize,
    failed: Option<FfiError>,
}

struct Meeting {
    members: Box<[u32]>,
    seats: Box<[Option<Lent>]>,
    arrived: usize,
    /// The round of those who have arrived.
    serial: u64,
}

struct State {
    rounds: VecDeque<Round>,
    /// By key.
    meetings: Vec<Vec<Meeting>>,
}

/// The meetings of one program.
pub struct Rendezvous {
    members: usize,
    state: Mutex<State>,
    /// By key and by group.
    wakes: Vec<Vec<Condvar>>,
}

impl std::fmt::Debug for Rendezvous {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rendezvous").field("members", &self.members).field("keys", &self.wakes.len()).finish_non_exhaustive()
    }
}

impl Rendezvous {
    /// For a program of `members` devices with these groups of members, by key. Within a key a member is in one group
    /// at most.
    pub fn new(members: usize, groups: &[Vec<Vec<u32>>]) -> Rendezvous {
        let meeting =
            |group: &Vec<u32>| Meeting { members: group.clone().into(), seats: vec![None; group.len()].into(), arrived: 0, serial: 0 };
        let meetings = groups.iter().map(|key| key.iter().map(meeting).collect()).collect();
        let wakes = groups.iter().map(|key| key.iter().map(|_| Condvar::new()).collect()).collect();
        Rendezvous { members, state: Mutex::new(State { rounds: VecDeque::new(), meetings }), wakes }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing that may panic runs under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Member `member` comes to the meeting `key` of its group in round `serial`, and waits for the others. The last
    /// one does the `work` on the lanes of all, in the order of the group.
    ///
    /// Fails where the work does, and where the round has failed or cannot go on.
    pub fn meet(
        &self,
        serial: u64,
        member: u32,
        key: usize,
        lane: &mut Lane<'_>,
        work: impl for<'a> FnOnce(&mut [&mut Lane<'a>]) -> Result<(), FfiError>,
    ) -> Result<(), FfiError> {
        let mut state = self.state();
        let group = state.meetings.get(key).and_then(|groups| groups.iter().position(|m| m.members.contains(&member)));
        let group = group.ok_or_else(|| PjrtError::internal(format!("member {member} has no meeting {key}")))?;
        let round = state.round(serial, self.members);
        if let Some(error) = &state.rounds[round].failed {
            return Err(error.clone());
        }
        let meeting = &state.meetings[key][group];
        let gone = meeting.members.iter().find(|&&m| state.rounds[round].places[m as usize] == Place::Ended);
        if let Some(&gone) = gone {
            let error = apart(key, member, &format!("member {gone} has ended without it"));
            return Err(self.fail_round(&mut state, serial, error));
        }
        if meeting.arrived > 0 && meeting.serial != serial {
            // Someone of an earlier round waits for a member that is past that round.
            let (earlier, error) = (meeting.serial, apart(key, member, "another member is in an earlier run"));
            self.fail_round(&mut state, earlier, error.clone());
            return Err(self.fail_round(&mut state, serial, error));
        }
        let meeting = &mut state.meetings[key][group];
        let seat = meeting.members.iter().position(|&m| m == member).expect("just found");
        debug_assert!(meeting.seats[seat].is_none(), "a member calls one collective at a time");
        meeting.serial = serial;
        meeting.seats[seat] = Some(Lent(std::ptr::from_mut(lane).cast()));
        meeting.arrived += 1;
        if meeting.arrived == meeting.members.len() {
            self.work(state, (serial, key, group), work)
        } else {
            self.wait(state, (serial, key, group), member)
        }
    }

    /// The last one has come.
    fn work(
        &self,
        mut state: MutexGuard<'_, State>,
        (serial, key, group): (u64, usize, usize),
        work: impl for<'a> FnOnce(&mut [&mut Lane<'a>]) -> Result<(), FfiError>,
    ) -> Result<(), FfiError> {
        let State { rounds, meetings } = &mut *state;
        let meeting = &mut meetings[key][group];
        meeting.arrived = 0;
        let lent: Vec<Lent> = meeting.seats.iter_mut().filter_map(Option::take).collect();
        let members = meeting.members.clone();
        let round = rounds.iter_mut().find(|r| r.serial == serial).expect("it has begun");
        for &member in &members {
            if std::mem::replace(&mut round.places[member as usize], Place::Lent) == Place::Waiting {
                round.waiting -= 1;
            }
        }
        drop(state);
        // SAFETY: each lane belongs to a call that is in `meet`, all but this one in `wait`, which does not return while
        // its member's lane is lent; each was taken from its seat, so there is one reference to it.
        let mut lanes: Vec<&mut Lane<'_>> = lent.iter().map(|lent| unsafe { &mut *lent.0 }).collect();
        let result = catch_unwind(AssertUnwindSafe(|| work(&mut lanes)));
        drop(lanes);
        let result = result.unwrap_or_else(|panic| Err(PjrtError::internal(format!("a collective panicked: {}", panic_text(&*panic)))));
        let mut state = self.state();
        if let Err(error) = &result {
            self.fail_round(&mut state, serial, error.clone());
        }
        let round = state.round(serial, self.members);
        members.iter().for_each(|&member| state.rounds[round].places[member as usize] = Place::Running);
        drop(state);
        self.wakes[key][group].notify_all();
        result
    }

    fn wait(&self, mut state: MutexGuard<'_, State>, (serial, key, group): (u64, usize, usize), member: u32) -> Result<(), FfiError> {
        let round = state.round(serial, self.members);
        let round = &mut state.rounds[round];
        round.places[member as usize] = Place::Waiting;
        round.waiting += 1;
        if round.waiting + round.ended == self.members {
            self.fail_round(&mut state, serial, apart(key, member, "all others wait elsewhere or have ended"));
        }
        loop {
            let round = state.round(serial, self.members);
            let round = &mut state.rounds[round];
            match round.places[member as usize] {
                Place::Waiting | Place::Lent => {}
                Place::Running | Place::SentAway | Place::Ended => {
                    round.places[member as usize] = Place::Running;
                    return round.failed.clone().map_or(Ok(()), Err);
                }
            }
            state = self.wakes[key][group].wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The member has ended round `serial`, or will not take part in it. An error fails the round for the others.
    /// Every member says this once per round. What the round has failed with, if it has.
    pub fn leave(&self, serial: u64, member: u32, result: Result<(), FfiError>) -> Result<(), FfiError> {
        let mut state = self.state();
        let index = state.round(serial, self.members);
        let round = &mut state.rounds[index];
        if std::mem::replace(&mut round.places[member as usize], Place::Ended) != Place::Ended {
            round.ended += 1;
        }
        let (all_ended, stuck) = (round.ended == self.members, round.waiting > 0 && round.waiting + round.ended == self.members);
        match result {
            Err(error) => drop(self.fail_round(&mut state, serial, error)),
            Ok(()) if self.is_expected(&state, serial, member) || stuck => {
                let error = PjrtError::internal(format!("member {member} has ended while others wait for it in a collective"));
                self.fail_round(&mut state, serial, error);
            }
            Ok(()) => {}
        }
        let failed = state.rounds[index].failed.clone();
        if all_ended {
            state.rounds.remove(index);
        }
        failed.map_or(Ok(()), Err)
    }

    /// Somebody waits for this member in this round.
    fn is_expected(&self, state: &State, serial: u64, member: u32) -> bool {
        let open = |m: &&Meeting| m.arrived > 0 && m.serial == serial;
        state.meetings.iter().flatten().filter(open).any(|m| m.members.contains(&member))
    }

    /// The round fails, with the first error that it is given, which is returned. Who waits in it is sent away.
    fn fail_round(&self, state: &mut State, serial: u64, error: FfiError) -> FfiError {
        let index = state.round(serial, self.members);
        let State { rounds, meetings } = state;
        let round = &mut rounds[index];
        let error = round.failed.get_or_insert(error).clone();
        for (wakes, groups) in self.wakes.iter().zip(meetings) {
            for (wake, meeting) in wakes.iter().zip(groups).filter(|(_, m)| m.arrived > 0 && m.serial == serial) {
                meeting.arrived = 0;
                meeting.seats.fill(None);
                wake.notify_all();
            }
        }
        let waiting = round.places.iter_mut().filter(|place| **place == Place::Waiting);
        waiting.for_each(|place| *place = Place::SentAway);
        round.waiting = 0;
        error
    }
}

impl State {
    /// Index of the round, which begins with whoever mentions it first.
    fn round(&mut self, serial: u64, members: usize) -> usize {
        if let Some(index) = self.rounds.iter().position(|r| r.serial == serial) {
            return index;
        }
        let places = vec![Place::Running; members].into();
        self.rounds.push_back(Round { serial, places, waiting: 0, ended: 0, failed: None });
        self.rounds.len() - 1
    }
}

fn apart(key: usize, member: u32, why: &str) -> FfiError {
    let text = format!("the devices of the program do not meet in collective {key}: member {member} waits there, but {why}");
    PjrtError::internal(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::thread;

    /// Adds up the first argument of all into each first result.
    fn sum(lanes: &mut [&mut Lane<'_>]) -> Result<(), FfiError> {
        let total: u8 = lanes.iter().map(|lane| lane.args[0][0]).sum();
        lanes.iter_mut().for_each(|lane| lane.results[0][0] = total);
        Ok(())
    }

    fn meet_with(r: &Rendezvous, serial: u64, member: u32, key: usize, value: u8) -> Result<u8, FfiError> {
        let (input, mut output) = ([value], [0]);
        let mut lane = Lane { args: vec![&input], results: vec![&mut output] };
        r.meet(serial, member, key, &mut lane, sum)?;
        Ok(output[0])
    }

    fn on_threads<T: Send + 'static>(members: u32, body: impl Fn(u32) -> T + Send + Sync + 'static) -> Vec<T> {
        let body = Arc::new(body);
        let threads: Vec<_> = (0..members)
            .map(|member| {
                let body = body.clone();
                thread::spawn(move || body(member))
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    }

    fn errors<T: std::fmt::Debug>(results: Vec<Result<T, FfiError>>) -> Vec<String> {
        results.into_iter().map(|r| r.unwrap_err().message).collect()
    }

    #[test]
    fn many_rounds_of_loops_in_two_groups() {
        let r = Rendezvous::new(4, &[vec![vec![0, 1, 2, 3]], vec![vec![0, 2], vec![1, 3]]]);
        let sums = on_threads(4, move |member| {
            let mut seen = Vec::new();
            for serial in 1..200 {
                for _ in 0..3 {
                    seen.push(meet_with(&r, serial, member, 0, member as u8 + serial as u8 % 8).unwrap());
                    seen.push(meet_with(&r, serial, member, 1, member as u8).unwrap());
                }
                r.leave(serial, member, Ok(())).unwrap();
            }
            seen
        });
        for (member, seen) in sums.iter().enumerate() {
            let wanted: Vec<u8> =
                (1..200u64).flat_map(|s| [6 + 4 * (s as u8 % 8), if member % 2 == 0 { 2 } else { 4 }].repeat(3)).collect();
            assert_eq!(*seen, wanted);
        }
    }

    #[test]
    fn who_ends_is_not_waited_for() {
        let r = Rendezvous::new(3, &[vec![vec![0, 1, 2]]]);
        let results = on_threads(3, move |member| {
            let met = if member == 1 { Ok(0) } else { meet_with(&r, 7, member, 0, 1) };
            let left = r.leave(7, member, met.clone().map(drop));
            // The next round is not harmed.
            (met, left, meet_with(&r, 8, member, 0, 2))
        });
        for (member, (met, left, next)) in results.into_iter().enumerate() {
            assert_eq!(next, Ok(6), "member {member}");
            if member != 1 {
                assert!(met.is_err() && left.is_err(), "member {member}");
            }
        }
    }

    #[test]
    fn an_error_of_one_is_the_error_of_all() {
        let r = Rendezvous::new(3, &[vec![vec![0, 1, 2]]]);
        let results = on_threads(3, move |member| {
            let met = if member == 1 { Err(PjrtError::internal("boom")) } else { meet_with(&r, 7, member, 0, 1) };
            r.leave(7, member, met.map(drop))
        });
        assert_eq!(errors(results), ["boom", "boom", "boom"]);
    }

    #[test]
    fn different_meetings_fail_instead_of_waiting() {
        let r = Rendezvous::new(2, &[vec![vec![0, 1]], vec![vec![0, 1]]]);
        let results = on_threads(2, move |member| {
            let met = meet_with(&r, 7, member, member as usize, 1);
            let _ = r.leave(7, member, Ok(()));
            met
        });
        assert!(errors(results).iter().all(|text| text.contains("do not meet in collective")));
    }

    #[test]
    fn failing_work_and_panics_reach_everybody() {
        let r = Rendezvous::new(2, &[vec![vec![0, 1]]]);
        let results = on_threads(2, move |member| {
            let work = |_: &mut [&mut Lane<'_>]| -> Result<(), FfiError> { panic!("out of cheese") };
            r.meet(1, member, 0, &mut Lane::default(), work)
        });
        assert!(errors(results).iter().all(|text| text.contains("out of cheese")));
    }

    #[test]
    fn a_member_of_no_group_is_refused() {
        let r = Rendezvous::new(2, &[vec![vec![0]]]);
        assert!(meet_with(&r, 1, 1, 0, 1).is_err() && meet_with(&r, 1, 0, 1, 1).is_err());
        assert_eq!(meet_with(&r, 1, 0, 0, 5), Ok(5));
    }
}
