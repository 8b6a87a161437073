//! Tensor maps, read for copies and edited on the device (PTX ISA, "Data Movement: tensormap.replace", "Parallel
//! Synchronization: tensormap.cp_fenceproxy").

use super::bulk::shared::spawn;
use super::instruction::Instruction;
use crate::code::Flow;
use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::config::launch::Param;
use crate::decode::error::{DecodeError, Result};
use crate::decode::parsed::Parsed;
use crate::hw::tensor_map::{Field, OBJECT_ALIGN, OBJECT_BYTES, TensorMap, TensorMapError};
use crate::machine::address::{Lane, Spot, space_at};
use crate::machine::footprint::{Kind, Object};
use crate::machine::in_flight::BulkCopy;
use crate::machine::race::{Agent, Mode};
use crate::machine::state::Machine;
use crate::machine::warp::Warp;
use crate::operand::{Address, Src, lanes};
use crate::types::Space;

/// Maximum number of reads of maps that a thread's open group keeps.
const KEPT: usize = 256;
/// Bytes per read or write.
const WORD: usize = 16;

/// Reads the tensor map of one lane for a copy, from any state space. The copy reads a map in global memory while it is
/// in flight: the agent of that read is also returned. On an H100 and an RTX 5090 D, copies went wrong whose map was
/// replaced meanwhile (DeepGEMM #343, #430).
pub fn read_map(m: &mut Machine<'_>, w: &mut Warp, a: &Address, mask: u32) -> Stopped<(TensorMap, Option<Agent>)> {
    let (space, lane) = (a.space(Space::Generic), mask.trailing_zeros() as usize);
    let bytes = read_bytes(m, w, a, space, lane)?;
    let map = TensorMap::from_bytes(&bytes).map_err(|e| bad_map(e, lane))?;
    let at = w.lane_at(a, space, lane);
    if space_at(space, at.address) != Space::Global {
        return Ok((map, None));
    }
    let Some(agent) = spawn(m, w, mask).map(|agent| agent.without_proxy()) else { return Ok((map, None)) };
    m.touch_async(w, lane as u32, Some(&agent), (at.address, OBJECT_BYTES as u64), Mode::Read)?;
    // A wait for the thread's bulk groups also waits for reads of maps (PTX ISA, "cp.async.bulk.wait_group").
    for lane in lanes(mask) {
        let open = &mut w.bulk[lane].open;
        if open.len() >= KEPT {
            open.retain(|copy| copy.writer.is_some());
        }
        open.push(BulkCopy { read: 0, written: 0, agent: Some(agent.clone()), writer: None });
    }
    Ok((map, Some(agent)))
}

fn read_bytes(m: &mut Machine<'_>, w: &Warp, a: &Address, space: Space, lane: usize) -> Stopped<[u8; OBJECT_BYTES]> {
    let at = w.lane_at(a, a.space(space), lane);
    let mut bytes = [0; OBJECT_BYTES];
    let misaligned = |text| Err(Stop::new(FaultKind::Misaligned, text).lane(lane as u32));
    if !at.address.is_multiple_of(OBJECT_ALIGN) {
        return misaligned(format!("the tensor map's address {:#x} is not a multiple of {OBJECT_ALIGN}", at.address));
    }
    match m.resolve_aligned(w, at, OBJECT_BYTES as u32, 1)? {
        Spot::Global(allocation, offset) => {
            m.track_global(w, lane as u32, (allocation, offset), OBJECT_BYTES as u64, Mode::Read)?;
            allocation.read(offset, &mut bytes);
            m.buffers[allocation.index].loaded += OBJECT_BYTES as u64;
        }
        Spot::Param(offset) => {
            // The driver decides where a GPU holds the first parameter, so only a declared alignment is reliable.
            let inside = |p: &&Param| (p.offset..p.offset + p.bytes).contains(&(offset as u32));
            if let Some(p) = m.launch.declared.iter().find(inside).filter(|p| u64::from(p.align) < OBJECT_ALIGN) {
                let (name, align) = (&p.name, p.align);
                return misaligned(format!(
                    "the tensor map is in parameter `{name}`, which is aligned to {align} bytes; declare it with `.align {OBJECT_ALIGN}`"
                ));
            }
            bytes.copy_from_slice(&m.params[offset..offset + OBJECT_BYTES]);
        }
        Spot::Shared { cta, offset } => {
            bytes.copy_from_slice(&m.ctas[cta as usize].shared.data[offset as usize..offset as usize + OBJECT_BYTES]);
        }
        Spot::Local(offset) => bytes.copy_from_slice(&w.local[offset..offset + OBJECT_BYTES]),
    }
    Ok(bytes)
}

