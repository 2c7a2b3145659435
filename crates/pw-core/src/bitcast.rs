//! Bitcasts: the same shards under another spec. A shard stays the typed buffer that it is, so its type and its dimensions must be those of the
//! new spec; what changes is how the shards make up the array.

use std::sync::Arc;

use pw_types::dtype::describe;
use pw_types::{ArraySpec, CopySemantics, Handle, Reply, Status};

use crate::directory::Array;
use crate::session::Pending;
use crate::{Core, Effects};

impl Core {
    pub(crate) fn bitcast_arrays(
        &mut self,
        at: Pending,
        inputs: &[Handle],
        results: Vec<Handle>,
        specs: &[ArraySpec],
        copy: CopySemantics,
        fx: &mut Effects,
    ) {
        let made: Result<Vec<Array>, Arc<Status>> = inputs.iter().zip(specs).map(|(&input, spec)| self.bitcast(at, input, spec)).collect();
        self.put_derived(at, inputs, made, results, copy, Reply::BitcastArrays, fx);
    }

    fn bitcast(&self, at: Pending, handle: Handle, spec: &ArraySpec) -> Result<Array, Arc<Status>> {
        let array = self.resolve(at, handle)?;
        if array.devices[..] != spec.sharding.devices[..] {
            let text = format!("a bitcast of array {handle} names other devices than those that it lies on; copy it to them first");
            return Err(Arc::new(Status::invalid(text)));
        }
        for piece in &array.pieces {
            let held = &self.directory.get(piece.backing).shard_dims;
            let wanted = pw_plan::shard_dims(spec).map_err(|e| Arc::new(Status::invalid(e.to_string())))?;
            if array.dtype != spec.dtype || held[..] != wanted[..] {
                return Err(Arc::new(Status::unimplemented(format!(
                    "a bitcast of array {handle} from shards of {} to shards of {} is not served by pathways-rs, whose shards keep their type \
                     and dimensions; use jax.lax.bitcast_convert_type and reshape in a jit function",
                    describe(array.dtype, held),
                    describe(spec.dtype, &wanted),
                ))));
            }
        }
        Ok(Array {
            dtype: spec.dtype,
            dims: Arc::from(spec.dims.as_slice()),
            partition: Arc::new(spec.sharding.partition.clone()),
            memory_kind: array.memory_kind.clone(),
            devices: array.devices.clone(),
            pieces: array.pieces.clone(),
        })
    }
}
