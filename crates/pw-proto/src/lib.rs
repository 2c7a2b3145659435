//! Generated messages and the conversions between wire types and ours.
