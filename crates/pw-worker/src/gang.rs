//! One Execute with all members, and the plugin's own collectives: the form for plugins whose devices are queues of
//! their own, and for what has no other form.

use std::sync::Arc;

use pw_pjrt::{Buffer, ExecuteContext, ExecuteOptions, LoadedExecutable, PjrtError};
use pw_types::SessionId;

use crate::host_callback::{Callbacks, Caller};

/// A program of this form, loaded. One launch after the other runs.
pub(crate) struct Gang {
    executable: LoadedExecutable,
    /// Where it has host callbacks.
    caller: Option<(Arc<Caller>, ExecuteContext)>,
}

/// One launch of all local members.
pub(crate) struct Call<'a> {
    /// By member, in execution order.
    pub(crate) arguments: &'a [Vec<&'a Buffer>],
    pub(crate) non_donatable: &'a [i64],
    pub(crate) launch_id: i32,
    pub(crate) session: SessionId,
}

impl Gang {
    /// `callbacks` for programs that have some.
    pub(crate) fn new(executable: LoadedExecutable, callbacks: Option<&Callbacks>) -> Result<Gang, PjrtError> {
        let caller = callbacks.map(|callbacks| {
            let caller = Caller::new(callbacks);
            let context = caller.context(executable.client().plugin())?;
            Ok((caller, context))
        });
        Ok(Gang { caller: caller.transpose()?, executable })
    }

    /// Runs a launch to its end on the calling thread: outputs by member, all ready.
    pub(crate) fn launch(&self, call: &Call<'_>) -> Result<Vec<Vec<Buffer>>, PjrtError> {
        let context = self.caller.as_ref().map(|(caller, context)| {
            caller.set(call.session);
            context
        });
        let options = ExecuteOptions { non_donatable: call.non_donatable, only_device: None, context, launch_id: call.launch_id };
        let execution = self.executable.execute(call.arguments, options)?;
        // All of them, so that nothing runs on when an error is reported.
        let mut result = Ok(());
        for done in &execution.done {
            result = result.and(done.wait());
        }
        result.map(|()| execution.outputs)
    }
}
