//! Values of every kind, for tests.

/// How many variants an enum has.
pub(super) trait Variants {
    const COUNT: usize;
}

/// All values of an enum without fields.
pub(super) trait All: Sized + 'static {
    const ALL: &[Self];
}
