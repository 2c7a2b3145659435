//! Custom-call targets of our own. Programs of clients may not name them, except the test targets of a worker that was
//! started with them.

use pw_pjrt::sleep::{self, SleepUs};
use pw_pjrt::{PjrtError, Plugin};
use pw_types::Status;

const PREFIX: &str = "pw.";

/// The platform that host code is registered for.
const HOST: &str = "Host";

/// The `pw.*` targets that client programs may name.
pub(crate) fn allowed(test_targets: bool) -> &'static [&'static str] {
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

/// The plugin's words for an unknown target become ours where the target is one of ours.
pub(crate) fn explain(status: Status, test_targets: bool) -> Status {
    let named = status.message.split(|c: char| !(c.is_ascii_alphanumeric() || "._-".contains(c))).map(|word| word.trim_end_matches('.'));
    let target = named.into_iter().find(|w| w.len() > PREFIX.len() && w.starts_with(PREFIX) && !allowed(test_targets).contains(w));
    match target {
        Some(target) if status.message.contains("handler") => refused(target),
        _ => status,
    }
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
        assert!(check(&names(&["pw.collective"]), true).unwrap_err().message.contains("pw.collective"));
    }

    #[test]
    fn the_plugins_error_is_explained() {
        let plugin = Status::internal("No FFI handler registered for pw.sleep_us on a platform Host");
        assert!(explain(plugin, false).message.contains("--test-targets"));
        let other = Status::internal("No FFI handler registered for lapack_sgesdd_ffi on a platform Host");
        assert_eq!(explain(other.clone(), false), other);
    }
}
