//! The device code of a linear layer with products of a warp, for GPUs that have bulk copies.
//!
//! A CTA computes a tile of C. Its last warp loads the weights and tokens of a span of k-blocks to the next stages of a
//! ring. Each other warp has a [`Strip`] of the tile, and goes through a span without a test or a barrier. If K has two
//! parts, two CTAs of a cluster sum one part each.

use cuda_std::{
    cluster::cluster_rank,
    fence::{fence_mbarrier_init, fence_proxy_async_shared},
    global::GlobalAddress,
    griddepcontrol::{griddepcontrol_launch_dependents, griddepcontrol_wait},
    integer::opaque_b32,
    mbarrier::{mbarrier_arrive, mbarrier_arrive_expect_tx},
    thread,
    tma::{
        TensorMapAddress, cp_async_bulk_shared_global, cp_async_bulk_tensor_2d_shared_cta_global,
        cp_async_bulk_tensor_2d_shared_global,
    },
    warp::{ALL_LANES, WARP_SIZE, lane_id, sync_warp, warp_shuffle_idx},
};

use super::{
    Instance, MAX_SPAN, STRIP_SCALES, STRIP_VALUES,
    strip::{BOXES, Strip},
};
use crate::{
    linear::{
        BOX_BYTES, Launch, PANEL_ROWS, PANEL_SCALES, ROW_BYTES, ROW_SCALES,
        decode::{Decode, Packed},
        inbox_bytes, panel_offset, part_begin,
        split::Inbox,
    },
    ring::{Ring, ring_bytes},
};

pub(crate) use super::strip::Built;

/// Makes the entries of a list of instances, each with its own type.
macro_rules! entries {
    ($($entry:ident = $instance:expr;)*) => {$(
        /// One of [`INSTANCES`].
        ///
        /// # Safety
        /// The contract in `linear_sm90/mod.rs`.
        #[kernel(
            threads = INSTANCES[Index::$entry as usize].threads(), min_blocks = 1,
            cluster = INSTANCES[Index::$entry as usize].parts / 2 * 2
        )]
        pub unsafe fn $entry(launch: Launch) {
            const INSTANCE: Instance = INSTANCES[Index::$entry as usize];
            const IS_BF16: bool = matches!(INSTANCE.operand_type, OperandType::Bf16);
            struct This;
            impl Built for This {
                const INSTANCE: Instance = INSTANCE;
            }
            // SAFETY: the caller fulfills the contract in `linear_sm90/mod.rs`, which `run` requires.
            unsafe {
                let token_map = tensor_map_of_parameter!($entry);
                ByWarp::<This, IS_BF16, { INSTANCE.products() }>::run(launch, token_map);
            }
        }
    )*};
}
pub(crate) use entries;

/// The kernel as one instance, for bf16 or f16 tokens. A warp has `P` products per 16 columns of K.
pub(crate) struct ByWarp<I, const BF16: bool, const P: usize> {
    strip: Strip<I, BF16, P>,
    token_map: TensorMapAddress,
}

