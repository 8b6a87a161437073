//! Tokens to e4m3 with a scale, sorted by expert (`moe_quantize`), in the emulator: every code and scale is compared with the
//! library's definition, on several schedules, with the sanitizer; broken PTX makes faults.

use kernels_gpu::moe_quantize::abi::{ENTRIES, Quantize};
use kernels_gpu::moe_route::abi::NO_ROW;
use kernels_gpu::sorted::{CHUNK_BYTES, LINE_BYTES, ROW_MULTIPLE, chunk, line};
use kernels_gpu::units::{ROW_LANES, block_columns, block_start, e4m3_position, element, k_blocks, lane_words};
use nvfp4::fp8::quantise_token;
use nvfp4::problem::OutDtype;
use nvfp4_tests::sabotage::{Sabotage, check_sabotages};
use ptx_emulator::{Arg, Device, DeviceConfig, Fault, LaunchConfig, Module, Schedule};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

const SCHEDULES: [Schedule; 3] = [Schedule::Fair, Schedule::Worst, Schedule::Seed(1)];

/// What outputs hold before a launch.
const POISON: u8 = 0xa5;

/// Rows that codes have room for besides those that there are.
const SPARE_ROWS: u32 = 8;

fn ptx() -> &'static str {
    nvfp4::kernels::ptx("moe_quantize").expect("a kernel of this name")
}

/// Tokens and their rows.
struct Tokens {
    dtype: OutDtype,
    k: u32,
    /// Elements from one token to the next one.
    pitch: u32,
    x: Vec<u16>,
    weights: Option<Vec<f32>>,
    /// Each choice's row; none if tokens are rows.
    places: Option<Vec<u32>>,
    top_k: u32,
    /// The token of each row.
    rows: Vec<u32>,
    /// The first row of each expert, and at last the number of rows.
    firsts: Vec<u32>,
}

