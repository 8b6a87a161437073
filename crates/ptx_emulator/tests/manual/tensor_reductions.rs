//! Tensor reductions (PTX ISA, "Data Movement: cp.reduce.async.bulk.tensor"): each element of the box in shared memory
//! is combined with the element in global memory. The tensor map gives the element type. Elements outside the tensor do
//! not change.

use ptx_emulator::program::Program;

use super::common::{noise, small_integer};
use super::tensor_copies::{Tensor, store};

fn tensor(element: (&'static str, usize)) -> Tensor {
    let columns = 64 / element.1 as u64;
    Tensor {
        element,
        dims: vec![columns, 10],
        strides: vec![80],
        shape: vec![columns, 8],
        element_strides: vec![1, 1],
        at: vec![16 / element.1 as i64, 4],
        swizzle: "64B",
    }
}

fn reduction(operation: &str, element: (&'static str, usize), f: impl Fn(u64, u64) -> u64) -> Program {
    let tensor = tensor(element);
    let code = |word: u32| match element.0 {
        "f16" => {
            let number = |part: u32| small_integer((part % 61) as i32 - 30, 5, 10);
            number(word & 0xffff) | number(word >> 16) << 16
        }
        "bf16" => {
            let number = |part: u32| small_integer((part % 61) as i32 - 30, 8, 7);
            number(word & 0xffff) | number(word >> 16) << 16
        }
        "f32" => ((word % 999) as f32 - 500.0).to_bits(),
        _ => word,
    };
    let words = |seed, bytes: usize| noise(seed, bytes / 4).into_iter().map(code).collect();
    let instruction = format!("cp.reduce.async.bulk.tensor.2d.global.shared::cta.{operation}.tile.bulk_group");
    store(&tensor, &instruction, words(51, tensor.tile_bytes()), words(52, tensor.bytes()), |old, new| {
        let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte));
        f(number(old), number(new)).to_le_bytes()[..element.1].to_vec()
    })
}

/// Adds integers in a 16-bit format that represents them exactly.
fn sum(exponent: u32, mantissa: u32) -> impl Fn(u64, u64) -> u64 {
    move |old, new| {
        let value = |code: u64| (-100..=100).find(|&value| u64::from(small_integer(value, exponent, mantissa)) == code);
        small_integer(value(old).unwrap() + value(new).unwrap(), exponent, mantissa).into()
    }
}

pub fn programs() -> Vec<Program> {
    let signed = |f: fn(i32, i32) -> i32| move |old: u64, new: u64| u64::from(f(old as i32, new as i32) as u32);
    let single = |old: u64, new: u64| u64::from((f32::from_bits(old as u32) + f32::from_bits(new as u32)).to_bits());
    vec![
        reduction("add", ("u32", 4), |old, new| u64::from((old as u32).wrapping_add(new as u32))),
        reduction("min", ("s32", 4), signed(i32::min)),
        reduction("max", ("s32", 4), signed(i32::max)),
        reduction("min", ("u32", 4), u64::min),
        reduction("inc", ("u32", 4), |old, new| if old >= new { 0 } else { old + 1 }),
        reduction("dec", ("u32", 4), |old, new| if old == 0 || old > new { new } else { old - 1 }),
        reduction("and", ("u32", 4), |old, new| old & new),
        reduction("or", ("u32", 4), |old, new| old | new),
        reduction("xor", ("u32", 4), |old, new| old ^ new),
        reduction("add", ("u64", 8), u64::wrapping_add),
        reduction("max", ("u64", 8), u64::max),
        reduction("add", ("f16", 2), sum(5, 10)),
        reduction("add", ("bf16", 2), sum(8, 7)),
        reduction("add", ("f32", 4), single),
    ]
}
