//! The client protocol: IFRT proxy.
