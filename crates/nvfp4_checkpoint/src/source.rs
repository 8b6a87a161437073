//! A weight matrix `[N, K]` as a model stores it: in f32, f16, bf16, FP8 with scales, MXFP4 or NVFP4. The matrix is a
//! whole tensor or a part of a tensor with all experts of a layer, and is stored row by row or transposed. This module
//! knows no tensor names.
//!
//! FP8 is OCP's E4M3 with a factor per block, row or tensor (for instance DeepSeek's `weight_scale_inv`). MXFP4 is
//! e2m1 with a power of two per 32 elements along K (OCP Microscaling Formats Specification 1.0, section 5.2).

use std::borrow::Cow;
use std::ops::Range;
use std::sync::LazyLock;

use rayon::prelude::*;

use super::Dtype;
use super::file::Tensor;
use super::floats::{Bf16, F16, F32, Floats};
use nvfp4_core::Error;
use nvfp4_core::format::{BLOCK, e2m1, e4m3};

/// Number of elements that share a scale in MXFP4.
pub(super) const MX_BLOCK: usize = 32;

/// Maximum number of elements decoded at once; a longer row is decoded whole.
const CHUNK: usize = 1 << 19;

/// A weight matrix in a mapped file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Source<'a> {
    elements: Elements<'a>,
    /// Number of stored lines, and elements per line.
    stored: [usize; 2],
    /// Whether a line runs along N: the file stores `[K, N]`.
    transposed: bool,
    /// Indices along the stored N of the rows of this matrix.
    rows: Rows,
}

/// Indices `first`, `first + step`, …: `count` of them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows {
    pub first: usize,
    pub step: usize,
    pub count: usize,
}

impl Rows {
    /// All indices below `count`.
    pub(super) fn all(count: usize) -> Self {
        Self { first: 0, step: 1, count }
    }
}

/// Stored elements of one matrix.
#[derive(Clone, Copy, Debug)]
pub(super) enum Elements<'a> {
    Floats(Floats<'a>),
    Fp8 {
        codes: &'a [u8],
        scales: Scales<'a>,
    },
    /// Two values per byte, with the even element of a line in the low nibble; exponents have a bias of 127.
    Mxfp4 {
        codes: &'a [u8],
        exponents: &'a [u8],
    },
    /// Two values per byte, with the even element of K in the low nibble, and an E4M3 scale per 16 elements along K. A
    /// transposed matrix stores bytes as `[K/2, N]` and scales as `[K/16, N]`.
    Nvfp4 {
        codes: &'a [u8],
        scales: &'a [u8],
        global: f32,
        /// Factor of each column, which engines apply to the tokens (AWQ).
        columns: Option<Floats<'a>>,
    },
}

/// Codes `[N, K/2]`, scales `[N, K/16]` and global scale of an NVFP4 matrix.
pub(super) type Nvfp4Parts<'a> = (Cow<'a, [u8]>, Cow<'a, [u8]>, f32);

/// Scale factors of a matrix, one per block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scales<'a> {
    numbers: Factors<'a>,
    /// Number of blocks along a line.
    columns: usize,
    /// Lines per block, and elements per line of a block.
    block: [usize; 2],
}

