//! `cargo xtask accuracy`: writes `benches/lab/accuracy.md`, the errors that the types of weights and tokens cause against an
//! unquantized layer. Pure arithmetic on the host.

use anyhow::Context;
use nvfp4::format::{BLOCK, Matrix, e2m1, e4m3};
use nvfp4::fp8::{self, FOLD, Factors, folded_row};
use nvfp4::moe::oracle::product;
use nvfp4::problem::{TokenDtype, TokenFormat};
use nvfp4::quantize::{global_scale, quantize, quantize_with};
use nvfp4::quantized::QuantizedRows;
use rand::SeedableRng;
use rand_distr::{Distribution, StandardNormal, StudentT};
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::{
    document::{self, Mode},
    table::Table,
};

/// Renew benches/lab/accuracy.md: the error of W4A16, W4A8 and W4A4 on layers of several distributions
#[derive(clap::Args)]
pub struct Args {
    /// Fail if the page is out of date
    #[arg(long)]
    check: bool,
}

const PAGE: &str = "benches/lab/accuracy.md";
const TEMPLATE: &str = include_str!("accuracy.md");
const COMMAND: &str = "cargo xtask accuracy";

/// Elements per token.
const HIDDEN: usize = 4096;

/// Rows of gate and of up.
const INTERMEDIATE: usize = 1024;

/// Tokens of the layer.
const TOKENS: usize = 16;

/// Distance of the outlier channels of a token.
const OUTLIER_DISTANCE: usize = 128;

/// Factor by which an outlier channel is larger.
const OUTLIER: f32 = 30.0;

/// Largest block scales to try. ModelOpt's global scale makes it 448.
const LARGEST_SCALES: [f32; 6] = [448.0, 56.0, 7.0, 0.875, 0.109_375, 0.013_671_875];

/// Distribution of the weights and tokens.
#[derive(Clone, Copy)]
enum Numbers {
    /// Normally distributed weights and tokens.
    Gaussian,
    /// Weights and tokens that follow Student's t with four degrees of freedom.
    HeavyTails,
    /// Normally distributed weights and tokens; a few channels of every token are larger.
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

    /// Draws `count` numbers of variance 1, without outliers.
    fn draw(self, count: usize, rng: &mut Xoshiro256PlusPlus) -> anyhow::Result<Vec<f32>> {
        Ok(match self {
            Self::HeavyTails => {
                // The variance of Student's t with four degrees of freedom is 2.
                let distribution = StudentT::new(4.0f32).context("invalid degrees of freedom")?;
                (0..count).map(|_| distribution.sample(rng) * std::f32::consts::FRAC_1_SQRT_2).collect()
            }
            _ => (0..count).map(|_| StandardNormal.sample(rng)).collect(),
        })
    }

    /// Draws a matrix of weights whose products with a token are as large as the token.
    fn weights(self, rows: usize, k: usize, rng: &mut Xoshiro256PlusPlus) -> anyhow::Result<Weights> {
        let mut numbers = self.draw(rows * k, rng)?;
        numbers.iter_mut().for_each(|number| *number /= (k as f32).sqrt());
        let matrix = quantize(&numbers, rows, k)?;
        Ok(Weights { numbers, matrix })
    }

    /// Draws a matrix of weights with a global scale that makes its largest block scale `largest`.
    fn weights_of_scales(self, rows: usize, largest: f32, rng: &mut Xoshiro256PlusPlus) -> anyhow::Result<Weights> {
        let Weights { numbers, .. } = self.weights(rows, HIDDEN, rng)?;
        let global = global_scale(&numbers)? * (e4m3::MAX / largest);
        let matrix = quantize_with(&numbers, rows, HIDDEN, global)?;
        Ok(Weights { numbers, matrix })
    }

    /// Draws tokens and rounds them to bf16.
    fn tokens(self, rng: &mut Xoshiro256PlusPlus) -> anyhow::Result<Rows> {
        let mut numbers = self.draw(TOKENS * HIDDEN, rng)?;
        if let Self::OutlierChannels = self {
            numbers.iter_mut().step_by(OUTLIER_DISTANCE).for_each(|number| *number *= OUTLIER);
        }
        let rows = numbers.chunks(HIDDEN).map(|row| row.iter().map(|&number| f64::from(number)).collect());
        Ok(Tokens::Bf16.rounded(rows.collect())?.numbers)
    }
}

/// One row per token.
type Rows = Vec<Vec<f64>>;

/// Rows after rounding to a token type.
struct Rounded {
    numbers: Rows,
    /// Codes and scales of e4m3 rows. `None`: another type.
    codes: Option<QuantizedRows>,
}

/// A matrix before and after quantization.
struct Weights {
    numbers: Vec<f32>,
    matrix: Matrix<'static>,
}

/// How weights are decoded, and how products are added.
#[derive(Clone, Copy)]
enum Decoded {
    /// Weights before quantization.
    Unquantized,
    /// Exact e2m1 × e4m3.
    Exact,
    /// The exact weight / 8, rounded to e4m3.
    Folded,
    /// Like [`Self::Folded`], with the largest power of two that the matrix's largest scale allows instead of 8.
    FoldedByOwnPower,
    /// Like [`Self::Folded`], with sums as on Hopper's tensor cores ([`fp8::sum`]). After every `promoted` columns, a
    /// multiple of 64, the sum is added in f32.
    FoldedOnHopper { promoted: usize },
}

