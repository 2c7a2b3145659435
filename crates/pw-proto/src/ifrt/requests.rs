//! The bodies of the requests that are served. An error here refuses the request.

use pw_types::{
    Code, CompileRequest, CopySemantics, DType, Dims, ExecuteRequest, Handle, HostSource, Interval, MemoryTarget, RemapMapping, RemapPlan,
    Request, ShardedUpload, Status, UploadShard,
};

use super::options::CompileOptions;
use super::reply::status_from_proto;
use super::request::is_client_handle;
use super::sharding::{array_spec, checked_dims, decode_sharding, device, devices, dims};
use super::{dtype, pb};

pub(super) fn handles(numbers: Vec<u64>) -> Vec<Handle> {
    // In place: `Handle` is a plain wrapper.
    numbers.into_iter().map(Handle).collect()
}

/// Names that a client gives to what a request makes: below the server's own, not 0, each once.
fn results(numbers: Vec<u64>) -> Result<Vec<Handle>, Status> {
    if let Some(handle) = numbers.iter().find(|&&handle| !is_client_handle(handle)) {
        return Err(Status::invalid(format!("{handle} is no handle that a client may choose")));
    }
    if let [first, rest @ ..] = &numbers[..] {
        // Clients count upwards, so this is enough nearly always.
        let ascending = rest.iter().try_fold(*first, |last, &next| (next > last).then_some(next)).is_some();
        if !ascending {
            let mut sorted = numbers.clone();
            sorted.sort_unstable();
            if sorted.windows(2).any(|pair| pair[0] == pair[1]) {
                return Err(Status::invalid("a request names a result handle twice"));
            }
        }
    }
    Ok(handles(numbers))
}

fn result(number: u64) -> Result<Handle, Status> {
    Ok(results(vec![number])?[0])
}

fn copy(number: i32) -> Result<CopySemantics, Status> {
    match pb::ArrayCopySemantics::try_from(number) {
        Ok(pb::ArrayCopySemantics::AlwaysCopy) => Ok(CopySemantics::AlwaysCopy),
        Ok(pb::ArrayCopySemantics::ReuseInput) => Ok(CopySemantics::ReuseInput),
        Ok(pb::ArrayCopySemantics::DonateInput) => Ok(CopySemantics::DonateInput),
        _ => Err(Status::invalid(format!("{number} is no copy semantics"))),
    }
}

fn strides(proto: Option<pb::ByteStrides>, rank: usize) -> Result<Option<Vec<i64>>, Status> {
    match proto {
        Some(proto) if proto.strides.len() != rank => {
            Err(Status::invalid(format!("{} byte strides do not fit an array of rank {rank}", proto.strides.len())))
        }
        other => Ok(other.map(|proto| proto.strides)),
    }
}

fn source(
    buffer: u64,
    kind: Option<&pb::DTypeProto>,
    shape: Option<&pb::ShapeProto>,
    byte_strides: Option<pb::ByteStrides>,
) -> Result<HostSource, Status> {
    if !is_client_handle(buffer) {
        return Err(Status::invalid(format!("{buffer} is no handle of a host buffer")));
    }
    let dims = dims(shape)?;
    let byte_strides = strides(byte_strides, dims.len())?;
    // Those of other dimensions mean nothing.
    let mut used = byte_strides.iter().flatten().zip(&dims).filter(|&(_, &dim)| dim > 1);
    if used.any(|(&stride, _)| stride < 0) {
        return Err(Status::invalid("byte strides are negative"));
    }
    let dtype = dtype::decode(kind)?;
    if dtype == DType::String {
        // Their bytes have no fixed size, and no plugin takes them.
        return Err(Status::unimplemented(
            "string arrays are not served by pathways-rs: the devices of its workers hold numbers only; keep text in NumPy arrays of the client, \
             or encode it as numbers (for example np.frombuffer(text.encode(), np.uint8))",
        ));
    }
    Ok(HostSource { buffer: Handle(buffer), dtype, dims, byte_strides })
}

