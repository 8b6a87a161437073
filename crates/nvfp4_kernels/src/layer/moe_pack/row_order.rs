//! The order in which the rows of a layer's matrices are packed.

use kernels_gpu::units::{OperandType, block_columns, block_start, element_at, k_blocks};

/// Returns the column at each position of the order of K, for a token of `columns` columns.
pub fn columns_of_k(columns: u32) -> Vec<usize> {
    let block = |block| {
        let (start, of_block) = (block_start(columns, block), block_columns(columns, block));
        (0..of_block).map(move |position| (start + element_at(of_block, position)) as usize)
    };
    (0..k_blocks(columns)).flat_map(block).collect()
}

/// Order in which the rows of a matrix are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOrder {
    /// The natural order.
    Kept,
    /// The order of K. Gate and up take it if their products are the 16-bit tokens of down.
    OfK,
}

impl RowOrder {
    /// Returns the row that is packed at position `row`, for a matrix of `rows` rows.
    pub(super) fn source(self, rows: u32, row: u32) -> u32 {
        match self {
            Self::Kept => row,
            Self::OfK => {
                let block =
                    (0..k_blocks(rows)).rfind(|&block| block_start(rows, block) <= row).expect("k-block 0 has row 0");
                let start = block_start(rows, block);
                start + element_at(block_columns(rows, block), row - start)
            }
        }
    }

    /// Returns the row order of gate, up or down (0, 1, 2). E4m3 tokens of down get the order of K when they are
    /// rounded, so gate and up keep theirs.
    pub fn of_projection(projection: usize, operand_type: OperandType) -> Self {
        if projection == 2 || operand_type == OperandType::E4m3 { Self::Kept } else { Self::OfK }
    }

    /// Returns the biases of `matrices` consecutive matrices, each in the order in which its rows are packed. Zeros if
    /// `numbers` is `None`.
    pub fn biases(self, numbers: Option<&[f32]>, matrices: usize, rows: usize) -> Vec<f32> {
        let Some(numbers) = numbers else { return vec![0.0; matrices * rows] };
        let of_matrix =
            |of: usize| (0..rows).map(move |row| numbers[of * rows + self.source(rows as u32, row as u32) as usize]);
        (0..matrices).flat_map(of_matrix).collect()
    }
}
