//! The fifth-generation tensor core (PTX ISA, "TensorCore 5th Generation Family Instructions"). Descriptors, layouts and
//! arithmetic are in [`crate::hw`]; here is what happens when.
//!
//! Order: `mma`, `cp` and `shift` of one thread take effect in the order of issue (under `strict`, only the pairs that the
//! manual lists as pipelined: `mma` after each of them, `cp` after `cp`, `shift` after `mma`, `cp.4x256b` after `shift`). `ld` and `st` complete at their waits.
//! Other threads know of an `mma` or `cp` through a `commit` and its mbarrier; of an `ld` or `st` through its wait and an
//! ordinary barrier. Under `strict` the barrier counts only between `tcgen05.fence::before_thread_sync` (for `ld` and `st`)
//! and `tcgen05.fence::after_thread_sync`.

use super::bulk::shared_lane;
use super::mbarrier::lane_at;
use crate::code::Flow;
use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::decode::error::DecodeError;
use crate::decode::opcode::Decoded;
use crate::decode::parsed::Parsed;
use crate::hw::descriptor::{
    Accumulator, CHUNK_BYTES, DescriptorError, Element, InstructionDescriptor, Major, MmaKind, ScaleType, ScaleVector,
    SharedMatrix,
};
use crate::hw::matmul::{
    Floats, Fours, Integers, Packing, Scales, gather, multiply_f16, multiply_f32, multiply_fours, multiply_i32,
};
use crate::hw::tmem::{
    AccessShape, Address as Cell, CopyShape, DataPath, LANES_PER_WARP, SHIFT_COLUMNS, first_lane_of_warp,
    is_allocation_size, scale_byte,
};
use crate::machine::address::{SHARED_BASE, Spot};
use crate::machine::in_flight::TmemLoad;
use crate::machine::mbarrier::MbarrierAt;
use crate::machine::race::{Agent, Clock, Detector, Mode, merge};
use crate::machine::state::Machine;
use crate::machine::wait::WaitFor;
use crate::machine::warp::Warp;
use crate::operand::{Address, Dst, Src, lanes};
use crate::parser::ast::Operand;
use crate::types::Type;
use std::rc::Rc;

const MMA: usize = 0;
const CP: usize = 1;
const SHIFT: usize = 2;
const ALL_KINDS: &[usize] = &[MMA, CP, SHIFT];

fn pair(i: &Parsed<'_>) -> u32 {
    if i.has("cta_group::2") { 2 } else { 1 }
}

/// CTAs that an instruction of a CTA group works in, the issuing CTA's pair in order of rank.
fn ctas(w: &Warp, m: &Machine<'_>, group: u32) -> Stopped<Vec<u32>> {
    if group == 1 {
        return Ok(vec![w.cta]);
    }
    let first = w.cta & !1;
    if first as usize + 1 >= m.ctas.len() {
        let text = ".cta_group::2 in a cluster without a peer CTA";
        return Err(Stop::new(FaultKind::InvalidOperand, text));
    }
    Ok(vec![first, first + 1])
}

/// A descriptor that breaks its rules.
pub fn bad(error: DescriptorError) -> Box<Stop> {
    let kind = match error {
        DescriptorError::Unsupported(_) => FaultKind::Unsupported,
        _ => FaultKind::BadDescriptor,
    };
    Stop::new(kind, error.to_string())
}

pub fn alloc(i: &mut Parsed<'_>) -> Decoded {
    i.uses_tmem();
    let (to, columns) = (i.address(0)?, i.src(1, Type::U32)?);
    let space = i.space_at(&to);
    Ok(Box::new(move |w, m, mask| {
        let lane = mask.trailing_zeros() as usize;
        let columns = w.lane(columns, lane) as u32;
        if !is_allocation_size(columns) {
            let text = format!("{columns} columns; a power of two from 32 to 512 is valid");
            return Err(Stop::new(FaultKind::InvalidOperand, text));
        }
        let tmem = &mut m.ctas[w.cta as usize].tmem;
        if tmem.relinquished {
            let text = "an allocation after tcgen05.relinquish_alloc_permit";
            return Err(Stop::new(FaultKind::InvalidOperand, text));
        }
        let Some(first) = tmem.allocate(columns) else {
            return Ok(Flow::Wait(WaitFor::Columns { cta: w.cta, columns }));
        };
        m.store(w, lane_at(w, &to, space, lane), Mode::Write, &first.to_le_bytes())?;
        // The address is written through the async proxy's side of things: no proxy fence is asked of its readers.
        Ok(Flow::Next)
    }))
}

pub fn dealloc(i: &mut Parsed<'_>) -> Decoded {
    let (at, columns) = (i.src(0, Type::U32)?, i.src(1, Type::U32)?);
    Ok(Box::new(move |w, m, mask| {
        let lane = mask.trailing_zeros() as usize;
        let (at, columns) = (w.lane(at, lane) as u32, w.lane(columns, lane) as u32);
        m.ctas[w.cta as usize].tmem.free(Cell::decode(at).column, columns)?;
        m.progress += 1;
        Ok(Flow::Next)
    }))
}

pub fn relinquish(_: &mut Parsed<'_>) -> Decoded {
    Ok(Box::new(|w, m, _| {
        m.ctas[w.cta as usize].tmem.relinquished = true;
        Ok(Flow::Next)
    }))
}

