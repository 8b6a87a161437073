//! Quantizes a weight matrix. The rate counts the input bytes.

mod common;

use criterion::{Criterion, SamplingMode, Throughput};
use half::bf16;
use nvfp4::format::{BLOCK, Matrix, e4m3};
use nvfp4::quantize::{Number, quantize};

/// Size of an expert's gate or up projection.
const ROWS: usize = 4096;
const K: usize = 7168;

fn bench<T: Number>(criterion: &mut Criterion, dtype: &str, numbers: &[T]) {
    check(numbers, &quantize(numbers, ROWS, K).expect("finite numbers"));
    let mut group = criterion.benchmark_group("quantize");
    group.sampling_mode(SamplingMode::Flat);
    group.throughput(Throughput::BytesDecimal(size_of_val(numbers) as u64));
    group.bench_function(dtype, |bencher| bencher.iter(|| quantize(numbers, ROWS, K)));
    group.finish();
}

/// Checks some rows. The error of a number is at most half of the widest step between values, or the cut by a
/// rounded-down scale.
fn check<T: Number>(numbers: &[T], matrix: &Matrix<'_>) {
    let mut back = vec![0.0; K];
    for row in (0..ROWS).step_by(ROWS / 16) {
        matrix.dequantize_row(row, &mut back);
        for (k, (&number, back)) in numbers[row * K..].iter().zip(&back).enumerate() {
            let unit = e4m3::decode(matrix.row_scales(row)[k / BLOCK]) * matrix.global_scale();
            let number: f32 = number.into();
            assert!((number - back).abs() <= unit * 1.000_001, "row {row}, column {k}: {number} became {back}");
        }
    }
}

fn main() {
    let mut criterion = common::criterion();
    // Pseudo-random numbers from −1 to 1: Knuth's multiplicative hash of the index.
    let number = |at: usize| (at as u32).wrapping_mul(2_654_435_761) as i32 as f32 / 2f32.powi(31);
    let f32s: Vec<f32> = (0..ROWS * K).map(number).collect();
    let bf16s: Vec<bf16> = f32s.iter().map(|&number| bf16::from_f32(number)).collect();
    bench(&mut criterion, "f32", &f32s);
    bench(&mut criterion, "bf16", &bf16s);
    criterion.final_summary();
}
