//! Matrix multiply-accumulate as the tensor cores do it: D = A·B + D.
//!
//! **The model.** With an [`Adder`], products are added as a family of GPUs adds them, to the bit. Without, the products
//! over one MMA's K and the accumulator are added exactly, and the sum is rounded once, to nearest even, to D's type.
//! Integer results are exact either way.
//!
//! **The method of exact sums.** The sums run in f64. A row of A and a row of Bᵀ bound the largest product and the
//! weight of the smallest product's last bit. If that range fits in 53 bits, no f64 addition rounds, in any order.
//! Otherwise the element is summed with error-free transformations (Shewchuk, "Adaptive precision floating-point
//! arithmetic", 1997). NVFP4 always fits: an e2m1 block sum is a small integer, and with two ue4m3 scales the sum of
//! four blocks stays under 2⁴⁹ in units of 2⁻²⁰.
//!
//! Both operands are rows along K: A is M × K, and B is transposed, N × K. Kinds and packings: PTX ISA 9.7.16.10.

use super::cut;
use super::descriptor::{CHUNK_BYTES, Element, Major, MmaKind, ScaleType, SharedMatrix};
use super::number::{self, add_to_odd, decode, decode_ue4m3, decode_ue8m0, to_odd};
use super::simd::{B_OFFSET, FoursA, FoursB, PANEL, QUAD, floats_row, fours, fours_nearest};
use super::sums::{Addend, Adder, Step, SumFormat, exponent, times_power};

/// Layout of elements in the bytes of a row (PTX ISA 9.7.16.10.4 and 9.7.14.5.14).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Packing {
    /// Contiguous, lowest bits first, also in the 4-bit kinds.
    Dense,
    /// Sixteen 4- or 6-bit elements at the start of every 16 bytes: `f8f6f4` and `mxf8f6f4` in shared memory.
    Padded,
    /// One byte per 4-bit or 6-bit element, with 4 bits in the middle and 6 bits at the bottom: `f8f6f4` and `mxf8f6f4`
    /// in registers and in tensor memory. The manual describes the registers in words. For tensor memory it draws a
    /// container, which is assumed to be the same.
    Container,
}

impl Packing {
    /// Packing of an operand of `tcgen05.mma` in shared memory (`shared`) or in tensor memory.
    pub const fn of(kind: MmaKind, shared: bool) -> Self {
        match (kind, shared) {
            (MmaKind::F8f6f4 | MmaKind::Mxf8f6f4, true) => Packing::Padded,
            (MmaKind::F8f6f4 | MmaKind::Mxf8f6f4, false) => Packing::Container,
            _ => Packing::Dense,
        }
    }

    /// Bytes per `k` elements.
    pub const fn row_bytes(self, element: Element, k: usize) -> usize {
        match self {
            Packing::Dense => (k * element.bits() as usize).div_ceil(8),
            Packing::Padded | Packing::Container => k * element.bits().next_multiple_of(8) as usize / 8,
        }
    }

    /// Repacks rows of `k` 4-, 6- or 8-bit elements to one byte per element.
    pub fn to_container(self, element: Element, k: usize, bytes: &[u8]) -> Vec<u8> {
        let shift = if element.bits() == 4 { 2 } else { 0 };
        let rows = bytes.chunks_exact(self.row_bytes(element, k));
        rows.flat_map(|row| (0..k).map(move |index| self.code(element, row, index) << shift)).collect()
    }

    /// Bits of element `index` in a row of 4-, 6- or 8-bit elements.
    fn code(self, element: Element, row: &[u8], index: usize) -> u8 {
        let bits = element.bits() as usize;
        let (at, shift) = match (self, bits) {
            (Packing::Container, 4) => (index * 8, 2),
            (Packing::Container, 6) => (index * 8, 0),
            (Packing::Padded, 4 | 6) => (index / 16 * 128 + index % 16 * bits, 0),
            _ => (index * bits, 0),
        };
        // An element extends at most into the next byte. The last element of a row does not.
        let next = row.get(at / 8 + 1).copied().unwrap_or(0);
        let both = u16::from_le_bytes([row[at / 8], next]);
        (both >> (at % 8 + shift)) as u8 & (u8::MAX >> (8 - bits))
    }
}

/// Reads the rows along K of a matrix in shared memory: `rows` rows in M or N with `row_bytes` each, gathered from the
/// 16-byte chunks that `read` returns for an address. `element_bytes` is used only for MN-major matrices.
pub fn gather(
    matrix: &SharedMatrix,
    major: Major,
    rows: usize,
    row_bytes: usize,
    element_bytes: usize,
    mut read: impl FnMut(u32) -> [u8; CHUNK_BYTES as usize],
) -> Vec<u8> {
    const CHUNK: usize = CHUNK_BYTES as usize;
    let mut out = vec![0; rows * row_bytes];
    match major {
        Major::K => {
            for (row, bytes) in out.chunks_exact_mut(row_bytes).enumerate() {
                for (chunk, piece) in bytes.chunks_mut(CHUNK).enumerate() {
                    let from = read(matrix.chunk_address(major, row as u32, chunk as u32));
                    piece.copy_from_slice(&from[..piece.len()]);
                }
            }
        }
        Major::Mn => {
            let per_chunk = CHUNK / element_bytes;
            for k in 0..row_bytes / element_bytes {
                for chunk in 0..rows.div_ceil(per_chunk) {
                    let from = read(matrix.chunk_address(major, k as u32, chunk as u32));
                    for (index, element) in from.chunks_exact(element_bytes).enumerate() {
                        let row = chunk * per_chunk + index;
                        if row < rows {
                            let at = row * row_bytes + k * element_bytes;
                            out[at..at + element_bytes].copy_from_slice(element);
                        }
                    }
                }
            }
        }
    }
    out
}

