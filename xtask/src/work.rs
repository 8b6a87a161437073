//! Work of a built-in shape, computed by the library's own formulas.

use nvfp4::format::{BLOCK, blocked};
use nvfp4::plan::roofline::Roofline;
use nvfp4::plan::tile::Tiling;
use nvfp4::problem::{Group, GroupedProblem, TokenDtype};
use nvfp4::shape::{self, Shape};

/// Returns the built-in shape with this name.
pub fn shape(name: &str) -> Option<&'static Shape> {
    shape::builtin().iter().find(|shape| shape.name == name)
}

/// Problem of some groups of a shape. The output type does not affect the counts.
fn problem(shape: &Shape, groups: Vec<Group>) -> GroupedProblem {
    GroupedProblem::new(shape.op, TokenDtype::F16, groups).expect("groups of a checked shape have valid sizes")
}

/// Bytes and operations of a shape.
pub fn roofline(shape: &Shape) -> Roofline {
    Roofline::new(&problem(shape, shape.groups.clone()))
}

/// Number of multiply-adds that contribute to the output.
pub fn multiply_adds(shape: &Shape) -> u64 {
    (roofline(shape).operations / 2.0) as u64
}

/// Useful share of the multiply-adds if tokens are padded to multiples of `rows`.
pub fn useful_in_rows(shape: &Shape, rows: usize) -> f64 {
    let pad = |group: &Group| Group { m: group.m.next_multiple_of(rows), ..*group };
    let padded = Roofline::new(&problem(shape, shape.groups.iter().map(pad).collect()));
    roofline(shape).operations / padded.operations
}

/// Tiles of one launch for all groups, and tiles of one launch per group.
pub fn tilings(shape: &Shape, tile_tokens: usize, sms: usize) -> (Tiling, Vec<Tiling>) {
    let tiling = |groups: &[Group]| Tiling::new(&problem(shape, groups.to_vec()), tile_tokens, sms);
    (tiling(&shape.groups), shape.groups.chunks(1).map(tiling).collect())
}

/// Bytes of values and blocked scales of the weights that a run reads. An expert counts once per tile of `tile_tokens`
/// tokens.
pub fn weight_bytes(shape: &Shape, tile_tokens: usize) -> u64 {
    let bytes = |group: &Group| group.n * group.k / 2 + blocked::len(group.n, group.k / BLOCK);
    let of = |group: &Group| group.m.div_ceil(tile_tokens) * shape.op.projections() * bytes(group);
    shape.groups.iter().map(of).sum::<usize>() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two experts of 128 × 256: one with 65 tokens, one with none.
    fn made(op: &str) -> Shape {
        let json = format!(r#"{{"op": "{op}", "groups": [[65, 128, 256], [0, 128, 256]]}}"#);
        shape::parse(&json).unwrap().remove(0)
    }

    #[test]
    fn weights_are_counted_once_per_tile_of_tokens() {
        // 128 rows of 128 bytes of values and 16 bytes of scales.
        assert_eq!(weight_bytes(&made("plain"), 64), 2 * 128 * 144);
        assert_eq!(weight_bytes(&made("gated"), 128), 2 * 128 * 144);
    }

    #[test]
    fn tokens_are_padded_to_rows_and_tiles() {
        assert_eq!(multiply_adds(&made("gated")), 2 * 65 * 128 * 256);
        assert_eq!(useful_in_rows(&made("gated"), 128), 65.0 / 128.0);
        let (all, apart) = tilings(&made("plain"), 64, 148);
        assert_eq!((all.tiles, all.waves), (2, 1));
        assert_eq!(apart.iter().map(|tiling| (tiling.tiles, tiling.waves)).collect::<Vec<_>>(), [(2, 1), (0, 0)]);
    }
}
