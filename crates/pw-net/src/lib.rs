//! Control streams and bulk data plane over TCP: framing, sequence numbers.
