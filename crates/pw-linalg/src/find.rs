//! Which LAPACK: what the user says, else the one beside the plugin, else the system's.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::lapack::Lapack;

/// Names that the system's loader may know. The versioned ones: they are what runs programs, not what builds them.
const SYSTEM: [&str; 2] = ["liblapack.so.3", "libopenblas.so.0"];

/// Which LAPACK a worker uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// The first that is found.
    #[default]
    Find,
    /// This one or none.
    Path(PathBuf),
    /// None.
    None,
}

impl FromStr for Choice {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text {
            "none" => Self::None,
            "" => Self::Find,
            path => Self::Path(path.into()),
        })
    }
}

/// What was found.
pub struct Found {
    /// The library.
    pub lapack: Lapack,
    /// Its path or name.
    pub library: PathBuf,
}

/// Looks for a LAPACK for a plugin. `Ok(None)` where none was asked for or none is there, `Err` where the one that the user
/// named is of no use.
pub fn find(choice: &Choice, plugin: &Path) -> Result<Option<Found>, String> {
    let candidates = match choice {
        Choice::None => return Ok(None),
        Choice::Path(library) => {
            let lapack = Lapack::open(library).map_err(|why| format!("cannot use {} as LAPACK: {why}", library.display()))?;
            return Ok(Some(Found { lapack, library: library.clone() }));
        }
        Choice::Find => beside(plugin).into_iter().chain(SYSTEM.map(PathBuf::from)),
    };
    let open = |library: PathBuf| Lapack::open(&library).ok().map(|lapack| Found { lapack, library });
    Ok(candidates.into_iter().find_map(open))
}

/// The OpenBLAS of a scipy wheel that is installed in the same environment as the plugin.
fn beside(plugin: &Path) -> Vec<PathBuf> {
    let real = plugin.canonicalize().ok();
    let packages = [Some(plugin), real.as_deref()].into_iter().flatten().filter_map(|p| p.parent()?.parent());
    let mut found = Vec::new();
    for folder in packages.map(|p| p.join("scipy.libs")) {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path());
        let named = |p: &PathBuf| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("libscipy_openblas"));
        let mut libraries: Vec<PathBuf> = entries.filter(named).collect();
        libraries.sort();
        found.extend(libraries);
    }
    found.dedup();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_read() {
        assert_eq!("none".parse(), Ok(Choice::None));
        assert_eq!("".parse(), Ok(Choice::Find));
        assert_eq!("/x/liblapack.so".parse(), Ok(Choice::Path("/x/liblapack.so".into())));
    }

    #[test]
    fn the_openblas_of_scipy_is_found_beside_the_plugin() {
        let root = std::env::temp_dir().join(format!("pw-linalg-{}", std::process::id()));
        for file in ["wheel/plugin.so", "scipy.libs/libscipy_openblas-1.so", "scipy.libs/libgfortran.so"] {
            std::fs::create_dir_all(root.join(file).parent().unwrap()).unwrap();
            std::fs::write(root.join(file), b"").unwrap();
        }
        let root = root.canonicalize().unwrap();
        assert_eq!(beside(&root.join("wheel/plugin.so")), [root.join("scipy.libs/libscipy_openblas-1.so")]);
        assert!(beside(Path::new("plugin.so")).is_empty());
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn what_is_no_lapack_is_refused_with_a_reason() {
        assert!(find(&Choice::None, Path::new("/")).unwrap().is_none());
        let refused = |path: &str| find(&Choice::Path(path.into()), Path::new("/")).map(|_| ()).unwrap_err();
        assert!(refused("/nowhere/liblapack.so").starts_with("cannot use /nowhere/liblapack.so as LAPACK: "));
        assert!(refused("libc.so.6").contains("it has no dgetrf_"), "{}", refused("libc.so.6"));
    }
}
