//! Input of a launch that quantizes the operand of a product, in the parts that FP8 and NVFP4 share.

use super::chain::Chain;
use super::experts::Experts;
use super::projection::Projection;
use crate::group::Address;

/// Rows of 16-bit numbers: the tokens, which go to the rows of their experts, or the intermediate, row by row.
pub(super) struct Input {
    pub address: Address,
    /// Bytes from one row to the next.
    pub pitch: u64,
    /// Address of the weights that multiply the tokens. 0: none.
    pub weights: Address,
    /// Address of the rows of each token. 0: each token is a row.
    pub places: Address,
    /// Number of rows per token.
    pub top_k: u32,
    /// Number of tokens; of the intermediate, whose number of rows only the lists have, the maximum.
    pub count: u32,
}

impl Chain<'_> {
    /// Returns the input of the operand of a product.
    pub(super) fn input(&self, experts: &Experts<'_>, projection: &Projection) -> Input {
        if projection.index == 1 {
            let pitch = u64::from(projection.k) * size_of::<u16>() as u64;
            let (address, count) = (experts.result(0), experts.rows as u32);
            return Input { address, pitch, weights: 0, places: 0, top_k: 1, count };
        }
        let arguments = self.arguments;
        let (weights, places, top_k) = if experts.is_routed {
            (self.input_weights(), experts.list(|lists| lists.places), self.layer.sizes.top_k as u32)
        } else {
            (0, 0, 1)
        };
        let (pitch, count) = (arguments.token_pitch as u64, arguments.token_count as u32);
        Input { address: arguments.tokens, pitch, weights, places, top_k, count }
    }
}