/// `tcgen05.fence::before_thread_sync`, `::after_thread_sync`.
pub fn fence(i: &mut Parsed<'_>) -> Decoded {
    let before = i.has("fence::before_thread_sync");
    Ok(Box::new(move |w, m, mask| {
        match &mut m.race {
            Some(race) if before => race.acquire(w.index, mask, &w.tmem_known),
            Some(race) => race.release(w.index, mask, &mut w.tmem_view),
            None => {}
        }
        Ok(Flow::Next)
    }))
}

/// An asynchronous operation of a thread that takes its turn in the tensor core's pipe, under `strict` only behind the
/// kinds that are pipelined with it.
fn issue(m: &mut Machine<'_>, w: &Warp, lane: usize, pipelined: &[usize]) -> (Option<Agent>, Vec<u64>) {
    let strict = m.launch.config.strict;
    let pipe = &m.pipes[(w.cta / 2) as usize];
    let behind = if strict { pipelined } else { ALL_KINDS };
    let after = behind.iter().filter_map(|&k| pipe.last[k]).filter(|id| m.pending.contains(*id)).collect();
    let agent = m.race.as_mut().map(|race| {
        let mut known = None;
        race.release(w.index, 1 << lane, &mut known);
        for &k in behind {
            if let Some(earlier) = &pipe.known[k] {
                merge(&mut known, earlier);
            }
        }
        if let Some(own) = &w.tmem_known {
            merge(&mut known, own);
        }
        let agent = race.spawn_from(&known, true);
        let earlier = behind.iter().filter_map(|&k| pipe.known[k].as_ref());
        if strict { after_fence(race, w, agent, earlier) } else { agent }
    });
    (agent, after)
}

/// Under `strict`: of tensor memory an operation knows what the warp knew at its last `fence::after_thread_sync`, what
/// the warp's own operations did, and what came earlier in the pipe.
fn after_fence<'a>(race: &Detector, w: &'a Warp, agent: Agent, earlier: impl Iterator<Item = &'a Rc<Clock>>) -> Agent {
    let mut known = w.tmem_view.clone();
    for other in earlier.chain(&w.tmem_known) {
        merge(&mut known, other);
    }
    agent.with_tensor_knowledge(&known, race)
}

fn issued(m: &mut Machine<'_>, w: &Warp, kind: usize, id: u64, agent: Option<&Agent>) {
    let pipe = &mut m.pipes[(w.cta / 2) as usize];
    pipe.last[kind] = Some(id);
    if let (Some(race), Some(agent)) = (&m.race, agent) {
        race.finish(agent, &mut pipe.known[kind]);
    }
}

/// Records and checks the read of one operand's chunks in a CTA's shared memory.
fn track_chunks(
    m: &mut Machine<'_>,
    w: &Warp,
    agent: Option<&Agent>,
    cta: u32,
    chunks: impl Iterator<Item = u32>,
) -> Stopped<()> {
    for at in chunks {
        let end = at + CHUNK_BYTES;
        let memory = &m.ctas[cta as usize].shared;
        if at < SHARED_BASE || end as usize > memory.data.len() {
            let size = memory.data.len() as u32 - SHARED_BASE;
            let byte = i64::from(at) - i64::from(SHARED_BASE);
            let text = format!("a matrix descriptor leads to byte {byte} of {size} of shared memory");
            return Err(Stop::new(FaultKind::OutOfBounds, text));
        }
        if let (Some(race), Some(agent)) = (&mut m.race, agent)
            && let Err(conflict) = race.agent_access(agent, cta, at, CHUNK_BYTES, Mode::Read, w.pc())
        {
            return Err(m.conflict(Mode::Read, conflict, at, CHUNK_BYTES));
        }
        if m.sanitize && !m.ctas[cta as usize].shared.defined[at as usize..end as usize].iter().any(|d| *d) {
            let text = format!("a matrix at byte {} of shared memory: nothing has written it", at - SHARED_BASE);
            return Err(Stop::new(FaultKind::UninitialisedShared, text));
        }
    }
    Ok(())
}

/// Records and checks the read of rows of a matrix in the executing CTA's shared memory, each of so many bytes and
/// bytes an element.
pub fn track_matrix(
    m: &mut Machine<'_>,
    w: &Warp,
    agent: Option<&Agent>,
    matrix: SharedMatrix,
    major: Major,
    rows: std::ops::Range<u32>,
    (row_bytes, element_bytes): (u32, u32),
) -> Stopped<()> {
    let skip = if major == Major::K { rows.start } else { 0 };
    let per_row = row_bytes.div_ceil(CHUNK_BYTES);
    let all = chunks(matrix, major, rows.end, row_bytes, element_bytes);
    track_chunks(m, w, agent, w.cta, all.skip((skip * per_row) as usize))
}

/// The chunks of `rows` rows of `row_bytes` of a matrix.
fn chunks(
    matrix: SharedMatrix,
    major: Major,
    rows: u32,
    row_bytes: u32,
    element_bytes: u32,
) -> impl Iterator<Item = u32> {
    let (lines, per_line) = match major {
        Major::K => (rows, row_bytes.div_ceil(CHUNK_BYTES)),
        Major::Mn => (row_bytes / element_bytes.max(1), (rows * element_bytes).div_ceil(CHUNK_BYTES)),
    };
    (0..lines).flat_map(move |r| (0..per_line).map(move |c| matrix.chunk_address(major, r, c)))
}

