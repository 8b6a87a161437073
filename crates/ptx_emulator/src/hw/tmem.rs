//! Tensor memory: addresses, access to lanes, and the layouts of matrices, scale factors and registers in it.
//!
//! PTX ISA 9.7.16.1 (addresses, allocation), 9.7.16.2.3 and 9.7.16.8 (`tcgen05.ld`/`st` shapes and lane rules),
//! 9.7.16.9 (`tcgen05.cp`), 9.7.16.10.5 (data-path layouts A to G), 9.7.16.10.7 (scale factors). The manual draws these
//! layouts as pictures. For details that its text omits, the source is CUTLASS, which defines them as CuTe layouts:
//! `copy_traits_sm100.hpp` for `ld`, `st` and `cp`, `mma_traits_sm100_frag.hpp` for matrices and scale factors.
//!
//! The direction of a shift is an interpretation. `tcgen05.shift` moves elements "downwards across all the rows, except
//! the last, by one row" (9.7.16.9.3), `tcgen05.mma.ashift` shifts A "down by one row, except for the last row", and
//! `tcgen05.cp.4x256b` then fills one row again. In the emulator, each row gets the elements of the next row, and the
//! last row keeps its elements. This is not confirmed on hardware.
//!
//! Not modeled: decompression of 4-bit and 6-bit elements by `tcgen05.cp`, which the text does not specify completely.

use super::descriptor::{CHUNK_BYTES, Major, ScaleVector, SharedMatrix};

/// Lanes of a CTA's tensor memory.
pub const LANES: u32 = 128;
/// Columns of a CTA's tensor memory, of 32 bits each.
pub const COLUMNS: u32 = 512;
/// Lanes that one warp of a warpgroup can reach with `tcgen05.ld` and `tcgen05.st`.
pub const LANES_PER_WARP: u32 = 32;
/// Columns that `tcgen05.shift` moves: elements of 32 bytes.
pub const SHIFT_COLUMNS: u32 = 8;
/// Smallest allocation, in columns.
pub const MIN_ALLOCATION: u32 = 32;

/// A tensor memory address: the lane in the upper half of 32 bits, the column in the lower half.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Address {
    /// Valid lanes: 0 to 127.
    pub lane: u32,
    /// Valid columns: 0 to 511.
    pub column: u32,
}

impl Address {
    /// Splits a 32-bit address.
    pub const fn decode(bits: u32) -> Self {
        Address { lane: bits >> 16, column: bits & 0xffff }
    }

    /// Splits the address of scale factors. The two top bits do not belong to the lane: CUTLASS stores the scale factor
    /// id there, and the hardware accepts that.
    pub const fn decode_scale(bits: u32) -> Self {
        Self::decode(bits & 0x3fff_ffff)
    }

    /// The address as 32 bits.
    pub const fn encode(self) -> u32 {
        self.lane << 16 | self.column
    }
}

/// Whether `tcgen05.alloc` and `dealloc` accept this number of columns: a power of two from 32 to 512.
pub const fn is_allocation_size(columns: u32) -> bool {
    columns.is_power_of_two() && columns >= MIN_ALLOCATION && columns <= COLUMNS
}

/// First of the 32 lanes that a warp may load and store (PTX ISA 9.7.16.8.1). `warp` counts within the CTA.
pub const fn first_lane_of_warp(warp: u32) -> u32 {
    warp % 4 * LANES_PER_WARP
}

/// `.shape` of `tcgen05.ld` and `tcgen05.st`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AccessShape {
    /// `.32x32b`
    L32x32b,
    /// `.16x64b`
    L16x64b,
    /// `.16x128b`
    L16x128b,
    /// `.16x256b`
    L16x256b,
    /// `.16x32bx2` with its `immHalfSplitoff`, in columns.
    L16x32bx2 {
        /// Columns between the first half and the second half.
        split: u32,
    },
}

