//! Custom-call targets. Programs of clients may not name those of our own, except the test targets of a worker that was
//! started with them; those of linear algebra are there where a LAPACK is.

use pw_pjrt::sleep::{self, SleepUs};
use pw_pjrt::{PjrtError, Plugin};
use pw_types::Status;

use crate::host_callback;

const PREFIX: &str = "pw.";

/// The platform that host code is registered for.
const HOST: &str = "Host";

/// The `pw.*` targets that client programs may name.
fn allowed(test_targets: bool) -> &'static [&'static str] {
    if test_targets { &[host_callback::TARGET, sleep::TARGET] } else { &[host_callback::TARGET] }
}

/// Those of them that are for tests.
pub(crate) fn for_tests(test_targets: bool) -> &'static [&'static str] {
    if test_targets { &[sleep::TARGET] } else { &[] }
}

pub(crate) fn register(plugin: Plugin) -> Result<(), PjrtError> {
    plugin.register_ffi::<SleepUs>(sleep::TARGET, HOST)
}

/// Refuses a compiled program that names a target it may not.
pub(crate) fn check(targets: &[String], test_targets: bool) -> Result<(), Status> {
    match targets.iter().find(|t| t.starts_with(PREFIX) && !allowed(test_targets).contains(&t.as_str())) {
        Some(target) => Err(refused(target)),
        None => Ok(()),
    }
}

/// What distinguishes workers whose programs may name different targets: part of the key of what they compile.
pub(crate) fn names(test_targets: bool, lapack: bool) -> String {
    let mut names = allowed(test_targets).to_vec();
    names.extend(lapack.then_some("lapack"));
    names.join(" ")
}

/// The plugin's words for an unknown target become ours where the target is one of ours.
pub(crate) fn explain(status: Status, test_targets: bool) -> Status {
    if let Some(status) = without_lapack(&status) {
        return status;
    }
    let target = words(&status).find(|w| w.len() > PREFIX.len() && w.starts_with(PREFIX) && !allowed(test_targets).contains(w));
    match target {
        Some(target) if status.message.contains("handler") => refused(target),
        None if status.message.contains("handler") && words(&status).any(host_callback::is_target) => Status::unimplemented(
            "this program has host callbacks, which the worker's PJRT plugin cannot make: it takes no handlers for them",
        ),
        _ => status,
    }
}

/// What to say where the plugin misses a target that a LAPACK would provide.
pub(crate) fn without_lapack(status: &Status) -> Option<Status> {
    let target = words(status).find(|word| pw_linalg::needs_lapack(word)).filter(|_| status.message.contains("handler"))?;
    Some(Status::unimplemented(format!(
        "this program needs linear algebra (the custom-call target {target}), and the worker has no LAPACK for it; install scipy \
         beside the worker's PJRT plugin or the system's LAPACK (liblapack.so.3), or start the worker with --lapack PATH or \
         PATHWAYS_LAPACK and a LAPACK with 32-bit integers"
    )))
}

fn words(status: &Status) -> impl Iterator<Item = &str> {
    let separates = |c: char| !(c.is_ascii_alphanumeric() || "._-".contains(c));
    status.message.split(separates).map(|word| word.trim_end_matches('.'))
}

fn refused(target: &str) -> Status {
    let hint = if target == sleep::TARGET { "; it is for tests, on workers started with --test-targets" } else { "" };
    Status::invalid(format!("programs may not call the custom-call target {target}{hint}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pw_types::Code;

    #[test]
    fn own_targets_are_refused_by_name() {
        let names = |list: &[&str]| list.iter().map(|&s| s.to_owned()).collect::<Vec<_>>();
        assert!(check(&names(&["lapack_sgesdd_ffi", "pwx"]), false).is_ok());
        assert!(check(&names(&["pw.sleep_us"]), true).is_ok());
        let status = check(&names(&["pw.sleep_us"]), false).unwrap_err();
        assert_eq!(status.code, Code::InvalidArgument);
        assert!(status.message.contains("pw.sleep_us") && status.message.contains("--test-targets"));
        assert!(check(&names(&["pw.host_callback"]), false).is_ok());
        assert!(check(&names(&["pw.collective"]), true).unwrap_err().message.contains("pw.collective"));
    }

    #[test]
    fn the_plugins_error_is_explained() {
        let plugin = Status::internal("No FFI handler registered for pw.sleep_us on a platform Host");
        assert!(explain(plugin, false).message.contains("--test-targets"));
        let plugin = Status::internal("No FFI handler registered for pw.host_callback on a platform CUDA");
        assert_eq!(explain(plugin, true).code, Code::Unimplemented);
        let other = Status::internal("No FFI handler registered for somebody_elses on a platform Host");
        assert_eq!(explain(other.clone(), false), other);
    }

    #[test]
    fn a_missing_lapack_is_explained() {
        let plugin = Status::internal("No FFI handler registered for lapack_sgesdd_ffi on a platform Host");
        let status = explain(plugin, false);
        assert_eq!(status.code, Code::Unimplemented);
        assert!(status.message.contains("lapack_sgesdd_ffi") && status.message.contains("--lapack"), "{status}");
        assert_eq!(without_lapack(&Status::internal("lapack_sgesdd_ffi is slow")), None);
        assert_ne!(names(false, true), names(false, false));
    }
}
