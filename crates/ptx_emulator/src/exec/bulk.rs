//! Bulk and tensor copies by the async proxy (PTX ISA, "Data Movement: cp.async.bulk, cp.reduce.async.bulk,
//! cp.async.bulk.tensor, cp.reduce.async.bulk.tensor, cp.async.bulk.commit_group, cp.async.bulk.wait_group, st.async").
//! Which bytes a tensor copy moves is in [`crate::hw::tensor_map`].

use super::atomic;
use super::mbarrier::lane_at;
use crate::code::Flow;
use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::decode::error::DecodeError;
use crate::decode::opcode::Decoded;
use crate::decode::parsed::Parsed;
use crate::hw::tensor_map::{DataType, OBJECT_ALIGN, OBJECT_BYTES, Piece, SHARED_ALIGN, TensorMap, TensorMapError};
use crate::machine::address::{Lane, Spot, space_of};
use crate::machine::in_flight::BulkCopy;
use crate::machine::mbarrier::MbarrierAt;
use crate::machine::pending::Issuer;
use crate::machine::race::{Agent, Mode};
use crate::machine::state::Machine;
use crate::machine::wait::WaitFor;
use crate::machine::warp::Warp;
use crate::operand::{Address, Src, lanes};
use crate::parser::ast::Operand;
use crate::types::{Space, Type};

/// Unit and alignment of bulk copies.
const BULK_ALIGN: u32 = 16;

/// Everything that goes into shared memory and signals mbarriers.
struct Target {
    /// CTAs that receive the data at `offset`.
    ctas: Vec<u32>,
    offset: u32,
    /// The mbarrier of each CTA in `ctas`.
    barriers: Vec<MbarrierAt>,
}

/// The mbarriers that a copy to `ctas` signals (PTX ISA, "cp.async.bulk.tensor", `.multicast::cluster`, `.cta_group`).
fn signals(ctas: &[u32], at: MbarrierAt, multicast: bool, pair: bool) -> Vec<MbarrierAt> {
    let cta = |to: u32| match (multicast, pair) {
        (false, _) => at.cta,
        (true, false) => to,
        // The CTA of the destination's pair that has the parity of the mbarrier's.
        (true, true) => to & !1 | at.cta & 1,
    };
    ctas.iter().map(|&to| MbarrierAt { cta: cta(to), ..at }).collect()
}

/// A shared-memory operand: generic and `shared::cta` addresses carry the CTA's rank like `shared::cluster` ones.
fn shared(m: &Machine<'_>, w: &Warp, a: &Address, lane: usize, len: u32, align: u32) -> Stopped<(u32, u32)> {
    match m.resolve_aligned(w, shared_lane(w, a, lane), len, align)? {
        Spot::Shared { cta, offset } => Ok((cta, offset)),
        _ => Err(Stop::new(FaultKind::OutOfBounds, "an address in shared memory expected").lane(lane as u32)),
    }
}

/// A lane's address in the cluster's shared memory, given generic or in its window.
pub fn shared_lane(w: &Warp, a: &Address, lane: usize) -> Lane {
    let at = lane_at(w, a, Space::SharedCluster, lane);
    let space = if space_of(at.address) == Space::Shared { Space::Generic } else { Space::SharedCluster };
    Lane { space, ..at }
}

fn barrier_at(m: &mut Machine<'_>, w: &Warp, a: &Address, lane: usize) -> Stopped<MbarrierAt> {
    m.mbarrier(w, shared_lane(w, a, lane), true)
}

