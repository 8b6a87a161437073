//! Work of an MoE layer before and after its products, `kernels-gpu/src/layer/moe_route/`: the lists of each expert's
//! tokens, tokens in the order of K or copied to the rows of their experts, and the weighted sum of a token's rows.

#[cfg(feature = "fake")]
mod fake;

use kernels_gpu::layer::moe_route::abi::{COMBINE_ENTRIES, Combine, EXPAND_ENTRY, Expand, ROUTE_ENTRIES, Route};
use kernels_gpu::lists::SMALL_EXPERTS;

use crate::kernel::{Entry, Kernel};
use crate::launch::{Grid, Launch, entry_of};
use nvfp4_core::Error;
use nvfp4_core::problem::TokenDtype;

/// The kernel.
pub struct MoeRoute;

impl Kernel for MoeRoute {
    fn name(&self) -> &'static str {
        "moe_route"
    }

    fn proven(&self) -> bool {
        true
    }

    fn entries(&self) -> Vec<Entry> {
        let route = [0, 1].map(|index| (ROUTE_ENTRIES[index], Route::THREADS, Route::MAX_SHARED_BYTES[index]));
        let expand = (EXPAND_ENTRY, Expand::THREADS, 0);
        let combine = COMBINE_ENTRIES.map(|name| (name, Combine::THREADS, 0));
        let entry = |(name, threads, shared_bytes)| Entry { name, op: None, threads, shared_bytes };
        route.into_iter().chain([expand]).chain(combine).map(entry).collect()
    }

    #[cfg(feature = "fake")]
    fn fake(&self, launch: &fake_cuda::Launch<'_>) {
        fake::launch(launch);
    }
}

impl MoeRoute {
    /// Returns a grid of one cluster of the largest size that writes lists.
    pub fn largest_cluster() -> Grid {
        Grid {
            cluster: Route::MAX_CLUSTER,
            shared_bytes: Route::MAX_SHARED_BYTES[0],
            ..Grid::linear(ROUTE_ENTRIES[0], Route::MAX_CLUSTER, Route::THREADS)
        }
    }

    /// Returns the launch that writes lists, and tokens in the order of K, in clusters of up to `largest_cluster` CTAs.
    /// Builds with clusters also have grids that overlap.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if the grid would need too many CTAs.
    pub fn route(&self, route: Route, largest_cluster: u32) -> Result<Launch, Error> {
        let choices = u64::from(route.token_count) * u64::from(route.top_k);
        let (cluster, blocks) = if route.tokens == 0 {
            let cluster = Route::cluster(choices, route.experts, largest_cluster);
            (cluster, Route::list_blocks(route.token_count, route.row_multiple, cluster))
        } else {
            // The CTAs that copy tokens are in clusters of the same size.
            let cluster = Route::cluster(choices, route.experts, largest_cluster.min(Route::PORTABLE_CLUSTER));
            (cluster, Route::blocks(route.token_count, route.hidden, cluster))
        };
        let blocks = Grid::blocks(blocks)?;
        let grid = Grid {
            cluster,
            shared_bytes: Route::shared_bytes(choices, route.experts, cluster),
            overlaps: largest_cluster > 1,
            ..Grid::linear(ROUTE_ENTRIES[usize::from(route.experts > SMALL_EXPERTS)], blocks, Route::THREADS)
        };
        Ok(Launch::of_parameter(self.name(), grid, route))
    }

    /// Returns the launch that copies tokens to their rows, which are sorted by expert.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if the grid would need too many CTAs.
    pub fn expand(&self, expand: Expand, overlaps: bool) -> Result<Launch, Error> {
        let blocks = Grid::blocks(expand.blocks())?;
        let grid = Grid { overlaps, ..Grid::linear(EXPAND_ENTRY, blocks, Expand::THREADS) };
        Ok(Launch::of_parameter(self.name(), grid, expand))
    }

    /// Returns the launch that computes the weighted sum of each token's rows.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if the grid would need too many CTAs.
    pub fn combine(&self, combine: Combine, dtype: TokenDtype, overlaps: bool) -> Result<Launch, Error> {
        let entry = entry_of(COMBINE_ENTRIES, dtype);
        let blocks = Grid::blocks(Combine::blocks(combine.token_count, combine.hidden))?;
        let grid = Grid { overlaps, ..Grid::linear(entry, blocks, Combine::THREADS) };
        Ok(Launch::of_parameter(self.name(), grid, combine))
    }
}

#[cfg(test)]
mod tests {
    use bytemuck::Zeroable;

    use super::*;

    #[test]
    fn cluster_size_follows_choices_and_the_largest_cluster() {
        let grid = |tokens: u64, token_count: u32, largest_cluster: u32| {
            let lists = Route { top_k: 8, experts: 256, tile_tokens: 64, row_multiple: 8, ..Route::zeroed() };
            let route = Route { tokens, token_count, hidden: 64, ..lists };
            let grid = MoeRoute.route(route, largest_cluster).unwrap().grid;
            assert!(grid.blocks.is_multiple_of(grid.cluster) && grid.shared_bytes <= Route::MAX_SHARED_BYTES[0]);
            (grid.cluster, grid.overlaps)
        };
        assert_eq!([1, 8, 16].map(|largest| grid(0, 8192, largest)), [(1, false), (8, true), (16, true)]);
        assert_eq!(grid(0x1000, 8192, 16), (8, true));
        assert_eq!([128, 512, 1024, 2048].map(|tokens| grid(0, tokens, 16).0), [1, 4, 8, 16]);
        for (experts, entry, cluster) in
            [(512, ROUTE_ENTRIES[0], 16), (513, ROUTE_ENTRIES[1], 4), (1024, ROUTE_ENTRIES[1], 4)]
        {
            let route =
                Route { top_k: 32, experts, tile_tokens: 64, row_multiple: 8, token_count: 8192, ..Route::zeroed() };
            let launch = MoeRoute.route(route, 16).unwrap();
            assert_eq!((launch.grid.entry, launch.grid.cluster), (entry, cluster));
            assert!(launch.grid.shared_bytes <= Route::MAX_SHARED_BYTES[usize::from(experts > 512)]);
        }
    }
}
