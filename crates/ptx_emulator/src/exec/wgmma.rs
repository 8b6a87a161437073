//! Asynchronous warpgroup matrix instructions (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"). Each of
//! the four warps computes 16 of the 64 rows. Its results reach the registers at `wgmma.wait_group`.
//!
//! With `.sp`, A is sparse: it has half as many bytes along K as B, and its metadata comes from registers.

use super::instruction::Instruction;
use super::matrix::product::{Product, gather_fragment, shape, types};
use super::matrix::sparse::{Metadata, MetadataOperand};
use super::shared_matrix::{MatrixOperand, bad};
use crate::code::Flow;
use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::decode::error::{DecodeError, Result};
use crate::decode::parsed::Parsed;
use crate::hw::descriptor::{Major, SharedMatrix};
use crate::hw::fragment::{self, Position};
use crate::hw::matmul::Packing;
use crate::hw::sums::{self, Kind};
use crate::machine::in_flight::Wgmma;
use crate::machine::pending::Issuer;
use crate::machine::race::Agent;
use crate::machine::state::{Effect, Machine, WARPGROUP as WARPS};
use crate::machine::wait::WaitFor;
use crate::machine::warp::Warp;
use crate::operand::{Dst, PredicateSrc, Row, Src};
use crate::parser::ast::Operand;
use crate::timing::work::Work;
use crate::types::Type;

/// Rows per warp.
const ROWS: u32 = 16;
/// Bytes per row of A, and per row of B if A is dense.
const ROW_BYTES: usize = 32;

/// `wgmma.mma_async d, a, b{, metadata, selector}, scale-d, constants`.
pub struct MmaAsync {
    product: Product,
    n: usize,
    d: Vec<Dst>,
    a: A,
    a_major: Major,
    /// Descriptor of B.
    b: Src,
    b_major: Major,
    /// Metadata of a sparse A. `None`: A is dense.
    sparse: Option<MetadataOperand>,
    /// `true`: D = A · B + D. `false`: D = A · B.
    accumulate: PredicateSrc,
}

/// Location of A.
enum A {
    /// Descriptor of a matrix in shared memory.
    Shared(Src),
    Registers(Vec<Src>),
}

impl A {
    /// Registers that hold A's elements.
    fn registers(&self) -> impl Iterator<Item = u32> {
        let list: &[Src] = if let A::Registers(list) = self { list } else { &[] };
        list.iter().filter_map(|s| if let Src::Register(r) = s { Some(*r) } else { None })
    }
}