impl AccessShape {
    /// Registers per thread for `.x1`; N times this number for `.xN` (PTX ISA 9.7.16.8.3, table 49).
    pub const fn registers(self) -> u32 {
        match self {
            AccessShape::L32x32b | AccessShape::L16x64b | AccessShape::L16x32bx2 { .. } => 1,
            AccessShape::L16x128b => 2,
            AccessShape::L16x256b => 4,
        }
    }

    /// Whether `.x<num>` exists: a power of two with at most 128 registers.
    pub const fn allows(self, num: u32) -> bool {
        num.is_power_of_two() && num * self.registers() <= 128
    }

    /// Number of lanes accessed, starting at the address's lane.
    pub const fn lanes(self) -> u32 {
        match self {
            AccessShape::L32x32b => 32,
            _ => 16,
        }
    }

    /// Cell of `register` of `thread` (0 to 31), relative to the instruction's address.
    ///
    /// With `packed` (`.pack::16b`, `.unpack::16b`), the register's low half is the low half of that cell, and its high
    /// half is the low half of the cell in the next column.
    pub const fn cell(self, thread: u32, register: u32, packed: bool) -> Address {
        let (quad, in_quad) = (thread / 4, thread % 4);
        let (lane, column, split) = match self {
            AccessShape::L32x32b => (thread, register, 0),
            AccessShape::L16x64b => (quad + in_quad % 2 * 8, register * 2 + in_quad / 2, 0),
            AccessShape::L16x128b => (quad + register % 2 * 8, register / 2 * 4 + in_quad, 0),
            AccessShape::L16x256b => (quad + register / 2 % 2 * 8, register / 4 * 8 + in_quad * 2 + register % 2, 0),
            AccessShape::L16x32bx2 { split } => (thread % 16, register, thread / 16 * split),
        };
        let column = if packed { 2 * column } else { column };
        Address { lane, column: column + split }
    }
}

/// Use of the lanes by an MMA (PTX ISA 9.7.16.10.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DataPath {
    /// M = 256, two CTAs: 128 rows per CTA, one row per lane.
    A,
    /// M = 128, two CTAs, dense: 64 rows per CTA. The upper half of N is in lanes 64 to 127.
    B,
    /// M = 128, two CTAs, sparse: 64 rows per CTA, 16 in each warp's lanes.
    C,
    /// M = 128, one CTA: one row per lane.
    D,
    /// M = 64, `.ws`: the upper half of N is in lanes 64 to 127.
    E,
    /// M = 64: 16 rows in each warp's lanes.
    F,
    /// M = 32, `.ws`: a quarter of N in each warp's lanes.
    G,
}

impl DataPath {
    /// Layout of an MMA. `None`: the shape does not exist.
    pub const fn of(m: u32, cta_group: u32, sparse: bool, weight_stationary: bool) -> Option<Self> {
        Some(match (m, cta_group, weight_stationary, sparse) {
            (32, 1, true, _) => DataPath::G,
            (64, 1, true, _) => DataPath::E,
            (64, 1, false, _) => DataPath::F,
            (128, 1, _, _) => DataPath::D,
            (128, 2, false, false) => DataPath::B,
            (128, 2, false, true) => DataPath::C,
            (256, 2, false, _) => DataPath::A,
            _ => return None,
        })
    }

    /// Rows of D (and A) per CTA.
    pub const fn rows_per_cta(self) -> u32 {
        match self {
            DataPath::A | DataPath::D => 128,
            DataPath::B | DataPath::C | DataPath::E | DataPath::F => 64,
            DataPath::G => 32,
        }
    }

    /// Columns of tensor memory that D with `n` columns occupies.
    pub const fn d_columns(self, n: u32) -> u32 {
        match self {
            DataPath::A | DataPath::C | DataPath::D | DataPath::F => n,
            DataPath::B | DataPath::E => n / 2,
            DataPath::G => n / 4,
        }
    }

    /// Whether the address's lane is valid: 0, and also 16 for the layouts that use half of the lanes.
    pub const fn allows_lane(self, lane: u32) -> bool {
        lane == 0 || lane == 16 && matches!(self, DataPath::C | DataPath::F)
    }

