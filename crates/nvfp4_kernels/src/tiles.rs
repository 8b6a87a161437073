//! Tiles of a grouped problem with a list made on the host, and their weight traffic. Functions of sizes only.

use super::group::Sizes;
use nvfp4_core::Error;

/// Number of weight elements that tiles of `tile_tokens` tokens read: a group's weights once per tile of its tokens.
pub(super) fn weights_read(groups: &[Sizes], tile_tokens: u32) -> u64 {
    let of = |group: &Sizes| {
        let weights = u64::from(group.n) * u64::from(group.k);
        weights.saturating_mul(group.m.div_ceil(tile_tokens).into())
    };
    groups.iter().map(of).fold(0, u64::saturating_add)
}

/// Returns every tile of every group. `tile` builds a tile from the group's index, the first column of C, the first
/// token and the number of tokens. Tiles that share weights are adjacent, so that neighboring CTAs read the weights
/// from memory once. Groups come in order, so that a CTA rarely changes its tensor maps.
///
/// # Errors
/// [`Error::TooLarge`] if there are more than `u32::MAX` tiles.
pub(super) fn tiles<T>(
    groups: &[Sizes],
    [columns, tokens]: [u32; 2],
    tile: impl Fn(u32, u32, u32, u32) -> T,
) -> Result<Vec<T>, Error> {
    /// Maximum number of tiles. More would need an index of more than 32 bits, and 64 GiB for the list.
    const MAX_TILES: u64 = u32::MAX as u64;

    let count = |group: &Sizes| u64::from(group.m.div_ceil(tokens)) * u64::from(group.n.div_ceil(columns));
    let count = groups.iter().map(count).fold(0, u64::saturating_add);
    if count > MAX_TILES {
        return Err(Error::TooLarge);
    }
    let mut tiles = Vec::with_capacity(count as usize);
    for (index, group) in (0..).zip(groups) {
        for first_column in (0..group.n).step_by(columns as usize) {
            for first_token in (0..group.m).step_by(tokens as usize) {
                tiles.push(tile(index, first_column, first_token, tokens.min(group.m - first_token)));
            }
        }
    }
    Ok(tiles)
}
