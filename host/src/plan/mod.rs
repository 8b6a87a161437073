//! Planning: pure functions of a problem's sizes, the same with and without a GPU. Also the words that name a way to
//! compute.

pub mod roofline;
pub mod tile;
#[cfg(feature = "kernels")]
pub mod variant;
