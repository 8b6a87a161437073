//! Compares an output with the exact reference, element by element.

use rayon::prelude::*;

use crate::oracle::{Element, Reference, silu};
use crate::output::Output;
use crate::problem::{Step, TokenDtype};

/// Allowed distance of an output element from the reference, which is rounded to the output type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerance {
    /// Absolute tolerance.
    pub absolute: f64,
    /// Relative tolerance, as a share of the reference.
    pub relative: f64,
}

impl Tolerance {
    /// Returns the tolerance of an output type: 1e-3 absolute, and relative 1e-3 for f16 (the public tolerance of the
    /// NVFP4 kernel competition) or one unit in the last place for bf16, whose rounding alone exceeds 1e-3.
    pub const fn of(dtype: TokenDtype) -> Self {
        match dtype {
            TokenDtype::F16 => Self { absolute: 1e-3, relative: 1e-3 },
            TokenDtype::Bf16 => Self { absolute: 1e-3, relative: 1.0 / 128.0 },
        }
    }

    /// Returns `true` if `got` (an output element) is acceptable for the exact `want`. NaN is never acceptable;
    /// infinities must be equal, unless `want` is within tolerance of overflow.
    pub fn accepts(self, dtype: TokenDtype, got: f64, want: f64) -> bool {
        let rounded = dtype.decode(dtype.round(want));
        let allowed = |reference: f64| self.absolute + self.relative * reference.abs();
        if got.is_infinite() {
            // Where rounding starts to overflow: slightly above the largest finite number.
            let overflow = match dtype {
                TokenDtype::F16 => f64::from(half::f16::MAX),
                TokenDtype::Bf16 => f64::from(half::bf16::MAX),
            };
            rounded == got || (want.signum() == got.signum() && want.abs() + allowed(want) >= overflow)
        } else if rounded.is_infinite() {
            (got - want).abs() <= allowed(want)
        } else {
            (got - rounded).abs() <= allowed(rounded)
        }
    }

    /// Returns the tolerance of one element, given Σ|products|·α for each projection. It is widened by the maximum
    /// error of `roundings` f32 roundings of sums of this magnitude.
    pub fn widened(self, element: &Element, magnitudes: [f64; 2], roundings: f64) -> Self {
        let [gate, up] = magnitudes.map(|sum| sum * roundings * f64::from(f32::EPSILON) / 2.0);
        if magnitudes[1] == 0.0 {
            return Self { absolute: self.absolute + gate, ..self };
        }
        self.carried(element, [gate, up])
    }

    /// Returns the tolerance of a gated element of the unfused baseline, which rounds to the output type three times:
    /// gate, up and their product.
    ///
    /// Every variant has the last rounding, which [`Tolerance::of`] covers. The first two change gate and up by at most
    /// half a unit in the last place: `u·|x| + η`, where u is 2⁻¹¹ in f16 and 2⁻⁸ in bf16, and η is half of the
    /// smallest subnormal, which matters only in f16. The tolerance grows by the resulting change of the product. An
    /// intermediate that overflows is ±inf and has no bound: such elements are wrong, as in every implementation that
    /// stores gate and up in 16 bits.
    pub fn unfused(dtype: TokenDtype, element: &Element) -> Self {
        let (unit, smallest) = match dtype {
            TokenDtype::F16 => (f64::exp2(-11.0), f64::exp2(-25.0)),
            TokenDtype::Bf16 => (f64::exp2(-8.0), f64::exp2(-134.0)),
        };
        Self::of(dtype).carried(element, element.pre.map(|x| unit * x.abs() + smallest))
    }

    /// Widens the tolerance by the maximum change of a gated element if gate and up have these errors. With an error γ
    /// in gate g and υ in up u, and |silu'| ≤ L: |silu(g + γ)·(u + υ) − silu(g)·u| ≤ L·γ·(|u| + υ) + |silu(g)|·υ.
    fn carried(self, element: &Element, [gate, up]: [f64; 2]) -> Self {
        /// Maximum slope of silu, at x ≈ 2.4.
        const SILU_SLOPE: f64 = 1.0999;
        let more = SILU_SLOPE * gate * (element.pre[1].abs() + up) + silu(element.pre[0]).abs() * up;
        Self { absolute: self.absolute + more, ..self }
    }
}

/// An element with its actual and its exact value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mismatch {
    /// Index of the group (expert).
    pub group: usize,
    /// Index of the token in the group.
    pub row: usize,
    /// Index of the output feature.
    pub column: usize,
    /// Value in the output.
    pub got: f64,
    /// Exact value.
    pub want: f64,
}

