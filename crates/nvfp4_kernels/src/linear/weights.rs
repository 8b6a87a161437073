//! Memory layout of a linear layer's packed weights: a function of sizes alone.

use kernels_gpu::nvfp4_rows::{value_bytes, weight_scale_bytes};
use kernels_gpu::{linear as panels, units};

use super::PlacedLinear;
use crate::group::Address;
use crate::launch::ALIGNMENT;
use nvfp4_core::linear::LinearSizes;
use nvfp4_core::problem::TokenFormat;

/// Addresses of a layer's packed weights, in consecutive parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedWeights {
    /// Address of the index of the first scale that is NaN or negative, a `u64` that packing writes.
    pub invalid: Address,
    /// The layer with the addresses of its parts.
    pub layer: PlacedLinear,
    /// End of the last part.
    pub end: Address,
}

impl PackedWeights {
    /// Places the weights from an address upward, a multiple of [`ALIGNMENT`].
    pub fn at(sizes: &LinearSizes, address: Address) -> Self {
        let mut end = address;
        let mut take = |bytes: u64| {
            let at = end;
            end = (at + bytes).next_multiple_of(ALIGNMENT);
            at
        };
        let numbers = (size_of::<f32>() * sizes.n) as u64;
        let (n, k, format) = (sizes.n as u32, sizes.k as u32, sizes.token_format);
        let matrix_bytes = match format {
            TokenFormat::Bits16 => panels::matrix_bytes(n, k),
            TokenFormat::Fp8 => units::matrix_bytes(n, k),
            TokenFormat::Nvfp4 => value_bytes(n.into(), k) + weight_scale_bytes(n, k),
        };
        let invalid = take(size_of::<u64>() as u64);
        let layer = PlacedLinear {
            sizes: *sizes,
            packed: take(matrix_bytes),
            alpha: take(numbers),
            bias: if sizes.bias { take(numbers) } else { 0 },
            input_scale: if format == TokenFormat::Nvfp4 { take(size_of::<f32>() as u64) } else { 0 },
        };
        Self { invalid, layer, end }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvfp4_core::problem::TokenDtype;

    #[test]
    fn parts_are_aligned_and_do_not_overlap() {
        // Panels are padded to 64 rows and 128 columns, and scales for NVFP4 tokens to 128 rows. Units have little
        // padding.
        for (token_format, of_matrix) in [
            (TokenFormat::Bits16, panels::matrix_bytes(80, 144)),
            (TokenFormat::Fp8, units::matrix_bytes(80, 144)),
            (TokenFormat::Nvfp4, 80 * 80 + 128 * 12),
        ] {
            let sizes = LinearSizes { n: 80, k: 144, dtype: TokenDtype::F16, bias: true, token_format };
            let PackedWeights { invalid, layer, end } = PackedWeights::at(&sizes, 0x1000);
            let has_input_scale = token_format == TokenFormat::Nvfp4;
            assert_eq!(layer.input_scale != 0, has_input_scale);
            let behind = if has_input_scale { layer.input_scale } else { end };
            let places = [invalid, layer.packed, layer.alpha, layer.bias, behind];
            assert!(places.iter().all(|place| place.is_multiple_of(256)), "{places:x?}");
            let bytes = [8, of_matrix, 320, 320];
            assert!(places.windows(2).zip(bytes).all(|(two, bytes)| two[1] - two[0] >= bytes), "{places:x?}");
            assert!(layer.alpha - layer.packed < of_matrix + 256 && end - behind <= 256);
            let without = PackedWeights::at(&LinearSizes { bias: false, ..sizes }, 0x1000);
            assert_eq!((without.layer.bias, without.end), (0, layer.bias + (end - behind)));
        }
    }
}
