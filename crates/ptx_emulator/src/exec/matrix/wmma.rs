//! `wmma`: matrix instructions on fragments whose layout the manual leaves to the machine (PTX ISA, "Warp Level Matrix
//! Instructions: wmma.load, wmma.store, wmma.mma").
//!
//! Programs cannot rely on which lane holds which element. In the emulator, a lane's elements of A and B are adjacent
//! in memory, and a lane's elements of C and D are adjacent in a row. If a fragment has more places than the matrix has
//! elements, as with `.f16`, the lane's elements are repeated.

use std::sync::Arc;

use super::product::{Product, Sum, element, shape};
use crate::code::Flow;
use crate::config::fault::Stopped;
use crate::decode::error::{DecodeError, Result};
use crate::decode::parsed::Parsed;
use crate::exec::instruction::Instruction;
use crate::hw::descriptor::Element;
use crate::hw::matmul::Packing;
use crate::hw::sums::{self, Kind};
use crate::machine::address::Lane;
use crate::machine::race::Mode;
use crate::machine::state::Machine;
use crate::machine::warp::Warp;
use crate::operand::{Address, Dst, Row, Src, lanes};
use crate::types::{Space, Type};

/// Maximum number of bytes per access.
const CHUNK: usize = 16;
/// Maximum number of bytes of a lane's elements.
const BYTES: usize = 64;

#[derive(Clone, Copy, PartialEq)]
pub enum Part {
    A,
    B,
    Sum,
}

/// Layout of a matrix in the registers of a warp.
#[derive(Clone, Copy)]
pub struct Fragment {
    rows: usize,
    columns: usize,
    /// `true` if a lane's elements follow each other along a column.
    by_column: bool,
    /// Bytes per element.
    bytes: usize,
    registers: usize,
}

impl Fragment {
    pub fn new([m, n, k]: [usize; 3], part: Part, by_column: bool, bytes: usize) -> Fragment {
        let (rows, columns) = match part {
            Part::A => (m, k),
            Part::B => (k, n),
            Part::Sum => (m, n),
        };
        let fragment = Fragment { rows, columns, by_column: by_column && part != Part::Sum, bytes, registers: 0 };
        fragment.with_registers(fragment.elements() * bytes / fragment.register_bytes())
    }

    fn with_registers(self, registers: usize) -> Fragment {
        Fragment { registers, ..self }
    }

    pub fn registers(&self) -> usize {
        self.registers
    }

    /// Bytes per register: 8 for `.f64`, else 4.
    fn register_bytes(&self) -> usize {
        self.bytes.max(4)
    }

    /// Elements per lane.
    pub fn elements(&self) -> usize {
        self.rows * self.columns / 32
    }

    /// Row and column of an element, given its lane and its index in the lane.
    pub fn place(&self, lane: usize, index: usize) -> (usize, usize) {
        let number = lane * self.elements() + index;
        if self.by_column {
            (number % self.rows, number / self.rows)
        } else {
            (number / self.columns, number % self.columns)
        }
    }

    /// Register values for a lane's elements.
    fn words(&self, elements: &[u8; BYTES]) -> impl Iterator<Item = u64> {
        let (bytes, width) = (self.elements() * self.bytes, self.register_bytes());
        (0..self.registers).map(move |n| {
            let mut word = [0; 8];
            word[..width].copy_from_slice(&elements[n * width % bytes..][..width]);
            u64::from_le_bytes(word)
        })
    }

    /// A lane's elements, read from the registers.
    fn of_lane(&self, w: &Warp, registers: &[Src], lane: usize) -> [u8; BYTES] {
        let mut elements = [0; BYTES];
        let width = self.register_bytes();
        let words = registers.iter().take(self.elements() * self.bytes / width);
        for (bytes, register) in elements.chunks_exact_mut(width).zip(words) {
            bytes.copy_from_slice(&w.lane(*register, lane).to_le_bytes()[..width]);
        }
        elements
    }

    /// Gathers the whole matrix from a warp's registers, row by row or column by column.
    pub fn gather(&self, w: &Warp, registers: &[Src], by_column: bool) -> Vec<u8> {
        let mut matrix = vec![0; self.rows * self.columns * self.bytes];
        for lane in 0..32 {
            let elements = self.of_lane(w, registers, lane);
            for (index, value) in elements.chunks_exact(self.bytes).take(self.elements()).enumerate() {
                let (row, column) = self.place(lane, index);
                let at = if by_column { column * self.rows + row } else { row * self.columns + column };
                matrix[at * self.bytes..][..self.bytes].copy_from_slice(value);
            }
        }
        matrix
    }
}