/// Splits B, or data of its columns, into panels of [`PANEL`] columns. Each panel is stored row by row along K.
fn panels<T: Copy + Default>(rows: usize, depth: usize, at: impl Fn(usize, usize) -> T) -> Vec<[T; PANEL]> {
    let mut out = Vec::with_capacity(rows.div_ceil(PANEL) * depth);
    for panel in 0..rows.div_ceil(PANEL) {
        for k in 0..depth {
            out.push(std::array::from_fn(|column| {
                let row = panel * PANEL + column;
                if row < rows { at(row, k) } else { T::default() }
            }));
        }
    }
    out
}

/// Bounds of a row's values: every finite nonzero value is a multiple of 2^`low` and below 2^`top`.
#[derive(Clone, Copy, Debug)]
struct Extent {
    top: i32,
    low: i32,
    finite: bool,
}

/// An exponent far outside the range of all formats.
const NEVER: i32 = 1 << 20;

impl Extent {
    fn of(values: &[f64]) -> Self {
        // A row without nonzero values is always exact. These bounds, which are far apart, express that.
        let mut extent = Extent { top: -NEVER, low: NEVER, finite: true };
        for &value in values {
            if !value.is_finite() {
                extent.finite = false;
            } else if value != 0.0 {
                let bits = value.to_bits();
                let exponent = (bits >> 52 & 0x7ff) as i32 - 1023;
                let last = (bits & ((1 << 52) - 1) | 1 << 52).trailing_zeros() as i32 - 52;
                extent.top = extent.top.max(exponent + 1);
                extent.low = extent.low.min(exponent + last);
            }
        }
        extent
    }

    /// Bounds that hold for all of these rows.
    fn widest(rows: &[Extent]) -> Self {
        Extent {
            top: rows.iter().map(|row| row.top).max().unwrap_or(-NEVER),
            low: rows.iter().map(|row| row.low).min().unwrap_or(NEVER),
            // Rows that are not finite are summed correctly by either method.
            finite: true,
        }
    }

    /// Bounds of the products of values of both rows.
    fn times(self, other: Extent) -> Self {
        let finite = self.finite && other.finite;
        Extent { top: self.top + other.top, low: self.low + other.low, finite }
    }

    /// Whether the products of values of both rows are exact in the loop of [`cut`].
    fn products_fit(self, other: Extent) -> bool {
        let normal = |row: Extent| row.low >= f32::MIN_EXP - 1 && row.top < f32::MAX_EXP - 4;
        let product = self.times(other);
        product.finite && normal(self) && normal(other) && product.low >= cut::LOWEST && product.top <= cut::HIGHEST
    }

    /// Whether `count` products of values of both rows can be summed in f64 without rounding. Also `true` for a row
    /// with an infinity or a NaN, because its results are not finite in any order.
    fn sums_exactly(self, other: Extent, count: usize) -> bool {
        let product = self.times(other);
        let top = product.top + count.next_power_of_two().trailing_zeros() as i32;
        !product.finite || top - product.low <= f64::MANTISSA_DIGITS as i32
    }
}

/// A decoded floating-point operand: rows along K.
#[derive(Clone, Debug)]
pub struct Floats {
    rows: usize,
    k: usize,
    values: Vec<f64>,
    extents: Vec<Extent>,
    /// For each row, the exponent of the smallest normal number, which subnormal numbers share.
    least_exponents: Vec<i32>,
}

impl Floats {
    /// Decodes `rows` rows of `k` elements. `bytes` holds the rows one after another, with [`Packing::row_bytes`] each.
    ///
    /// # Panics
    /// If `bytes` has another length, or `element` is an integer type.
    pub fn decode(element: Element, packing: Packing, rows: usize, k: usize, bytes: &[u8]) -> Self {
        let row_bytes = packing.row_bytes(element, k);
        assert_eq!(bytes.len(), rows * row_bytes, "{rows} rows of {k} {element:?}");
        let mut values = Vec::with_capacity(rows * k);
        // Each wide format has its own loop. Narrow formats have at most 256 codes and use a table.
        match element {
            Element::F16 => {
                let (pairs, _) = bytes.as_chunks::<2>();
                values.extend(pairs.iter().map(|&pair| number::decode_f16(u16::from_le_bytes(pair))));
            }
            Element::Bf16 => {
                let (pairs, _) = bytes.as_chunks::<2>();
                values.extend(pairs.iter().map(|&pair| number::decode_bf16(u16::from_le_bytes(pair))));
            }
            Element::Tf32 => {
                let (words, _) = bytes.as_chunks::<4>();
                let value = |register| decode(&number::TF32, number::tf32_from_register(register));
                values.extend(words.iter().map(|&word| value(u32::from_le_bytes(word))));
            }
            _ => {
                let format = element.format().expect("the element type is a floating-point type");
                let table: Vec<f64> = (0..1 << element.bits()).map(|code| decode(&format, code)).collect();
                for row in bytes.chunks_exact(row_bytes) {
                    values.extend((0..k).map(|index| table[usize::from(packing.code(element, row, index))]));
                }
            }
        }
        let least = element.format().map_or(0, |format| 1 - format.bias());
        Self::new(k, values, vec![least; rows])
    }

