//! The host's FP8 sums and order of K, which are the reference, against the emulator's, which model a GPU's.

use nvfp4::fp8::{Factors, STEP, position, sum};
use ptx_emulator::hw::descriptor::Element;
use ptx_emulator::hw::matmul::{Floats, Packing, multiply_f32};
use ptx_emulator::hw::sums::{Adder, Family, Instruction, Kind};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

/// Adds the products of rows of one step of e4m3 codes to `sums`, as Hopper's `wgmma` does.
fn multiply(a: &[u8], b: &[u8], sums: &mut [f32]) {
    let rows = |codes: &[u8]| Floats::decode(Element::E4m3, Packing::Dense, codes.len() / STEP, STEP, codes);
    let adder = Adder::of(Family::Hopper, Instruction::Wgmma, Kind::of(Element::E4m3));
    multiply_f32(&rows(a), &rows(b), Some(&adder), sums);
}

/// Returns the sum that an emulated tensor core computes, step by step.
fn emulated(a: &[u8], b: &[u8]) -> f32 {
    let k = a.len();
    // The rest of the last step is padded with zeros.
    let ordered = |codes: &[u8]| {
        let mut ordered = vec![0; k.next_multiple_of(STEP)];
        (0..k).for_each(|column| ordered[position(k, column)] = codes[column]);
        ordered
    };
    let (a, b) = (ordered(a), ordered(b));
    let mut sum = [0.0];
    for (a, b) in a.chunks(STEP).zip(b.chunks(STEP)) {
        multiply(a, b, &mut sum);
    }
    sum[0]
}

#[test]
fn fp8_sums_match_the_emulators_bits() {
    /// Draws a code of one kind.
    type Draw = fn(&mut Xoshiro256PlusPlus) -> u8;
    let draws: [Draw; 6] = [
        // Every code but NaN.
        |rng| rng.random_range(0..0x7F) | rng.random_range(0..2) << 7,
        // Subnormal numbers and zeros.
        |rng| rng.random_range(0..8) | rng.random_range(0..2) << 7,
        // Mostly zeros.
        |rng| if rng.random_bool(0.9) { 0x80 * rng.random_range(0..2u8) } else { rng.random_range(0..0x7F) },
        // Large numbers of one sign.
        |rng| rng.random_range(0x70..0x7F),
        // The largest and the smallest numbers.
        |rng| [0x7E, 0xFE, 0x01, 0x81, 0x08, 0x88][rng.random_range(0..6)],
        // Numbers around one.
        |rng| rng.random_range(0x30..0x40) | rng.random_range(0..2) << 7,
    ];
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(1);
    for k in [0, 16, 32, 48, 64, 80, 96, 112, 128, 176, 240, 720, 2048] {
        for (a, b) in draws.iter().flat_map(|a| draws.map(|b| (a, b))) {
            for _ in 0..8 {
                let [a, b] = [*a, b].map(|draw| (0..k).map(|_| draw(&mut rng)).collect::<Vec<u8>>());
                let (got, want) = (sum(&Factors::new(&a), &Factors::new(&b)), emulated(&a, &b));
                assert_eq!(got.to_bits(), want.to_bits(), "K = {k}: found {got}, expected {want}");
            }
        }
    }
}

#[test]
fn every_pair_of_codes_added_to_a_sum_matches_the_emulator() {
    // One column of the first step and one column of the second step.
    let row = |codes: [u8; 2]| {
        let mut row = [0; 2 * STEP];
        (row[0], row[8]) = (codes[0], codes[1]);
        assert_eq!([0, 8].map(|column| position(row.len(), column) / STEP), [0, 1]);
        row
    };
    let step = |code: u8| (0..STEP).map(move |column| if column == 0 { code } else { 0 });
    for first in [0x00, 0x01, 0x38, 0x7E, 0xFE] {
        let mut want = vec![0.0f32; 256 * 256];
        let rows = |codes: &dyn Fn(u8) -> u8| -> Vec<u8> { (0..=u8::MAX).flat_map(|row| step(codes(row))).collect() };
        for (a, b) in [(rows(&|_| first), rows(&|_| 0x7E)), (rows(&|a| a), rows(&|b| b))] {
            multiply(&a, &b, &mut want);
        }
        let [a, b] =
            [first, 0x7E].map(|first| (0..=u8::MAX).map(|code| Factors::new(&row([first, code]))).collect::<Vec<_>>());
        for (at, want) in want.into_iter().enumerate() {
            let got = sum(&a[at / 256], &b[at % 256]);
            assert!(
                got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(),
                "codes {first:#x} and {at:#06x}: found {got}, expected {want}"
            );
        }
    }
}
