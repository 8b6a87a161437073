//! `mma.sync` with block scales: D = (A · scale A) · (B · scale B) + C in a warp's registers (PTX ISA, "Block Scaling for
//! mma.sync"; `sm_120a` and its family).
//!
//! # Lanes that supply the scales
//!
//! A row of A has one, two or four scales along the instruction's K (`scale_vec::1X`, `2X`, `4X`). So has a column of
//! B. They are adjacent bytes of one lane's register, starting with the scale of the lowest K. The byte selector gives
//! the first byte. The thread selector gives the lanes in each group of four that supply the scales:
//!
//! ```text
//! lane            4g          4g + 1        4g + 2        4g + 3         g = 0 … 7
//! scale A of    row g       row g + 8     row g         row g + 8
//!                 └ thread selector 0 ┘     └ thread selector 1 ┘
//! scale B of   column g     column g      column g      column g
//!              selector 0   selector 1    selector 2    selector 3
//!
//! byte of the register      0             1             2             3
//! 1X, byte selector 0 … 3   one of them scales all 32 elements of K
//! 2X, byte selector 0 or 2  K 0 … 31      K 32 … 63     (or these two)
//! 4X, byte selector 0       K 0 … 15      K 16 … 31     K 32 … 47     K 48 … 63
//! ```
//!
//! The registers of other lanes are not read. They may hold the scales of other products. A scale that no product of
//! the kernel reads is a mistake, which the emulator reports.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::product::{Product, Sum, element, gather_fragment, register, shape};
use crate::code::Flow;
use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::decode::error::{DecodeError, Result};
use crate::decode::parsed::Parsed;
use crate::exec::instruction::Instruction;
use crate::hw::descriptor::{Element, ScaleType};
use crate::hw::fragment::{self, Position};
use crate::hw::matmul::{Floats, Fours, Packing, Scales, multiply_f32, multiply_fours};
use crate::hw::sums::{self, Adder, Kind};
use crate::machine::state::Machine;
use crate::machine::warp::Warp;
use crate::operand::{Dst, Row, Src};
use crate::timing::core as timing;
use crate::types::Type;

use super::mma::{ELEMENTS, M, N};
use super::sparse::MetadataOperand;

/// `mma.block_scale d, a, b, c{, metadata, selector}, scale-a, {byte, thread}, scale-b, {byte, thread}`.
pub struct ScaledMma {
    /// Metadata of a sparse A. `None`: A is dense.
    sparse: Option<MetadataOperand>,
    a_type: Element,
    b_type: Element,
    /// `true` if a byte holds two elements.
    four_bit: bool,
    k: usize,
    scale_type: ScaleType,
    d: Vec<Dst>,
    a: Vec<Src>,
    b: Vec<Src>,
    c: Vec<Src>,
    scale_a: ScaleOperand,
    scale_b: ScaleOperand,
    adder: Adder,
}

/// Scales of A or of B.
struct ScaleOperand {
    side: Side,
    data: Src,
    byte: Src,
    thread: Src,
    /// Scales per row of A or per column of B.
    blocks: usize,
    /// Mask of the lanes from which any instruction of the kernel reads scales in this register.
    read: Arc<AtomicU32>,
}

/// Differences between A and B.
#[derive(Clone, Copy)]
struct Side {
    name: &'static str,
    /// Rows of A or columns of B.
    rows: usize,
    /// Number of thread selectors.
    threads: u64,
    /// Lane that supplies the scales of a row, given the row and the thread selector.
    lane: fn(u32, u32) -> u32,
}

const A: Side = Side { name: "A", rows: M, threads: 2, lane: fragment::mma_scale_a_lane };
const B: Side = Side { name: "B", rows: N, threads: 4, lane: fragment::mma_scale_b_lane };

impl ScaleOperand {
    fn decode(i: &mut Parsed<'_>, side: Side, operand: usize, blocks: usize) -> Result<ScaleOperand> {
        let data = register(i, operand)?;
        let [byte, thread] = i.src_vector(operand + 1, Type::U16)?[..] else {
            return Err(DecodeError::invalid("expected a byte selector and a thread selector in braces"));
        };
        let lanes = match thread {
            Src::Constant(thread) if thread < side.threads => side.lanes(thread as u32),
            // A selector in a register is checked at issue.
            _ => u32::MAX,
        };
        Ok(ScaleOperand { side, data, byte, thread, blocks, read: i.reads_scales(data, lanes) })
    }

