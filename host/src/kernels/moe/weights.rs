//! The memory of a layer's packed weights: a function of sizes alone.

use kernels_gpu::nvfp4_rows::{value_bytes, weight_scale_bytes};
use kernels_gpu::units::matrix_bytes;

use super::PlacedExperts;
use super::workspace::take;
use crate::kernels::group::Address;
use crate::moe::MoeSizes;
use crate::problem::TokenFormat;

/// Gate, up and down.
pub(crate) const PROJECTIONS: usize = 3;

/// Bytes of a packed matrix: units, or for tokens in NVFP4 values and scales, which lie apart.
pub(super) fn packed_bytes(token_format: TokenFormat, rows: u32, k: u32) -> u64 {
    match token_format {
        TokenFormat::Bits16 | TokenFormat::Fp8 => matrix_bytes(rows, k),
        TokenFormat::Nvfp4 => value_bytes(rows.into(), k) + weight_scale_bytes(rows, k),
    }
}

/// Where a layer's packed weights lie, one part behind the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PackedWeights {
    /// For each projection of the routed experts, and then of the shared one, the place of the first scale that is NaN or
    /// negative, as `moe_pack` leaves it: `[2, 3]`, u64.
    pub invalid: Address,
    pub experts: PlacedExperts,
    pub shared: Option<PlacedExperts>,
    /// Where they end.
    pub end: Address,
}

impl PackedWeights {
    /// The weights from an address on, a multiple of 256.
    pub fn at(sizes: &MoeSizes, address: Address) -> Self {
        let mut end = address;
        let invalid = take(&mut end, (size_of::<u64>() * 2 * PROJECTIONS) as u64);
        let mut experts = |count: usize, intermediate: usize| {
            let (hidden, intermediate, count) = (sizes.hidden as u32, intermediate as u32, count as u64);
            let has_gate = sizes.activation.has_gate();
            let bias = |end: &mut Address, is_there: bool, rows: u32| {
                if is_there { take(end, count * u64::from(rows) * size_of::<f32>() as u64) } else { 0 }
            };
            let (format, gate_up) = (sizes.token_format, count * if has_gate { 2 } else { 1 });
            PlacedExperts {
                gate_up: take(&mut end, gate_up * packed_bytes(format, intermediate, hidden)),
                down: take(&mut end, count * packed_bytes(format, hidden, intermediate)),
                alpha: [(); PROJECTIONS].map(|()| take(&mut end, count * size_of::<f32>() as u64)),
                bias: [
                    bias(&mut end, sizes.biases && has_gate, intermediate),
                    bias(&mut end, sizes.biases, intermediate),
                    bias(&mut end, sizes.biases, hidden),
                ],
                input_scales: [(); 2].map(|()| match format {
                    TokenFormat::Nvfp4 => take(&mut end, count * size_of::<f32>() as u64),
                    _ => 0,
                }),
            }
        };
        let routed = experts(sizes.experts, sizes.intermediate);
        let shared = sizes.shared_intermediate.map(|intermediate| experts(1, intermediate));
        Self { invalid, experts: routed, shared, end }
    }

    /// Where the place of a projection's first wrong scale lies.
    pub fn invalid(&self, of_shared: bool, projection: usize) -> Address {
        self.invalid + (size_of::<u64>() * (usize::from(of_shared) * PROJECTIONS + projection)) as u64
    }
}

/// Bytes of a layer's packed weights, a multiple of 256.
///
/// ```
/// use nvfp4::kernels::moe::weight_bytes;
/// use nvfp4::moe::{Activation, MoeSizes};
/// use nvfp4::problem::{TokenDtype, TokenFormat};
///
/// let mixtral = MoeSizes {
///     hidden: 4096,
///     intermediate: 14336,
///     experts: 8,
///     named_experts: 8,
///     top_k: 2,
///     shared_intermediate: None,
///     dtype: TokenDtype::Bf16,
///     activation: Activation::Silu,
///     biases: false,
///     token_format: TokenFormat::Bits16,
///     input_scales: false,
/// };
/// let numbers = 8 * 3 * 4096 * 14336;
/// assert_eq!(weight_bytes(&mixtral), numbers / 16 * 9 + 4 * 256);
/// ```
pub fn weight_bytes(sizes: &MoeSizes) -> usize {
    PackedWeights::at(sizes, 0).end as usize
}