pub(super) fn make_array(m: pb::MakeArrayFromHostBufferRequest) -> Result<Request, Status> {
    if m.layout.is_some_and(|layout| layout.serialized_layout.is_some_and(|layout| !layout.data.is_empty())) {
        return Err(Status::unimplemented("arrays with a layout of their own are not served"));
    }
    let array = result(m.array_handle.unwrap_or_default())?;
    let source = source(m.host_buffer_handle, m.dtype.as_ref(), m.shape.as_ref(), m.byte_strides)?;
    let sharding = decode_sharding(m.sharding.as_ref(), &source.dims)?;
    let spec = pw_types::ArraySpec { dtype: source.dtype, dims: source.dims.clone(), sharding };
    Ok(Request::MakeArray { array, spec, source })
}

pub(super) fn make_arrays(m: pb::MakeArraysFromHostBufferShardsRequest) -> Result<Request, Status> {
    let handles = results(m.array_handles)?;
    if handles.len() != m.specs.len() {
        return Err(Status::invalid(format!("{} array specs have {} handles", m.specs.len(), handles.len())));
    }
    let mut arrays = Vec::with_capacity(handles.len());
    for (array, spec) in handles.into_iter().zip(m.specs) {
        if spec.host_buffers.len() != spec.addressable_shard_indices.len() {
            return Err(Status::invalid("host buffers and shard indices differ in number"));
        }
        let array_spec = array_spec(spec.array_spec.as_ref(), true)?;
        let count = array_spec.sharding.devices.len();
        let mut seen = vec![false; count];
        let mut shards = Vec::with_capacity(spec.host_buffers.len());
        for (buffer, at) in spec.host_buffers.into_iter().zip(spec.addressable_shard_indices) {
            let source = source(buffer.host_buffer_handle, buffer.dtype.as_ref(), buffer.shape.as_ref(), buffer.byte_strides)?;
            let mut positions = Vec::with_capacity(at.indices.len().min(count));
            for index in at.indices {
                let fresh = usize::try_from(index).ok().and_then(|i| seen.get_mut(i)).is_some_and(|seen| !std::mem::replace(seen, true));
                if !fresh {
                    return Err(Status::invalid(format!("shard index {index} is given twice or is not below {count}")));
                }
                positions.push(index as u32);
            }
            shards.push(UploadShard { source, positions });
        }
        if seen.contains(&false) {
            return Err(Status::invalid("a shard of an array has no host buffer"));
        }
        arrays.push(ShardedUpload { array, spec: array_spec, shards });
    }
    Ok(Request::MakeArraysFromShards { arrays })
}

pub(super) fn assemble(m: pb::AssembleArrayFromSingleDeviceArraysRequest) -> Result<Request, Status> {
    let dims = dims(m.shape.as_ref())?;
    let sharding = decode_sharding(m.sharding.as_ref(), &dims)?;
    let dtype = m.dtype.as_ref().map(|kind| dtype::decode(Some(kind))).transpose()?;
    let (array, copy) = (result(m.result_handle)?, copy(m.copy_semantics)?);
    Ok(Request::Assemble { array, dtype, dims, sharding, inputs: handles(m.single_device_array_handles), copy })
}

pub(super) fn disassemble(m: pb::DisassembleIntoSingleDeviceArraysRequest) -> Result<Request, Status> {
    Ok(Request::Disassemble { array: Handle(m.array_handle), results: results(m.result_handles)?, copy: copy(m.copy_semantics)? })
}

pub(super) fn replicated_shard(m: &pb::FullyReplicatedShardRequest) -> Result<Request, Status> {
    let (array, copy) = (Handle(m.array_handle), copy(m.copy_semantics)?);
    Ok(Request::FullyReplicatedShard { array, result: result(m.result_handle)?, copy })
}

pub(super) fn copy_to_host(m: pb::CopyToHostBufferRequest) -> Result<Request, Status> {
    if !is_client_handle(m.host_buffer_handle) {
        return Err(Status::invalid(format!("{} is no handle of a host buffer", m.host_buffer_handle)));
    }
    let rank = m.byte_strides.as_ref().map_or(0, |proto| proto.strides.len());
    let byte_strides = strides(m.byte_strides, rank)?;
    if byte_strides.iter().flatten().any(|&stride| stride < 0) {
        return Err(Status::invalid("byte strides are negative"));
    }
    Ok(Request::CopyToHost { array: Handle(m.array_handle), host_buffer: Handle(m.host_buffer_handle), byte_strides })
}