/// Checks an asynchronous access to shared memory against all others.
fn track(m: &mut Machine<'_>, w: &Warp, agent: Option<&Agent>, at: (u32, u32), len: u32, mode: Mode) -> Stopped<()> {
    if mode == Mode::Write {
        m.check_no_mbarrier(at.0, at.1, len)?;
    } else if m.sanitize {
        let defined = &m.ctas[at.0 as usize].shared.defined[at.1 as usize..(at.1 + len) as usize];
        // What is still in flight is the race detector's to report.
        if !defined.iter().any(|d| *d) {
            let text = format!("a copy of {len} bytes of shared memory that nothing has written");
            return Err(Stop::new(FaultKind::UninitialisedShared, text));
        }
    }
    if let (Some(race), Some(agent)) = (&mut m.race, agent)
        && let Err(conflict) = race.agent_access(agent, at.0, at.1, len, mode, w.pc())
    {
        return Err(m.conflict(mode, conflict, at.1, len));
    }
    Ok(())
}

fn spawn(m: &mut Machine<'_>, w: &Warp, lane: usize) -> Option<Agent> {
    m.race.as_mut().map(|r| r.spawn(w.index, 1 << lane, true))
}

fn ctas_of(m: &Machine<'_>, mask: u32, lane: usize) -> Stopped<Vec<u32>> {
    let ctas: Vec<u32> = lanes(mask & 0xffff).map(|n| n as u32).collect();
    match ctas.iter().find(|&&c| m.ctas.get(c as usize).is_none_or(|c| c.running == 0)) {
        None if !ctas.is_empty() => Ok(ctas),
        _ => {
            let text = format!("a CTA mask of {mask:#06x} in a cluster of {}", m.ctas.len());
            Err(Stop::new(FaultKind::InvalidOperand, text).lane(lane as u32))
        }
    }
}

impl Target {
    /// Delivers bytes at `at` past the target's offset.
    fn write(&self, m: &mut Machine<'_>, at: u32, data: &[u8]) {
        for &cta in &self.ctas {
            m.write_shared(cta, self.offset + at, data);
        }
    }

    /// A copy from global memory is requested.
    fn request(&self, m: &mut Machine<'_>) {
        self.barriers.iter().for_each(|&at| m.load_requested(at));
    }

    fn complete(&self, m: &mut Machine<'_>, bytes: u32, agent: Option<&Agent>) -> Stopped<()> {
        self.barriers.iter().try_for_each(|&at| m.mbarrier_complete(at, bytes, agent))
    }
}

