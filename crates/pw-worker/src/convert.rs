//! Between the words of the PJRT layer and ours.

use bytes::Bytes;
use pw_pjrt::{ArrayMeta, BufferType, ExecMeta, PjrtError};
use pw_types::{Cause, Code, CompileReport, CompiledMemory, DType, Status, ValueSpec};

use crate::host_callback;

pub(crate) fn status(error: PjrtError) -> Status {
    let code = Code::from_number(error.code);
    let cause = if code == Code::ResourceExhausted { Cause::OutOfMemory } else { Cause::Unspecified };
    Status { code, message: error.message, cause }
}

/// For those who wait for a member that has failed.
pub(crate) fn error(status: &Status) -> PjrtError {
    PjrtError::new(status.code as i32, status.message.clone())
}

/// The plugin's type; STRING, OPAQUE and the 6-bit floats have none.
pub(crate) fn buffer_type(dtype: DType) -> Result<BufferType, Status> {
    Ok(match dtype {
        DType::Pred => BufferType::Pred,
        DType::S2 => BufferType::S2,
        DType::S4 => BufferType::S4,
        DType::S8 => BufferType::S8,
        DType::S16 => BufferType::S16,
        DType::S32 => BufferType::S32,
        DType::S64 => BufferType::S64,
        DType::U2 => BufferType::U2,
        DType::U4 => BufferType::U4,
        DType::U8 => BufferType::U8,
        DType::U16 => BufferType::U16,
        DType::U32 => BufferType::U32,
        DType::U64 => BufferType::U64,
        DType::F4E2M1FN => BufferType::F4E2M1Fn,
        DType::F8E3M4 => BufferType::F8E3M4,
        DType::F8E4M3 => BufferType::F8E4M3,
        DType::F8E4M3FN => BufferType::F8E4M3Fn,
        DType::F8E4M3B11FNUZ => BufferType::F8E4M3B11Fnuz,
        DType::F8E4M3FNUZ => BufferType::F8E4M3Fnuz,
        DType::F8E5M2 => BufferType::F8E5M2,
        DType::F8E5M2FNUZ => BufferType::F8E5M2Fnuz,
        DType::F8E8M0FNU => BufferType::F8E8M0Fnu,
        DType::BF16 => BufferType::Bf16,
        DType::F16 => BufferType::F16,
        DType::F32 => BufferType::F32,
        DType::F64 => BufferType::F64,
        DType::C64 => BufferType::C64,
        DType::C128 => BufferType::C128,
        DType::Token => BufferType::Token,
        DType::F6E2M3FN | DType::F6E3M2FN | DType::String | DType::Opaque => {
            return Err(Status::unimplemented(format!("arrays of type {} are not served by the plugin", dtype.name())));
        }
    })
}

pub(crate) fn dtype(buffer_type: BufferType) -> DType {
    match buffer_type {
        BufferType::Pred => DType::Pred,
        BufferType::S2 => DType::S2,
        BufferType::S4 => DType::S4,
        BufferType::S8 => DType::S8,
        BufferType::S16 => DType::S16,
        BufferType::S32 => DType::S32,
        BufferType::S64 => DType::S64,
        BufferType::U2 => DType::U2,
        BufferType::U4 => DType::U4,
        BufferType::U8 => DType::U8,
        BufferType::U16 => DType::U16,
        BufferType::U32 => DType::U32,
        BufferType::U64 => DType::U64,
        BufferType::F4E2M1Fn => DType::F4E2M1FN,
        BufferType::F8E3M4 => DType::F8E3M4,
        BufferType::F8E4M3 => DType::F8E4M3,
        BufferType::F8E4M3Fn => DType::F8E4M3FN,
        BufferType::F8E4M3B11Fnuz => DType::F8E4M3B11FNUZ,
        BufferType::F8E4M3Fnuz => DType::F8E4M3FNUZ,
        BufferType::F8E5M2 => DType::F8E5M2,
        BufferType::F8E5M2Fnuz => DType::F8E5M2FNUZ,
        BufferType::F8E8M0Fnu => DType::F8E8M0FNU,
        BufferType::Bf16 => DType::BF16,
        BufferType::F16 => DType::F16,
        BufferType::F32 => DType::F32,
        BufferType::F64 => DType::F64,
        BufferType::C64 => DType::C64,
        BufferType::C128 => DType::C128,
        BufferType::Token => DType::Token,
    }
}

/// The report of a compiled program, without its fingerprint.
pub(crate) fn report(meta: ExecMeta) -> CompileReport {
    let bytes = |n: i64| u64::try_from(n).unwrap_or(0);
    let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let untold = meta.params.iter().chain(&meta.outputs).any(|a| a.layout.is_none());
    let layouts_error = untold.then(|| Status::unimplemented("the plugin does not tell the layouts of this program"));
    let memory = meta.memory;
    CompileReport {
        fingerprint: Bytes::new(),
        replicas: number(meta.num_replicas),
        partitions: number(meta.num_partitions),
        parameters: meta.params.into_iter().map(value_spec).collect(),
        outputs: meta.outputs.into_iter().map(value_spec).collect(),
        donated: meta.donated,
        memory: CompiledMemory {
            arguments: bytes(memory.argument),
            outputs: bytes(memory.output),
            aliased: bytes(memory.alias),
            temporaries: bytes(memory.temp),
            generated_code: bytes(memory.generated_code).max(bytes(meta.code_size)),
        },
        layouts_error,
        collectives: meta.collectives.iter().map(|(_, count)| count).sum(),
        host_callbacks: meta.custom_call_targets.iter().any(|target| host_callback::is_target(target)),
        name: meta.name,
    }
}

fn value_spec(array: ArrayMeta) -> ValueSpec {
    ValueSpec {
        dtype: dtype(array.element_type),
        shard_dims: array.shard_dims,
        dims: array.global_dims,
        layout: array.layout.unwrap_or_default(),
        memory_kind: array.memory_kind,
        op_sharding: array.sharding.map(Bytes::from),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_go_there_and_back() {
        let mut served = 0;
        for code in 0..64 {
            let Some(t) = BufferType::from_pjrt(code) else { continue };
            assert_eq!(buffer_type(dtype(t)).unwrap(), t);
            served += 1;
        }
        assert_eq!(served, 29);
        assert!(buffer_type(DType::String).is_err());
    }
}
