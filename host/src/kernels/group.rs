//! A group as the host plans it: its sizes, and where its operands lie. What a layer knows and what a step brings stand apart.
//! Each kernel fills its own descriptors from it, in that kernel's folder.
//!
//! A layer's half, [`PlacedExpert`], says nothing of how many tokens there are: it is enough for a kernel that learns the counts
//! on the device.

use crate::error::Error;
use crate::format::Matrix;
use crate::problem::{self, Op, Step, Weights};

/// An address in a device's memory.
pub(crate) type Address = u64;

/// The tokens of one expert in device memory, and where its output goes: what a step brings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceGroup {
    /// Tokens, M. If there are none, the addresses are not looked at.
    pub rows: usize,
    /// Packed values, `[M, K/2]` bytes, at a multiple of 16.
    pub values: Address,
    /// Scales in the blocked layout ([`blocked::len`](crate::format::blocked::len)`(M, K/16)` bytes), at a multiple of 16.
    pub scales: Address,
    /// The global scale of these tokens.
    pub global_scale: f32,
    /// `[M, N]` of the output's type, row-major, at a multiple of 16.
    pub output: Address,
}

/// A packed matrix in device memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PlacedMatrix {
    pub values: Address,
    /// The scales, if the kernel's packing keeps them apart from the values.
    pub scales: Address,
}

/// The weights of one expert in device memory: what a layer knows of a group.
#[derive(Clone, Debug)]
pub(crate) struct PlacedExpert {
    n: usize,
    k: usize,
    /// Gate and up, or the one, with their global scales.
    projections: Vec<(PlacedMatrix, f32)>,
}

/// The weights of a layer in device memory.
pub(crate) struct PlacedLayer {
    op: Op,
    experts: Vec<PlacedExpert>,
}

impl PlacedLayer {
    /// Has `place` bring every matrix into the device's memory, in order.
    pub fn new(
        weights: &Weights<'_>,
        mut place: impl FnMut(&Matrix<'_>) -> Result<PlacedMatrix, Error>,
    ) -> Result<Self, Error> {
        let mut experts = Vec::with_capacity(weights.experts().len());
        for expert in weights.experts() {
            let projections = expert.projections().map(|matrix| Ok((place(matrix)?, matrix.global_scale())));
            let projections = projections.collect::<Result<_, Error>>()?;
            experts.push(PlacedExpert { n: expert.n(), k: expert.k(), projections });
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

    /// The group of expert `index` and a step's tokens.
    ///
    /// # Errors
    /// [`Error::TooLarge`], or [`Error::Invalid`] if the product of the global scales is not finite; both name the group.
    pub fn group(&self, index: usize, tokens: &DeviceGroup) -> Result<PlacedGroup, Error> {
        PlacedGroup::new(&self.experts[index], tokens).map_err(|error| error.at(format_args!("group {index}")))
    }
}

/// Sizes of a group: C is `[m, n]`, summed over k.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    /// Tokens: rows of A and C.
    pub m: u32,
    /// Rows of each matrix of weights, columns of C.
    pub n: u32,
    /// Elements summed over.
    pub k: u32,
}

/// One group of a step with all its operands in device memory. A gated group is `silu(alpha[0]·A·B[0]ᵀ) ∘ (alpha[1]·A·B[1]ᵀ)`, a
/// plain one `alpha[0]·A·B[0]ᵀ`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct PlacedGroup {
    pub sizes: Sizes,
    /// A's values `[m, k/2]`, and its scales in the blocked layout.
    pub tokens: PlacedMatrix,
    /// Gate and up; of a plain group the one.
    pub weights: [PlacedMatrix; 2],
    /// Products of the global scales: A's and gate's, A's and up's.
    pub alpha: [f32; 2],
    /// C `[m, n]`, row-major.
    pub output: Address,
}

impl PlacedGroup {
    fn new(expert: &PlacedExpert, group: &DeviceGroup) -> Result<Self, Error> {
        let size = |size: usize| u32::try_from(size).map_err(|_| Error::TooLarge);
        let sizes = Sizes { m: size(group.rows)?, n: size(expert.n)?, k: size(expert.k)? };
        let (mut weights, mut alpha) = ([PlacedMatrix::default(); 2], [0.0; 2]);
        for (index, (matrix, global_scale)) in expert.projections.iter().enumerate() {
            weights[index] = *matrix;
            alpha[index] = problem::alpha(group.global_scale, *global_scale, expert.k)? as f32;
        }
        let tokens = PlacedMatrix { values: group.values, scales: group.scales };
        Ok(Self { sizes, tokens, weights, alpha, output: group.output })
    }

    /// One projection of a gated group as a plain group, whose C is `output`.
    pub fn projection(&self, index: usize, output: Address) -> Self {
        let (weights, alpha) = ([self.weights[index], PlacedMatrix::default()], [self.alpha[index], 0.0]);
        Self { weights, alpha, output, ..*self }
    }
}
