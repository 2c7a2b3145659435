//! The client edge: the IFRT proxy gRPC service and the host-buffer store.
