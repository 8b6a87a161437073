//! Kernels on Hopper's tensor cores, where a warpgroup multiplies by `wgmma`; and kernels that are built from their
//! source.

pub mod gated_sm90;
pub mod linear_sm90;
pub mod moe_fp8_sm90;
pub mod moe_sm120;
pub mod moe_sm90;

// Common parts of these kernels.
#[cfg(feature = "decoding")]
mod multiply;
#[cfg(feature = "decoding")]
mod registers;
#[cfg(feature = "decoding")]
mod slabs;
#[cfg(feature = "decoding")]
mod tiles;
#[cfg(feature = "decoding")]
mod turns;

#[cfg(feature = "decoding")]
pub use self::{
    multiply::{Consumer, Kind},
    registers::{give_registers, take_registers},
    slabs::Piece,
    tiles::Tiles,
    turns::PingPong,
};
