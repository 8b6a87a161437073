//! The memory in which the launches of an MoE layer leave something to each other: a function of sizes alone.

use kernels_gpu::lists::Lists;
use kernels_gpu::nvfp4_rows::{token_scale_bytes, value_bytes};
use kernels_gpu::sorted::{LINE_BYTES, ROW_MULTIPLE, bits16_bytes, most_rows};
use kernels_gpu::units::k_blocks;

use crate::kernels::group::Address;
use crate::kernels::launch::ALIGNMENT;
use crate::kernels::nvfp4_products::most_token_tiles;
use crate::kernels::products::may_be_sorted;
use crate::moe::MoeSizes;
use crate::problem::TokenFormat;

/// Bytes below which every workspace stays. Tokens that need more are worked off in chunks.
const fn most_bytes(token_format: TokenFormat) -> u64 {
    match token_format {
        TokenFormat::Bits16 => 512_000_000,
        // Rows are there twice, and each chunk reads all weights again: 8192 tokens of a rank of DeepSeek-R1 are one.
        TokenFormat::Fp8 => 2_048_000_000,
        TokenFormat::Nvfp4 => 1_024_000_000,
    }
}

/// Where everything lies that the launches of a chunk of tokens leave to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Workspace {
    pub lists: PlacedLists,
    /// Tokens in the order of K, `[T, H]`; 0 with tokens in FP8 or NVFP4, which [`Self::fp8`] or [`Self::nvfp4`] has.
    pub tokens: Address,
    /// What gate and up give, `[T·k, I]`, columns in the order of K, or in their own with tokens in FP8 or NVFP4. Where down takes
    /// 16-bit numbers sorted, as [`sorted`](kernels_gpu::sorted) says.
    pub intermediate: Address,
    /// What down gives, `[T·k, H]`. Until then, where gate and up take 16-bit numbers sorted, those.
    pub rows: Address,
    /// Rows that both have room for.
    pub row_capacity: u32,
    /// With tokens in FP8: the tokens of gate and up, and those of down.
    pub fp8: Option<[SortedRows; 2]>,
    /// As `fp8`, with tokens in NVFP4.
    pub nvfp4: Option<[Nvfp4Rows; 2]>,
    /// If there is an expert that all tokens share.
    pub shared: Option<SharedWorkspace>,
}

/// Rows in e4m3, as [`sorted`](kernels_gpu::sorted) says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SortedRows {
    pub codes: Address,
    /// A scale for each row, f32.
    pub scales: Address,
    /// Rows that there is room for.
    pub capacity: u32,
}

/// Rows in NVFP4, as [`nvfp4_rows`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Nvfp4Rows {
    pub values: Address,
    pub scales: Address,
    /// A global scale for each row, f32.
    pub globals: Address,
    /// Rows that there is room for, and tiles of tokens.
    pub rows: u64,
    pub tiles: u64,
}

/// Lists, and where they lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlacedLists {
    pub at: Address,
    choices: u64,
    experts: u32,
}

impl PlacedLists {
    /// The offsets, where each expert's rows are filled up to a multiple.
    pub fn offsets(&self, row_multiple: u32) -> Lists {
        Lists::filled(self.choices, self.experts, row_multiple)
    }
}

/// What the expert that all tokens share has of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SharedWorkspace {
    pub lists: PlacedLists,
    /// Its I.
    pub width: u32,
    /// Tokens without their weights, as [`Workspace::tokens`]: only where weights may be on the input.
    pub tokens: Option<Address>,
    /// `[T, I]`, as [`Workspace::intermediate`].
    pub intermediate: Address,
    /// `[T, H]`, as [`Workspace::rows`].
    pub rows: Address,
    /// Rows that both have room for.
    pub row_capacity: u32,
    /// As [`Workspace::fp8`].
    pub fp8: Option<[SortedRows; 2]>,
    /// As [`Workspace::nvfp4`].
    pub nvfp4: Option<[Nvfp4Rows; 2]>,
}

