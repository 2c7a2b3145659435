//! Shared vocabulary: ids, topology, dtypes, shapes, shardings, requests, commands, reports, faults.
