//! Products of tokens and packed weights, spread over the threads of rayon.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use rayon::prelude::*;

use super::epilogue::Epilogue;
use super::kernel::{Kernel, Tile};
use super::layout::{Panels, TILE_PANELS, TILE_TOKENS, Tokens};

/// Buffers of steps: one set per step in flight, kept for later steps.
#[derive(Default)]
pub(super) struct Pool<B>(Mutex<Vec<B>>);

impl<B: Default> Pool<B> {
    /// Calls `run` with buffers that no other step uses.
    pub fn with<R>(&self, run: impl FnOnce(&mut B) -> R) -> R {
        let free = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = free().pop();
        let mut buffers = taken.unwrap_or_default();
        let result = run(&mut buffers);
        free().push(buffers);
        result
    }
}

/// The product of tokens with one packed matrix, or with gate and up.
pub(super) struct Product<'a, T: Tokens> {
    pub weights: &'a Panels,
    pub tokens: ProductTokens<'a, T>,
    /// Number of rows of tokens.
    pub m: usize,
    pub epilogue: Epilogue<'a>,
}

/// Tokens of a product, in a [`TokenBuffer`].
pub(super) struct ProductTokens<'a, T: Tokens> {
    blocks: &'a [T::Block16],
    /// Result of [`Tokens::are_ordinary`] for all of them.
    are_ordinary: bool,
}

/// Tokens of all products, one product after the other. The memory is reused by later products.
pub(super) struct TokenBuffer<T: Tokens> {
    blocks: Vec<T::Block16>,
    places: Vec<TokensPlace>,
}

/// Location of a product's tokens.
struct TokensPlace {
    start: usize,
    m: usize,
    are_ordinary: AtomicBool,
}

impl<T: Tokens> TokenBuffer<T> {
    pub fn new() -> Self {
        Self { blocks: Vec::new(), places: Vec::new() }
    }

    /// Writes the tokens of products with these sizes, M and K. Calls `write(product, row, chunk of K, out)` for each
    /// chunk of a row.
    pub fn fill(
        &mut self,
        sizes: impl Iterator<Item = (usize, usize)>,
        write: impl Fn(usize, usize, usize, &mut [T::Block16]) + Sync,
    ) {
        let mut end = 0;
        self.places.clear();
        for (m, k) in sizes {
            self.places.push(TokensPlace { start: end, m, are_ordinary: AtomicBool::new(true) });
            end += T::len(m, k);
        }
        self.blocks.resize(end, T::ZERO);
        self.blocks.par_chunks_mut(T::CHUNK_BLOCKS).enumerate().for_each(|(chunk, out)| {
            let at = chunk * T::CHUNK_BLOCKS;
            // The last product that starts here or before. An empty product starts where the next product starts.
            let product = self.places.partition_point(|place| place.start <= at) - 1;
            let TokensPlace { start, m, are_ordinary } = &self.places[product];
            let within = (at - start) / T::CHUNK_BLOCKS;
            write(product, within % m, within / m, out);
            if !T::are_ordinary(out) {
                are_ordinary.store(false, Ordering::Relaxed);
            }
        });
    }

    /// Tokens of a product.
    pub fn of(&self, product: usize) -> ProductTokens<'_, T> {
        let place = &self.places[product];
        let end = self.places.get(product + 1).map_or(self.blocks.len(), |next| next.start);
        let are_ordinary = place.are_ordinary.load(Ordering::Relaxed);
        ProductTokens { blocks: &self.blocks[place.start..end], are_ordinary }
    }
}

/// Tiles of products. The memory is reused by later products.
#[derive(Default)]
pub(super) struct Products {
    tiles: Vec<TilePlace>,
}

/// Identifies a tile. Everything else follows from its product.
struct TilePlace {
    product: usize,
    first_row: usize,
    first_panel: usize,
    /// Index of the first element of the product's output.
    output_start: usize,
}

impl Products {
    /// Computes `count` products. Their outputs `[M, N]` lie one after the other in `output` and fill it.
    ///
    /// # Panics
    /// If `output` has another number of elements than the products.
    pub fn run<'a, T: Tokens>(
        &mut self,
        kernel: &Kernel<T>,
        count: usize,
        product: impl Fn(usize) -> Product<'a, T> + Sync,
        output: &mut [u16],
    ) {
        self.tiles.clear();
        let mut output_start = 0;
        for index in 0..count {
            let Product { weights, m, .. } = product(index);
            for first_row in (0..m).step_by(TILE_TOKENS) {
                let panels = (0..weights.len()).step_by(TILE_PANELS);
                let place = |first_panel| TilePlace { product: index, first_row, first_panel, output_start };
                self.tiles.extend(panels.map(place));
            }
            output_start += m * weights.n;
        }
        assert_eq!(output.len(), output_start, "`output` needs one element for each row and column of each product");
        let output = OutputPointer(output.as_mut_ptr());
        self.tiles.par_iter().for_each(|place| {
            let Product { weights, tokens, m, epilogue } = product(place.product);
            let tile = Tile {
                weights,
                panels: place.first_panel..weights.len().min(place.first_panel + TILE_PANELS),
                tokens: tokens.blocks,
                are_ordinary: tokens.are_ordinary,
                m,
                rows: place.first_row..m.min(place.first_row + TILE_TOKENS),
                epilogue,
                output: output.at(place.output_start),
            };
            T::with_scratch(|scratch| kernel(&tile, scratch));
        });
    }
}

/// Outputs of all products, written by many threads.
struct OutputPointer(*mut u16);

impl OutputPointer {
    /// Address of an element, or of the end.
    fn at(&self, element: usize) -> *mut u16 {
        // SAFETY: `element` is an `output_start`. `Products::run` checked that `output` has the elements of all
        // products, so `element` is at most its length.
        unsafe { self.0.add(element) }
    }
}

// SAFETY: each thread writes only the rectangles of its own tiles. The tiles do not overlap, and nobody reads `output`
// while `Products::run` borrows it mutably.
unsafe impl Sync for OutputPointer {}
