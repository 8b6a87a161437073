//! Inputs generated from a seed: the two kinds of the kernel competition, one that resembles a model, and one with
//! every code.
//!
//! Every row has its own random generator, so the same seed gives the same bytes on any number of threads.

use rand::{Rng, RngExt, SeedableRng};
use rand_distr::{Distribution, StandardNormal};
use rand_xoshiro::Xoshiro256PlusPlus;
use rayon::prelude::*;

use crate::error::Error;
use crate::format::{BLOCK, Matrix, e4m3};
use crate::problem::{Expert, Group, Op, Weights};
use crate::quantize::quantize;

/// Kind of generated inputs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Generator {
    /// Inputs of the competition's dual GEMM: values up to ±1.5, scales uniform in [0, 1).
    PublicDual,
    /// Inputs of the competition's grouped GEMM: values up to ±1.5, scales 1 and 2.
    PublicGroup,
    /// Quantized normal numbers like in a model: tokens ~ N(0, 1) and weights ~ N(0, 1/K).
    #[default]
    Gaussian,
    /// Every value and every scale; global scales keep the outputs finite in f16.
    AllCodes,
}

impl Generator {
    /// Every generator.
    pub const ALL: [Self; 4] = [Self::PublicDual, Self::PublicGroup, Self::Gaussian, Self::AllCodes];

    /// Name of the generator on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::PublicDual => "public-dual",
            Self::PublicGroup => "public-group",
            Self::Gaussian => "gaussian",
            Self::AllCodes => "all-codes",
        }
    }
}

/// Role of a matrix; each role has its own random numbers.
#[derive(Clone, Copy)]
pub enum Role {
    /// Tokens of a group.
    Tokens,
    /// Weights of the gate projection, or of the only projection.
    Gate,
    /// Weights of the up projection.
    Up,
    /// Weights of the down projection.
    Down,
}

/// Generates weights for the groups of a shape.
///
/// # Errors
/// Returns an error if the sizes are not valid.
pub fn weights(generator: Generator, op: Op, groups: &[Group], seed: u64) -> Result<Weights<'static>, Error> {
    let experts = groups.iter().enumerate().map(|(group, sizes)| expert(generator, op, group, sizes, seed));
    Weights::new(op, experts.collect::<Result<_, Error>>()?)
}

/// Generates the weights of one group.
///
/// # Errors
/// Returns an error if the sizes are not valid.
pub fn expert(generator: Generator, op: Op, group: usize, sizes: &Group, seed: u64) -> Result<Expert<'static>, Error> {
    let matrix = |role| matrix(generator, role, group, sizes.n, sizes.k, seed);
    Ok(match op {
        Op::Gated => Expert::Gated { gate: matrix(Role::Gate)?, up: matrix(Role::Up)? },
        Op::Plain => Expert::Plain(matrix(Role::Gate)?),
    })
}

/// Generates activations for the groups of a shape.
///
/// # Errors
/// Returns an error if the sizes are not valid.
pub fn activations(generator: Generator, groups: &[Group], seed: u64) -> Result<Vec<Matrix<'static>>, Error> {
    let tokens = |(group, sizes): (usize, &Group)| matrix(generator, Role::Tokens, group, sizes.m, sizes.k, seed);
    groups.iter().enumerate().map(tokens).collect()
}

/// Returns the random generator of a row of a matrix. Seed and position select a stream; the constants are odd, so no
/// two positions of a matrix share a stream.
pub fn row_rng(seed: u64, group: usize, role: Role, row: usize) -> Xoshiro256PlusPlus {
    let tensor = (group as u64) << 2 | role as u64;
    let place = tensor.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (row as u64).wrapping_mul(0xD1B5_4A32_D192_ED03);
    Xoshiro256PlusPlus::seed_from_u64(seed.wrapping_mul(0xA24B_AED4_963E_E407) ^ place)
}

/// Generates a matrix `[rows, K]` of a group's inputs.
///
/// # Errors
/// Returns an error if the sizes are not valid.
pub fn matrix(
    generator: Generator,
    role: Role,
    group: usize,
    rows: usize,
    k: usize,
    seed: u64,
) -> Result<Matrix<'static>, Error> {
    if k == 0 || !k.is_multiple_of(BLOCK) {
        return Err(Error::BlockAlignment { k }.at(format_args!("group {group}")));
    }
    let row_rng = |row: usize| row_rng(seed, group, role, row);
    if generator == Generator::Gaussian {
        let deviation = match role {
            Role::Tokens => 1.0,
            Role::Gate | Role::Up | Role::Down => 1.0 / (k as f32).sqrt(),
        };
        let mut numbers = vec![0f32; rows * k];
        numbers.par_chunks_mut(k).enumerate().for_each(|(row, numbers)| {
            let mut rng = row_rng(row);
            for number in numbers {
                let normal: f32 = StandardNormal.sample(&mut rng);
                *number = deviation * normal;
            }
        });
        return quantize(&numbers, rows, k);
    }
    let (mut values, mut scales) = (vec![0; rows * k / 2], vec![0; rows * k / BLOCK]);
    values.par_chunks_mut(k / 2).zip(scales.par_chunks_mut(k / BLOCK)).enumerate().for_each(
        |(row, (values, scales))| {
            let mut rng = row_rng(row);
            rng.fill_bytes(values);
            if generator != Generator::AllCodes {
                values.iter_mut().for_each(|byte| *byte &= 0xBB);
            }
            for scale in scales {
                *scale = match generator {
                    Generator::PublicDual => e4m3::encode(rng.random::<f32>()),
                    Generator::PublicGroup => e4m3::encode(f32::from(rng.random_range(1..=2u8))),
                    _ => rng.random_range(0..=e4m3::MAX_CODE),
                };
            }
        },
    );
    let global = if generator == Generator::AllCodes { all_codes_global_scale(role, k) } else { 1.0 };
    Matrix::new(rows, k, values, scales, global)
}

