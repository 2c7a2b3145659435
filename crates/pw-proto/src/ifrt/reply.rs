//! Responses.

use bytes::Bytes;
use pw_types::{Code, CompileReport, Description, Handle, OpId, Question, Reply, Status, ValueSpec, VirtualDeviceId};

use super::{Attribute, attribute_map, dtype, layout_from_text, pb, sharding};
use pb::ifrt_response::Response;
use pb::loaded_executable_metadata_response as metadata;

/// What goes beside the body of a response.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Meta {
    /// Position among the responses with a body, from 0.
    pub seq_num: i64,
    /// User contexts that are no longer needed, one for each request that brought them.
    pub released: Vec<u64>,
}

/// The message of a status.
pub fn status_to_proto(status: &Status) -> pb::StatusProto {
    pb::StatusProto { code: status.code as i32, message: status.message.clone(), payload: Default::default() }
}

/// A status out of its message.
pub fn status_from_proto(proto: &pb::StatusProto) -> Status {
    Status::new(Code::from_number(proto.code), proto.message.clone())
}

/// A failed request: a status and no body (a body would hide it).
pub fn encode_error(op: OpId, status: &Status) -> pb::IfrtResponse {
    let metadata = pb::ResponseMetadata { op_id: op.0, status: Some(status_to_proto(status)), ..Default::default() };
    pb::IfrtResponse { response_metadata: Some(metadata), response: None }
}

/// A request that succeeded.
pub fn encode_reply(op: OpId, reply: &Reply, meta: Meta) -> pb::IfrtResponse {
    with_body(op, meta, body(reply))
}

pub(super) fn with_body(op: OpId, meta: Meta, response: Response) -> pb::IfrtResponse {
    let metadata = pb::ResponseMetadata { op_id: op.0, status: None, seq_num: meta.seq_num, destroyed_user_context_ids: meta.released };
    pb::IfrtResponse { response_metadata: Some(metadata), response: Some(response) }
}

fn body(reply: &Reply) -> Response {
    match reply {
        Reply::CheckFuture => Response::CheckFutureResponse(pb::CheckFutureResponse {}),
        Reply::CheckValueReady => Response::CheckValueReadyResponse(pb::CheckValueReadyResponse {}),
        Reply::MakeArray(handle) => {
            Response::MakeArrayFromHostBufferResponse(pb::MakeArrayFromHostBufferResponse { array_handle: handle.0 })
        }
        Reply::MakeArraysFromShards(arrays) => {
            Response::MakeArraysFromHostBufferShardsResponse(pb::MakeArraysFromHostBufferShardsResponse { array_handles: handles(arrays) })
        }
        Reply::Assemble(handle) => Response::AssembleArrayFromSingleDeviceArraysResponse(pb::AssembleArrayFromSingleDeviceArraysResponse {
            array_handle: handle.0,
        }),
        Reply::Disassemble(arrays) => Response::DisassembleIntoSingleDeviceArraysResponse(pb::DisassembleIntoSingleDeviceArraysResponse {
            array_handles: handles(arrays),
        }),
        Reply::FullyReplicatedShard(handle) => {
            Response::FullyReplicatedShardResponse(pb::FullyReplicatedShardResponse { array_handle: handle.0 })
        }
        Reply::CopyToHost => Response::CopyToHostBufferResponse(pb::CopyToHostBufferResponse {}),
        Reply::CopyArrays(arrays) => Response::CopyArraysResponse(pb::CopyArraysResponse { array_handles: handles(arrays) }),
        Reply::RemapArrays(arrays) => Response::RemapArraysResponse(pb::RemapArraysResponse { array_handles: handles(arrays) }),
        Reply::MakeErrorArrays(arrays) => Response::MakeErrorArraysResponse(pb::MakeErrorArraysResponse { array_handles: handles(arrays) }),
        Reply::BitcastArrays(arrays) => Response::BitcastArraysResponse(pb::BitcastArraysResponse { array_handles: handles(arrays) }),
        Reply::DeleteArrays(future) => Response::DeleteArrayResponse(pb::DeleteArrayResponse { deletion_future_handle: future.0 }),
        Reply::IsArrayDeleted(deleted) => Response::IsArrayDeletedResponse(pb::IsArrayDeletedResponse { deleted: *deleted }),
        Reply::DestructArrays => Response::DestructArrayResponse(pb::DestructArrayResponse {}),
        Reply::Compile(reply) => {
            let ids = device_ids(&reply.devices);
            Response::CompileResponse(pb::CompileResponse {
                loaded_executable_handle: reply.executable.0,
                loaded_host_callback_handles: Vec::new(),
                name: reply.name.clone(),
                num_devices: ids.len() as i32,
                device_ids: ids.clone(),
                addressable_device_ids: ids,
                fingerprint: Some(pb::compile_response::Fingerprint::FingerprintValue(reply.fingerprint.clone())),
                ready_future_handle: None,
            })
        }
        Reply::ExecutableMetadata(report) => Response::LoadedExecutableMetadataResponse(executable_metadata(report)),
        Reply::Execute(reply) => {
            let outputs = reply.outputs.iter().map(|output| pb::loaded_executable_execute_response::Output {
                dtype: Some(dtype::encode(output.dtype)),
                shape: Some(pb::ShapeProto { version_number: 0, dims: output.dims.clone() }),
                sharding: Some(sharding::encode_sharding(&output.devices, output.op_sharding.as_ref(), &output.memory_kind)),
                array_handle: output.array.0,
            });
            let outputs = outputs.collect();
            Response::LoadedExecutableExecuteResponse(pb::LoadedExecutableExecuteResponse { status_handle: reply.status.0, outputs })
        }
        Reply::FetchExecuteResult => {
            Response::LoadedExecutableFetchExecuteResultResponse(pb::LoadedExecutableFetchExecuteResultResponse::default())
        }
        Reply::DestructExecutable => Response::LoadedExecutableDestructResponse(pb::LoadedExecutableDestructResponse {}),
        Reply::Described { question, result } => described(*question, result),
        Reply::DefaultLayout(text) => {
            let serialized_pjrt_layout = Bytes::copy_from_slice(text.as_bytes());
            Response::GetDefaultLayoutResponse(pb::GetDefaultLayoutResponse { serialized_pjrt_layout })
        }
        Reply::DefaultDeviceAssignment { replicas, partitions, devices } => {
            let device_assignment = Some(device_assignment(*replicas, *partitions, devices));
            Response::GetDefaultDeviceAssignmentResponse(pb::GetDefaultDeviceAssignmentResponse { device_assignment })
        }
    }
}