impl std::fmt::Display for Mismatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { group, row, column, got, want } = self;
        write!(f, "group {group}, row {row}, column {column}: got {got}, want {want}")
    }
}

/// Result of a comparison.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Comparison {
    /// Number of compared elements.
    pub checked: usize,
    /// Number of elements outside the tolerance.
    pub mismatches: usize,
    /// First element outside the tolerance, in the order of the output.
    pub first: Option<Mismatch>,
    /// Element with the largest absolute error, right or wrong; NaN counts as the largest error.
    pub worst: Option<Mismatch>,
    /// Maximum of |got − want|.
    pub max_abs_err: f64,
    /// Maximum of |got − want| / |want|, over elements whose |want| is at least a thousand times the absolute
    /// tolerance.
    pub max_rel_err: f64,
}

impl Comparison {
    /// Whether no compared element was wrong; also `true` if no element was compared.
    pub fn passed(&self) -> bool {
        self.mismatches == 0
    }

    /// Adds one element.
    pub fn add(&mut self, tolerance: Tolerance, dtype: TokenDtype, element: Mismatch) {
        let Mismatch { got, want, .. } = element;
        let rounded = dtype.decode(dtype.round(want));
        // Equal infinities have no distance; a NaN is infinitely far.
        let distance = if got == rounded { 0.0 } else { (got - rounded).abs() };
        let distance = if distance.is_nan() { f64::INFINITY } else { distance };
        self.checked += 1;
        if !tolerance.accepts(dtype, got, want) {
            self.mismatches += 1;
            self.first.get_or_insert(element);
        }
        if self.worst.is_none() || distance > self.max_abs_err {
            self.max_abs_err = distance;
            self.worst = Some(element);
        }
        if want.abs() >= 1e3 * tolerance.absolute {
            self.max_rel_err = self.max_rel_err.max(distance / want.abs());
        }
    }

    /// Merges the comparison of a later part of the output.
    pub fn merge(self, later: Self) -> Self {
        Self {
            checked: self.checked + later.checked,
            mismatches: self.mismatches + later.mismatches,
            first: self.first.or(later.first),
            worst: if later.worst.is_some() && (self.worst.is_none() || later.max_abs_err > self.max_abs_err) {
                later.worst
            } else {
                self.worst
            },
            max_abs_err: self.max_abs_err.max(later.max_abs_err),
            max_rel_err: self.max_rel_err.max(later.max_rel_err),
        }
    }
}

/// Compares every element with the tolerance of the output type.
pub fn compare(output: &Output, reference: &Reference, step: &Step<'_>) -> Comparison {
    let tolerance = Tolerance::of(output.dtype());
    compare_with(output, reference, step, |_, _, _, _| tolerance)
}

/// Compares every element with a separate tolerance: a function of group, row, column and exact element.
pub fn compare_with(
    output: &Output,
    reference: &Reference,
    step: &Step<'_>,
    tolerance: impl Fn(usize, usize, usize, &Element) -> Tolerance + Sync,
) -> Comparison {
    let dtype = output.dtype();
    let groups = step.problem().groups().iter().enumerate();
    groups.fold(Comparison::default(), |all, (group, sizes)| {
        let rows = output.group(group).par_chunks(sizes.n).enumerate().map(|(row, bits)| {
            let mut found = Comparison::default();
            for (column, &bits) in bits.iter().enumerate() {
                let exact = reference.element(group, row, column);
                let got = dtype.decode(bits);
                let element = Mismatch { group, row, column, got, want: exact.value };
                found.add(tolerance(group, row, column, &exact), dtype, element);
            }
            found
        });
        // Collected in order, so that the first mismatch and ties for the worst element do not depend on threads.
        rows.collect::<Vec<_>>().into_iter().fold(all, Comparison::merge)
    })
}

#[cfg(test)]
mod tests {
    use rand::{RngExt, SeedableRng};
    use rand_xoshiro::Xoshiro256PlusPlus;

    use super::*;
    use crate::format::Matrix;
    use crate::problem::{Expert, Op, Weights};

    const F16: Tolerance = Tolerance::of(TokenDtype::F16);

    #[test]
    fn nan_never_passes_and_infinities_must_be_equal() {
        let accepts = |got, want| F16.accepts(TokenDtype::F16, got, want);
        assert!(!accepts(f64::NAN, 1.0) && !accepts(f64::NAN, f64::NAN));
        assert!(accepts(f64::INFINITY, 1e9) && accepts(f64::NEG_INFINITY, -1e9));
        assert!(!accepts(f64::INFINITY, -1e9) && !accepts(f64::INFINITY, 60000.0) && !accepts(65504.0, 1e9));
        // At the edge of overflow, both the finite and the infinite value may be right.
        assert!(accepts(65504.0, 65520.0) && accepts(f64::INFINITY, 65519.0));
    }

