//! One set of tests, run on every instruction set of this machine.

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::layout::{Bf16, Tokens};
use super::*;
use crate::backend;
use crate::compare::{Comparison, Tolerance, compare_with};
use crate::format::{BLOCK, Matrix, e4m3};
use crate::generate::{self, Generator};
use crate::moe::generate::Routing;
use crate::moe::{self, LayerShape, MoeInputs, MoeOutput, MoeStep};
use crate::oracle::{self, Reference};
use crate::problem::{Expert, Group, TokenDtype};

/// All instruction sets of this machine. Prints the missing ones.
fn cpus() -> impl Iterator<Item = Cpu> {
    Isa::ALL.into_iter().filter_map(|isa| Cpu::with(isa).map_err(|error| eprintln!("skipped: {error}")).ok())
}

fn run(cpu: Cpu, weights: &Weights<'_>, step: &Step<'_>) -> Output {
    let mut output = Output::new(step.problem());
    let mut layer = cpu.prepare(weights).unwrap();
    backend::run(&mut *layer, step, &mut output).unwrap();
    output
}

/// Compares with the oracle. The tolerance bounds the total rounding error of an f32 sum.
fn check(output: &Output, weights: &Weights<'_>, step: &Step<'_>) -> Comparison {
    let reference = Reference::new(weights, step);
    let magnitudes: Vec<_> =
        (0..weights.experts().len()).map(|group| oracle::magnitudes(weights, step, group)).collect();
    let groups = step.problem().groups();
    let tolerance = Tolerance::of(output.dtype());
    compare_with(output, &reference, step, |group, row, column, element| {
        let Group { n, k, .. } = groups[group];
        let magnitude =
            |projection: usize| magnitudes[group].get(projection).map_or(0.0, |sums| sums[row * n + column]);
        // Roundings within a chunk, between chunks, and a few in the epilogue.
        let roundings = Nvfp4::CHUNK_BLOCKS + k.div_ceil(BLOCK * Nvfp4::CHUNK_BLOCKS) + 8;
        tolerance.widened(element, [magnitude(0), magnitude(1)], roundings as f64)
    })
}

fn assert_right(weights: &Weights<'_>, step: &Step<'_>) {
    let mut bits = None;
    for cpu in cpus() {
        let output = run(cpu, weights, step);
        // All instruction sets must give the same bits, so only the first is compared with the oracle.
        if let Some(bits) = &bits {
            assert!(output.bits() == bits, "{} differs from {}", cpu.isa().name(), cpus().next().unwrap().isa().name());
        } else {
            let found = check(&output, weights, step);
            assert!(found.passed(), "{}, {:?}: {found:?}", cpu.isa().name(), step.problem());
            bits = Some(output.bits().to_vec());
        }
    }
}

fn generated(
    generator: Generator,
    op: Op,
    groups: &[Group],
    dtype: TokenDtype,
    use_it: impl FnOnce(&Weights<'_>, &Step<'_>),
) {
    let weights = generate::weights(generator, op, groups, 1).unwrap();
    let step = Step::new(&weights, generate::activations(generator, groups, 2).unwrap(), dtype).unwrap();
    use_it(&weights, &step);
}

#[test]
fn ragged_groups_of_any_size_are_right() {
    for op in [Op::Gated, Op::Plain] {
        for (n, k) in [(8, 16), (72, 48), (136, 320), (8, 2880), (72, 16384)] {
            for dtype in [TokenDtype::F16, TokenDtype::Bf16] {
                let groups: Vec<_> = [0, 1, 7, 127, 0, 129, 3].map(|m| Group { m, n, k }).into();
                generated(Generator::Gaussian, op, &groups, dtype, assert_right);
            }
        }
    }
}

#[test]
fn several_tiles_and_groups_of_different_sizes_are_right() {
    let groups = [(300, 24, 1040), (513, 136, 96), (2, 8, 528)].map(|(m, n, k)| Group { m, n, k });
    for op in [Op::Gated, Op::Plain] {
        generated(Generator::PublicGroup, op, &groups, TokenDtype::Bf16, assert_right);
    }
}

