//! Questions about compiled programs: passed to a worker that has the program, answered when it answers. Nothing of a run waits for one.

use std::collections::BTreeMap;

use pw_types::{Cause, Code, Command, Description, Handle, HostSlot, Incarnation, Question, Reply, Status};

use crate::executables::ExecutableState;
use crate::session::Pending;
use crate::{Core, Effect, Effects};

/// Questions of one session that may wait for their answers; each can be long (invariant A8).
const WAITING_MAX: usize = 64;

/// Questions that workers have, by number.
#[derive(Default)]
pub(crate) struct Questions {
    last: u64,
    asked: BTreeMap<u64, Asked>,
}

struct Asked {
    at: Pending,
    question: Question,
    slot: HostSlot,
}

impl Core {
    pub(crate) fn describe(&mut self, at: Pending, executable: Handle, question: Question, fx: &mut Effects) {
        match self.who_can_describe(at, executable) {
            Err(status) => self.answer(at, Ok(Reply::Described { question, result: Err(status) }), fx),
            Ok((slot, incarnation, fingerprint)) => {
                self.questions.last += 1;
                let query = self.questions.last;
                self.questions.asked.insert(query, Asked { at, question, slot });
                fx.list.push(Effect::Send { slot, incarnation, command: Command::Describe { query, fingerprint, question } });
            }
        }
    }

    fn who_can_describe(&self, at: Pending, handle: Handle) -> Result<(HostSlot, Incarnation, bytes::Bytes), Status> {
        if self.questions.asked.values().filter(|asked| asked.at.session == at.session).count() >= WAITING_MAX {
            let text =
                format!("{WAITING_MAX} questions about programs wait for their answers in this session; ask again when some have come");
            return Err(Status::new(Code::ResourceExhausted, text).with_cause(Cause::Limit));
        }
        let named = self.sessions[&at.session].executables.get(&handle);
        let named = named.ok_or_else(|| Status::not_found(format!("executable handle {handle} does not exist")))?;
        let entry = self.executables.get(named.id);
        let entry = entry.ok_or_else(|| Status::new(Code::Unavailable, "the program is no longer loaded"))?;
        if let ExecutableState::Failed(status) | ExecutableState::Lost(status) = &entry.state {
            return Err((**status).clone());
        }
        let report = entry.report.as_ref().expect("a named program is compiled");
        let home = entry.homes[0];
        Ok((home.slot, home.incarnation, report.fingerprint.clone()))
    }

    /// The answer of a worker.
    pub(crate) fn described(&mut self, query: u64, result: Result<Description, Status>, fx: &mut Effects) {
        if let Some(Asked { at, question, .. }) = self.questions.asked.remove(&query) {
            self.answer(at, Ok(Reply::Described { question, result }), fx);
        }
    }

    /// A worker that is lost answers no more.
    pub(crate) fn questions_lost(&mut self, slot: HostSlot, status: &Status, fx: &mut Effects) {
        let lost: Vec<u64> = self.questions.asked.iter().filter(|(_, asked)| asked.slot == slot).map(|(&query, _)| query).collect();
        for query in lost {
            self.described(query, Err(status.clone()), fx);
        }
    }
}
