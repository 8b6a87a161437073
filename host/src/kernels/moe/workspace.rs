//! The memory in which the launches of an MoE layer leave something to each other: a function of sizes alone.

use kernels_gpu::moe_route::abi::Lists;

use crate::kernels::group::Address;
use crate::kernels::launch::ALIGNMENT;
use crate::moe::MoeSizes;

/// Bytes below which every workspace stays. Tokens that need more are worked off in chunks.
const MOST_BYTES: u64 = 512_000_000;

/// Where everything lies that the launches of a chunk of tokens leave to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Workspace {
    pub lists: PlacedLists,
    /// Tokens in the order of K, `[T, H]`.
    pub tokens: Address,
    /// What gate and up give, `[T·k, I]`, columns in the order of K.
    pub intermediate: Address,
    /// What down gives, `[T·k, H]`.
    pub rows: Address,
    /// If there is an expert that all tokens share.
    pub shared: Option<SharedWorkspace>,
}

/// Lists, and where they lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlacedLists {
    pub at: Address,
    pub offsets: Lists,
}

/// What the expert that all tokens share has of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SharedWorkspace {
    pub lists: PlacedLists,
    /// Its I.
    pub width: u32,
    /// Tokens without their weights, as [`Workspace::tokens`]: only where weights may be on the input.
    pub tokens: Option<Address>,
    /// `[T, I]`, columns in the order of K.
    pub intermediate: Address,
    /// `[T, H]`.
    pub rows: Address,
}

impl Workspace {
    /// The workspace of so many tokens at a time, whose parts `place` finds room for, a multiple of [`ALIGNMENT`]. It is given
    /// the bytes of each, always in the same order.
    pub fn new(sizes: &MoeSizes, tokens: usize, mut place: impl FnMut(u64) -> Address) -> Self {
        let (tokens, choices) = (tokens as u64, (tokens * sizes.top_k) as u64);
        let bytes = |rows: u64, width: usize| rows * (size_of::<u16>() * width) as u64;
        let lists =
            |offsets: Lists, place: &mut dyn FnMut(u64) -> Address| PlacedLists { at: place(offsets.bytes), offsets };
        Self {
            lists: lists(Lists::new(choices, sizes.experts as u32), &mut place),
            tokens: place(bytes(tokens, sizes.hidden)),
            intermediate: place(bytes(choices, sizes.intermediate)),
            rows: place(bytes(choices, sizes.hidden)),
            shared: sizes.shared_intermediate.map(|width| SharedWorkspace {
                lists: lists(Lists::new(tokens, 1), &mut place),
                width: width as u32,
                tokens: (sizes.top_k == 1).then(|| place(bytes(tokens, sizes.hidden))),
                intermediate: place(bytes(tokens, width)),
                rows: place(bytes(tokens, sizes.hidden)),
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

/// Whether the workspace of so many tokens stays below [`MOST_BYTES`].
fn fits(sizes: &MoeSizes, tokens: usize) -> bool {
    (tokens as u64) < MOST_BYTES && bytes(sizes, tokens) < MOST_BYTES
}

/// The most tokens whose workspace stays below [`MOST_BYTES`], at least 1.
fn most_tokens(sizes: &MoeSizes) -> usize {
    let (mut most, mut too_many) = (1, MOST_BYTES as usize);
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

/// Bytes of the workspace that calls of a layer of these sizes need with up to `max_tokens` tokens: less than 512 MB. Layers whose
/// calls come one after the other on a stream can share one workspace, as large as the largest of theirs.
///
/// ```
/// use nvfp4::fp8::TokenFormat;
/// use nvfp4::kernels::moe::workspace_bytes;
/// use nvfp4::moe::{Activation, MoeSizes};
/// use nvfp4::problem::OutDtype;
///
/// let mixtral = MoeSizes {
///     hidden: 4096,
///     intermediate: 14336,
///     experts: 8,
///     named_experts: 8,
///     top_k: 2,
///     shared_intermediate: None,
///     dtype: OutDtype::Bf16,
///     activation: Activation::Silu,
///     biases: false,
///     token_format: TokenFormat::Bits16,
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
    use crate::fp8::TokenFormat;
    use crate::moe::Activation;
    use crate::problem::OutDtype;

    fn sizes(hidden: usize, intermediate: usize, experts: usize, top_k: usize, shared: Option<usize>) -> MoeSizes {
        let (named_experts, shared_intermediate, dtype) = (experts, shared, OutDtype::Bf16);
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
        }
    }

    #[test]
    fn parts_lie_one_behind_the_other_and_end_with_the_workspace() {
        for shared in [None, Some(48)] {
            let sizes = sizes(2880, 720, 512, 4, shared);
            for tokens in [0, 1, 7, 1000] {
                let mut parts = Vec::new();
                let mut end = 0x1000;
                let placed = Workspace::new(&sizes, tokens, |bytes| {
                    parts.push((end, bytes));
                    take(&mut end, bytes)
                });
                assert_eq!(parts.len(), if shared.is_some() { 7 } else { 4 });
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
        for sizes in layers {
            for tokens in [0, 1, 2, 100, 8191, 8192, 65_537, 1 << 20] {
                let chunk = chunk_tokens(&sizes, tokens);
                let chunks = tokens.div_ceil(chunk);
                assert!(bytes(&sizes, chunk) < MOST_BYTES, "{sizes:?} {tokens}");
                assert!(chunks * chunk >= tokens && chunks * chunk < tokens.max(1) + chunks.max(1));
                assert!(workspace_bytes(&sizes, tokens) as u64 >= bytes(&sizes, chunk.min(tokens)));
                assert!(workspace_bytes(&sizes, tokens + 1) >= workspace_bytes(&sizes, tokens));
                assert!(chunks <= 1 || bytes(&sizes, tokens.div_ceil(chunks - 1)) >= MOST_BYTES, "as few as possible");
            }
        }
    }
}