impl Workspace {
    /// The workspace of so many tokens at a time, whose parts `place` finds room for, a multiple of [`ALIGNMENT`]. It is given
    /// the bytes of each, always in the same order.
    pub fn new(sizes: &MoeSizes, tokens: usize, mut place: impl FnMut(u64) -> Address) -> Self {
        let (tokens, choices, experts) = (tokens as u64, (tokens * sizes.top_k) as u64, sizes.experts as u32);
        let is = |format| sizes.token_format == format;
        let (is_bits16, is_fp8, is_nvfp4) = (is(TokenFormat::Bits16), is(TokenFormat::Fp8), is(TokenFormat::Nvfp4));
        // What each expert's rows may be filled up to a multiple of.
        let is_sorted = |rows, experts| is_bits16 && may_be_sorted(rows, experts);
        let multiple = |are_sorted| if is_fp8 || are_sorted { ROW_MULTIPLE } else { 1 };
        let bytes = |rows: u64, width: usize| rows * (size_of::<u16>() * width) as u64;
        let product = |rows: u64, width: usize, is_sorted: bool| {
            if is_sorted { bits16_bytes(rows, width as u32) } else { bytes(rows, width) }
        };
        let lists = |choices: u64, experts: u32, row_multiple: u32, place: &mut dyn FnMut(u64) -> Address| {
            let at = place(Lists::filled(choices, experts, row_multiple).bytes);
            PlacedLists { at, choices, experts }
        };
        let sorted = |rows: u64, widths: [usize; 2], place: &mut dyn FnMut(u64) -> Address| {
            widths.map(|width| SortedRows {
                codes: place(rows * u64::from(k_blocks(width as u32) * LINE_BYTES)),
                scales: place(rows * size_of::<f32>() as u64),
                capacity: rows as u32,
            })
        };
        let nvfp4 = |rows: u64, tiles: u64, widths: [usize; 2], place: &mut dyn FnMut(u64) -> Address| {
            widths.map(|width| Nvfp4Rows {
                values: place(value_bytes(rows, width as u32)),
                scales: place(tiles * token_scale_bytes(width as u32)),
                globals: place(rows * size_of::<f32>() as u64),
                rows,
                tiles,
            })
        };
        let tiles = most_token_tiles(choices, experts.into(), sizes.named_experts as u64);
        let shared_tiles = most_token_tiles(tokens, 1, 1);
        let named_experts = sizes.named_experts as u64;
        let are_sorted = is_sorted(choices, named_experts);
        let shared_are_sorted = are_sorted || is_sorted(tokens, 1);
        let (row_multiple, shared_row_multiple) = (multiple(are_sorted), multiple(shared_are_sorted));
        let rows = most_rows(choices, experts, row_multiple);
        let shared_rows = most_rows(tokens, 1, shared_row_multiple);
        Self {
            lists: lists(choices, experts, row_multiple, &mut place),
            tokens: if is_bits16 { place(bytes(tokens, sizes.hidden)) } else { 0 },
            intermediate: place(product(rows, sizes.intermediate, are_sorted)),
            rows: place(product(rows, sizes.hidden, are_sorted)),
            row_capacity: rows as u32,
            fp8: is_fp8.then(|| sorted(rows, [sizes.hidden, sizes.intermediate], &mut place)),
            nvfp4: is_nvfp4.then(|| nvfp4(rows, tiles, [sizes.hidden, sizes.intermediate], &mut place)),
            shared: sizes.shared_intermediate.map(|width| SharedWorkspace {
                lists: lists(tokens, 1, shared_row_multiple, &mut place),
                width: width as u32,
                tokens: (sizes.top_k == 1 && is_bits16).then(|| place(bytes(tokens, sizes.hidden))),
                intermediate: place(product(shared_rows, width, shared_are_sorted)),
                rows: place(product(shared_rows, sizes.hidden, shared_are_sorted)),
                row_capacity: shared_rows as u32,
                fp8: is_fp8.then(|| sorted(shared_rows, [sizes.hidden, width], &mut place)),
                nvfp4: is_nvfp4.then(|| nvfp4(shared_rows, shared_tiles, [sizes.hidden, width], &mut place)),
            }),
        }
    }

    /// As [`Workspace::new`], one part behind the other from an address on.
    pub fn at(sizes: &MoeSizes, tokens: usize, address: Address) -> Self {
        let mut end = address;
        Self::new(sizes, tokens, |bytes| take(&mut end, bytes))
    }
}

/// The next so many bytes.
pub(super) fn take(end: &mut Address, bytes: u64) -> Address {
    let at = *end;
    *end = (at + bytes).next_multiple_of(ALIGNMENT);
    at
}

/// Bytes of the workspace of so many tokens at a time.
fn bytes(sizes: &MoeSizes, tokens: usize) -> u64 {
    let mut end = 0;
    Workspace::new(sizes, tokens, |bytes| take(&mut end, bytes));
    end
}

/// Whether the workspace of so many tokens stays below [`most_bytes`].
fn fits(sizes: &MoeSizes, tokens: usize) -> bool {
    let most = most_bytes(sizes.token_format);
    (tokens as u64) < most && bytes(sizes, tokens) < most
}

/// The most tokens whose workspace stays below [`most_bytes`], at least 1.
fn most_tokens(sizes: &MoeSizes) -> usize {
    let (mut most, mut too_many) = (1, most_bytes(sizes.token_format) as usize);
    while too_many - most > 1 {
        let middle = usize::midpoint(most, too_many);
        *(if fits(sizes, middle) { &mut most } else { &mut too_many }) = middle;
    }
    most
}

/// Tokens of each chunk, but the last, that so many tokens are worked off in: as few chunks as the workspace allows, of nearly the
/// same size. At least 1.
pub(super) fn chunk_tokens(sizes: &MoeSizes, tokens: usize) -> usize {
    if fits(sizes, tokens) {
        return tokens.max(1);
    }
    tokens.div_ceil(tokens.div_ceil(most_tokens(sizes)))
}

