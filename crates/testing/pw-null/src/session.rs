//! One session stream: a direct map from requests to answers, which is also the body of the response.
//!
//! The answers to all requests that have come leave together. The only request that can wait is CheckValueReady, for uploads
//! that are still under way.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use http_body::Frame;
use pb::ifrt_request::Request;
use pb::ifrt_response::Response;
use pb::init_response::{Device, Memory};
use pb::loaded_executable_metadata_response as metadata;
use prost::Message;
use rustc_hash::FxHashMap;

use crate::host_buffers::HostBuffers;
use crate::pb;
use crate::wire::{self, Body, Messages};

/// Begins the names of programs that say what they have: `pwnull_<devices>x<results>`.
const PROGRAM_PREFIX: &[u8] = b"pwnull_";

/// Handles of the server begin here, far from the client's.
const OWN_HANDLES: u64 = 1 << 60;

const UNIMPLEMENTED: i32 = 12;

#[derive(Clone)]
struct Array {
    dtype: Option<pb::DTypeProto>,
    shape: Option<pb::ShapeProto>,
    sharding: Option<pb::ShardingProto>,
    /// Of the whole array, or of one shard of an array that is made of shards.
    bytes: usize,
    buffers: Arc<[u64]>,
}

struct Program {
    results: usize,
    /// The first run tells the client what the results are like; from the second on the client chooses their handles.
    fresh: bool,
}

/// A CheckValueReady that waits for uploads.
struct Waiting {
    meta: pb::RequestMetadata,
    handles: Vec<u64>,
}

pub(crate) struct Session {
    id: u64,
    devices: i32,
    requests: Messages,
    buffers: Arc<HostBuffers>,
    arrays: FxHashMap<u64, Array>,
    programs: FxHashMap<u64, Program>,
    last_handle: u64,
    answered: i64,
    waiting: Option<Waiting>,
    out: BytesMut,
    done: bool,
}

impl Session {
    pub(crate) fn new(id: u64, devices: i32, body: Body, buffers: Arc<HostBuffers>) -> Session {
        Session {
            id,
            devices,
            requests: Messages::new(body),
            buffers,
            arrays: FxHashMap::default(),
            programs: FxHashMap::default(),
            last_handle: OWN_HANDLES,
            answered: 0,
            waiting: None,
            out: BytesMut::new(),
            done: false,
        }
    }

    /// Answers what has come; whether the client has ended the session.
    fn serve(&mut self, cx: &mut Context<'_>) -> bool {
        loop {
            if let Some(waiting) = self.waiting.take() {
                if !self.is_ready(&waiting.handles, cx) {
                    self.waiting = Some(waiting);
                    return false;
                }
                self.answer(waiting.meta, Some(Response::CheckValueReadyResponse(pb::CheckValueReadyResponse {})));
            }
            let message = match self.requests.poll_next(cx) {
                Poll::Pending => return false,
                Poll::Ready(None) => return true,
                Poll::Ready(Some(message)) => message,
            };
            let Ok(pb::IfrtRequest { request_metadata: Some(meta), request: Some(request) }) = Message::decode(message) else {
                return true;
            };
            if let Request::CheckValueReadyRequest(check) = request {
                self.waiting = Some(Waiting { meta, handles: check.value_handles });
            } else {
                let response = self.handle(request);
                self.answer(meta, response);
            }
        }
    }

    fn is_ready(&self, handles: &[u64], cx: &mut Context<'_>) -> bool {
        let arrays = handles.iter().filter_map(|handle| self.arrays.get(handle));
        arrays.into_iter().all(|array| self.buffers.are_stored(self.id, &array.buffers, cx))
    }

