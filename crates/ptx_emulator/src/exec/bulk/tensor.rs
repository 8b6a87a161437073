//! `cp.async.bulk.tensor` and `cp.reduce.async.bulk.tensor`: copies of boxes of a tensor, described by a tensor map.

use super::groups::Copy;
use super::linear::load_global;
use super::reduction::Reduction;
use super::shared::{SharedRange, spawn, together};
use super::target::{Signals, Target};
use crate::code::Flow;
use crate::config::fault::{FaultKind, Stop, Stopped};
use crate::decode::error::{DecodeError, Result};
use crate::decode::parsed::Parsed;
use crate::exec::instruction::Instruction;
use crate::exec::tensor_map::{bad_map, read_map};
use crate::hw::tensor_map::{Piece, SHARED_ALIGN, TensorMap};
use crate::machine::race::{Agent, Mode};
use crate::machine::state::{Effect, Machine};
use crate::machine::warp::Warp;
use crate::operand::{Address, Src};
use crate::parser::ast::Operand;
use crate::timing::work::Work;
use crate::types::Type;

/// `[tensorMap, {coordinates}]`, and `{offsets}` for an im2col map.
struct BoxOperand {
    map: Address,
    /// `true` for an im2col box: a column of pixels.
    pixels: bool,
    offsets: Vec<Src>,
    /// `true` for `.tile::gather4` and `.tile::scatter4`: four rows of a 2D tensor, given by a column and four row
    /// numbers.
    four_rows: bool,
    coordinates: Vec<Src>,
}

impl BoxOperand {
    fn decode(i: &mut Parsed<'_>, n: usize) -> Result<BoxOperand> {
        let map = i.address(n)?;
        let Operand::Address { extra, .. } = i.operand(n)? else {
            return Err(DecodeError::invalid("expected a tensor map: `[tensorMap, {coordinates}]`"));
        };
        let [Operand::Vector(list)] = &extra[..] else {
            return Err(DecodeError::invalid("expected coordinates in braces"));
        };
        let rank = i.modifiers().iter().find_map(|m| m.strip_suffix('d').and_then(|d| d.parse::<usize>().ok()));
        let four_rows = i.one_of(&["tile::gather4", "tile::scatter4"]).is_some();
        if (if four_rows { Some(5) } else { rank }) != Some(list.len()) {
            return Err(DecodeError::invalid(format!("{} coordinates do not match the dimension", list.len())));
        }
        let coordinates = list.iter().map(|c| i.src_operand(c, Type::S32)).collect::<Result<_>>()?;
        let pixels = i.one_of(&["im2col", "im2col_no_offs"]).is_some();
        Ok(BoxOperand { map, pixels, offsets: Vec::new(), four_rows, coordinates })
    }

    /// Decodes operand `n` as pixel offsets: one for each dimension except channels and images.
    fn decode_offsets(&mut self, i: &mut Parsed<'_>, n: usize) -> Result<()> {
        self.offsets = i.src_vector(n, Type::U16)?;
        if self.offsets.len() + 2 != self.coordinates.len() {
            return Err(DecodeError::invalid(format!("{} offsets do not match the dimension", self.offsets.len())));
        }
        Ok(())
    }

    fn operands(&self) -> impl Iterator<Item = Src> {
        self.coordinates.iter().chain(&self.offsets).copied().chain([self.map.base])
    }

    /// Reads the tensor map and the coordinates of the lowest lane, and returns the agent that reads the map.
    fn read(&self, m: &mut Machine<'_>, w: &mut Warp, lanes: u32) -> Stopped<(TensorMap, At, Option<Agent>)> {
        let lane = lanes.trailing_zeros() as usize;
        let (map, reader) = read_map(m, w, &self.map, lanes)?;
        let map = if self.four_rows { map.four_rows() } else { map };
        let coordinates = self.coordinates.iter().map(|c| w.lane(*c, lane) as i32).collect();
        let offsets = self.offsets.iter().map(|offset| w.lane(*offset, lane) as u16).collect();
        Ok((map, At { coordinates, offsets }, reader))
    }