/// 16 bytes of a CTA's shared memory, which have been checked to be there.
pub fn chunk(m: &Machine<'_>, cta: u32, at: u32) -> [u8; CHUNK_BYTES as usize] {
    let data = &m.ctas[cta as usize].shared.data;
    let mut out = [0; CHUNK_BYTES as usize];
    out.copy_from_slice(&data[at as usize..at as usize + CHUNK_BYTES as usize]);
    out
}

/// Where A comes from.
#[derive(Clone, Copy)]
enum SourceA {
    Shared(SharedMatrix),
    Tmem(Cell),
}

/// One `tcgen05.mma`, decoded.
struct Mma {
    ctas: Vec<u32>,
    desc: InstructionDescriptor,
    path: DataPath,
    d: Cell,
    a: SourceA,
    b: SharedMatrix,
    scales: Option<(ScaleType, ScaleVector, Cell, Cell)>,
    accumulate: bool,
    /// Lanes of each CTA whose results are dropped.
    disabled: Vec<u128>,
}

pub fn mma(i: &mut Parsed<'_>) -> Decoded {
    let group = pair(i);
    let kind = match i.one_of(&[
        "kind::f16",
        "kind::tf32",
        "kind::f8f6f4",
        "kind::i8",
        "kind::mxf8f6f4",
        "kind::mxf4nvf4",
        "kind::mxf4",
    ]) {
        Some("kind::f16") => MmaKind::F16,
        Some("kind::tf32") => MmaKind::Tf32,
        Some("kind::f8f6f4") => MmaKind::F8f6f4,
        Some("kind::i8") => MmaKind::I8,
        Some("kind::mxf8f6f4") => MmaKind::Mxf8f6f4,
        Some("kind::mxf4") => MmaKind::Mxf4,
        _ => MmaKind::Mxf4nvf4,
    };
    let scaled = i.has("block_scale");
    // The default block of each kind (PTX ISA, "tcgen05.mma": `.scale_vectorsize`).
    let vector = match (i.one_of(&["block16", "block32", "scale_vec::1X", "scale_vec::2X", "scale_vec::4X"]), kind) {
        (Some("block16" | "scale_vec::4X"), _) => ScaleVector::X4,
        (Some("scale_vec::2X"), _) | (_, MmaKind::Mxf4) => ScaleVector::X2,
        (Some("block32"), MmaKind::Mxf4nvf4) => ScaleVector::X2,
        (Some("scale_vec::1X"), _) | (_, MmaKind::Mxf8f6f4) => ScaleVector::X1,
        _ => ScaleVector::X4,
    };
    let d = i.address(0)?;
    enum A {
        Descriptor(Src),
        Tmem(Address),
    }
    let a = match i.operand(1)? {
        Operand::Address { .. } => A::Tmem(i.address(1)?),
        _ => A::Descriptor(i.src(1, Type::B64)?),
    };
    let (b, idesc) = (i.src(2, Type::B64)?, i.src(3, Type::B32)?);
    let mut next = 4;
    let scale_cells = if scaled {
        next += 2;
        Some((i.address(4)?, i.address(5)?))
    } else {
        None
    };
    let disable = match i.operand(next)? {
        Operand::Vector(parts) => {
            next += 1;
            parts.iter().map(|p| i.src_operand(p, Type::B32)).collect::<Result<Vec<_>, _>>()?
        }
        _ => Vec::new(),
    };
    let enable = i.predicate(next)?;
    if i.operands().len() > next + 1 {
        match i.src(next + 1, Type::U32)? {
            Src::Constant(0) => {}
            _ => return Err(DecodeError::unsupported("scale-input-d")),
        }
    }
    Ok(Box::new(move |w, m, mask| {
        let cell =
            |w: &Warp, a: &Address, lane| Cell::decode((w.lane(a.base, lane) as u32).wrapping_add(a.offset as u32));
        for lane in lanes(mask) {
            let desc = InstructionDescriptor::decode(kind, group, false, w.lane(idesc, lane) as u32).map_err(bad)?;
            if desc.sparse {
                return Err(Stop::unsupported("a sparse A"));
            }
            let scales = match (&scale_cells, desc.scale) {
                (Some((sa, sb)), Some(scale)) => {
                    desc.check_scales(vector).map_err(bad)?;
                    let raw =
                        |a: &Address| Cell::decode_scale((w.lane(a.base, lane) as u32).wrapping_add(a.offset as u32));
                    Some((scale, vector, raw(sa), raw(sb)))
                }
                _ => None,
            };
            let path = DataPath::of(desc.m, group, false, false).ok_or_else(|| {
                Stop::new(FaultKind::BadDescriptor, format!("M = {} with .cta_group::{group}", desc.m))
            })?;
            let a = match &a {
                A::Descriptor(s) => SourceA::Shared(SharedMatrix::tcgen05(w.lane(*s, lane)).map_err(bad)?),
                A::Tmem(a) => SourceA::Tmem(cell(w, a, lane)),
            };
            let ctas = ctas(w, m, group)?;
            let disabled = (0..ctas.len())
                .map(|n| {
                    let words = disable.iter().skip(n * 4).take(4).enumerate();
                    words.fold(0u128, |bits, (k, s)| bits | (w.lane(*s, lane) as u32 as u128) << (32 * k))
                })
                .collect();
            let mma = Mma {
                ctas,
                desc,
                path,
                d: cell(w, &d, lane),
                a,
                b: SharedMatrix::tcgen05(w.lane(b, lane)).map_err(bad)?,
                scales,
                accumulate: enable.mask(w) >> lane & 1 == 1,
                disabled,
            };
            let (agent, after) = issue(m, w, lane, ALL_KINDS);
            mma.check(m, w, agent.as_ref()).map_err(|s| s.lane(lane as u32))?;
            let work = u64::from(desc.m) * u64::from(desc.n) * u64::from(desc.k);
            m.count_matrix_operation(w, &mma.ctas, work);
            let id = m.start_after(w, after, move |m| mma.run(m));
            issued(m, w, MMA, id, agent.as_ref());
        }
        Ok(Flow::Next)
    }))
}