/// The failure of an answer stands inside its body.
fn described(question: Question, result: &Result<Description, Status>) -> Response {
    use pb::loaded_executable_cost_analysis_response::Result as Cost;
    use pb::loaded_executable_human_readable_program_text_response::Result as Text;
    let mixed_up = || status_to_proto(&Status::internal("the answer is to another question"));
    match question {
        Question::Cost => {
            let result = match result {
                Ok(Description::Cost(costs)) => {
                    Cost::Attributes(attribute_map(costs.iter().map(|cost| (cost.name.as_str(), Attribute::Float(cost.value as f32)))))
                }
                Ok(Description::Text(_)) => Cost::Status(mixed_up()),
                Err(status) => Cost::Status(status_to_proto(status)),
            };
            Response::LoadedExecutableCostAnalysisResponse(pb::LoadedExecutableCostAnalysisResponse { result: Some(result) })
        }
        Question::Text => {
            let result = match result {
                Ok(Description::Text(text)) => Text::HumanReadableProgramText(text.clone()),
                Ok(Description::Cost(_)) => Text::Status(mixed_up()),
                Err(status) => Text::Status(status_to_proto(status)),
            };
            Response::LoadedExecutableHumanReadableProgramTextResponse(pb::LoadedExecutableHumanReadableProgramTextResponse {
                result: Some(result),
            })
        }
    }
}

fn handles(handles: &[Handle]) -> Vec<u64> {
    handles.iter().map(|handle| handle.0).collect()
}

fn device_ids(devices: &[VirtualDeviceId]) -> Vec<i32> {
    devices.iter().map(|device| device.0 as i32).collect()
}

/// `devices`: for each replica, for each partition. The message lists replicas under partitions.
fn device_assignment(replicas: u32, partitions: u32, devices: &[VirtualDeviceId]) -> pb::DeviceAssignmentProto {
    let stride = (partitions as usize).max(1);
    let rows = (0..partitions as usize).map(|partition| pb::device_assignment_proto::ComputationDevice {
        replica_device_ids: devices.iter().skip(partition).step_by(stride).map(|device| i64::from(device.0)).collect(),
    });
    pb::DeviceAssignmentProto { replica_count: replicas as i32, computation_count: partitions as i32, computation_devices: rows.collect() }
}

fn executable_metadata(report: &CompileReport) -> pb::LoadedExecutableMetadataResponse {
    let shardings = |values: &[ValueSpec]| {
        let shardings = values.iter().map(|value| value.op_sharding.clone().unwrap_or_default()).collect();
        (report.partitions > 1).then_some(metadata::ShardingList { shardings })
    };
    let layouts = |values: &[ValueSpec]| match &report.layouts_error {
        Some(status) => Err(status_to_proto(status)),
        None => match values.iter().map(|value| layout_from_text(&value.layout)).collect() {
            Some(layouts) => Ok(metadata::LayoutList { layouts }),
            None => Err(status_to_proto(&Status::unimplemented("the plugin tells no layouts that this server can read"))),
        },
    };
    let kinds = report.outputs.iter().map(|output| output.memory_kind.clone()).collect();
    let bytes = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
    let memory = &report.memory;
    pb::LoadedExecutableMetadataResponse {
        parameter_shardings: shardings(&report.parameters),
        output_shardings: shardings(&report.outputs),
        parameter_layouts: Some(match layouts(&report.parameters) {
            Ok(list) => metadata::ParameterLayouts::ParameterLayoutsList(list),
            Err(status) => metadata::ParameterLayouts::ParameterLayoutsError(status),
        }),
        output_layouts: Some(match layouts(&report.outputs) {
            Ok(list) => metadata::OutputLayouts::OutputLayoutsList(list),
            Err(status) => metadata::OutputLayouts::OutputLayoutsError(status),
        }),
        // Exactly one list: anything else breaks every jit call.
        output_memory_kinds: Some(metadata::OutputMemoryKind {
            status: None,
            memory_kind_lists: vec![metadata::MemoryKindList { memory_kinds: kinds }],
        }),
        // Set even if empty: without it the client asks for every array whether it is deleted.
        donated_input_indices_oneof: Some(metadata::DonatedInputIndicesOneof::DonatedInputIndices(metadata::DonatedInputIndices {
            donated_input_indices: report.donated.clone(),
        })),
        compiled_memory_stats_oneof: Some(metadata::CompiledMemoryStatsOneof::CompiledMemoryStats(pb::CompiledMemoryStatsProto {
            generated_code_size_in_bytes: bytes(memory.generated_code),
            argument_size_in_bytes: bytes(memory.arguments),
            output_size_in_bytes: bytes(memory.outputs),
            alias_size_in_bytes: bytes(memory.aliased),
            temp_size_in_bytes: bytes(memory.temporaries),
        })),
        size_of_generated_code_in_bytes: bytes(memory.generated_code),
    }
}
