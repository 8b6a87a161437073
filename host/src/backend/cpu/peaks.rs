//! Peak rates of this CPU, measured, because no datasheet gives the peaks of a share of a machine.

use std::hint::black_box;
use std::sync::OnceLock;
use std::time::Instant;

use rayon::prelude::*;

use super::epilogue::Epilogue;
use super::isa::Isa;
use super::kernel::{Kernel, Tile};
use super::layout::{Nvfp4, PANEL_ROWS, Panels, Tokens, unpack_nvfp4};
use crate::format::{BLOCK, Matrix};
use crate::plan::roofline::Peaks;
use crate::problem::TokenDtype;

/// Number of measurements. The best counts, since other processes may use the machine.
const TRIES: usize = 5;

/// Peaks of all threads together. The first call per instruction set measures them, which takes a fraction of a second.
pub(super) fn peaks(isa: Isa, kernel: &Kernel<Nvfp4>) -> Peaks {
    static MEASURED: [OnceLock<Peaks>; Isa::ALL.len()] = [const { OnceLock::new() }; _];
    *MEASURED[isa as usize]
        .get_or_init(|| Peaks { bytes_per_second: read_rate(), ops_per_second: operation_rate(kernel) })
}

/// Bytes per second of sequential reads from a buffer that is far larger than the caches.
fn read_rate() -> f64 {
    let memory = vec![1u64; 32 << 20];
    best_rate((memory.len() * size_of::<u64>()) as f64, || {
        black_box(memory.par_chunks(1 << 16).map(sum_in_four_streams).reduce(|| 0, u64::wrapping_add));
    })
}

/// Reads four streams at once. A single stream waits at the end of every page and is a fifth slower.
fn sum_in_four_streams(memory: &[u64]) -> u64 {
    let (front, back) = memory.split_at(memory.len() / 2);
    let ((a, b), (c, d)) = (front.split_at(front.len() / 2), back.split_at(back.len() / 2));
    let sums = a.iter().zip(b).zip(c).zip(d).map(|(((a, b), c), d)| a + b + c + d);
    sums.fold(0, u64::wrapping_add)
}

/// Operations per second of the kernel with operands that stay in a core's L1 cache: one panel and 32 tokens.
fn operation_rate(kernel: &Kernel<Nvfp4>) -> f64 {
    const TOKENS: usize = 32;
    const REPEAT: usize = 400;
    const K: usize = BLOCK * Nvfp4::CHUNK_BLOCKS;
    let matrix = |rows: usize| {
        Matrix::new(rows, K, vec![0x2A; rows * K / 2], vec![0x38; rows * K / BLOCK], 1.0)
            .expect("K is a multiple of the block")
    };
    let weights = Panels::new(&[&matrix(PANEL_ROWS)]).expect("a panel is small enough to allocate");
    let rows = matrix(TOKENS);
    let mut tokens = vec![Nvfp4::ZERO; Nvfp4::len(TOKENS, K)];
    let token = |(row, out): (usize, &mut [_])| unpack_nvfp4(&rows, row, 0, out);
    tokens.chunks_mut(Nvfp4::CHUNK_BLOCKS).enumerate().for_each(token);

    let threads = rayon::current_num_threads();
    let operations = (2 * TOKENS * PANEL_ROWS * K * REPEAT * threads) as f64;
    best_rate(operations, || {
        rayon::broadcast(|_| {
            let mut output = vec![0u16; TOKENS * PANEL_ROWS];
            for _ in 0..REPEAT {
                let tile = Tile {
                    weights: &weights,
                    panels: 0..1,
                    tokens: &tokens,
                    are_ordinary: true,
                    m: TOKENS,
                    rows: 0..TOKENS,
                    epilogue: Epilogue::of_nvfp4([1.0, 0.0], TokenDtype::F16),
                    output: output.as_mut_ptr(),
                };
                Nvfp4::with_scratch(|scratch| kernel(black_box(&tile), scratch));
            }
        });
    })
}

fn best_rate(work: f64, mut run: impl FnMut()) -> f64 {
    let seconds = (0..TRIES).map(|_| {
        let start = Instant::now();
        run();
        start.elapsed().as_secs_f64()
    });
    work / seconds.fold(f64::INFINITY, f64::min)
}
