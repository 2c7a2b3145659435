//! Requests: bytes in, a meaning for the core out. Nothing that a client sends can make this panic or be lost: what cannot be
//! served becomes [`Request::Refused`] with the arrays that it would have made.

use bytes::Bytes;
use prost::Message;
use pw_types::{FIRST_SERVER_HANDLE, Handle, OpId, Question, Request, Status};

use super::requests as read;
use super::wire::{Fields, Value};
use super::{compile_options, pb};
use pb::ifrt_request::Request as Wire;

/// A request that the edge answers by itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Local {
    /// Always the first request of a session.
    Init,
}

/// What a request means. Nearly all are for the core, so a box would cost more than the space it saves.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Decoded {
    Core(Request),
    Local(Local),
}

/// A request and what travels beside it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Incoming {
    pub op: OpId,
    /// To be given back once, in a response; 0 = none.
    pub user_context: u64,
    pub request: Decoded,
}

/// Not even the number of the request could be read: nobody can be answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a message of the session stream is not an IFRT proxy request")]
pub struct DecodeError;

/// Reads one message of the session stream.
pub fn decode_message(data: Bytes) -> Result<Incoming, DecodeError> {
    match pb::IfrtRequest::decode(data.clone()) {
        Ok(request) if request.request.is_some() => Ok(decode_request(request)),
        outcome => {
            let metadata = metadata(&data).ok_or(DecodeError)?;
            let status = match outcome {
                Err(error) => Status::invalid(format!("the request cannot be decoded: {error}")),
                Ok(_) => match number(&data) {
                    Some(number) => {
                        Status::unimplemented(format!("request number {number} of the IFRT proxy protocol is not known to this server"))
                    }
                    None => Status::invalid("the request is empty"),
                },
            };
            let request = Decoded::Core(refused(status, Vec::new(), Vec::new()));
            Ok(Incoming { op: OpId(metadata.op_id), user_context: metadata.user_context_id, request })
        }
    }
}

/// Gives a request its meaning.
pub fn decode_request(message: pb::IfrtRequest) -> Incoming {
    let metadata = message.request_metadata.unwrap_or_default();
    let request = match message.request {
        Some(wire) => meaning(wire),
        None => Decoded::Core(refused(Status::invalid("the request is empty"), Vec::new(), Vec::new())),
    };
    Incoming { op: OpId(metadata.op_id), user_context: metadata.user_context_id, request }
}

/// The metadata of a message whose other parts may be damaged.
fn metadata(data: &Bytes) -> Option<pb::RequestMetadata> {
    let mut fields = Fields::of(data.clone()).map_while(Result::ok);
    let found = fields.find_map(|(number, value)| match value {
        Value::Len(bytes) if number == 1 => Some(bytes),
        _ => None,
    })?;
    pb::RequestMetadata::decode(found).ok().filter(|metadata| metadata.op_id != 0)
}

/// The number of the request inside a message.
fn number(data: &Bytes) -> Option<u32> {
    Fields::of(data.clone()).map_while(Result::ok).map(|(number, _)| number).find(|&number| number != 1)
}

/// A refusal. Handles that no client may choose are left out: nothing can be made under them.
fn refused(status: Status, results: Vec<u64>, consumes: Vec<u64>) -> Request {
    let handles = |handles: Vec<u64>| handles.into_iter().filter(|&h| is_client_handle(h)).map(Handle).collect();
    Request::Refused { status, results: handles(results), consumes: handles(consumes) }
}

pub(super) fn is_client_handle(handle: u64) -> bool {
    (1..FIRST_SERVER_HANDLE).contains(&handle)
}

fn unserved(name: &str, results: Vec<u64>) -> Request {
    refused(Status::unimplemented(format!("{name} is not served by this build of pathways-rs")), results, Vec::new())
}

fn describe(executable: u64, question: Question) -> Request {
    Request::Describe { executable: Handle(executable), question }
}

fn or_refused(request: Result<Request, Status>, results: Vec<u64>, consumes: Vec<u64>) -> Request {
    request.unwrap_or_else(|status| refused(status, results, consumes))
}

