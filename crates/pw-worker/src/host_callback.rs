//! Host callbacks: the custom-call target by which a program calls a function in its client's process and waits for it.
//!
//! Who is called follows from the launch, never from the program, which several sessions may share: every run of a
//! program with such calls carries a [`Caller`] to its handlers. A call goes to the edge of the session as a download
//! under a name that no host buffer has, the answer comes back as an upload under the same name. A call waits as long as
//! the user's function takes; it ends without an answer when the session, its edge or its callback channel is gone.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use pw_net::data::{DataServer, Presence};
use pw_pjrt::{AlignedBlock, BufferType, CallFrame, ExecuteContext, FfiError, FfiType, Handler, PjrtError, Plugin};
use pw_types::ids::FIRST_CALL_HANDLE;
use pw_types::{Code, Handle, SessionId, Status};

use crate::convert;

/// Client programs may name it: `id` is the function's number in the client's process.
pub(crate) const TARGET: &str = "pw.host_callback";

/// The same, under a name that XLA knows: on several devices it keeps the sharding of no other custom call that says which
/// of them calls (adr/0007).
const KNOWN_TO_XLA: &str = "xla_ffi_python_cpu_callback";

/// The platform that host code is registered for.
const HOST: &str = "Host";

/// How often a waiting call looks whether its session is still there; what ends it is told at once.
const LOOK: Duration = Duration::from_secs(1);

/// How long a session may be without an edge, which is dialing again or has not come yet.
const ABSENT: Duration = Duration::from_secs(30);

/// The operands of a call begin at multiples of this.
const ALIGNMENT: usize = 16;

/// The type of [`Caller`] in the plugin's registry.
static CALLER: OnceLock<FfiType> = OnceLock::new();

pub(crate) fn register(plugin: Plugin) -> Result<(), PjrtError> {
    if CALLER.get().is_none() {
        let caller = plugin.register_ffi_type("pathways caller")?;
        plugin.register_ffi::<HostCallback>(TARGET, HOST)?;
        plugin.register_ffi::<HostCallback>(KNOWN_TO_XLA, HOST)?;
        let _ = CALLER.set(caller);
    }
    Ok(())
}

/// Whether a program with a custom call to this target calls its client.
pub(crate) fn is_target(target: &str) -> bool {
    [TARGET, KNOWN_TO_XLA].contains(&target)
}

/// The calls that wait for their answers.
#[derive(Default)]
pub(crate) struct Calls {
    waiting: Mutex<BTreeMap<(SessionId, Handle), Waiting>>,
    count: AtomicU64,
}

struct Waiting {
    /// Bytes of the answer.
    expected: u64,
    answer: SyncSender<Result<AlignedBlock, Status>>,
}

/// Whether the data plane means a call by this name.
pub(crate) fn is_call(buffer: Handle) -> bool {
    buffer.0 >= FIRST_CALL_HANDLE
}

impl Calls {
    fn waiting(&self) -> MutexGuard<'_, BTreeMap<(SessionId, Handle), Waiting>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An answer begins to arrive; an error refuses it.
    pub(crate) fn begin(&self, session: SessionId, call: Handle, total: u64) -> Result<AlignedBlock, Status> {
        let expected = self.waiting().get(&(session, call)).map(|waiting| waiting.expected);
        match expected {
            // Not larger than the results of a call that is under way.
            Some(expected) if expected == total => Ok(AlignedBlock::zeroed(total as usize)),
            Some(expected) => {
                let status = Status::internal(format!("the answer to a host callback has {total} bytes instead of {expected}"));
                self.end(session, call, Err(status.clone()));
                Err(status)
            }
            None => Err(Status::not_found("nobody waits for this answer to a host callback")),
        }
    }

    pub(crate) fn end(&self, session: SessionId, call: Handle, answer: Result<AlignedBlock, Status>) {
        let waiting = self.waiting().remove(&(session, call));
        if let Some(waiting) = waiting {
            // There is room for the one answer; a handler that has given up needs none.
            let _ = waiting.answer.try_send(answer);
        }
    }

