//! One Execute with all members, and the plugin's own collectives: the form for plugins whose devices are queues of
//! their own, and for what has no other form.

use pw_pjrt::{Buffer, ExecuteOptions, LoadedExecutable, PjrtError};

/// One launch of all local members.
pub(crate) struct Call<'a> {
    /// By member, in execution order.
    pub(crate) arguments: &'a [Vec<&'a Buffer>],
    pub(crate) non_donatable: &'a [i64],
    pub(crate) launch_id: i32,
}

/// Runs a launch to its end on the calling thread: outputs by member, all ready.
pub(crate) fn launch(executable: &LoadedExecutable, call: &Call<'_>) -> Result<Vec<Vec<Buffer>>, PjrtError> {
    let options = ExecuteOptions { non_donatable: call.non_donatable, only_device: None, context: None, launch_id: call.launch_id };
    let execution = executable.execute(call.arguments, options)?;
    // All of them, so that nothing runs on when an error is reported.
    let mut result = Ok(());
    for done in &execution.done {
        result = result.and(done.wait());
    }
    result.map(|()| execution.outputs)
}