#[test]
fn every_value_and_every_scale_is_right() {
    for op in [Op::Gated, Op::Plain] {
        generated(Generator::AllCodes, op, &[Group { m: 33, n: 72, k: 4096 }], TokenDtype::F16, assert_right);
    }
}

#[test]
fn products_of_all_values_and_scales_are_exact() {
    // Each block has one nonzero element. There is one token for each value and scale, and one row of weights for each
    // too.
    let scales = [0, 1, 7, 8, 0x38, 0x77, e4m3::MAX_CODE];
    let codes: Vec<(u8, u8)> = (0..16).flat_map(|code| scales.map(|scale| (code, scale))).collect();
    let matrix = |element: usize| {
        let mut values = vec![0; codes.len() * 8];
        for (row, &(code, _)) in values.chunks_mut(8).zip(&codes) {
            row[element / 2] = code << (element % 2 * 4);
        }
        let scales: Vec<u8> = codes.iter().map(|&(_, scale)| scale).collect();
        Matrix::new(codes.len(), 16, values, scales, 1.0 / 64.0).unwrap()
    };
    for element in 0..16 {
        let weights = Weights::new(Op::Plain, vec![Expert::Plain(matrix(element))]).unwrap();
        let step = Step::new(&weights, vec![matrix(element)], TokenDtype::Bf16).unwrap();
        let exact = Reference::new(&weights, &step).output(&step);
        for cpu in cpus() {
            let output = run(cpu, &weights, &step);
            // Zero may have either sign.
            let same = |(&got, &want): (&u16, &u16)| got == want || (got | want) & 0x7FFF == 0;
            assert!(output.bits().iter().zip(exact.bits()).all(same), "{}, element {element}", cpu.isa().name());
        }
    }
}

#[test]
fn the_largest_sums_are_right() {
    let k = 16384;
    let constant = |rows: usize, byte: u8, global| {
        Matrix::new(rows, k, vec![byte; rows * k / 2], vec![e4m3::MAX_CODE; rows * k / 16], global).unwrap()
    };
    // 0x77 is (6, 6), 0xF7 is (6, −6).
    for (tokens, gate, up) in [(0x77, 0x77, 0xFF), (0x77, 0xFF, 0x77), (0xF7, 0xF7, 0x7F), (0x77, 0xF7, 0x77)] {
        for global in [1.0, 1e-6, 1e-11] {
            let expert = Expert::Gated { gate: constant(24, gate, global), up: constant(24, up, global / 10.0) };
            let weights = Weights::new(Op::Gated, vec![expert]).unwrap();
            for dtype in [TokenDtype::F16, TokenDtype::Bf16] {
                let step = Step::new(&weights, vec![constant(5, tokens, 1.0)], dtype).unwrap();
                assert_right(&weights, &step);
            }
        }
    }
}

#[test]
fn gate_and_up_keep_their_own_global_scales() {
    let matrix =
        |rows: usize, global| Matrix::new(rows, 32, vec![0x2A; rows * 16], vec![0x38; rows * 2], global).unwrap();
    let expert = Expert::Gated { gate: matrix(16, 0.02), up: matrix(16, 0.2) };
    let weights = Weights::new(Op::Gated, vec![expert]).unwrap();
    let step = Step::new(&weights, vec![matrix(3, 3.0)], TokenDtype::F16).unwrap();
    assert_right(&weights, &step);
}

#[test]
fn empty_problems_and_empty_groups_write_nothing() {
    for groups in [vec![], vec![Group { m: 0, n: 8, k: 16 }; 300]] {
        generated(Generator::Gaussian, Op::Gated, &groups, TokenDtype::F16, assert_right);
    }
}

#[test]
fn hundreds_of_groups_are_right() {
    let groups: Vec<_> = (0..300).map(|group| Group { m: group % 4, n: 16, k: 64 }).collect();
    generated(Generator::Gaussian, Op::Gated, &groups, TokenDtype::F16, assert_right);
}

