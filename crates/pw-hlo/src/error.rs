//! Why a module is refused.

use thiserror::Error;

/// Why a module cannot be rewritten, or a collective not be read or performed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum HloError {
    /// The bytes are no such message, or contradict themselves.
    #[error("malformed HLO module: {0}")]
    Malformed(String),
    /// An instruction that is not understood.
    #[error("{op} {name:?} is not supported: {why}")]
    Unsupported {
        /// Name of the instruction.
        name: String,
        /// Its opcode.
        op: String,
        /// What about it.
        why: String,
    },
    /// A text that describes no collective.
    #[error("malformed collective {text:?}: {why}")]
    Text {
        /// The text.
        text: String,
        /// What is wrong with it.
        why: String,
    },
    /// Operands or results that do not fit a collective.
    #[error("operands or results do not fit the collective: {0}")]
    Mismatch(String),
}

impl HloError {
    pub(crate) fn malformed(what: impl Into<String>) -> Self {
        HloError::Malformed(what.into())
    }
}

pub(crate) type Result<T> = std::result::Result<T, HloError>;
