//! Every built-in shape, on every backend, against the oracle.

use nvfp4::shape::{self, Shape};
use nvfp4_tests::check_shape;

/// Multiply-adds above which a shape is left to the long test.
const LARGE: f64 = 40e9;

fn multiply_adds(shape: &Shape) -> f64 {
    let group = |group: &nvfp4::problem::Group| group.m as f64 * group.n as f64 * group.k as f64;
    shape.op.projections() as f64 * shape.groups.iter().map(group).sum::<f64>()
}

fn check_all(prefix: &str, large: bool) {
    let shapes: Vec<_> = shape::builtin()
        .iter()
        .filter(|shape| shape.name.starts_with(prefix) && (multiply_adds(shape) > LARGE) == large)
        .collect();
    assert!(!shapes.is_empty());
    for shape in shapes {
        println!("{}", shape.name);
        check_shape(shape);
    }
}

#[test]
fn dual_shapes_are_right() {
    check_all("dual", false);
}

#[test]
fn group_shapes_are_right() {
    check_all("group", false);
}

#[test]
fn moe_shapes_are_right() {
    check_all("moe", false);
}

#[test]
fn decode_shapes_are_right() {
    check_all("decode", false);
}

#[test]
#[ignore = "a minute or more in a debug build; run it with `cargo test --release --test shapes -- --ignored`"]
fn the_largest_shapes_are_right() {
    check_all("", true);
}
