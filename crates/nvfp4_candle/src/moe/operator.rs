//! The operator of all devices: its name, and its experts.

use crate::checkpoint::Projection;

/// Name of the operator in candle's errors.
pub const NAME: &str = "nvfp4-moe";

/// An expert's projections. `gate` is `None` if the activation has no gate.
pub struct Expert {
    pub gate: Option<Projection>,
    pub up: Projection,
    pub down: Projection,
}
