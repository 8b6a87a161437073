//! Arguments of a kernel's tensor map. A backend encodes them.

/// Size and alignment of a tensor map in bytes.
pub const MAP_BYTES: usize = 128;

/// Arguments of a tensor map: u8, 2 dimensions, zeros outside the matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MapArguments {
    /// Address of the matrix.
    pub address: u64,
    /// Bytes per row.
    pub row_bytes: u32,
    /// Distance between rows in bytes, a multiple of 16.
    pub row_pitch: u64,
    /// Number of rows of the matrix.
    pub rows: u32,
    /// Bytes per row of a box.
    pub box_bytes: u32,
    /// Rows of a box.
    pub box_rows: u32,
    /// Whether boxes in shared memory have the 128-byte swizzle (PTX ISA, "Tensor swizzle modes"). `false`: no swizzle.
    pub swizzled: bool,
}

impl MapArguments {
    /// Describes packed values of `k` elements per row. `step`: elements of a row per stage, 256.
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