    #[test]
    fn bound_is_relative_to_the_rounded_reference() {
        let accepts = |got, want| F16.accepts(TokenDtype::F16, got, want);
        assert!(accepts(0.001, 0.0) && !accepts(0.0011, 0.0));
        assert!(accepts(1002.0, 1001.0) && !accepts(1003.0, 1001.0));
        // 1.0004 rounds to 1 in f16, and the bound is relative to 1.
        assert!(accepts(1.0 - 0.0019, 1.0004) && !accepts(1.0 + 0.0021, 1.0004));
        let bf16 = Tolerance::of(TokenDtype::Bf16);
        assert!(bf16.accepts(TokenDtype::Bf16, 1.0078125, 1.0) && !bf16.accepts(TokenDtype::Bf16, 1.015625, 1.0));
    }

    #[test]
    fn wrong_and_unwritten_elements_are_located() {
        let matrix = |rows: usize| Matrix::new(rows, 16, vec![0x22; rows * 8], vec![0x38; rows], 1.0).unwrap();
        let plain = || Expert::Plain(matrix(8));
        let weights = Weights::new(Op::Plain, vec![plain(), plain()]).unwrap();
        let step = Step::new(&weights, vec![matrix(2), matrix(3)], TokenDtype::F16).unwrap();
        let reference = Reference::new(&weights, &step);
        let mut output = reference.output(&step);
        assert_eq!(
            compare(&output, &reference, &step),
            Comparison { checked: 40, ..compare(&output, &reference, &step) }
        );
        assert!(compare(&output, &reference, &step).passed());

        output.bits_mut()[16 + 8 + 5] = TokenDtype::F16.round(20.0);
        let found = compare(&output, &reference, &step);
        let wrong = Mismatch { group: 1, row: 1, column: 5, got: 20.0, want: 16.0 };
        assert_eq!((found.mismatches, found.first, found.worst), (1, Some(wrong), Some(wrong)));
        assert_eq!((found.max_abs_err, found.max_rel_err), (4.0, 0.25));
        assert_eq!(wrong.to_string(), "group 1, row 1, column 5: got 20, want 16");

        output.poison();
        let found = compare(&output, &reference, &step);
        assert_eq!((found.mismatches, found.max_abs_err), (40, f64::INFINITY));
    }

    #[test]
    fn widening_covers_the_error_of_both_projections() {
        let element = Element { pre: [2.0, 3.0], value: silu(2.0) * 3.0 };
        let wide = F16.widened(&element, [100.0, 50.0], 4.0);
        let (gate, up) = (100.0 * 4.0 / 16_777_216.0, 50.0 * 4.0 / 16_777_216.0);
        let off = silu(2.0 + gate) * (3.0 + up) - element.value;
        assert!(wide.absolute - F16.absolute >= off, "{wide:?} {off}");
        assert!(wide.absolute - F16.absolute <= 2.0 * off);
    }

    #[test]
    fn unfused_tolerance_covers_three_roundings_tightly() {
        const STEPS: u32 = 4_000;
        for dtype in [TokenDtype::F16, TokenDtype::Bf16] {
            let (mut rng, mut passed) = (Xoshiro256PlusPlus::seed_from_u64(1), 0);
            for _ in 0..STEPS {
                // Numbers of many magnitudes and both signs; none is representable in the format.
                let pre = [(); 2].map(|()| rng.random_range(-1.0..1.0) * f64::exp2(rng.random_range(-8.0..8.0)));
                let element = Element { pre, value: silu(pre[0]) * pre[1] };
                let rounded = pre.map(|x| dtype.decode(dtype.round(x)));
                let got = dtype.decode(dtype.round(silu(rounded[0]) * rounded[1]));
                let tolerance = Tolerance::unfused(dtype, &element);
                assert!(tolerance.accepts(dtype, got, element.value), "{pre:?}: {got}");
                passed += u32::from(Tolerance::of(dtype).accepts(dtype, got, element.value));
                let far = element.value + 4.0 * (tolerance.absolute + tolerance.relative * element.value.abs());
                assert!(!tolerance.accepts(dtype, far, element.value), "{pre:?}: {far}");
            }
            assert!(passed < STEPS, "{dtype:?}: the public tolerance would do");
        }
    }
}