    /// Cell of D at row `row` *of this CTA* and column `column` of `n`, relative to D's address. Every element takes a
    /// 32-bit cell. A 16-bit element takes the lower half of its cell (PTX ISA 9.7.16.10.4.1).
    ///
    /// In a two-CTA MMA, the CTA of even rank holds the first half of the rows.
    pub const fn d_cell(self, row: u32, column: u32, n: u32) -> Address {
        let width = self.d_columns(n);
        Address { lane: self.lane(row) + column / width * self.rows_per_cta(), column: column % width }
    }

    /// Cell of byte `byte` along K in row `row` of this CTA, for A in tensor memory. A cell holds four bytes. `part`,
    /// below [`DataPath::a_parts`], selects the copy.
    pub const fn a_cell(self, row: u32, byte: u32, part: u32) -> Address {
        Address { lane: self.lane(row) + part * self.rows_per_cta(), column: byte / 4 }
    }

    /// Number of copies of A that tensor memory must hold. In layout B, each half of the lanes computes its half of N
    /// from its own copy (CUTLASS's "duplicated" allocation). The manual does not cover the `.ws` layouts E and G. They
    /// are assumed to be the same.
    pub const fn a_parts(self) -> u32 {
        match self {
            DataPath::A | DataPath::C | DataPath::D | DataPath::F => 1,
            DataPath::B | DataPath::E => 2,
            DataPath::G => 4,
        }
    }

    const fn lane(self, row: u32) -> u32 {
        match self {
            DataPath::C | DataPath::F => row % 16 + row / 16 * LANES_PER_WARP,
            _ => row,
        }
    }

    /// Cell in which the lanes of quarter `quarter` (0 to 3) find the scale factors of A's row `row` of this CTA: 32
    /// rows per column, the same in every quarter (PTX ISA 9.7.16.10.7: "duplicated to all 32 lane partitions").
    pub const fn scale_a_cell(self, row: u32, quarter: u32) -> Address {
        Address { lane: row % 32 + quarter * LANES_PER_WARP, column: row / 32 }
    }

    /// Cell in which the lanes of quarter `quarter` find the scale factors of B's column `column` of `n`, in each CTA.
    /// `None`: the quarter does not use the column. In layout B, each half of the lanes holds its half of N.
    pub const fn scale_b_cell(self, column: u32, n: u32, quarter: u32) -> Option<Address> {
        let lane_in = quarter * LANES_PER_WARP;
        match self {
            DataPath::B => {
                let half = n / 2;
                if column / half != quarter / 2 {
                    return None;
                }
                let within = column % half;
                Some(Address { lane: within % 32 + lane_in, column: within / 32 })
            }
            _ => Some(Address { lane: column % 32 + lane_in, column: column / 32 }),
        }
    }
}

/// Byte of a scale factor cell that scales block `block` of K, for a scale factor id (PTX ISA 9.7.16.10.7.2–3).
///
/// `X1`: the id is the byte. `X2`: ids 0 and 2 are the lower and upper half-word. `X4`: the cell uses all four bytes.
pub const fn scale_byte(vector: ScaleVector, id: u32, block: u32) -> u32 {
    match vector {
        ScaleVector::X1 => id,
        ScaleVector::X2 | ScaleVector::X4 => id + block,
    }
}

/// `.shape` and `.multicast` of `tcgen05.cp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CopyShape {
    /// `.128x256b`
    L128x256b,
    /// `.4x256b`: one row into the same lane of each quarter (CUTLASS).
    L4x256b,
    /// `.128x128b`
    L128x128b,
    /// `.64x128b.warpx2::02_13`: rows 0–63 into lanes 0–63, and again into lanes 64–127.
    L64x128bPairs02And13,
    /// `.64x128b.warpx2::01_23`: rows 0–31 into the first two quarters, rows 32–63 into the last two.
    L64x128bPairs01And23,
    /// `.32x128b.warpx4`: rows 0–31 into every quarter.
    L32x128bAll,
}