impl Mma {
    fn packing(&self, shared: bool) -> Packing {
        Packing::of(self.desc.kind, shared)
    }

    /// Rows of B in each CTA's shared memory.
    fn b_rows(&self) -> u32 {
        self.desc.n / self.ctas.len() as u32
    }

    fn row_bytes(&self, element: Element, shared: bool) -> u32 {
        self.packing(shared).row_bytes(element, self.desc.k as usize) as u32
    }

    /// Bits of an element as they lie in shared memory.
    fn shared_bits(&self, element: Element) -> u32 {
        if self.packing(true) == Packing::Padded { element.bits().max(8) } else { element.bits() }
    }

    fn check(&self, m: &mut Machine<'_>, w: &Warp, agent: Option<&Agent>) -> Stopped<()> {
        let desc = &self.desc;
        if !self.path.allows_lane(self.d.lane) {
            let text = format!("the accumulator's address names lane {}", self.d.lane);
            return Err(Stop::new(FaultKind::TmemOutOfBounds, text));
        }
        let (a_bytes, b_bytes) = (self.row_bytes(desc.a, true), self.row_bytes(desc.b, true));
        let (a_bits, b_bits) = (self.shared_bits(desc.a), self.shared_bits(desc.b));
        self.b.check(desc.major_b, b_bits, b_bytes).map_err(bad)?;
        let pc = w.pc();
        for &cta in &self.ctas {
            match self.a {
                SourceA::Shared(matrix) => {
                    matrix.check(desc.major_a, a_bits, a_bytes).map_err(bad)?;
                    let rows = self.path.rows_per_cta();
                    track_chunks(m, w, agent, cta, chunks(matrix, desc.major_a, rows, a_bytes, a_bits / 8))?;
                }
                SourceA::Tmem(at) => {
                    let bytes = self.row_bytes(desc.a, false);
                    let parts = self.path.a_parts().ok_or_else(|| Stop::unsupported("A in tensor memory here"))?;
                    for part in 0..parts {
                        for row in 0..self.path.rows_per_cta() {
                            let cell = offset(at, self.path.a_cell(row, 0, part));
                            m.tmem_access(cta, cell, bytes.div_ceil(4), agent, Mode::Read, pc)?;
                        }
                    }
                }
            }
            track_chunks(m, w, agent, cta, chunks(self.b, desc.major_b, self.b_rows(), b_bytes, b_bits / 8))?;
            if let Some((_, _, sa, sb)) = self.scales {
                for quarter in 0..4 {
                    for lane in 0..LANES_PER_WARP {
                        let at = |base: Cell| Cell { lane: base.lane + quarter * LANES_PER_WARP + lane, ..base };
                        let columns = |rows: u32| rows.div_ceil(32);
                        m.tmem_access(cta, at(sa), columns(self.path.rows_per_cta()), agent, Mode::Read, pc)?;
                        m.tmem_access(cta, at(sb), columns(self.path.d_columns(desc.n)), agent, Mode::Read, pc)?;
                    }
                }
            }
            let width = self.path.d_columns(desc.n);
            for row in 0..self.path.rows_per_cta() {
                for column in (0..desc.n).step_by(width as usize) {
                    let cell = offset(self.d, self.path.d_cell(row, column, desc.n));
                    m.tmem_access(cta, cell, width, agent, Mode::Write, pc)?;
                }
            }
        }
        Ok(())
    }

    /// B's rows, of all CTAs in order of rank.
    fn gather_b(&self, m: &Machine<'_>) -> Vec<u8> {
        let (desc, bytes) = (&self.desc, self.row_bytes(self.desc.b, true) as usize);
        let element = self.shared_bits(desc.b) as usize / 8;
        let of = |&cta: &u32| {
            gather(&self.b, desc.major_b, self.b_rows() as usize, bytes, element.max(1), |at| chunk(m, cta, at))
        };
        self.ctas.iter().map(of).collect::<Vec<_>>().concat()
    }

