//! Tests of `moe_quantize` (tokens to e4m3 with a scale) and `moe_quantize_nvfp4` (tokens to NVFP4), sorted by expert,
//! in the emulator. Every code and scale is compared with the library's definition, on several schedules, with the
//! sanitizer. Broken PTX must cause faults.

use kernels_gpu::layer::moe_quantize::abi::{ENTRIES, Quantize};
use kernels_gpu::layer::moe_quantize_nvfp4::abi as nvfp4_abi;
use kernels_gpu::lists::{NO_ROW, tile_size, token_tiles};
use kernels_gpu::nvfp4_rows::{TOKEN_STEP, row_bytes, scale_tiles, token_scale, token_scale_bytes};
use kernels_gpu::sorted::{CHUNK_BYTES, LINE_BYTES, ROW_MULTIPLE, chunk, line};
use kernels_gpu::units::{ROW_LANES, block_columns, block_start, e4m3_position, element, k_blocks, lane_words};
use nvfp4::fp4;
use nvfp4::fp8::quantize_token;
use nvfp4::problem::TokenDtype;
use nvfp4_tests::sabotage::{Sabotage, check_sabotages};
use ptx_emulator::{Arg, Device, DeviceConfig, Fault, LaunchConfig, Module, Schedule};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

const SCHEDULES: [Schedule; 3] = [Schedule::Fair, Schedule::Worst, Schedule::Seed(1)];

/// Byte that fills outputs before a launch.
const POISON: u8 = 0xa5;

/// Unused rows at the end of the codes.
const SPARE_ROWS: u32 = 8;

fn ptx() -> &'static str {
    nvfp4::kernels::ptx("moe_quantize").expect("a kernel of this name")
}

/// Tokens, and the rows that they are sorted into.
struct Tokens {
    dtype: TokenDtype,
    k: u32,
    /// Elements from one token to the next one.
    pitch: u32,
    x: Vec<u16>,
    weights: Option<Vec<f32>>,
    /// Expert of each choice; a number behind the last expert names none.
    named: Vec<u32>,
    /// Row of each choice. `None`: each token is a row.
    places: Option<Vec<u32>>,
    top_k: u32,
    /// Token of each row.
    rows: Vec<u32>,
    /// First row of each expert, then the number of rows. Empty: the host knows the rows.
    firsts: Vec<u32>,
}

impl Tokens {
    /// Makes tokens with random experts. Some choices name no expert. Each expert's rows are padded to
    /// [`ROW_MULTIPLE`].
    fn random(dtype: TokenDtype, tokens: u32, top_k: u32, experts: u32, k: u32) -> Self {
        Self::filled_up(ROW_MULTIPLE, dtype, [tokens, top_k, experts, k])
    }