impl Weights {
    /// Returns the codes of a folded row.
    fn folded(&self, row: usize) -> Vec<u8> {
        let mut codes = vec![0; self.matrix.k()];
        folded_row(&self.matrix, row, &mut codes);
        codes
    }

    /// Decodes a row into `out`.
    fn row(&self, row: usize, decoded: Decoded, out: &mut [f64]) {
        let (k, global) = (out.len(), f64::from(self.matrix.global_scale()));
        let mut numbers = vec![0.0; k];
        let scale = match decoded {
            Decoded::Unquantized => {
                numbers.copy_from_slice(&self.numbers[row * k..][..k]);
                1.0
            }
            Decoded::Exact => {
                self.matrix.numbers_row(row, &mut numbers);
                global
            }
            Decoded::FoldedByOwnPower => {
                self.matrix.numbers_row(row, &mut numbers);
                let largest = self.matrix.scales().iter().map(|&scale| e4m3::decode(scale)).fold(0.0, f32::max);
                let fold = FOLD / (e4m3::MAX / largest).log2().floor().exp2();
                let fold_one = |number: &mut f32| *number = e4m3::decode(e4m3::encode_signed(*number / fold));
                numbers.iter_mut().for_each(fold_one);
                f64::from(fold) * global
            }
            Decoded::Folded | Decoded::FoldedOnHopper { .. } => {
                numbers.iter_mut().zip(self.folded(row)).for_each(|(number, code)| *number = e4m3::decode(code));
                f64::from(FOLD) * global
            }
        };
        out.iter_mut().zip(numbers).for_each(|(out, number)| *out = f64::from(number) * scale);
    }

    /// Returns the products of every token with every row.
    fn multiply(&self, tokens: &Rounded, decoded: Decoded) -> Rows {
        if let (Decoded::FoldedOnHopper { promoted }, Some(codes)) = (decoded, &tokens.codes) {
            return self.multiply_on_hopper(codes, promoted);
        }
        let (rows, k) = (self.matrix.rows(), self.matrix.k());
        let (mut weights, mut products) = (vec![0.0; k], vec![vec![0.0; rows]; tokens.numbers.len()]);
        for row in 0..rows {
            self.row(row, decoded, &mut weights);
            for (token, products) in tokens.numbers.iter().zip(&mut products) {
                products[row] = product(token, &weights, 1.0).value;
            }
        }
        products
    }

    /// Returns the products with folded weights, with the bits of Hopper's sums.
    fn multiply_on_hopper(&self, tokens: &QuantizedRows, promoted: usize) -> Rows {
        let (k, global) = (self.matrix.k(), self.matrix.global_scale());
        let parts = |codes: &[u8]| -> Vec<Factors> { codes.chunks(promoted.min(k)).map(Factors::new).collect() };
        let weights: Vec<_> = (0..self.matrix.rows()).map(|row| parts(&self.folded(row))).collect();
        let of_token = |(codes, &scale): (&[u8], &f32)| {
            let token = parts(codes);
            let sum = |row: &Vec<Factors>| token.iter().zip(row).map(|(a, b)| fp8::sum(a, b)).sum();
            weights.iter().map(|row| f64::from(fp8::scaled(sum(row), scale, global, None))).collect()
        };
        tokens.codes.chunks(k).zip(&tokens.scales).map(of_token).collect()
    }
}

/// Type that tokens and the intermediate are rounded to.
#[derive(Clone, Copy)]
enum Tokens {
    /// No rounding.
    Exact,
    Bf16,
    /// e4m3 with one scale per token: its largest magnitude / 448.
    Fp8,
    /// NVFP4 with an input scale as calibration on these tokens finds it: the largest magnitude of all tokens / 2688.
    Nvfp4,
    /// NVFP4 with one global scale per token.
    Nvfp4PerToken,
}