    fn gather_a(&self, m: &Machine<'_>, cta: u32, part: u32) -> Stopped<Vec<u8>> {
        let rows = self.path.rows_per_cta();
        match self.a {
            SourceA::Shared(matrix) => {
                let bytes = self.row_bytes(self.desc.a, true) as usize;
                let element = (self.shared_bits(self.desc.a) as usize / 8).max(1);
                let read = |at| chunk(m, cta, at);
                Ok(gather(&matrix, self.desc.major_a, rows as usize, bytes, element, read))
            }
            SourceA::Tmem(at) => {
                let bytes = self.row_bytes(self.desc.a, false);
                let mut out = Vec::with_capacity((rows * bytes) as usize);
                for row in 0..rows {
                    for byte in (0..bytes).step_by(4) {
                        let word = m.tmem_read(cta, offset(at, self.path.a_cell(row, byte, part)))?;
                        out.extend_from_slice(&word.to_le_bytes()[..(bytes - byte).min(4) as usize]);
                    }
                }
                Ok(out)
            }
        }
    }

    /// The scale factor codes of rows of A in one CTA.
    fn scales_a(&self, m: &Machine<'_>, cta: u32) -> Stopped<Option<Scales>> {
        let Some((ty, vector, at, _)) = self.scales else { return Ok(None) };
        let (rows, blocks) = (self.path.rows_per_cta(), vector as u32);
        let mut codes = Vec::new();
        for row in 0..rows {
            let quarter = self.path.d_cell(row, 0, self.desc.n).lane / LANES_PER_WARP;
            let word = m.tmem_read(cta, offset(at, self.path.scale_a_cell(row, quarter)))?;
            for block in 0..blocks {
                codes.push(word.to_le_bytes()[scale_byte(vector, self.desc.scale_a_id, block) as usize & 3]);
            }
        }
        decode_scales(ty, rows, blocks, &codes).map(Some)
    }

    /// The scale factor codes of B as each quarter of a CTA's lanes has them.
    fn scales_b(&self, m: &Machine<'_>, cta: u32) -> Stopped<Option<Scales>> {
        let Some((ty, vector, _, at)) = self.scales else { return Ok(None) };
        let (n, blocks) = (self.desc.n, vector as u32);
        let byte = |block| scale_byte(vector, self.desc.scale_b_id, block) as usize & 3;
        let used = (0..blocks).fold(0u32, |mask, block| mask | 0xff << (8 * byte(block)));
        let mut codes = Vec::with_capacity((n * blocks) as usize);
        for column in 0..n {
            let mut word = None;
            for cell in (0..4).filter_map(|quarter| self.path.scale_b_cell(column, n, quarter)) {
                let here = m.tmem_read(cta, offset(at, cell))?;
                if (*word.get_or_insert(here) ^ here) & used != 0 {
                    return Err(Stop::unsupported("scale factors of B that differ between quarters of the lanes"));
                }
            }
            let bytes = word.unwrap_or_default().to_le_bytes();
            codes.extend((0..blocks).map(|block| bytes[byte(block)]));
        }
        decode_scales(ty, n, blocks, &codes).map(Some)
    }

    fn run(&self, m: &mut Machine<'_>) -> Stopped<()> {
        let desc = &self.desc;
        let (n, k) = (desc.n as usize, desc.k as usize);
        let rows = self.path.rows_per_cta() as usize;
        let b_bytes = self.gather_b(m);
        let shared_a = matches!(self.a, SourceA::Shared(_));
        for (index, &cta) in self.ctas.iter().enumerate() {
            let a_bytes = self.gather_a(m, cta, 0)?;
            // A row of D is one run of columns, or two or four of them in as many lanes.
            let width = self.path.d_columns(desc.n);
            let runs: Vec<Cell> = (0..rows as u32)
                .flat_map(|row| (0..desc.n).step_by(width as usize).map(move |column| (row, column)))
                .map(|(row, column)| offset(self.d, self.path.d_cell(row, column, desc.n)))
                .collect();
            let mut d: Vec<u32> = Vec::with_capacity(rows * n);
            if self.accumulate {
                for &run in &runs {
                    d.extend_from_slice(m.tmem_read_row(cta, run, width)?);
                }
            } else {
                d.resize(rows * n, 0);
            }
            let a_packing = self.packing(shared_a);
            let floats_a = || {
                let a = Floats::decode(desc.a, a_packing, rows, k, &a_bytes);
                if desc.negate_a { a.negated() } else { a }
            };
            let floats_b = || {
                let b = Floats::decode(desc.b, self.packing(true), n, k, &b_bytes);
                if desc.negate_b { b.negated() } else { b }
            };
            let scales = self.scales_a(m, cta)?.zip(self.scales_b(m, cta)?);
            match (desc.kind, desc.d, scales) {
                (MmaKind::Mxf4 | MmaKind::Mxf4nvf4, _, Some((sa, sb))) => {
                    let (a, b) = (Fours::decode(rows, k, &a_bytes), Fours::decode(n, k, &b_bytes));
                    let a = if desc.negate_a { a.negated() } else { a };
                    let b = if desc.negate_b { b.negated() } else { b };
                    multiply_fours(&a, &sa, &b, &sb, bytemuck::cast_slice_mut(&mut d));
                }
                (MmaKind::Mxf8f6f4, _, Some((sa, sb))) => {
                    multiply_f32(&floats_a().scaled(&sa), &floats_b().scaled(&sb), bytemuck::cast_slice_mut(&mut d));
                }
                (MmaKind::I8, _, _) => {
                    let a = Integers::decode(desc.a == Element::S8, rows, k, &a_bytes);
                    let b = Integers::decode(desc.b == Element::S8, n, k, &b_bytes);
                    multiply_i32(&a, &b, desc.saturate, bytemuck::cast_slice_mut(&mut d));
                }
                (_, Accumulator::F16, _) => {
                    let mut halves: Vec<u16> = d.iter().map(|&v| v as u16).collect();
                    multiply_f16(&floats_a(), &floats_b(), &mut halves);
                    d = halves.into_iter().map(u32::from).collect();
                }
                _ => multiply_f32(&floats_a(), &floats_b(), bytemuck::cast_slice_mut(&mut d)),
            }
            for (&run, values) in runs.iter().zip(d.chunks_exact(width as usize)) {
                if self.disabled[index] >> run.lane & 1 == 0 {
                    m.tmem_write_row(cta, run, values);
                }
            }
        }
        m.progress += 1;
        Ok(())
    }
}