pub(super) fn copy_arrays(m: pb::CopyArraysRequest) -> Result<Request, Status> {
    if m.array_handles.len() != m.result_handles.len() {
        return Err(Status::invalid("arrays to copy and their results differ in number"));
    }
    let memory = match m.memory_kind {
        None => MemoryTarget::Keep,
        Some(kind) if kind.is_empty() => MemoryTarget::Default,
        Some(kind) => MemoryTarget::Kind(kind),
    };
    Ok(Request::CopyArrays {
        arrays: handles(m.array_handles),
        results: results(m.result_handles)?,
        devices: devices(&m.device_ids)?,
        memory,
        copy: copy(m.copy_semantics)?,
    })
}

pub(super) fn remap(m: pb::RemapArraysRequest) -> Result<Request, Status> {
    let plan = m.plan.ok_or_else(|| Status::invalid("a remap has no plan"))?;
    if plan.output_specs.len() != m.result_handles.len() {
        return Err(Status::invalid("the outputs of a remap and their handles differ in number"));
    }
    if plan.mappings.is_empty() && !plan.input_devices_for_output.is_empty() {
        return Err(Status::unimplemented("remaps given by devices and not by shards are not served"));
    }
    let outputs = plan.output_specs.iter().map(|spec| array_spec(Some(spec), false)).collect::<Result<Vec<_>, _>>()?;
    let mut mappings = Vec::with_capacity(plan.mappings.len());
    for mapping in &plan.mappings {
        let index = |number: i32, count: usize| u32::try_from(number).ok().filter(|&n| (n as usize) < count);
        let (Some(input), Some(output)) = (index(mapping.in_array, m.array_handles.len()), index(mapping.out_array, outputs.len())) else {
            return Err(Status::invalid("a remap names an array that it does not have"));
        };
        let from = intervals(&mapping.from_start, &mapping.from_end, &mapping.from_step)?;
        let to = intervals(&mapping.to_start, &mapping.to_end, &mapping.to_step)?;
        if from.len() != to.len() {
            return Err(Status::invalid("the intervals of a remap differ in number"));
        }
        mappings.push(RemapMapping { input, output, from, to });
    }
    let (arrays, results) = (handles(m.array_handles), results(m.result_handles)?);
    Ok(Request::RemapArrays { arrays, results, plan: RemapPlan { outputs, mappings }, copy: copy(m.copy_semantics)? })
}

pub(super) fn make_error_arrays(m: pb::MakeErrorArraysRequest) -> Result<Request, Status> {
    if m.array_specs.len() != m.array_handles.len() {
        return Err(Status::invalid(format!(
            "{} specs of arrays with an error have {} handles",
            m.array_specs.len(),
            m.array_handles.len()
        )));
    }
    let status = m.error.as_ref().map(status_from_proto).filter(|status| status.code != Code::Ok);
    let status = status.ok_or_else(|| Status::invalid("arrays with an error are to be made without an error"))?;
    Ok(Request::MakeErrorArrays { arrays: results(m.array_handles)?, status })
}

pub(super) fn bitcast(m: pb::BitcastArraysRequest) -> Result<Request, Status> {
    if m.array_handles.len() != m.result_handles.len() || m.array_specs.len() != m.result_handles.len() {
        let text = "the arrays of a bitcast, its specs and its results differ in number";
        return Err(Status::invalid(text));
    }
    let copy = copy(m.copy_semantics)?;
    if copy == CopySemantics::AlwaysCopy {
        return Err(Status::invalid("a bitcast copies nothing, ALWAYS_COPY was asked for"));
    }
    let specs = m.array_specs.iter().map(|spec| array_spec(Some(spec), false)).collect::<Result<Vec<_>, _>>()?;
    Ok(Request::BitcastArrays { arrays: handles(m.array_handles), results: results(m.result_handles)?, specs, copy })
}

fn intervals(start: &[i64], end: &[i64], step: &[i64]) -> Result<Vec<Interval>, Status> {
    if start.len() != end.len() || start.len() != step.len() {
        return Err(Status::invalid("the intervals of a remap are incomplete"));
    }
    let zipped = start.iter().zip(end).zip(step).map(|((&start, &end), &step)| Interval { start, end, step });
    let intervals: Vec<Interval> = zipped.collect();
    if intervals.iter().any(|i| i.start < 0 || i.end < i.start || i.step < 1) {
        return Err(Status::invalid("an interval of a remap runs backwards"));
    }
    Ok(intervals)
}

