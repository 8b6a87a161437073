//! `tcgen05.mma`: D = A · B + D, with A in shared or tensor memory, B in shared memory, and D in tensor memory.
//!
//! - With `.sp`, A is sparse: half of its elements are stored, and metadata in tensor memory gives their positions.
//! - `.ws` keeps B in the tensor core between instructions, where the plain form keeps A. The emulator does not model
//!   that. With `.ws`, D of fewer than 128 rows lies in other lanes.

use super::cells::{CtaGroup, cell, offset};
use super::turn::Turn;
use crate::code::Flow;
use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::decode::error::{DecodeError, Result};
use crate::decode::parsed::Parsed;
use crate::exec::instruction::Instruction;
use crate::exec::matrix::sparse::twice;
use crate::exec::shared_matrix::{MatrixOperand, bad, tcgen05_matrix};
use crate::hw::descriptor::{
    Accumulator, Element, InstructionDescriptor, Major, MmaKind, ScaleType, ScaleVector, SharedMatrix,
};
use crate::hw::matmul::{
    Floats, Fours, Integers, Packing, Scales, multiply_f16, multiply_f32, multiply_fours, multiply_i32,
};
use crate::hw::sparse;
use crate::hw::sums::{self, Adder, Family, Kind};
use crate::hw::tmem::{Address as Cell, DataPath, LANES_PER_WARP, scale_byte};
use crate::machine::race::{Agent, Mode};
use crate::machine::state::{Effect, Machine};
use crate::machine::tensor_core::Kind as Operation;
use crate::machine::warp::Warp;
use crate::operand::{Address, PredicateSrc, Src, lanes};
use crate::parser::ast::Operand;
use crate::timing::work::Work;
use crate::types::Type;

/// `tcgen05.mma [d], a, b{, [metadata]}, idesc{, [scale_a], [scale_b]}{, disable}, enable{, scale}`.
pub struct Mma {
    group: CtaGroup,
    kind: MmaKind,
    d: Address,
    a: A,
    /// Descriptor of B in shared memory.
    b: Src,
    /// Address of a sparse A's metadata. `None`: A is dense.
    metadata: Option<Address>,
    instruction: Src,
    scales: Option<ScaleOperands>,
    /// Masks of D's lanes whose results are dropped: one mask for 32 lanes.
    disable: Vec<Src>,
    /// `true`: D = A · B + D. `false`: D = A · B.
    accumulate: PredicateSrc,
    /// D is divided by 2 to this power before the addition (`scale-input-d`).
    shift: u32,
    weight_stationary: bool,
    /// Descriptor of the columns of B that count as zero.
    zero_columns: Option<Src>,
}

/// Location of A.
enum A {
    /// Descriptor of a matrix in shared memory.
    Shared(Src),
    Tmem(Address),
}

struct ScaleOperands {
    vector: ScaleVector,
    a: Address,
    b: Address,
}

impl Instruction for Mma {
    fn decode(i: &mut Parsed<'_>) -> Result<Mma> {
        let kind = kind(i);
        let d = i.address(0)?;
        let a = match i.operand(1)? {
            Operand::Address { .. } => A::Tmem(i.address(1)?),
            _ => A::Shared(i.src(1, Type::B64)?),
        };
        let b = i.src(2, Type::B64)?;
        let metadata = if i.has("sp") { Some(i.address(3)?) } else { None };
        let mut next = if metadata.is_some() { 4 } else { 3 };
        let instruction = i.src(next, Type::B32)?;
        next += 1;
        let scales = if i.has("block_scale") {
            next += 2;
            Some(ScaleOperands { vector: scale_vector(i, kind), a: i.address(next - 2)?, b: i.address(next - 1)? })
        } else {
            None
        };
        let disable = match i.operand(next)? {
            Operand::Vector(_) => {
                next += 1;
                i.src_vector(next - 1, Type::B32)?
            }
            _ => Vec::new(),
        };
        let accumulate = i.predicate(next)?;
        let weight_stationary = i.has("ws");
        let (mut shift, mut zero_columns) = (0, None);
        if i.operands().len() > next + 1 && weight_stationary {
            zero_columns = Some(i.src(next + 1, Type::B64)?);
        } else if i.operands().len() > next + 1 {
            shift = i.constant(next + 1, "scale-input-d")? as u32;
        }
        if shift > 15 {
            return Err(DecodeError::invalid("scale-input-d must be 0 to 15"));
        }
        let group = CtaGroup::decode(i)?;
        Ok(Mma {
            group,
            kind,
            d,
            a,
            b,
            metadata,
            instruction,
            scales,
            disable,
            accumulate,
            shift,
            weight_stationary,
            zero_columns,
        })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        for lane in lanes(mask) {
            let product = self.product(w, m, lane)?;
            let turn = Turn::take(m, w, lane, Operation::Mma, Operation::ALL);
            product.track(m, w, turn.agent()).map_err(|stop| stop.lane(lane as u32))?;
            let desc = &product.desc;
            m.count_matrix_operation(w, &product.ctas, u64::from(desc.m) * u64::from(desc.n) * u64::from(desc.k));
            turn.start(m, w, product);
        }
        Ok(Flow::Next)
    }
}

