//! accept
use std::path::Path;
pub(crate) const HELP: &str = "";
pub(crate) fn task(_root: &Path, _args: &[String]) -> Result<(), String> {
    Ok(())
}
