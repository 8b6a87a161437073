//! Planning: pure functions of a problem's sizes, the same with and without a GPU.

pub mod roofline;
pub mod tile;
