//! The shell around the controller's core: core thread, worker registry, status.
