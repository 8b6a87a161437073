//! The products of an MoE layer on Hopper: tokens of 16 bits, experts' rows known on the device alone.

pub mod abi;