    /// The edge has left the session.
    pub(crate) fn detached(&self, session: SessionId) {
        let all = (session, Handle(0))..=(session, Handle(u64::MAX));
        let left: Vec<Handle> = self.waiting().range(all).map(|((_, call), _)| *call).collect();
        left.into_iter().for_each(|call| self.end(session, call, Err(gone(session))));
    }
}

fn gone(session: SessionId) -> Status {
    Status::new(Code::Cancelled, format!("the client of session {session} has left, so its host callback has no answer"))
}

/// The way of this process's programs to the functions of their clients.
#[derive(Clone)]
pub(crate) struct Callbacks {
    pub(crate) calls: Arc<Calls>,
    pub(crate) data: DataServer,
}

impl Callbacks {
    /// Sends a call and waits for its answer of `expected` bytes.
    fn ask(&self, session: SessionId, call: Vec<u8>, expected: u64) -> Result<AlignedBlock, Status> {
        let number = self.calls.count.fetch_add(1, Ordering::Relaxed);
        let handle = Handle(FIRST_CALL_HANDLE | number);
        let (answer, answered) = sync_channel(1);
        self.calls.waiting().insert((session, handle), Waiting { expected, answer });
        self.data.offer(session, handle, Arc::new(Bytes::from(call)), Box::new(|| {}));
        let result = self.wait(session, &answered);
        self.calls.waiting().remove(&(session, handle));
        result
    }

    fn wait(&self, session: SessionId, answered: &std::sync::mpsc::Receiver<Result<AlignedBlock, Status>>) -> Result<AlignedBlock, Status> {
        let mut seen = Instant::now();
        loop {
            // Looked at behind the entry in the table: whoever leaves the session from now on finds that.
            match self.data.presence(session) {
                Presence::Attached => seen = Instant::now(),
                Presence::Left => return Err(gone(session)),
                Presence::Awaited if seen.elapsed() > ABSENT => {
                    let text = format!("no edge has come for session {session} within {} s, so its host callback fails", ABSENT.as_secs());
                    return Err(Status::new(Code::Unavailable, text));
                }
                Presence::Awaited => {}
            }
            match answered.recv_timeout(LOOK) {
                Ok(answer) => return answer,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(Status::internal("a host callback was dropped without an answer")),
            }
        }
    }
}

/// For whom a run calls. One run after the other uses it.
pub(crate) struct Caller {
    session: AtomicU64,
    callbacks: Callbacks,
}

impl Caller {
    pub(crate) fn new(callbacks: &Callbacks) -> Arc<Caller> {
        Arc::new(Caller { session: AtomicU64::new(0), callbacks: callbacks.clone() })
    }

    /// The next run is one of this session.
    pub(crate) fn set(&self, session: SessionId) {
        self.session.store(session.0, Ordering::Release);
    }

    /// What a run's context carries.
    pub(crate) fn value(self: &Arc<Caller>) -> Result<(FfiType, Arc<dyn Any + Send + Sync>), PjrtError> {
        let caller = *CALLER.get().ok_or_else(|| PjrtError::unimplemented("this process serves no host callbacks"))?;
        Ok((caller, self.clone()))
    }

    /// A context with nothing else.
    pub(crate) fn context(self: &Arc<Caller>, plugin: Plugin) -> Result<ExecuteContext, PjrtError> {
        ExecuteContext::new(plugin, vec![self.value()?])
    }
}

#[derive(Default)]
struct HostCallback;