/// Returns a global scale for pre-activations of a few units: their standard deviation is about 8 for gate and 2 for
/// up. The product of silu(gate) and up has about 11, and down projections of it again have a few units.
fn all_codes_global_scale(role: Role, k: usize) -> f32 {
    /// Root mean square of `e2m1 × e4m3` over all codes and scales.
    const NUMBER_RMS: f32 = 292.8;
    let dot_product_rms = NUMBER_RMS * NUMBER_RMS * (k as f32).sqrt();
    match role {
        Role::Tokens => dot_product_rms.sqrt().recip(),
        Role::Gate => 8.0 * dot_product_rms.sqrt().recip(),
        Role::Up => 2.0 * dot_product_rms.sqrt().recip(),
        Role::Down => 4.0 / (11.0 * NUMBER_RMS * (k as f32).sqrt()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::e2m1;

    fn sample(generator: Generator, role: Role) -> Matrix<'static> {
        matrix(generator, role, 3, 64, 512, 7).unwrap()
    }

    fn deviation(numbers: impl Iterator<Item = f64>) -> f64 {
        let (count, squares) = numbers.fold((0.0, 0.0), |(count, squares), x| (count + 1.0, squares + x * x));
        f64::sqrt(squares / count)
    }

    #[test]
    fn public_generators_draw_from_their_documented_ranges() {
        for (generator, allowed) in
            [(Generator::PublicDual, 0..=e4m3::encode(1.0)), (Generator::PublicGroup, 0x38..=0x40)]
        {
            let matrix = sample(generator, Role::Gate);
            let largest = matrix.values().iter().map(|&byte| e2m1::decode(byte).max(e2m1::decode(byte >> 4)));
            assert_eq!(largest.fold(0.0, f32::max), 1.5);
            assert!(matrix.scales().iter().all(|scale| allowed.contains(scale)));
            let first = matrix.scales()[0];
            assert!(matrix.scales().iter().any(|&scale| scale != first));
        }
    }

    #[test]
    fn all_codes_holds_every_code_with_moderate_dot_products() {
        let (tokens, gate) = (sample(Generator::AllCodes, Role::Tokens), sample(Generator::AllCodes, Role::Gate));
        for code in 0..=e4m3::MAX_CODE {
            assert!(gate.scales().contains(&code));
        }
        let weights = Weights::new(Op::Plain, vec![Expert::Plain(gate)]).unwrap();
        let step = crate::problem::Step::new(&weights, vec![tokens], crate::problem::TokenDtype::F16).unwrap();
        let reference = crate::oracle::Reference::new(&weights, &step);
        let deviation = deviation(reference.pre_activations(0)[0].iter().copied());
        assert!((7.0..9.0).contains(&deviation), "{deviation}");
    }

    #[test]
    fn gaussian_deviation_depends_on_the_role() {
        let numbers = |matrix: &Matrix<'_>| -> Vec<f32> {
            let mut numbers = vec![0.0; matrix.rows() * matrix.k()];
            numbers.chunks_mut(matrix.k()).enumerate().for_each(|(row, out)| matrix.dequantize_row(row, out));
            numbers
        };
        let (tokens, gate, up) = (Role::Tokens, Role::Gate, Role::Up);
        let [tokens, gate, up] = [tokens, gate, up].map(|role| numbers(&sample(Generator::Gaussian, role)));
        let of = |numbers: &[f32]| deviation(numbers.iter().map(|&x| f64::from(x)));
        assert!((0.97..1.03).contains(&of(&tokens)), "{}", of(&tokens));
        assert!((0.97..1.03).contains(&(of(&gate) * 512f64.sqrt())));
        assert!(gate != up && gate[..512] != gate[512..1024]);
    }

    #[test]
    fn bytes_do_not_depend_on_the_number_of_threads() {
        for generator in Generator::ALL {
            let on = |threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| sample(generator, Role::Up))
            };
            assert_eq!(on(1), on(5));
        }
    }
}
