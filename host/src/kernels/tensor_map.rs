//! What a kernel asks of a tensor map; a backend encodes it.

/// Bytes of a tensor map. It is aligned to as many here.
pub(crate) const MAP_BYTES: usize = 128;

/// The arguments of a tensor map: u8, 2 dimensions, zeros outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MapArguments {
    /// Where the matrix begins.
    pub address: u64,
    /// Bytes of a row.
    pub row_bytes: u32,
    /// Bytes from one row to the next, a multiple of 16.
    pub row_pitch: u64,
    /// Rows of the matrix.
    pub rows: u32,
    /// Bytes of a row of a box.
    pub box_bytes: u32,
    /// Rows of a box.
    pub box_rows: u32,
    /// Whether boxes lie in shared memory with the 128-byte swizzle (PTX ISA, "Tensor swizzle modes"), or with none.
    pub swizzled: bool,
}

impl MapArguments {
    /// Packed values of `k` elements a row. A stage takes `step` of them, which are 256.
    pub fn values(address: u64, rows: u32, k: u32, step: u32, box_rows: u32) -> Self {
        Self {
            address,
            row_bytes: k / 2,
            row_pitch: u64::from(k / 2),
            rows,
            box_bytes: step / 2,
            box_rows,
            swizzled: true,
        }
    }
}
