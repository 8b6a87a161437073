//! The NVFP4 format: 4-bit values, 8-bit block scales, and matrices of them. Knows no GPU.
//!
//! An element is `e2m1 × e4m3 × global`: a 4-bit value, a scale shared by [`BLOCK`] consecutive elements of K,
//! and one f32 for the tensor. Every `e2m1 × e4m3` is an integer multiple of 2⁻¹⁰ ([`FIXED_POINT_BITS`]), which is
//! what makes exact dot products possible.

pub mod blocked;
pub mod e2m1;
pub mod e4m3;
mod matrix;

pub use matrix::Matrix;

/// Elements of K that share one scale factor.
pub const BLOCK: usize = 16;

/// Fractional bits that hold any `e2m1 × e4m3` exactly: one for the value's halves, nine for the scale's 2⁻⁹.
pub const FIXED_POINT_BITS: u32 = e2m1::FRACTION_BITS + e4m3::FRACTION_BITS;