fn kind(i: &Parsed<'_>) -> MmaKind {
    match i.one_of(&[
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
    }
}

/// Number of scale factors per row. Without a modifier, the kind's default (PTX ISA, "tcgen05.mma":
/// `.scale_vectorsize`).
fn scale_vector(i: &Parsed<'_>, kind: MmaKind) -> ScaleVector {
    match (i.one_of(&["block16", "block32", "scale_vec::1X", "scale_vec::2X", "scale_vec::4X"]), kind) {
        (Some("block16" | "scale_vec::4X"), _) => ScaleVector::X4,
        (Some("scale_vec::2X"), _) | (_, MmaKind::Mxf4) => ScaleVector::X2,
        (Some("block32"), MmaKind::Mxf4nvf4) => ScaleVector::X2,
        (Some("scale_vec::1X"), _) | (_, MmaKind::Mxf8f6f4) => ScaleVector::X1,
        _ => ScaleVector::X4,
    }
}

impl Mma {
    /// Reads one lane's operands and decodes the descriptors. An invalid descriptor is a fault.
    fn product(&self, w: &Warp, m: &Machine<'_>, lane: usize) -> Stopped<Product> {
        let CtaGroup(group) = self.group;
        let word = w.lane(self.instruction, lane) as u32;
        let desc = InstructionDescriptor::decode(self.kind, group, self.weight_stationary, word).map_err(bad)?;
        if desc.sparse != self.metadata.is_some() {
            let text = if desc.sparse {
                "sparse, but the instruction has no .sp"
            } else {
                "dense, but the instruction has .sp"
            };
            return Err(Stop::new(
                FaultKind::BadDescriptor,
                format!("the instruction descriptor says that A is {text}"),
            ));
        }
        if self.zero_columns.is_some_and(|mask| w.lane(mask, lane) != 0) {
            return Err(Stop::unsupported("a zero-column mask"));
        }
        let scales = match (&self.scales, desc.scale) {
            (Some(operands), Some(ty)) => {
                desc.check_scales(operands.vector).map_err(bad)?;
                let cell = |address| Cell::decode_scale(w.address(address, lane) as u32);
                let (a, b) = (cell(&operands.a), cell(&operands.b));
                suspect_odd_column(m, lane, a, "A");
                suspect_odd_column(m, lane, b, "B");
                Some(ScaleCells { ty, vector: operands.vector, a, b })
            }
            _ => None,
        };
        let path = DataPath::of(desc.m, group, desc.sparse, self.weight_stationary).ok_or_else(|| {
            Stop::new(FaultKind::BadDescriptor, format!("M = {} does not exist with .cta_group::{group}", desc.m))
        })?;
        let a = match &self.a {
            A::Shared(s) => SourceA::Shared(tcgen05_matrix(m, lane, w.lane(*s, lane))?),
            A::Tmem(address) => SourceA::Tmem(cell(w, address, lane)),
        };
        let ctas = self.group.ctas(w, m)?;
        let disabled = |n: usize| {
            let words = self.disable.iter().skip(n * 4).take(4).enumerate();
            words.fold(0u128, |bits, (k, s)| bits | u128::from(w.lane(*s, lane) as u32) << (32 * k))
        };
        Ok(Product {
            disabled: (0..ctas.len()).map(disabled).collect(),
            ctas,
            desc,
            path,
            d: cell(w, &self.d, lane),
            a,
            b: tcgen05_matrix(m, lane, w.lane(self.b, lane))?,
            metadata: self.metadata.as_ref().map(|address| cell(w, address, lane)),
            scales,
            accumulate: self.accumulate.mask(w) >> lane & 1 == 1,
            shift: self.shift,
        })
    }
}

/// Warns of scales that begin at an odd column. The manual allows any column, but Triton's products with scales one column
/// apart were wrong on a B200 (triton-lang/triton#8172), and CUTLASS begins at even columns only.
fn suspect_odd_column(m: &Machine<'_>, lane: usize, cell: Cell, operand: &str) {
    if cell.column % 2 == 1 {
        let column = cell.column;
        let text =
            format!("the scales of {operand} begin at the odd column {column}; no GPU is known to read them right");
        m.suspect(Stop::new(FaultKind::InvalidOperand, text).lane(lane as u32));
    }
}

/// One product, with the operands of one lane.
struct Product {
    ctas: Vec<u32>,
    desc: InstructionDescriptor,
    path: DataPath,
    d: Cell,
    a: SourceA,
    b: SharedMatrix,
    /// First cell of a sparse A's metadata. `None`: A is dense.
    metadata: Option<Cell>,
    scales: Option<ScaleCells>,
    accumulate: bool,
    shift: u32,
    /// Lanes of each CTA whose results are dropped, as masks.
    disabled: Vec<u128>,
}

enum SourceA {
    Shared(SharedMatrix),
    Tmem(Cell),
}

/// Location and layout of the scale factors.
struct ScaleCells {
    ty: ScaleType,
    vector: ScaleVector,
    a: Cell,
    b: Cell,
}

/// Sizes and memory locations.
impl Product {
    fn packing(&self, shared: bool) -> Packing {
        Packing::of(self.desc.kind, shared)
    }

    /// Stored elements per row of A.
    fn a_elements(&self) -> u32 {
        if self.desc.sparse { self.desc.k / 2 } else { self.desc.k }
    }

    fn a_row_bytes(&self, shared: bool) -> u32 {
        self.packing(shared).row_bytes(self.desc.a, self.a_elements() as usize) as u32
    }

    fn shared_operand(&self, matrix: SharedMatrix, element: Element, major: Major, k: u32) -> MatrixOperand {
        let packing = self.packing(true);
        let element_bits = if packing == Packing::Padded { element.bits().max(8) } else { element.bits() };
        MatrixOperand { matrix, major, row_bytes: packing.row_bytes(element, k as usize) as u32, element_bits }
    }

    fn shared_a(&self, matrix: SharedMatrix) -> MatrixOperand {
        self.shared_operand(matrix, self.desc.a, self.desc.major_a, self.a_elements())
    }

    fn shared_b(&self) -> MatrixOperand {
        self.shared_operand(self.b, self.desc.b, self.desc.major_b, self.desc.k)
    }

    /// Bits per element of A for the metadata. Elements of 4 or 6 bits count as bytes, except in the 4-bit kinds.
    fn sparse_bits(&self) -> u32 {
        if self.packing(true) == Packing::Padded { 8 } else { self.desc.a.bits() }
    }

    /// Groups of adjacent elements per row of a sparse A.
    fn groups(&self) -> u32 {
        sparse::groups(self.sparse_bits(), self.desc.k as usize) as u32
    }

    /// Cell, relative to the first metadata cell, and bit of a group's metadata.
    fn metadata_place(&self, row: u32, group: u32) -> (Cell, u32) {
        let (place, bit) = sparse::tcgen05_place(row, group, self.groups(), self.desc.sparsity_selector);
        (self.path.a_cell(place.row, 4 * place.column, 0), bit)
    }

    /// Rows of B in each CTA's shared memory.
    fn b_rows(&self) -> u32 {
        self.desc.n / self.ctas.len() as u32
    }

    /// Columns of a run of D. A row of D consists of one run, or of two or four runs in different lanes.
    fn run_columns(&self) -> u32 {
        self.path.d_columns(self.desc.n)
    }

    /// First cell of each run of D in a CTA, row after row.
    fn runs(&self) -> impl Iterator<Item = Cell> {
        let columns = move || (0..self.desc.n).step_by(self.run_columns() as usize);
        (0..self.path.rows_per_cta())
            .flat_map(move |row| columns().map(move |column| (row, column)))
            .map(|(row, column)| offset(self.d, self.path.d_cell(row, column, self.desc.n)))
    }
}

/// The part of `issue` that records and checks all reads and writes.
impl Product {
    fn track(&self, m: &mut Machine<'_>, w: &Warp, agent: Option<&Agent>) -> Stopped<()> {
        if !self.path.allows_lane(self.d.lane) {
            let text =
                format!("the accumulator's address names lane {}, which this data path does not allow", self.d.lane);
            return Err(Stop::new(FaultKind::TmemOutOfBounds, text));
        }
        let (b, rows) = (self.shared_b(), self.path.rows_per_cta());
        b.check()?;
        for &cta in &self.ctas {
            match self.a {
                SourceA::Shared(matrix) => {
                    let a = self.shared_a(matrix);
                    a.check()?;
                    a.track(m, w, agent, cta, 0..rows)?;
                }
                SourceA::Tmem(at) => {
                    let columns = self.a_row_bytes(false).div_ceil(4);
                    let parts = self.path.a_parts();
                    for (part, row) in (0..parts).flat_map(|part| (0..rows).map(move |row| (part, row))) {
                        let cell = offset(at, self.path.a_cell(row, 0, part));
                        m.tmem_access(cta, cell, columns, agent, Mode::Read, w.pc())?;
                    }
                }
            }
            b.track(m, w, agent, cta, 0..self.b_rows())?;
            self.track_metadata(m, w, agent, cta)?;
            self.track_scales(m, w, agent, cta)?;
            for run in self.runs() {
                m.tmem_access(cta, run, self.run_columns(), agent, Mode::Write, w.pc())?;
            }
        }
        Ok(())
    }

    fn track_metadata(&self, m: &mut Machine<'_>, w: &Warp, agent: Option<&Agent>, cta: u32) -> Stopped<()> {
        let Some(at) = self.metadata else { return Ok(()) };
        // Columns of metadata in a lane: one if sixteen rows share a lane, otherwise two.
        let columns = self.groups() / 8;
        for row in 0..self.path.rows_per_cta() {
            let (first, _) = self.metadata_place(row, 0);
            m.tmem_access(cta, offset(at, first), columns, agent, Mode::Read, w.pc())?;
        }
        Ok(())
    }

    fn track_scales(&self, m: &mut Machine<'_>, w: &Warp, agent: Option<&Agent>, cta: u32) -> Stopped<()> {
        let Some(scales) = &self.scales else { return Ok(()) };
        for lane in 0..4 * LANES_PER_WARP {
            for (base, rows) in [(scales.a, self.path.rows_per_cta()), (scales.b, self.run_columns())] {
                let cell = Cell { lane: base.lane + lane, ..base };
                m.tmem_access(cta, cell, rows.div_ceil(32), agent, Mode::Read, w.pc())?;
            }
        }
        Ok(())
    }
}

impl Effect for Product {
    fn work(&self) -> Work {
        let (ctas, rows) = (self.ctas.len() as u32, self.path.rows_per_cta());
        let (row_a, row_b) = (u64::from(self.a_row_bytes(true)), u64::from(self.shared_b().row_bytes));
        let a = if matches!(self.a, SourceA::Shared(_)) { u64::from(rows) * row_a } else { 0 };
        // A single CTA takes as long for 64 rows as for 128. A row's bytes count as f16 numbers of two bytes.
        let rows = if ctas == 1 { rows.max(128) } else { rows };
        let multiply_adds = u64::from(rows) * u64::from(self.desc.n) * row_a / 2;
        let shared_bytes = a + u64::from(self.b_rows()) * row_b;
        Work::Mma { ctas: self.ctas.clone(), multiply_adds, shared_bytes }
    }

    fn finish(self, m: &mut Machine<'_>) -> Stopped<()> {
        if !m.computes_values() {
            m.progress += 1;
            return Ok(());
        }
        let b = self.shared_b();
        let gather = |&cta: &u32| b.gather(m, cta, self.b_rows() as usize);
        let b = self.ctas.iter().map(gather).collect::<Vec<_>>().concat();
        for (&cta, disabled) in self.ctas.iter().zip(&self.disabled) {
            let a = self.dense_a(m, cta)?;
            let mut d = self.gather_d(m, cta)?;
            let scales = self.scales_a(m, cta)?.zip(self.scales_b(m, cta)?);
            let adder = self.adder();
            self.multiply(&a, &b, scales, m.adder(&adder), &mut d);
            for (run, values) in self.runs().zip(d.chunks_exact(self.run_columns() as usize)) {
                if disabled >> run.lane & 1 == 0 {
                    m.tmem_write_row(cta, run, values);
                }
            }
        }
        m.progress += 1;
        Ok(())
    }
}

/// The steps of `finish`, which gather operands from memory and multiply them.
impl Product {
    /// Rows of A in one CTA, with zeros for the elements that a sparse A does not store, and their packing.
    fn dense_a(&self, m: &Machine<'_>, cta: u32) -> Stopped<(Vec<u8>, Packing)> {
        let mut packing = self.packing(matches!(self.a, SourceA::Shared(_)));
        let mut a = self.gather_a(m, cta)?;
        let Some(at) = self.metadata else { return Ok((a, packing)) };
        if packing == Packing::Padded {
            a = packing.to_container(self.desc.a, self.a_elements() as usize, &a);
            packing = Packing::Container;
        }
        let bits = |row: usize, group: usize| {
            let (cell, bit) = self.metadata_place(row as u32, group as u32);
            Ok(m.tmem_read(cta, offset(at, cell))? >> bit & 15)
        };
        let (rows, groups) = (self.path.rows_per_cta() as usize, self.groups() as usize);
        let metadata = (0..rows * groups).map(|n| bits(n / groups, n % groups)).collect::<Stopped<Vec<u32>>>()?;
        let unit = sparse::unit_bytes(self.sparse_bits());
        let dense = sparse::dense(&a, a.len() / rows, unit, |row, group| metadata[row * groups + group]);
        Ok((dense.map_err(twice)?, packing))
    }

    /// Stored elements of A's rows in one CTA.
    fn gather_a(&self, m: &Machine<'_>, cta: u32) -> Stopped<Vec<u8>> {
        let rows = self.path.rows_per_cta();
        let at = match self.a {
            SourceA::Shared(matrix) => return Ok(self.shared_a(matrix).gather(m, cta, rows as usize)),
            SourceA::Tmem(at) => at,
        };
        let bytes = self.a_row_bytes(false);
        let mut out = Vec::with_capacity((rows * bytes) as usize);
        for row in 0..rows {
            for byte in (0..bytes).step_by(4) {
                let word = m.tmem_read(cta, offset(at, self.path.a_cell(row, byte, 0)))?;
                out.extend_from_slice(&word.to_le_bytes()[..(bytes - byte).min(4) as usize]);
            }
        }
        Ok(out)
    }

    /// Initial values of D's rows in one CTA.
    fn gather_d(&self, m: &Machine<'_>, cta: u32) -> Stopped<Vec<u32>> {
        let elements = (self.path.rows_per_cta() * self.desc.n) as usize;
        if !self.accumulate {
            return Ok(vec![0; elements]);
        }
        let mut d = Vec::with_capacity(elements);
        for run in self.runs() {
            d.extend_from_slice(m.tmem_read_row(cta, run, self.run_columns())?);
        }
        if self.shift > 0 {
            if self.desc.d != Accumulator::F32 {
                return Err(Stop::unsupported("scale-input-d with an accumulator type other than f32"));
            }
            let scale = f32::powi(0.5, self.shift as i32);
            d.iter_mut().for_each(|sum| *sum = (f32::from_bits(*sum) * scale).to_bits());
        }
        Ok(d)
    }

    /// Scale factors of A's rows in one CTA.
    fn scales_a(&self, m: &Machine<'_>, cta: u32) -> Stopped<Option<Scales>> {
        let Some(ScaleCells { ty, vector, a: at, .. }) = self.scales else { return Ok(None) };
        let (rows, blocks) = (self.path.rows_per_cta(), vector as u32);
        let mut codes = Vec::new();
        for row in 0..rows {
            let quarter = self.path.d_cell(row, 0, self.desc.n).lane / LANES_PER_WARP;
            let word = m.tmem_read(cta, offset(at, self.path.scale_a_cell(row, quarter)))?;
            for block in 0..blocks {
                codes.push(word.to_le_bytes()[scale_byte(vector, self.desc.scale_a_id, block) as usize & 3]);
            }
        }
        decode_scales(m, ty, (rows, blocks), codes).map(Some)
    }

    /// Scale factors of B. Each quarter of a CTA's lanes has a copy. The copies must agree.
    fn scales_b(&self, m: &Machine<'_>, cta: u32) -> Stopped<Option<Scales>> {
        let Some(ScaleCells { ty, vector, b: at, .. }) = self.scales else { return Ok(None) };
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
        decode_scales(m, ty, (n, blocks), codes).map(Some)
    }

    /// How the GPU adds the products.
    fn adder(&self) -> Adder {
        let kind = match self.desc.kind {
            MmaKind::Mxf4 | MmaKind::Mxf4nvf4 => Kind::Four,
            _ => Kind::of(self.desc.a),
        };
        let adder = Adder::of(Family::Blackwell, sums::Instruction::Tcgen05, kind);
        if self.desc.sparse { adder.sparse() } else { adder }
    }

    /// D += A · B.
    fn multiply(
        &self,
        (a, a_packing): &(Vec<u8>, Packing),
        b: &[u8],
        scales: Option<(Scales, Scales)>,
        adder: Option<&Adder>,
        d: &mut Vec<u32>,
    ) {
        let desc = &self.desc;
        let (rows, n, k) = (self.path.rows_per_cta() as usize, desc.n as usize, desc.k as usize);
        let floats_a = || {
            let a = Floats::decode(desc.a, *a_packing, rows, k, a);
            if desc.negate_a { a.negated() } else { a }
        };
        let floats_b = || {
            let b = Floats::decode(desc.b, self.packing(true), n, k, b);
            if desc.negate_b { b.negated() } else { b }
        };
        match (desc.kind, desc.d, scales) {
            (MmaKind::Mxf4 | MmaKind::Mxf4nvf4, _, Some((sa, sb))) => {
                let (a, b) = (Fours::decode(rows, k, a), Fours::decode(n, k, b));
                let a = if desc.negate_a { a.negated() } else { a };
                let b = if desc.negate_b { b.negated() } else { b };
                multiply_fours((&a, &sa), (&b, &sb), adder, bytemuck::cast_slice_mut(d));
            }
            (MmaKind::Mxf8f6f4, _, Some((sa, sb))) => {
                let (a, b) = (floats_a().scaled(&sa), floats_b().scaled(&sb));
                multiply_f32(&a, &b, adder, bytemuck::cast_slice_mut(d));
            }
            (MmaKind::I8, _, _) => {
                let a = Integers::decode(desc.a == Element::S8, rows, k, a);
                let b = Integers::decode(desc.b == Element::S8, n, k, b);
                multiply_i32(&a, &b, desc.saturate, bytemuck::cast_slice_mut(d));
            }
            (_, Accumulator::F16, _) => {
                let mut halves: Vec<u16> = d.iter().map(|&v| v as u16).collect();
                multiply_f16(&floats_a(), &floats_b(), adder, &mut halves);
                *d = halves.into_iter().map(u32::from).collect();
            }
            _ => multiply_f32(&floats_a(), &floats_b(), adder, bytemuck::cast_slice_mut(d)),
        }
    }
}

fn decode_scales(m: &Machine<'_>, ty: ScaleType, (rows, blocks): (u32, u32), codes: Vec<u8>) -> Stopped<Scales> {
    let codes = m.scale_codes(ty, codes);
    Scales::decode(ty, rows as usize, blocks as usize, &codes).ok_or_else(|| {
        Stop::new(FaultKind::InvalidOperand, "a scale factor has its top bit set; ue4m3 has no sign bit")
    })
}
