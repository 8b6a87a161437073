//! Warp-level matrix instructions (PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions: mma, ldmatrix,
//! stmatrix, movmatrix"). Fragments and arithmetic are in [`crate::hw::fragment`] and [`crate::hw::matmul`].

use crate::code::Flow;
use crate::config::fault::{FaultKind, Stop};
use crate::decode::error::DecodeError;
use crate::decode::opcode::Decoded;
use crate::decode::parsed::Parsed;
use crate::hw::descriptor::Element;
use crate::hw::fragment::{self, Position};
use crate::hw::matmul::{Floats, Integers, Packing, multiply_f16, multiply_f32, multiply_i32};
use crate::machine::address::Lane;
use crate::machine::race::Mode;
use crate::machine::state::Machine;
use crate::machine::warp::Warp;
use crate::operand::{Address, Dst, Row, Src};
use crate::parser::ast::Operand;
use crate::types::{Space, Type};

/// Bytes of a row of an 8×8 matrix.
const ROW: usize = 16;

/// The element type that a modifier names.
pub fn element(name: &str) -> Option<Element> {
    Some(match name {
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

/// What D and C are.
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

    /// Elements of a register.
    pub fn per_register(self) -> usize {
        if self == Sum::F16 { 2 } else { 1 }
    }

    /// An element's bits in its register.
    pub fn get(self, rows: &[Row], index: usize, lane: usize) -> u32 {
        let word = rows[index / self.per_register()][lane] as u32;
        if self == Sum::F16 { word >> (16 * (index % 2)) & 0xffff } else { word }
    }

    pub fn put(self, rows: &mut [Row], index: usize, lane: usize, value: u32) {
        let row = &mut rows[index / self.per_register()][lane];
        *row = match self {
            Sum::F16 if index.is_multiple_of(2) => *row & 0xffff_0000 | u64::from(value),
            Sum::F16 => *row & 0xffff | u64::from(value) << 16,
            _ => value.into(),
        };
    }
}

/// D = A·Bᵀ + D on rows along K, element by element as D's type has them.
pub struct Product {
    pub sum: Sum,
    pub a: Element,
    pub b: Element,
    pub k: usize,
    pub saturate: bool,
    pub negate: (bool, bool),
}

impl Product {
    pub fn compute(&self, (a_rows, a): (usize, &[u8]), (b_rows, b): (usize, &[u8]), d: &[u32]) -> Vec<u32> {
        let floats = |element, rows, bytes, negate| {
            let f = Floats::decode(element, Packing::Dense, rows, self.k, bytes);
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
            multiply_f16(&a, &b, &mut d);
            return d.into_iter().map(u32::from).collect();
        }
        let mut d: Vec<f32> = d.iter().map(|&v| f32::from_bits(v)).collect();
        multiply_f32(&a, &b, &mut d);
        d.into_iter().map(f32::to_bits).collect()
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

/// The modifiers after the shape that name types: D, A, B and, for `mma`, C.
pub fn types(i: &Parsed<'_>) -> Option<(Sum, Element, Element)> {
    let names: Vec<&str> = i.modifiers().iter().map(String::as_str).filter(|m| is_type(m)).collect();
    Some((Sum::parse(names.first()?)?, element(names.get(1)?)?, element(names.get(2)?)?))
}

fn is_type(name: &str) -> bool {
    Sum::parse(name).is_some() || element(name).is_some()
}

/// A vector of 32-bit registers.
pub fn vector(i: &mut Parsed<'_>, operand: &Operand) -> Result<Vec<Src>, DecodeError> {
    match operand {
        Operand::Vector(parts) => parts.iter().map(|p| i.src_operand(p, Type::B32)).collect(),
        single => Ok(vec![i.src_operand(single, Type::B32)?]),
    }
}

pub fn vector_dst(i: &mut Parsed<'_>, operand: &Operand) -> Result<Vec<Dst>, DecodeError> {
    match operand {
        Operand::Vector(parts) => parts.iter().map(|p| i.dst_operand(p)).collect(),
        single => Ok(vec![i.dst_operand(single)?]),
    }
}

pub fn mma(i: &mut Parsed<'_>) -> Decoded {
    let unknown = || DecodeError::unsupported("this shape or type");
    let [m, n, k] = shape(i).ok_or_else(unknown)?;
    let (sum, a_type, b_type) = types(i).ok_or_else(unknown)?;
    if m != 16 || n != 8 {
        return Err(unknown());
    }
    let last = i.modifiers().last().and_then(|t| Sum::parse(t));
    if last != Some(sum) {
        return Err(DecodeError::unsupported("C and D of different types"));
    }
    let d = vector_dst(i, i.operand(0)?)?;
    let (a, b, c) = (vector(i, i.operand(1)?)?, vector(i, i.operand(2)?)?, vector(i, i.operand(3)?)?);
    let per = 32 / a_type.bits() as usize;
    let sums = 4 / sum.per_register();
    if (a.len(), b.len(), c.len(), d.len()) != (k / per / 2, k / per / 4, sums, sums) {
        return Err(DecodeError::invalid("wrong number of registers"));
    }
    let product = Product { sum, a: a_type, b: b_type, k, saturate: i.has("satfinite"), negate: (false, false) };
    let bytes = a_type.bits() as usize / 8;
    Ok(Box::new(move |w, machine, mask| {
        let row_bytes = k * bytes;
        let (mut a_bytes, mut b_bytes) = (vec![0; m * row_bytes], vec![0; n * row_bytes]);
        let spread = |w: &Warp, list: &[Src], out: &mut [u8], at: &dyn Fn(u32, u32, u32) -> (u32, u32)| {
            for (r, src) in list.iter().enumerate() {
                for (lane, value) in w.get(*src).into_iter().enumerate() {
                    for index in 0..per {
                        let (row, k) = at(lane as u32, r as u32, index as u32);
                        let to = row as usize * row_bytes + k as usize * bytes;
                        let from = (value as u32).to_le_bytes();
                        out[to..to + bytes].copy_from_slice(&from[index * bytes..(index + 1) * bytes]);
                    }
                }
            }
        };
        spread(w, &a, &mut a_bytes, &|lane, r, index| {
            let Position { row, column } = fragment::mma_a(lane, r, index, per as u32);
            (row, column)
        });
        spread(w, &b, &mut b_bytes, &|lane, r, index| {
            let Position { row, column } = fragment::mma_b(lane, r, index, per as u32);
            (column, row)
        });
        let c: Vec<Row> = c.iter().map(|s| w.get(*s)).collect();
        let mut sums = vec![0; m * n];
        let mut out = vec![[0; 32]; d.len()];
        let place = |lane: usize, index: usize| {
            let Position { row, column } = fragment::mma_c(lane as u32, index as u32);
            row as usize * n + column as usize
        };
        for lane in 0..32 {
            for index in 0..4 {
                sums[place(lane, index)] = sum.get(&c, index, lane);
            }
        }
        let result = product.compute((m, &a_bytes), (n, &b_bytes), &sums);
        for lane in 0..32 {
            for index in 0..4 {
                sum.put(&mut out, index, lane, result[place(lane, index)]);
            }
        }
        for (d, row) in d.iter().zip(&out) {
            d.write(w, mask, row);
        }
        machine.count_matrix_operation(w, &[w.cta], (m * n * k) as u64);
        Ok(Flow::Next)
    }))
}

fn matrices(i: &Parsed<'_>) -> usize {
    match i.one_of(&["x2", "x4"]) {
        Some("x2") => 2,
        Some(_) => 4,
        None => 1,
    }
}

fn row_address(w: &Warp, a: &Address, space: Space, matrix: usize, row: usize) -> Lane {
    let lane = fragment::ldmatrix_address_lane(matrix as u32, row as u32);
    let address = w.lane(a.base, lane as usize).wrapping_add(a.offset as u64);
    Lane { lane, address, space }
}

/// Counts the bank conflicts of one matrix, whose rows are read or written at once.
fn count_bank_conflicts(m: &mut Machine<'_>, w: &Warp, a: &Address, space: Space, matrix: usize) {
    if m.sanitize {
        let (mut mask, mut addresses) = (0, [0; 32]);
        for row in 0..8 {
            let Lane { lane, address, .. } = row_address(w, a, space, matrix, row);
            mask |= 1 << lane;
            addresses[lane as usize] = address;
        }
        m.count_bank_conflicts(w, mask, &addresses, ROW as u32);
    }
}

pub fn ldmatrix(i: &mut Parsed<'_>) -> Decoded {
    let out = vector_dst(i, i.operand(0)?)?;
    let a = i.address(1)?;
    let space = i.space_at(&a);
    let (count, trans) = (matrices(i), i.has("trans"));
    if out.len() != count {
        return Err(DecodeError::invalid("wrong number of registers"));
    }
    Ok(Box::new(move |w, m, mask| {
        for (matrix, d) in out.iter().enumerate() {
            let mut rows = [[0u8; ROW]; 8];
            for (row, bytes) in rows.iter_mut().enumerate() {
                m.load(w, row_address(w, &a, space, matrix, row), Mode::Read, bytes)?;
            }
            count_bank_conflicts(m, w, &a, space, matrix);
            let half = |lane: usize, half: u32| {
                let Position { row, column } = fragment::ldmatrix(lane as u32, half, trans);
                let at = column as usize * 2;
                u64::from(u16::from_le_bytes([rows[row as usize][at], rows[row as usize][at + 1]]))
            };
            d.write(w, mask, &std::array::from_fn(|lane| half(lane, 0) | half(lane, 1) << 16));
        }
        Ok(Flow::Next)
    }))
}

pub fn stmatrix(i: &mut Parsed<'_>) -> Decoded {
    let a = i.address(0)?;
    let from = vector(i, i.operand(1)?)?;
    let space = i.space_at(&a);
    let (count, trans) = (matrices(i), i.has("trans"));
    if from.len() != count {
        return Err(DecodeError::invalid("wrong number of registers"));
    }
    Ok(Box::new(move |w, m, _| {
        for (matrix, s) in from.iter().enumerate() {
            let value = w.get(*s);
            let mut rows = [[0u8; ROW]; 8];
            for (lane, value) in value.into_iter().enumerate() {
                for half in 0..2 {
                    let Position { row, column } = fragment::ldmatrix(lane as u32, half, trans);
                    let bytes = ((value >> (16 * half)) as u16).to_le_bytes();
                    rows[row as usize][column as usize * 2..][..2].copy_from_slice(&bytes);
                }
            }
            for (row, bytes) in rows.iter().enumerate() {
                let at = row_address(w, &a, space, matrix, row);
                m.store(w, at, Mode::Write, bytes)?;
            }
            count_bank_conflicts(m, w, &a, space, matrix);
        }
        Ok(Flow::Next)
    }))
}

pub fn movmatrix(i: &mut Parsed<'_>) -> Decoded {
    let (d, a) = (i.dst(0)?, i.src(1, Type::B32)?);
    Ok(Box::new(move |w, _, mask| {
        let value = w.get(a);
        let half = |lane: usize, half: u32| {
            let (from, side) = fragment::movmatrix_source(lane as u32, half);
            value[from as usize] >> (16 * side) & 0xffff
        };
        d.write(w, mask, &std::array::from_fn(|lane| half(lane, 0) | half(lane, 1) << 16));
        if w.all != u32::MAX {
            return Err(Stop::new(FaultKind::WarpDivergence, "movmatrix needs all 32 lanes"));
        }
        Ok(Flow::Next)
    }))
}
