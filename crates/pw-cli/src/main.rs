//! The one binary `pathways`.
fn main() {}
