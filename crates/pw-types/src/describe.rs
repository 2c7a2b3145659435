//! What can be asked of a compiled program beyond its report.

/// A question about a compiled program. Only some clients ask, and the answer can be long, so it is fetched when it is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Question {
    /// The text of the optimized program.
    Text,
    /// What a run costs.
    Cost,
}

/// The answer to a [`Question`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Description {
    Text(String),
    Cost(Vec<Cost>),
}

/// One figure of a cost analysis, such as `flops`.
#[derive(Clone, Debug)]
pub struct Cost {
    pub name: String,
    pub value: f64,
}

/// Bit by bit, so that figures can stand in messages that are compared.
impl PartialEq for Cost {
    fn eq(&self, other: &Cost) -> bool {
        self.name == other.name && self.value.to_bits() == other.value.to_bits()
    }
}

impl Eq for Cost {}
