//! What a built-in shape asks for, by the library's own arithmetic.

use nvfp4::format::{BLOCK, blocked};
use nvfp4::plan::roofline::Roofline;
use nvfp4::plan::tile::Tiling;
use nvfp4::problem::{Group, GroupedProblem, TokenDtype};
use nvfp4::shape::{self, Shape};

/// The built-in shape of a name.
pub fn shape(name: &str) -> Option<&'static Shape> {
    shape::builtin().iter().find(|shape| shape.name == name)
}

/// The problem of some groups of a shape; either type of output counts the same.
fn problem(shape: &Shape, groups: Vec<Group>) -> GroupedProblem {
    GroupedProblem::new(shape.op, TokenDtype::F16, groups).expect("sizes as those of a shape that was checked")
}

/// Bytes and operations.
pub fn roofline(shape: &Shape) -> Roofline {
    Roofline::new(&problem(shape, shape.groups.clone()))
}

/// Multiply-adds that belong to an element of the output.
pub fn multiply_adds(shape: &Shape) -> u64 {
    (roofline(shape).operations / 2.0) as u64
}

/// The useful share of the multiply-adds if tokens lay on rows of so many.
pub fn useful_in_rows(shape: &Shape, rows: usize) -> f64 {
    let pad = |group: &Group| Group { m: group.m.next_multiple_of(rows), ..*group };
    let padded = Roofline::new(&problem(shape, shape.groups.iter().map(pad).collect()));
    roofline(shape).operations / padded.operations
}

/// The tiles of all groups in one launch, and those of each group in a launch of its own.
pub fn tilings(shape: &Shape, tile_tokens: usize, sms: usize) -> (Tiling, Vec<Tiling>) {
    let tiling = |groups: &[Group]| Tiling::new(&problem(shape, groups.to_vec()), tile_tokens, sms);
    (tiling(&shape.groups), shape.groups.chunks(1).map(tiling).collect())
}

/// Bytes of values and of blocked scales of the weights. Each expert counts as often as it has tiles of so many tokens.
pub fn weight_bytes(shape: &Shape, tile_tokens: usize) -> u64 {
    let bytes = |group: &Group| group.n * group.k / 2 + blocked::len(group.n, group.k / BLOCK);
    let of = |group: &Group| group.m.div_ceil(tile_tokens) * shape.op.projections() * bytes(group);
    shape.groups.iter().map(of).sum::<usize>() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 65 tokens and none, of two experts of 128 × 256.
    fn made(op: &str) -> Shape {
        let json = format!(r#"{{"op": "{op}", "groups": [[65, 128, 256], [0, 128, 256]]}}"#);
        shape::parse(&json).unwrap().remove(0)
    }

    #[test]
    fn weights_are_counted_once_for_each_tile_of_tokens() {
        // 128 rows of 128 bytes of values and 16 of scales.
        assert_eq!(weight_bytes(&made("plain"), 64), 2 * 128 * 144);
        assert_eq!(weight_bytes(&made("gated"), 128), 2 * 128 * 144);
    }

    #[test]
    fn tokens_fill_rows_and_tiles_up() {
        assert_eq!(multiply_adds(&made("gated")), 2 * 65 * 128 * 256);
        assert_eq!(useful_in_rows(&made("gated"), 128), 65.0 / 128.0);
        let (all, apart) = tilings(&made("plain"), 64, 148);
        assert_eq!((all.tiles, all.waves), (2, 1));
        assert_eq!(apart.iter().map(|tiling| (tiling.tiles, tiling.waves)).collect::<Vec<_>>(), [(2, 1), (0, 0)]);
    }
}
