//! Expected numbers of rows and of tiles in an MoE layer, for tokens that name random experts.

/// Returns the expected number of rows of `choices` choices, if each names any of `named` experts and the layer has
/// `experts` of them.
pub(super) fn expected_rows(choices: u64, experts: u64, named: u64) -> u64 {
    (choices * experts).div_ceil(named).min(choices)
}

/// Returns the expected number of tiles if every row belongs to a random expert: one per expert with rows. If these
/// have more rows than half a tile on average, half a tile per expert is added to the tiles that the rows would fill.
pub(super) fn expected_token_tiles(rows: u64, experts: u64, tile_tokens: u32) -> u64 {
    let tile_tokens = u64::from(tile_tokens);
    if experts == 1 {
        return rows.div_ceil(tile_tokens);
    }
    let mean = rows as f64 / experts as f64;
    let hit = (experts as f64 * (1.0 - (-mean).exp())).round().max(1.0) as u64;
    (rows / tile_tokens + hit / 2).max(hit).min(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expected_tiles_follow_the_named_experts() {
        assert_eq!([1, 16, 64, 4096].map(|rows| expected_token_tiles(rows, 128, 16)), [1, 15, 50, 320]);
        assert_eq!([16, 17].map(|rows| expected_token_tiles(rows, 1, 16)), [1, 2]);
        assert_eq!(expected_token_tiles(0, 128, 16), 0);
    }
}
