//! Integration tests: what they share.

pub mod files;