fn decode_scales(ty: ScaleType, rows: u32, blocks: u32, codes: &[u8]) -> Stopped<Scales> {
    Scales::decode(ty, rows as usize, blocks as usize, codes)
        .ok_or_else(|| Stop::new(FaultKind::InvalidOperand, "a ue4m3 scale factor with its top bit set"))
}

/// A cell relative to an address.
fn offset(base: Cell, cell: Cell) -> Cell {
    Cell { lane: base.lane + cell.lane, column: base.column + cell.column }
}

pub fn cp(i: &mut Parsed<'_>) -> Decoded {
    let group = pair(i);
    let shape = match i.one_of(&["128x256b", "4x256b", "128x128b", "64x128b", "32x128b"]) {
        Some("128x256b") => CopyShape::L128x256b,
        Some("4x256b") => CopyShape::L4x256b,
        Some("128x128b") => CopyShape::L128x128b,
        Some("64x128b") if i.has("warpx2::02_13") => CopyShape::L64x128bPairs02And13,
        Some("64x128b") => CopyShape::L64x128bPairs01And23,
        _ => CopyShape::L32x128bAll,
    };
    let (to, from) = (i.address(0)?, i.src(1, Type::B64)?);
    Ok(Box::new(move |w, m, mask| {
        for lane in lanes(mask) {
            let matrix = SharedMatrix::tcgen05(w.lane(from, lane)).map_err(bad)?;
            let base = Cell::decode((w.lane(to.base, lane) as u32).wrapping_add(to.offset as u32));
            let ctas = ctas(w, m, group)?;
            let pipelined: &[usize] = if shape == CopyShape::L4x256b { &[CP, SHIFT] } else { &[CP] };
            let (agent, after) = issue(m, w, lane, pipelined);
            let mut moves = Vec::new();
            shape.visit(&matrix, |chunk, cell| moves.push((chunk, offset(base, cell))));
            for &cta in &ctas {
                track_chunks(m, w, agent.as_ref(), cta, moves.iter().map(|c| c.0))?;
                for (_, cell) in &moves {
                    m.tmem_access(cta, *cell, CHUNK_BYTES / 4, agent.as_ref(), Mode::Write, w.pc())?;
                }
            }
            let id = m.start_after(w, after, move |m| {
                for &cta in &ctas {
                    for &(from, cell) in &moves {
                        for (n, word) in chunk(m, cta, from).chunks_exact(4).enumerate() {
                            let value = word.iter().rev().fold(0, |v, &b| v << 8 | u32::from(b));
                            m.tmem_write(cta, Cell { column: cell.column + n as u32, ..cell }, value);
                        }
                    }
                }
                m.progress += 1;
                Ok(())
            });
            issued(m, w, CP, id, agent.as_ref());
        }
        Ok(Flow::Next)
    }))
}

/// `tcgen05.shift`: each of 32 lanes but the last gets the next one's 32 bytes.
pub fn shift(i: &mut Parsed<'_>) -> Decoded {
    let group = pair(i);
    let a = i.address(0)?;
    Ok(Box::new(move |w, m, mask| {
        for lane in lanes(mask) {
            let base = Cell::decode((w.lane(a.base, lane) as u32).wrapping_add(a.offset as u32));
            if !base.lane.is_multiple_of(LANES_PER_WARP) {
                let text = format!("a shift from lane {}; the lane must be a multiple of {LANES_PER_WARP}", base.lane);
                return Err(Stop::new(FaultKind::InvalidOperand, text).lane(lane as u32));
            }
            let ctas = ctas(w, m, group)?;
            let (agent, after) = issue(m, w, lane, &[MMA]);
            for &cta in &ctas {
                for row in 0..LANES_PER_WARP {
                    let cell = Cell { lane: base.lane + row, ..base };
                    for (touched, mode) in [(row > 0, Mode::Read), (row + 1 < LANES_PER_WARP, Mode::Write)] {
                        if touched {
                            m.tmem_access(cta, cell, SHIFT_COLUMNS, agent.as_ref(), mode, w.pc())?;
                        }
                    }
                }
            }
            let id = m.start_after(w, after, move |m| {
                for &cta in &ctas {
                    for row in base.lane..base.lane + LANES_PER_WARP - 1 {
                        let next = m.tmem_read_row(cta, Cell { lane: row + 1, ..base }, SHIFT_COLUMNS)?.to_vec();
                        m.tmem_write_row(cta, Cell { lane: row, ..base }, &next);
                    }
                }
                m.progress += 1;
                Ok(())
            });
            issued(m, w, SHIFT, id, agent.as_ref());
        }
        Ok(Flow::Next)
    }))
}