    fn answer(&mut self, meta: pb::RequestMetadata, response: Option<Response>) {
        let mut answer = pb::ResponseMetadata { op_id: meta.op_id, seq_num: self.answered, ..Default::default() };
        if response.is_none() {
            answer.status = Some(unimplemented());
        }
        // Also where there is no body: it then counts for nothing, and nothing is measured with requests that are not served.
        if meta.user_context_id != 0 {
            answer.destroyed_user_context_ids.push(meta.user_context_id);
        }
        self.answered += 1;
        wire::write(&pb::IfrtResponse { response_metadata: Some(answer), response }, &mut self.out);
    }

    /// `None` = not served.
    fn handle(&mut self, request: Request) -> Option<Response> {
        Some(match request {
            Request::InitRequest(_) => Response::InitResponse(init(self.id, self.devices)),
            Request::CheckFutureRequest(_) => Response::CheckFutureResponse(pb::CheckFutureResponse {}),
            Request::MakeArrayFromHostBufferRequest(m) => {
                let array_handle = m.array_handle.unwrap_or_else(|| self.new_handle());
                let array = Array {
                    bytes: bytes(&m.dtype, &m.shape),
                    dtype: m.dtype,
                    shape: m.shape,
                    sharding: m.sharding,
                    buffers: [m.host_buffer_handle].into(),
                };
                self.arrays.insert(array_handle, array);
                Response::MakeArrayFromHostBufferResponse(pb::MakeArrayFromHostBufferResponse { array_handle })
            }
            Request::MakeArraysFromHostBufferShardsRequest(m) => {
                for (spec, &handle) in m.specs.into_iter().zip(&m.array_handles) {
                    let buffers: Arc<[u64]> = spec.host_buffers.iter().map(|b| b.host_buffer_handle).collect();
                    let pb::ArraySpecProto { dtype, shape, sharding, .. } = spec.array_spec.unwrap_or_default();
                    let bytes = bytes(&dtype, &shape) / buffers.len().max(1);
                    self.arrays.insert(handle, Array { dtype, shape, sharding, bytes, buffers });
                }
                let array_handles = m.array_handles;
                Response::MakeArraysFromHostBufferShardsResponse(pb::MakeArraysFromHostBufferShardsResponse { array_handles })
            }
            Request::AssembleArrayFromSingleDeviceArraysRequest(m) => {
                let array_handle = m.result_handle;
                Response::AssembleArrayFromSingleDeviceArraysResponse(pb::AssembleArrayFromSingleDeviceArraysResponse { array_handle })
            }
            Request::CopyToHostBufferRequest(m) => {
                let bytes = self.arrays.get(&m.array_handle).map_or(4, |array| array.bytes);
                self.buffers.offer((self.id, m.host_buffer_handle), bytes);
                Response::CopyToHostBufferResponse(pb::CopyToHostBufferResponse {})
            }
            Request::DisassembleIntoSingleDeviceArraysRequest(m) => {
                self.copy(m.array_handle, &m.result_handles);
                let array_handles = m.result_handles;
                Response::DisassembleIntoSingleDeviceArraysResponse(pb::DisassembleIntoSingleDeviceArraysResponse { array_handles })
            }
            Request::FullyReplicatedShardRequest(m) => {
                self.copy(m.array_handle, &[m.result_handle]);
                Response::FullyReplicatedShardResponse(pb::FullyReplicatedShardResponse { array_handle: m.result_handle })
            }
            Request::CopyArraysRequest(m) => Response::CopyArraysResponse(pb::CopyArraysResponse { array_handles: m.result_handles }),
            Request::DeleteArrayRequest(_) => {
                Response::DeleteArrayResponse(pb::DeleteArrayResponse { deletion_future_handle: self.new_handle() })
            }
            Request::IsArrayDeletedRequest(_) => Response::IsArrayDeletedResponse(pb::IsArrayDeletedResponse { deleted: false }),
            Request::DestructArrayRequest(m) => {
                m.array_handle.iter().for_each(|handle| drop(self.arrays.remove(handle)));
                Response::DestructArrayResponse(pb::DestructArrayResponse {})
            }
            Request::CompileRequest(m) => Response::CompileResponse(self.compile(&m)),
            Request::LoadedExecutableMetadataRequest(m) => {
                let results = self.programs.get(&m.loaded_executable_handle).map_or(1, |p| p.results);
                Response::LoadedExecutableMetadataResponse(program_metadata(results))
            }
            Request::LoadedExecutableExecuteRequest(m) => Response::LoadedExecutableExecuteResponse(self.execute(&m)),
            Request::LoadedExecutableFetchExecuteResultRequest(_) => {
                Response::LoadedExecutableFetchExecuteResultResponse(pb::LoadedExecutableFetchExecuteResultResponse::default())
            }
            Request::LoadedExecutableDestructRequest(_) => {
                Response::LoadedExecutableDestructResponse(pb::LoadedExecutableDestructResponse {})
            }
            Request::GetDefaultLayoutRequest(m) => {
                let order: Vec<String> = (0..m.dims.len()).rev().map(|d| d.to_string()).collect();
                let serialized_pjrt_layout = format!("{{{}}}", order.join(",")).into();
                Response::GetDefaultLayoutResponse(pb::GetDefaultLayoutResponse { serialized_pjrt_layout })
            }
            _ => return None,
        })
    }

