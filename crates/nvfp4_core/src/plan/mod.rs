//! Planning: pure functions of a problem's sizes, independent of a GPU.

pub mod roofline;
pub mod tile;
