//! Decoders and encoders of the client protocol.

use bytes::Bytes;
use prost::Message;
use pw_types::*;

use super::pb::{self, ifrt_request::Request as Wire};
use super::*;

fn incoming(request: Wire) -> Incoming {
    let request_metadata = Some(pb::RequestMetadata { op_id: 7, user_context_id: 9 });
    let message = pb::IfrtRequest { request_metadata, request: Some(request) };
    decode_message(message.encode_to_vec().into()).expect("it is a request")
}

fn core(request: Wire) -> Request {
    match incoming(request).request {
        Decoded::Core(request) => request,
        Decoded::Local(local) => panic!("{local:?} is no request for the core"),
    }
}

/// The refusal of a request: status, results, host buffers.
fn refusal(request: Wire) -> (Status, Vec<u64>, Vec<u64>) {
    let numbers = |handles: Vec<Handle>| handles.into_iter().map(|handle| handle.0).collect();
    match core(request) {
        Request::Refused { status, results, consumes } => (status, numbers(results), numbers(consumes)),
        other => panic!("{other:?} is no refusal"),
    }
}

fn serialized(type_name: &str, message: &impl Message) -> pb::Serialized {
    pb::Serialized { type_name: type_name.to_owned(), data: message.encode_to_vec().into() }
}

fn hlo(devices: i32, op: &pb::OpSharding) -> pb::ShardingProto {
    let devices = Some(pb::DeviceListProto { version_number: 0, device_ids: (0..devices).collect() });
    let proto = pb::HloShardingProto { devices, xla_op_sharding: Some(op.encode_to_vec().into()), ..Default::default() };
    pb::ShardingProto { serialized_sharding: Some(serialized("xla::ifrt::HloSharding", &proto)) }
}

fn partition(devices: i32, op: &pb::OpSharding, dims: &[i64]) -> Result<Partition, Status> {
    decode_sharding(Some(&hlo(devices, op)), dims).map(|sharding| sharding.partition)
}

