//! Warp-level matrix instructions (PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions: mma, ldmatrix,
//! stmatrix, movmatrix", "wmma"). Fragments and arithmetic are in [`crate::hw::fragment`] and [`crate::hw::matmul`].

pub mod double;
pub mod mma;
pub mod moves;
pub mod product;
pub mod scaled;
pub mod sparse;
pub mod wmma;