    fn new_handle(&mut self) -> u64 {
        self.last_handle += 1;
        self.last_handle
    }

    fn copy(&mut self, from: u64, to: &[u64]) {
        if let Some(array) = self.arrays.get(&from).cloned() {
            self.arrays.extend(to.iter().map(|&handle| (handle, array.clone())));
        }
    }

    fn compile(&mut self, request: &pb::CompileRequest) -> pb::CompileResponse {
        let (num_devices, results) = request.program.as_ref().and_then(|p| said_by_name(&p.data)).unwrap_or((1, 1));
        let loaded_executable_handle = self.new_handle();
        self.programs.insert(loaded_executable_handle, Program { results, fresh: true });
        pb::CompileResponse {
            loaded_executable_handle,
            name: "jit_null".into(),
            num_devices,
            device_ids: (0..num_devices).collect(),
            addressable_device_ids: (0..num_devices).collect(),
            fingerprint: Some(pb::compile_response::Fingerprint::FingerprintValue(Bytes::from_static(b"null"))),
            ready_future_handle: Some(self.new_handle()),
            ..Default::default()
        }
    }

    fn execute(&mut self, request: &pb::LoadedExecutableExecuteRequest) -> pb::LoadedExecutableExecuteResponse {
        let told = request.result_array_handle.is_empty();
        let Some(program) = self.programs.get_mut(&request.loaded_executable_handle).filter(|p| told && p.fresh) else {
            return pb::LoadedExecutableExecuteResponse::default();
        };
        program.fresh = false;
        let arrays: Vec<Array> = request.args_handles.iter().filter_map(|handle| self.arrays.get(handle).cloned()).collect();
        let mut outputs = Vec::with_capacity(arrays.len());
        for array in arrays {
            let array_handle = self.new_handle();
            self.arrays.insert(array_handle, array.clone());
            let Array { dtype, shape, sharding, .. } = array;
            outputs.push(pb::loaded_executable_execute_response::Output { dtype, shape, sharding, array_handle });
        }
        pb::LoadedExecutableExecuteResponse { status_handle: 0, outputs }
    }
}

impl http_body::Body for Session {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.done {
            return Poll::Ready(None);
        }
        let over = self.serve(cx);
        if !self.out.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(self.out.split().freeze()))));
        }
        if !over {
            return Poll::Pending;
        }
        self.done = true;
        Poll::Ready(Some(Ok(Frame::trailers(wire::trailers()))))
    }
}

fn unimplemented() -> pb::StatusProto {
    pb::StatusProto { code: UNIMPLEMENTED, message: "the null server does not serve this".into(), ..Default::default() }
}