/// Bytes of the workspace that calls of a layer of these sizes need with up to `max_tokens` tokens: less than 512 MB, or than 2048 MB with
/// tokens in FP8 and 1024 MB with NVFP4. Layers whose calls come one after the other on a stream can share one workspace, as large as the
/// largest of theirs.
///
/// ```
/// use nvfp4::kernels::moe::workspace_bytes;
/// use nvfp4::moe::{Activation, MoeSizes};
/// use nvfp4::problem::{TokenDtype, TokenFormat};
///
/// let mixtral = MoeSizes {
///     hidden: 4096,
///     intermediate: 14336,
///     experts: 8,
///     named_experts: 8,
///     top_k: 2,
///     shared_intermediate: None,
///     dtype: TokenDtype::Bf16,
///     activation: Activation::Silu,
///     biases: false,
///     token_format: TokenFormat::Bits16,
///     input_scales: false,
/// };
/// assert_eq!(workspace_bytes(&mixtral, 1), 82_176);
/// assert!(workspace_bytes(&mixtral, 8192) < 512_000_000);
/// ```
pub fn workspace_bytes(sizes: &MoeSizes, max_tokens: usize) -> usize {
    bytes(sizes, max_tokens.min(most_tokens(sizes))) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moe::Activation;
    use crate::problem::{TokenDtype, TokenFormat};

    fn sizes(hidden: usize, intermediate: usize, experts: usize, top_k: usize, shared: Option<usize>) -> MoeSizes {
        let (named_experts, shared_intermediate, dtype) = (experts, shared, TokenDtype::Bf16);
        let (activation, biases) = (Activation::Silu, false);
        let token_format = TokenFormat::Bits16;
        MoeSizes {
            hidden,
            intermediate,
            experts,
            named_experts,
            top_k,
            shared_intermediate,
            dtype,
            activation,
            biases,
            token_format,
            input_scales: false,
        }
    }

    #[test]
    fn parts_lie_one_behind_the_other_and_end_with_the_workspace() {
        // Lists, tokens, intermediate and rows; for tokens in FP8 codes and scales twice, in NVFP4 two kinds of scales.
        for (shared, token_format, parts_of) in [
            (None, TokenFormat::Bits16, 4),
            (Some(48), TokenFormat::Bits16, 7),
            (None, TokenFormat::Fp8, 7),
            (Some(48), TokenFormat::Fp8, 14),
            (None, TokenFormat::Nvfp4, 9),
            (Some(48), TokenFormat::Nvfp4, 18),
        ] {
            let sizes = MoeSizes { token_format, ..sizes(2880, 720, 512, 4, shared) };
            for tokens in [0, 1, 7, 1000] {
                let mut parts = Vec::new();
                let mut end = 0x1000;
                let placed = Workspace::new(&sizes, tokens, |bytes| {
                    parts.push((end, bytes));
                    take(&mut end, bytes)
                });
                assert_eq!(parts.len(), parts_of);
                assert!(parts.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
                assert!(parts.iter().all(|(at, _)| at.is_multiple_of(ALIGNMENT)));
                assert_eq!(placed, Workspace::at(&sizes, tokens, 0x1000));
                assert_eq!(end - 0x1000, workspace_bytes(&sizes, tokens) as u64);
            }
        }
    }

    #[test]
    fn every_number_of_tokens_is_worked_off_below_the_bound_in_the_workspace_of_the_most() {
        let layers = [
            sizes(2048, 768, 128, 8, None),
            sizes(4096, 14336, 8, 2, None),
            sizes(7168, 2048, 32, 8, Some(2048)),
            sizes(1 << 20, 1 << 20, 512, 32, Some(1 << 20)),
            sizes(16, 16, 1, 1, None),
        ];
        let formats = |sizes| TokenFormat::ALL.map(|token_format| MoeSizes { token_format, ..sizes });
        for sizes in layers.into_iter().flat_map(formats) {
            for tokens in [0, 1, 2, 100, 8191, 8192, 65_537, 1 << 20] {
                let chunk = chunk_tokens(&sizes, tokens);
                let chunks = tokens.div_ceil(chunk);
                // Experts' rows are filled up to eight: of the largest layer, one token is more.
                let alone = chunk == 1 && (sizes.token_format, sizes.hidden) == (TokenFormat::Fp8, 1 << 20);
                assert!(alone || bytes(&sizes, chunk) < most_bytes(sizes.token_format), "{sizes:?} {tokens}");
                assert!(chunks * chunk >= tokens && chunks * chunk < tokens.max(1) + chunks.max(1));
                assert!(workspace_bytes(&sizes, tokens) as u64 >= bytes(&sizes, chunk.min(tokens)));
                assert!(workspace_bytes(&sizes, tokens + 1) >= workspace_bytes(&sizes, tokens));
                let one_less = tokens.div_ceil(chunks.max(2) - 1);
                assert!(chunks <= 1 || bytes(&sizes, one_less) >= most_bytes(sizes.token_format), "as few as possible");
            }
        }
    }
}