    /// Same as [`Self::random`], padded to a multiple of `multiple` rows.
    fn filled_up(multiple: u32, dtype: TokenDtype, [tokens, top_k, experts, k]: [u32; 4]) -> Self {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(u64::from(k));
        let named: Vec<_> = (0..tokens * top_k).map(|_| random.random_range(0..=experts)).collect();
        let (mut rows, mut firsts, mut places) = (Vec::new(), vec![0], vec![NO_ROW; named.len()]);
        for expert in 0..experts {
            for choice in (0..named.len()).filter(|&choice| named[choice] == expert) {
                places[choice] = rows.len() as u32;
                rows.push(choice as u32 / top_k);
            }
            rows.resize(rows.len().next_multiple_of(multiple as usize), NO_ROW);
            firsts.push(rows.len() as u32);
        }
        let pitch = k + 8;
        let number = |random: &mut Xoshiro256PlusPlus| dtype.round_f32(random.random_range(-3.0..3.0));
        let mut x: Vec<_> = (0..tokens * pitch).map(|_| number(&mut random)).collect();
        // Special tokens: one each with a NaN and the infinities, then all zeros, smallest numbers and largest numbers.
        let special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY].map(|number| dtype.round_f32(number));
        for (token, bits) in special.into_iter().enumerate().take(tokens as usize) {
            x[token * pitch as usize + (5 * token + 3) % k as usize] = bits;
        }
        let fill: [&[u16]; 3] = [&[0], &[0x8001, 1, 0], &[if dtype == TokenDtype::F16 { 0x7bff } else { 0x7f7f }, 1]];
        for (token, numbers) in fill.into_iter().enumerate().map(|(at, of)| (at + 3, of)) {
            if token < tokens as usize {
                let of_token = x[token * pitch as usize..][..k as usize].iter_mut();
                of_token.zip(numbers.iter().cycle()).for_each(|(x, number)| *x = *number);
            }
        }
        Self { dtype, k, pitch, x, weights: None, named, places: Some(places), top_k, rows, firsts }
    }

    fn with_weights(self) -> Self {
        let weights = (0..self.x.len() as u32 / self.pitch).map(|token| (token as f32 - 3.0) * 0.37).collect();
        Self { weights: Some(weights), ..self }
    }

    /// Makes each token a row of one expert. With a list, the list marks the padding rows. Without a list there is no
    /// padding.
    fn into_rows(self, has_list: bool) -> Self {
        let tokens = self.x.len() as u32 / self.pitch;
        let filled = tokens.next_multiple_of(ROW_MULTIPLE);
        let rows = (0..filled).map(|row| if row < tokens { row } else { NO_ROW }).collect();
        let firsts = vec![0, if has_list { filled } else { tokens }];
        Self { places: None, top_k: 1, rows: if has_list { rows } else { (0..tokens).collect() }, firsts, ..self }
    }

    fn capacity(&self) -> u32 {
        // If the host knows the rows, the kernel writes every row.
        self.rows.len() as u32 + if self.firsts.is_empty() { 0 } else { SPARE_ROWS }
    }

    /// Returns the bits of a token, multiplied by its weight.
    fn bits(&self, token: u32) -> Vec<u16> {
        let mut bits = self.x[(token * self.pitch) as usize..][..self.k as usize].to_vec();
        if let Some(weights) = &self.weights {
            let weighted = |bits| self.dtype.round_f32(self.dtype.decode(bits) as f32 * weights[token as usize]);
            bits.iter_mut().for_each(|bits| *bits = weighted(*bits));
        }
        bits
    }

    /// Returns the expected codes and scales.
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
            let bits = self.bits(token);
            let mut of_token = vec![0; k as usize];
            scales[row] = quantize_token(self.dtype, &bits, &mut of_token);
            if scales[row].is_nan() {
                // Codes that belong to no element are NaN too.
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

    /// Same as [`Self::into_rows`], for a linear layer: the host knows the number of rows. Rows after the last token
    /// become zeros.
    fn into_known_rows(self) -> Self {
        let tokens = self.x.len() as u32 / self.pitch;
        let filled = tokens.next_multiple_of(ROW_MULTIPLE);
        let rows = (0..filled).map(|row| if row < tokens { row } else { NO_ROW }).collect();
        Self { places: None, top_k: 1, rows, firsts: Vec::new(), ..self }
    }

    /// Runs a PTX text of the kernel twice and returns the codes and scales.
    fn quantize(&self, ptx: &str, schedule: Schedule) -> Result<(Vec<u8>, Vec<f32>), Fault> {
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
        let entry = ENTRIES[usize::from(self.dtype == TokenDtype::Bf16)];
        let grid = LaunchConfig {
            schedule,
            overlaps: true,
            ..LaunchConfig::linear(quantize.blocks() as u32, Quantize::THREADS)
        };
        // The second launch uses the same memory, like a second layer.
        for _ in 0..2 {
            let report = device.launch(&module, entry, &grid, &[Arg::value(quantize)])?;
            assert!(report.warnings.is_empty(), "{:?}", report.warnings);
        }
        Ok((device.download(codes), device.download(scales)))
    }

    fn check(&self, name: &str) {
        let (codes, scales) = self.expected();
        for schedule in SCHEDULES {
            let found = self.quantize(ptx(), schedule);
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
fn codes_and_scales_are_right_for_any_number_of_columns() {
    for k in [16, 32, 48, 64, 80, 96, 112, 128, 176, 240, 272, 720, 1088] {
        let dtype = if k % 32 == 0 { TokenDtype::F16 } else { TokenDtype::Bf16 };
        Tokens::random(dtype, 9, 3, 4, k).check(&format!("{k} columns"));
    }
}

#[test]
fn weighted_tokens_and_unsorted_rows_are_right() {
    for dtype in [TokenDtype::F16, TokenDtype::Bf16] {
        let tokens = || Tokens::random(dtype, 13, 1, 3, 144);
        tokens().with_weights().check("weights");
        tokens().into_rows(true).check("rows of a list");
        tokens().into_rows(false).check("rows");
        tokens().into_known_rows().check("rows of a linear layer");
    }
}

#[test]
fn removing_any_wait_is_found() {
    let tokens = Tokens::random(TokenDtype::Bf16, 9, 3, 4, 144);
    let run = |ptx: &str| tokens.quantize(ptx, Schedule::Worst).is_err();
    check_sabotages(ptx(), ENTRIES[1], &[Sabotage::leave_out("griddepcontrol.wait", 1)], run);
}

/// Inputs of `moe_quantize_nvfp4`: tokens without padding rows, in tiles of up to `tile_tokens` tokens.
struct Nvfp4 {
    tokens: Tokens,
    tile_tokens: u32,
    /// Input scale of each expert. 0: each token has its own global scale.
    input_scales: Vec<f32>,
    /// `true` if the host knows the number of rows, so that there are no lists.
    is_known: bool,
}

/// Entries of `moe_quantize_nvfp4`.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    /// A warp per token.
    Rows,
    /// Several warps per token.
    Few,
    /// Several warps per token, and no lists before the launch.
    Route,
}

/// Values, scales and global scales. [`POISON`] marks bytes that must not be written.
#[derive(Debug, PartialEq)]
struct Nvfp4Rows {
    values: Vec<u8>,
    scales: Vec<u8>,
    /// Bits of the global scales. Every NaN has the same bits.
    globals: Vec<u32>,
}

impl Nvfp4 {
    fn random(
        dtype: TokenDtype,
        [tokens, top_k, experts, k]: [u32; 4],
        tile_tokens: u32,
        input_scales: &[f32],
    ) -> Self {
        let tokens = Tokens::filled_up(1, dtype, [tokens, top_k, experts, k]);
        let input_scales = input_scales.iter().copied().cycle().take(experts as usize).collect();
        Self { tokens, tile_tokens, input_scales, is_known: false }
    }

    /// Makes each token a row of one expert.
    fn into_rows(self) -> Self {
        let tokens = self.tokens.into_rows(false);
        Self { tokens, input_scales: self.input_scales[..1].to_vec(), ..self }
    }

    /// Same as [`Self::into_rows`], for a linear layer: the host knows the number of rows.
    fn into_known_rows(self) -> Self {
        Self { is_known: true, ..self.into_rows() }
    }

    /// Returns the first token tile of each expert, then the number of tiles.
    fn tile_firsts(&self) -> Vec<u32> {
        let tiles = self.tokens.firsts.windows(2).map(|two| token_tiles(two[1] - two[0], self.tile_tokens));
        let mut sum = 0;
        [0].into_iter()
            .chain(tiles.map(|tiles| {
                sum += tiles;
                sum
            }))
            .collect()
    }

    fn poisoned(&self) -> Nvfp4Rows {
        let (k, rows) = (self.tokens.k, self.tokens.rows.len());
        Nvfp4Rows {
            values: vec![POISON; rows * row_bytes(k) as usize],
            scales: vec![POISON; *self.tile_firsts().last().unwrap() as usize * token_scale_bytes(k) as usize],
            globals: vec![u32::from_ne_bytes([POISON; 4]); rows],
        }
    }

    fn expected(&self) -> Nvfp4Rows {
        let (Tokens { dtype, k, firsts, .. }, tile_firsts) = (&self.tokens, self.tile_firsts());
        let (columns, mut rows) = (*k as usize, self.poisoned());
        for expert in 0..firsts.len() - 1 {
            let (first, count) = (firsts[expert], firsts[expert + 1] - firsts[expert]);
            for row in 0..count {
                let (mut codes, mut scales) = (vec![0; columns], vec![0; columns / 16]);
                let input_scale = Some(self.input_scales[expert]).filter(|scale| *scale != 0.0);
                let bits = self.tokens.bits(self.tokens.rows[(first + row) as usize]);
                let global = fp4::quantize_token(*dtype, &bits, input_scale, &mut codes, &mut scales);
                rows.globals[(first + row) as usize] = canonical(global.to_bits());
                let values = &mut rows.values[((first + row) * row_bytes(*k)) as usize..];
                values.iter_mut().zip(codes.as_chunks::<2>().0).for_each(|(to, [low, high])| *to = low | high << 4);
                let size = tile_size(count, tile_firsts[expert + 1] - tile_firsts[expert]);
                let (tile, in_tile) = (tile_firsts[expert] + row / size, row % size);
                scales.resize(4 * scale_tiles(*k) as usize, 0);
                // Scales after the tile's last token are zeros.
                let is_last = row + 1 == count || in_tile + 1 == size;
                let end = if is_last { (in_tile + 1).next_multiple_of(TOKEN_STEP) } else { in_tile + 1 };
                for (block, token) in
                    (0..scales.len()).flat_map(|block| (in_tile..end).map(move |token| (block, token)))
                {
                    let at = token_scale(tile, token, block as u32, *k) as usize;
                    rows.scales[at] = if token == in_tile { scales[block] } else { 0 };
                }
            }
        }
        rows
    }

    /// Runs an entry of the kernel's PTX text twice and returns its outputs.
    fn quantize(&self, ptx: &str, form: Form, schedule: Schedule) -> Result<Nvfp4Rows, Fault> {
        let (module, tokens, poisoned) = (Module::parse(ptx).unwrap(), &self.tokens, self.poisoned());
        let mut device = Device::new(DeviceConfig::default());
        let (values, scales) = (device.upload(&poisoned.values), device.upload(&poisoned.scales));
        let globals = device.upload(&poisoned.globals);
        // An entry that makes the lists finds other numbers in their place.
        let mut list = |list: &[u32]| {
            let poison = vec![u32::from_ne_bytes([POISON; 4]); list.len()];
            device.upload(if form == Form::Route { &poison[..] } else { list })
        };
        let places = tokens.places.as_ref().map(|places| list(places));
        let [firsts, tile_firsts] = [&tokens.firsts, &self.tile_firsts()].map(|of| list(of));
        let quantize = nvfp4_abi::Quantize {
            input: device.upload(&tokens.x).address,
            input_pitch: u64::from(2 * tokens.pitch),
            input_weights: tokens.weights.as_ref().map_or(0, |weights| device.upload(weights).address),
            places: places.as_ref().map_or(0, |places| places.address),
            firsts: if self.is_known { 0 } else { firsts.address },
            tile_firsts: if self.is_known { 0 } else { tile_firsts.address },
            input_scales: device.upload(&self.input_scales).address,
            values: values.address,
            scales: scales.address,
            globals: globals.address,
            // If lists give the rows, the token count is only an upper bound.
            token_count: tokens.x.len() as u32 / tokens.pitch
                + if tokens.places.is_some() || self.is_known { 0 } else { 11 },
            token_tiles: if self.is_known { *self.tile_firsts().last().unwrap() } else { 0 },
            top_k: tokens.top_k,
            experts: tokens.firsts.len() as u32 - 1,
            k: tokens.k,
            unused: 0,
        };
        // Experts have other numbers in the ids than in the layer. The last number that can be named is no expert.
        let map: Vec<u32> = (0..quantize.experts).rev().chain([NO_ROW]).collect();
        let id = |expert: u32| quantize.experts.checked_sub(1 + expert).unwrap_or(quantize.experts);
        let ids: Vec<u32> = tokens.named.iter().map(|&expert| id(expert)).collect();
        let route = nvfp4_abi::RouteQuantize {
            quantize,
            ids: device.upload(&ids).address,
            map: device.upload(&map).address,
            named_experts: map.len() as u32,
            tile_tokens: self.tile_tokens,
        };
        let (entries, blocks, threads, shared_bytes) = match form {
            Form::Rows => (nvfp4_abi::ENTRIES, quantize.blocks(), nvfp4_abi::Quantize::THREADS, 0),
            Form::Few => {
                let (threads, bytes) = (nvfp4_abi::Quantize::FEW_THREADS, nvfp4_abi::Quantize::FEW_SHARED_BYTES);
                (nvfp4_abi::FEW_ENTRIES, quantize.few_blocks(), threads, bytes)
            }
            Form::Route => {
                let (threads, bytes) = (nvfp4_abi::Quantize::FEW_THREADS, nvfp4_abi::RouteQuantize::SHARED_BYTES);
                (nvfp4_abi::ROUTE_ENTRIES, quantize.few_blocks(), threads, bytes)
            }
        };
        let entry = entries[usize::from(tokens.dtype == TokenDtype::Bf16)];
        let linear = LaunchConfig::linear(blocks as u32, threads);
        let grid = LaunchConfig { schedule, overlaps: true, shared_bytes, ..linear };
        let argument = if form == Form::Route { Arg::value(route) } else { Arg::value(quantize) };
        for _ in 0..2 {
            let report = device.launch(&module, entry, &grid, std::slice::from_ref(&argument))?;
            assert!(report.warnings.is_empty(), "{:?}", report.warnings);
        }
        if form == Form::Route {
            assert_eq!(device.download::<u32>(places.unwrap()), *tokens.places.as_ref().unwrap(), "places");
            assert_eq!(device.download::<u32>(firsts), tokens.firsts, "first rows");
            assert_eq!(device.download::<u32>(tile_firsts), self.tile_firsts(), "first tiles");
        }
        let globals = device.download(globals).into_iter().map(canonical).collect();
        Ok(Nvfp4Rows { values: device.download(values), scales: device.download(scales), globals })
    }

    /// Entries that take these tokens.
    fn forms(&self) -> impl Iterator<Item = Form> {
        let makes_lists = self.tokens.places.is_some();
        [Form::Rows, Form::Few].into_iter().chain(makes_lists.then_some(Form::Route))
    }

    /// `true` if a warning or a fault stops the PTX on the worst schedule, or if its output is wrong.
    fn is_wrong(&self, ptx: &str, form: Form) -> bool {
        let found = std::panic::catch_unwind(|| self.quantize(ptx, form, Schedule::Worst));
        found.map_or(true, |found| found.map_or(true, |found| found != self.expected()))
    }

    fn check(&self, name: &str) {
        let expected = self.expected();
        for (form, schedule) in self.forms().flat_map(|form| SCHEDULES.map(|schedule| (form, schedule))) {
            let name = format!("{name}, {form:?}");
            let found = self.quantize(nvfp4_ptx(), form, schedule);
            let found = found.unwrap_or_else(|fault| panic!("{name}, {schedule}: {fault}"));
            for (what, found, expected) in
                [("values", &found.values, &expected.values), ("scales", &found.scales, &expected.scales)]
            {
                let wrong = (0..expected.len()).find(|&at| found[at] != expected[at]);
                assert_eq!(wrong.map(|at| (at, found[at], expected[at])), None, "{name}, {schedule}: {what}");
            }
            assert_eq!(found.globals, expected.globals, "{name}, {schedule}: global scales");
        }
    }
}

fn canonical(bits: u32) -> u32 {
    if f32::from_bits(bits).is_nan() { f32::NAN.to_bits() } else { bits }
}

fn nvfp4_ptx() -> &'static str {
    nvfp4::kernels::ptx("moe_quantize_nvfp4").expect("a kernel of this name")
}

#[test]
fn nvfp4_is_right_for_any_number_of_columns() {
    // The last three take two CTAs per token in the entry for few tokens.
    for k in [16, 32, 48, 64, 80, 112, 176, 512, 544, 720, 2064, 2112, 4080] {
        let dtype = if k % 32 == 0 { TokenDtype::F16 } else { TokenDtype::Bf16 };
        for input_scales in [&[0.0][..], &[1.0 / 1024.0, 3e-4]] {
            Nvfp4::random(dtype, [9, 3, 4, k], 8, input_scales).check(&format!("{k} columns, {input_scales:?}"));
        }
    }
}

/// More than 32 experts, some of them without rows: the entry for few tokens counts experts 32 at a time.
#[test]
fn nvfp4_is_right_for_many_experts() {
    for (tokens, top_k, experts) in [(7, 6, 70), (3, 32, 512), (40, 1, 33)] {
        Nvfp4::random(TokenDtype::Bf16, [tokens, top_k, experts, 80], 16, &[0.0, 1e-3, 0.0, 2e-3])
            .check(&format!("{experts} experts"));
    }
}

#[test]
fn nvfp4_tiles_weighted_tokens_and_unsorted_rows_are_right() {
    for (tile_tokens, tokens) in [(8, 40), (16, 50), (32, 70), (128, 130)] {
        let dtype = if tokens == 50 { TokenDtype::Bf16 } else { TokenDtype::F16 };
        Nvfp4::random(dtype, [tokens, 2, 2, 80], tile_tokens, &[0.0, 1e-3]).check(&format!("tiles of {tile_tokens}"));
        Nvfp4::random(dtype, [tokens, 1, 3, 48], tile_tokens, &[0.0])
            .into_rows()
            .check(&format!("rows, {tile_tokens}"));
        for input_scale in [0.0, 1e-3] {
            Nvfp4::random(dtype, [tokens, 1, 1, 208], tile_tokens, &[input_scale])
                .into_known_rows()
                .check(&format!("rows of a linear layer, {tile_tokens}"));
        }
    }
    let mut weighted = Nvfp4::random(TokenDtype::Bf16, [13, 1, 3, 144], 16, &[0.0, 2e-3]);
    weighted.tokens = weighted.tokens.with_weights();
    weighted.check("weights");
}

#[test]
fn removing_any_wait_is_found_for_nvfp4() {
    let tokens = Nvfp4::random(TokenDtype::Bf16, [9, 3, 4, 144], 8, &[0.0]);
    let run = |ptx: &str| tokens.quantize(ptx, Form::Rows, Schedule::Worst).is_err();
    check_sabotages(nvfp4_ptx(), nvfp4_abi::ENTRIES[1], &[Sabotage::leave_out("griddepcontrol.wait", 1)], run);
}

#[test]
fn removing_any_wait_or_barrier_is_found_for_few_nvfp4_tokens() {
    // Two CTAs per row, with places and without: each has its own wait.
    let tokens = Nvfp4::random(TokenDtype::Bf16, [9, 3, 4, 2144], 8, &[0.0]);
    let rows = Nvfp4::random(TokenDtype::Bf16, [9, 3, 4, 2144], 8, &[0.0]).into_rows();
    let run = |ptx: &str| tokens.is_wrong(ptx, Form::Few) || rows.is_wrong(ptx, Form::Few);
    let sabotages = [
        Sabotage::leave_out("griddepcontrol.wait", 2),
        Sabotage::leave_out("bar.sync", 1),
        Sabotage::leave_out("redux.sync", 1),
        Sabotage::leave_out("st.shared", 1),
    ];
    check_sabotages(nvfp4_ptx(), nvfp4_abi::FEW_ENTRIES[1], &sabotages, run);
}

#[test]
fn removing_any_wait_barrier_or_addition_of_lists_is_found() {
    // Two CTAs per row, and two experts per thread.
    let tokens = Nvfp4::random(TokenDtype::Bf16, [9, 5, 150, 2144], 8, &[0.0]);
    let run = |ptx: &str| tokens.is_wrong(ptx, Form::Route);
    let sabotages = [
        Sabotage::leave_out("griddepcontrol.wait", 1),
        Sabotage::leave_out("bar.sync", 5),
        Sabotage::leave_out("red.relaxed.cta.shared", 1),
        Sabotage::leave_out("redux.sync", 1),
        Sabotage::leave_out("st.shared", 6),
        Sabotage::leave_out("st.global", 4),
    ];
    check_sabotages(nvfp4_ptx(), nvfp4_abi::ROUTE_ENTRIES[1], &sabotages, run);
}
