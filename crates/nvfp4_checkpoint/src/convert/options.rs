//! Settings of a conversion.

use super::calibration::Calibration;
use crate::Format;
use nvfp4_core::quantize::Scales;

/// Settings of a conversion.
#[derive(Clone, Copy)]
pub struct Options<'o> {
    /// Naming of the parts of a weight, and meaning of its global scale.
    pub format: Format,
    /// Returns `true` if the weight with this name (`M.weight`) is included.
    pub include: &'o dyn Fn(&str) -> bool,
    /// Returns the reason why an included module or tensor is left unquantized; `None`: it is quantized.
    pub exclude: &'o dyn Fn(&str) -> Option<String>,
    /// `true`: each weight gets its own global scale, even where engines merge projections under one scale, and merged
    /// projections may be quantized separately.
    pub separate_scales: bool,
    /// Largest magnitudes of activations, for input scales. `None`: no input scales are written.
    pub calibration: Option<&'o Calibration>,
    /// Rule by which the scales of blocks are chosen. MXFP4 keeps its numbers with any rule.
    pub scales: Scales,
    /// `true`: an MXFP4 weight with a block that cannot keep its numbers is an error. `false`: the block is rounded.
    pub exact: bool,
}

impl<'o> Options<'o> {
    /// Quantizes the weights that `include` accepts, without input scales.
    pub fn new(format: Format, include: &'o dyn Fn(&str) -> bool) -> Self {
        Self {
            format,
            include,
            exclude: &|_| None,
            separate_scales: false,
            calibration: None,
            scales: Scales::Max,
            exact: false,
        }
    }
}