impl CopyShape {
    /// Rows of the source matrix.
    pub const fn rows(self) -> u32 {
        match self {
            CopyShape::L128x256b | CopyShape::L128x128b => 128,
            CopyShape::L64x128bPairs02And13 | CopyShape::L64x128bPairs01And23 => 64,
            CopyShape::L32x128bAll => 32,
            CopyShape::L4x256b => 4,
        }
    }

    /// 16-byte chunks per source row. Each chunk fills four columns.
    pub const fn chunks(self) -> u32 {
        match self {
            CopyShape::L128x256b | CopyShape::L4x256b => 2,
            _ => 1,
        }
    }

    /// Number of columns written.
    pub const fn columns(self) -> u32 {
        self.chunks() * CHUNK_BYTES / 4
    }

    /// Lanes, relative to the address, into which source row `row` is written.
    pub fn lanes(self, row: u32) -> impl Iterator<Item = u32> {
        let (first, step, count) = match self {
            CopyShape::L128x256b | CopyShape::L128x128b => (row, 0, 1),
            CopyShape::L4x256b => (row * LANES_PER_WARP, 0, 1),
            CopyShape::L64x128bPairs02And13 => (row, 2 * LANES_PER_WARP, 2),
            CopyShape::L64x128bPairs01And23 => (row % 32 + row / 32 * 64, LANES_PER_WARP, 2),
            CopyShape::L32x128bAll => (row, LANES_PER_WARP, 4),
        };
        (0..count).map(move |copy| first + copy * step)
    }

