//! `cargo xtask accuracy`: writes `docs/accuracy.md`: what the types of weights and tokens cost, against a layer that nothing was
//! quantised in. Pure arithmetic on the host.

use anyhow::Context;
use nvfp4::format::{Matrix, e4m3};
use nvfp4::moe::oracle::product;
use nvfp4::problem::OutDtype;
use nvfp4::quantize::quantize;
use ptx_emulator::hw::{descriptor::Element, fp8};
use rand::SeedableRng;
use rand_distr::{Distribution, StandardNormal, StudentT};
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::{
    document::{self, Mode},
    table::Table,
};

/// Renew docs/accuracy.md: the error of W4A16, W4A8 and W4A4 on layers of several distributions
#[derive(clap::Args)]
pub struct Args {
    /// Fail if the page is not what the command makes of it now
    #[arg(long)]
    check: bool,
}

const PAGE: &str = "docs/accuracy.md";
const TEMPLATE: &str = include_str!("accuracy.md");
const COMMAND: &str = "cargo xtask accuracy";

/// Elements of a token.
const HIDDEN: usize = 4096;

/// Rows of gate and up.
const INTERMEDIATE: usize = 1024;

/// Tokens of a layer.
const TOKENS: usize = 16;

/// Every so many channels of the tokens, one is an outlier.
const OUTLIER_DISTANCE: usize = 128;

/// How much larger it is.
const OUTLIER: f32 = 30.0;

/// What a scale takes of a folded weight: e2m1 × e4m3 is at most 2688, and e4m3 448.
const FOLD: f32 = 8.0;

/// What numbers are like.
#[derive(Clone, Copy)]
enum Numbers {
    /// Weights and tokens are normally distributed.
    Gaussian,
    /// Both are distributed as Student's t with four degrees of freedom.
    HeavyTails,
    /// Both are normally distributed, but a few channels of every token are large.
    OutlierChannels,
}

impl Numbers {
    const ALL: [Self; 3] = [Self::Gaussian, Self::HeavyTails, Self::OutlierChannels];

    const fn name(self) -> &'static str {
        match self {
            Self::Gaussian => "Gaussian",
            Self::HeavyTails => "heavy tails",
            Self::OutlierChannels => "outlier channels",
        }
    }

    /// So many numbers of variance about 1, as they are without outliers.
    fn draw(self, count: usize, rng: &mut Xoshiro256PlusPlus) -> anyhow::Result<Vec<f32>> {
        Ok(match self {
            Self::HeavyTails => {
                // Its variance is 2.
                let distribution = StudentT::new(4.0f32).context("degrees of freedom")?;
                (0..count).map(|_| distribution.sample(rng) * std::f32::consts::FRAC_1_SQRT_2).collect()
            }
            _ => (0..count).map(|_| StandardNormal.sample(rng)).collect(),
        })
    }

    /// A matrix of weights, of which a product with a token has the token's size.
    fn weights(self, rows: usize, k: usize, rng: &mut Xoshiro256PlusPlus) -> anyhow::Result<Weights> {
        let mut numbers = self.draw(rows * k, rng)?;
        numbers.iter_mut().for_each(|number| *number /= (k as f32).sqrt());
        let matrix = quantize(&numbers, rows, k)?;
        Ok(Weights { numbers, matrix })
    }

    /// Tokens as bf16.
    fn tokens(self, rng: &mut Xoshiro256PlusPlus) -> anyhow::Result<Rows> {
        let mut numbers = self.draw(TOKENS * HIDDEN, rng)?;
        if let Self::OutlierChannels = self {
            numbers.iter_mut().step_by(OUTLIER_DISTANCE).for_each(|number| *number *= OUTLIER);
        }
        let rows = numbers.chunks(HIDDEN).map(|row| row.iter().map(|&number| f64::from(number)).collect());
        Tokens::Bf16.rounded(rows.collect())
    }
}

/// A token a row.
type Rows = Vec<Vec<f64>>;

/// A matrix, before and after it was quantised.
struct Weights {
    numbers: Vec<f32>,
    matrix: Matrix<'static>,
}

/// What weights are multiplied as, and how products are added.
#[derive(Clone, Copy)]
enum Decoded {
    /// As they were before they were quantised.
    Unquantised,
    /// e2m1 × e4m3, exact.
    Exact,
    /// That, rounded to e4m3.
    Folded,
    /// That, added as Hopper's tensor cores do ([`fp8`]): after so many columns in f32.
    FoldedOnHopper { promoted: usize },
}

