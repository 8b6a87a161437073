//! The matrix product that `mma`, `wgmma` and `wmma` share, and the modifiers that describe it.

use crate::decode::error::{DecodeError, Result};
use crate::decode::parsed::Parsed;
use crate::hw::descriptor::Element;
use crate::hw::matmul::{Floats, Integers, Packing, multiply_f16, multiply_f32, multiply_i32};
use crate::hw::sums::Adder;
use crate::machine::warp::Warp;
use crate::operand::{Row, Src};
use crate::parser::ast::Operand;
use crate::types::Type;

/// The element type that a modifier names.
pub fn element(name: &str) -> Option<Element> {
    Some(match name {
        "e2m1" => Element::E2m1,
        "e2m3" => Element::E2m3,
        "e3m2" => Element::E3m2,
        "f16" => Element::F16,
        "bf16" => Element::Bf16,
        "tf32" => Element::Tf32,
        "e4m3" => Element::E4m3,
        "e5m2" => Element::E5m2,
        "u8" => Element::U8,
        "s8" => Element::S8,
        _ => return None,
    })
}

/// Type of C and D.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sum {
    F16,
    F32,
    S32,
}

impl Sum {
    pub fn parse(name: &str) -> Option<Sum> {
        Some(match name {
            "f16" => Sum::F16,
            "f32" => Sum::F32,
            "s32" => Sum::S32,
            _ => return None,
        })
    }

    /// Elements per register.
    pub fn per_register(self) -> usize {
        if self == Sum::F16 { 2 } else { 1 }
    }

    /// Bits of an element in its register.
    fn get(self, rows: &[Row], index: usize, lane: usize) -> u32 {
        let word = rows[index / self.per_register()][lane] as u32;
        if self == Sum::F16 { word >> (16 * (index % 2)) & 0xffff } else { word }
    }

    fn put(self, rows: &mut [Row], index: usize, lane: usize, value: u32) {
        let row = &mut rows[index / self.per_register()][lane];
        *row = match self {
            Sum::F16 if index.is_multiple_of(2) => *row & 0xffff_0000 | u64::from(value),
            Sum::F16 => *row & 0xffff | u64::from(value) << 16,
            _ => value.into(),
        };
    }
}

/// D = A·Bᵀ + D. The rows of A and B are contiguous along K. The elements of D are the bits of its type.
#[derive(Clone, Copy)]
pub struct Product {
    pub sum: Sum,
    pub a: Element,
    pub b: Element,
    pub k: usize,
    pub saturate: bool,
    pub negate: (bool, bool),
    /// How the GPU adds floating-point products.
    pub adder: Adder,
    /// Layout of elements in rows.
    pub packing: Packing,
}

impl Product {
    /// Computes the product with accumulators in registers, exactly without an adder. Each lane has `elements` elements. `place` maps a lane and
    /// an index to the element's position in D.
    pub fn accumulate(
        &self,
        (a_rows, a): (usize, &[u8]),
        (b_rows, b): (usize, &[u8]),
        adder: Option<&Adder>,
        rows: &mut [Row],
        elements: usize,
        place: impl Fn(usize, usize) -> usize,
    ) {
        let compute = |sums: &[u32]| self.compute((a_rows, a), (b_rows, b), adder, sums);
        Self::with_sums(self.sum, a_rows * b_rows, rows, elements, place, compute);
    }

    /// Replaces the `size` elements of D, as bits of its type, with the result of `compute`.
    pub fn with_sums(
        sum: Sum,
        size: usize,
        rows: &mut [Row],
        elements: usize,
        place: impl Fn(usize, usize) -> usize,
        compute: impl FnOnce(&[u32]) -> Vec<u32>,
    ) {
        let mut sums = vec![0; size];
        for lane in 0..32 {
            for index in 0..elements {
                sums[place(lane, index)] = sum.get(rows, index, lane);
            }
        }
        let result = compute(&sums);
        for lane in 0..32 {
            for index in 0..elements {
                sum.put(rows, index, lane, result[place(lane, index)]);
            }
        }
    }

    fn compute(
        &self,
        (a_rows, a): (usize, &[u8]),
        (b_rows, b): (usize, &[u8]),
        adder: Option<&Adder>,
        d: &[u32],
    ) -> Vec<u32> {
        let floats = |element, rows, bytes, negate| {
            let f = Floats::decode(element, self.packing, rows, self.k, bytes);
            if negate { f.negated() } else { f }
        };
        if self.sum == Sum::S32 {
            let mut d: Vec<i32> = d.iter().map(|&v| v as i32).collect();
            let a = Integers::decode(self.a == Element::S8, a_rows, self.k, a);
            let b = Integers::decode(self.b == Element::S8, b_rows, self.k, b);
            multiply_i32(&a, &b, self.saturate, &mut d);
            return d.into_iter().map(|v| v as u32).collect();
        }
        let (a, b) = (floats(self.a, a_rows, a, self.negate.0), floats(self.b, b_rows, b, self.negate.1));
        if self.sum == Sum::F16 {
            let mut d: Vec<u16> = d.iter().map(|&v| v as u16).collect();
            multiply_f16(&a, &b, adder, &mut d);
            return d.into_iter().map(u32::from).collect();
        }
        let mut sums: Vec<f32> = d.iter().map(|&v| f32::from_bits(v)).collect();
        multiply_f32(&a, &b, adder, &mut sums);
        sums.into_iter().map(f32::to_bits).collect()
    }
}

/// M, N, K of a shape modifier such as `m16n8k16`.
pub fn shape(i: &Parsed<'_>) -> Option<[usize; 3]> {
    i.modifiers().iter().find_map(|m| {
        let (m, rest) = m.strip_prefix('m')?.split_once('n')?;
        let (n, k) = rest.split_once('k')?;
        Some([m.parse().ok()?, n.parse().ok()?, k.parse().ok()?])
    })
}

/// The register of operand `n`. Braces around a single register are allowed.
pub fn register(i: &mut Parsed<'_>, n: usize) -> Result<Src> {
    let Operand::Vector(_) = i.operand(n)? else { return i.src(n, Type::B32) };
    match i.src_vector(n, Type::B32)?[..] {
        [register] => Ok(register),
        _ => Err(DecodeError::invalid("expected one register")),
    }
}

/// Types of D, A and B. Their modifiers follow the shape.
pub fn types(i: &Parsed<'_>) -> Option<(Sum, Element, Element)> {
    let names: Vec<&str> = i.modifiers().iter().map(String::as_str).filter(|m| is_type(m)).collect();
    Some((Sum::parse(names.first()?)?, element(names.get(1)?)?, element(names.get(2)?)?))
}

fn is_type(name: &str) -> bool {
    Sum::parse(name).is_some() || element(name).is_some()
}

/// Copies a fragment from a warp's registers. `place` maps lane, register and index in the register to the element's
/// byte offset in `out`.
pub fn gather_fragment(
    w: &Warp,
    registers: &[Src],
    element_bytes: usize,
    out: &mut [u8],
    place: impl Fn(u32, u32, u32) -> usize,
) {
    for (register, src) in registers.iter().enumerate() {
        for (lane, value) in w.get(*src).into_iter().enumerate() {
            for (index, element) in (value as u32).to_le_bytes().chunks_exact(element_bytes).enumerate() {
                let at = place(lane as u32, register as u32, index as u32);
                out[at..at + element_bytes].copy_from_slice(element);
            }
        }
    }
}
