//! Element types and their size on the host.

/// Element type of an array. Names follow XLA's primitive types.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum DType {
    Pred,
    S2,
    S4,
    S8,
    S16,
    S32,
    S64,
    U2,
    U4,
    U8,
    U16,
    U32,
    U64,
    F4E2M1FN,
    F6E2M3FN,
    F6E3M2FN,
    F8E3M4,
    F8E4M3,
    F8E4M3FN,
    F8E4M3B11FNUZ,
    F8E4M3FNUZ,
    F8E5M2,
    F8E5M2FNUZ,
    F8E8M0FNU,
    BF16,
    F16,
    F32,
    F64,
    C64,
    C128,
    /// An effect token: no data.
    Token,
    /// Variable length text; only on CPU-kind devices.
    String,
    Opaque,
}

impl DType {
    /// Bytes of one element in a dense host buffer. Types below 8 bits take one byte each on the wire
    /// (protocol fact: host buffers of int4 and friends are unpacked); tokens and strings have no fixed size: 0.
    pub fn host_bytes(self) -> u64 {
        use DType::*;
        match self {
            Pred | S2 | S4 | S8 | U2 | U4 | U8 | F4E2M1FN | F6E2M3FN | F6E3M2FN | F8E3M4 | F8E4M3 | F8E4M3FN | F8E4M3B11FNUZ
            | F8E4M3FNUZ | F8E5M2 | F8E5M2FNUZ | F8E8M0FNU => 1,
            S16 | U16 | BF16 | F16 => 2,
            S32 | U32 | F32 => 4,
            S64 | U64 | F64 | C64 => 8,
            C128 => 16,
            Token | String | Opaque => 0,
        }
    }

    /// Lower-case name as JAX prints it in shapes, for messages.
    pub fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }
}

/// Number of elements of `dims`; `None` on a negative dimension or overflow.
pub fn element_count(dims: &[i64]) -> Option<u64> {
    dims.iter().try_fold(1u64, |n, &d| n.checked_mul(u64::try_from(d).ok()?))
}

/// Bytes of a dense host buffer; `None` on a negative dimension or overflow.
pub fn host_bytes(dtype: DType, dims: &[i64]) -> Option<u64> {
    element_count(dims)?.checked_mul(dtype.host_bytes())
}

/// `f32[8,16]`, for messages.
pub fn describe(dtype: DType, dims: &[i64]) -> String {
    let dims: Vec<String> = dims.iter().map(i64::to_string).collect();
    format!("{}[{}]", dtype.name(), dims.join(","))
}
