//! The shell around the worker's core: plugin, compile child, device threads, data-plane endpoint.