impl Instruction for MmaAsync {
    fn decode(i: &mut Parsed<'_>) -> Result<MmaAsync> {
        i.uses_wgmma();
        let unknown = || DecodeError::unsupported("this combination of shape and types");
        let [_, n, k] = shape(i).ok_or_else(unknown)?;
        let (sum, a_type, b_type) = types(i).ok_or_else(unknown)?;
        let sparse = if i.has("sp") { Some(MetadataOperand::decode(i, 3, a_type.bits(), k)?) } else { None };
        let row_bytes = if sparse.is_some() { 2 * ROW_BYTES } else { ROW_BYTES };
        if k * a_type.bits() as usize != 8 * row_bytes {
            return Err(unknown());
        }
        let d = i.dst_vector(0)?;
        if d.len() != n / 2 / sum.per_register() {
            return Err(DecodeError::invalid("wrong number of accumulator registers"));
        }
        // The accumulators are read and written when the instruction executes, after its issue.
        i.writes_later();
        let a = match i.operand(1)? {
            Operand::Vector(_) => A::Registers(i.src_vector(1, Type::B32)?),
            _ => A::Shared(i.src(1, Type::B64)?),
        };
        let b = i.src(2, Type::B64)?;
        let next = if sparse.is_some() { 5 } else { 3 };
        let accumulate = i.predicate(next)?;
        let constants = (next + 1..i.operands().len()).map(|n| match i.src(n, Type::S32)? {
            Src::Constant(c) => Ok(c as u32 as i32),
            Src::Register(_) => Err(DecodeError::invalid("scales and transpositions must be constants")),
        });
        // Signs of A and B, then the transpositions: of A if it is in shared memory, and of B.
        let constants = constants.collect::<Result<Vec<i32>>>()?;
        let negate = |n: usize| constants.get(n) == Some(&-1);
        let major = |n: usize| if constants.get(n) == Some(&1) { Major::Mn } else { Major::K };
        let (a_major, b_major) = match a {
            A::Shared(_) => (major(2), major(3)),
            A::Registers(_) => (Major::K, major(2)),
        };
        let (saturate, negate) = (i.has("satfinite"), (negate(0), negate(1)));
        let adder = i.adder(sums::Instruction::Wgmma, Kind::of(a_type), sparse.is_some());
        let product = Product { sum, a: a_type, b: b_type, k, saturate, negate, adder, packing: Packing::Dense };
        Ok(MmaAsync { product, n, d, a, a_major, b, b_major, sparse, accumulate })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        let lane = mask.trailing_zeros() as usize;
        let registers = self.d.iter().filter_map(|d| d.register).chain(self.a.registers());
        if w.wgmma_fence_missing(registers) {
            // `ptxas` inserts a fence in this case (its information message C7519).
            let text = "an operand register was written after the warp's last wgmma.fence";
            m.warn(Stop::new(FaultKind::MissingWgmmaFence, text))?;
        }
        let b_bytes = self.product.k * self.product.b.bits() as usize / 8;
        let b = self.shared_operand(w.lane(self.b, lane), self.b_major, b_bytes)?;
        let agent = m.race.as_mut().map(|r| r.spawn(w.index, mask, true));
        b.track(m, w, agent.as_ref(), w.cta, 0..self.n as u32)?;
        let a = self.source_a(w, m, lane, agent.as_ref())?;
        let (accumulators, previous) = self.accumulators(w, m, mask)?;
        let after = m.predecessors(previous.into_iter());
        let id = m.pending.reserve();
        m.count_matrix_operation(w, &[w.cta], u64::from(ROWS) * (self.n * self.product.k) as u64);
        let (product, n, first_row) = (self.product, self.n, first_row(w));
        let metadata = self.sparse.as_ref().map(|sparse| sparse.read(w));
        let effect = Multiply { id, cta: w.cta, product, n, first_row, a, metadata, b, accumulators };
        m.start_reserved(id, Issuer { warp: w.index, pc: w.pc() }, after, effect);
        m.warpgroup(w).issue(w.role % WARPS, id, agent.clone());
        w.wgmma.open.push(Wgmma {
            id,
            agent,
            d: self.d.clone(),
            a: self.a.registers().collect(),
            pc: w.pc(),
            delivered: false,
        });
        Ok(Flow::Next)
    }
}

/// The warp's first row in the warpgroup's tile.
fn first_row(w: &Warp) -> u32 {
    w.role % WARPS * ROWS
}

/// Operands of `issue`, read at the time of issue.
impl MmaAsync {
    fn shared_operand(&self, descriptor: u64, major: Major, row_bytes: usize) -> Stopped<MatrixOperand> {
        let matrix = SharedMatrix::wgmma(descriptor).map_err(bad)?;
        let element_bits = self.product.a.bits();
        let operand = MatrixOperand { matrix, major, row_bytes: row_bytes as u32, element_bits };
        operand.check()?;
        Ok(operand)
    }

    fn source_a(&self, w: &Warp, m: &mut Machine<'_>, lane: usize, agent: Option<&Agent>) -> Stopped<SourceA> {
        match &self.a {
            A::Shared(s) => {
                let a = self.shared_operand(w.lane(*s, lane), self.a_major, ROW_BYTES)?;
                let first = first_row(w);
                let rows = if self.a_major == Major::K { first..first + ROWS } else { 0..WARPS * ROWS };
                a.track(m, w, agent, w.cta, rows)?;
                Ok(SourceA::Shared(a))
            }
            A::Registers(list) => {
                let mut bytes = vec![0; ROWS as usize * ROW_BYTES];
                let element = self.product.a.bits() / 8;
                gather_fragment(w, list, element as usize, &mut bytes, |lane, register, index| {
                    let Position { row, column } = fragment::mma_a(lane, register, index, 4 / element);
                    row as usize * ROW_BYTES + (column * element) as usize
                });
                Ok(SourceA::Rows(bytes))
            }
        }
    }

