//! Layout of operands in one allocation.

use std::ops::Range;

use cuda_driver::sys::CUdeviceptr;

use crate::Output;
use crate::format::{BLOCK, Matrix, blocked};
use crate::problem::Step;
use nvfp4_kernels::group::DeviceGroup;

/// Alignment of every operand in bytes: the alignment of `cuMemAlloc`, which is more than any kernel requires.
const ALIGNMENT: usize = 256;

/// Assigns aligned ranges one after the other.
#[derive(Default)]
pub(super) struct Cursor(pub usize);

impl Cursor {
    pub fn take(&mut self, bytes: usize) -> Range<usize> {
        let start = self.0;
        self.0 = (start + bytes).next_multiple_of(ALIGNMENT);
        start..start + bytes
    }

    /// Assigns ranges for a matrix: its values, and its scales in the blocked layout.
    pub fn take_matrix(&mut self, matrix: &Matrix<'_>) -> (Range<usize>, Range<usize>) {
        (self.take(matrix.values().len()), self.take(blocked::len(matrix.rows(), matrix.k() / BLOCK)))
    }
}

/// Offsets of a step's operands from the start of the allocation.
pub(super) struct StepLayout {
    /// Values and scales of each group's tokens.
    tokens: Vec<(Range<usize>, Range<usize>)>,
    /// Output of all groups.
    pub output: Range<usize>,
    /// Total number of bytes.
    pub bytes: usize,
}

impl StepLayout {
    pub fn new(step: &Step<'_>) -> Self {
        let mut total = Cursor::default();
        let tokens = step.activations().iter().map(|tokens| total.take_matrix(tokens)).collect();
        let elements: usize = step.problem().groups().iter().map(|group| group.m * group.n).sum();
        let output = total.take(size_of::<u16>() * elements);
        Self { tokens, output, bytes: total.0 }
    }

    /// Writes the tokens and the current content of `output`.
    pub fn write(&self, step: &Step<'_>, output: &Output, to: &mut [u8]) {
        for (tokens, (values, scales)) in step.activations().iter().zip(&self.tokens) {
            to[values.clone()].copy_from_slice(tokens.values());
            blocked::write_linear(tokens.rows(), tokens.k() / BLOCK, tokens.scales(), &mut to[scales.clone()]);
        }
        to[self.output.clone()].copy_from_slice(bytemuck::cast_slice(output.bits()));
    }

    /// Returns the groups for an allocation at `address`.
    pub fn groups(&self, step: &Step<'_>, address: CUdeviceptr) -> Vec<DeviceGroup> {
        let mut next_output = address + self.output.start as u64;
        let sizes = step.activations().iter().zip(step.problem().groups());
        let groups = sizes.zip(&self.tokens).map(|((tokens, sizes), (values, scales))| {
            let output = next_output;
            next_output += (size_of::<u16>() * sizes.m * sizes.n) as u64;
            DeviceGroup {
                rows: tokens.rows(),
                values: address + values.start as u64,
                scales: address + scales.start as u64,
                global_scale: tokens.global_scale(),
                output,
            }
        });
        groups.collect()
    }
}