#[test]
fn reruns_and_thread_counts_give_the_same_bits() {
    let groups = |scale: usize| [3, 0, 40, 1].map(|m| Group { m: m * scale, n: 136, k: 1040 });
    let weights = generate::weights(Generator::AllCodes, Op::Gated, &groups(1), 1).unwrap();
    let step = |scale: usize, dtype| {
        let tokens = generate::activations(Generator::AllCodes, &groups(scale), 2).unwrap();
        Step::new(&weights, tokens, dtype).unwrap()
    };
    let (small, large) = (step(1, TokenDtype::F16), step(9, TokenDtype::Bf16));
    for cpu in cpus() {
        let mut layer = cpu.prepare(&weights).unwrap();
        let mut outputs = [&small, &large].map(|step| run(cpu, &weights, step));
        for threads in [1, 2, 5] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            for (step, first) in [&large, &small, &large].into_iter().zip([1, 0, 1]) {
                let again = pool.install(|| {
                    let mut again = Output::new(step.problem());
                    cpu.prepare(&weights).unwrap().execute(step, &mut again).unwrap();
                    again
                });
                assert!(again == outputs[first], "{}: {threads} threads", cpu.isa().name());
                let first = outputs[first].clone();
                let output = &mut outputs[usize::from(step.problem() == large.problem())];
                backend::run(&mut *layer, step, output).unwrap();
                assert!(*output == first, "{}: rerun", cpu.isa().name());
            }
        }
    }
}

#[test]
fn steps_and_outputs_of_other_sizes_are_refused() {
    let sizes = |n, m| [Group { m, n, k: 32 }];
    generated(Generator::Gaussian, Op::Plain, &sizes(8, 2), TokenDtype::F16, |weights, step| {
        let mut layer = Cpu::new().prepare(weights).unwrap();
        assert!(layer.execute(step, &mut Output::new(step.problem())).is_ok());
        for (n, m, dtype) in [(8, 3, TokenDtype::F16), (8, 2, TokenDtype::Bf16)] {
            generated(Generator::Gaussian, Op::Plain, &sizes(n, m), dtype, |_, other| {
                assert!(layer.execute(step, &mut Output::new(other.problem())).is_err());
            });
        }
        for op in [Op::Plain, Op::Gated] {
            generated(Generator::Gaussian, op, &sizes(16, 2), TokenDtype::F16, |_, other| {
                assert!(layer.execute(other, &mut Output::new(other.problem())).is_err());
            });
        }
    });
}

/// A small layer with a shared expert, whose widths are not multiples of a chunk, and inputs for the layer.
fn layer(dtype: TokenDtype, generator: Generator, tokens: usize) -> (MoeWeights<'static>, MoeInputs<'static>) {
    let shape =
        r#"{"hidden": 336, "intermediate": 176, "experts": 3, "top_k": 2, "shared_intermediate": 80, "tokens": 0}"#;
    let shape: LayerShape = moe::shape::parse(shape).unwrap().remove(0);
    let weights = moe::generate::weights(&shape, generator, dtype, 1, &|| ()).unwrap();
    (weights, moe::generate::inputs(&shape, generator, Routing::Zipf, dtype, tokens, 2).unwrap())
}

fn run_layer(cpu: Cpu, weights: &MoeWeights<'_>, inputs: &MoeInputs<'_>) -> MoeOutput {
    let step = MoeStep::new(weights, inputs.clone()).unwrap();
    let mut output = MoeOutput::with_stages(&step);
    cpu.prepare_moe(weights).unwrap().execute(&step, &mut output).unwrap();
    output
}