    /// The accumulators before the product, and the instruction in flight that writes the same accumulators, if any.
    fn accumulators(&self, w: &Warp, m: &Machine<'_>, mask: u32) -> Stopped<(Accumulators, Option<u64>)> {
        let first = |d: &[Dst]| d.first().and_then(|d| d.register);
        let previous = w.wgmma.all().rfind(|p| first(&p.d) == first(&self.d)).map(|p| p.id);
        let lane = mask.trailing_zeros();
        let accumulators = match (self.accumulate.mask(w) >> lane & 1 == 1, previous) {
            (false, _) => Accumulators::Zero,
            (true, Some(id)) => Accumulators::Previous(id),
            (true, None) => {
                let rows = self.d.iter().map(|d| d.register.map_or([0; 32], |r| w.get(Src::Register(r)))).collect();
                if m.sanitize && self.d.iter().filter_map(|d| d.register).any(|r| w.defined(r) & mask != mask) {
                    let text = "an accumulator register was never written";
                    return Err(Stop::new(FaultKind::UninitializedRegister, text));
                }
                Accumulators::Registers(rows)
            }
        };
        Ok((accumulators, previous))
    }
}

/// One warp's part of an instruction, with all its operands.
struct Multiply {
    id: u64,
    cta: u32,
    product: Product,
    n: usize,
    first_row: u32,
    a: SourceA,
    metadata: Option<Metadata>,
    b: MatrixOperand,
    accumulators: Accumulators,
}

enum SourceA {
    Shared(MatrixOperand),
    /// The warp's 16 rows along K.
    Rows(Vec<u8>),
}

/// Source of the accumulators.
enum Accumulators {
    Zero,
    Registers(Vec<Row>),
    /// Results of an earlier instruction in flight.
    Previous(u64),
}

impl Effect for Multiply {
    fn work(&self) -> Work {
        // A row of A has 32 bytes, as many as 16 f16 numbers, and so has the part of B per product. The warps share B.
        let a = if matches!(self.a, SourceA::Shared(_)) { u64::from(WARPS * ROWS) * ROW_BYTES as u64 } else { 0 };
        let shared_bytes = a + self.n as u64 * u64::from(self.b.row_bytes);
        let multiply_adds = u64::from(ROWS) * self.n as u64 * ROW_BYTES as u64 / 2;
        let sums = (self.n / 2 / self.product.sum.per_register()) as u64;
        Work::Wgmma { multiply_adds, shared_bytes, sums }
    }

    fn finish(self, m: &mut Machine<'_>) -> Stopped<()> {
        let n = self.n;
        if !m.computes_values() {
            m.matrix_results.insert(self.id, vec![[0; 32]; n / 2 / self.product.sum.per_register()]);
            m.progress += 1;
            return Ok(());
        }
        let b = self.b.gather(m, self.cta, n);
        let a = match self.a {
            SourceA::Rows(bytes) => bytes,
            SourceA::Shared(a) => {
                let all = a.gather(m, self.cta, (WARPS * ROWS) as usize);
                all[self.first_row as usize * ROW_BYTES..][..ROWS as usize * ROW_BYTES].to_vec()
            }
        };
        let a = match &self.metadata {
            Some(metadata) => metadata.dense(&a, ROW_BYTES)?,
            None => a,
        };
        let mut rows = match self.accumulators {
            Accumulators::Zero => vec![[0; 32]; n / 2 / self.product.sum.per_register()],
            Accumulators::Registers(rows) => rows,
            Accumulators::Previous(id) => m.matrix_results.get(&id).cloned().unwrap_or_default(),
        };
        let place = |lane: usize, index: usize| {
            // Relative to the warp's first row.
            let Position { row, column } = fragment::wgmma_d(lane as u32, index as u32);
            row as usize * n + column as usize
        };
        let adder = m.adder(&self.product.adder);
        self.product.accumulate((ROWS as usize, &a), (n, &b), adder, &mut rows, n / 2, place);
        m.matrix_results.insert(self.id, rows);
        m.progress += 1;
        Ok(())
    }
}

