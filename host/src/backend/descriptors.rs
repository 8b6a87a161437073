//! What a kernel is told of a step: descriptors made of addresses and sizes. Knows no device, only its addresses.

use kernels_gpu::gated_simt::abi;

use crate::error::Error;
use crate::format::Matrix;
use crate::problem::{self, Op, OutDtype, Step, Weights};

/// An address in a device's memory.
pub(super) type Address = u64;

/// The tokens of one expert in device memory, and where its output goes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceGroup {
    /// Tokens, M. If there are none, the addresses are not looked at.
    pub rows: usize,
    /// Packed values, `[M, K/2]` bytes, at a multiple of 16.
    pub values: Address,
    /// Scales in the blocked layout ([`blocked::len`](crate::format::blocked::len)`(M, K/16)` bytes), at a multiple of 16.
    pub scales: Address,
    /// The factor of all these tokens.
    pub global_scale: f32,
    /// `[M, N]` of the output's type, row-major, at a multiple of 16.
    pub output: Address,
}

/// Where a matrix lies.
#[derive(Clone, Copy)]
pub(super) struct Placed {
    pub values: Address,
    /// Where they do not lie among the values.
    pub scales: Address,
}

/// Where a layer's weights lie.
pub(super) struct DeviceWeights {
    op: Op,
    experts: Vec<Expert>,
}

struct Expert {
    n: usize,
    k: usize,
    /// Gate and up, or the one, with their global scales.
    projections: Vec<(Placed, f32)>,
}

impl DeviceWeights {
    /// Has `place` put every matrix into the device's memory, in order.
    pub fn new(
        weights: &Weights<'_>,
        mut place: impl FnMut(&Matrix<'_>) -> Result<Placed, Error>,
    ) -> Result<Self, Error> {
        let mut experts = Vec::with_capacity(weights.experts().len());
        for expert in weights.experts() {
            let projections = expert.projections().map(|matrix| Ok((place(matrix)?, matrix.global_scale())));
            experts.push(Expert {
                n: expert.n(),
                k: expert.k(),
                projections: projections.collect::<Result<_, Error>>()?,
            });
        }
        Ok(Self { op: weights.op(), experts })
    }

    /// How many experts there are.
    pub fn len(&self) -> usize {
        self.experts.len()
    }

    /// Checks that a step was made for these weights.
    pub fn check_fits(&self, step: &Step<'_>) -> Result<(), Error> {
        step.check_fits(self.op, self.experts.iter().map(|expert| (expert.n, expert.k)))
    }

    /// What the kernel is told of the group of expert `index`; its first tile is still to be numbered.
    pub fn describe(&self, index: usize, group: &DeviceGroup) -> Result<abi::Group, Error> {
        self.experts[index].describe(group).map_err(|error| error.at(format_args!("group {index}")))
    }
}

impl Expert {
    fn describe(&self, group: &DeviceGroup) -> Result<abi::Group, Error> {
        let size = |size: usize| u32::try_from(size).map_err(|_| Error::TooLarge);
        let mut described = abi::Group {
            a: group.values,
            a_scales: group.scales,
            b: [0; 2],
            b_scales: [0; 2],
            c: group.output,
            alpha: [0.0; 2],
            m: size(group.rows)?,
            n: size(self.n)?,
            k: size(self.k)?,
            first_tile: 0,
        };
        for (index, (weights, global_scale)) in self.projections.iter().enumerate() {
            described.b[index] = weights.values;
            described.b_scales[index] = weights.scales;
            described.alpha[index] = problem::alpha(group.global_scale, *global_scale, self.k)? as f32;
        }
        Ok(described)
    }
}

/// What kernels are told of the output's type.
pub(super) fn output(out_dtype: OutDtype) -> u32 {
    match out_dtype {
        OutDtype::F16 => kernels_gpu::format::OUTPUT_F16,
        OutDtype::Bf16 => kernels_gpu::format::OUTPUT_BF16,
    }
}
