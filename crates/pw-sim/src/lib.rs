//! Simulator: the real cores and encodings over a fake clock, links and devices, with checkers.