#[test]
fn all_instruction_sets_give_the_same_layer_bits() {
    for dtype in [TokenDtype::F16, TokenDtype::Bf16] {
        // With this number of tokens, an expert has more tokens than a tile.
        for (generator, tokens) in [(Generator::Gaussian, 300), (Generator::AllCodes, 21)] {
            let (weights, inputs) = layer(dtype, generator, tokens);
            let outputs: Vec<_> = cpus().map(|cpu| (cpu, run_layer(cpu, &weights, &inputs))).collect();
            let step = MoeStep::new(&weights, inputs).unwrap();
            let found = moe::compare::compare(&weights, &step, &outputs[0].1);
            assert!(found.passed(), "{}: {}", outputs[0].0.isa().name(), found.first().unwrap());
            for (cpu, output) in &outputs {
                assert!(*output == outputs[0].1, "{} differs from {}", cpu.isa().name(), outputs[0].0.isa().name());
            }
        }
    }
}

#[test]
fn arbitrary_token_bits_agree_on_all_instruction_sets() {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(1);
    for dtype in [TokenDtype::F16, TokenDtype::Bf16] {
        let (weights, mut inputs) = layer(dtype, Generator::AllCodes, 64);
        let (infinity, sign) = (dtype.round_f32(f32::INFINITY), 0x8000);
        for (token, hidden) in inputs.hidden.to_mut().chunks_mut(336).enumerate() {
            for bits in hidden {
                let number: u16 = random.random();
                *bits = match token % 4 {
                    // Random bits include infinities, NaN, subnormal numbers and numbers whose products overflow.
                    0 => number,
                    1 => number & (sign | 0x7F),
                    2 => (infinity - 1 - (number & 0x1FF)) | number & sign,
                    _ => {
                        if number & !sign < infinity {
                            number
                        } else {
                            0
                        }
                    }
                };
            }
        }
        let outputs: Vec<_> = cpus().map(|cpu| (cpu, run_layer(cpu, &weights, &inputs))).collect();
        for (cpu, output) in &outputs {
            assert!(*output == outputs[0].1, "{} differs from {}", cpu.isa().name(), outputs[0].0.isa().name());
        }
    }
}

#[test]
fn extreme_ordinary_numbers_agree_on_all_instruction_sets() {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(2);
    // Exponents of bf16 tokens: sums overflow; all ordinary exponents; the smallest ordinary one; the largest that is
    // not ordinary.
    for (first, count) in [(0xFC, 3), (18, 237), (18, 1), (17, 1)] {
        let (weights, mut inputs) = layer(TokenDtype::Bf16, Generator::AllCodes, 64);
        for bits in inputs.hidden.to_mut() {
            let number: u16 = random.random();
            *bits = number & 0x807F | (first + number / 0x80 % count) << 7;
        }
        let numbers = inputs.hidden.as_chunks().0.as_chunks().0;
        assert_eq!(Bf16::are_ordinary(numbers), first >= 18);
        let outputs: Vec<_> = cpus().map(|cpu| (cpu, run_layer(cpu, &weights, &inputs))).collect();
        for (cpu, output) in &outputs {
            let first_cpu = outputs[0].0.isa().name();
            assert!(
                *output == outputs[0].1,
                "{} differs from {first_cpu} for exponents from {first} on",
                cpu.isa().name()
            );
        }
    }
}

#[test]
fn token_bits_do_not_depend_on_batch_or_threads() {
    let (weights, inputs) = layer(TokenDtype::Bf16, Generator::Gaussian, 37);
    for cpu in cpus() {
        let all = run_layer(cpu, &weights, &inputs).hidden;
        for count in [1, 2, 3, 4, 5, 9] {
            let first = 37 - count;
            let some = MoeInputs {
                tokens: count,
                hidden: inputs.hidden[first * 336..].into(),
                ids: inputs.ids[first * 2..].into(),
                weights: inputs.weights[first * 2..].into(),
                shared_weights: inputs.shared_weights.as_ref().map(|weights| weights[first..].into()),
                ..inputs
            };
            let pool = rayon::ThreadPoolBuilder::new().num_threads(count).build().unwrap();
            let hidden = pool.install(|| run_layer(cpu, &weights, &some).hidden);
            assert!(hidden == all[first * 336..], "{}: the last {count} tokens", cpu.isa().name());
        }
    }
}