/// Turns an error of a tensor map or its use into a fault.
pub fn bad_map(error: TensorMapError, lane: usize) -> Box<Stop> {
    let kind = match error {
        TensorMapError::Unsupported(_) => FaultKind::Unsupported,
        TensorMapError::Coordinate { .. } => FaultKind::Misaligned,
        _ => FaultKind::BadDescriptor,
    };
    Stop::new(kind, format!("tensor map: {error}")).lane(lane as u32)
}

/// `tensormap.replace [map]{, ordinal}, value`.
pub struct Replace {
    map: Address,
    space: Space,
    field: Field,
    value: Src,
}

impl Instruction for Replace {
    fn decode(i: &mut Parsed<'_>) -> Result<Replace> {
        let map = i.address(0)?;
        let field = field(i)?;
        let value = i.src(i.operands().len() - 1, i.ty()?)?;
        Ok(Replace { map, space: i.space_at(&map), field, value })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        for lane in lanes(mask) {
            let bytes = read_bytes(m, w, &self.map, self.space, lane)?;
            let mut map = match bytes == [0; OBJECT_BYTES] {
                true => TensorMap::ZEROED,
                false => TensorMap::from_bytes(&bytes).map_err(|e| bad_map(e, lane))?,
            };
            map.replace(self.field, w.lane(self.value, lane)).map_err(|e| bad_map(e, lane))?;
            let at = w.lane_at(&self.map, self.space, lane);
            for (n, word) in map.to_bytes().chunks_exact(WORD).enumerate() {
                let at = Lane { address: at.address + (n * WORD) as u64, ..at };
                m.store(w, at, Mode::Write, word)?;
            }
        }
        Ok(Flow::Next)
    }
}

fn field(i: &mut Parsed<'_>) -> Result<Field> {
    if let Some(array) = i.one_of(&["box_dim", "global_dim", "global_stride", "element_stride"]) {
        if i.operands().len() != 3 {
            return Err(DecodeError::invalid("wrong number of operands"));
        }
        let ordinal = i.constant(1, "the ordinal")? as usize;
        return Ok(match array {
            "box_dim" => Field::BoxDim(ordinal),
            "global_dim" => Field::GlobalDim(ordinal),
            "global_stride" => Field::GlobalStride(ordinal),
            _ => Field::ElementStride(ordinal),
        });
    }
    if i.operands().len() != 2 {
        return Err(DecodeError::invalid("wrong number of operands"));
    }
    let single =
        ["global_address", "rank", "elemtype", "interleave_layout", "swizzle_mode", "swizzle_atomicity", "fill_mode"];
    Ok(match i.one_of(&single) {
        Some("global_address") => Field::GlobalAddress,
        Some("rank") => Field::Rank,
        Some("elemtype") => Field::ElemType,
        Some("interleave_layout") => Field::InterleaveLayout,
        Some("swizzle_mode") => Field::SwizzleMode,
        Some("swizzle_atomicity") => Field::SwizzleAtomicity,
        _ => Field::FillMode,
    })
}

/// `tensormap.cp_fenceproxy [to], [from], 128`: copies the object from shared to global memory and makes it visible to
/// the tensor-map proxy.
pub struct CpFenceproxy {
    to: Address,
    from: Address,
}

impl Instruction for CpFenceproxy {
    fn decode(i: &mut Parsed<'_>) -> Result<CpFenceproxy> {
        let (to, from) = (i.address(0)?, i.address(1)?);
        if i.constant(2, "the size")? != OBJECT_BYTES as u64 {
            return Err(DecodeError::invalid("the size must be 128"));
        }
        Ok(CpFenceproxy { to, from })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        // All lanes name the same objects, so the warp copies once.
        let lane = mask.trailing_zeros() as usize;
        let mut bytes = [0; OBJECT_BYTES];
        let from = w.lane_at(&self.from, Space::Shared, lane);
        for (n, word) in bytes.chunks_exact_mut(WORD).enumerate() {
            let from = Lane { address: from.address + (n * WORD) as u64, ..from };
            m.load(w, from, Mode::Read, word)?;
        }
        let to = w.lane_at(&self.to, Space::Global, lane);
        let Spot::Global(allocation, offset) = m.resolve(w, to, OBJECT_BYTES as u32)? else {
            return Err(Stop::new(FaultKind::OutOfBounds, "expected an address in global memory"));
        };
        m.track_global(w, lane as u32, (allocation, offset), OBJECT_BYTES as u64, Mode::Write)?;
        allocation.write(offset, &bytes);
        let begin = allocation.base() + offset;
        m.record(Object::Global, begin..begin + OBJECT_BYTES as u64, Kind::Write);
        for (at, word) in (allocation.base() + offset..).step_by(WORD).zip(bytes.chunks_exact(WORD)) {
            m.touch(lane as u32, at, WORD as u32, Mode::Write, word);
        }
        m.progress += 1;
        m.buffers[allocation.index].stored += OBJECT_BYTES as u64;
        Ok(Flow::Next)
    }
}
