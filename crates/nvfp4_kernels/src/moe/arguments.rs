//! Arguments of a call of a layer.

use crate::group::Address;
use nvfp4_core::Error;
use nvfp4_core::moe::MoeSizes;

/// Operands of a call of a layer: addresses in the device's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MoeArguments {
    /// Number of tokens T; may be 0.
    pub token_count: usize,
    /// Address of the tokens X, a multiple of 16: T rows of H numbers in the layer's token type.
    pub tokens: Address,
    /// Bytes from one token to the next, a multiple of 16.
    pub token_pitch: usize,
    /// Address of the experts of each token, `[T, k]`, i32. A negative or nonexistent expert contributes nothing.
    pub topk_ids: Address,
    /// Address of the weights of these experts, `[T, k]`, f32.
    pub topk_weights: Address,
    /// Whether the weights multiply the tokens and not the experts' results; requires k = 1. The shared expert's tokens are
    /// not multiplied.
    pub weights_on_input: bool,
    /// Address of the shared expert's weight of each token, `[T]`, f32. 0: all weights are 1.
    pub shared_weights: Address,
    /// Address of the output, a multiple of 16: T rows of H numbers in the layer's token type.
    pub output: Address,
    /// Bytes from one row of the output to the next, a multiple of 16.
    pub output_pitch: usize,
}

impl MoeArguments {
    /// Checks alignment, pitches and the place of the weights.
    pub(super) fn check(&self, sizes: &MoeSizes) -> Result<(), Error> {
        if self.weights_on_input && sizes.top_k > 1 {
            return Err(Error::Invalid(
                "weights on the input need a layer with one expert per token; multiply the results instead".into(),
            ));
        }
        let row_bytes = size_of::<u16>() * sizes.hidden;
        for (what, address, pitch) in
            [("tokens", self.tokens, self.token_pitch), ("output", self.output, self.output_pitch)]
        {
            if !address.is_multiple_of(16) || !pitch.is_multiple_of(16) || pitch < row_bytes {
                return Err(Error::Invalid(format!(
                    "{what} at {address:#x}, {pitch} bytes apart: both must be multiples of 16, and a row has {row_bytes} bytes"
                )));
            }
        }
        Ok(())
    }

    /// Returns the arguments of `token_count` tokens from `first` on.
    pub(super) fn part(&self, sizes: &MoeSizes, first: usize, token_count: usize) -> Self {
        let (first, choices) = (first as u64, (first * sizes.top_k) as u64);
        Self {
            token_count,
            tokens: self.tokens + first * self.token_pitch as u64,
            topk_ids: self.topk_ids + 4 * choices,
            topk_weights: self.topk_weights + 4 * choices,
            shared_weights: if self.shared_weights == 0 { 0 } else { self.shared_weights + 4 * first },
            output: self.output + first * self.output_pitch as u64,
            ..*self
        }
    }
}
