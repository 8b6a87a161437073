//! The NVFP4 format: 4-bit values, 8-bit block scales, and matrices of both. Independent of a GPU.
//!
//! An element is `e2m1 × e4m3 × global`: a 4-bit value, a scale shared by [`BLOCK`] consecutive elements of K, and one
//! f32 per tensor. Every `e2m1 × e4m3` is an integer multiple of 2⁻¹⁰ ([`FIXED_POINT_BITS`]), so exact dot products are
//! possible.

pub mod blocked;
mod bytes;
pub mod e2m1;
pub mod e4m3;
mod matrix;

pub use bytes::Bytes;
pub use matrix::Matrix;

/// Number of elements of K that share a scale.
pub const BLOCK: usize = 16;

/// Number of fractional bits that represent any `e2m1 × e4m3` exactly: one for the value's halves, nine for the scale's
/// 2⁻⁹.
pub const FIXED_POINT_BITS: u32 = e2m1::FRACTION_BITS + e4m3::FRACTION_BITS;
