//! Checks built-in shapes with its own generator, on every backend, against the oracle.

use nvfp4::shape;
use nvfp4_tests::{check_shape, sampled};

fn check_all(prefix: &str) {
    let shapes: Vec<_> = shape::builtin().iter().filter(|shape| shape.name.starts_with(prefix)).collect();
    assert!(!shapes.is_empty());
    for shape in sampled(shapes, 2) {
        // The last name printed is the shape that failed.
        println!("{}", shape.name);
        check_shape(shape);
    }
}

#[test]
fn dual_shapes_are_right() {
    check_all("dual-");
}

#[test]
fn group_shapes_are_right() {
    check_all("group-");
}

#[test]
fn moe_shapes_are_right() {
    check_all("moe-");
}

#[test]
fn decode_shapes_are_right() {
    check_all("decode-");
}