    fn new(k: usize, values: Vec<f64>, least_exponents: Vec<i32>) -> Self {
        let extents = values.chunks_exact(k).map(Extent::of).collect();
        Floats { rows: least_exponents.len(), k, values, extents, least_exponents }
    }

    /// Negates every element.
    pub fn negated(mut self) -> Self {
        self.values.iter_mut().for_each(|value| *value = -*value);
        self
    }

    /// Multiplies every row by its scale factor, a power of two: the single block of an `mxf8f6f4` MMA.
    ///
    /// # Panics
    /// If `scales` does not have one scale per row.
    pub fn scaled(self, scales: &Scales) -> Self {
        assert_eq!((scales.rows, scales.blocks), (self.rows, 1));
        let k = self.k;
        let scaled = |(index, value)| value * scales.values[index / k];
        let least =
            self.least_exponents.iter().zip(&scales.values).map(|(least, scale)| least + exponent(*scale, -127));
        let least = least.collect();
        Self::new(k, self.values.into_iter().enumerate().map(scaled).collect(), least)
    }

    fn row(&self, row: usize) -> &[f64] {
        &self.values[row * self.k..][..self.k]
    }

    /// Exponent of an element, as the GPU counts it.
    fn exponent(&self, row: usize, k: usize, adder: &Adder) -> i32 {
        exponent(self.row(row)[k], adder.least_exponent(self.least_exponents[row]))
    }

    /// The smallest power of two that an element's exponent stands for.
    fn least_power(&self, row: usize, adder: &Adder) -> f32 {
        // Rows with larger or smaller exponents do not use the loop of `cut`.
        let exponent = adder.least_exponent(self.least_exponents[row]).clamp(f32::MIN_EXP - 1, f32::MAX_EXP - 1);
        f32::from_bits(((exponent + 127) as u32) << 23)
    }
}

/// The power of two that the exponent of a value stands for, at least `least`, or 0 for a zero. The value must be normal:
/// rows with others do not use the loop of `cut`.
#[inline(always)]
fn power(value: f32, least: f32) -> f32 {
    let power = f32::from_bits(value.to_bits() & 0x7f80_0000);
    let power = if power > least { power } else { least };
    if value == 0.0 { 0.0 } else { power }
}

/// D = A·Bᵀ + D in f32, added by `adder` or, without it, exactly. `d` is M × N, row by row.
///
/// # Panics
/// If the operands' K or the length of `d` do not match.
pub fn multiply_f32(a: &Floats, b: &Floats, adder: Option<&Adder>, d: &mut [f32]) {
    check_shapes((a.rows, a.k), (b.rows, b.k), d.len());
    if let Some(adder) = adder {
        return multiply_cut(a, b, adder, SumFormat::F32, d);
    }
    let panels = panels(b.rows, b.k, |row, k| b.row(row)[k]);
    let widest_b = Extent::widest(&b.extents);
    for (row, d) in d.chunks_exact_mut(b.rows.max(1)).enumerate() {
        if a.extents[row].sums_exactly(widest_b, a.k) {
            floats_row(a.row(row), &panels, d);
        } else {
            for (column, d) in d.iter_mut().enumerate() {
                *d = canonical(dot_to_odd(a, row, b, column, f64::from(*d)) as f32);
            }
        }
    }
}

/// D = A·Bᵀ + D in f16, added by `adder` or, without it, exactly. `d` is M × N, row by row.
///
/// # Panics
/// If the operands' K or the length of `d` do not match.
pub fn multiply_f16(a: &Floats, b: &Floats, adder: Option<&Adder>, d: &mut [u16]) {
    check_shapes((a.rows, a.k), (b.rows, b.k), d.len());
    if let Some(adder) = adder {
        let mut sums: Vec<f32> = d.iter().map(|&d| number::decode_f16(d) as f32).collect();
        multiply_cut(a, b, adder, SumFormat::F16, &mut sums);
        d.iter_mut().zip(sums).for_each(|(d, sum)| *d = number::round_f16(sum.into()));
        return;
    }
    for (row, d) in d.chunks_exact_mut(b.rows.max(1)).enumerate() {
        for (column, d) in d.iter_mut().enumerate() {
            *d = number::round_f16(dot_to_odd(a, row, b, column, number::decode_f16(*d)));
        }
    }
}

fn check_shapes(a: (usize, usize), b: (usize, usize), d: usize) {
    assert_eq!(a.1, b.1, "A and B must have the same K");
    assert_eq!(d, a.0 * b.0, "D must be M × N");
}