pub(super) fn compile(
    m: pb::CompileRequest,
    options: impl FnOnce(bytes::Bytes) -> Result<CompileOptions, Status>,
) -> Result<Request, Status> {
    let program = m.program.unwrap_or_default();
    match program.type_name.as_str() {
        "xla::ifrt::XlaProgram" => {}
        "xla::ifrt::PluginProgram" => {
            return Err(Status::unimplemented("Bad PluginProgram: xla::ifrt::PluginProgram is not served by this build of pathways-rs"));
        }
        "xla::ifrt::CustomCallProgram" => {
            return Err(Status::unimplemented(
                "xla::ifrt::CustomCallProgram (colocated Python) is not served by this build of pathways-rs",
            ));
        }
        other => return Err(Status::unimplemented(format!("programs of type {other:?} are not served by this build of pathways-rs"))),
    }
    if !m.host_callbacks.is_empty() {
        return Err(Status::unimplemented("host callbacks are not served by this build of pathways-rs"));
    }
    let serialized = m.compile_options.unwrap_or_default();
    if serialized.type_name != "xla::ifrt::XlaCompileOptions" {
        return Err(Status::unimplemented(format!("compile options of type {:?} are not served", serialized.type_name)));
    }
    let options = options(serialized.data)?;
    if options.replicas > 1 {
        return Err(Status::unimplemented(format!("programs with {} replicas are not served; use partitions", options.replicas)));
    }
    Ok(Request::Compile(CompileRequest {
        program: program.data,
        options: options.options,
        devices: options.devices,
        replicas: options.replicas,
        partitions: options.partitions,
    }))
}

pub(super) fn execute_problem(m: &pb::LoadedExecutableExecuteRequest) -> Option<Status> {
    if !m.device_ids.is_empty() {
        return Some(Status::unimplemented("an Execute on other devices than those it was compiled for is not served"));
    }
    if m.execute_options.as_ref().is_some_and(|options| options.non_donatable_input_indices.iter().any(|&index| index < 0)) {
        return Some(Status::invalid("an argument number is negative"));
    }
    if m.result_status_handle != 0 && !is_client_handle(m.result_status_handle) {
        return Some(Status::invalid(format!("{} is no handle that a client may choose", m.result_status_handle)));
    }
    let mut last = 0;
    for &handle in &m.result_array_handle {
        if handle <= last || !is_client_handle(handle) {
            // Rare: the full check.
            return results(m.result_array_handle.clone()).err();
        }
        last = handle;
    }
    None
}

pub(super) fn execute(m: pb::LoadedExecutableExecuteRequest) -> Request {
    let options = m.execute_options.unwrap_or_default();
    Request::Execute(ExecuteRequest {
        executable: Handle(m.loaded_executable_handle),
        arguments: handles(m.args_handles),
        results: handles(m.result_array_handle),
        status: Handle(m.result_status_handle),
        fill_status: options.fill_status,
        launch_id: options.launch_id,
        non_donatable: options.non_donatable_input_indices.into_iter().map(|index| index as u32).collect(),
    })
}

pub(super) fn default_assignment(m: &pb::GetDefaultDeviceAssignmentRequest) -> Result<Request, Status> {
    match (u32::try_from(m.num_replicas), u32::try_from(m.num_partitions)) {
        (Ok(replicas), Ok(partitions)) if replicas.checked_mul(partitions).is_some_and(|count| count > 0) => {
            Ok(Request::DefaultDeviceAssignment { replicas, partitions })
        }
        _ => Err(Status::invalid(format!(
            "there is no device assignment of {} replicas and {} partitions",
            m.num_replicas, m.num_partitions
        ))),
    }
}

pub(super) fn default_layout(m: pb::GetDefaultLayoutRequest) -> Result<Request, Status> {
    let dims: Dims = checked_dims(m.dims)?;
    Ok(Request::DefaultLayout { dtype: dtype::decode(m.dtype.as_ref())?, dims, device: device(m.device_id)?, memory_kind: m.memory_kind })
}
