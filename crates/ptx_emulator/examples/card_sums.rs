//! Compares the sums of a Hopper GPU with the emulator's, bit by bit. `benches/probes/sums.cu` draws the sums on the GPU
//! and writes them to a file. Operands follow from their numbers, so the file has results only.
//!
//! ```sh
//! cargo run --release -p ptx_emulator --example card_sums -- sums.bin
//! ```
//!
//! Exits with status 1 if a sum differs.

use std::io::Write;
use std::process::ExitCode;

use ptx_emulator::hw::descriptor::Element;
use ptx_emulator::hw::matmul::{Floats, Packing, multiply_f16, multiply_f32};
use ptx_emulator::hw::number::{BF16, E4M3, E5M2, F16, F32, Format, Specials, TF32};
use ptx_emulator::hw::sums::{Adder, Family, Instruction, Kind};
use rayon::prelude::*;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const A: u64 = 0;
const B: u64 = 1;
const C: u64 = 2;

/// Classes of numbers, as `sums.cu` draws them.
#[rustfmt::skip]
const CLASSES: [&str; 12] = [
    "alike", "spread", "all codes", "cancel", "subnormal", "special", "zeros", "large", "accumulator", "ties", "tiny", "tiny, no c",
];

/// A kind of product, in the order of the file.
struct Product {
    name: &'static str,
    instruction: Instruction,
    k: usize,
    sum: Format,
    a: Element,
    b: Element,
}

const fn product(
    name: &'static str,
    instruction: Instruction,
    k: usize,
    sum: Format,
    a: Element,
    b: Element,
) -> Product {
    Product { name, instruction, k, sum, a, b }
}

#[rustfmt::skip]
const PRODUCTS: [Product; 20] = {
    use {Element as E, Instruction::*};
    [
        product("mma f32 f16",          Mma,   16, F32, E::F16,  E::F16),
        product("mma f32 bf16",         Mma,   16, F32, E::Bf16, E::Bf16),
        product("mma f32 tf32",         Mma,   8,  F32, E::Tf32, E::Tf32),
        product("mma f16 f16",          Mma,   16, F16, E::F16,  E::F16),
        product("mma k8 f32 f16",       Mma,   8,  F32, E::F16,  E::F16),
        product("mma k8 f32 bf16",      Mma,   8,  F32, E::Bf16, E::Bf16),
        product("mma k4 f32 tf32",      Mma,   4,  F32, E::Tf32, E::Tf32),
        product("mma f32 e4m3",         Mma,   32, F32, E::E4m3, E::E4m3),
        product("mma f32 e5m2",         Mma,   32, F32, E::E5m2, E::E5m2),
        product("mma f32 e4m3 e5m2",    Mma,   32, F32, E::E4m3, E::E5m2),
        product("mma f16 e4m3",         Mma,   32, F16, E::E4m3, E::E4m3),
        product("mma k16 f32 e4m3",     Mma,   16, F32, E::E4m3, E::E4m3),
        product("wgmma f32 f16",        Wgmma, 16, F32, E::F16,  E::F16),
        product("wgmma f32 bf16",       Wgmma, 16, F32, E::Bf16, E::Bf16),
        product("wgmma f32 tf32",       Wgmma, 8,  F32, E::Tf32, E::Tf32),
        product("wgmma f16 f16",        Wgmma, 16, F16, E::F16,  E::F16),
        product("wgmma f32 e4m3",       Wgmma, 32, F32, E::E4m3, E::E4m3),
        product("wgmma f32 e5m2",       Wgmma, 32, F32, E::E5m2, E::E5m2),
        product("wgmma f32 e4m3 e5m2",  Wgmma, 32, F32, E::E4m3, E::E5m2),
        product("wgmma f16 e4m3",       Wgmma, 32, F16, E::E4m3, E::E4m3),
    ]
};

/// Columns of a tile.
const N: usize = 8;