impl Tokens {
    fn rounded(self, rows: Rows) -> anyhow::Result<Rounded> {
        const DTYPE: TokenDtype = TokenDtype::Bf16;
        let k = rows[0].len();
        let numbers = match self {
            Self::Exact => rows,
            Self::Bf16 => {
                let round = |number: f64| DTYPE.decode(DTYPE.round(number));
                rows.into_iter().map(|row| row.into_iter().map(round).collect()).collect()
            }
            Self::Fp8 => {
                let bits: Vec<u16> = rows.iter().flatten().map(|&number| DTYPE.round(number)).collect();
                let codes = QuantizedRows::of(TokenFormat::Fp8, DTYPE, &bits, k, None);
                let row = |(codes, &scale): (&[u8], &f32)| {
                    codes.iter().map(|&code| f64::from(e4m3::decode(code)) * f64::from(scale)).collect()
                };
                let numbers = codes.codes.chunks(k).zip(&codes.scales).map(row).collect();
                return Ok(Rounded { numbers, codes: Some(codes) });
            }
            Self::Nvfp4 | Self::Nvfp4PerToken => {
                let bits: Vec<u16> = rows.iter().flatten().map(|&number| DTYPE.round(number)).collect();
                let largest = rows.iter().flatten().fold(0.0f64, |largest, number| largest.max(number.abs()));
                let input_scale = (largest as f32) / (e2m1::MAX * e4m3::MAX);
                let input_scale = matches!(self, Self::Nvfp4).then_some(input_scale);
                let QuantizedRows { codes, block_scales, scales } =
                    QuantizedRows::of(TokenFormat::Nvfp4, DTYPE, &bits, k, input_scale);
                let number = |(index, &code): (usize, &u8)| {
                    let block = f64::from(e4m3::decode(block_scales[index / BLOCK]));
                    f64::from(e2m1::decode(code)) * block * f64::from(scales[index / k])
                };
                let numbers: Vec<f64> = codes.iter().enumerate().map(number).collect();
                numbers.chunks(k).map(<[f64]>::to_vec).collect()
            }
        };
        Ok(Rounded { numbers, codes: None })
    }
}

/// The matrices gate, up and down.
struct Layer([Weights; 3]);

impl Layer {
    /// Returns the products of up, and the layer's result.
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

/// Root mean square of the differences, divided by the root mean square of the wanted numbers.
fn error(got: &Rows, want: &Rows) -> f64 {
    let (mut noise, mut signal) = (0.0, 0.0);
    for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
        noise += (got - want) * (got - want);
        signal += want * want;
    }
    (noise / signal).sqrt()
}

/// Compares one power of two for all matrices with one per matrix: errors of a product, by largest scale of the
/// weights.
fn table_of_scales() -> anyhow::Result<Table> {
    let ways = [
        ("W4A16", Decoded::Exact, Tokens::Bf16),
        ("W4A8, exact", Decoded::Exact, Tokens::Fp8),
        ("folded", Decoded::Folded, Tokens::Fp8),
        ("by own power", Decoded::FoldedByOwnPower, Tokens::Fp8),
    ];
    let header: Vec<_> = ["numbers", "largest scale"].into_iter().chain(ways.map(|(name, ..)| name)).collect();
    let mut table = Table::new(1, &header);
    for (numbers, largest) in Numbers::ALL.into_iter().flat_map(|of| LARGEST_SCALES.map(|largest| (of, largest))) {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(0);
        let weights = numbers.weights_of_scales(INTERMEDIATE / 4, largest, &mut rng)?;
        let tokens = numbers.tokens(&mut rng)?;
        let product =
            |decoded, types: Tokens| Ok::<_, anyhow::Error>(weights.multiply(&types.rounded(tokens.clone())?, decoded));
        let want = product(Decoded::Unquantized, Tokens::Exact)?;
        let mut row = vec![numbers.name().to_owned(), format!("{largest:.3}")];
        for (_, decoded, types) in ways {
            row.push(format!("{:.3} %", 100.0 * error(&product(decoded, types)?, &want)));
        }
        table.push(row);
    }
    Ok(table)
}

/// Computes every layer in every type, and writes or checks the page.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let types = [
        ("W4A16", Decoded::Exact, Tokens::Bf16),
        ("W4A8, exact", Decoded::Exact, Tokens::Fp8),
        ("folded", Decoded::Folded, Tokens::Fp8),
        ("on Hopper", Decoded::FoldedOnHopper { promoted: usize::MAX }, Tokens::Fp8),
        ("by 512", Decoded::FoldedOnHopper { promoted: 512 }, Tokens::Fp8),
        ("W4A4", Decoded::Exact, Tokens::Nvfp4),
        ("per token", Decoded::Exact, Tokens::Nvfp4PerToken),
    ];
    let header: Vec<_> = ["numbers", "of"].into_iter().chain(types.map(|(name, ..)| name)).collect();
    let mut table = Table::new(2, &header);
    for numbers in Numbers::ALL {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(0);
        let mut weights = |rows, k| numbers.weights(rows, k, &mut rng);
        let layer =
            Layer([weights(INTERMEDIATE, HIDDEN)?, weights(INTERMEDIATE, HIDDEN)?, weights(HIDDEN, INTERMEDIATE)?]);
        let tokens = numbers.tokens(&mut rng)?;
        let want = layer.run(&tokens, Decoded::Unquantized, Tokens::Exact)?;
        let results = types.map(|(_, decoded, types)| layer.run(&tokens, decoded, types));
        let results = results.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
        for (stage, name) in ["one product", "the layer"].into_iter().enumerate() {
            let errors = results.iter().map(|got| format!("{:.2} %", 100.0 * error(&got[stage], &want[stage])));
            table.push([numbers.name().to_owned(), name.to_owned()].into_iter().chain(errors).collect());
        }
    }
    let page = TEMPLATE.replace("{table}", &table.to_string()).replace("{scales}", &table_of_scales()?.to_string());
    document::whole(PAGE, &page, if args.check { Mode::Check } else { Mode::Write }, COMMAND)
}
