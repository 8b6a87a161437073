//! What a conversion reports about each tensor that it has written.

use super::mxfp4::Exact;
use super::stored::{Stored, Weight};
use crate::names::natural;
use nvfp4_core::quantize::Loss;

/// A tensor of the output that is not a copy.
#[derive(Clone, Copy, Debug)]
pub struct Converted<'c> {
    /// Module of the weight.
    pub module: &'c str,
    /// Input tensor that holds the weight.
    pub tensor: &'c str,
    /// N and K.
    pub sizes: [usize; 2],
    /// `true`: the weight becomes NVFP4. `false`: floats.
    pub quantized: bool,
}

/// A tensor that was written.
#[derive(Debug)]
pub enum Written<'a> {
    /// A tensor copied unchanged.
    Copied {
        /// Name of the tensor.
        name: &'a str,
        /// Number of bytes.
        bytes: usize,
    },
    /// A tensor that is part of the old form of a converted weight, and is not in the output.
    Dropped {
        /// Name of the tensor.
        name: &'a str,
        /// Number of bytes.
        bytes: usize,
    },
    /// A converted weight.
    Converted {
        /// The weight.
        weight: Converted<'a>,
        /// Number of bytes read.
        bytes: usize,
        /// Quantization loss; `None` if the numbers were not rounded to NVFP4.
        loss: Option<Loss>,
        /// Blocks that kept their numbers; `None` unless MXFP4 became NVFP4.
        exact: Option<Exact>,
    },
}

/// Returns the entries of all weights, in natural order. A weight whose tensor is paired with `true` becomes NVFP4.
pub(super) fn all_converted<'c>(tensors: impl Iterator<Item = (&'c Stored<'c>, bool)>) -> Vec<Converted<'c>> {
    let weights = tensors
        .flat_map(|(stored, quantized)| stored.weights.iter().map(move |weight| converted(stored, weight, quantized)));
    let mut weights: Vec<_> = weights.collect();
    weights.sort_by_cached_key(|weight| natural(weight.module));
    weights
}

/// Returns the entry of a weight.
pub(super) fn converted<'c>(stored: &'c Stored<'_>, weight: &'c Weight<'_>, quantized: bool) -> Converted<'c> {
    Converted { module: &weight.module, tensor: stored.name, sizes: weight.source.sizes(), quantized }
}
