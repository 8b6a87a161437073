//! Integration tests: what they share.
