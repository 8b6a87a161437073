//! silu and product of two projections, `kernels-gpu/src/layer/silu_mul/`: the third kernel of the unfused baseline.

#[cfg(feature = "fake")]
mod fake;

use kernels_gpu::layer::silu_mul::abi::{self, THREADS};

use crate::group::Address;
use crate::kernel::{Entry, Kernel};
use crate::launch::{BlockCount, Grid, Launch, output_code};
use nvfp4_core::Error;
use nvfp4_core::problem::TokenDtype;

/// The kernel.
pub struct SiluMul;

/// The same number of elements of three matrices in device memory, all in the output type: `c = silu(gate) ∘ up`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    pub gate: Address,
    pub up: Address,
    pub c: Address,
    pub elements: u64,
}

impl Kernel for SiluMul {
    fn name(&self) -> &'static str {
        "silu_mul"
    }

    fn proven(&self) -> bool {
        true
    }

    fn entries(&self) -> Vec<Entry> {
        vec![Entry { name: self.name(), op: None, threads: THREADS, shared_bytes: 0 }]
    }

    #[cfg(feature = "fake")]
    fn fake(&self, launch: &fake_cuda::Launch<'_>) {
        fake::launch(launch);
    }
}

impl SiluMul {
    /// Returns the launch that computes all segments. Each must have at least one element.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if the grid would need too many CTAs.
    pub fn launch(&self, segments: &[Segment], out_dtype: TokenDtype) -> Result<Launch, Error> {
        let mut blocks = BlockCount::default();
        let mut described = Vec::with_capacity(segments.len());
        for &Segment { gate, up, c, elements } in segments {
            let first_block = blocks.take(abi::Segment::blocks(elements))?;
            described.push(abi::Segment { gate, up, c, elements, first_block, unused: 0 });
        }
        let grid = Grid::linear(self.name(), blocks.total(), THREADS);
        let format = output_code(out_dtype);
        Ok(Launch::of_array(self.name(), grid, described, move |segments, segment_count| abi::Launch {
            segments,
            segment_count,
            format,
        }))
    }
}

#[cfg(test)]
mod tests {
    use kernels_gpu::layer::silu_mul::abi::BLOCK_ELEMENTS;

    use super::*;

    fn segment(elements: u64) -> Segment {
        Segment { gate: 0x1000, up: 0x2000, c: 0x3000, elements }
    }

    #[test]
    fn blocks_are_numbered_across_segments() {
        let block = u64::from(BLOCK_ELEMENTS);
        let segments = [8, block, block + 8, 2 * block].map(segment);
        let launch = SiluMul.launch(&segments, TokenDtype::F16).unwrap();
        let mut to = vec![0; launch.bytes()];
        launch.write(0x100, &mut to, &mut |_| unreachable!("the launch has no tensor maps")).unwrap();
        let described: Vec<abi::Segment> =
            to.chunks_exact(size_of::<abi::Segment>()).map(bytemuck::pod_read_unaligned).collect();
        let first: Vec<_> = described[..4].iter().map(|segment| segment.first_block).collect();
        assert_eq!(first, [0, 1, 2, 4]);
        assert_eq!((launch.grid.blocks, launch.grid.threads), (6, THREADS));
    }

    #[test]
    fn too_many_ctas_for_a_grid_are_refused() {
        assert!(matches!(SiluMul.launch(&[segment(1 << 50)], TokenDtype::F16), Err(Error::TooLarge)));
    }
}