/// D = A·Bᵀ + D, added by `adder`. `d` holds numbers of `format`.
fn multiply_cut(a: &Floats, b: &Floats, adder: &Adder, format: SumFormat, d: &mut [f32]) {
    let order = adder.order(a.k);
    // Behind other steps, `cut::row` gives canonical NaNs.
    let paired = adder.step == Step::Pairs;
    let b_values = panels(b.rows, b.k, |row, k| b.row(row)[order[k]] as f32);
    let b_least = panels(b.rows, 1, |row, _| b.least_power(row, adder));
    let b_rows = b_values.chunks_exact(b.k.max(1)).zip(&b_least);
    let powers_of = |values: &[f32; PANEL], least: &[f32; PANEL]| -> [f32; PANEL] {
        std::array::from_fn(|column| power(values[column], least[column]))
    };
    let b_powers = b_rows.flat_map(|(panel, least)| panel.iter().map(move |values| powers_of(values, least))).collect();
    let b_panels = cut::Panels { values: b_values, powers: b_powers };
    let widest = |rows: &[Extent]| Extent { finite: rows.iter().all(|row| row.finite), ..Extent::widest(rows) };
    let widest: Vec<Extent> = b.extents.chunks(PANEL).map(widest).collect();
    let (mut values, mut powers, mut fits) = (Vec::new(), Vec::new(), Vec::new());
    for (row, d) in d.chunks_exact_mut(b.rows.max(1)).enumerate() {
        values.clear();
        values.extend(order.iter().map(|&k| a.row(row)[k] as f32));
        powers.clear();
        let least = a.least_power(row, adder);
        powers.extend(values.iter().map(|&value| power(value, least)));
        fits.clear();
        fits.extend(widest.iter().map(|b| a.extents[row].products_fit(*b)));
        let line = cut::Line { values: &values, powers: &powers };
        cut::row(line, &b_panels, (adder, format), &fits, d);
        for (panel, d) in d.chunks_mut(PANEL).enumerate().filter(|(panel, _)| !fits[*panel] || paired) {
            for (column, d) in d.iter_mut().enumerate() {
                if !fits[panel] {
                    let products = products((a, row), (b, panel * PANEL + column), &order, adder);
                    *d = adder.add(&products, f64::from(*d), format) as f32;
                }
                *d = canonical(*d);
            }
        }
    }
}

/// Products of a row of A and a row of B, in this order of K.
fn products((a, row): (&Floats, usize), (b, column): (&Floats, usize), order: &[usize], adder: &Adder) -> Vec<Addend> {
    let product = |&k: &usize| Addend {
        value: a.row(row)[k] * b.row(column)[k],
        exponent: a.exponent(row, k, adder) + b.exponent(column, k, adder),
    };
    order.iter().map(product).collect()
}

/// Computes one element of A·Bᵀ + C, rounded to odd.
fn dot_to_odd(a: &Floats, row: usize, b: &Floats, column: usize, c: f64) -> f64 {
    let products = a.row(row).iter().zip(b.row(column)).map(|(a, b)| a * b);
    if a.extents[row].sums_exactly(b.extents[column], a.k) {
        add_to_odd(products.fold(0.0, |sum, product| sum + product), c)
    } else {
        exact_sum_to_odd(products.chain([c]))
    }
}

/// Sums finite `terms` and rounds once, to odd. Infinities and NaNs add up as in f64.
///
/// Uses Shewchuk's growing expansion: partial sums that do not overlap, smallest first.
fn exact_sum_to_odd(terms: impl Iterator<Item = f64> + Clone) -> f64 {
    let mut partials: Vec<f64> = Vec::with_capacity(8);
    for mut term in terms.clone() {
        if !term.is_finite() {
            return terms.sum();
        }
        let mut kept = 0;
        for index in 0..partials.len() {
            let partial = partials[index];
            let sum = term + partial;
            let virtual_partial = sum - term;
            let error = (term - (sum - virtual_partial)) + (partial - virtual_partial);
            if error != 0.0 {
                partials[kept] = error;
                kept += 1;
            }
            term = sum;
        }
        partials.truncate(kept);
        partials.push(term);
    }
    // Sum from the largest partial. The error of the first inexact addition has the sign of everything below it.
    let mut sum = 0.0;
    for &partial in partials.iter().rev() {
        let next = sum + partial;
        let error = partial - (next - sum);
        if error != 0.0 {
            return to_odd(next, error);
        }
        sum = next;
    }
    sum
}

fn canonical(x: f32) -> f32 {
    if x.is_nan() { f32::from_bits(number::F32_NAN) } else { x }
}

/// An `e2m1` operand of the 4-bit kinds, decoded to twice its values: integers up to 12.
#[derive(Clone, Debug)]
pub struct Fours {
    rows: usize,
    k: usize,
    doubled: Vec<i8>,
}

impl Fours {
    /// Decodes `rows` rows of `k` densely packed elements, with the even element in the low nibble.
    ///
    /// # Panics
    /// If `bytes` is not `rows`·`k`/2 long.
    pub fn decode(rows: usize, k: usize, bytes: &[u8]) -> Self {
        /// The two elements of each byte, doubled.
        const DOUBLED: [[i8; 2]; 256] = {
            const ONE: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];
            let mut pairs = [[0; 2]; 256];
            let mut byte = 0;
            while byte < 256 {
                pairs[byte] = [ONE[byte & 15], ONE[byte >> 4]];
                byte += 1;
            }
            pairs
        };
        assert_eq!(bytes.len() * 2, rows * k, "{rows} rows of {k} e2m1");
        let pairs: Vec<[i8; 2]> = bytes.iter().map(|&byte| DOUBLED[usize::from(byte)]).collect();
        Fours { rows, k, doubled: pairs.into_flattened() }
    }

    /// Negates every element.
    pub fn negated(mut self) -> Self {
        self.doubled.iter_mut().for_each(|value| *value = -*value);
        self
    }

    /// For each row and block of A, the term that cancels the offset of B's elements.
    fn bias(&self, blocks: usize) -> Vec<i32> {
        let block_bias =
            |elements: &[i8]| -i32::from(B_OFFSET) * elements.iter().map(|&value| i32::from(value)).sum::<i32>();
        self.doubled.chunks_exact(self.k / blocks).map(block_bias).collect()
    }

    /// Prepares B for the integer dot products.
    fn panels(&self, scales: &Scales) -> FoursB {
        let (quads, _) = self.doubled.as_chunks::<QUAD>();
        let per_row = self.k / QUAD;
        FoursB {
            quads: panels(self.rows, per_row, |row, quad| {
                quads[row * per_row + quad].map(|value| (value + B_OFFSET) as u8)
            }),
            // The factor 1/4 cancels the doubling of the elements of A and B.
            scales: panels(self.rows, scales.blocks, |row, block| scales.row(row)[block] * 0.25),
        }
    }
}

