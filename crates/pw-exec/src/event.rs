//! What wakes the core and what it orders: two closed enums (A2).

use std::sync::Arc;

use bytes::Bytes;
use pw_types::{
    Command, CompileCommand, CompileReport, DType, Description, Dims, ExecutableId, GangPart, Handle, HostRead, HostSlot, HostWrite,
    Question, Report, RunId, SendShards, SessionId, Status,
};

/// The shell's name of a backing. It is free for reuse after [`ExecEffect::Drop`], so effects must be obeyed in order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BackingKey(pub u32);

/// Shards `first .. first + count` of a backing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part {
    pub backing: BackingKey,
    pub first: u32,
    pub count: u32,
}

/// How the members of a launch run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// One Execute for all, by the thread of the lowest member device.
    Gang,
    /// One Execute for each, by its device's own thread; by one thread where the launch is brief.
    PerDevice,
}

/// A program in the serving process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LoadedProgram {
    /// Local device indices in execution order.
    pub devices: Vec<u32>,
    /// Which of all members each of them is: shard `members[i]` of an output lives on `devices[i]`.
    pub members: Vec<u32>,
    /// Members in all, those on other workers included.
    pub total: u32,
    pub form: Form,
    pub report: Arc<CompileReport>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ExecEvent {
    /// The next command of the control stream.
    Command(Command),
    /// All members are done. `Ok` carries the bytes on one device of every output.
    LaunchDone {
        run: RunId,
        device_ns: u64,
        /// What it takes to run all members one after the other.
        busy_ns: u64,
        result: Result<Arc<[u64]>, Arc<Status>>,
    },
    /// `Ok` carries the bytes of every shard of the output; 0 for what another worker makes.
    CopyDone {
        run: RunId,
        result: Result<Vec<u64>, Arc<Status>>,
    },
    /// As [`ExecEvent::CopyDone`].
    WriteDone {
        run: RunId,
        result: Result<Vec<u64>, Arc<Status>>,
    },
    /// The bytes are on offer, or the offer was failed by the shell.
    ReadDone {
        run: RunId,
        bytes: u64,
        result: Result<(), Arc<Status>>,
    },
    /// The bytes are on their way, and nothing here is needed for it any more.
    SendDone {
        run: RunId,
        bytes: u64,
        result: Result<(), Arc<Status>>,
    },
    /// All bytes of an upload are in a block of the shell. The session is the sender: a client's, or another worker's
    /// name in a move.
    Landed {
        session: SessionId,
        buffer: Handle,
        bytes: u64,
    },
    UploadFailed {
        session: SessionId,
        buffer: Handle,
        status: Status,
    },
    /// Its connection is there, maybe again.
    SessionAttached {
        session: SessionId,
    },
    /// No more uploads of this session will come. Means nothing for a worker's.
    SessionDetached {
        session: SessionId,
    },
    Compiled {
        executable: ExecutableId,
        result: Result<Arc<CompileReport>, Status>,
    },
    Loaded {
        executable: ExecutableId,
        result: Result<Arc<LoadedProgram>, Status>,
    },
    Layout {
        query: u64,
        result: Result<String, Status>,
    },
    Described {
        query: u64,
        result: Result<Description, Status>,
    },
    /// A member waits long for operands of another worker.
    Late {
        run: RunId,
        on: HostSlot,
    },
    /// The batch is over: what is said once per turn is said now.
    EndOfTurn,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ExecEffect {
    /// Append to the queues of [`StartLaunch::threads`]; a thread serves its queue in order. Where an argument's shard
    /// is not filled yet, an earlier launch of the same thread fills it; where that one failed, this one must not run
    /// and ends with the same status. A launch that fails on one member fails as a whole.
    Launch(Arc<StartLaunch>),
    Copy(Arc<StartCopy>),
    Write(Arc<StartWrite>),
    Read(Arc<StartRead>),
    /// The client waits for these bytes and will not get them.
    ReadFailed {
        session: SessionId,
        buffer: Handle,
        status: Arc<Status>,
    },
    /// Send to another worker.
    Send(Arc<StartSend>),
    /// Tell the other worker that these bytes will not come.
    SendFailed {
        command: Arc<SendShards>,
        status: Arc<Status>,
    },
    /// Give up a send that was started; it still ends with a [`ExecEvent::SendDone`].
    StopSend {
        run: RunId,
    },
    /// Forget the backing; work under way keeps its own hold.
    Drop {
        backing: BackingKey,
    },
    /// Forget the block of an upload that nobody will ask for.
    DropUpload {
        session: SessionId,
        buffer: Handle,
    },
    Compile(CompileCommand),
    Load {
        executable: ExecutableId,
        fingerprint: Bytes,
        gang: Option<Arc<GangPart>>,
    },
    /// Where these workers take the operands of collectives from now on.
    Neighbours(Arc<GangPart>),
    /// A run of several workers has failed or is given up: who waits for them in it fails with this status. A launch that
    /// was handed over still ends by itself.
    Abandon {
        run: RunId,
        status: Arc<Status>,
    },
    Unload {
        executable: ExecutableId,
    },
    Describe {
        query: u64,
        fingerprint: Bytes,
        question: Question,
    },
    Layout {
        query: u64,
        dtype: DType,
        dims: Dims,
    },
    Report(Report),
    /// The controller and this worker disagree, or the shell broke its word: end the process with this text.
    Fatal(String),
}

/// One Execute of all local members.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StartLaunch {
    pub run: RunId,
    /// Whose launch it is: its host callbacks go there.
    pub session: SessionId,
    pub executable: ExecutableId,
    /// The lowest member device.
    pub thread: u32,
    /// The thread of that device runs all members: in [`Form::Gang`] always, else where waking the others costs more
    /// than they would save.
    pub one_thread: bool,
    /// As far as is known it takes so little, and waits for nothing, that whoever has it may run it on the spot.
    pub brief: bool,
    pub launch_id: i32,
    pub program: Arc<LoadedProgram>,
    pub arguments: Vec<StartArgument>,
    /// The parts of all arguments, one after the other.
    pub parts: Vec<Part>,
    /// One new backing per output, with one shard per member, those of other workers included.
    pub outputs: Vec<BackingKey>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StartArgument {
    /// Its parts end before this index of [`StartLaunch::parts`].
    pub end: u32,
    /// The storage may become an output's. Only set where the program can.
    pub donate: bool,
}

impl LoadedProgram {
    /// Whether other workers have members, too.
    pub fn spans_workers(&self) -> bool {
        self.total as usize > self.devices.len()
    }

    /// All members are on this worker.
    pub fn local(devices: Vec<u32>, form: Form, report: Arc<CompileReport>) -> LoadedProgram {
        let total = u32::try_from(devices.len()).expect("fewer than 2^32 devices");
        LoadedProgram { members: (0..total).collect(), total, devices, form, report }
    }
}

impl StartLaunch {
    /// The thread that runs the member on `device`.
    pub fn thread_of(&self, device: u32) -> u32 {
        if self.one_thread { self.thread } else { device }
    }

    /// The threads that have it in their queues.
    pub fn threads(&self) -> &[u32] {
        if self.one_thread { std::slice::from_ref(&self.thread) } else { &self.program.devices }
    }

    /// Others had better not wait until it has left the threads of its members.
    pub(crate) fn is_lengthy(&self) -> bool {
        !self.brief && !self.one_thread
    }

    /// The parts of argument `index`, together one shard per member in execution order.
    pub fn argument(&self, index: usize) -> &[Part] {
        let start = if index == 0 { 0 } else { self.arguments[index - 1].end as usize };
        &self.parts[start..self.arguments[index].end as usize]
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StartCopy {
    pub run: RunId,
    /// Shard `i` of the output is `items[i]`.
    pub items: Vec<StartCopyItem>,
    pub output: BackingKey,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StartCopyItem {
    pub backing: BackingKey,
    pub shard: u32,
    pub device: u32,
    pub memory_kind: String,
}

/// All sources have landed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StartWrite {
    pub command: HostWrite,
    pub output: BackingKey,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StartRead {
    pub command: HostRead,
    /// Where the pieces lie, in the command's order; one shard each.
    pub sources: Vec<Part>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StartSend {
    pub command: Arc<SendShards>,
    /// Where the items lie, in the command's order; one shard each.
    pub sources: Vec<Part>,
}
