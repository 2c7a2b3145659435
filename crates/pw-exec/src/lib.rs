//! The worker's core: device queues, buffer table, transfer progress. Pure.