/// Scale factors of an operand: `blocks` per row, in the order of K.
#[derive(Clone, Debug)]
pub struct Scales {
    rows: usize,
    blocks: usize,
    values: Vec<f64>,
    extents: Vec<Extent>,
    /// Exponent of the smallest normal scale, which subnormal scales share.
    least_exponent: i32,
}

impl Scales {
    /// Decodes `rows`·`blocks` codes. `None` if a `ue4m3` code has its top bit set, which must be zero.
    ///
    /// # Panics
    /// If `codes` has another length.
    pub fn decode(scale: ScaleType, rows: usize, blocks: usize, codes: &[u8]) -> Option<Self> {
        assert_eq!(codes.len(), rows * blocks, "{rows} rows of {blocks} scale factors");
        let value = |&code: &u8| match scale {
            ScaleType::Ue4m3 => decode_ue4m3(code),
            ScaleType::Ue8m0 => Some(decode_ue8m0(code)),
        };
        let values: Vec<f64> = codes.iter().map(value).collect::<Option<_>>()?;
        let extents = values.chunks_exact(blocks).map(Extent::of).collect();
        let least_exponent = match scale {
            ScaleType::Ue4m3 => 1 - number::E4M3.bias(),
            ScaleType::Ue8m0 => -127,
        };
        Some(Scales { rows, blocks, values, extents, least_exponent })
    }

    fn row(&self, row: usize) -> &[f64] {
        &self.values[row * self.blocks..][..self.blocks]
    }
}

/// D = (A·scale_A)·(B·scale_B)ᵀ + D for the 4-bit kinds in f32, added by `adder` or, without it, exactly. `d` is M × N,
/// row by row.
///
/// # Panics
/// If the shapes do not match.
pub fn multiply_fours(
    (a, scale_a): (&Fours, &Scales),
    (b, scale_b): (&Fours, &Scales),
    adder: Option<&Adder>,
    d: &mut [f32],
) {
    check_shapes((a.rows, a.k), (b.rows, b.k), d.len());
    assert_eq!((scale_a.rows, scale_b.rows), (a.rows, b.rows), "A and B must have scale factors for every row");
    assert_eq!(scale_a.blocks, scale_b.blocks, "A and B must have the same number of scale blocks");
    let (k, blocks) = (a.k, scale_a.blocks);
    assert!(
        blocks > 0 && k.is_multiple_of(blocks * QUAD),
        "K must be a multiple of four times the number of scale blocks"
    );
    let n = b.rows.max(1);
    let (bias, b_panels) = (a.bias(blocks), b.panels(scale_b));
    let vectors = FoursA { quads: a.doubled.as_chunks::<QUAD>().0, bias: &bias, scales: &scale_a.values, blocks };
    // Exactness depends on the scales: a block's sum of doubled products is an integer of at most K·144.
    let block_sum = Extent { top: (k / blocks * 144).ilog2() as i32 + 1, low: 0, finite: true };
    let widest_b = Extent::widest(&scale_b.extents);
    let exact = |row: &Extent| row.times(block_sum).sums_exactly(widest_b, blocks);
    if let Some(adder) = adder {
        return multiply_fours_cut((a, scale_a), (b, scale_b), adder, (vectors, &b_panels), d);
    }
    if scale_a.extents.iter().all(exact) {
        return fours_nearest(vectors, &b_panels, n, d);
    }
    for (row, d) in d.chunks_exact_mut(n).enumerate() {
        if exact(&scale_a.extents[row]) {
            fours_nearest(vectors.rows(row, 1), &b_panels, n, d);
        } else {
            let a_row = a.doubled[row * k..][..k].chunks_exact(k / blocks).zip(scale_a.row(row));
            for (column, d) in d.iter_mut().enumerate() {
                let b_row = b.doubled[column * k..][..k].chunks_exact(k / blocks).zip(scale_b.row(column));
                let terms = a_row.clone().zip(b_row).map(|((a, a_scale), (b, b_scale))| {
                    let dot: i32 = a.iter().zip(b).map(|(&a, &b)| i32::from(a) * i32::from(b)).sum();
                    f64::from(dot) * 0.25 * a_scale * b_scale
                });
                *d = canonical(exact_sum_to_odd(terms.chain([f64::from(*d)])) as f32);
            }
        }
    }
}