fn meaning(wire: Wire) -> Decoded {
    Decoded::Core(match wire {
        Wire::InitRequest(_) => return Decoded::Local(Local::Init),

        Wire::LoadedExecutableExecuteRequest(m) => {
            // The hot path: no copies unless it is refused.
            let problem = read::execute_problem(&m);
            match problem {
                None => read::execute(m),
                Some(status) => refused(status, m.result_array_handle, Vec::new()),
            }
        }
        Wire::DestructArrayRequest(m) => Request::DestructArrays { arrays: read::handles(m.array_handle) },
        Wire::CheckFutureRequest(m) => Request::CheckFuture { future: Handle(m.future_handle) },
        Wire::CheckValueReadyRequest(m) => Request::CheckValueReady { values: read::handles(m.value_handles) },
        Wire::MakeArrayFromHostBufferRequest(m) => {
            let (results, consumes) = (m.array_handle.into_iter().collect(), vec![m.host_buffer_handle]);
            or_refused(read::make_array(m), results, consumes)
        }
        Wire::MakeArraysFromHostBufferShardsRequest(m) => {
            let results = m.array_handles.clone();
            let consumes = m.specs.iter().flat_map(|spec| &spec.host_buffers).map(|buffer| buffer.host_buffer_handle).collect();
            or_refused(read::make_arrays(m), results, consumes)
        }
        Wire::AssembleArrayFromSingleDeviceArraysRequest(m) => {
            let results = vec![m.result_handle];
            or_refused(read::assemble(m), results, Vec::new())
        }
        Wire::DisassembleIntoSingleDeviceArraysRequest(m) => {
            let results = m.result_handles.clone();
            or_refused(read::disassemble(m), results, Vec::new())
        }
        Wire::FullyReplicatedShardRequest(m) => or_refused(read::replicated_shard(&m), vec![m.result_handle], Vec::new()),
        Wire::CopyToHostBufferRequest(m) => or_refused(read::copy_to_host(m), Vec::new(), Vec::new()),
        Wire::CopyArraysRequest(m) => {
            let results = m.result_handles.clone();
            or_refused(read::copy_arrays(m), results, Vec::new())
        }
        Wire::RemapArraysRequest(m) => {
            let results = m.result_handles.clone();
            or_refused(read::remap(m), results, Vec::new())
        }
        Wire::MakeErrorArraysRequest(m) => {
            let results = m.array_handles.clone();
            or_refused(read::make_error_arrays(m), results, Vec::new())
        }
        Wire::BitcastArraysRequest(m) => {
            let results = m.result_handles.clone();
            or_refused(read::bitcast(m), results, Vec::new())
        }
        Wire::DeleteArrayRequest(m) => Request::DeleteArrays { arrays: read::handles(m.array_handle) },
        Wire::IsArrayDeletedRequest(m) => Request::IsArrayDeleted { array: Handle(m.array_handle) },
        Wire::CompileRequest(m) => or_refused(read::compile(m, compile_options), Vec::new(), Vec::new()),
        Wire::LoadedExecutableMetadataRequest(m) => Request::ExecutableMetadata { executable: Handle(m.loaded_executable_handle) },
        Wire::LoadedExecutableFetchExecuteResultRequest(m) => Request::FetchExecuteResult { status: Handle(m.result_status_handle) },
        Wire::LoadedExecutableCostAnalysisRequest(m) => describe(m.loaded_executable_handle, Question::Cost),
        Wire::LoadedExecutableHumanReadableProgramTextRequest(m) => describe(m.loaded_executable_handle, Question::Text),
        Wire::LoadedExecutableDestructRequest(m) => Request::DestructExecutable { executable: Handle(m.loaded_executable_handle) },
        Wire::GetDefaultDeviceAssignmentRequest(m) => or_refused(read::default_assignment(&m), Vec::new(), Vec::new()),
        Wire::GetDefaultLayoutRequest(m) => or_refused(read::default_layout(m), Vec::new(), Vec::new()),

        Wire::ReshardArraysRequest(m) => unserved("ReshardArrays", m.result_handles),
        Wire::LoadedExecutableDeleteRequest(_) => unserved("LoadedExecutableDelete", Vec::new()),
        Wire::LoadedExecutableIsDeletedRequest(_) => unserved("LoadedExecutableIsDeleted", Vec::new()),
        Wire::LoadedExecutableMpmdMetadataRequest(_) => unserved("LoadedExecutableMpmdMetadata", Vec::new()),
        Wire::LoadedExecutableMpmdCostAnalysisRequest(_) => unserved("LoadedExecutableMpmdCostAnalysis", Vec::new()),
        Wire::LoadedHostCallbackPollRequest(_) => unserved("LoadedHostCallbackPoll", Vec::new()),
        Wire::LoadedHostCallbackReturnRequest(_) => unserved("LoadedHostCallbackReturn", Vec::new()),
    })
}