/// Columns of a product of the tensor core.
const STEP: usize = 32;

impl Weights {
    /// The code of a folded weight.
    fn folded(number: f32) -> u8 {
        e4m3_code(number / FOLD)
    }

    /// The numbers of a row.
    fn row(&self, row: usize, decoded: Decoded, scratch: &mut [f32], out: &mut [f64]) {
        let global = self.matrix.global_scale();
        match decoded {
            Decoded::Unquantised => scratch.copy_from_slice(&self.numbers[row * scratch.len()..][..scratch.len()]),
            _ => self.matrix.numbers_row(row, scratch),
        }
        for (out, &mut number) in out.iter_mut().zip(scratch) {
            *out = match decoded {
                Decoded::Unquantised => f64::from(number),
                Decoded::Exact => f64::from(number) * f64::from(global),
                _ => f64::from(e4m3::decode(Self::folded(number)) * FOLD) * f64::from(global),
            };
        }
    }

    /// The products of every token with every row.
    fn multiply(&self, tokens: &Rows, decoded: Decoded) -> Rows {
        if let Decoded::FoldedOnHopper { promoted } = decoded {
            return self.multiply_on_hopper(tokens, promoted);
        }
        let (rows, k) = (self.matrix.rows(), self.matrix.k());
        let (mut scratch, mut weights) = (vec![0.0; k], vec![0.0; k]);
        let mut products = vec![vec![0.0; rows]; tokens.len()];
        for row in 0..rows {
            self.row(row, decoded, &mut scratch, &mut weights);
            for (token, products) in tokens.iter().zip(&mut products) {
                products[row] = product(token, &weights, 1.0).value;
            }
        }
        products
    }

    /// As [`Self::multiply`], folded, with the bits of Hopper's sums.
    fn multiply_on_hopper(&self, tokens: &Rows, promoted: usize) -> Rows {
        let (rows, k) = (self.matrix.rows(), self.matrix.k());
        let mut numbers = vec![0.0; k];
        let weights = (0..rows).map(|row| {
            self.matrix.numbers_row(row, &mut numbers);
            numbers.iter().copied().map(Self::folded).collect()
        });
        let weights: Vec<Vec<u8>> = weights.collect();
        let scales: Vec<f64> = tokens.iter().map(|row| token_scale(row)).collect();
        let code = |(row, scale): (&Vec<f64>, &f64)| row.iter().map(|x| e4m3_code((x / scale) as f32)).collect();
        let tokens: Vec<Vec<u8>> = tokens.iter().zip(&scales).map(code).collect();
        let mut sums = vec![0.0f32; tokens.len() * rows];
        for first in (0..k).step_by(promoted) {
            let mut of_part = vec![0.0f32; sums.len()];
            for column in (first..k.min(first.saturating_add(promoted))).step_by(STEP) {
                let part =
                    |rows: &[Vec<u8>]| rows.iter().flat_map(|row| &row[column..column + STEP]).copied().collect();
                let (a, b): (Vec<u8>, Vec<u8>) = (part(&tokens), part(&weights));
                fp8::multiply_f32((Element::E4m3, &a), (Element::E4m3, &b), STEP, &mut of_part);
            }
            sums.iter_mut().zip(of_part).for_each(|(sum, of_part)| *sum += of_part);
        }
        let weight_scale = f64::from(FOLD) * f64::from(self.matrix.global_scale());
        let scaled =
            |(sums, scale): (&[f32], f64)| sums.iter().map(|&sum| f64::from(sum) * scale * weight_scale).collect();
        sums.chunks(rows).zip(scales).map(scaled).collect()
    }
}

/// The code of the e4m3 nearest to a number, ties to even.
fn e4m3_code(number: f32) -> u8 {
    e4m3::encode(number.abs()) | u8::from(number.is_sign_negative()) << 7
}

/// The scale of a token that is rounded to e4m3.
fn token_scale(row: &[f64]) -> f64 {
    row.iter().fold(0.0, |most: f64, number| most.max(number.abs())) / f64::from(e4m3::MAX)
}