/// `tcgen05.commit`: an arrival when all earlier `mma`, `cp` and `shift` of the thread are complete.
pub fn commit(i: &mut Parsed<'_>) -> Decoded {
    let a = i.address(0)?;
    let multicast = if i.has("multicast::cluster") { Some(i.src(1, Type::U16)?) } else { None };
    Ok(Box::new(move |w, m, mask| {
        for lane in lanes(mask) {
            let at = shared_lane(w, &a, lane);
            let targets: Vec<MbarrierAt> = match multicast {
                None => vec![m.mbarrier(w, at, true)?],
                Some(s) => {
                    let Spot::Shared { offset, .. } = m.resolve(w, at, 8)? else { continue };
                    let bits = w.lane(s, lane) as u32 & 0xffff;
                    if let Some(cta) = lanes(bits).find(|&c| c >= m.ctas.len()) {
                        let text = format!("a CTA mask with rank {cta} in a cluster of {}", m.ctas.len());
                        return Err(Stop::new(FaultKind::InvalidOperand, text).lane(lane as u32));
                    }
                    lanes(bits).map(|cta| MbarrierAt { cta: cta as u32, offset }).collect()
                }
            };
            let pipe = m.pipes[(w.cta / 2) as usize].clone();
            let after = pipe.last.into_iter().flatten().filter(|id| m.pending.contains(*id)).collect();
            let agent = m.race.as_mut().map(|race| {
                let mut known = None;
                for earlier in pipe.known.iter().flatten() {
                    merge(&mut known, earlier);
                }
                race.spawn_from(&known, false)
            });
            m.start_after(w, after, move |m| {
                targets.iter().try_for_each(|&at| m.mbarrier_arrive_async(at, agent.as_ref()))
            });
        }
        Ok(Flow::Next)
    }))
}

/// The shape and the number of registers of `tcgen05.ld` and `st`.
fn access(i: &mut Parsed<'_>, after_registers: usize) -> Result<(AccessShape, u32, bool), DecodeError> {
    let shape = match i.one_of(&["32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"]) {
        Some("32x32b") => AccessShape::L32x32b,
        Some("16x64b") => AccessShape::L16x64b,
        Some("16x128b") => AccessShape::L16x128b,
        Some("16x256b") => AccessShape::L16x256b,
        _ => match i.src(after_registers, Type::U32)? {
            Src::Constant(split) => AccessShape::L16x32bx2 { split: split as u32 },
            Src::Register(_) => return Err(DecodeError::invalid("the split is a constant")),
        },
    };
    let num = i.modifiers().iter().find_map(|m| m.strip_prefix('x').and_then(|n| n.parse::<u32>().ok()));
    let num = num.ok_or_else(|| DecodeError::invalid("`.num` is missing"))?;
    if !shape.allows(num) {
        return Err(DecodeError::invalid(format!("`.x{num}` does not exist for this shape")));
    }
    Ok((shape, num * shape.registers(), i.has("pack::16b") || i.has("unpack::16b")))
}

/// The cells of a warp's access: `cells[register][lane]`.
fn cells(w: &Warp, base: Cell, shape: AccessShape, registers: u32, packed: bool) -> Stopped<Vec<[Cell; 32]>> {
    let first = first_lane_of_warp(w.role);
    let mine = first..first + LANES_PER_WARP;
    let list: Vec<[Cell; 32]> =
        (0..registers).map(|r| std::array::from_fn(|lane| offset(base, shape.cell(lane as u32, r, packed)))).collect();
    match list.iter().flatten().find(|c| !mine.contains(&c.lane)) {
        None => Ok(list),
        Some(cell) => {
            let text = format!("lane {}; warp {} reaches lanes {first} to {}", cell.lane, w.role, mine.end - 1);
            Err(Stop::new(FaultKind::TmemWrongWarp, text))
        }
    }
}

/// One agent for a warp's `ld` or `st`, which knows what the warp's earlier ones did.
fn spawn(m: &mut Machine<'_>, w: &Warp, mask: u32) -> Option<Agent> {
    let strict = m.launch.config.strict;
    m.race.as_mut().map(|race| {
        let mut known = None;
        race.release(w.index, mask, &mut known);
        if let Some(own) = &w.tmem_known {
            merge(&mut known, own);
        }
        let agent = race.spawn_from(&known, false);
        if strict { after_fence(race, w, agent, std::iter::empty()) } else { agent }
    })
}

/// What was asked of one base address by all lanes.
fn same_base(w: &Warp, a: &Address, mask: u32) -> Stopped<Cell> {
    let lane = mask.trailing_zeros() as usize;
    let base = w.lane(a.base, lane);
    if let Some(other) = lanes(mask).find(|&n| w.lane(a.base, n) != base) {
        let text = format!("lanes {lane} and {other} name different addresses");
        return Err(Stop::new(FaultKind::InvalidOperand, text).lane(other as u32));
    }
    Ok(Cell::decode((base as u32).wrapping_add(a.offset as u32)))
}