    /// Scale codes, row by row of A or column by column of B.
    fn gather(&self, w: &Warp, m: &Machine<'_>, mask: u32) -> Stopped<Vec<u8>> {
        let lane = mask.trailing_zeros() as usize;
        let selector = |selector: Src| {
            let row = w.get(selector);
            let differs = (0..32).any(|other| mask >> other & 1 == 1 && row[other] != row[lane]);
            (row[lane], differs)
        };
        let ((byte, bytes_differ), (thread, threads_differ)) = (selector(self.byte), selector(self.thread));
        let refuse = |text: String| Err(Stop::new(FaultKind::InvalidOperand, text));
        let Side { name, rows, threads, .. } = self.side;
        if bytes_differ || threads_differ {
            return refuse(format!("the selectors for the scales of {name} differ between lanes of the warp"));
        }
        if byte % self.blocks as u64 != 0 || byte >= 4 {
            let allowed = ["0 to 3", "0 and 2", "0"][self.blocks.ilog2() as usize];
            return refuse(format!(
                "byte selector {byte} is invalid for {} scales of {name}; use {allowed}",
                self.blocks
            ));
        }
        if thread >= threads {
            return refuse(format!(
                "thread selector {thread} is invalid for the scales of {name}; use 0 to {}",
                threads - 1
            ));
        }
        let data = w.get(self.data);
        let words = data.map(|word| (word as u32).to_le_bytes());
        let codes = |lane: u32| &words[lane as usize][byte as usize..][..self.blocks];
        if m.sanitize {
            self.check_unread(m, thread as u32, codes)?;
        }
        Ok((0..rows as u32).flat_map(|row| codes((self.side.lane)(row, thread as u32))).copied().collect())
    }

    /// Warns about a scale in a lane that no product of the kernel selects. Zero scales are allowed, and copies of the
    /// scales of a selected lane among the same four lanes.
    fn check_unread<'c>(&self, m: &Machine<'_>, thread: u32, codes: impl Fn(u32) -> &'c [u8]) -> Stopped<()> {
        let read = self.read.load(Ordering::Relaxed);
        for lane in (0..32).filter(|lane| read >> lane & 1 == 0) {
            let own = codes(lane);
            let first = lane / 4 * 4;
            let copied = (first..first + 4).any(|beside| read >> beside & 1 == 1 && codes(beside) == own);
            if !copied && own.iter().any(|&code| code != 0) {
                let name = self.side.name;
                let text = format!(
                    "lane {lane} holds scales {own:02x?} for {name}, but no product of the kernel selects this lane; this product \
                     reads the scales of {name} from lanes {:#010x}",
                    self.side.lanes(thread)
                );
                return m.warn(Stop::new(FaultKind::ScaleNotRead, text).lane(lane));
            }
        }
        Ok(())
    }
}

impl Side {
    /// Mask of the lanes that supply scales for a thread selector.
    fn lanes(self, thread: u32) -> u32 {
        (0..self.rows as u32).fold(0, |lanes, row| lanes | 1 << (self.lane)(row, thread))
    }
}