#[derive(Clone, Copy, Debug)]
enum Factors<'a> {
    Floats(Floats<'a>),
    /// E8M0 exponents with a bias of 127.
    Powers(&'a [u8]),
}

impl<'a> Scales<'a> {
    /// Takes scales of shape `[a, b]` for a matrix of `stored` sizes; `wanted` is the block size that the model's
    /// configuration names.
    ///
    /// # Errors
    /// Returns an error if the type cannot be a scale, or no block size fits the shape.
    pub(super) fn new(
        tensor: Tensor<'a>,
        grid: [usize; 2],
        stored: [usize; 2],
        wanted: Option<[usize; 2]>,
    ) -> Result<Self, Error> {
        let numbers = match tensor.dtype {
            Dtype::F8_E8M0 | Dtype::U8 => Factors::Powers(tensor.data),
            _ => Factors::Floats(Floats::of(tensor).ok_or_else(|| Error::Dtype {
                got: tensor.dtype,
                expected: vec![Dtype::F32, Dtype::F16, Dtype::BF16, Dtype::F8_E8M0],
                remedy: "export the model again",
            })?),
        };
        let side = |side: usize| {
            let (size, count) = (stored[side], grid[side]);
            let gives = |block: usize| block > 0 && size.div_ceil(block) == count;
            let usual = [wanted.map_or(128, |wanted| wanted[side]), 128, size, 1, 32, 64, 256, 512, 16];
            usual.into_iter().find(|&block| gives(block))
        };
        let expected =
            || Error::Shape { got: grid.to_vec(), expected: format!("one scale per block of a {stored:?} matrix") };
        match (side(0), side(1)) {
            (Some(lines), Some(elements)) => Ok(Self { numbers, columns: grid[1], block: [lines, elements] }),
            _ => Err(expected()),
        }
    }

    fn at(&self, line: usize, column: usize) -> f32 {
        let index = line / self.block[0] * self.columns + column;
        match self.numbers {
            Factors::Floats(numbers) => numbers.at(index),
            Factors::Powers(exponents) => power(exponents[index]),
        }
    }
}

impl<'a> Source<'a> {
    /// Takes a matrix, or some of its rows, that is stored with the sizes `stored`.
    ///
    /// # Panics
    /// Panics if the number of elements differs from `stored`, or a row index is out of range.
    pub(super) fn new(elements: Elements<'a>, stored: [usize; 2], transposed: bool, rows: Rows) -> Self {
        let n = stored[usize::from(transposed)];
        assert!(rows.count == 0 || rows.first + (rows.count - 1) * rows.step < n, "rows of the matrix");
        Self { elements, stored, transposed, rows }
    }

    /// Indices along the stored N of the rows of this matrix.
    pub(super) fn placement(&self) -> Rows {
        self.rows
    }

    /// Whether a line runs along N.
    pub(super) fn is_transposed(&self) -> bool {
        self.transposed
    }

    /// Returns N and K.
    pub(super) fn sizes(&self) -> [usize; 2] {
        [self.rows.count, self.stored[usize::from(!self.transposed)]]
    }

    /// Splits the rows into chunks that are decoded one at a time; the split does not depend on the machine.
    pub(super) fn chunks(&self) -> impl IndexedParallelIterator<Item = Range<usize>> + use<> {
        let [n, k] = self.sizes();
        let rows = (CHUNK / k.max(1)).max(1);
        (0..n.div_ceil(rows)).into_par_iter().map(move |chunk| chunk * rows..((chunk + 1) * rows).min(n))
    }

    /// Returns some rows: in place if they are contiguous floats, otherwise decoded into `buffer`.
    pub(super) fn rows<'b>(&'b self, rows: Range<usize>, buffer: &'b mut Vec<f32>) -> Floats<'b> {
        let k = self.sizes()[1];
        if let Elements::Floats(numbers) = self.elements
            && !self.transposed
            && self.rows.step == 1
        {
            let first = self.rows.first + rows.start;
            return numbers.part(first * k..(first + rows.len()) * k);
        }
        Floats::Decoded(self.decoded(rows, buffer))
    }

    /// Returns the numbers of some rows, decoded into `buffer`.
    pub(super) fn decoded<'b>(&self, rows: Range<usize>, buffer: &'b mut Vec<f32>) -> &'b [f32] {
        let k = self.sizes()[1];
        buffer.resize(rows.len() * k, 0.0);
        let place = |row: usize| self.rows.first + row * self.rows.step;
        if self.transposed {
            for column in 0..k {
                self.decode_line(column, place(rows.start), self.rows.step, &mut buffer[column..], k);
            }
        } else {
            for (row, out) in rows.zip(buffer.chunks_exact_mut(k.max(1))) {
                self.decode_line(place(row), 0, 1, out, 1);
            }
        }
        buffer
    }

    /// Returns the bytes of some rows if these rows are contiguous and nothing lies between them.
    pub(super) fn in_place(&self, rows: Range<usize>) -> Option<&'a [u8]> {
        let Elements::Floats(numbers) = self.elements else { return None };
        if self.transposed || self.rows.step != 1 {
            return None;
        }
        let k = self.stored[1];
        let first = self.rows.first + rows.start;
        numbers.part(first * k..(first + rows.len()) * k).bytes()
    }

    /// Whether the matrix is MXFP4.
    pub(super) fn is_mxfp4(&self) -> bool {
        matches!(self.elements, Elements::Mxfp4 { .. }) && !self.transposed
    }

    /// Returns the codes and the exponents of a row; `None` if the matrix is not MXFP4 stored row by row.
    pub(super) fn mxfp4_row(&self, row: usize) -> Option<(&'a [u8], &'a [u8])> {
        let Elements::Mxfp4 { codes, exponents } = self.elements else { return None };
        if self.transposed {
            return None;
        }
        let (line, length) = (self.rows.first + row * self.rows.step, self.stored[1]);
        let of_line = |data: &'a [u8], bytes: usize| &data[line * bytes..][..bytes];
        Some((of_line(codes, length / 2), of_line(exponents, length / MX_BLOCK)))
    }

    /// Returns the global scale of an NVFP4 matrix.
    pub(super) fn nvfp4_global(&self) -> Option<f32> {
        match self.elements {
            Elements::Nvfp4 { global, .. } => Some(global),
            _ => None,
        }
    }

    /// Returns the codes `[N, K/2]`, the scales `[N, K/16]` and the global scale of an NVFP4 matrix; `None` if it is stored
    /// in another form.
    pub(super) fn nvfp4(&self) -> Option<Nvfp4Parts<'a>> {
        let Elements::Nvfp4 { codes, scales, global, .. } = self.elements else { return None };
        let Rows { first, step, count } = self.rows;
        let [n_stored, k] = if self.transposed { [self.stored[1], self.stored[0]] } else { self.stored };
        let rows = |data: &'a [u8], bytes: usize| -> Cow<'a, [u8]> {
            let place = |row: usize| first + row * step;
            if self.transposed {
                return (0..count * bytes).map(|at| data[at % bytes * n_stored + place(at / bytes)]).collect();
            }
            if step == 1 {
                return data[first * bytes..][..count * bytes].into();
            }
            (0..count).flat_map(|row| &data[place(row) * bytes..][..bytes]).copied().collect()
        };
        Some((rows(codes, k / 2), rows(scales, k / BLOCK), global))
    }

    /// Returns the largest magnitude. `read` receives the bytes that were read, if they are [`Source::in_place`].
    ///
    /// # Errors
    /// [`Error::NotFinite`] with the index in the matrix.
    pub(super) fn amax(&self, read: impl Fn(&[u8]) + Sync) -> Result<f32, Error> {
        let k = self.sizes()[1];
        let chunks = self.chunks().map_init(Vec::new, |buffer, rows| {
            let amax = self.rows(rows.clone(), buffer).amax();
            let amax = amax.map_err(|error| error.further_on(rows.start * k));
            self.in_place(rows).into_iter().for_each(&read);
            amax
        });
        // Results are collected first, so the reported error is always the first one.
        let chunks: Vec<_> = chunks.collect();
        chunks.into_iter().try_fold(0.0, |amax, chunk| Ok(f32::max(amax, chunk?)))
    }

    /// Decodes the elements `first`, `first + step`, … of a stored line into every `stride`th element of `out`.
    fn decode_line(&self, line: usize, first: usize, step: usize, out: &mut [f32], stride: usize) {
        let length = self.stored[1];
        let here = line * length..(line + 1) * length;
        if let (Elements::Nvfp4 { codes, scales, global, columns }, false) = (self.elements, self.transposed) {
            let (codes, scales) = (&codes[here.start / 2..here.end / 2], &scales[here.start / BLOCK..here.end / BLOCK]);
            decode_nvfp4(codes, scales, global, out);
            if let Some(columns) = columns {
                out.iter_mut().enumerate().for_each(|(place, out)| *out *= columns.at(place));
            }
            return;
        }
        let out = out.iter_mut().step_by(stride);
        match self.elements {
            Elements::Floats(Floats::F32(numbers)) => spread::<F32>(&numbers[here], first, step, out),
            Elements::Floats(Floats::F16(numbers)) => spread::<F16>(&numbers[here], first, step, out),
            Elements::Floats(Floats::Bf16(numbers)) => spread::<Bf16>(&numbers[here], first, step, out),
            Elements::Floats(Floats::Decoded(numbers)) => spread::<f32>(&numbers[here], first, step, out),
            Elements::Fp8 { codes, scales } => {
                let codes = codes[here].iter().skip(first).step_by(step);
                let (mut scale, mut until) = (0.0, 0);
                for ((place, &code), out) in (first..).step_by(step).zip(codes).zip(out) {
                    if place >= until {
                        let column = place / scales.block[1];
                        scale = scales.at(line, column);
                        until = (column + 1) * scales.block[1];
                    }
                    *out = E4M3[usize::from(code)] * scale;
                }
            }
            Elements::Mxfp4 { codes, exponents } => {
                let codes = &codes[here.start / 2..here.end / 2];
                let exponents = &exponents[here.start / MX_BLOCK..here.end / MX_BLOCK];
                for (place, out) in (first..length).step_by(step).zip(out) {
                    let code = codes[place / 2] >> (4 * (place % 2));
                    *out = e2m1::decode(code) * power(exponents[place / MX_BLOCK]);
                }
            }
            Elements::Nvfp4 { codes, scales, global, columns } if self.transposed => {
                let [codes, scales] =
                    [(codes, 2), (scales, BLOCK)].map(|(data, k)| &data[line / k * length..][..length]);
                let column = columns.map(|columns| columns.at(line));
                for (place, out) in (first..length).step_by(step).zip(out) {
                    let scale = E4M3[usize::from(scales[place])] * global;
                    let number = e2m1::decode(codes[place] >> (4 * (line % 2))) * scale;
                    *out = column.map_or(number, |column| number * column);
                }
            }
            // Rows are decoded above.
            Elements::Nvfp4 { .. } => {}
        }
    }
}