/// A matrix in memory.
struct InMemory {
    fragment: Fragment,
    address: Address,
    space: Space,
    /// Distance between rows, or between columns if `column_major`, in elements.
    stride: Src,
    column_major: bool,
}

impl InMemory {
    fn decode(i: &mut Parsed<'_>, part: Part, address: usize, stride: usize, registers: usize) -> Result<InMemory> {
        let sizes = shape(i).ok_or_else(|| DecodeError::unsupported("this shape"))?;
        let column_major = i.has("col");
        let name = i.modifiers().last().map_or("", String::as_str);
        let half = part != Part::Sum && name == "f16";
        let bytes = match (part, element(name), Sum::parse(name)) {
            _ if name == "f64" => 8,
            (Part::Sum, _, Some(sum)) => 4 / sum.per_register(),
            (Part::A | Part::B, Some(element), _) => element.bits().div_ceil(8) as usize,
            _ => return Err(DecodeError::unsupported("this type")),
        };
        let fragment = Fragment::new(sizes, part, column_major, bytes);
        // With `.f16`, A and B take eight registers for every shape.
        let fragment = if half { fragment.with_registers(8) } else { fragment };
        if fragment.registers != registers {
            return Err(DecodeError::invalid(format!("expected {} registers", fragment.registers)));
        }
        let address = i.address(address)?;
        let stride = if i.operands().len() > stride {
            i.src(stride, Type::U32)?
        } else {
            Src::Constant(if column_major { fragment.rows } else { fragment.columns } as u64)
        };
        Ok(InMemory { fragment, address, space: i.space_at(&address), stride, column_major })
    }

    /// Memory accesses of a lane: the location of a chunk, and its bytes in the lane's elements.
    fn accesses(&self, w: &Warp, lane: usize) -> impl Iterator<Item = (Lane, std::ops::Range<usize>)> + use<> {
        let Fragment { bytes, .. } = self.fragment;
        let all = self.fragment.elements() * bytes;
        // If memory and fragment have the same order, consecutive elements form one access.
        let chunk = if self.column_major == self.fragment.by_column { all.min(CHUNK) } else { bytes };
        let (at, stride) = (w.lane_at(&self.address, self.space, lane), w.lane(self.stride, lane));
        let (fragment, column_major) = (self.fragment, self.column_major);
        (0..all).step_by(chunk).map(move |from| {
            let (row, column) = fragment.place(lane, from / bytes);
            let (line, within) = if column_major { (column, row) } else { (row, column) };
            let offset = (line as u64).wrapping_mul(stride).wrapping_add(within as u64).wrapping_mul(bytes as u64);
            (Lane { address: at.address.wrapping_add(offset), ..at }, from..from + chunk)
        })
    }
}

/// `wmma.load registers, [address], stride`.
pub struct Load {
    out: Vec<Dst>,
    registers: Arc<[u32]>,
    from: InMemory,
}

impl Instruction for Load {
    fn decode(i: &mut Parsed<'_>) -> Result<Load> {
        let part = match i.one_of(&["a", "b", "c"]) {
            Some("a") => Part::A,
            Some("b") => Part::B,
            _ => Part::Sum,
        };
        let out = i.dst_vector(0)?;
        let from = InMemory::decode(i, part, 1, 2, out.len())?;
        Ok(Load { registers: out.iter().filter_map(|d| d.register).collect(), out, from })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        for lane in lanes(mask) {
            let mut elements = [0; BYTES];
            for (at, range) in self.from.accesses(w, lane) {
                m.load(w, at, Mode::Read, &mut elements[range])?;
            }
            for (d, word) in self.out.iter().zip(self.from.fragment.words(&elements)) {
                d.write_lane(w, lane, word);
            }
        }
        m.begin_load(w, &self.registers);
        Ok(Flow::Next)
    }
}

/// `wmma.store [address], registers, stride`.
pub struct Store {
    values: Vec<Src>,
    to: InMemory,
}