/// What tokens, and the intermediate, are rounded to.
#[derive(Clone, Copy)]
enum Tokens {
    /// Not at all.
    Exact,
    Bf16,
    /// e4m3 with a scale for each token, its largest magnitude / 448.
    Fp8,
    /// NVFP4 with a global scale for all tokens.
    Nvfp4,
}

impl Tokens {
    fn rounded(self, rows: Rows) -> anyhow::Result<Rows> {
        Ok(match self {
            Self::Exact => rows,
            Self::Bf16 => {
                let round = |number: f64| OutDtype::Bf16.decode(OutDtype::Bf16.round(number));
                rows.into_iter().map(|row| row.into_iter().map(round).collect()).collect()
            }
            Self::Fp8 => {
                let round = |row: Vec<f64>| {
                    let scale = token_scale(&row);
                    let rounded = |number: f64| f64::from(e4m3::decode(e4m3_code((number / scale) as f32))) * scale;
                    row.into_iter().map(rounded).collect()
                };
                rows.into_iter().map(round).collect()
            }
            Self::Nvfp4 => {
                let k = rows[0].len();
                let numbers: Vec<f32> = rows.iter().flatten().map(|&number| number as f32).collect();
                let matrix = quantize(&numbers, rows.len(), k)?;
                let mut out = vec![0.0; k];
                let row = |row| {
                    matrix.dequantize_row(row, &mut out);
                    out.iter().map(|&number| f64::from(number)).collect()
                };
                (0..rows.len()).map(row).collect()
            }
        })
    }
}

/// Gate, up and down.
struct Layer([Weights; 3]);

impl Layer {
    /// The products of up, and the layer's result.
    fn run(&self, tokens: &Rows, decoded: Decoded, types: Tokens) -> anyhow::Result<[Rows; 2]> {
        let Self([gate, up, down]) = self;
        let tokens = types.rounded(tokens.clone())?;
        let (gates, ups) = (gate.multiply(&tokens, decoded), up.multiply(&tokens, decoded));
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let activated =
            |(gates, ups): (&Vec<f64>, &Vec<f64>)| gates.iter().zip(ups).map(|(&gate, &up)| silu(gate) * up).collect();
        let intermediate = types.rounded(gates.iter().zip(&ups).map(activated).collect())?;
        Ok([ups, down.multiply(&intermediate, decoded)])
    }
}

/// Root mean square of the differences, as a share of that of what is right.
fn error(got: &Rows, want: &Rows) -> f64 {
    let (mut noise, mut signal) = (0.0, 0.0);
    for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
        noise += (got - want) * (got - want);
        signal += want * want;
    }
    (noise / signal).sqrt()
}

/// Computes every layer in every type, and writes the page.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let types = [
        ("W4A16", Decoded::Exact, Tokens::Bf16),
        ("W4A8, exact", Decoded::Exact, Tokens::Fp8),
        ("folded", Decoded::Folded, Tokens::Fp8),
        ("on Hopper", Decoded::FoldedOnHopper { promoted: usize::MAX }, Tokens::Fp8),
        ("by 512", Decoded::FoldedOnHopper { promoted: 512 }, Tokens::Fp8),
        ("W4A4", Decoded::Exact, Tokens::Nvfp4),
    ];
    let header: Vec<_> = ["numbers", "of"].into_iter().chain(types.map(|(name, ..)| name)).collect();
    let mut table = Table::new(2, &header);
    for numbers in Numbers::ALL {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(0);
        let mut weights = |rows, k| numbers.weights(rows, k, &mut rng);
        let layer =
            Layer([weights(INTERMEDIATE, HIDDEN)?, weights(INTERMEDIATE, HIDDEN)?, weights(HIDDEN, INTERMEDIATE)?]);
        let tokens = numbers.tokens(&mut rng)?;
        let want = layer.run(&tokens, Decoded::Unquantised, Tokens::Exact)?;
        let results = types.map(|(_, decoded, types)| layer.run(&tokens, decoded, types));
        let results = results.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
        for (stage, name) in ["one product", "the layer"].into_iter().enumerate() {
            let errors = results.iter().map(|got| format!("{:.2} %", 100.0 * error(&got[stage], &want[stage])));
            table.push([numbers.name().to_owned(), name.to_owned()].into_iter().chain(errors).collect());
        }
    }
    let page = TEMPLATE.replace("{table}", &table.to_string());
    document::whole(PAGE, &page, if args.check { Mode::Check } else { Mode::Write }, COMMAND)
}