    /// Calls `visit` with every 16-byte chunk of the source and each of its destinations: the chunk's shared-memory
    /// address, and the lane and the first of four columns, relative to the instruction's address. The source is a
    /// K-major matrix.
    pub fn visit(self, source: &SharedMatrix, mut visit: impl FnMut(u32, Address)) {
        for row in 0..self.rows() {
            for chunk in 0..self.chunks() {
                let from = source.chunk_address(Major::K, row, chunk);
                for lane in self.lanes(row) {
                    visit(from, Address { lane, column: chunk * CHUNK_BYTES / 4 });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hw::cute;
    use crate::hw::swizzle::Swizzle;
    use std::collections::BTreeSet;

    /// CUTLASS's `Copy_Traits<SM100_TMEM_LOAD_…>::DstLayout`: maps thread modes and value modes to a bit index, in
    /// which a lane is `row_bits` wide.
    #[test]
    fn register_layouts_match_cutlass_copy_traits() {
        type Modes = &'static [(u32, u32)];
        type Case = (AccessShape, u32, u32, Modes, Modes);
        let cases: [Case; 9] = [
            (AccessShape::L16x64b, 1, 64, &[(2, 512), (2, 32), (8, 64)], &[(32, 1)]),
            (AccessShape::L16x64b, 4, 256, &[(2, 2048), (2, 32), (8, 256)], &[(32, 1), (4, 64)]),
            (AccessShape::L16x128b, 1, 128, &[(4, 32), (8, 128)], &[(32, 1), (2, 1024)]),
            (AccessShape::L16x128b, 4, 512, &[(4, 32), (8, 512)], &[(32, 1), (2, 4096), (4, 128)]),
            (AccessShape::L16x256b, 1, 256, &[(4, 64), (8, 256)], &[(64, 1), (2, 2048)]),
            (AccessShape::L16x256b, 2, 512, &[(4, 64), (8, 512)], &[(64, 1), (2, 4096), (2, 256)]),
            (AccessShape::L16x32bx2 { split: 1 }, 1, 64, &[(16, 64), (2, 32)], &[(32, 1)]),
            (AccessShape::L16x32bx2 { split: 2 }, 2, 128, &[(16, 128), (2, 64)], &[(64, 1)]),
            (AccessShape::L32x32b, 2, 64, &[(32, 64)], &[(64, 1)]),
        ];
        for (shape, num, row_bits, threads, values) in cases {
            for thread in 0..32 {
                for register in 0..num * shape.registers() {
                    let bit = cute(threads, thread) + cute(values, register * 32);
                    let expected = Address { lane: bit / row_bits, column: bit % row_bits / 32 };
                    assert_eq!(shape.cell(thread, register, false), expected, "{shape:?} x{num}");
                }
            }
        }
    }

    #[test]
    fn access_reaches_every_cell_of_its_shape_once() {
        let shapes = [
            (AccessShape::L32x32b, 32, 4),
            (AccessShape::L16x64b, 16, 8),
            (AccessShape::L16x128b, 16, 16),
            (AccessShape::L16x256b, 16, 32),
            (AccessShape::L16x32bx2 { split: 4 }, 16, 8),
        ];
        for (shape, lanes, columns) in shapes {
            let cells: BTreeSet<Address> = (0..32)
                .flat_map(|thread| (0..4 * shape.registers()).map(move |register| shape.cell(thread, register, false)))
                .collect();
            assert_eq!(cells.len(), (lanes * columns) as usize, "{shape:?}");
            assert!(cells.iter().all(|cell| cell.lane < lanes && cell.column < columns));
            assert_eq!(shape.lanes(), lanes);
        }
        assert!(AccessShape::L16x256b.allows(32) && !AccessShape::L16x256b.allows(64));
        assert!(AccessShape::L32x32b.allows(128) && !AccessShape::L32x32b.allows(3));
    }

    #[test]
    fn packed_registers_take_two_columns() {
        let cell = AccessShape::L32x32b.cell(5, 3, true);
        assert_eq!(cell, Address { lane: 5, column: 6 });
        // CUTLASS passes a split of 2 columns to its packed 16x32bx2.x1, so the split is not doubled.
        let cell = AccessShape::L16x32bx2 { split: 2 }.cell(17, 0, true);
        assert_eq!(cell, Address { lane: 1, column: 2 });
    }

    /// CUTLASS's `tmem_frg` atoms as (lane, column) strides: modes of the rows, then modes of the columns.
    #[test]
    fn accumulator_layouts_match_cutlass_fragments() {
        const COLUMN: u32 = 128;
        let cases = [
            (DataPath::A, 128, vec![(128, 1)], vec![(64, COLUMN)]),
            (DataPath::B, 64, vec![(64, 1)], vec![(32, COLUMN), (2, 64)]),
            (DataPath::C, 64, vec![(16, 1), (4, 32)], vec![(64, COLUMN)]),
            (DataPath::D, 128, vec![(128, 1)], vec![(64, COLUMN)]),
            (DataPath::E, 64, vec![(64, 1)], vec![(32, COLUMN), (2, 64)]),
            (DataPath::F, 64, vec![(16, 1), (4, 32)], vec![(64, COLUMN)]),
            (DataPath::G, 32, vec![(32, 1)], vec![(16, COLUMN), (4, 32)]),
        ];
        for (path, rows, row_modes, column_modes) in cases {
            assert_eq!(path.rows_per_cta(), rows);
            for row in 0..rows {
                for column in 0..64 {
                    let virtual_address = cute(&row_modes, row) + cute(&column_modes, column);
                    let expected = Address { lane: virtual_address % COLUMN, column: virtual_address / COLUMN };
                    assert_eq!(path.d_cell(row, column, 64), expected, "{path:?} {row} {column}");
                }
            }
        }
    }

    #[test]
    fn data_paths_follow_the_table_of_the_manual() {
        assert_eq!(DataPath::of(64, 1, false, false), Some(DataPath::F));
        assert_eq!(DataPath::of(64, 1, true, true), Some(DataPath::E));
        assert_eq!(DataPath::of(128, 1, true, false), Some(DataPath::D));
        assert_eq!(DataPath::of(128, 2, false, false), Some(DataPath::B));
        assert_eq!(DataPath::of(128, 2, true, false), Some(DataPath::C));
        assert_eq!(DataPath::of(256, 2, false, false), Some(DataPath::A));
        assert_eq!(DataPath::of(256, 1, false, false), None);
        assert!(DataPath::F.allows_lane(16) && !DataPath::D.allows_lane(16));
    }

    /// Blocked scale layout of cuBLAS: byte (r % 32)·16 + (r / 32)·4 + c of a 128 × 4 tile. After
    /// `tcgen05.cp.32x128b.warpx4`, row r's four factors must be where the MMA reads them, in every quarter.
    #[test]
    fn copied_scale_tile_is_where_the_mma_reads_it() {
        let source = SharedMatrix { start: 0x800, leading: 16, stride: 128, swizzle: Swizzle::None };
        let mut cells = std::collections::BTreeMap::new();
        CopyShape::L32x128bAll.visit(&source, |from, to| {
            for word in 0..4 {
                let cell = Address { lane: to.lane, column: to.column + word };
                assert!(cells.insert(cell, from + 4 * word).is_none());
            }
        });
        assert_eq!(cells.len(), 128 * 4);
        for row in 0..128 {
            for block in 0..4 {
                let blocked = 0x800 + row % 32 * 16 + row / 32 * 4 + block;
                for quarter in 0..4 {
                    let byte = scale_byte(ScaleVector::X4, 0, block);
                    let a = DataPath::D.scale_a_cell(row, quarter);
                    assert_eq!(cells[&a] + byte, blocked);
                    let b = DataPath::D.scale_b_cell(row, 128, quarter).unwrap();
                    assert_eq!(cells[&b] + byte, blocked);
                }
            }
        }
    }

    #[test]
    fn layout_b_splits_the_scales_of_n_between_the_halves() {
        assert_eq!(DataPath::B.scale_b_cell(40, 128, 1), Some(Address { lane: 40, column: 1 }));
        assert_eq!(DataPath::B.scale_b_cell(40, 128, 2), None);
        assert_eq!(DataPath::B.scale_b_cell(104, 128, 3), Some(Address { lane: 104, column: 1 }));
    }

    #[test]
    fn scale_ids_select_bytes() {
        assert_eq!(scale_byte(ScaleVector::X1, 3, 0), 3);
        assert_eq!([0, 1].map(|block| scale_byte(ScaleVector::X2, 2, block)), [2, 3]);
    }

    /// CUTLASS's UTCCP traits map (row, broadcast) to a lane.
    #[test]
    fn copies_reach_the_quarters_of_their_shape() {
        let lanes = |shape: CopyShape, row| shape.lanes(row).collect::<Vec<_>>();
        assert_eq!(lanes(CopyShape::L128x256b, 77), [77]);
        assert_eq!(lanes(CopyShape::L64x128bPairs02And13, 40), [40, 104]);
        assert_eq!(lanes(CopyShape::L64x128bPairs01And23, 5), [5, 37]);
        assert_eq!(lanes(CopyShape::L64x128bPairs01And23, 40), [72, 104]);
        assert_eq!(lanes(CopyShape::L32x128bAll, 31), [31, 63, 95, 127]);
        assert_eq!(lanes(CopyShape::L4x256b, 3), [96]);
        assert_eq!(CopyShape::L128x256b.columns(), 8);
    }

    #[test]
    fn addresses_and_allocations_follow_the_manual() {
        let address = Address::decode(0x0060_0123);
        assert_eq!(address, Address { lane: 96, column: 0x123 });
        assert_eq!(address.encode(), 0x0060_0123);
        assert_eq!(Address::decode_scale(0x8000_0010), Address { lane: 0, column: 16 });
        let sizes: Vec<u32> = (0..=1024).filter(|&columns| is_allocation_size(columns)).collect();
        assert_eq!(sizes, [32, 64, 128, 256, 512]);
        assert_eq!([0, 1, 2, 3, 4, 7].map(first_lane_of_warp), [0, 32, 64, 96, 0, 96]);
    }
}
