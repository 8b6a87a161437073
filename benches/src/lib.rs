//! Benchmarks: what they share.