impl Instruction for ScaledMma {
    fn decode(i: &mut Parsed<'_>) -> Result<ScaledMma> {
        let unknown = || DecodeError::unsupported("this combination of shape and types");
        let [_, _, k] = shape(i).ok_or_else(unknown)?;
        let types: Vec<Element> = i.modifiers().iter().filter_map(|name| element(name)).collect();
        let &[a_type, b_type] = &types[..] else { return Err(unknown()) };
        let scale_type = if i.has("ue4m3") { ScaleType::Ue4m3 } else { ScaleType::Ue8m0 };
        let blocks = match i.one_of(&["scale_vec::1X", "scale_vec::2X", "scale_vec::4X"]) {
            Some("scale_vec::1X") => 1,
            Some("scale_vec::2X") => 2,
            Some(_) => 4,
            // The kind's default.
            None if i.has("kind::mxf8f6f4") => 1,
            None => 2,
        };
        let d = i.dst_vector(0)?;
        let [a, b, c] = [i.src_vector(1, Type::B32)?, i.src_vector(2, Type::B32)?, i.src_vector(3, Type::B32)?];
        // Bits of the elements in a register: one 8-bit element per byte, or two 4-bit elements.
        let bits = if i.has("kind::mxf8f6f4") { 8 } else { 4 };
        let sparse = if i.has("sp::ordered_metadata") { Some(MetadataOperand::decode(i, 4, bits, k)?) } else { None };
        let (of_b, next) = if sparse.is_some() { (4, 6) } else { (2, 4) };
        if (a.len(), b.len(), c.len(), d.len()) != (4, of_b, ELEMENTS, ELEMENTS) {
            return Err(DecodeError::invalid("wrong number of registers"));
        }
        let scale_a = ScaleOperand::decode(i, A, next, blocks)?;
        let scale_b = ScaleOperand::decode(i, B, next + 2, blocks)?;
        let four_bit = bits == 4;
        let kind = if four_bit { Kind::Four } else { Kind::Eight };
        let adder = i.adder(sums::Instruction::ScaledMma, kind, sparse.is_some());
        Ok(ScaledMma { sparse, four_bit, a_type, b_type, k, scale_type, d, a, b, c, scale_a, scale_b, adder })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        let scales = |operand: &ScaleOperand| -> Stopped<Scales> {
            let codes = m.scale_codes(self.scale_type, operand.gather(w, m, mask)?);
            Scales::decode(self.scale_type, operand.side.rows, operand.blocks, &codes).ok_or_else(|| {
                let text = format!("a scale of {} has its top bit set; ue4m3 has no sign bit", operand.side.name);
                Stop::new(FaultKind::InvalidOperand, text)
            })
        };
        let (scale_a, scale_b) = (scales(&self.scale_a)?, scales(&self.scale_b)?);
        let multiply_adds = (M * N * self.k) as u64;
        m.count_matrix_operation(w, &[w.cta], multiply_adds);
        if let Some(timed) = &mut m.timed {
            // A fragment has 32 bytes per row: as many as 16 f16 numbers.
            timed.access = timing::Access::Matrix { multiply_adds: (M * N * 16) as u64 };
        }
        if m.computes_values() {
            self.finish(w, m.adder(&self.adder), mask, (scale_a, scale_b))?;
        }
        Ok(Flow::Next)
    }
}

impl ScaledMma {
    fn finish(
        &self,
        w: &mut Warp,
        adder: Option<&Adder>,
        mask: u32,
        (scale_a, scale_b): (Scales, Scales),
    ) -> Stopped<()> {
        /// Bytes per row of A: two 16-byte rows of `ldmatrix`.
        const ROW_BYTES: usize = 32;
        // A column of B has as many bytes as a row of A, or twice as many if A is sparse.
        let b_bytes = self.b.len() * 16;
        let (mut a, mut b) = (vec![0; M * ROW_BYTES], vec![0; N * b_bytes]);
        // The fragments are gathered as bytes. The packing determines the elements in a byte.
        gather_fragment(w, &self.a, 1, &mut a, |lane, register, index| {
            let Position { row, column } = fragment::mma_a(lane, register, index, 4);
            row as usize * ROW_BYTES + column as usize
        });
        gather_fragment(w, &self.b, 1, &mut b, |lane, register, index| {
            let Position { row, column } = fragment::mma_b(lane, register, index, 4);
            column as usize * b_bytes + row as usize
        });
        if let Some(sparse) = &self.sparse {
            a = sparse.read(w).dense(&a, ROW_BYTES)?;
        }
        let mut rows: Vec<Row> = self.c.iter().map(|s| w.get(*s)).collect();
        let place = |lane: usize, index: usize| {
            let Position { row, column } = fragment::mma_c(lane as u32, index as u32);
            row as usize * N + column as usize
        };
        Product::with_sums(Sum::F32, M * N, &mut rows, ELEMENTS, place, |sums| {
            let mut d: Vec<f32> = sums.iter().map(|&bits| f32::from_bits(bits)).collect();
            if self.four_bit {
                let (a, b) = (Fours::decode(M, self.k, &a), Fours::decode(N, self.k, &b));
                multiply_fours((&a, &scale_a), (&b, &scale_b), adder, &mut d);
            } else {
                let decode = |element, rows, bytes| Floats::decode(element, Packing::Container, rows, self.k, bytes);
                let (a, b) = (decode(self.a_type, M, &a), decode(self.b_type, N, &b));
                multiply_f32(&a.scaled(&scale_a), &b.scaled(&scale_b), adder, &mut d);
            }
            d.into_iter().map(f32::to_bits).collect()
        });
        for (d, row) in self.d.iter().zip(&rows) {
            d.write(w, mask, row);
        }
        Ok(())
    }
}