/// [`multiply_fours`] with an adder. Where the scales and the accumulator are so close that no addend loses a bit, the
/// sum is exact before it is rounded.
fn multiply_fours_cut(
    (a, scale_a): (&Fours, &Scales),
    (b, scale_b): (&Fours, &Scales),
    adder: &Adder,
    (vectors, b_panels): (FoursA, &FoursB),
    d: &mut [f32],
) {
    let n = b.rows.max(1);
    let a_bounds: Vec<Bounds> = scale_a.extents.iter().map(|row| Bounds::of(scale_a, row)).collect();
    let bound = |row: usize| Bounds::of(scale_b, &scale_b.extents[row]);
    let b_tops: Vec<[f64; PANEL]> = panels(b.rows, 1, |row, _| bound(row).top);
    let b_lows: Vec<[f64; PANEL]> = panels(b.rows, 1, |row, _| bound(row).low);
    // The bounds' powers of two count a unit of 2⁻² for doubled products, and 23 bits of an accumulator.
    let (least, beyond) = (times_power(1.0, 23 - 2 - adder.kept), times_power(1.0, adder.kept + 1 - 2));
    let apart = times_power(1.0, adder.kept - 23 + 1);
    let finish = |row: usize, panel: usize, sums: &[f64; PANEL], d: &mut [f32]| {
        let mut c = [0.0; PANEL];
        c[..d.len()].copy_from_slice(d);
        let mut rounded = [0.0f32; PANEL];
        let (top, low) = (a_bounds[row].top * least, a_bounds[row].low * beyond);
        let limits = ExactLimits { top, low, apart, b_tops: &b_tops[panel], b_lows: &b_lows[panel] };
        let exact = limits.add(sums, &c, adder, &mut rounded);
        d.copy_from_slice(&rounded[..d.len()]);
        for (column, d) in d.iter_mut().enumerate().filter(|_| exact != u16::MAX) {
            if exact >> column & 1 == 0 {
                let addends = block_sums((a, scale_a, row), (b, scale_b, panel * PANEL + column), adder.block);
                *d = canonical(adder.add(&addends, c[column].into(), SumFormat::F32) as f32);
            }
        }
    };
    fours(vectors, b_panels, n, d, finish);
}

/// Limits between which an accumulator and 4-bit block sums lose no bit before they are rounded, for a row and a panel of
/// columns.
struct ExactLimits<'a> {
    top: f64,
    low: f64,
    apart: f64,
    b_tops: &'a [f64; PANEL],
    b_lows: &'a [f64; PANEL],
}

impl ExactLimits<'_> {
    /// Adds sums to accumulators and rounds. Returns a mask of the columns whose result is right.
    fn add(&self, sums: &[f64; PANEL], c: &[f32; PANEL], adder: &Adder, rounded: &mut [f32; PANEL]) -> u16 {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512dq") {
            // SAFETY: both features were just detected.
            return unsafe { self.add_avx512(sums, c, adder, rounded) };
        }
        self.add_anywhere(sums, c, adder, rounded)
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512dq")]
    fn add_avx512(&self, sums: &[f64; PANEL], c: &[f32; PANEL], adder: &Adder, rounded: &mut [f32; PANEL]) -> u16 {
        self.add_anywhere(sums, c, adder, rounded)
    }

    /// The compiler turns this loop into vector instructions.
    #[inline(always)]
    fn add_anywhere(&self, sums: &[f64; PANEL], c: &[f32; PANEL], adder: &Adder, rounded: &mut [f32; PANEL]) -> u16 {
        let mut exact = [0u16; PANEL];
        for column in 0..PANEL {
            let c = f64::from(c[column]);
            let (least, beyond) = (self.top * self.b_tops[column], self.low * self.b_lows[column]);
            let size = c.abs();
            let fits = ((size >= least) | (size == 0.0)) & (size < beyond) & (least * self.apart <= beyond);
            exact[column] = u16::from(fits) << column;
            rounded[column] = adder.round_normal(sums[column] + c, SumFormat::F32);
        }
        exact.iter().fold(0, |all, bit| all | bit)
    }
}

/// Powers of two that bound a row's scales: none has a larger exponent than `top`/2, and all are multiples of `low`.
/// NaN if a scale is NaN or the bounds are extreme.
#[derive(Clone, Copy)]
struct Bounds {
    top: f64,
    low: f64,
}

impl Bounds {
    fn of(scales: &Scales, row: &Extent) -> Self {
        let (top, low) = (row.top.max(scales.least_exponent + 1), row.low.min(0));
        if row.finite && top <= 50 && low >= -40 {
            Bounds { top: times_power(1.0, top.max(-30)), low: times_power(1.0, low) }
        } else {
            Bounds { top: f64::NAN, low: f64::NAN }
        }
    }
}

/// Sums of `block` adjacent products of a row of A and a row of B, times their scales.
fn block_sums(
    (a, scale_a, row): (&Fours, &Scales, usize),
    (b, scale_b, column): (&Fours, &Scales, usize),
    block: usize,
) -> Vec<Addend> {
    let (k, per_scale) = (a.k, a.k / scale_a.blocks);
    let (a_row, b_row) = (&a.doubled[row * k..][..k], &b.doubled[column * k..][..k]);
    let blocks = a_row.chunks(block).zip(b_row.chunks(block)).enumerate();
    let sum = |(index, (a, b)): (usize, (&[i8], &[i8]))| {
        let dot: i32 = a.iter().zip(b).map(|(&a, &b)| i32::from(a) * i32::from(b)).sum();
        let at = index * block / per_scale;
        let (a_scale, b_scale) = (scale_a.row(row)[at], scale_b.row(column)[at]);
        Addend {
            // The factor 1/4 cancels the doubling of the elements of A and B.
            value: f64::from(dot) * 0.25 * a_scale * b_scale,
            exponent: exponent(a_scale, scale_a.least_exponent) + exponent(b_scale, scale_b.least_exponent),
        }
    };
    blocks.map(sum).collect()
}

/// A decoded integer operand.
#[derive(Clone, Debug)]
pub struct Integers {
    rows: usize,
    k: usize,
    values: Vec<i32>,
}