impl Tokens {
    /// So many tokens, each of which names some of the experts at random, and now and then nobody.
    fn random(dtype: OutDtype, tokens: u32, top_k: u32, experts: u32, k: u32) -> Self {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(u64::from(k));
        let named: Vec<_> = (0..tokens * top_k).map(|_| random.random_range(0..=experts)).collect();
        let (mut rows, mut firsts, mut places) = (Vec::new(), vec![0], vec![NO_ROW; named.len()]);
        for expert in 0..experts {
            for choice in (0..named.len()).filter(|&choice| named[choice] == expert) {
                places[choice] = rows.len() as u32;
                rows.push(choice as u32 / top_k);
            }
            rows.resize(rows.len().next_multiple_of(ROW_MULTIPLE as usize), NO_ROW);
            firsts.push(rows.len() as u32);
        }
        let pitch = k + 8;
        let number = |random: &mut Xoshiro256PlusPlus| dtype.round_f32(random.random_range(-3.0..3.0));
        let mut x: Vec<_> = (0..tokens * pitch).map(|_| number(&mut random)).collect();
        // NaN, both infinities, all zeros, the smallest number, the largest.
        let special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY].map(|number| dtype.round_f32(number));
        for (token, bits) in special.into_iter().enumerate().take(tokens as usize) {
            x[token * pitch as usize + (5 * token + 3) % k as usize] = bits;
        }
        let fill: [&[u16]; 3] = [&[0], &[0x8001, 1, 0], &[if dtype == OutDtype::F16 { 0x7bff } else { 0x7f7f }, 1]];
        for (token, numbers) in fill.into_iter().enumerate().map(|(at, of)| (at + 3, of)) {
            if token < tokens as usize {
                let of_token = x[token * pitch as usize..][..k as usize].iter_mut();
                of_token.zip(numbers.iter().cycle()).for_each(|(x, number)| *x = *number);
            }
        }
        Self { dtype, k, pitch, x, weights: None, places: Some(places), top_k, rows, firsts }
    }

    fn with_weights(self) -> Self {
        let weights = (0..self.x.len() as u32 / self.pitch).map(|token| (token as f32 - 3.0) * 0.37).collect();
        Self { weights: Some(weights), ..self }
    }

    /// The same tokens, each of them a row: of an expert that all share, whose list says which rows are none, or without a list.
    fn into_rows(self, has_list: bool) -> Self {
        let tokens = self.x.len() as u32 / self.pitch;
        let filled = tokens.next_multiple_of(ROW_MULTIPLE);
        let rows = (0..filled).map(|row| if row < tokens { row } else { NO_ROW }).collect();
        let firsts = vec![0, if has_list { filled } else { tokens }];
        Self { places: None, top_k: 1, rows: if has_list { rows } else { (0..tokens).collect() }, firsts, ..self }
    }

    fn capacity(&self) -> u32 {
        // Where there are no lists, every row that there is room for is written.
        self.rows.len() as u32 + if self.firsts.is_empty() { 0 } else { SPARE_ROWS }
    }

    /// Codes and scales that must come out.
    fn expected(&self) -> (Vec<u8>, Vec<f32>) {
        let (k, capacity) = (self.k, self.capacity());
        let mut codes = vec![POISON; (capacity * k_blocks(k) * LINE_BYTES) as usize];
        let mut scales = vec![f32::from_bits(u32::from_ne_bytes([POISON; 4])); capacity as usize];
        for (row, &token) in self.rows.iter().enumerate() {
            let fill = |codes: &mut [u8], code: u8| {
                for k_block in 0..k_blocks(k) {
                    codes[line(capacity, k_block, row as u32) as usize..][..LINE_BYTES as usize].fill(code);
                }
            };
            fill(&mut codes, 0);
            scales[row] = 0.0;
            if token == NO_ROW {
                continue;
            }
            let mut bits = self.x[(token * self.pitch) as usize..][..k as usize].to_vec();
            if let Some(weights) = &self.weights {
                let weighted = |bits| self.dtype.round_f32(self.dtype.decode(bits) as f32 * weights[token as usize]);
                bits.iter_mut().for_each(|bits| *bits = weighted(*bits));
            }
            let mut of_token = vec![0; k as usize];
            scales[row] = quantise_token(self.dtype, &bits, &mut of_token);
            if scales[row].is_nan() {
                // What is no element is a NaN too.
                fill(&mut codes, 0x7f);
            }
            for k_block in 0..k_blocks(k) {
                let columns = block_columns(k, k_block);
                let words = (0..ROW_LANES).flat_map(|lane| (0..lane_words(columns)).map(move |word| (lane, word)));
                for ((lane, word), nibble) in words.flat_map(|of| (0..8).map(move |nibble| (of, nibble))) {
                    let Some(element) = element(columns, lane, word, nibble) else { continue };
                    let position = e4m3_position(lane, word, nibble);
                    let at = line(capacity, k_block, row as u32)
                        + u64::from(chunk(row as u32, position / CHUNK_BYTES) + position % CHUNK_BYTES);
                    codes[at as usize] = of_token[(block_start(k, k_block) + element) as usize];
                }
            }
        }
        (codes, scales)
    }

    /// As [`Self::into_rows`], of a linear layer: the host knows how many there are, and rows behind them become zeros.
    fn into_known_rows(self) -> Self {
        let tokens = self.x.len() as u32 / self.pitch;
        let filled = tokens.next_multiple_of(ROW_MULTIPLE);
        let rows = (0..filled).map(|row| if row < tokens { row } else { NO_ROW }).collect();
        Self { places: None, top_k: 1, rows, firsts: Vec::new(), ..self }
    }

    /// What a text of the kernel makes of them, twice over.
    fn quantise(&self, ptx: &str, schedule: Schedule) -> Result<(Vec<u8>, Vec<f32>), Fault> {
        let module = Module::parse(ptx).unwrap();
        let mut device = Device::new(DeviceConfig::default());
        let (expected, scales) = self.expected();
        let codes = device.upload(&vec![POISON; expected.len()]);
        let scales = device.upload(&vec![POISON; 4 * scales.len()]);
        let is_known = self.firsts.is_empty();
        let has_list =
            !is_known && (self.places.is_some() || self.firsts[1] as usize != self.x.len() / self.pitch as usize);
        let quantize = Quantize {
            input: device.upload(&self.x).address,
            input_pitch: u64::from(2 * self.pitch),
            input_weights: self.weights.as_ref().map_or(0, |weights| device.upload(weights).address),
            places: self.places.as_ref().map_or(0, |places| device.upload(places).address),
            rows: if has_list { device.upload(&self.rows).address } else { 0 },
            firsts: if is_known { 0 } else { device.upload(&self.firsts).address },
            codes: codes.address,
            scales: scales.address,
            token_count: if has_list || is_known { self.x.len() as u32 / self.pitch } else { 0 },
            top_k: self.top_k,
            experts: if is_known { 1 } else { self.firsts.len() as u32 - 1 },
            row_capacity: self.capacity(),
            k: self.k,
            unused: 0,
        };
        let entry = ENTRIES[usize::from(self.dtype == OutDtype::Bf16)];
        let grid = LaunchConfig {
            schedule,
            overlaps: true,
            ..LaunchConfig::linear(quantize.blocks() as u32, Quantize::THREADS)
        };
        // A layer may follow another in the same memory.
        for _ in 0..2 {
            let report = device.launch(&module, entry, &grid, &[Arg::value(quantize)])?;
            assert!(report.warnings.is_empty(), "{:?}", report.warnings);
        }
        Ok((device.download(codes), device.download(scales)))
    }

    fn check(&self, name: &str) {
        let (codes, scales) = self.expected();
        for schedule in SCHEDULES {
            let found = self.quantise(ptx(), schedule);
            let (found_codes, found_scales) = found.unwrap_or_else(|fault| panic!("{name}, {schedule}: {fault}"));
            let wrong = (0..scales.len()).find(|&row| {
                found_scales[row].to_bits() != scales[row].to_bits()
                    && !(found_scales[row].is_nan() && scales[row].is_nan())
            });
            assert_eq!(wrong.map(|row| (row, found_scales[row], scales[row])), None, "{name}, {schedule}: scales");
            let wrong = (0..codes.len()).find(|&at| found_codes[at] != codes[at]);
            assert_eq!(wrong.map(|at| (at, found_codes[at], codes[at])), None, "{name}, {schedule}: codes");
        }
    }
}

#[test]
fn every_code_and_scale_is_the_definitions_whatever_the_columns() {
    for k in [16, 32, 48, 64, 80, 96, 112, 128, 176, 240, 272, 720, 1088] {
        let dtype = if k % 32 == 0 { OutDtype::F16 } else { OutDtype::Bf16 };
        Tokens::random(dtype, 9, 3, 4, k).check(&format!("{k} columns"));
    }
}

#[test]
fn rows_may_be_tokens_and_tokens_may_have_weights() {
    for dtype in [OutDtype::F16, OutDtype::Bf16] {
        let tokens = || Tokens::random(dtype, 13, 1, 3, 144);
        tokens().with_weights().check("weights");
        tokens().into_rows(true).check("rows of a list");
        tokens().into_rows(false).check("rows");
        tokens().into_known_rows().check("rows of a linear layer");
    }
}

#[test]
fn a_wait_that_is_left_out_is_found() {
    let tokens = Tokens::random(OutDtype::Bf16, 9, 3, 4, 144);
    let run = |ptx: &str| tokens.quantise(ptx, Schedule::Worst).err();
    check_sabotages(ptx(), ENTRIES[1], &[Sabotage::leave_out("griddepcontrol.wait", 1)], run);
}