fn init(session_id: u64, devices: i32) -> pb::InitResponse {
    let flag = |value| pb::attribute_map_proto::Value { value: Some(pb::attribute_map_proto::value::Value::BoolValue(value)) };
    let attributes = [("serialize_with_sdy".to_owned(), flag(true)), ("supports_executable_serialization".to_owned(), flag(false))];
    let device = |id| Device {
        id,
        local_device_id: id,
        local_hardware_id: id,
        platform_name: "cpu".into(),
        device_kind: "cpu".into(),
        default_memory_id: Some(id),
        memory_ids: vec![id],
        debug_string: format!("null:{id}"),
        to_string: format!("NullDevice(id={id})"),
        attributes: Some(pb::AttributeMapProto::default()),
    };
    let memory = |id| Memory {
        id,
        memory_space_kind: "device".into(),
        kind_id: 0,
        device_ids: vec![id],
        debug_string: format!("null memory:{id}"),
        to_string: format!("NullMemory(id={id})"),
    };
    pb::InitResponse {
        session_id,
        platform_name: "cpu".into(),
        platform_version: "null".into(),
        platform_id: 1,
        process_index: 0,
        runtime_type: "null".into(),
        all_devices: (0..devices).map(device).collect(),
        primary_device_ids: (0..devices).collect(),
        addressable_device_ids: (0..devices).collect(),
        memories: (0..devices).map(memory).collect(),
        client_attributes: Some(pb::AttributeMapProto { version_number: 0, attributes: attributes.into() }),
    }
}

fn program_metadata(results: usize) -> pb::LoadedExecutableMetadataResponse {
    let kinds = metadata::MemoryKindList { memory_kinds: vec!["device".to_owned(); results] };
    pb::LoadedExecutableMetadataResponse {
        parameter_layouts: Some(metadata::ParameterLayouts::ParameterLayoutsError(unimplemented())),
        output_layouts: Some(metadata::OutputLayouts::OutputLayoutsError(unimplemented())),
        output_memory_kinds: Some(metadata::OutputMemoryKind { status: None, memory_kind_lists: vec![kinds] }),
        donated_input_indices_oneof: Some(metadata::DonatedInputIndicesOneof::DonatedInputIndices(Default::default())),
        compiled_memory_stats_oneof: Some(metadata::CompiledMemoryStatsOneof::CompiledMemoryStatsError(unimplemented())),
        ..Default::default()
    }
}

/// Devices and results of a program, out of its name in the module.
fn said_by_name(program: &[u8]) -> Option<(i32, usize)> {
    let at = program.windows(PROGRAM_PREFIX.len()).position(|w| w == PROGRAM_PREFIX)?;
    let text = &program[at + PROGRAM_PREFIX.len()..];
    let end = text.iter().position(|c| !c.is_ascii_digit() && *c != b'x').unwrap_or(text.len());
    let (devices, results) = std::str::from_utf8(&text[..end]).ok()?.split_once('x')?;
    Some((devices.parse().ok()?, results.parse().ok()?))
}

fn bytes(dtype: &Option<pb::DTypeProto>, shape: &Option<pb::ShapeProto>) -> usize {
    use pb::d_type_proto::Kind;
    let element = match dtype.as_ref().map_or(Kind::F32, |d| d.kind()) {
        Kind::Pred | Kind::S8 | Kind::U8 => 1,
        Kind::S16 | Kind::U16 | Kind::F16 | Kind::Bf16 => 2,
        Kind::S32 | Kind::U32 | Kind::F32 => 4,
        _ => 8,
    };
    element * shape.as_ref().map_or(1, |s| s.dims.iter().product::<i64>() as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_says_what_it_has() {
        assert_eq!(said_by_name(b"\0jit_pwnull_8x100\0main"), Some((8, 100)));
        assert_eq!(said_by_name(b"pwnull_1x1"), Some((1, 1)));
        assert_eq!(said_by_name(b"jit_f"), None);
        assert_eq!(said_by_name(b"pwnull_x"), None);
    }
}
