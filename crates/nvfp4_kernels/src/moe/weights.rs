//! How a layer's weights are packed, and the memory of packed weights: functions of sizes alone.

use kernels_gpu::nvfp4_rows::{value_bytes, weight_scale_bytes};
use kernels_gpu::units::{OperandType, matrix_bytes};

use super::PlacedExperts;
use crate::group::Address;
use crate::launch::take;
use crate::layer::moe_pack::row_order::RowOrder;
use nvfp4_core::moe::MoeSizes;
use nvfp4_core::problem::{TokenDtype, TokenFormat};

/// Number of projections: gate, up and down.
pub const PROJECTIONS: usize = 3;

/// How the matrices of a projection are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// Units ([`units`](kernels_gpu::units)) for multiplication with a type, with rows in an order.
    Units(OperandType, RowOrder),
    /// Values, and scales in the blocked layout ([`nvfp4_rows`](kernels_gpu::nvfp4_rows)), in the order of the checkpoint.
    Nvfp4,
}

impl Packing {
    /// Returns the order of the rows, which the biases share.
    pub fn row_order(self) -> RowOrder {
        match self {
            Self::Units(_, order) => order,
            Self::Nvfp4 => RowOrder::Kept,
        }
    }
}

/// Returns the type that a layer's weights are packed for. `None`: NVFP4 weights are not packed for a type.
pub(super) fn operand_type_of(sizes: &MoeSizes) -> Option<OperandType> {
    match sizes.token_format {
        TokenFormat::Bits16 => Some(operand_type(sizes.dtype)),
        TokenFormat::Fp8 => Some(OperandType::E4m3),
        TokenFormat::Nvfp4 => None,
    }
}

/// Returns how a projection (0: gate, 1: up, 2: down) is packed.
pub fn packing(sizes: &MoeSizes, projection: usize) -> Packing {
    let units = |operand_type| Packing::Units(operand_type, RowOrder::of_projection(projection, operand_type));
    operand_type_of(sizes).map_or(Packing::Nvfp4, units)
}

/// Returns the operand type of 16-bit tokens.
pub fn operand_type(dtype: TokenDtype) -> OperandType {
    match dtype {
        TokenDtype::F16 => OperandType::F16,
        TokenDtype::Bf16 => OperandType::Bf16,
    }
}

/// Returns the bytes of a packed matrix: of its units, or for NVFP4 tokens of its values and scales, which lie apart.
pub(super) fn packed_bytes(token_format: TokenFormat, rows: u32, k: u32) -> u64 {
    match token_format {
        TokenFormat::Bits16 | TokenFormat::Fp8 => matrix_bytes(rows, k),
        TokenFormat::Nvfp4 => value_bytes(rows.into(), k) + weight_scale_bytes(rows, k),
    }
}

/// Addresses of a layer's packed weights. The parts follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedWeights {
    /// Place of the first negative or NaN scale of each projection, as `moe_pack` writes it: u64 `[2, 3]`, the routed experts
    /// first, then the shared one.
    pub invalid: Address,
    /// The routed experts.
    pub experts: PlacedExperts,
    /// The shared expert, if there is one.
    pub shared: Option<PlacedExperts>,
    /// End of the last part.
    pub end: Address,
}

impl PackedWeights {
    /// Returns the weights from an address on, a multiple of 256.
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

    /// Returns the address of the place of a projection's first invalid scale.
    pub fn invalid(&self, of_shared: bool, projection: usize) -> Address {
        self.invalid + (size_of::<u64>() * (usize::from(of_shared) * PROJECTIONS + projection)) as u64
    }
}

/// Returns the bytes of a layer's packed weights, a multiple of 256.
///
/// ```
/// use nvfp4_kernels::moe::weight_bytes;
/// use nvfp4_core::moe::{Activation, MoeSizes};
/// use nvfp4_core::problem::{TokenDtype, TokenFormat};
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

/// A part of packed weights with one piece per routed expert, in the order of the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertPart {
    /// Bytes of the packed weights before the first expert's piece.
    pub start: usize,
    /// Bytes of one expert's piece. The next expert's piece follows it.
    pub bytes_of_one: usize,
}

/// Returns the parts of packed weights that belong to the routed experts. Bytes outside of them do not depend on these experts, and a
/// piece does not depend on its place. So an expert moves to another place, or to a layer of the same sizes, as a copy of its pieces.
pub fn expert_parts(sizes: &MoeSizes) -> Vec<ExpertPart> {
    let PlacedExperts { gate_up, down, alpha, bias, input_scales } = PackedWeights::at(sizes, 0).experts;
    let (hidden, intermediate) = (sizes.hidden as u32, sizes.intermediate as u32);
    let each = if sizes.activation.has_gate() { 2 } else { 1 };
    let mut parts = Vec::new();
    let mut add = |start: Address, bytes_of_one: u64| {
        parts.push(ExpertPart { start: start as usize, bytes_of_one: bytes_of_one as usize });
    };
    for (at, each, rows, k) in [(gate_up, each, intermediate, hidden), (down, 1, hidden, intermediate)] {
        if sizes.token_format == TokenFormat::Nvfp4 {
            let values = each * value_bytes(rows.into(), k);
            add(at, values);
            add(at + sizes.experts as u64 * values, each * weight_scale_bytes(rows, k));
        } else {
            add(at, each * matrix_bytes(rows, k));
        }
    }
    let number = size_of::<f32>() as u64;
    alpha.into_iter().for_each(|at| add(at, number));
    for (at, rows) in bias.into_iter().zip([intermediate, intermediate, hidden]) {
        if at != 0 {
            add(at, u64::from(rows) * number);
        }
    }
    input_scales.into_iter().filter(|at| *at != 0).for_each(|at| add(at, number));
    parts
}

#[cfg(test)]
mod tests {
    use nvfp4_core::moe::Activation;

    use super::*;

    #[test]
    fn parts_of_experts_fill_the_weights() {
        let plain = MoeSizes {
            hidden: 64,
            intermediate: 48,
            experts: 5,
            named_experts: 5,
            top_k: 2,
            shared_intermediate: None,
            dtype: TokenDtype::Bf16,
            activation: Activation::Silu,
            biases: false,
            token_format: TokenFormat::Bits16,
            input_scales: false,
        };
        for token_format in TokenFormat::ALL {
            for activation in [Activation::Silu, Activation::Relu2] {
                for biases in [false, true] {
                    let sizes = MoeSizes { activation, biases, token_format, ..plain };
                    let mut parts = expert_parts(&sizes);
                    parts.sort_by_key(|part| part.start);
                    let mut end = size_of::<u64>() * 2 * PROJECTIONS;
                    for part in parts {
                        // Between parts is less than the padding of one allocation.
                        assert!(part.start >= end && part.start < end + 256, "{sizes:?}");
                        end = part.start + sizes.experts * part.bytes_of_one;
                    }
                    assert_eq!(end.next_multiple_of(256), weight_bytes(&sizes));
                }
            }
        }
    }
}
