//! The launch of `kernels-gpu/src/silu_mul/`. Pure functions.

use kernels_gpu::silu_mul::abi::{Segment, THREADS};

use super::Grid;
use crate::error::Error;

/// The module, and its entry.
pub(crate) const NAME: &str = "silu_mul";

/// Numbers the blocks of segments, and returns the launch that computes them all.
///
/// # Errors
/// [`Error::TooLarge`] if the blocks are more than a grid can have.
pub(crate) fn plan(segments: &mut [Segment]) -> Result<Grid, Error> {
    let mut blocks = 0;
    for segment in segments {
        segment.first_block = u32::try_from(blocks).map_err(|_| Error::TooLarge)?;
        blocks += Segment::blocks(segment.elements);
        if blocks > Grid::MAX_BLOCKS {
            return Err(Error::TooLarge);
        }
    }
    Ok(Grid { entry: NAME, blocks: blocks as u32, cluster: 1, threads: THREADS, shared_bytes: 0, overlaps: false })
}

#[cfg(test)]
mod tests {
    use bytemuck::Zeroable;
    use kernels_gpu::silu_mul::abi::BLOCK_ELEMENTS;

    use super::*;

    #[test]
    fn blocks_are_numbered_through_all_segments() {
        let block = u64::from(BLOCK_ELEMENTS);
        let mut segments = [8, block, block + 8, 2 * block].map(|elements| Segment { elements, ..Segment::zeroed() });
        let grid = plan(&mut segments).unwrap();
        assert_eq!(segments.map(|segment| segment.first_block), [0, 1, 2, 4]);
        assert_eq!((grid.blocks, grid.threads), (6, THREADS));
    }

    #[test]
    fn more_blocks_than_a_grid_has_are_refused() {
        let huge = Segment { elements: 1 << 50, ..Segment::zeroed() };
        assert!(matches!(plan(&mut [huge]), Err(Error::TooLarge)));
    }
}
