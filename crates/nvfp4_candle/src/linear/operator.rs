//! The operator of all devices: its name, and its output's shape.

use candle_core::Shape;
use nvfp4::linear::LinearSizes;

/// Name of the operator in candle's errors.
pub const NAME: &str = "nvfp4-linear";

/// Returns the output's shape for the shape of the tokens.
pub fn output_shape(tokens: &Shape, sizes: &LinearSizes) -> Shape {
    let mut dims = tokens.dims().to_vec();
    dims.pop();
    dims.push(sizes.n);
    dims.into()
}