/// One of 2⁶⁴ random numbers.
fn draw(kind: u64, class: u64, tile: u64, role: u64, index: u64) -> u64 {
    let x = (((kind * 16 + class) << 24 | tile) << 2 | role) << 13 | index;
    let x = x.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// The parts of a random number that choose a value.
struct Drawn {
    sign: u32,
    mantissa: u32,
    choice: u32,
    range: i32,
}

impl Drawn {
    fn new(h: u64) -> Drawn {
        Drawn {
            sign: h as u32 & 1,
            mantissa: (h >> 1) as u32 & 0x7f_ffff,
            choice: (h >> 25) as u32 & 127,
            range: ((h >> 32) as u32 >> 1) as i32,
        }
    }

    /// `first` plus a random number below `count`.
    fn from(&self, first: i32, count: i32) -> i32 {
        first + self.range % count
    }

    fn number(&self, f: &Format, exponent: i32, mantissa: u32) -> u32 {
        let ieee = f.specials == Specials::Ieee;
        let most = (1 << f.exponent_bits) - if ieee { 2 } else { 1 };
        let exponent = exponent.clamp(0, most);
        let all = (1 << f.mantissa_bits) - 1;
        let mut fraction = mantissa & all;
        if !ieee && exponent == most && fraction == all {
            fraction -= 1;
        }
        self.sign << (f.width() - 1) | (exponent as u32) << f.mantissa_bits | fraction
    }

    /// A number with this exponent field and any fraction.
    fn any(&self, f: &Format, exponent: i32) -> u32 {
        self.number(f, exponent, self.mantissa)
    }

    fn zero(&self, f: &Format) -> u32 {
        self.number(f, 0, 0)
    }

    fn special(&self, f: &Format, nan: bool) -> u32 {
        let bits = match f.infinity() {
            Some(infinity) if !nan => infinity,
            _ => f.sign_bit() - 1,
        };
        self.sign << (f.width() - 1) | bits as u32
    }
}

fn most(f: &Format) -> i32 {
    (1 << f.exponent_bits) - if f.specials == Specials::Ieee { 2 } else { 1 }
}

/// Bits of an element of A or B.
fn element(f: &Format, class: u64, role: u64, h: u64) -> u32 {
    let (x, bias, wide) = (Drawn::new(h), f.bias(), f.exponent_bits == 8);
    let any = if wide { x.from(bias - 60, 121) } else { x.from(0, most(f) + 1) };
    match class {
        0 => x.any(f, x.from(bias - 1, 3)),
        2 => x.any(f, any),
        4 if role == A => x.any(f, x.from(0, 3)),
        4 => x.any(f, if wide { x.from(bias - 20, 41) } else { any }),
        5 if x.choice < 2 => x.zero(f),
        5 if x.choice < 5 => x.special(f, x.choice == 4),
        6 if role == A && x.choice < 64 => x.zero(f),
        6 => x.any(f, if wide { x.from(bias - 50, 101) } else { any }),
        7 => x.any(f, if wide { x.from(bias + 62, 3) } else { most(f) - x.from(0, 3) }),
        9 => x.number(f, x.from(bias, 3), x.mantissa & !((1 << (f.mantissa_bits - 2)) - 1)),
        10 => x.any(f, if wide { x.from(bias - 75, 20) } else { x.from(0, 4) }),
        11 => x.any(f, if wide { x.from(bias - 75, 12) } else { x.from(0, 4) }),
        _ => x.any(f, x.from(bias - 10, 21)),
    }
}

/// Bits of an accumulator. `wide`: the elements of A and B have 8 exponent bits.
fn accumulator(f: &Format, wide: bool, class: u64, h: u64) -> u32 {
    let (x, bias, half) = (Drawn::new(h), f.bias(), f.exponent_bits == 5);
    match class {
        0 => x.any(f, x.from(bias - 1, 3)),
        2 if half => x.any(f, x.from(0, most(f) + 1)),
        2 => x.any(f, if wide { x.from(bias - 100, 201) } else { x.from(bias - 50, 81) }),
        3 if x.choice < 64 => x.zero(f),
        3 => x.any(f, x.from(bias - 20, 16)),
        4 if x.choice < 32 => x.zero(f),
        4 if half => x.any(f, x.from(0, 3)),
        4 => x.any(f, if wide || x.choice < 64 { x.from(0, 24) } else { x.from(bias - 50, 30) }),
        5 if x.choice < 8 => x.zero(f),
        5 if x.choice < 16 => x.special(f, x.choice >= 12),
        6 if x.choice < 32 => x.zero(f),
        6 => x.any(f, x.from(bias - 50, 101)),
        7 => x.any(f, most(f) - x.from(0, 5)),
        8 => x.any(f, x.from(bias - 30, 61)),
        9 => x.any(f, x.from(bias + 10, 8)),
        10 if x.choice < 64 => x.zero(f),
        10 => x.any(f, x.from(0, 10)),
        11 => x.zero(f),
        _ => x.any(f, x.from(bias - 10, 21)),
    }
}

/// The matrices of a tile, as the instruction reads them.
struct Tile {
    a: Vec<u8>,
    b: Vec<u8>,
    c: Vec<u32>,
}

impl Product {
    fn rows(&self) -> usize {
        if self.instruction == Instruction::Wgmma { 64 } else { 16 }
    }

    /// Bytes of an element of A or B: `line` is a row or a column.
    fn operand(&self, of: Element, (kind, class, tile): (u64, u64, u64), role: u64, line: usize, k: usize) -> Vec<u8> {
        let format = match of {
            Element::F16 => F16,
            Element::Bf16 => BF16,
            Element::Tf32 => TF32,
            Element::E4m3 => E4M3,
            _ => E5M2,
        };
        let from = if class == 3 { k & !1 } else { k };
        let h = draw(kind, class, tile, role, (line * self.k + from) as u64);
        let mut bits = element(&format, class, role, h);
        if class == 3 && role == A && k % 2 == 1 {
            bits ^= 1 << (format.width() - 1);
            bits ^= u32::from(h >> 60 < 2);
        }
        if of == Element::Tf32 {
            bits = bits << 13 | if class == 5 { 0 } else { (h >> 44) as u32 & 0x1fff };
        }
        bits.to_le_bytes()[..of.bits() as usize / 8].to_vec()
    }

    fn tile(&self, at @ (kind, class, tile): (u64, u64, u64)) -> Tile {
        let matrix = |of, role, rows: usize| -> Vec<u8> {
            let elements = (0..rows).flat_map(|line| (0..self.k).map(move |k| (line, k)));
            elements.flat_map(|(line, k)| self.operand(of, at, role, line, k)).collect()
        };
        let wide = matches!(self.a, Element::Bf16 | Element::Tf32);
        let c = |index| accumulator(&self.sum, wide, class, draw(kind, class, tile, C, index));
        Tile {
            a: matrix(self.a, A, self.rows()),
            b: matrix(self.b, B, N),
            c: (0..(self.rows() * N) as u64).map(c).collect(),
        }
    }

    /// Bits of the results. Without an adder, sums are exact and rounded once.
    fn multiply(&self, tile: &Tile, adder: Option<&Adder>) -> Vec<u32> {
        let a = Floats::decode(self.a, Packing::Dense, self.rows(), self.k, &tile.a);
        let b = Floats::decode(self.b, Packing::Dense, N, self.k, &tile.b);
        if self.sum == F16 {
            let mut d: Vec<u16> = tile.c.iter().map(|&bits| bits as u16).collect();
            multiply_f16(&a, &b, adder, &mut d);
            d.into_iter().map(u32::from).collect()
        } else {
            let mut d: Vec<f32> = tile.c.iter().map(|&bits| f32::from_bits(bits)).collect();
            multiply_f32(&a, &b, adder, &mut d);
            d.into_iter().map(f32::to_bits).collect()
        }
    }

    /// Describes the operands of the first sum of a tile that differs.
    fn describe(&self, tile: &Tile, ours: &[u32], card: &[u32]) -> String {
        let at = (0..ours.len()).find(|&index| ours[index] != card[index]).unwrap_or(0);
        let bytes = |matrix: &[u8], of: Element, line: usize| -> String {
            let width = of.bits() as usize / 8;
            let row = &matrix[line * self.k * width..][..self.k * width];
            row.chunks(width)
                .map(|element| element.iter().rev().map(|byte| format!("{byte:02x}")).collect::<String>() + " ")
                .collect()
        };
        format!(
            "a {}b {}c {:x} card {:x} emulator {:x}",
            bytes(&tile.a, self.a, at / N),
            bytes(&tile.b, self.b, at % N),
            tile.c[at],
            card[at],
            ours[at]
        )
    }
}

/// Number of sums that equal the card's, number that equal exact sums rounded once, and descriptions of sums that differ.
fn compare(product: &Product, kind: u64, class: u64, card: &[u32]) -> (usize, usize, Vec<String>) {
    let adder = Adder::of(Family::Hopper, product.instruction, Kind::of(product.a));
    let tiles = card.par_chunks(product.rows() * N).enumerate().map(|(number, card)| {
        let tile = product.tile((kind, class, number as u64));
        let equal = |sums: &[u32]| sums.iter().zip(card).filter(|(ours, card)| ours == card).count();
        let ours = product.multiply(&tile, Some(&adder));
        let text = (ours != card).then(|| product.describe(&tile, &ours, card));
        (equal(&ours), equal(&product.multiply(&tile, None)), Vec::from_iter(text))
    });
    tiles.reduce(Default::default, |mut one, other| {
        one.2.extend(other.2);
        one.2.truncate(100);
        (one.0 + other.0, one.1 + other.1, one.2)
    })
}

fn main() -> Result<ExitCode> {
    let path = std::env::args().nth(1).ok_or("the argument is the file that sums.cu has written")?;
    let bytes = std::fs::read(&path)?;
    let words: Vec<u32> =
        bytes.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect();
    let (&tiles, mut rest) = words.split_first().ok_or("the file is empty")?;
    let mut log = std::fs::File::create(format!("{path}.differences"))?;
    let (mut all, mut equal_all) = (0, 0);
    println!("{:<22} {:<12} {:>10} {:>10} {:>14}", "product", "numbers", "sums", "equal", "exact, nearest");
    for (kind, product) in PRODUCTS.iter().enumerate() {
        for (class, name) in CLASSES.iter().enumerate() {
            let count = tiles as usize * product.rows() * N;
            let (card, later) = rest.split_at_checked(count).ok_or("the file is too short")?;
            rest = later;
            let (equal, nearest, differences) = compare(product, kind as u64, class as u64, card);
            println!(
                "{:<22} {name:<12} {count:>10} {equal:>10} {:>12.2} %",
                product.name,
                100.0 * nearest as f64 / count as f64
            );
            for difference in differences {
                writeln!(log, "{} {name}: {difference}", product.name)?;
            }
            (all, equal_all) = (all + count, equal_all + equal);
        }
    }
    println!("{equal_all} of {all} sums are equal; some others are in {path}.differences");
    Ok(if equal_all == all { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