    /// The pieces of a box at `to`, and the shared memory from the first to the last piece. A swizzle permutes the
    /// pieces within the box.
    fn pieces(
        &self,
        map: &TensorMap,
        At { coordinates, offsets }: &At,
        to: SharedRange,
        lane: usize,
    ) -> Stopped<(Vec<Piece>, SharedRange)> {
        let mut pieces = Vec::new();
        let visit = |piece| pieces.push(piece);
        let visited = match (self.four_rows, self.pixels) {
            (true, _) => map.visit_four_rows(coordinates, to.offset, visit),
            (_, true) => map.visit_pixels(coordinates, offsets, to.offset, visit),
            _ => map.visit(coordinates, to.offset, visit),
        };
        visited.map_err(|e| bad_map(e, lane))?;
        let first = pieces.iter().map(|p| p.shared).min().unwrap_or(0);
        let last = pieces.iter().map(|p| p.shared + p.bytes).max().unwrap_or(first);
        Ok((pieces, SharedRange { offset: first, bytes: last - first, ..to }))
    }
}

/// Position of a box: coordinates of its first element, and offsets of its pixels.
struct At {
    coordinates: Vec<i32>,
    offsets: Vec<u16>,
}

/// Checks that a box fits into the shared memory of a CTA.
fn check_fits(m: &Machine<'_>, all: SharedRange, lane: usize) -> Stopped<()> {
    let SharedRange { cta, offset, bytes } = all;
    if (offset + bytes) as usize <= m.ctas[cta as usize].shared.data.len() {
        return Ok(());
    }
    let text = format!("a box of {bytes} bytes at byte {offset} exceeds the shared memory");
    Err(Stop::new(FaultKind::OutOfBounds, text).lane(lane as u32))
}

/// From global to shared memory: `cp.async.bulk.tensor [to], [tensorMap, {coordinates}], [mbarrier]{, {offsets}}{, ctaMask}`.
pub struct Load {
    to: Address,
    tensor: BoxOperand,
    signals: Signals,
}

impl Instruction for Load {
    fn decode(i: &mut Parsed<'_>) -> Result<Load> {
        let (to, mut tensor, barrier) = (i.address(0)?, BoxOperand::decode(i, 1)?, i.address(2)?);
        if tensor.pixels {
            tensor.decode_offsets(i, 3)?;
        }
        let mask = if tensor.pixels { 4 } else { 3 };
        let multicast = if i.has("multicast::cluster") { Some(i.src(mask, Type::U16)?) } else { None };
        Ok(Load { to, tensor, signals: Signals { barrier, multicast, pair: i.has("cta_group::2") } })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        let operands: Vec<Src> = self.tensor.operands().chain([self.to.base]).chain(self.signals.operands()).collect();
        for lanes in together(m, w, mask, &operands) {
            let lane = lanes.trailing_zeros() as usize;
            let agent = spawn(m, w, lanes);
            let to = SharedRange::at(m, w, &self.to, lane, 1, SHARED_ALIGN)?;
            let target = Target::resolve(m, w, lane, to, &self.signals)?;
            let (map, at, reader) = self.tensor.read(m, w, lanes)?;
            let (pieces, all) = self.tensor.pieces(&map, &at, to, lane)?;
            for &cta in &target.ctas {
                check_fits(m, SharedRange { cta, ..all }, lane)?;
                SharedRange { cta, ..all }.track(m, w, agent.as_ref(), Mode::Write)?;
            }
            let mut inside = 0;
            for (address, bytes) in pieces.iter().filter_map(|piece| Some((piece.global?, piece.bytes))) {
                m.issue_global(w, lane, agent.as_ref(), (address, bytes.into()), Mode::Read)?;
                inside += u64::from(bytes);
            }
            m.roles[w.role as usize].boxes_outside += u64::from(inside == 0);
            let bulk = &mut m.roles[w.role as usize].bulk;
            bulk.global_load += inside;
            bulk.shared_store += u64::from(map.transaction_bytes()) * target.ctas.len() as u64;
            target.request(m, w, agent.as_ref());
            m.start(w, Deliver { map, pieces, target, agent, reader });
        }
        Ok(Flow::Next)
    }
}