/// `wgmma.fence`: `wgmma` instructions after it may use registers written before it.
pub struct Fence;

impl Instruction for Fence {
    fn decode(_: &mut Parsed<'_>) -> Result<Fence> {
        Ok(Fence)
    }

    fn issue(&self, w: &mut Warp, _: &mut Machine<'_>, _: u32) -> Stopped<Flow> {
        w.wgmma.fenced_at = w.issued;
        Ok(Flow::Next)
    }
}

/// `wgmma.commit_group`.
pub struct CommitGroup;

impl Instruction for CommitGroup {
    fn decode(_: &mut Parsed<'_>) -> Result<CommitGroup> {
        Ok(CommitGroup)
    }

    fn issue(&self, w: &mut Warp, _: &mut Machine<'_>, _: u32) -> Stopped<Flow> {
        let group = std::mem::take(&mut w.wgmma.open);
        w.wgmma.committed.push_back(group);
        Ok(Flow::Next)
    }
}

/// `wgmma.wait_group N`: waits until all but the N newest groups are complete in the whole warpgroup and their results
/// are in the registers. One thread can then report for its warpgroup that the operands were read, as shipped kernels
/// do.
pub struct WaitGroup {
    keep: usize,
}

impl Instruction for WaitGroup {
    fn decode(i: &mut Parsed<'_>) -> Result<WaitGroup> {
        i.awaits_loads();
        Ok(WaitGroup { keep: i.constant(0, "the number of groups")? as usize })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        let done = w.wgmma.committed.len().saturating_sub(self.keep);
        let count = w.wgmma.finished + w.wgmma.committed.iter().take(done).flatten().count() as u64;
        let group = m.warpgroup(w);
        if !group.have_issued(count) {
            return Ok(Flow::Wait(WaitFor::Warpgroup { cta: w.cta, group: w.role / WARPS, count }));
        }
        let parts: Vec<(u64, Option<Agent>)> = group.first(count).cloned().collect();
        let mut waiting: Vec<u64> = parts.iter().map(|part| part.0).collect();
        m.await_operations(&mut waiting);
        if !waiting.is_empty() {
            return Ok(Flow::Wait(WaitFor::Operations(waiting)));
        }
        m.warpgroup(w).finish(w.role % WARPS, count);
        w.wgmma.finished = count;
        let finished: Vec<Wgmma> = w.wgmma.committed.drain(..done).flatten().collect();
        for p in finished.iter().filter(|p| !p.delivered) {
            deliver(w, m, mask, p)?;
        }
        if let Some(race) = &mut m.race {
            let mut known = None;
            for agent in finished.iter().filter_map(|p| p.agent.as_ref()) {
                race.finish(agent, &mut known);
            }
            // Other warps contribute only their parts of these instructions, not their earlier accesses.
            parts.iter().filter_map(|part| part.1.as_ref()).for_each(|agent| race.finish_apart(agent, &mut known));
            race.acquire(w.index, mask, &known);
        }
        // A later instruction in flight may still take its accumulators from one of these results.
        if w.wgmma.all().next().is_none() {
            for p in &finished {
                m.matrix_results.remove(&p.id);
            }
        }
        Ok(Flow::Next)
    }
}

/// Completes an instruction: writes its results to the registers.
pub fn deliver(w: &mut Warp, m: &Machine<'_>, mask: u32, p: &Wgmma) -> Stopped<()> {
    let rows =
        m.matrix_results.get(&p.id).ok_or_else(|| Stop::unsupported("a wgmma result that was already released"))?;
    for (d, row) in p.d.iter().zip(rows) {
        d.write(w, mask, row);
        if let Some(r) = d.register {
            w.define(r, mask, mask);
        }
    }
    Ok(())
}
