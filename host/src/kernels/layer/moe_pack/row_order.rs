//! The order in which the rows of a layer's matrices lie when they are packed.

use kernels_gpu::units::{OperandType, block_columns, block_start, element_at, k_blocks};

/// The column that stands at each place of the order of K, of so many.
pub(crate) fn columns_of_k(columns: u32) -> Vec<usize> {
    let block = |block| {
        let (start, of_block) = (block_start(columns, block), block_columns(columns, block));
        (0..of_block).map(move |position| (start + element_at(of_block, position)) as usize)
    };
    (0..k_blocks(columns)).flat_map(block).collect()
}

/// In which order the rows of a matrix are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowOrder {
    /// As they are.
    Kept,
    /// As K is ordered: those of gate and up, whose products are the 16-bit tokens of down.
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

    /// That of gate, up or down (0, 1, 2). Where down's tokens are e4m3, they are brought into the order of K when they are rounded.
    pub(crate) fn of_projection(projection: usize, operand_type: OperandType) -> Self {
        if projection == 2 || operand_type == OperandType::E4m3 { Self::Kept } else { Self::OfK }
    }

    /// The biases of so many matrices, one behind the other, in the order in which each one's rows are packed; zeros if there are
    /// none.
    pub(crate) fn biases(self, numbers: Option<&[f32]>, matrices: usize, rows: usize) -> Vec<f32> {
        let Some(numbers) = numbers else { return vec![0.0; matrices * rows] };
        let of_matrix =
            |of: usize| (0..rows).map(move |row| numbers[of * rows + self.source(rows as u32, row as u32) as usize]);
        (0..matrices).flat_map(of_matrix).collect()
    }
}