/// Decodes a row of NVFP4.
fn decode_nvfp4(codes: &[u8], scales: &[u8], global: f32, out: &mut [f32]) {
    let blocks = out.as_chunks_mut::<BLOCK>().0.iter_mut().zip(codes.as_chunks::<{ BLOCK / 2 }>().0);
    for ((out, codes), &scale) in blocks.zip(scales) {
        let scale = E4M3[usize::from(scale)] * global;
        for (pair, code) in out.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
            *pair = [e2m1::decode(*code) * scale, e2m1::decode(code >> 4) * scale];
        }
    }
}

/// Decodes one MXFP4 block.
pub(super) fn decode_mxfp4(codes: &[u8], exponent: u8, out: &mut [f32; MX_BLOCK]) {
    let scale = power(exponent);
    for (out, code) in out.chunks_exact_mut(2).zip(codes) {
        (out[0], out[1]) = (e2m1::decode(*code) * scale, e2m1::decode(code >> 4) * scale);
    }
}

/// Copies the numbers `first`, `first + step`, … of a line.
fn spread<'o, T: Copy + Into<f32>>(line: &[T], first: usize, step: usize, out: impl Iterator<Item = &'o mut f32>) {
    for (out, &number) in out.zip(line.get(first..).unwrap_or_default().iter().step_by(step)) {
        *out = number.into();
    }
}

