//! Element types and their numbers in this protocol.

use pw_types::{DType, Status};

use super::pb;
use pb::d_type_proto::Kind;

const TABLE: [(Kind, DType); 33] = [
    (Kind::Pred, DType::Pred),
    (Kind::S2, DType::S2),
    (Kind::S4, DType::S4),
    (Kind::S8, DType::S8),
    (Kind::S16, DType::S16),
    (Kind::S32, DType::S32),
    (Kind::S64, DType::S64),
    (Kind::U2, DType::U2),
    (Kind::U4, DType::U4),
    (Kind::U8, DType::U8),
    (Kind::U16, DType::U16),
    (Kind::U32, DType::U32),
    (Kind::U64, DType::U64),
    (Kind::F4e2m1fn, DType::F4E2M1FN),
    (Kind::F6e2m3fn, DType::F6E2M3FN),
    (Kind::F6e3m2fn, DType::F6E3M2FN),
    (Kind::F8e3m4, DType::F8E3M4),
    (Kind::F8e4m3, DType::F8E4M3),
    (Kind::F8e4m3fn, DType::F8E4M3FN),
    (Kind::F8e4m3b11fnuz, DType::F8E4M3B11FNUZ),
    (Kind::F8e4m3fnuz, DType::F8E4M3FNUZ),
    (Kind::F8e5m2, DType::F8E5M2),
    (Kind::F8e5m2fnuz, DType::F8E5M2FNUZ),
    (Kind::F8e8m0fnu, DType::F8E8M0FNU),
    (Kind::Bf16, DType::BF16),
    (Kind::F16, DType::F16),
    (Kind::F32, DType::F32),
    (Kind::F64, DType::F64),
    (Kind::C64, DType::C64),
    (Kind::C128, DType::C128),
    (Kind::Token, DType::Token),
    (Kind::String, DType::String),
    (Kind::Opaque, DType::Opaque),
];

/// The element type with this number, if there is one that we know.
pub fn dtype_from_number(number: i32) -> Option<DType> {
    TABLE.iter().find(|(kind, _)| *kind as i32 == number).map(|&(_, dtype)| dtype)
}

/// The number of an element type.
pub fn dtype_number(dtype: DType) -> i32 {
    TABLE.iter().find(|&&(_, candidate)| candidate == dtype).map_or(0, |&(kind, _)| kind as i32)
}

pub(super) fn decode(proto: Option<&pb::DTypeProto>) -> Result<DType, Status> {
    let number = proto.map_or(0, |proto| proto.kind);
    dtype_from_number(number).ok_or_else(|| Status::unimplemented(format!("element type number {number} is not known to this server")))
}

pub(super) fn encode(dtype: DType) -> pb::DTypeProto {
    pb::DTypeProto { version_number: 0, kind: dtype_number(dtype) }
}