impl Integers {
    /// Decodes `rows` rows of `k` signed or unsigned bytes.
    ///
    /// # Panics
    /// If `bytes` is not `rows`·`k` long.
    pub fn decode(signed: bool, rows: usize, k: usize, bytes: &[u8]) -> Self {
        assert_eq!(bytes.len(), rows * k, "{rows} rows of {k} bytes");
        let value = |&byte: &u8| {
            if signed { i32::from(byte as i8) } else { i32::from(byte) }
        };
        Integers { rows, k, values: bytes.iter().map(value).collect() }
    }
}

/// D = A·Bᵀ + D in 32 bits. The sum wraps, or saturates if `saturate` (`.satfinite`; PTX ISA 9.7.14.5.14).
///
/// # Panics
/// If the operands' K or the length of `d` do not match.
pub fn multiply_i32(a: &Integers, b: &Integers, saturate: bool, d: &mut [i32]) {
    check_shapes((a.rows, a.k), (b.rows, b.k), d.len());
    for (row, d) in d.chunks_exact_mut(b.rows.max(1)).enumerate() {
        let a_row = &a.values[row * a.k..][..a.k];
        for (d, b_row) in d.iter_mut().zip(b.values.chunks_exact(b.k)) {
            let sum: i64 = a_row.iter().zip(b_row).map(|(&a, &b)| i64::from(a * b)).sum();
            let exact = sum + i64::from(*d);
            *d = if saturate { exact.clamp(i32::MIN.into(), i32::MAX.into()) as i32 } else { exact as i32 };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hw::swizzle::Swizzle;
    use proptest::prelude::*;

    fn hex(text: &str) -> Vec<u8> {
        let digit = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
        (0..text.len()).step_by(2).map(digit).collect()
    }

    fn words(bytes: &[u8]) -> Vec<u32> {
        bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
    }

    fn element(name: &str) -> Element {
        match name {
            "f16" => Element::F16,
            "bf16" => Element::Bf16,
            "tf32" => Element::Tf32,
            "e4m3" => Element::E4m3,
            "e5m2" => Element::E5m2,
            "e2m3" => Element::E2m3,
            "e3m2" => Element::E3m2,
            "e2m1" => Element::E2m1,
            other => panic!("{other}"),
        }
    }

    /// `matmul_table.py` sums fractions and rounds the result by a search among neighboring f32 values. The operands
    /// are random codes of the whole range, so both the f64 path and the error-free path are tested.
    #[test]
    fn every_kind_matches_exact_sums_rounded_once() {
        const M: usize = 3;
        const N: usize = 2;
        let mut seen = std::collections::BTreeMap::new();
        for line in include_str!("testdata/matmul.csv").lines().skip(1) {
            let fields: Vec<&str> = line.split(',').collect();
            let [kind, a_name, b_name, packing, k, a, b, scale_a, scale_b, c, expected] = fields[..] else {
                panic!("{line}");
            };
            let k: usize = k.parse().unwrap();
            let packing = match packing {
                "dense" => Packing::Dense,
                "padded" => Packing::Padded,
                "container" => Packing::Container,
                other => panic!("{other}"),
            };
            let (a, b) = (hex(a), hex(b));
            let scales = |rows, codes: &str| {
                let codes = hex(codes);
                let scale = if kind.ends_with("ue4m3") { ScaleType::Ue4m3 } else { ScaleType::Ue8m0 };
                Scales::decode(scale, rows, codes.len() / rows, &codes).unwrap()
            };
            let mut d: Vec<f32> = words(&hex(c)).into_iter().map(f32::from_bits).collect();
            if kind.starts_with("fours") {
                let (a, b) = (Fours::decode(M, k, &a), Fours::decode(N, k, &b));
                multiply_fours((&a, &scales(M, scale_a)), (&b, &scales(N, scale_b)), None, &mut d);
            } else {
                let mut a = Floats::decode(element(a_name), packing, M, k, &a);
                let mut b = Floats::decode(element(b_name), packing, N, k, &b);
                if kind == "scaled_ue8m0" {
                    (a, b) = (a.scaled(&scales(M, scale_a)), b.scaled(&scales(N, scale_b)));
                }
                multiply_f32(&a, &b, None, &mut d);
            }
            let ours: Vec<u32> = d.into_iter().map(f32::to_bits).collect();
            assert_eq!(ours, words(&hex(expected)), "{line}");
            *seen.entry((kind.to_owned(), a_name.to_owned())).or_insert(0) += 1;
        }
        assert_eq!(seen.len(), 8 + 5 + 3, "{seen:?}");
    }

    #[test]
    fn infinities_and_nans_affect_only_their_row_and_column() {
        let a: Vec<u8> = [0x7c00u16, 0x3c00, 0x3c00, 0x3c00].iter().flat_map(|x| x.to_le_bytes()).collect();
        let b: Vec<u8> = [0x3c00u16, 0x3c00, 0x0000, 0x3c00].iter().flat_map(|x| x.to_le_bytes()).collect();
        let decode = |bytes: &[u8]| Floats::decode(Element::F16, Packing::Dense, 2, 2, bytes);
        let mut d = [0.5; 4];
        multiply_f32(&decode(&a), &decode(&b), None, &mut d);
        assert_eq!(d[0], f32::INFINITY);
        assert_eq!(d[1].to_bits(), number::F32_NAN, "infinity times zero");
        assert_eq!(d[2..], [2.5, 1.5]);
    }

    #[test]
    fn nan_scale_gives_nan_and_signed_ue4m3_is_refused() {
        let fours = Fours::decode(1, 64, &[0x22; 32]);
        let scales = |code| Scales::decode(ScaleType::Ue4m3, 1, 4, &[0x38, code, 0x38, 0x38]);
        let mut d = [0.0];
        multiply_fours((&fours, &scales(0x7f).unwrap()), (&fours, &scales(0x38).unwrap()), None, &mut d);
        assert_eq!(d[0].to_bits(), number::F32_NAN);
        assert!(scales(0xb8).is_none());
    }

    #[test]
    fn half_results_are_rounded_once() {
        // 2048 + 1 + 2⁻¹¹: f32 holds only the sum of the first two. The step of f16 is 2, and 2049 is a tie.
        let row = |values: [u16; 2]| {
            let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            Floats::decode(Element::F16, Packing::Dense, 1, 2, &bytes)
        };
        let mut d = [0x6800];
        multiply_f16(&row([0x3c00, 0x1000]), &row([0x3c00, 0x3c00]), None, &mut d);
        assert_eq!(d, [0x6801]);
        let mut d = [0x6800];
        multiply_f16(&row([0x3c00, 0x0000]), &row([0x3c00, 0x3c00]), None, &mut d);
        assert_eq!(d, [0x6800]);
    }

    #[test]
    fn integers_wrap_or_saturate() {
        let a = Integers::decode(true, 1, 4, &[0x80, 0x80, 1, 2]);
        let b = Integers::decode(false, 1, 4, &[0xff, 0xff, 3, 4]);
        let mut d = [1];
        multiply_i32(&a, &b, false, &mut d);
        assert_eq!(d, [1 - 2 * 128 * 255 + 3 + 8]);
        let mut wrapped = [i32::MIN];
        multiply_i32(&a, &b, false, &mut wrapped);
        assert_eq!(wrapped, [i32::MAX - 65280 + 1 + 11]);
        let mut saturated = [i32::MIN];
        multiply_i32(&a, &b, true, &mut saturated);
        assert_eq!(saturated, [i32::MIN]);
    }

    #[test]
    fn negation_flips_the_sign_of_the_products() {
        let fours = Fours::decode(1, 16, &[0x57; 8]);
        let scale = Scales::decode(ScaleType::Ue4m3, 1, 1, &[0x38]).unwrap();
        let (mut plus, mut minus) = ([0.0], [0.0]);
        multiply_fours((&fours, &scale), (&fours, &scale), None, &mut plus);
        multiply_fours((&fours.clone().negated(), &scale), (&fours, &scale), None, &mut minus);
        assert_eq!((plus[0], minus[0]), (8.0 * (36.0 + 9.0), -8.0 * (36.0 + 9.0)));
    }

    /// A matrix written at its canonical addresses is read back row by row, in both orders.
    #[test]
    fn gathering_inverts_the_canonical_layouts() {
        let k_major = SharedMatrix { start: 0x400, leading: 0, stride: 1024, swizzle: Swizzle::B128 };
        let mn_major = SharedMatrix { start: 0x400, leading: 4096, stride: 1024, swizzle: Swizzle::B128 };
        for (matrix, major) in [(k_major, Major::K), (mn_major, Major::Mn)] {
            let (rows, k) = (72usize, 16usize);
            let mut shared = vec![0u8; 1 << 16];
            for row in 0..rows {
                for column in 0..k {
                    let (line, along) = if major == Major::K { (row, column) } else { (column, row) };
                    let chunk = matrix.chunk_address(major, line as u32, (along / 8) as u32) as usize;
                    let at = chunk + along % 8 * 2;
                    shared[at..at + 2].copy_from_slice(&((row * k + column) as u16).to_le_bytes());
                }
            }
            let read = |at: u32| shared[at as usize..][..16].try_into().unwrap();
            let bytes = gather(&matrix, major, rows, k * 2, 2, read);
            let values: Vec<u16> = bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect();
            assert!(values.iter().enumerate().all(|(index, &value)| index == usize::from(value)));
        }
    }

    proptest! {
        /// Compares the vector code with the error-free sums, element by element, for any N.
        #[test]
        fn fast_nvfp4_path_matches_the_error_free_path(
            n in 1usize..70,
            a in prop::collection::vec(any::<u8>(), 32),
            b in prop::collection::vec(any::<u8>(), 70 * 32),
            codes in prop::collection::vec(0u8..0x7f, 4 + 70 * 4),
            c in -1e6f32..1e6,
        ) {
            let b = &b[..n * 32];
            let (a_codes, b_codes) = (&codes[..4], &codes[4..][..n * 4]);
            let scales = |rows, codes| Scales::decode(ScaleType::Ue4m3, rows, 4, codes).unwrap();
            let (fours_a, fours_b) = (Fours::decode(1, 64, &a), Fours::decode(n, 64, b));
            let mut d = vec![c; n];
            multiply_fours((&fours_a, &scales(1, a_codes)), (&fours_b, &scales(n, b_codes)), None, &mut d);
            let values = |rows, bytes: &[u8], codes: &[u8]| {
                let plain = Floats::decode(Element::E2m1, Packing::Dense, rows, 64, bytes);
                let scale = |index: usize| decode_ue4m3(codes[index / 16]).unwrap();
                let scaled = plain.values.iter().enumerate().map(|(index, value)| value * scale(index));
                scaled.collect::<Vec<f64>>()
            };
            let (a, b) = (values(1, &a, a_codes), values(n, b, b_codes));
            for (column, &d) in d.iter().enumerate() {
                let products = a.iter().zip(&b[column * 64..][..64]).map(|(a, b)| a * b);
                let exact = exact_sum_to_odd(products.chain([c.into()])) as f32;
                prop_assert_eq!(d.to_bits(), exact.to_bits());
            }
        }
    }
}
