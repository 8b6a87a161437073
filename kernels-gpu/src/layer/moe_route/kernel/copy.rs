//! Copies tokens in the order of K.
//!
//! A warp copies pieces of 256 columns: one word per four lanes ([`units`](crate::units)). A lane loads 16 bytes, the
//! eight elements that weights have in its word. Four lanes exchange pairs of elements, after which each lane has 16
//! bytes of a core matrix.

use core::hint::assert_unchecked;

use cuda_std::{
    global::{
        GlobalAddress, ld_global_b32_or_zero, ld_global_b64_or_zero, ld_global_v4_b32_or_zero, st_global_b32_where,
        st_global_v4_b32,
    },
    griddepcontrol::griddepcontrol_wait,
    integer::prmt_b32,
    thread,
    warp::{ALL_LANES, WARP_SIZE, lane_id, warp_shuffle_xor},
};

use super::lists::filled;
use crate::{
    epilogue::{convert, decode},
    layer::moe_route::abi::{PIECE, Route, pieces},
    lists::{Lists, NO_ROW, token_tiles},
    units::{K_BLOCK, LANE_WORDS, ROW_LANES, WORD_ELEMENTS, element},
};

/// Bytes per element.
pub(super) const ELEMENT_BYTES: u32 = 2;

/// Number of columns that one word of each of four lanes holds.
pub(super) const WORD_COLUMNS: u32 = ROW_LANES * WORD_ELEMENTS;

/// Bytes of a piece that a lane copies.
const LANE_BYTES: u32 = WORD_ELEMENTS * ELEMENT_BYTES;

/// Words per lane of a row in a piece.
const PIECE_WORDS: u32 = PIECE / ROW_LANES / WORD_ELEMENTS;

const _: () = assert!(PIECE * ELEMENT_BYTES == WARP_SIZE * LANE_BYTES && PIECE_WORDS * ROW_LANES == WARP_SIZE);

/// Copies pieces, in the `block`-th CTA that copies, and writes the shared expert's lists.
///
/// # Safety
/// The contract in `moe_route/mod.rs` holds. All threads of the CTA call this, in whole warps.
#[inline(always)]
pub(super) unsafe fn run(route: &Route, block: u32) {
    let pieces = pieces(route.hidden);
    let first = (block * Route::WARPS + thread::thread_idx_x() / WARP_SIZE) * Route::WARP_PIECES;
    // SAFETY: a token has at least one element.
    unsafe { assert_unchecked(pieces > 0) };
    let mut piece = Piece { token: first / pieces, index: first % pieces, pieces };
    griddepcontrol_wait();
    // SAFETY: the previous grid has ended. Each piece belongs to one warp.
    unsafe {
        if route.shared_lists != 0 {
            write_shared_lists(route, block * Route::THREADS + thread::thread_idx_x());
        }
        if route.tokens == 0 {
            return;
        }
        let mut parts = [Part::NONE; Route::WARP_PIECES as usize];
        unrolled!(part in [0 1 2 3] while part < parts.len() => {
            parts[part] = Part::load(route, piece);
            piece.advance();
        });
        unrolled!(part in [0 1 2 3] while part < parts.len() => {
            parts[part].store(route);
        });
    }
}

/// A piece of a token.
#[derive(Clone, Copy)]
struct Piece {
    token: u32,
    /// Index of the piece in the token.
    index: u32,
    /// Number of pieces per token.
    pieces: u32,
}

impl Piece {
    /// Advances to the next piece.
    #[inline(always)]
    fn advance(&mut self) {
        self.index += 1;
        if self.index == self.pieces {
            self.index = 0;
            self.token += 1;
        }
    }
}