fn registers(operand: &Operand) -> &[Operand] {
    match operand {
        Operand::Vector(parts) => parts,
        single => std::slice::from_ref(single),
    }
}

/// `tcgen05.ld`: the registers get their values at `tcgen05.wait::ld`.
pub fn ld(i: &mut Parsed<'_>) -> Decoded {
    let out: Vec<Dst> = registers(i.operand(0)?).iter().map(|r| i.dst_operand(r)).collect::<Result<_, _>>()?;
    // They are not written yet.
    i.writes_later();
    let a = i.address(1)?;
    let (shape, count, packed) = access(i, 2)?;
    if out.len() != count as usize {
        return Err(DecodeError::invalid(format!("{count} registers expected")));
    }
    Ok(Box::new(move |w, m, mask| {
        let base = same_base(w, &a, mask)?;
        let cells = cells(w, base, shape, count, packed)?;
        let agent = spawn(m, w, mask);
        let mut values = Vec::with_capacity(out.len());
        for (d, row) in out.iter().zip(&cells) {
            let mut bits = [0; 32];
            for (lane, &cell) in row.iter().enumerate() {
                m.tmem_access(w.cta, cell, 1 + u32::from(packed), agent.as_ref(), Mode::Read, w.pc())?;
                let low = m.tmem_read(w.cta, cell)?;
                bits[lane] = match packed {
                    false => low.into(),
                    true => {
                        let high = m.tmem_read(w.cta, Cell { column: cell.column + 1, ..cell })?;
                        u64::from(low & 0xffff | high << 16)
                    }
                };
            }
            values.push((*d, bits));
            if let Some(r) = d.register {
                w.define(r, mask, 0);
            }
        }
        w.tmem_loads.push(TmemLoad { values, agent, pc: w.pc() });
        Ok(Flow::Next)
    }))
}

/// `tcgen05.st`: the cells get their values by `tcgen05.wait::st`.
pub fn st(i: &mut Parsed<'_>) -> Decoded {
    let a = i.address(0)?;
    let last = i.operands().len() - 1;
    let from: Vec<Src> =
        registers(i.operand(last)?).iter().map(|r| i.src_operand(r, Type::B32)).collect::<Result<_, _>>()?;
    let (shape, count, packed) = access(i, 1)?;
    if from.len() != count as usize {
        return Err(DecodeError::invalid(format!("{count} registers expected")));
    }
    Ok(Box::new(move |w, m, mask| {
        let base = same_base(w, &a, mask)?;
        let cells = cells(w, base, shape, count, packed)?;
        let agent = spawn(m, w, mask);
        let mut values = Vec::new();
        for (s, row) in from.iter().zip(&cells) {
            for (lane, &cell) in row.iter().enumerate() {
                m.tmem_access(w.cta, cell, 1 + u32::from(packed), agent.as_ref(), Mode::Write, w.pc())?;
                let value = w.lane(*s, lane) as u32;
                if packed {
                    values.push((cell, value & 0xffff));
                    values.push((Cell { column: cell.column + 1, ..cell }, value >> 16));
                } else {
                    values.push((cell, value));
                }
            }
        }
        // A warp's stores to one place stay in order.
        let after = w.tmem_stores.iter().map(|s| s.0).filter(|id| m.pending.contains(*id)).collect();
        let cta = w.cta;
        let id = m.start_after(w, after, move |m| {
            for &(cell, value) in &values {
                m.tmem_write(cta, cell, value);
            }
            m.progress += 1;
            Ok(())
        });
        if let (Some(race), Some(agent)) = (&m.race, &agent) {
            race.finish(agent, &mut w.tmem_known);
        }
        w.tmem_stores.push((id, agent));
        Ok(Flow::Next)
    }))
}

/// `tcgen05.wait::ld`, `tcgen05.wait::st`.
pub fn wait(i: &mut Parsed<'_>) -> Decoded {
    if i.has("wait::st") {
        return Ok(Box::new(|w, m, mask| {
            let waiting: Vec<u64> = w.tmem_stores.iter().map(|s| s.0).filter(|id| m.pending.contains(*id)).collect();
            if !waiting.is_empty() {
                return Ok(Flow::Wait(WaitFor::Operations(waiting)));
            }
            let agents: Vec<_> = w.tmem_stores.drain(..).filter_map(|s| s.1).collect();
            learn(w, m, mask, &agents);
            Ok(Flow::Next)
        }));
    }
    Ok(Box::new(|w, m, mask| {
        let loads = std::mem::take(&mut w.tmem_loads);
        let mut agents = Vec::new();
        for load in loads {
            for (d, bits) in &load.values {
                d.write(w, mask, bits);
                if let Some(r) = d.register {
                    w.define(r, mask, mask);
                }
            }
            agents.extend(load.agent);
        }
        learn(w, m, mask, &agents);
        Ok(Flow::Next)
    }))
}

/// The warp knows that its operations are complete; others will through it (under `strict`, behind a fence).
fn learn(w: &mut Warp, m: &mut Machine<'_>, mask: u32, agents: &[Agent]) {
    let Some(race) = &mut m.race else { return };
    for agent in agents {
        race.finish(agent, &mut w.tmem_known);
    }
    if !m.launch.config.strict {
        race.acquire(w.index, mask, &w.tmem_known);
    }
}