impl Instruction for Store {
    fn decode(i: &mut Parsed<'_>) -> Result<Store> {
        let values = i.src_vector(1, if i.has("f64") { Type::F64 } else { Type::B32 })?;
        Ok(Store { to: InMemory::decode(i, Part::Sum, 0, 2, values.len())?, values })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        for lane in lanes(mask) {
            let elements = self.to.fragment.of_lane(w, &self.values, lane);
            for (at, range) in self.to.accesses(w, lane) {
                m.store_value(w, at, Mode::Write, &elements[range])?;
            }
        }
        Ok(Flow::Next)
    }
}

/// `wmma.mma d, a, b, c`.
pub struct Mma {
    product: Product,
    sizes: [usize; 3],
    /// Register layouts of A, of B, and of C and D.
    fragments: [Fragment; 3],
    d: Vec<Dst>,
    a: Vec<Src>,
    b: Vec<Src>,
    c: Vec<Src>,
}

impl Instruction for Mma {
    fn decode(i: &mut Parsed<'_>) -> Result<Mma> {
        let unknown = || DecodeError::unsupported("this combination of shape and types");
        let sizes = shape(i).ok_or_else(unknown)?;
        let saturate = i.has("satfinite");
        // The types after the shape are D, A, B and C, or only D and C if A and B are `.f16`.
        let words: Vec<&str> = i.modifiers().iter().map(String::as_str).filter(|word| *word != "satfinite").collect();
        let columns: Vec<bool> =
            words.iter().filter(|word| ["row", "col"].contains(word)).map(|word| *word == "col").collect();
        let types = words.iter().position(|word| word.starts_with('m') && *word != "mma").map(|at| &words[at + 1..]);
        let (d_type, a_type, b_type, c_type) = match types {
            Some(&[d, c]) => (d, "f16", "f16", c),
            Some(&[d, a, b, c]) => (d, a, b, c),
            _ => return Err(unknown()),
        };
        let (&[a_column, b_column], Some(sum)) = (&columns[..], Sum::parse(d_type)) else { return Err(unknown()) };
        let (a_type, b_type) = element(a_type).zip(element(b_type)).ok_or_else(unknown)?;
        if c_type != d_type {
            return Err(DecodeError::unsupported("C and D of different types"));
        }
        let input = |part, column, of: Element| {
            let fragment = Fragment::new(sizes, part, column, of.bits().div_ceil(8) as usize);
            if of == Element::F16 { fragment.with_registers(8) } else { fragment }
        };
        let fragments = [
            input(Part::A, a_column, a_type),
            input(Part::B, b_column, b_type),
            Fragment::new(sizes, Part::Sum, false, 4 / sum.per_register()),
        ];
        let d = i.dst_vector(0)?;
        let [a, b, c] = [i.src_vector(1, Type::B32)?, i.src_vector(2, Type::B32)?, i.src_vector(3, Type::B32)?];
        if [a.len(), b.len(), c.len()] != fragments.map(|fragment| fragment.registers) || c.len() != d.len() {
            return Err(DecodeError::invalid("wrong number of registers"));
        }
        let product = Product {
            sum,
            a: a_type,
            b: b_type,
            k: sizes[2],
            saturate,
            negate: (false, false),
            adder: i.adder(sums::Instruction::Mma, Kind::of(a_type), false),
            packing: Packing::Dense,
        };
        Ok(Mma { product, sizes, fragments, d, a, b, c })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        m.count_matrix_operation(w, &[w.cta], self.sizes.iter().product::<usize>() as u64);
        let [rows, columns, _] = self.sizes;
        let [of_a, of_b, of_sum] = self.fragments;
        // The elements of both are contiguous along K.
        let (a, b) = (of_a.gather(w, &self.a, false), of_b.gather(w, &self.b, true));
        let mut sums: Vec<Row> = self.c.iter().map(|s| w.get(*s)).collect();
        let place = |lane: usize, index: usize| {
            let (row, column) = of_sum.place(lane, index);
            row * columns + column
        };
        let adder = m.adder(&self.product.adder);
        self.product.accumulate((rows, &a), (columns, &b), adder, &mut sums, of_sum.elements(), place);
        for (d, row) in self.d.iter().zip(&sums) {
            d.write(w, mask, row);
        }
        Ok(Flow::Next)
    }
}