/// Value of each E4M3 code.
static E4M3: LazyLock<[f32; 256]> = LazyLock::new(|| std::array::from_fn(|code| e4m3::decode(code as u8)));

/// Value of an E8M0 code: a power of 2, or NaN for 0xFF.
fn power(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        code => f32::from_bits(u32::from(code) << 23),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads the matrix one row at a time.
    fn numbers(source: &Source<'_>) -> Vec<f32> {
        let mut buffer = Vec::new();
        let floats = source.rows(0..source.sizes()[0], &mut buffer);
        (0..source.sizes().into_iter().product()).map(|index| floats.at(index)).collect()
    }

    fn floats(numbers: &[f32]) -> Elements<'_> {
        Elements::Floats(Floats::Decoded(numbers))
    }

    #[test]
    fn rows_are_read_in_every_storage_order() {
        let stored: Vec<f32> = (0..12).map(|x| x as f32).collect();
        let rows = Rows { first: 1, step: 2, count: 2 };
        let straight = Source::new(floats(&stored), [4, 3], false, rows);
        assert_eq!((straight.sizes(), numbers(&straight)), ([2, 3], vec![3., 4., 5., 9., 10., 11.]));
        let transposed = Source::new(floats(&stored), [3, 4], true, rows);
        assert_eq!((transposed.sizes(), numbers(&transposed)), ([2, 3], vec![1., 5., 9., 3., 7., 11.]));
        let half = Source::new(floats(&stored), [3, 4], true, Rows { first: 2, step: 1, count: 2 });
        assert_eq!(numbers(&half), [2., 6., 10., 3., 7., 11.]);
        assert_eq!(
            (half.amax(|_| ()).unwrap(), Source::new(floats(&[]), [0, 0], false, Rows::all(0)).amax(|_| ()).unwrap()),
            (11.0, 0.0)
        );
    }

    #[test]
    fn fp8_value_is_multiplied_by_its_block_scale() {
        let codes = [0x38; 15]; // ones
        let scale_bytes: Vec<u8> = (1..=4).flat_map(|x| (x as f32).to_le_bytes()).collect();
        let tensor = Tensor { dtype: Dtype::F32, shape: &[2, 2], data: &scale_bytes };
        let scales = Scales::new(tensor, [2, 2], [3, 5], Some([2, 4])).unwrap();
        let source = Source::new(Elements::Fp8 { codes: &codes, scales }, [3, 5], false, Rows::all(3));
        assert_eq!(numbers(&source), [1., 1., 1., 1., 2., 1., 1., 1., 1., 2., 3., 3., 3., 3., 4.]);
        let transposed = Source::new(Elements::Fp8 { codes: &codes, scales }, [3, 5], true, Rows::all(5));
        assert_eq!(numbers(&transposed)[12..], [2., 2., 4.]);
        assert!(Scales::new(tensor, [2, 2], [3, 600], None).is_err());
        let ones = Tensor { dtype: Dtype::F8_E8M0, shape: &[1], data: &[128] };
        let scales = Scales::new(ones, [1, 1], [3, 5], None).unwrap();
        assert_eq!((scales.block, scales.at(2, 0)), ([128, 128], 2.0));
    }

    #[test]
    fn nvfp4_value_is_multiplied_by_both_scales() {
        // Pairs of 1 and 6 with scales 1 and 2; then the same matrix stored as [K, N].
        let (codes, scales, factors) = ([0x72; 16], [0x38, 0x40], [0.25; 32]);
        let columns = Some(Floats::Decoded(&factors));
        let stored = Elements::Nvfp4 { codes: &codes, scales: &scales, global: 0.5, columns };
        let straight = numbers(&Source::new(stored, [1, 32], false, Rows::all(1)));
        assert_eq!((&straight[..3], &straight[15..18]), (&[0.125, 0.75, 0.125][..], &[0.75, 0.25, 1.5][..]));
        assert_eq!(numbers(&Source::new(stored, [32, 1], true, Rows::all(1))), straight);
        let two = Elements::Nvfp4 { codes: &[0x72; 16], scales: &scales, global: 0.5, columns: None };
        let two = Source::new(two, [16, 2], true, Rows { first: 1, step: 1, count: 1 });
        assert_eq!(numbers(&two)[..3], [1.0, 6.0, 1.0]);
    }

    #[test]
    fn mxfp4_value_is_multiplied_by_a_power_of_two() {
        let codes = [0x72; 32]; // pairs of 1 and 6
        let source =
            Source::new(Elements::Mxfp4 { codes: &codes, exponents: &[127, 126] }, [1, 64], false, Rows::all(1));
        assert_eq!(numbers(&source)[30..34], [1.0, 6.0, 0.5, 3.0]);
        assert_eq!([power(0), power(254)], [2f32.powi(-127), 2f32.powi(127)]);
        let broken = Elements::Mxfp4 { codes: &codes, exponents: &[127, 255] };
        let broken = Source::new(broken, [1, 64], false, Rows::all(1));
        assert!(matches!(broken.amax(|_| ()), Err(Error::NotFinite { index: 32, .. })));
    }
}
