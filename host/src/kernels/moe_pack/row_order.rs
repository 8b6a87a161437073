//! The order in which the rows of a layer's matrices lie when they are packed.

use kernels_gpu::units::{block_columns, block_start, element_at, k_blocks};

/// In which order the rows of a matrix are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowOrder {
    /// As they are.
    Kept,
    /// As K is ordered: those of gate and up, whose products are the tokens of down.
    OfK,
}

impl RowOrder {
    /// The row of a matrix of so many that is packed as number `row`.
    pub(super) fn source(self, rows: u32, row: u32) -> u32 {
        match self {
            Self::Kept => row,
            Self::OfK => {
                let block =
                    (0..k_blocks(rows)).rfind(|&block| block_start(rows, block) <= row).expect("a row of the matrix");
                let start = block_start(rows, block);
                start + element_at(block_columns(rows, block), row - start)
            }
        }
    }
}

/// Numbers of the rows of a matrix, its biases for instance, in the order in which the rows are packed.
pub(crate) fn of_rows(numbers: &[f32], order: RowOrder) -> Vec<f32> {
    let rows = numbers.len() as u32;
    (0..rows).map(|row| numbers[order.source(rows, row) as usize]).collect()
}