fn tiled(tiles: &[i64]) -> pb::OpSharding {
    pb::OpSharding { r#type: pb::op_sharding::Type::Other as i32, tile_assignment_dimensions: tiles.to_vec(), ..Default::default() }
}

fn shape(dims: &[i64]) -> Option<pb::ShapeProto> {
    Some(pb::ShapeProto { version_number: 0, dims: dims.to_vec() })
}

fn f32() -> Option<pb::DTypeProto> {
    Some(pb::DTypeProto { version_number: 0, kind: 11 })
}

fn make_array() -> pb::MakeArrayFromHostBufferRequest {
    pb::MakeArrayFromHostBufferRequest {
        dtype: f32(),
        shape: shape(&[8, 4]),
        sharding: Some(hlo(8, &pb::OpSharding { iota_reshape_dims: vec![8], ..tiled(&[8, 1]) })),
        layout: None,
        host_buffer_handle: 21,
        byte_strides: Some(pb::ByteStrides { strides: vec![16, 4] }),
        array_handle: Some(21),
    }
}

fn compile(type_name: &str, replicas: i64, rows: &[&[i64]]) -> pb::CompileRequest {
    // XlaCompileOptionsProto { 1: CompileOptionsProto { 3: { 4: replicas, 5: partitions, 9: assignment }, 99: kept } }
    let computation_devices = rows.iter().map(|row| pb::device_assignment_proto::ComputationDevice { replica_device_ids: row.to_vec() });
    let assignment = pb::DeviceAssignmentProto {
        replica_count: replicas as i32,
        computation_count: rows.len() as i32,
        computation_devices: computation_devices.collect(),
    };
    let field = |number: u32, data: &[u8]| {
        let mut out = Vec::new();
        prost::encoding::encode_key(number, prost::encoding::WireType::LengthDelimited, &mut out);
        prost::encoding::encode_varint(data.len() as u64, &mut out);
        out.extend_from_slice(data);
        out
    };
    let mut build = vec![0x20, replicas as u8, 0x28, rows.len() as u8];
    build.extend(field(9, &assignment.encode_to_vec()));
    let mut options = field(3, &build);
    options.extend(field(99, b"kept"));
    pb::CompileRequest {
        program: Some(pb::Serialized { type_name: type_name.to_owned(), data: Bytes::from_static(b"ML") }),
        compile_options: Some(pb::Serialized { type_name: "xla::ifrt::XlaCompileOptions".to_owned(), data: field(1, &options).into() }),
        host_callbacks: Vec::new(),
    }
}

fn execute() -> pb::LoadedExecutableExecuteRequest {
    pb::LoadedExecutableExecuteRequest {
        loaded_executable_handle: FIRST_SERVER_HANDLE + 3,
        args_handles: vec![1, 2],
        execute_options: Some(pb::ExecuteOptionsProto { launch_id: -5, non_donatable_input_indices: vec![1], ..Default::default() }),
        device_ids: Vec::new(),
        result_array_handle: vec![3, 4],
        result_status_handle: 5,
    }
}

#[test]
fn element_types_go_both_ways() {
    for number in 0..128 {
        if let Some(dtype) = dtype_from_number(number) {
            assert_eq!(dtype_number(dtype), number);
        }
    }
    assert_eq!(dtype_from_number(11), Some(DType::F32));
    assert_eq!(dtype_from_number(99), Some(DType::String));
    assert_eq!(dtype_from_number(0), None);
}

#[test]
fn iota_tiles_give_the_assignment() {
    // [4,2] <= [2,4]T(1,0): the mesh read by columns.
    let op = pb::OpSharding { iota_reshape_dims: vec![2, 4], iota_transpose_perm: vec![1, 0], ..tiled(&[4, 2]) };
    let expected = Tiling { tiles: vec![4, 2], replicas: 1, assignment: vec![0, 4, 1, 5, 2, 6, 3, 7] };
    assert_eq!(partition(8, &op, &[8, 8]), Ok(Partition::Tiled(expected)));
}

#[test]
fn partly_replicated_tiles() {
    let op = pb::OpSharding { iota_reshape_dims: vec![8], replicate_on_last_tile_dim: true, ..tiled(&[2, 1, 4]) };
    let expected = Tiling { tiles: vec![2, 1], replicas: 4, assignment: (0..8).collect() };
    assert_eq!(partition(8, &op, &[4, 3]), Ok(Partition::Tiled(expected.clone())));
    let op = pb::OpSharding { iota_reshape_dims: vec![8], last_tile_dims: vec![0, 0], ..tiled(&[2, 1, 2, 2]) };
    assert_eq!(partition(8, &op, &[4, 3]), Ok(Partition::Tiled(expected)));
    // All devices in the last dimension: plain replication.
    let op = pb::OpSharding { iota_reshape_dims: vec![8], replicate_on_last_tile_dim: true, ..tiled(&[1, 8]) };
    assert_eq!(partition(8, &op, &[4]), Ok(Partition::Replicated));
}

#[test]
fn explicit_devices_and_special_kinds() {
    let op = pb::OpSharding { tile_assignment_devices: vec![3, 1, 0, 2], ..tiled(&[4]) };
    assert_eq!(partition(4, &op, &[4]), Ok(Partition::Tiled(Tiling { tiles: vec![4], replicas: 1, assignment: vec![3, 1, 0, 2] })));
    for kind in [pb::op_sharding::Type::Manual, pb::op_sharding::Type::Unreduced] {
        let op = pb::OpSharding { r#type: kind as i32, ..Default::default() };
        assert_eq!(partition(4, &op, &[4]), Ok(Partition::Even { shard_dims: vec![4] }));
    }
    // Unreduced over a part of the mesh: shards of a known shape whose values are not the array's.
    let op = pb::OpSharding { iota_reshape_dims: vec![4], last_tile_dims: vec![6], ..tiled(&[2, 2]) };
    assert_eq!(partition(4, &op, &[4]), Ok(Partition::Even { shard_dims: vec![2] }));
    let maximal = pb::OpSharding { r#type: 1, tile_assignment_devices: vec![0], ..tiled(&[]) };
    assert_eq!(partition(1, &pb::OpSharding { tile_assignment_dimensions: vec![1], ..maximal.clone() }, &[4]), Ok(Partition::Replicated));
    assert_eq!(partition(4, &maximal, &[4]), Ok(Partition::Opaque));
    assert_eq!(partition(8, &pb::OpSharding::default(), &[4]), Ok(Partition::Replicated));
}

#[test]
fn bad_tiles_are_refused() {
    let code = |devices, op: pb::OpSharding, dims: &[i64]| partition(devices, &op, dims).unwrap_err().code;
    assert_eq!(code(4, pb::OpSharding { iota_reshape_dims: vec![4], ..tiled(&[4]) }, &[6]), Code::Unimplemented);
    assert_eq!(code(4, tiled(&[4]), &[4]), Code::InvalidArgument);
    assert_eq!(code(4, pb::OpSharding { iota_reshape_dims: vec![4], ..tiled(&[4]) }, &[4, 4]), Code::InvalidArgument);
    assert_eq!(code(4, pb::OpSharding { iota_reshape_dims: vec![2], ..tiled(&[2]) }, &[4]), Code::InvalidArgument);
    assert_eq!(code(4, pb::OpSharding { tile_assignment_devices: vec![0, 0, 1, 2], ..tiled(&[4]) }, &[4]), Code::InvalidArgument);
    assert_eq!(
        code(4, pb::OpSharding { iota_reshape_dims: vec![2, 2], iota_transpose_perm: vec![0, 0], ..tiled(&[4]) }, &[4]),
        Code::InvalidArgument
    );
    assert_eq!(code(1, pb::OpSharding { iota_reshape_dims: vec![i64::MAX, i64::MAX], ..tiled(&[2]) }, &[4]), Code::InvalidArgument);
}

#[test]
fn named_shardings_equal_their_tiles() {
    let axis = |name: &str, size| pb::mesh_proto::MeshAxis { name: name.to_owned(), size };
    let whole = |index| pb::AxisRefProto { mesh_axis_index: index, sub_axis_info: None };
    let part = |index, pre_size, size| pb::AxisRefProto {
        mesh_axis_index: index,
        sub_axis_info: Some(pb::axis_ref_proto::SubAxis { pre_size, size }),
    };
    let dim = |axes| pb::named_sharding_proto::DimensionSharding { axes, is_closed: true };
    let mesh = pb::MeshProto { axes: vec![axis("x", 2), axis("y", 4)], ..Default::default() };
    let named = |dims| {
        let named = pb::NamedShardingProto { mesh: Some(mesh.clone()), dim_shardings: dims, ..Default::default() };
        pb::OpSharding { named_sharding: Some(named), ..Default::default() }
    };
    let expect = |tiles: &[u32], replicas, assignment: &[u32]| {
        Ok(Partition::Tiled(Tiling { tiles: tiles.to_vec(), replicas, assignment: assignment.to_vec() }))
    };
    assert_eq!(partition(8, &named(vec![dim(vec![whole(0)]), dim(vec![])]), &[8, 8]), expect(&[2, 1], 4, &[0, 1, 2, 3, 4, 5, 6, 7]));
    assert_eq!(
        partition(8, &named(vec![dim(vec![whole(1)]), dim(vec![whole(0)])]), &[8, 8]),
        expect(&[4, 2], 1, &[0, 4, 1, 5, 2, 6, 3, 7])
    );
    assert_eq!(partition(8, &named(vec![dim(vec![part(1, 2, 2)])]), &[8]), expect(&[2], 4, &[0, 2, 4, 6, 1, 3, 5, 7]));
    assert_eq!(partition(8, &named(vec![dim(vec![])]), &[8]), Ok(Partition::Replicated));
    assert!(partition(8, &named(vec![dim(vec![whole(0), whole(0)])]), &[8]).is_err());
    assert!(partition(8, &named(vec![dim(vec![whole(7)])]), &[8]).is_err());
    assert!(partition(8, &named(vec![dim(vec![part(1, 3, 2)])]), &[8]).is_err());
}

#[test]
fn layouts_are_read_from_their_text() {
    let layout = |text| layout_from_text(text);
    assert_eq!(layout("{}"), Some(pb::XlaLayoutProto::default()));
    assert_eq!(layout("{1,0}").map(|l| l.minor_to_major), Some(vec![1, 0]));
    let full = layout("{1,0:T(8,128)(2,1)E(4)S(5)}").expect("it is a layout");
    assert_eq!(full.tiles, [pb::XlaTileProto { dimensions: vec![8, 128] }, pb::XlaTileProto { dimensions: vec![2, 1] }]);
    assert_eq!((full.element_size_in_bits, full.memory_space), (4, 5));
    for bad in ["", "{", "1,0", "{1,0:}x", "{1,x}", "{1,0:T}", "{1,0:E(}", "{1,0:Q(3)}", "{:é}"] {
        assert_eq!(layout(bad), None, "{bad}");
    }
}

#[test]
fn an_array_from_a_host_buffer() {
    let got = incoming(Wire::MakeArrayFromHostBufferRequest(make_array()));
    assert_eq!((got.op, got.user_context), (OpId(7), 9));
    let Decoded::Core(Request::MakeArray { array, spec, source }) = got.request else { panic!("{got:?}") };
    assert_eq!((array, source.buffer, &source.dims[..]), (Handle(21), Handle(21), &[8, 4][..]));
    assert_eq!(spec.sharding.devices.len(), 8);
    assert_eq!(spec.sharding.partition, Partition::Tiled(Tiling { tiles: vec![8, 1], replicas: 1, assignment: (0..8).collect() }));

    let (status, results, consumes) = refusal(Wire::MakeArrayFromHostBufferRequest(pb::MakeArrayFromHostBufferRequest {
        dtype: Some(pb::DTypeProto { version_number: 0, kind: 77 }),
        ..make_array()
    }));
    assert_eq!((status.code, results, consumes), (Code::Unimplemented, vec![21], vec![21]));
    // The server's own handles are not for clients, so nothing can be poisoned under one.
    let (_, results, _) = refusal(Wire::MakeArrayFromHostBufferRequest(pb::MakeArrayFromHostBufferRequest {
        array_handle: Some(FIRST_SERVER_HANDLE),
        ..make_array()
    }));
    assert!(results.is_empty());
}

#[test]
fn an_array_from_several_host_buffers() {
    use pb::make_arrays_from_host_buffer_shards_request::{HostBuffer, MakeArraysFromHostBufferShardsSpec as Spec, ShardIndices};
    let request = |indices: [&[i64]; 2]| {
        let buffer = |handle| HostBuffer { dtype: f32(), shape: shape(&[4]), host_buffer_handle: handle, byte_strides: None };
        let sharding = Some(hlo(4, &pb::OpSharding { iota_reshape_dims: vec![4], replicate_on_last_tile_dim: true, ..tiled(&[2, 2]) }));
        Wire::MakeArraysFromHostBufferShardsRequest(pb::MakeArraysFromHostBufferShardsRequest {
            specs: vec![Spec {
                addressable_shard_indices: indices.iter().map(|indices| ShardIndices { indices: indices.to_vec() }).collect(),
                host_buffers: vec![buffer(30), buffer(31)],
                array_spec: Some(pb::ArraySpecProto { dtype: f32(), shape: shape(&[8]), sharding, ..Default::default() }),
            }],
            array_handles: vec![30],
        })
    };
    let Request::MakeArraysFromShards { arrays } = core(request([&[0, 1], &[2, 3]])) else { panic!("it was refused") };
    assert_eq!(arrays[0].shards[1].positions, [2, 3]);
    for bad in [[&[0i64, 1][..], &[2]], [&[0, 1], &[2, 4]], [&[0, 1], &[1, 2, 3]], [&[0, 1], &[-1, 3]]] {
        let (status, results, consumes) = refusal(request(bad));
        assert_eq!((status.code, results, consumes), (Code::InvalidArgument, vec![30], vec![30, 31]));
    }
}

#[test]
fn an_execute_and_its_refusal() {
    let Request::Execute(request) = core(Wire::LoadedExecutableExecuteRequest(execute())) else { panic!("it was refused") };
    assert_eq!((request.launch_id, &request.results[..], request.status), (-5, &[Handle(3), Handle(4)][..], Handle(5)));
    assert_eq!(request.non_donatable, [1]);
    let bad = [
        pb::LoadedExecutableExecuteRequest { device_ids: vec![1], ..execute() },
        pb::LoadedExecutableExecuteRequest { result_array_handle: vec![4, 4], ..execute() },
        pb::LoadedExecutableExecuteRequest { result_array_handle: vec![4, 0], ..execute() },
    ];
    for request in bad {
        let results: Vec<u64> = request.result_array_handle.iter().copied().filter(|&handle| handle != 0).collect();
        assert_eq!(refusal(Wire::LoadedExecutableExecuteRequest(request)).1, results);
    }
    let unordered = pb::LoadedExecutableExecuteRequest { result_array_handle: vec![9, 4], ..execute() };
    assert!(matches!(core(Wire::LoadedExecutableExecuteRequest(unordered)), Request::Execute(_)));
}

#[test]
fn compile_options_are_read_and_kept() {
    let request = core(Wire::CompileRequest(compile("xla::ifrt::XlaProgram", 1, &[&[3], &[1]])));
    let Request::Compile(request) = request else { panic!("{request:?}") };
    assert_eq!(request.devices, [VirtualDeviceId(3), VirtualDeviceId(1)]);
    assert_eq!((request.replicas, request.partitions, &request.program[..]), (1, 2, &b"ML"[..]));
    assert!(request.options.ends_with(b"kept"));
    // For each replica, for each partition.
    let options = compile("xla::ifrt::XlaProgram", 2, &[&[3, 0], &[1, 2]]).compile_options.expect("set above").data;
    let devices: Vec<u32> = compile_options(options).expect("they are right").devices.iter().map(|id| id.0).collect();
    assert_eq!(devices, [3, 1, 0, 2]);
}

#[test]
fn programs_that_are_not_served_are_named() {
    let message = |type_name, replicas, rows: &[&[i64]]| refusal(Wire::CompileRequest(compile(type_name, replicas, rows))).0;
    assert!(message("xla::ifrt::PluginProgram", 1, &[&[0]]).message.contains("Bad PluginProgram"));
    assert!(message("xla::ifrt::CustomCallProgram", 1, &[&[0]]).message.contains("CustomCallProgram"));
    assert_eq!(message("xla::ifrt::XlaProgram", 2, &[&[0, 1]]).code, Code::Unimplemented);
    assert_eq!(message("xla::ifrt::XlaProgram", 1, &[&[0], &[0]]).code, Code::InvalidArgument);
    assert_eq!(message("xla::ifrt::XlaProgram", 1, &[&[-1]]).code, Code::InvalidArgument);
    assert_eq!(message("xla::ifrt::XlaProgram", 2, &[&[1]]).code, Code::InvalidArgument);
}

#[test]
fn what_is_not_served_is_refused_by_name() {
    let cases = [
        (
            Wire::ReshardArraysRequest(pb::ReshardArraysRequest { array_handles: vec![1], result_handles: vec![2, 3] }),
            "ReshardArrays",
            vec![2, 3],
        ),
        (Wire::LoadedHostCallbackPollRequest(Default::default()), "LoadedHostCallbackPoll", vec![]),
        (Wire::LoadedExecutableMpmdMetadataRequest(Default::default()), "LoadedExecutableMpmdMetadata", vec![]),
    ];
    for (request, name, results) in cases {
        let (status, poisoned, _) = refusal(request);
        assert_eq!((status.code, poisoned), (Code::Unimplemented, results));
        assert!(status.message.starts_with(name), "{}", status.message);
    }
    let local = |request| incoming(request).request;
    let cost = pb::LoadedExecutableCostAnalysisRequest { loaded_executable_handle: 5 };
    let asked = Request::Describe { executable: Handle(5), question: Question::Cost };
    assert_eq!(local(Wire::LoadedExecutableCostAnalysisRequest(cost)), Decoded::Core(asked));
    assert_eq!(local(Wire::InitRequest(pb::InitRequest {})), Decoded::Local(Local::Init));
}

#[test]
fn arrays_with_an_error_and_bitcasts_are_read() {
    let spec = || pb::ArraySpecProto {
        dtype: Some(pb::DTypeProto { version_number: 0, kind: dtype_number(DType::F32) }),
        shape: Some(pb::ShapeProto { version_number: 0, dims: vec![8] }),
        sharding: Some(hlo(2, &pb::OpSharding::default())),
        ..Default::default()
    };
    let error = Some(pb::StatusProto { code: 15, message: "gone".to_owned(), ..Default::default() });
    let request = pb::MakeErrorArraysRequest { error, array_specs: vec![spec(), spec()], array_handles: vec![4, 5] };
    let status = Status::new(Code::DataLoss, "gone");
    assert_eq!(
        core(Wire::MakeErrorArraysRequest(request.clone())),
        Request::MakeErrorArrays { arrays: vec![Handle(4), Handle(5)], status }
    );
    let without = pb::MakeErrorArraysRequest { error: None, ..request };
    let (status, poisoned, _) = refusal(Wire::MakeErrorArraysRequest(without));
    assert_eq!((status.code, poisoned), (Code::InvalidArgument, vec![4, 5]));

    let request = pb::BitcastArraysRequest {
        array_handles: vec![1],
        array_specs: vec![spec()],
        copy_semantics: pb::ArrayCopySemantics::ReuseInput as i32,
        result_handles: vec![2],
    };
    match core(Wire::BitcastArraysRequest(request.clone())) {
        Request::BitcastArrays { arrays, results, specs, copy: CopySemantics::ReuseInput } => {
            assert_eq!((arrays, results, &specs[0].dims[..]), (vec![Handle(1)], vec![Handle(2)], &[8][..]));
        }
        other => panic!("{other:?}"),
    }
    let copied = pb::BitcastArraysRequest { copy_semantics: pb::ArrayCopySemantics::AlwaysCopy as i32, ..request };
    assert_eq!(refusal(Wire::BitcastArraysRequest(copied)).1, [2]);
}

#[test]
fn string_arrays_are_refused_and_their_bytes_dropped() {
    let request = pb::MakeArrayFromHostBufferRequest {
        dtype: Some(pb::DTypeProto { version_number: 0, kind: dtype_number(DType::String) }),
        shape: Some(pb::ShapeProto { version_number: 0, dims: vec![2] }),
        sharding: Some(hlo(1, &pb::OpSharding::default())),
        host_buffer_handle: 6,
        array_handle: Some(6),
        ..Default::default()
    };
    let (status, poisoned, dropped) = refusal(Wire::MakeArrayFromHostBufferRequest(request));
    assert_eq!((status.code, poisoned, dropped), (Code::Unimplemented, vec![6], vec![6]));
    assert!(status.message.contains("string arrays"), "{status:?}");
}

#[test]
fn unknown_numbers_and_damaged_requests_are_answered() {
    let metadata = pb::RequestMetadata { op_id: 5, user_context_id: 6 }.encode_to_vec();
    let message = |tail: &[u8]| {
        let mut data = vec![0x0a, metadata.len() as u8];
        data.extend_from_slice(&metadata);
        data.extend_from_slice(tail);
        decode_message(data.into())
    };
    // Field 77, empty.
    let got = message(&[0xea, 0x04, 0x00]).expect("it has a number");
    assert_eq!((got.op, got.user_context), (OpId(5), 6));
    let Decoded::Core(Request::Refused { status, .. }) = got.request else { panic!("{got:?}") };
    assert_eq!((status.code, status.message.contains("number 77")), (Code::Unimplemented, true));
    // An Execute that is cut off.
    let got = message(&[0x7a, 0x09, 0x01]).expect("it has a number");
    assert!(matches!(got.request, Decoded::Core(Request::Refused { status: Status { code: Code::InvalidArgument, .. }, .. })));
    assert_eq!(decode_message(Bytes::from_static(b"GET / HTTP/1.1")), Err(DecodeError));
}

fn report(partitions: u32) -> CompileReport {
    let value = ValueSpec {
        dtype: DType::F32,
        shard_dims: vec![1, 4],
        dims: vec![2, 4],
        layout: "{1,0}".to_owned(),
        memory_kind: "device".to_owned(),
        op_sharding: (partitions > 1).then(|| Bytes::from_static(b"\x08\x03")),
    };
    CompileReport {
        name: "jit_f".to_owned(),
        fingerprint: Bytes::from_static(b"abc"),
        replicas: 1,
        partitions,
        parameters: vec![value.clone()],
        outputs: vec![value.clone(), value],
        donated: Vec::new(),
        memory: CompiledMemory { arguments: 1, outputs: 2, aliased: 3, temporaries: 4, generated_code: 5 },
        layouts_error: None,
        collectives: 0,
        host_callbacks: false,
    }
}

#[test]
fn metadata_has_shardings_only_for_partitions() {
    use pb::ifrt_response::Response;
    use pb::loaded_executable_metadata_response::{DonatedInputIndicesOneof, OutputLayouts};
    let body = |report: CompileReport| match encode_reply(OpId(1), &Reply::ExecutableMetadata(report.into()), Meta::default()).response {
        Some(Response::LoadedExecutableMetadataResponse(body)) => body,
        other => panic!("{other:?}"),
    };
    let one = body(report(1));
    assert_eq!((one.parameter_shardings, one.output_shardings), (None, None));
    assert!(matches!(one.donated_input_indices_oneof, Some(DonatedInputIndicesOneof::DonatedInputIndices(_))));
    assert_eq!(one.output_memory_kinds.expect("set").memory_kind_lists[0].memory_kinds, ["device", "device"]);
    let two = body(report(2));
    assert_eq!(two.output_shardings.expect("set").shardings.len(), 2);
    assert!(matches!(two.output_layouts, Some(OutputLayouts::OutputLayoutsList(list)) if list.layouts.len() == 2));
    let tokens = body(CompileReport { layouts_error: Some(Status::unimplemented("tokens")), ..report(2) });
    assert!(matches!(tokens.output_layouts, Some(OutputLayouts::OutputLayoutsError(status)) if status.code == 12));
}

#[test]
fn shardings_of_outputs_read_back() {
    let devices = [VirtualDeviceId(2), VirtualDeviceId(0)];
    let op = pb::OpSharding { iota_reshape_dims: vec![2], ..tiled(&[2]) }.encode_to_vec();
    let proto = encode_sharding(&devices, Some(&op.into()), "device");
    let back = decode_sharding(Some(&proto), &[4]).expect("it is ours");
    assert_eq!((back.devices, back.memory_kind.as_deref()), (devices.to_vec(), Some("device")));
    let single = encode_sharding(&devices[..1], None, "");
    assert_eq!(single.serialized_sharding.as_ref().map(|s| &s.type_name[..]), Some("xla::ifrt::SingleDeviceSharding"));
    let back = decode_sharding(Some(&single), &[4]).expect("it is ours");
    assert_eq!((back.partition, back.memory_kind), (Partition::Replicated, None));
}

#[test]
fn the_init_response_lists_devices_and_memories() {
    let device = |id: u32, slot: u32, index: u32| SessionDevice {
        id: VirtualDeviceId(id),
        physical: PhysicalDeviceId { slot: HostSlot(slot), index },
        island: slot,
        platform_name: "cpu".to_owned(),
        device: WorkerDevice {
            kind: "cpu".to_owned(),
            debug_string: "CPU".to_owned(),
            memory_kinds: vec!["unpinned_host".to_owned(), "device".to_owned()],
            default_memory_kind: "device".to_owned(),
            memory_bytes: None,
        },
    };
    let view = SessionView {
        session: SessionId(99),
        platform_name: "cpu".to_owned(),
        platform_version: "1".to_owned(),
        devices: vec![device(0, 0, 0), device(1, 1, 0)],
    };
    let init = init::init_response(&view, Some("127.0.0.1:7"));
    assert_eq!((init.session_id, &init.primary_device_ids[..], &init.addressable_device_ids[..]), (99, &[0, 1][..], &[0, 1][..]));
    assert_eq!((init.all_devices[1].default_memory_id, &init.all_devices[1].memory_ids[..]), (Some(4), &[3, 4][..]));
    let kinds: Vec<(i32, i32)> = init.memories.iter().map(|memory| (memory.id, memory.kind_id)).collect();
    assert_eq!(kinds, [(0, 2), (1, 0), (3, 2), (4, 0)]);
    let attributes = attributes(init.all_devices[1].attributes.clone().expect("set"));
    assert!(attributes.contains(&("slice_index".to_owned(), Attribute::Int(1))));
}

#[test]
fn errors_have_no_body_and_failed_descriptions_have_one() {
    let error = encode_error(OpId(3), &Status::invalid("no"));
    assert!(error.response.is_none());
    assert_eq!(error.response_metadata.and_then(|meta| meta.status).map(|status| status.code), Some(3));
    for question in [Question::Cost, Question::Text] {
        let meta = Meta { seq_num: 4, released: vec![8] };
        let reply = Reply::Described { question, result: Err(Status::invalid("no")) };
        let response = encode_reply(OpId(3), &reply, meta);
        let metadata = response.response_metadata.expect("set");
        assert_eq!((metadata.seq_num, &metadata.destroyed_user_context_ids[..], response.response.is_some()), (4, &[8][..], true));
    }
}

/// xorshift64*: the same bytes in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn bytes(&mut self, max: usize) -> Vec<u8> {
        let length = self.below(max);
        (0..length).map(|_| self.next() as u8).collect()
    }
}

#[test]
fn nothing_panics_on_random_bytes() {
    let mut random = Random(0x5eed);
    for _ in 0..20_000 {
        let data = Bytes::from(random.bytes(80));
        let _ = decode_message(data.clone());
        let _ = compile_options(data.clone());
        for type_name in ["SingleDeviceSharding", "HloSharding", "ConcreteEvenSharding", "ConcreteSharding", "OpaqueSharding"] {
            let serialized = pb::Serialized { type_name: format!("xla::ifrt::{type_name}"), data: data.clone() };
            let _ = decode_sharding(Some(&pb::ShardingProto { serialized_sharding: Some(serialized) }), &[8, 4]);
        }
        if let Ok(op) = pb::OpSharding::decode(data.clone()) {
            let _ = partition(8, &op, &[8, 4]);
        }
        let _ = layout_from_text(&String::from_utf8_lossy(&data));
    }
}

#[test]
fn nothing_panics_on_damaged_requests() {
    let requests = [
        Wire::MakeArrayFromHostBufferRequest(make_array()),
        Wire::LoadedExecutableExecuteRequest(execute()),
        Wire::CompileRequest(compile("xla::ifrt::XlaProgram", 1, &[&[3], &[1]])),
    ];
    let whole: Vec<Vec<u8>> =
        requests.map(|request| pb::IfrtRequest { request_metadata: None, request: Some(request) }.encode_to_vec()).into();
    let mut random = Random(0xda4a);
    for round in 0..60_000 {
        let mut data = whole[round % whole.len()].clone();
        for _ in 0..1 + random.below(4) {
            let at = random.below(data.len());
            match random.below(3) {
                0 => data[at] = random.next() as u8,
                1 => data.truncate(at + 1),
                _ => data[at] ^= 1 << random.below(8),
            }
        }
        let _ = decode_message(data.into());
    }
}