/// Writes a thread's part of the lists of the shared expert. There is one thread per token.
///
/// # Safety
/// The contract in `moe_route/mod.rs` holds. Only one thread has this index.
#[inline(always)]
unsafe fn write_shared_lists(route: &Route, thread: u32) {
    const NUMBER: u64 = size_of::<u32>() as u64;
    let tokens = route.token_count;
    let lists = Lists::filled(u64::from(tokens), 1, route.row_multiple);
    let rows = filled(tokens, route.row_multiple);
    let number = |list: u64, index: u32| GlobalAddress::new(route.shared_lists) + list + u64::from(index) * NUMBER;
    // SAFETY: each thread writes its own numbers of the lists, which have room for them.
    unsafe {
        st_global_b32_where(thread < rows, number(lists.rows, thread), if thread < tokens { thread } else { NO_ROW });
        st_global_b32_where(thread < tokens, number(lists.places, thread), thread);
        if thread < Lists::TICKETS {
            st_global_b32_where(true, number(lists.tickets, thread), 0);
            assert_unchecked(route.shared_tile_tokens > 0);
            let tiles = token_tiles(rows, route.shared_tile_tokens);
            st_global_b32_where(thread < 2, number(lists.firsts, thread), if thread == 0 { 0 } else { rows });
            st_global_b32_where(thread < 2, number(lists.tile_firsts, thread), if thread == 0 { 0 } else { tiles });
        }
    }
}

/// A lane's part of a piece of a token.
#[derive(Clone, Copy)]
struct Part {
    piece: Piece,
    /// Elements of a word, two per register. The elements of half a word are in the first and the third register.
    elements: [u32; 4],
    /// Factor of the token, if there are factors.
    weight: f32,
}

impl Part {
    /// Placeholder for a part that is not loaded yet.
    const NONE: Self = Self { piece: Piece { token: 0, index: 0, pieces: 0 }, elements: [0; 4], weight: 0.0 };

    /// Loads the elements of a word; zeros where there are none.
    ///
    /// # Safety
    /// The contract in `moe_route/mod.rs` holds, and the previous grid has ended.
    #[inline(always)]
    unsafe fn load(route: &Route, piece: Piece) -> Self {
        let Piece { token, index, .. } = piece;
        let word = index * PIECE_WORDS + lane_id() / ROW_LANES;
        let (k_block, word, lane) = (word / LANE_WORDS, word % LANE_WORDS, lane_id() % ROW_LANES);
        // If the last 16 columns are a separate k-block, their words continue the preceding k-block's words as if they
        // belonged to it.
        let columns = route.hidden.saturating_sub(k_block * K_BLOCK).min(K_BLOCK);
        let is_there = token < route.token_count;
        let columns = if is_there { columns } else { 0 };
        let source = GlobalAddress::new(route.input)
            + u64::from(token) * route.input_pitch
            + u64::from(k_block * K_BLOCK * ELEMENT_BYTES);
        // SAFETY: the elements and the factor belong to the token; nothing is read if it does not exist.
        unsafe {
            let elements = load_word(source, columns, lane, word, !route.hidden.is_multiple_of(WORD_COLUMNS));
            let weight = GlobalAddress::new(route.input_weights) + u64::from(token) * size_of::<f32>() as u64;
            let has_weight = is_there && route.input_weights != 0;
            let weight = f32::from_bits(ld_global_b32_or_zero(has_weight, weight));
            Self { piece, elements, weight }
        }
    }

    /// Stores a row of a core matrix, if it belongs to the token.
    ///
    /// # Safety
    /// The contract in `moe_route/mod.rs` holds. The whole warp calls this together.
    #[inline(always)]
    unsafe fn store(mut self, route: &Route) {
        if route.input_weights != 0 {
            if route.shared_tokens != 0 {
                // SAFETY: `shared_tokens` is the address of the shared expert's tokens, which have this row; the whole
                // warp is here.
                unsafe { self.store_to(route, route.shared_tokens) };
            }
            for two in 0..self.elements.len() {
                let [low, high] = decode(route.operand_type, self.elements[two]);
                self.elements[two] = convert(route.operand_type, low * self.weight, high * self.weight);
            }
        }
        // SAFETY: `tokens` is the address of the layer's tokens, which have this row; the whole warp is here.
        unsafe { self.store_to(route, route.tokens) };
    }