struct Deliver {
    map: TensorMap,
    pieces: Vec<Piece>,
    target: Target,
    agent: Option<Agent>,
    /// Agent that reads the map.
    reader: Option<Agent>,
}

impl Effect for Deliver {
    fn work(&self) -> Work {
        let ranges = self.pieces.iter().filter_map(|piece| Some((piece.global?, piece.bytes))).collect();
        Work::Load { ranges, ctas: self.target.ctas.clone(), bulk: true }
    }

    fn finish(self, m: &mut Machine<'_>) -> Stopped<()> {
        let mut buffer = Vec::new();
        for piece in &self.pieces {
            buffer.clear();
            buffer.resize(piece.bytes as usize, self.map.fill_byte());
            if let Some(address) = piece.global {
                load_global(m, address, &mut buffer)?;
                self.map.data_type.convert_loaded(&mut buffer);
            }
            self.target.write(m, piece.shared, &buffer);
        }
        self.target.learn(m, self.reader.as_ref())?;
        self.target.complete(m, self.map.transaction_bytes(), self.agent.as_ref())
    }
}

/// From shared to global memory, with or without a reduction: `cp.async.bulk.tensor [tensorMap, {coordinates}],
/// [from]`.
///
/// The box may exceed the tensor only at the far ends ("the upper left corner cannot have any negative indices", CUDA
/// C++ Programming Guide, "Tensor Memory Access"). A negative coordinate is an illegal instruction on an H200.
pub struct Store {
    tensor: BoxOperand,
    from: Address,
    reduction: Option<Reduction>,
}

impl Instruction for Store {
    fn decode(i: &mut Parsed<'_>) -> Result<Store> {
        let (tensor, from) = (BoxOperand::decode(i, 0)?, i.address(1)?);
        // The tensor map determines the type.
        let reduction = Reduction::decode(i, Type::U32)?;
        if reduction.is_some() {
            i.communicates();
        }
        Ok(Store { tensor, from, reduction })
    }

    fn issue(&self, w: &mut Warp, m: &mut Machine<'_>, mask: u32) -> Stopped<Flow> {
        let operands: Vec<Src> = self.tensor.operands().chain([self.from.base]).collect();
        for lanes in together(m, w, mask, &operands) {
            let lane = lanes.trailing_zeros() as usize;
            let agent = spawn(m, w, lanes);
            let from = SharedRange::at(m, w, &self.from, lane, 1, SHARED_ALIGN)?;
            let (map, at, _) = self.tensor.read(m, w, lanes)?;
            if let Some(negative) = at.coordinates.iter().find(|&&coordinate| coordinate < 0) {
                let text = format!("a tensor store at the negative coordinate {negative}");
                return Err(Stop::new(FaultKind::OutOfBounds, text).lane(lane as u32));
            }
            let (pieces, all) = self.tensor.pieces(&map.stored(), &at, from, lane)?;
            check_fits(m, all, lane)?;
            let unsupported = || Stop::unsupported(format!("a reducing copy of {:?}", map.data_type));
            let reduction = self.reduction.map(|r| r.on(map.data_type).ok_or_else(unsupported)).transpose()?;
            all.track(m, w, agent.as_ref(), Mode::Read)?;
            let piece = |p: &Piece| Some((SharedRange { offset: p.shared, bytes: p.bytes, ..from }, p.global?));
            let pieces: Vec<_> = pieces.iter().filter_map(piece).collect();
            m.roles[w.role as usize].boxes_outside += u64::from(pieces.is_empty());
            Copy { pieces, reduction }.start(m, w, lanes, agent)?;
        }
        Ok(Flow::Next)
    }
}
