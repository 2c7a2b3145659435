//! Round trips of every variant; decoding of damaged and random bytes.