impl Handler for HostCallback {
    fn call(&self, frame: &mut CallFrame<'_>) -> Result<(), FfiError> {
        let outside = || PjrtError::internal("a host callback outside of a run");
        let caller = frame.user_data(*CALLER.get().ok_or_else(outside)?)?;
        let caller = caller.and_then(|value| value.downcast::<Caller>().ok()).ok_or_else(outside)?;
        let call = encode(frame)?;
        let mut sizes = Vec::with_capacity(frame.num_results());
        for index in 0..frame.num_results() {
            whole_bytes(frame.result_shape(index)?.0)?;
            sizes.push(frame.result_bytes(index)?.len());
        }
        let session = SessionId(caller.session.load(Ordering::Acquire));
        let expected = sizes.iter().map(|&size| size as u64).sum();
        let answer = caller.callbacks.ask(session, call, expected).map_err(|status| convert::error(&status))?;
        let mut rest = &answer[..];
        for (index, size) in sizes.into_iter().enumerate() {
            let (result, after) = rest.split_at(size);
            frame.result_bytes(index)?.copy_from_slice(result);
            rest = after;
        }
        Ok(())
    }
}

fn whole_bytes(element_type: BufferType) -> Result<(), FfiError> {
    if element_type.is_sub_byte() {
        return Err(PjrtError::unimplemented(format!("host callbacks with arrays of {element_type:?}")));
    }
    Ok(())
}

/// A call, little-endian: the function's number (8 bytes), the number of operands (4), nothing (4); of each operand its
/// `xla.PrimitiveType` (4), its rank (4) and its dimensions (8 each); then the operands' bytes, each at the next multiple
/// of [`ALIGNMENT`]. Tokens are left out.
fn encode(frame: &CallFrame<'_>) -> Result<Vec<u8>, FfiError> {
    let id = frame.attribute_i64("id")?;
    let mut operands = Vec::with_capacity(frame.num_args());
    for index in 0..frame.num_args() {
        let operand = frame.arg(index)?;
        whole_bytes(operand.element_type)?;
        if operand.element_type != BufferType::Token {
            operands.push(operand);
        }
    }
    let size: usize = operands.iter().map(|o| 8 + 8 * o.dims.len() + o.bytes.len() + ALIGNMENT).sum();
    let mut call = Vec::with_capacity(16 + size);
    call.extend(id.to_le_bytes());
    call.extend((operands.len() as u64).to_le_bytes());
    for operand in &operands {
        call.extend(operand.element_type.xla().to_le_bytes());
        call.extend((operand.dims.len() as u32).to_le_bytes());
        operand.dims.iter().for_each(|dim| call.extend(dim.to_le_bytes()));
    }
    for operand in operands {
        call.resize(call.len().next_multiple_of(ALIGNMENT), 0);
        call.extend_from_slice(operand.bytes);
    }
    Ok(call)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SESSION: SessionId = SessionId(7);

    fn waiting(calls: &Calls, call: u64, expected: u64) -> std::sync::mpsc::Receiver<Result<AlignedBlock, Status>> {
        let (answer, answered) = sync_channel(1);
        calls.waiting().insert((SESSION, Handle(FIRST_CALL_HANDLE | call)), Waiting { expected, answer });
        answered
    }

    #[test]
    fn an_answer_has_the_promised_size() {
        let (calls, call) = (Calls::default(), Handle(FIRST_CALL_HANDLE | 1));
        let answered = waiting(&calls, 1, 8);
        assert!(calls.begin(SESSION, call, 8).is_ok_and(|block| block.len() == 8));
        assert!(answered.try_recv().is_err());
        assert!(calls.begin(SESSION, call, 9).is_err());
        assert!(answered.try_recv().unwrap().unwrap_err().message.contains("9 bytes instead of 8"));
        assert_eq!(calls.begin(SESSION, call, 8).unwrap_err().code, Code::NotFound);
    }

    #[test]
    fn a_session_that_is_left_ends_its_calls_only() {
        let calls = Calls::default();
        let (first, second) = (waiting(&calls, 1, 8), waiting(&calls, 2, 8));
        calls.detached(SessionId(6));
        assert!(first.try_recv().is_err());
        calls.detached(SESSION);
        for answered in [first, second] {
            assert_eq!(answered.try_recv().unwrap().unwrap_err().code, Code::Cancelled);
        }
        assert!(!is_call(Handle(1 << 48)) && is_call(Handle(u64::MAX)));
    }
}