    /// Stores a row of a core matrix to the tokens at address `tokens`.
    ///
    /// # Safety
    /// `tokens` is the address of the output tokens `[T, H]`, and no other warp writes this piece of them. The whole warp
    /// calls this together.
    #[inline(always)]
    unsafe fn store_to(&self, route: &Route, tokens: u64) {
        // SAFETY: the whole warp is here.
        let row = unsafe { core_matrix_row(self.elements) };
        let column = self.piece.index * PIECE + lane_id() * WORD_ELEMENTS;
        if self.piece.token < route.token_count && column < route.hidden {
            let target = u64::from(self.piece.token) * u64::from(route.hidden) + u64::from(column);
            // SAFETY: these 16 bytes are inside the token, and no other lane writes them.
            unsafe { st_global_v4_b32(GlobalAddress::new(tokens) + target * u64::from(ELEMENT_BYTES), row) };
        }
    }
}

/// Returns the elements of a k-block that weights have in word `word` of lane `lane`, two per register; the elements of
/// half a word are in the first and the third register. Zeros where there are none. The k-block's columns begin at
/// `k_block`; `has_halves` is the same for all warps.
///
/// # Safety
/// The k-block's columns are valid in global memory.
#[inline(always)]
pub(super) unsafe fn load_word(
    k_block: GlobalAddress,
    columns: u32,
    lane: u32,
    word: u32,
    has_halves: bool,
) -> [u32; 4] {
    let first = element(columns, lane, word, 0);
    let is_whole = element(columns, lane, word, WORD_ELEMENTS - 1).is_some();
    let source = k_block + u64::from(first.unwrap_or(0) * ELEMENT_BYTES);
    // SAFETY: the whole word, or its first half, lies at `source` in global memory; what the predicates exclude is not
    // read.
    unsafe {
        let mut elements = ld_global_v4_b32_or_zero(is_whole, source);
        if has_halves {
            let half = ld_global_b64_or_zero(first.is_some() && !is_whole, source);
            elements[0] |= half as u32;
            elements[2] |= (half >> 32) as u32;
        }
        elements
    }
}

/// Returns lane i's row of core matrix i of the words of four lanes: nibbles i and i+4 of each word.
///
/// # Safety
/// The whole warp calls this together.
#[inline(always)]
pub(super) unsafe fn core_matrix_row(elements: [u32; 4]) -> [u32; 4] {
    let [a, b, c, d] = elements;
    let (low, high) = (0x5410, 0x7632);
    // Elements i and i+4 of this lane's word.
    let pairs = [prmt_b32(a, c, low), prmt_b32(a, c, high), prmt_b32(b, d, low), prmt_b32(b, d, high)];
    // SAFETY: the whole warp is here.
    unsafe {
        let ([a, b], [c, d]) = (exchange(1, [pairs[0], pairs[1]]), exchange(1, [pairs[2], pairs[3]]));
        let ([a, c], [b, d]) = (exchange(2, [a, c]), exchange(2, [b, d]));
        [a, b, c, d]
    }
}

/// Exchanges words between two lanes whose indices differ in the bit: the second word of the lane without the bit, for
/// the first word of the lane with the bit.
///
/// # Safety
/// The whole warp calls this together.
#[inline(always)]
unsafe fn exchange(bit: u32, [first, second]: [u32; 2]) -> [u32; 2] {
    let has_bit = lane_id() & bit != 0;
    // SAFETY: the whole warp is here.
    let (received, _) = unsafe { warp_shuffle_xor(ALL_LANES, if has_bit { first } else { second }, bit, WARP_SIZE) };
    if has_bit { [received, second] } else { [first, received] }
}
