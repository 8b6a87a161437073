//! The output of a step: rows of f16 or bf16, group after group.

use half::{bf16, f16};

use crate::error::Error;
use crate::problem::{GroupedProblem, TokenDtype};

impl TokenDtype {
    /// Rounds to nearest, ties to even, with overflow to ±inf. Returns the bits.
    pub fn round(self, x: f64) -> u16 {
        self.round_f32(round_to_odd(x))
    }

    /// Rounds an f32 like [`TokenDtype::round`].
    #[inline]
    pub fn round_f32(self, x: f32) -> u16 {
        match self {
            Self::F16 => f16::from_f32(x).to_bits(),
            Self::Bf16 => bf16::from_f32(x).to_bits(),
        }
    }

    /// Number with these bits.
    #[inline]
    pub fn decode(self, bits: u16) -> f64 {
        match self {
            Self::F16 => f16::from_bits(bits).to_f64(),
            Self::Bf16 => bf16::from_bits(bits).to_f64(),
        }
    }

    /// Name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }
}

/// Rounds `x` to odd: returns `x` if it is an f32, else the neighboring f32 whose last bit is odd. The odd bit marks
/// that a tail was cut off, so a second rounding to a shorter type gives the same number as one rounding of `x` (Boldo
/// and Melquiond, "When double rounding is odd").
fn round_to_odd(x: f64) -> f32 {
    let nearest = x as f32;
    if f64::from(nearest) == x || nearest.to_bits() & 1 == 1 || !nearest.is_finite() {
        nearest
    } else if f64::from(nearest) < x {
        nearest.next_up()
    } else {
        nearest.next_down()
    }
}

/// A NaN in both f16 and bf16, with a bit pattern that no kernel computes.
pub const POISON: u16 = 0x7FED;

/// Output of all groups in one buffer: `[M, N]` of each group, row-major, group after group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    dtype: TokenDtype,
    /// Start of each group, followed by the end of the last group.
    starts: Vec<usize>,
    bits: Vec<u16>,
}

impl Output {
    /// Makes an output for a problem, filled with poison.
    pub fn new(problem: &GroupedProblem) -> Self {
        let mut starts = vec![0];
        for group in problem.groups() {
            starts.push(starts[starts.len() - 1] + group.m * group.n);
        }
        let bits = vec![POISON; starts[starts.len() - 1]];
        Self { dtype: problem.out_dtype(), starts, bits }
    }

    /// Checks that the type and the length match the output of this problem.
    ///
    /// # Errors
    /// [`Error::Mismatch`] with both lengths, or [`Error::Invalid`] with both types.
    pub fn check_fits(&self, problem: &GroupedProblem) -> Result<(), Error> {
        let (got, expected) = (self.bits.len(), problem.groups().iter().map(|group| group.m * group.n).sum());
        if got != expected {
            return Err(Error::Mismatch { what: "elements of the output", got, expected });
        }
        if self.dtype != problem.out_dtype() {
            let (got, expected) = (self.dtype.name(), problem.out_dtype().name());
            return Err(Error::Invalid(format!(
                "the output has type {got}, but the step has type {expected}; make a new output for this step"
            )));
        }
        Ok(())
    }

    /// Fills the output with NaN, so that a comparison finds any element that a kernel does not write.
    pub fn poison(&mut self) {
        self.bits.fill(POISON);
    }

    /// Type of the output's elements.
    pub fn dtype(&self) -> TokenDtype {
        self.dtype
    }

    /// Bits of all groups.
    pub fn bits(&self) -> &[u16] {
        &self.bits
    }

    /// Bits of all groups, writable.
    pub fn bits_mut(&mut self) -> &mut [u16] {
        &mut self.bits
    }

    /// Bits of a group, `M × N`.
    pub fn group(&self, group: usize) -> &[u16] {
        &self.bits[self.starts[group]..self.starts[group + 1]]
    }

    /// Bits of each group, writable.
    pub fn groups_mut(&mut self) -> impl Iterator<Item = &mut [u16]> {
        let mut rest = &mut self.bits[..];
        self.starts.windows(2).map(move |ends| {
            let (group, tail) = std::mem::take(&mut rest).split_at_mut(ends[1] - ends[0]);
            rest = tail;
            group
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::{Group, Op};

    #[test]
    fn poison_is_nan_in_both_types() {
        assert!(TokenDtype::F16.decode(POISON).is_nan() && TokenDtype::Bf16.decode(POISON).is_nan());
    }

    #[test]
    fn groups_partition_the_buffer() {
        let group = |m, n| Group { m, n, k: 16 };
        let groups = vec![group(2, 8), group(0, 16), group(1, 24)];
        let mut output = Output::new(&GroupedProblem::new(Op::Plain, TokenDtype::F16, groups).unwrap());
        for (index, group) in output.groups_mut().enumerate() {
            group.fill(index as u16);
        }
        let filled: Vec<u16> = [vec![0; 16], vec![2; 24]].concat();
        assert_eq!(output.bits(), filled);
        assert_eq!([0, 1, 2].map(|index| output.group(index).len()), [16, 0, 24]);
    }

    #[test]
    fn rounding_is_to_nearest_even_and_overflows_to_infinity() {
        for (x, f16_bits) in
            [(1.0, 0x3C00), (65519.99, 0x7BFF), (65520.0, 0x7C00), (-1e9, 0xFC00), (1.00048828125, 0x3C00)]
        {
            assert_eq!(TokenDtype::F16.round(x), f16_bits, "{x}");
        }
        assert_eq!(TokenDtype::Bf16.round(1.00390625), 0x3F80);
    }

    #[test]
    fn digits_far_below_a_tie_decide_the_rounding() {
        let (f16_tie, bf16_tie, tail) = (1.0 + 2f64.powi(-11), 1.0 + 2f64.powi(-8), 2f64.powi(-50));
        for (dtype, tie, below) in [(TokenDtype::F16, f16_tie, 0x3C00), (TokenDtype::Bf16, bf16_tie, 0x3F80)] {
            assert_eq!([tie - tail, tie, tie + tail].map(|x| dtype.round(x)), [below, below, below + 1]);
            assert_eq!(dtype.round(-tie - tail), 0x8000 + below + 1);
        }
    }
}