impl<I: Built, const BF16: bool, const P: usize> ByWarp<I, BF16, P>
where
    Packed<BF16>: Decode,
{
    const INSTANCE: Instance = I::INSTANCE;
    const WARPS: u32 = Self::INSTANCE.multiplying_warps();

    const SPLIT: bool = Strip::<I, BF16, P>::SPLIT;

    // Layout of shared memory: stages, then the barriers, then the inbox.
    const INBOX: u32 = Strip::<I, BF16, P>::STAGES_END + ring_bytes(Self::INSTANCE.spans());
    const END: u32 = Self::INBOX
        + if Self::SPLIT { inbox_bytes(Self::INSTANCE.multiplying_threads(), Self::INSTANCE.pieces()) } else { 0 };

    /// One thread's part of the kernel.
    ///
    /// # Safety
    /// The contract in `linear_sm90/mod.rs`.
    #[inline(always)]
    pub(crate) unsafe fn run(launch: Launch, token_map: TensorMapAddress) {
        const { assert!(!Self::INSTANCE.by_pieces && Self::END == Self::INSTANCE.shared_bytes()) };
        // All lanes hold the same value. The shuffle lets the compiler know that. SAFETY: all lanes of the warp execute
        // the shuffle together.
        let (warp, _) = unsafe { warp_shuffle_idx(ALL_LANES, thread::thread_idx_x() / WARP_SIZE, 0, WARP_SIZE) };
        let this = Self { strip: Strip::new(launch, warp), token_map };
        // SAFETY: the caller fulfills the contract in `linear_sm90/mod.rs`. Barriers are initialized before any thread
        // passes `sync_threads`. Each warp has one role. With two parts, every thread opens the inbox once.
        unsafe {
            if thread::thread_idx_x() == 0 {
                this.spans().init(1, Self::WARPS);
                if Self::SPLIT {
                    this.inbox().init();
                }
                fence_mbarrier_init();
            }
            thread::sync_threads();
            if Self::SPLIT {
                this.inbox().open();
            }
            if warp == Self::WARPS {
                this.load();
            } else {
                let sums = this.sums();
                if Self::SPLIT {
                    let inbox = this.inbox();
                    this.send(&inbox, &sums);
                    this.strip.write(&sums, Some(&inbox));
                } else {
                    this.strip.write(&sums, None);
                }
            }
        }
    }

    /// The ring of spans. A span is full when its copies have arrived, and empty when all multiplying warps have
    /// arrived.
    #[inline(always)]
    fn spans(&self) -> Ring {
        Ring::new(self.strip.shared + Strip::<I, BF16, P>::STAGES_END, Self::INSTANCE.spans())
    }

    /// The memory that receives the other part's sums.
    #[inline(always)]
    fn inbox(&self) -> Inbox {
        let address = self.strip.shared + Self::INBOX;
        Inbox::new(address, Self::INSTANCE.multiplying_threads(), Self::INSTANCE.pieces())
    }

    /// First k-block of this CTA's part of K, and the part's end.
    #[inline(always)]
    fn k_range(&self) -> [u32; 2] {
        let part = if Self::SPLIT { cluster_rank() } else { 0 };
        [part, part + 1].map(|part| part_begin(part, Self::INSTANCE.parts, self.strip.launch.k))
    }

    /// Sends the sums of every second token to the other CTA, which writes them.
    ///
    /// # Safety
    /// The contract in `linear_sm90/mod.rs` holds. The inbox is open. Every multiplying warp calls this once with its
    /// sums, all lanes together.
    #[inline(always)]
    unsafe fn send(&self, inbox: &Inbox, sums: &[[f32; 4]; P]) {
        let of_other = |product: usize| {
            if product < P { Strip::<I, BF16, P>::of_token(sums[product], inbox.rank ^ 1) } else { [0.0; 2] }
        };
        // SAFETY: each thread sends its own pieces once, after the wait for the other CTA.
        unsafe {
            inbox.wait_open();
            // Straight-line code, so that `sums` stay in registers. A piece has the sums of two products.
            macro_rules! pieces {
                ($($piece:literal)*) => {$(
                    if 2 * $piece < P {
                        let ([a, b], [c, d]) = (of_other(2 * $piece), of_other(2 * $piece + 1));
                        inbox.send(thread::thread_idx_x(), $piece, [a, b, c, d]);
                    }
                )*};
            }
            pieces!(0 1 2 3);
        }
    }

    /// Index of the first stage of the span at which a ring stands.
    #[inline(always)]
    fn first_stage(spans: Ring) -> u32 {
        spans.index() * Self::INSTANCE.span
    }

    /// Loads the tile's k-blocks. One warp does so: it loads the weights of half of the stages before the previous grid
    /// has ended, and everything else afterwards. With the weights of all stages first, the first tokens would arrive
    /// after all of these weights.
    ///
    /// # Safety
    /// The contract in `linear_sm90/mod.rs` holds. The barriers have been initialized. The whole warp makes this call
    /// together.
    #[inline(always)]
    unsafe fn load(&self) {
        let [first, k_blocks] = self.k_range();
        let early = k_blocks.min(first + Self::INSTANCE.spans() / 2 * Self::INSTANCE.span);
        let (mut spans, mut with_tokens) = (self.spans(), self.spans());
        let (mut k_block, mut of_tokens) = (first, first);
        // SAFETY: stages are written while they are empty, and their full barrier expects the bytes of every copy.
        // Tokens are complete after the wait.
        unsafe {
            while k_block < early {
                self.load_weights(spans, k_block);
                spans.advance();
                k_block += Self::INSTANCE.span;
            }
            griddepcontrol_wait();
            griddepcontrol_launch_dependents();
            while of_tokens < early {
                self.load_tokens(with_tokens, of_tokens);
                with_tokens.advance();
                of_tokens += Self::INSTANCE.span;
            }
            while k_block < k_blocks {
                spans.wait_empty();
                self.load_weights(spans, k_block);
                self.load_tokens(spans, k_block);
                spans.advance();
                k_block += Self::INSTANCE.span;
            }
        }
    }

    /// Number of k-blocks of the span that begins with k-block `first`: fewer at the end of the CTA's part of K.
    #[inline(always)]
    fn span_k_blocks(&self, first: u32) -> u32 {
        (self.k_range()[1] - first).min(Self::INSTANCE.span)
    }

    /// Starts the loads of the weights of the span that begins with k-block `first`. The span's barrier then expects
    /// the tokens too.
    ///
    /// # Safety
    /// The contract in `linear_sm90/mod.rs` holds. The span's stages are empty. The whole warp makes this call
    /// together.
    #[inline(always)]
    unsafe fn load_weights(&self, span: Ring, first: u32) {
        let &Strip { launch: Launch { panels, n, k, .. }, first_column, .. } = &self.strip;
        let (first_panel, first_row) = (first_column / PANEL_ROWS, first_column % PANEL_ROWS);
        let (last_panel, panel_strips) = ((n - 1) / PANEL_ROWS, Self::INSTANCE.panel_strips());
        let (count, full) = (self.span_k_blocks(first), span.full());
        // SAFETY: the span's stages are empty and have room for the k-blocks. Strips lie one after the other in their
        // panel, and so do their scales. One lane makes the barrier expect all bytes that its copies bring.
        unsafe {
            if lane_id() == 0 {
                let k_block_bytes = Self::INSTANCE.weight_bytes() + Self::INSTANCE.token_bytes();
                mbarrier_arrive_expect_tx(full, count * k_block_bytes);
                for step in 0..count {
                    let weights = self.strip.weights(Self::first_stage(span) + step);
                    for index in 0..Self::INSTANCE.panels() {
                        // If the matrix lacks this panel, its last panel takes the place: the products are not written
                        // to C.
                        let panel = panel_offset((first_panel + index).min(last_panel), first + step, k);
                        let panel = GlobalAddress::new(panels) + panel;
                        let values = panel + u64::from(first_row * ROW_BYTES);
                        let target = weights + index * panel_strips * STRIP_VALUES;
                        cp_async_bulk_shared_global(target, values, panel_strips * STRIP_VALUES, full);
                        let scales = panel + u64::from(PANEL_SCALES + first_row * ROW_SCALES);
                        let target = weights + (Self::INSTANCE.value_bytes() + index * panel_strips * STRIP_SCALES);
                        cp_async_bulk_shared_global(target, scales, panel_strips * STRIP_SCALES, full);
                    }
                }
            }
            sync_warp(ALL_LANES);
        }
    }

    /// Starts the loads of the tokens of the span that begins with k-block `first`. Bytes outside of the tokens become
    /// zeros.
    ///
    /// # Safety
    /// The contract in `linear_sm90/mod.rs` holds, and the previous grid has ended. The loads of the span's weights
    /// have started. The whole warp makes this call together.
    #[inline(always)]
    unsafe fn load_tokens(&self, span: Ring, first: u32) {
        let full = span.full();
        // SAFETY: the previous grid has ended, so tokens are complete. The span's stages have room for them, and its
        // barrier expects their bytes.
        unsafe {
            if lane_id() == 0 {
                for step in 0..self.span_k_blocks(first) {
                    let tokens = self.strip.tokens(Self::first_stage(span) + step);
                    for part in 0..BOXES {
                        let byte = ((first + step) * BOXES + part) * BOX_BYTES;
                        let at = [byte, self.strip.first_token].map(|place| place as i32);
                        let target = tokens + part * (Self::INSTANCE.token_bytes() / BOXES);
                        // For sm_120, ptxas makes a stack for the instruction form that Hopper's oldest drivers know.
                        if cfg!(feature = "linear_sm120") {
                            cp_async_bulk_tensor_2d_shared_cta_global(target, self.token_map, at, full);
                        } else {
                            cp_async_bulk_tensor_2d_shared_global(target, self.token_map, at, full);
                        }
                    }
                }
            }
            sync_warp(ALL_LANES);
        }
    }

    /// The warp's sums. The warp reads the operands of the next k-block before it multiplies the current one, also
    /// across the ends of spans.
    ///
    /// # Safety
    /// The contract in `linear_sm90/mod.rs` holds. The barriers have been initialized. The whole warp makes this call
    /// together.
    #[inline(always)]
    unsafe fn sums(&self) -> [[f32; 4]; P] {
        const { assert!(MAX_SPAN == 4) };
        let mut sums = [[0.0; 4]; P];
        let mut span = self.spans();
        let (lane, leads) = (self.strip.lane(), opaque_b32(lane_id()) == 0);
        let [first_k_block, end] = self.k_range();
        let mut left = end - first_k_block;
        // SAFETY: stages are read while they are full, and released after their last load.
        unsafe {
            span.wait_full();
            let mut operands = self.strip.operands(&lane, Self::first_stage(span));
            while left >= Self::INSTANCE.span {
                left -= Self::INSTANCE.span;
                let first = Self::first_stage(span);
                let mut next = span;
                next.advance();
                // Straight-line code, in which stages are constants relative to the span's first one.
                macro_rules! steps {
                    ($($step:literal)*) => {$(
                        if $step < Self::INSTANCE.span {
                            let mut coming = operands;
                            if $step + 1 < Self::INSTANCE.span {
                                coming = self.strip.operands(&lane, first + $step + 1);
                            } else if left > 0 {
                                next.wait_full();
                                coming = self.strip.operands(&lane, Self::first_stage(next));
                            }
                            self.strip.multiply(&mut sums, &operands, &lane, first + $step);
                            operands = coming;
                        }
                    )*};
                }
                steps!(0 1 2 3);
                // Without this fence, a copy overwrites the span while loads from it are still in flight: seen on an
                // H200.
                fence_proxy_async_shared();
                sync_warp(ALL_LANES);
                if leads {
                    mbarrier_arrive(span.empty());
                }
                span = next;
            }
            // The k-blocks after the last whole span.
            for step in 0..left {
                let stage = Self::first_stage(span) + step;
                if step > 0 {
                    operands = self.strip.operands(&lane, stage);
                }
                self.strip.multiply(&mut sums, &operands, &lane, stage);
            }
        }
        sums
    }
}
