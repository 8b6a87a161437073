//! Ragged sizes, every generator and extreme inputs on every backend, against the oracle.

use nvfp4::generate::Generator;
use nvfp4::problem::{Op, TokenDtype};
use nvfp4_tests::{check, check_widened, constant, gated, groups, inputs};

/// Codes of the largest value, 6, and of the largest scale, 448.
const SIX: u8 = 7;
const MAX_SCALE: u8 = 0x7E;

#[test]
fn ragged_groups_of_any_size_are_right() {
    let sizes = groups(&[(0, 8, 16), (1, 72, 320), (7, 8, 48), (127, 136, 64), (129, 72, 192), (0, 128, 256)]);
    for op in [Op::Gated, Op::Plain] {
        for out_dtype in [TokenDtype::F16, TokenDtype::Bf16] {
            check(&inputs(Generator::Gaussian, op, &sizes, 1), out_dtype);
        }
    }
}

#[test]
fn problem_without_tokens_or_groups_computes_nothing() {
    for sizes in [groups(&[]), groups(&[(0, 8, 16), (0, 256, 512)])] {
        check(&inputs(Generator::Gaussian, Op::Gated, &sizes, 2), TokenDtype::F16);
    }
}

#[test]
fn one_group_and_sixty_four_groups_are_right() {
    check(&inputs(Generator::Gaussian, Op::Gated, &groups(&[(33, 64, 128)]), 3), TokenDtype::F16);
    let many: Vec<_> = (0..64).map(|group| (group % 11, 8 * (1 + group % 3), 16 * (1 + group % 5))).collect();
    check(&inputs(Generator::Gaussian, Op::Gated, &groups(&many), 3), TokenDtype::F16);
}

#[test]
fn every_length_of_k_is_right() {
    for k in [16, 48, 320, 2880, 16384] {
        for op in [Op::Gated, Op::Plain] {
            check(&inputs(Generator::Gaussian, op, &groups(&[(5, 72, k), (18, 16, k)]), 4), TokenDtype::F16);
        }
    }
}

#[test]
fn every_generator_is_right() {
    let sizes = groups(&[(40, 136, 256), (9, 64, 512)]);
    check(&inputs(Generator::PublicDual, Op::Gated, &sizes, 5), TokenDtype::F16);
    check(&inputs(Generator::PublicGroup, Op::Plain, &sizes, 5), TokenDtype::F16);
    for op in [Op::Gated, Op::Plain] {
        check(&inputs(Generator::Gaussian, op, &sizes, 5), TokenDtype::F16);
        check_widened(&inputs(Generator::AllCodes, op, &sizes, 5), TokenDtype::F16);
    }
}

#[test]
fn largest_values_and_scales_overflow_as_ieee_says() {
    let k = 512;
    let largest = |rows, alternate, global| constant(rows, k, SIX, alternate, MAX_SCALE, global);
    // 512 products of 2688² · α: gate is 37, then −37, then far beyond f16's range.
    for (a, b) in [(1e-4f32, 1e-4f32), (1e-4, 1.0), (1.0, 1.0)] {
        check(&gated(vec![[largest(3, false, a), largest(8, false, b), largest(8, false, b)]]), TokenDtype::F16);
        let negative = constant(8, k, SIX | 8, false, MAX_SCALE, b);
        check(&gated(vec![[largest(3, false, a), negative.clone(), largest(8, false, b)]]), TokenDtype::F16);
        check(&gated(vec![[largest(3, false, a), largest(8, false, b), negative]]), TokenDtype::F16);
    }
    // Alternating signs cancel exactly.
    check(&gated(vec![[largest(3, true, 1.0), largest(8, false, 1.0), largest(8, false, 1.0)]]), TokenDtype::F16);
    check(&gated(vec![[largest(3, true, 1e-4), largest(8, true, 1e-4), largest(8, false, 1e-4)]]), TokenDtype::F16);
}

#[test]
fn gate_and_up_keep_their_own_global_scales() {
    let ones = |rows, global| constant(rows, 64, 2, false, 0x38, global);
    // gate = 64 · 0.01 and up = 64 · 0.1: if swapped, the output would miss the tolerance.
    check(
        &gated(vec![[ones(2, 1.0), ones(8, 0.01), ones(8, 0.1)], [ones(2, 0.5), ones(8, 0.1), ones(8, 0.01)]]),
        TokenDtype::F16,
    );
}
