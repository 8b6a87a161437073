//! The memory of a layer's packed weights: a function of sizes alone.

use kernels_gpu::{linear_sm90::abi as panels, units};

use super::PlacedLinear;
use crate::fp8::TokenFormat;
use crate::kernels::group::Address;
use crate::kernels::launch::ALIGNMENT;
use crate::linear::LinearSizes;

/// Where a layer's packed weights lie, one part behind the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PackedWeights {
    /// The place of the first scale that is NaN or negative, as the packing leaves it: a u64.
    pub invalid: Address,
    pub layer: PlacedLinear,
    /// Where they end.
    pub end: Address,
}

impl PackedWeights {
    /// The weights from an address on, a multiple of 256.
    pub fn at(sizes: &LinearSizes, address: Address) -> Self {
        let mut end = address;
        let mut take = |bytes: u64| {
            let at = end;
            end = (at + bytes).next_multiple_of(ALIGNMENT);
            at
        };
        let numbers = (size_of::<f32>() * sizes.n) as u64;
        let matrix_bytes = match sizes.token_format {
            TokenFormat::Bits16 | TokenFormat::Nvfp4 => panels::matrix_bytes,
            TokenFormat::Fp8 => units::matrix_bytes,
        };
        let invalid = take(size_of::<u64>() as u64);
        let layer = PlacedLinear {
            sizes: *sizes,
            panels: take(matrix_bytes(sizes.n as u32, sizes.k as u32)),
            alpha: take(numbers),
            bias: if sizes.bias { take(numbers) } else { 0 },
        };
        Self { invalid, layer, end }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::OutDtype;

    #[test]
    fn parts_lie_at_multiples_of_256_and_do_not_overlap() {
        // Panels are padded to 64 rows and 128 columns, units hardly.
        for (token_format, of_matrix) in
            [(TokenFormat::Bits16, panels::matrix_bytes(80, 144)), (TokenFormat::Fp8, units::matrix_bytes(80, 144))]
        {
            let sizes = LinearSizes { n: 80, k: 144, dtype: OutDtype::F16, bias: true, token_format };
            let PackedWeights { invalid, layer, end } = PackedWeights::at(&sizes, 0x1000);
            let places = [invalid, layer.panels, layer.alpha, layer.bias, end];
            assert!(places.iter().all(|place| place.is_multiple_of(256)), "{places:x?}");
            let bytes = [8, of_matrix, 320, 320];
            assert!(places.windows(2).zip(bytes).all(|(two, bytes)| two[1] - two[0] >= bytes), "{places:x?}");
            assert!(layer.alpha - layer.panels < of_matrix + 256);
            let without = PackedWeights::at(&LinearSizes { bias: false, ..sizes }, 0x1000);
            assert_eq!((without.layer.bias, without.end), (0, layer.bias));
        }
    }
}
