//! A group as the host plans it: sizes and addresses of operands. The layer's part and the step's part are separate
//! types. Each kernel's folder fills the kernel's own descriptors from a group.
//!
//! The layer's part, [`PlacedExpert`], has no number of tokens. It suffices for kernels that learn the counts on the
//! device.

use nvfp4_core::Error;
use nvfp4_core::format::Matrix;
use nvfp4_core::problem::{self, Op, Step, Weights};

/// An address in a device's memory.
pub type Address = u64;

/// Tokens of one expert in device memory and the address of their output: the step's part of a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceGroup {
    /// Number of tokens, M. 0: the addresses are not used.
    pub rows: usize,
    /// Address of the packed values, `[M, K/2]` bytes, a multiple of 16.
    pub values: Address,
    /// Address of the scales in the blocked layout ([`blocked::len`](nvfp4_core::format::blocked::len)`(M, K/16)` bytes), a
    /// multiple of 16.
    pub scales: Address,
    /// Global scale of these tokens.
    pub global_scale: f32,
    /// Address of the output, `[M, N]` of the output type, row-major, a multiple of 16.
    pub output: Address,
}

/// A packed matrix in device memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlacedMatrix {
    /// Address of the packed values.
    pub values: Address,
    /// Address of the scales, if the kernel's packing separates them from the values.
    pub scales: Address,
}

/// Weights of one expert in device memory: the layer's part of a group.
#[derive(Clone, Debug)]
pub struct PlacedExpert {
    n: usize,
    k: usize,
    /// Gate and up, or the single projection, each with its global scale.
    projections: Vec<(PlacedMatrix, f32)>,
}

/// Weights of a layer in device memory.
pub struct PlacedLayer {
    op: Op,
    experts: Vec<PlacedExpert>,
}

impl PlacedLayer {
    /// Places every matrix, in order. `place` copies a matrix to the device.
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

    /// Number of experts.
    pub fn expert_count(&self) -> usize {
        self.experts.len()
    }

    /// Checks that a step was built for these weights.
    pub fn check_fits(&self, step: &Step<'_>) -> Result<(), Error> {
        step.check_fits(self.op, self.experts.iter().map(|expert| (expert.n, expert.k)))
    }

    /// Combines expert `index` and a step's tokens to a group.
    ///
    /// # Errors
    /// [`Error::TooLarge`], or [`Error::Invalid`] if the product of the global scales is not finite. Both name the
    /// group.
    pub fn group(&self, index: usize, tokens: &DeviceGroup) -> Result<PlacedGroup, Error> {
        PlacedGroup::new(&self.experts[index], tokens).map_err(|error| error.at(format_args!("group {index}")))
    }
}

/// Sizes of a group: C is `[m, n]`, summed over k.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Number of tokens: rows of A and C.
    pub m: u32,
    /// Rows of each weight matrix, columns of C.
    pub n: u32,
    /// Number of elements summed.
    pub k: u32,
}

/// One group of a step with all its operands in device memory. A gated group computes
/// `silu(alpha[0]·A·B[0]ᵀ) ∘ (alpha[1]·A·B[1]ᵀ)`, a plain group `alpha[0]·A·B[0]ᵀ`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlacedGroup {
    /// M, N and K.
    pub sizes: Sizes,
    /// A: values `[m, k/2]`, and scales in the blocked layout.
    pub tokens: PlacedMatrix,
    /// Gate and up. A plain group has only the first matrix.
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

    /// Returns one projection of a gated group as a plain group with the output `output`.
    pub fn projection(&self, index: usize, output: Address) -> Self {
        let (weights, alpha) = ([self.weights[index], PlacedMatrix::default()], [self.alpha[index], 0.0]);
        Self { weights, alpha, output, ..*self }
    }
}