/// A group copy's two moments: the source is read, then the destination written.
fn start_grouped(
    m: &mut Machine<'_>,
    w: &mut Warp,
    lane: usize,
    agent: Option<Agent>,
    read: impl FnOnce(&mut Machine<'_>) -> Vec<Vec<u8>> + 'static,
    write: impl FnOnce(&mut Machine<'_>, Vec<Vec<u8>>) -> Stopped<()> + 'static,
) {
    let written = m.pending.reserve();
    let issuer = Issuer { warp: w.index, pc: w.pc() };
    let read = m.start(w, move |m| {
        let data = read(m);
        m.start_reserved(written, issuer, Vec::new(), move |m| write(m, data));
        Ok(())
    });
    m.shared_readers.push((w.cta, read));
    w.bulk[lane].open.push(BulkCopy { read, written, agent });
}

/// `cp.async.bulk` and `cp.reduce.async.bulk` between linear ranges.
pub fn bulk(i: &mut Parsed<'_>) -> Decoded {
    let (to, from) = (i.address(0)?, i.address(1)?);
    let size = i.src(2, Type::U32)?;
    let reduction = Reduction::of(i)?;
    if i.has("bulk_group") {
        if reduction.is_some() {
            i.communicates();
        }
        return Ok(Box::new(move |w, m, mask| {
            for lane in lanes(mask) {
                let size = checked_size(w, size, lane)?;
                let agent = spawn(m, w, lane);
                let at = shared(m, w, &from, lane, size, BULK_ALIGN)?;
                let address = lane_at(w, &to, Space::Global, lane).address;
                aligned(address, lane)?;
                m.issue_global(w, lane, address, size, Reduction::mode(reduction))?;
                track(m, w, agent.as_ref(), at, size, Mode::Read)?;
                count_store(m, w, size);
                start_grouped(
                    m,
                    w,
                    lane,
                    agent,
                    move |m| vec![m.ctas[at.0 as usize].shared.data[at.1 as usize..(at.1 + size) as usize].to_vec()],
                    move |m, data| store_global(m, address, &data[0], reduction),
                );
            }
            Ok(Flow::Next)
        }));
    }
    let barrier = i.address(3)?;
    let multicast = i.has("multicast::cluster");
    let mask_operand = if multicast { Some(i.src(4, Type::U16)?) } else { None };
    let from_shared = i.modifiers().iter().filter(|m| m.starts_with("shared")).count() == 2;
    Ok(Box::new(move |w, m, mask| {
        for lane in lanes(mask) {
            let size = checked_size(w, size, lane)?;
            let agent = spawn(m, w, lane);
            let (cta, offset) = shared(m, w, &to, lane, size, BULK_ALIGN)?;
            let at = barrier_at(m, w, &barrier, lane)?;
            if !multicast && at.cta != cta {
                let text = "the mbarrier is not in the CTA that receives the data";
                return Err(Stop::new(FaultKind::InvalidOperand, text).lane(lane as u32));
            }
            let ctas = match mask_operand {
                Some(s) => ctas_of(m, w.lane(s, lane) as u32, lane)?,
                None => vec![cta],
            };
            for &cta in &ctas {
                track(m, w, agent.as_ref(), (cta, offset), size, Mode::Write)?;
            }
            let target = Target { barriers: signals(&ctas, at, multicast, false), ctas, offset };
            let copies = target.ctas.len() as u64;
            m.roles[w.role as usize].bulk.shared_store += u64::from(size) * copies;
            if from_shared {
                m.roles[w.role as usize].bulk.shared_load += u64::from(size);
                let source = shared(m, w, &from, lane, size, BULK_ALIGN)?;
                track(m, w, agent.as_ref(), source, size, Mode::Read)?;
                m.start(w, move |m| {
                    let range = source.1 as usize..(source.1 + size) as usize;
                    let data = m.ctas[source.0 as usize].shared.data[range].to_vec();
                    let data = match reduction {
                        Some(r) => {
                            let range = target.offset as usize..(target.offset + size) as usize;
                            r.apply(&m.ctas[target.ctas[0] as usize].shared.data[range], &data)
                        }
                        None => data,
                    };
                    target.write(m, 0, &data);
                    target.complete(m, size, agent.as_ref())
                });
                continue;
            }
            let address = lane_at(w, &from, Space::Global, lane).address;
            aligned(address, lane)?;
            m.issue_global(w, lane, address, size, Mode::Read)?;
            m.roles[w.role as usize].bulk.global_load += u64::from(size);
            target.request(m);
            m.start(w, move |m| {
                let mut data = vec![0; size as usize];
                load_global(m, address, &mut data)?;
                target.write(m, 0, &data);
                target.complete(m, size, agent.as_ref())
            });
        }
        Ok(Flow::Next)
    }))
}

fn aligned(address: u64, lane: usize) -> Stopped<()> {
    if address.is_multiple_of(BULK_ALIGN.into()) {
        return Ok(());
    }
    let text = format!("global address {address:#x} is not a multiple of {BULK_ALIGN}");
    Err(Stop::new(FaultKind::Misaligned, text).lane(lane as u32))
}

fn checked_size(w: &Warp, size: Src, lane: usize) -> Stopped<u32> {
    let size = w.lane(size, lane) as u32;
    if size.is_multiple_of(BULK_ALIGN) && size > 0 {
        return Ok(size);
    }
    let text = format!("a bulk copy of {size} bytes; the size is a multiple of {BULK_ALIGN}");
    Err(Stop::new(FaultKind::InvalidOperand, text).lane(lane as u32))
}

/// The operation of a reducing copy.
#[derive(Clone, Copy)]
struct Reduction {
    ty: Type,
    update: atomic::Update,
}

impl Reduction {
    fn of(i: &Parsed<'_>) -> Result<Option<Reduction>, DecodeError> {
        if !i.has("reduce") {
            return Ok(None);
        }
        let op = i.one_of(&atomic::REDUCTIONS);
        let update = op.and_then(atomic::update).ok_or_else(|| DecodeError::invalid("the operation is missing"))?;
        Ok(Some(Reduction { ty: i.ty().unwrap_or(Type::U32), update }))
    }

    /// How a copy to global memory writes, with a reduction or without.
    fn mode(reduction: Option<Reduction>) -> Mode {
        // Each of its operations has the semantics of `.relaxed.gpu`.
        if reduction.is_some() { Mode::Atomic } else { Mode::Write }
    }

    fn apply(&self, old: &[u8], new: &[u8]) -> Vec<u8> {
        let size = self.ty.bytes() as usize;
        let word = |bytes: &[u8]| {
            let mut word = [0; 8];
            word[..size].copy_from_slice(bytes);
            u64::from_le_bytes(word)
        };
        let pairs = old.chunks_exact(size).zip(new.chunks_exact(size));
        pairs.flat_map(|(a, b)| (self.update)(self.ty, word(a), word(b), 0).to_le_bytes()[..size].to_vec()).collect()
    }
}

/// Reads global memory on behalf of a bulk copy.
fn load_global(m: &mut Machine<'_>, address: u64, out: &mut [u8]) -> Stopped<()> {
    let (allocation, at) = m.locate_global(address, out.len() as u64)?;
    allocation.read(at, out);
    m.buffers[allocation.index].bulk_loaded += out.len() as u64;
    Ok(())
}

/// Counts a bulk copy of so many bytes from shared to global memory.
fn count_store(m: &mut Machine<'_>, w: &Warp, bytes: u32) {
    let bulk = &mut m.roles[w.role as usize].bulk;
    bulk.shared_load += u64::from(bytes);
    bulk.global_store += u64::from(bytes);
}

fn store_global(m: &mut Machine<'_>, address: u64, data: &[u8], reduction: Option<Reduction>) -> Stopped<()> {
    let (allocation, at) = m.locate_global(address, data.len() as u64)?;
    match reduction {
        Some(r) => {
            let mut old = vec![0; data.len()];
            allocation.read(at, &mut old);
            allocation.write(at, &r.apply(&old, data));
        }
        None => allocation.write(at, data),
    }
    m.buffers[allocation.index].bulk_stored += data.len() as u64;
    m.progress += 1;
    Ok(())
}

/// `[tensorMap, {coordinates}]`.
struct TensorOperand {
    map: Address,
    coordinates: Vec<Src>,
}

fn tensor_operand(i: &mut Parsed<'_>, n: usize) -> Result<TensorOperand, DecodeError> {
    let map = i.address(n)?;
    let Some(Operand::Address { extra, .. }) = i.operands().get(n) else {
        return Err(DecodeError::invalid("a tensor map expected"));
    };
    let [Operand::Vector(list)] = &extra[..] else {
        return Err(DecodeError::invalid("coordinates in braces expected"));
    };
    let rank = i.modifiers().iter().find_map(|m| m.strip_suffix('d').and_then(|d| d.parse::<usize>().ok()));
    if rank != Some(list.len()) {
        return Err(DecodeError::invalid(format!("{} coordinates do not fit the dimension", list.len())));
    }
    let coordinates = list.iter().map(|c| i.src_operand(c, Type::S32)).collect::<Result<_, _>>()?;
    Ok(TensorOperand { map, coordinates })
}

/// A tensor map's 128 bytes, wherever they lie.
pub fn read_map(m: &mut Machine<'_>, w: &Warp, a: &Address, space: Space, lane: usize) -> Stopped<TensorMap> {
    let at = lane_at(w, a, a.space(space), lane);
    let mut bytes = [0; OBJECT_BYTES];
    if !at.address.is_multiple_of(OBJECT_ALIGN) && at.space != Space::Param {
        let text = format!("a tensor map at {:#x}, which is not a multiple of {OBJECT_ALIGN}", at.address);
        return Err(Stop::new(FaultKind::BadDescriptor, text).lane(lane as u32));
    }
    match m.resolve_aligned(w, at, OBJECT_BYTES as u32, 1)? {
        Spot::Global(allocation, offset) => {
            m.track_global(w, lane as u32, (allocation, offset), OBJECT_BYTES as u64, Mode::Read)?;
            allocation.read(offset, &mut bytes);
            m.buffers[allocation.index].loaded += OBJECT_BYTES as u64;
        }
        Spot::Param(offset) => bytes.copy_from_slice(&m.params[offset..offset + OBJECT_BYTES]),
        Spot::Shared { cta, offset } => {
            bytes.copy_from_slice(&m.ctas[cta as usize].shared.data[offset as usize..offset as usize + OBJECT_BYTES]);
        }
        Spot::Local(offset) => bytes.copy_from_slice(&w.local[offset..offset + OBJECT_BYTES]),
    }
    TensorMap::from_bytes(&bytes).map_err(|e| bad_map(e, lane))
}

pub fn bad_map(error: TensorMapError, lane: usize) -> Box<Stop> {
    let kind = match error {
        TensorMapError::Unsupported(_) => FaultKind::Unsupported,
        TensorMapError::Coordinate { .. } => FaultKind::Misaligned,
        _ => FaultKind::BadDescriptor,
    };
    Stop::new(kind, format!("tensor map: {error}")).lane(lane as u32)
}

impl TensorOperand {
    fn read(&self, m: &mut Machine<'_>, w: &Warp, lane: usize) -> Stopped<(TensorMap, Vec<i32>)> {
        let map = read_map(m, w, &self.map, Space::Generic, lane)?;
        Ok((map, self.coordinates.iter().map(|c| w.lane(*c, lane) as i32).collect()))
    }
}

/// The pieces of a copy, with shared addresses from the box's start on, within which a swizzle permutes them.
fn pieces(map: &TensorMap, coordinates: &[i32], offset: u32, lane: usize) -> Stopped<Vec<Piece>> {
    let mut list = Vec::new();
    map.visit(coordinates, offset, |p| list.push(p)).map_err(|e| bad_map(e, lane))?;
    Ok(list)
}

/// The bytes of shared memory from the first to the last piece.
fn span(pieces: &[Piece]) -> (u32, u32) {
    let first = pieces.iter().map(|p| p.shared).min().unwrap_or(0);
    let last = pieces.iter().map(|p| p.shared + p.bytes).max().unwrap_or(first);
    (first, last - first)
}

/// `cp.async.bulk.tensor` from global to shared memory.
pub fn tensor_load(i: &mut Parsed<'_>) -> Decoded {
    let to = i.address(0)?;
    let tensor = tensor_operand(i, 1)?;
    let barrier = i.address(2)?;
    let multicast = i.has("multicast::cluster");
    let mask_operand = if multicast { Some(i.src(3, Type::U16)?) } else { None };
    let pair = i.has("cta_group::2");
    Ok(Box::new(move |w, m, mask| {
        for lane in lanes(mask) {
            let agent = spawn(m, w, lane);
            let (cta, offset) = shared(m, w, &to, lane, 1, SHARED_ALIGN)?;
            let at = barrier_at(m, w, &barrier, lane)?;
            if !multicast && at.cta != cta && !(pair && at.cta / 2 == cta / 2) {
                let text = "the mbarrier is not in the CTA that receives the data";
                return Err(Stop::new(FaultKind::InvalidOperand, text).lane(lane as u32));
            }
            let (map, coordinates) = tensor.read(m, w, lane)?;
            let list = pieces(&map, &coordinates, offset, lane)?;
            let ctas = match mask_operand {
                Some(s) => ctas_of(m, w.lane(s, lane) as u32, lane)?,
                None => vec![cta],
            };
            let (first, len) = span(&list);
            for &cta in &ctas {
                if (first + len) as usize > m.ctas[cta as usize].shared.data.len() {
                    let text = format!("a box of {len} bytes does not fit behind byte {first} of shared memory");
                    return Err(Stop::new(FaultKind::OutOfBounds, text).lane(lane as u32));
                }
                track(m, w, agent.as_ref(), (cta, first), len, Mode::Write)?;
            }
            for (address, bytes) in list.iter().filter_map(|piece| Some((piece.global?, piece.bytes))) {
                m.issue_global(w, lane, address, bytes, Mode::Read)?;
            }
            let target = Target { barriers: signals(&ctas, at, multicast, pair), ctas, offset: 0 };
            let bytes = map.transaction_bytes();
            let inside: u32 = list.iter().filter(|piece| piece.global.is_some()).map(|piece| piece.bytes).sum();
            let bulk = &mut m.roles[w.role as usize].bulk;
            bulk.global_load += u64::from(inside);
            bulk.shared_store += u64::from(bytes) * target.ctas.len() as u64;
            target.request(m);
            m.start(w, move |m| {
                let mut buffer = Vec::new();
                for piece in &list {
                    buffer.clear();
                    buffer.resize(piece.bytes as usize, map.fill_byte());
                    if let Some(address) = piece.global {
                        load_global(m, address, &mut buffer)?;
                    }
                    target.write(m, piece.shared, &buffer);
                }
                target.complete(m, bytes, agent.as_ref())
            });
        }
        Ok(Flow::Next)
    }))
}

/// The type that a reducing tensor copy computes in.
fn reduction_type(data: DataType) -> Option<Type> {
    Some(match data {
        DataType::U32 => Type::U32,
        DataType::S32 => Type::S32,
        DataType::U64 => Type::U64,
        DataType::S64 => Type::S64,
        DataType::F16 => Type::F16,
        DataType::Bf16 => Type::BF16,
        DataType::F32 => Type::F32,
        _ => return None,
    })
}

/// `cp.async.bulk.tensor` and `cp.reduce.async.bulk.tensor` from shared to global memory. The box may leave the tensor at
/// its far ends alone ("the upper left corner cannot have any negative indices", CUDA C++ Programming Guide, "Tensor
/// Memory Access"; on an H200 it is an illegal instruction).
pub fn tensor_store(i: &mut Parsed<'_>) -> Decoded {
    let tensor = tensor_operand(i, 0)?;
    let from = i.address(1)?;
    let reduction = Reduction::of(i)?;
    if reduction.is_some() {
        i.communicates();
    }
    Ok(Box::new(move |w, m, mask| {
        for lane in lanes(mask) {
            let agent = spawn(m, w, lane);
            let (cta, offset) = shared(m, w, &from, lane, 1, SHARED_ALIGN)?;
            let (map, coordinates) = tensor.read(m, w, lane)?;
            if let Some(negative) = coordinates.iter().find(|&&coordinate| coordinate < 0) {
                let text = format!("a tensor is stored to at the coordinate {negative}");
                return Err(Stop::new(FaultKind::OutOfBounds, text).lane(lane as u32));
            }
            let list = pieces(&map.stored(), &coordinates, offset, lane)?;
            let (first, len) = span(&list);
            if (first + len) as usize > m.ctas[cta as usize].shared.data.len() {
                let text = format!("a box of {len} bytes does not fit behind byte {first} of shared memory");
                return Err(Stop::new(FaultKind::OutOfBounds, text).lane(lane as u32));
            }
            let reduction = match reduction {
                Some(r) => match reduction_type(map.data_type) {
                    Some(ty) => Some(Reduction { ty, ..r }),
                    None => return Err(Stop::unsupported(format!("a reducing copy of {:?}", map.data_type))),
                },
                None => None,
            };
            track(m, w, agent.as_ref(), (cta, first), len, Mode::Read)?;
            let inside: Vec<Piece> = list.into_iter().filter(|p| p.global.is_some()).collect();
            for piece in &inside {
                m.issue_global(w, lane, piece.global.unwrap_or(0), piece.bytes, Reduction::mode(reduction))?;
            }
            count_store(m, w, inside.iter().map(|p| p.bytes).sum());
            let sources = inside.clone();
            start_grouped(
                m,
                w,
                lane,
                agent,
                move |m| {
                    let data = &m.ctas[cta as usize].shared.data;
                    sources.iter().map(|p| data[p.shared as usize..(p.shared + p.bytes) as usize].to_vec()).collect()
                },
                move |m, data| {
                    for (piece, bytes) in inside.iter().zip(&data) {
                        store_global(m, piece.global.unwrap_or(0), bytes, reduction)?;
                    }
                    Ok(())
                },
            );
        }
        Ok(Flow::Next)
    }))
}

/// `cp.async.bulk.prefetch`: a hint.
pub fn prefetch(_: &mut Parsed<'_>) -> Decoded {
    Ok(Box::new(|_, _, _| Ok(Flow::Next)))
}

pub fn commit_group(_: &mut Parsed<'_>) -> Decoded {
    Ok(Box::new(|w, _, mask| {
        for lane in lanes(mask) {
            let group = std::mem::take(&mut w.bulk[lane].open);
            w.bulk[lane].committed.push_back(group);
        }
        Ok(Flow::Next)
    }))
}

/// `cp.async.bulk.wait_group{.read} N`: all but the N newest groups are complete, or have read their sources.
pub fn wait_group(i: &mut Parsed<'_>) -> Decoded {
    let Src::Constant(keep) = i.src(0, Type::U32)? else {
        return Err(DecodeError::invalid("the number of groups is a constant"));
    };
    let (keep, read) = (keep as usize, i.has("read"));
    Ok(Box::new(move |w, m, mask| {
        let mut waiting = Vec::new();
        for lane in lanes(mask) {
            let groups = &w.bulk[lane];
            let done = groups.committed.len().saturating_sub(keep);
            let copies = groups.committed.iter().take(done).flatten();
            // A copy's second moment has its number from the start.
            waiting.extend(copies.map(|c| if read { c.read } else { c.written }).filter(|id| m.pending.contains(*id)));
        }
        if !waiting.is_empty() {
            return Ok(Flow::Wait(WaitFor::Operations(waiting)));
        }
        for lane in lanes(mask) {
            let groups = &mut w.bulk[lane];
            let done = groups.committed.len().saturating_sub(keep);
            if let Some(race) = &mut m.race {
                let mut known = None;
                for agent in groups.committed.iter().take(done).flatten().filter_map(|c| c.agent.as_ref()) {
                    race.finish(agent, &mut known);
                }
                race.acquire(w.index, 1 << lane, &known);
            }
            if !read {
                groups.committed.drain(..done);
            }
        }
        Ok(Flow::Next)
    }))
}

/// `st.async`: a store to another CTA's shared memory that signals an mbarrier there.
pub fn st_async(i: &mut Parsed<'_>) -> Decoded {
    let ty = i.ty()?;
    let (to, barrier) = (i.address(0)?, i.address(2)?);
    let sources = match i.operand(1)? {
        Operand::Vector(parts) => parts.iter().map(|p| i.src_operand(p, ty)).collect::<Result<Vec<_>, _>>()?,
        single => vec![i.src_operand(single, ty)?],
    };
    let piece = ty.bytes() as usize;
    let size = (piece * sources.len()) as u32;
    Ok(Box::new(move |w, m, mask| {
        for lane in lanes(mask) {
            let agent = m.race.as_mut().map(|r| r.spawn(w.index, 1 << lane, false));
            let (cta, offset) = shared(m, w, &to, lane, size, size)?;
            let at = barrier_at(m, w, &barrier, lane)?;
            track(m, w, agent.as_ref(), (cta, offset), size, Mode::Write)?;
            let data: Vec<u8> = sources.iter().flat_map(|s| w.lane(*s, lane).to_le_bytes()[..piece].to_vec()).collect();
            m.start(w, move |m| {
                m.write_shared(cta, offset, &data);
                m.mbarrier_complete(at, size, agent.as_ref())
            });
        }
        Ok(Flow::Next)
    }))
}
