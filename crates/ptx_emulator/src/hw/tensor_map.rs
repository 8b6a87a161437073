//! Tensor maps: the arguments of `cuTensorMapEncodeTiled` and `cuTensorMapEncodeIm2col`, the 128-byte object that
//! kernels receive, and the pieces of memory that a tensor copy moves.
//!
//! Sources: CUDA Driver API, "Tensor Map Object Management" (the argument rules, which [`TensorMapError`] quotes); PTX
//! ISA 5.5.1–5.5.8 (tensors, bounding boxes, im2col mode, out-of-boundary access, swizzles), 9.7.9.28
//! (`tensormap.replace`), 9.7.9.25 (`cp.async.bulk.tensor`). NVIDIA does not publish the layout of the object. This
//! crate defines its own layout, with a magic number and a checksum, so that other bytes are not mistaken for a tensor
//! map.
//!
//! Not modeled: the wide forms of im2col, copies through interleaved layouts ([`TensorMapError::Unsupported`]), and
//! stores of the padded sub-byte types ([`DataType::is_padded`]: `visit` treats them as loads).

use super::number;
use super::swizzle::Swizzle;

/// Maximum number of dimensions of a tensor.
pub const MAX_RANK: usize = 5;
/// Size of the opaque object.
pub const OBJECT_BYTES: usize = 128;
/// Alignment of the opaque object.
pub const OBJECT_ALIGN: u64 = 64;
/// Alignment of a copy's shared-memory address (PTX ISA 9.7.9.25, table of alignments).
pub const SHARED_ALIGN: u32 = 128;

/// Range of 18-bit shared-memory addresses. No GPU has more shared memory.
const SHARED_WINDOW: u32 = 1 << 18;
const MAX_BOX: u32 = 256;
const MAX_PIXELS: u32 = 1024;
const MAX_ELEMENT_STRIDE: u32 = 8;
const STRIDE_LIMIT: u64 = 1 << 40;
const DIM_LIMIT: u64 = 1 << 32;
const GRANULE: u64 = 16;
/// Elements per group of the padded types.
const PADDED_GROUP: i64 = 16;

/// `CUtensorMapDataType`, with the driver's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names are the driver's")]
pub enum DataType {
    U8 = 0,
    U16,
    U32,
    S32,
    U64,
    S64,
    F16,
    F32,
    F64,
    Bf16,
    F32Ftz,
    Tf32,
    Tf32Ftz,
    /// Sixteen packed 4-bit values in 8 bytes, in global and in shared memory.
    U4x16Align8,
    /// Sixteen packed 4-bit values, padded to 16 bytes in shared memory.
    U4x16Align16,
    /// Sixteen packed 6-bit values, padded to 16 bytes in shared memory.
    U6x16Align16,
}

impl DataType {
    const ALL: [DataType; 16] = [
        DataType::U8,
        DataType::U16,
        DataType::U32,
        DataType::S32,
        DataType::U64,
        DataType::S64,
        DataType::F16,
        DataType::F32,
        DataType::F64,
        DataType::Bf16,
        DataType::F32Ftz,
        DataType::Tf32,
        DataType::Tf32Ftz,
        DataType::U4x16Align8,
        DataType::U4x16Align16,
        DataType::U6x16Align16,
    ];

    /// Converts the driver's number.
    pub fn from_driver(code: u32) -> Option<Self> {
        Self::ALL.get(code as usize).copied()
    }

    /// Converts the number of `tensormap.replace.elemtype`, which orders three types differently (PTX ISA 9.7.9.28,
    /// table 33).
    pub fn from_ptx(code: u32) -> Option<Self> {
        match code {
            8 => Some(DataType::F32Ftz),
            9 => Some(DataType::F64),
            10 => Some(DataType::Bf16),
            _ => Self::from_driver(code),
        }
    }

    /// Bits per element in global memory.
    pub const fn bits(self) -> u32 {
        match self {
            DataType::U8 => 8,
            DataType::U16 | DataType::F16 | DataType::Bf16 => 16,
            DataType::U32 | DataType::S32 | DataType::F32 | DataType::F32Ftz | DataType::Tf32 | DataType::Tf32Ftz => 32,
            DataType::U64 | DataType::S64 | DataType::F64 => 64,
            DataType::U4x16Align8 | DataType::U4x16Align16 => 4,
            DataType::U6x16Align16 => 6,
        }
    }

    /// Bits per element in shared memory, including padding.
    pub const fn shared_bits(self) -> u32 {
        match self {
            DataType::U4x16Align16 | DataType::U6x16Align16 => 8,
            other => other.bits(),
        }
    }

    /// Converts elements that a copy has loaded. Both tf32 types round to nearest even, subnormals too, and give one
    /// NaN; on an H200, no type flushes subnormals, and stores convert nothing.
    pub fn convert_loaded(self, bytes: &mut [u8]) {
        if !matches!(self, DataType::Tf32 | DataType::Tf32Ftz) {
            return;
        }
        for word in bytes.as_chunks_mut().0 {
            *word = number::f32_to_tf32(u32::from_le_bytes(*word)).to_le_bytes();
        }
    }

    const fn is_float(self) -> bool {
        matches!(
            self,
            DataType::F16
                | DataType::F32
                | DataType::F64
                | DataType::Bf16
                | DataType::F32Ftz
                | DataType::Tf32
                | DataType::Tf32Ftz
        )
    }

    /// Whether a load leaves gaps in shared memory: 16 elements, then padding up to 16 bytes, which keeps its contents.
    pub const fn is_padded(self) -> bool {
        matches!(self, DataType::U4x16Align16 | DataType::U6x16Align16)
    }
}

/// `CUtensorMapInterleave`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Interleave {
    /// Channels are contiguous.
    #[default]
    None,
    /// Slices of 16 bytes.
    B16,
    /// Slices of 32 bytes.
    B32,
}

/// `CUtensorMapL2promotion`: a hint without effect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "sizes")]
pub enum L2Promotion {
    #[default]
    None,
    B64,
    B128,
    B256,
}

/// `CUtensorMapFloatOOBfill`: value in shared memory of elements outside the tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OobFill {
    /// Zero.
    #[default]
    Zero,
    /// The special NaN that `fma.oob` treats as zero.
    Nan,
}

/// Box that contains the pixels of a column, as offsets from the first and the last pixel of the tensor, by width,
/// height and depth: the corners that `cuTensorMapEncodeIm2col` takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PixelBox {
    /// Offsets from the first pixel.
    pub lower: [i16; 3],
    /// Offsets from the last pixel.
    pub upper: [i16; 3],
}

/// A tensor map: the arguments of `cuTensorMapEncodeTiled` or of `cuTensorMapEncodeIm2col`. Index 0 is the innermost
/// dimension.
///
/// The fields are public for reading. [`TensorMap::tiled`] and [`TensorMap::validate`] apply the driver's rules.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorMap {
    /// Element type.
    pub data_type: DataType,
    /// Number of dimensions in use, 1 to 5.
    pub rank: usize,
    /// Global address of the element at coordinate zero.
    pub global_address: u64,
    /// Elements in each dimension.
    pub dims: [u64; MAX_RANK],
    /// Bytes between consecutive indices in dimensions 1 …; `strides[0]` belongs to dimension 1.
    pub strides: [u64; MAX_RANK - 1],
    /// Elements of the box in each dimension. For an im2col map: channels per pixel and pixels per column.
    pub box_dims: [u32; MAX_RANK],
    /// Step between loaded elements in each dimension. Without interleaving, the first step is ignored.
    pub element_strides: [u32; MAX_RANK],
    /// Interleaved layout.
    pub interleave: Interleave,
    /// Shared-memory swizzle.
    pub swizzle: Swizzle,
    /// L2 fetch size hint.
    pub l2_promotion: L2Promotion,
    /// Fill of elements outside the tensor.
    pub oob_fill: OobFill,
    /// Box of the pixels. `None`: the map is not an im2col map.
    pub pixels: Option<PixelBox>,
}

/// Reason why a tensor map cannot be created or used. The message states the broken rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum TensorMapError {
    #[error("tensor rank is {0}; it must be 1 to 5")]
    Rank(usize),
    #[error("an interleaved tensor map has rank {0}; the rank must be at least 3")]
    InterleavedRank(usize),
    #[error("{name} has {got} entries, but rank {rank} needs {want}")]
    Entries { name: &'static str, got: usize, want: usize, rank: usize },
    #[error("global address {address:#x} must be a multiple of {align}")]
    GlobalAddress { address: u64, align: u64 },
    #[error("global dimension {index} is {dim}; it must be 1 to 2^32")]
    Dim { index: usize, dim: u64 },
    #[error("the innermost dimension is {dim}; it must be a multiple of {multiple} for this packed type")]
    PackedDim { dim: u64, multiple: u64 },
    #[error("stride of dimension {index} is {stride} bytes; it must be a multiple of {multiple} and below 2^40")]
    Stride { index: usize, stride: u64, multiple: u64 },
    #[error("an im2col tensor map has rank {0}; the rank must be 3 to 5")]
    Im2colRank(usize),
    #[error("a corner of the pixel box is {corner} in dimension {index}; it must be {least} to {most} for this rank")]
    PixelCorner { index: usize, corner: i32, least: i32, most: i32 },
    #[error("the pixel box is empty in dimension {index}")]
    EmptyPixelBox { index: usize },
    #[error("the column has {pixels} pixels; it must have 1 to 1024")]
    Pixels { pixels: u32 },
    #[error("the tensor map is {0}, but the copy is not")]
    Mode(&'static str),
    #[error("box dimension {index} is {dim}; it must be 1 to 256")]
    BoxDim { index: usize, dim: u32 },
    #[error("the box's innermost dimension is {bytes} bytes; it must be a multiple of 16")]
    BoxInnerBytes { bytes: u32 },
    #[error("the box's innermost dimension is {dim}; it must be 128 for this padded type")]
    PaddedBox { dim: u32 },
    #[error("element stride {index} is {stride}; it must be 1 to 8")]
    ElementStride { index: usize, stride: u32 },
    #[error("the box's innermost dimension is {bytes} bytes; the {swizzle:?} swizzle allows at most {span}")]
    BoxExceedsSwizzle { bytes: u32, swizzle: Swizzle, span: u32 },
    #[error("32-byte interleaving needs the 32-byte swizzle, found {0:?}")]
    InterleaveSwizzle(Swizzle),
    #[error("{data_type:?} cannot be used with {what}")]
    PackedType { data_type: DataType, what: &'static str },
    #[error("NaN fill needs a floating-point type, found {0:?}")]
    NanFill(DataType),
    #[error("the copy gives {got} coordinates for a tensor map of rank {rank}")]
    Coordinates { got: usize, rank: usize },
    #[error("a copy of four rows needs a tensor map of rank 2, found rank {rank}")]
    FourRows { rank: usize },
    #[error("shared-memory address {address:#x} of a tensor copy must be a multiple of {align}")]
    SharedAddress { address: u32, align: u32 },
    #[error("the box is {0} bytes; the shared-memory window has 256 KiB")]
    BoxBytes(u32),
    #[error("the innermost coordinate {coordinate} must be a multiple of {multiple} for this element type")]
    Coordinate { coordinate: i32, multiple: u32 },
    #[error("these 128 bytes are not a tensor map (uninitialized, overwritten, or not passed as one)")]
    NotATensorMap,
    #[error("this tensor map was changed by ordinary stores (its checksum is wrong)")]
    Corrupt,
    #[error("tensormap.replace: {0}")]
    Replace(&'static str),
    #[error("{0} is not modeled")]
    Unsupported(&'static str),
}

/// One contiguous piece of a tensor copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Global address. `None`: elements outside the tensor, which a load fills and a store skips.
    pub global: Option<u64>,
    /// Shared-memory address after the swizzle.
    pub shared: u32,
    /// Length in bytes.
    pub bytes: u32,
}

/// Field that `tensormap.replace` writes, with its ordinal if the field is an array (PTX ISA 9.7.9.28).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are PTX's")]
pub enum Field {
    GlobalAddress,
    Rank,
    BoxDim(usize),
    GlobalDim(usize),
    GlobalStride(usize),
    ElementStride(usize),
    ElemType,
    InterleaveLayout,
    SwizzleMode,
    SwizzleAtomicity,
    FillMode,
}

impl TensorMap {
    /// Creates a map and applies the driver's checks. `strides` are in bytes and omit the innermost dimension.
    ///
    /// # Errors
    /// The first rule of `cuTensorMapEncodeTiled` that the arguments break.
    #[expect(clippy::too_many_arguments, reason = "the driver's signature")]
    pub fn tiled(
        data_type: DataType,
        global_address: u64,
        dims: &[u64],
        strides: &[u64],
        box_dims: &[u32],
        element_strides: &[u32],
        interleave: Interleave,
        swizzle: Swizzle,
        l2_promotion: L2Promotion,
        oob_fill: OobFill,
    ) -> Result<Self, TensorMapError> {
        let rank = dims.len();
        if !(1..=MAX_RANK).contains(&rank) {
            return Err(TensorMapError::Rank(rank));
        }
        let count = |name, got, want| {
            let error = TensorMapError::Entries { name, got, want, rank };
            if got == want { Ok(()) } else { Err(error) }
        };
        count("strides", strides.len(), rank - 1)?;
        count("box", box_dims.len(), rank)?;
        count("element strides", element_strides.len(), rank)?;
        let map = TensorMap {
            data_type,
            rank,
            global_address,
            dims: padded(dims, 1),
            strides: padded(strides, 0),
            box_dims: padded(box_dims, 1),
            element_strides: padded(element_strides, 1),
            interleave,
            swizzle,
            l2_promotion,
            oob_fill,
            pixels: None,
        };
        map.validate()?;
        Ok(map)
    }

    /// Turns the map into an im2col map of the same tensor. A copy then moves some channels of the pixels in a column.
    /// The corners are given by width, height and depth.
    ///
    /// # Errors
    /// The first rule of `cuTensorMapEncodeIm2col` that the arguments break.
    pub fn im2col(
        mut self,
        lower: &[i32],
        upper: &[i32],
        channels_per_pixel: u32,
        pixels_per_column: u32,
    ) -> Result<Self, TensorMapError> {
        use TensorMapError as E;
        let rank = self.rank;
        let bits = match rank {
            3 => 16,
            4 => 8,
            5 => 5,
            _ => return Err(E::Im2colRank(rank)),
        };
        let (least, most) = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1);
        let mut pixels = PixelBox::default();
        for (corners, name, to) in
            [(lower, "lower corner", &mut pixels.lower), (upper, "upper corner", &mut pixels.upper)]
        {
            if corners.len() != rank - 2 {
                return Err(E::Entries { name, got: corners.len(), want: rank - 2, rank });
            }
            for (n, &corner) in corners.iter().enumerate() {
                if !(least..=most).contains(&corner) {
                    return Err(E::PixelCorner { index: n + 1, corner, least, most });
                }
                to[n] = corner as i16;
            }
        }
        self.pixels = Some(pixels);
        self.box_dims = padded(&[channels_per_pixel, pixels_per_column], 1);
        self.validate()?;
        Ok(self)
    }

    /// Checks every documented rule of `cuTensorMapEncodeTiled`.
    ///
    /// # Errors
    /// The first rule that the map breaks.
    pub fn validate(&self) -> Result<(), TensorMapError> {
        use TensorMapError as E;
        let ensure = |ok: bool, error: E| if ok { Ok(()) } else { Err(error) };
        let rank = self.rank;
        ensure((1..=MAX_RANK).contains(&rank), E::Rank(rank))?;
        let interleaved = self.interleave != Interleave::None;
        ensure(!interleaved || rank >= 3, E::InterleavedRank(rank))?;

        let padded = self.data_type.is_padded();
        let wide = self.interleave == Interleave::B32 || padded;
        let align = if wide { 2 * GRANULE } else { GRANULE };
        let address = self.global_address;
        ensure(address.is_multiple_of(align), E::GlobalAddress { address, align })?;
        for (index, &dim) in self.dims[..rank].iter().enumerate() {
            ensure((1..=DIM_LIMIT).contains(&dim), E::Dim { index, dim })?;
        }
        let multiple = match self.data_type {
            DataType::U4x16Align8 => 2,
            DataType::U4x16Align16 | DataType::U6x16Align16 => 128,
            _ => 1,
        };
        let dim = self.dims[0];
        ensure(dim.is_multiple_of(multiple), E::PackedDim { dim, multiple })?;
        for (index, &stride) in self.strides[..rank - 1].iter().enumerate() {
            let ok = stride.is_multiple_of(align) && stride < STRIDE_LIMIT;
            ensure(ok, E::Stride { index: index + 1, stride, multiple: align })?;
        }
        if let Some(pixels) = self.pixels {
            ensure(rank >= 3, E::Im2colRank(rank))?;
            for index in 1..rank - 1 {
                let last = self.dims[index] as i64 - 1 + i64::from(pixels.upper[index - 1]);
                ensure(i64::from(pixels.lower[index - 1]) <= last, E::EmptyPixelBox { index })?;
            }
            let pixels = self.box_dims[1];
            ensure((1..=MAX_PIXELS).contains(&pixels), E::Pixels { pixels })?;
        }
        let boxed = if self.pixels.is_some() { 1 } else { rank };
        for (index, &dim) in self.box_dims[..boxed].iter().enumerate() {
            ensure((1..=MAX_BOX).contains(&dim), E::BoxDim { index, dim })?;
        }
        for (index, &stride) in self.element_strides[..rank].iter().enumerate() {
            let ok = (1..=MAX_ELEMENT_STRIDE).contains(&stride);
            ensure(ok, E::ElementStride { index, stride })?;
        }
        ensure(!padded || self.box_dims[0] == 128, E::PaddedBox { dim: self.box_dims[0] })?;
        let bits = self.box_dims[0] * self.data_type.shared_bits();
        let bytes = bits.div_ceil(8);
        if !interleaved {
            let whole = bits.is_multiple_of(8 * GRANULE as u32);
            ensure(whole, E::BoxInnerBytes { bytes })?;
            let swizzle = self.swizzle;
            if let Some(span) = swizzle.span_bytes() {
                ensure(bytes <= span, E::BoxExceedsSwizzle { bytes, swizzle, span })?;
            }
        }
        if self.interleave == Interleave::B32 {
            ensure(self.swizzle == Swizzle::B32, E::InterleaveSwizzle(self.swizzle))?;
        }
        let data_type = self.data_type;
        let swizzles: &[Swizzle] = match data_type {
            DataType::U6x16Align16 => {
                ensure(!interleaved, E::PackedType { data_type, what: "interleaving" })?;
                &[Swizzle::None, Swizzle::B128, Swizzle::B128Atom32, Swizzle::B128Atom64]
            }
            DataType::U4x16Align16 => &[Swizzle::None, Swizzle::B128, Swizzle::B128Atom32],
            _ => &[self.swizzle],
        };
        let allowed = swizzles.contains(&self.swizzle);
        ensure(allowed, E::PackedType { data_type, what: "this swizzle" })?;
        let nan = self.oob_fill == OobFill::Nan;
        ensure(!nan || data_type.is_float(), E::NanFill(data_type))
    }

    /// Number of elements of the box in dimension `index` that a copy moves: every `element_strides`-th.
    fn box_steps(&self, index: usize) -> u32 {
        let strided = index > 0 || self.interleave != Interleave::None;
        let stride = if strided { self.element_strides[index] } else { 1 };
        self.box_dims[index].div_ceil(stride)
    }

    /// Bytes that a copy of the box spans in shared memory, including padding.
    pub fn box_bytes(&self) -> u32 {
        self.box_bits(self.data_type.shared_bits())
    }

    /// Bytes that a copy of the box adds to an mbarrier's transaction count: always the full box, including elements
    /// outside the tensor (PTX ISA 9.7.9.25), without padding (as DeepGEMM's fp8 × fp4 kernels expect).
    pub fn transaction_bytes(&self) -> u32 {
        self.box_bits(self.data_type.bits())
    }

    fn box_bits(&self, element_bits: u32) -> u32 {
        let elements: u64 = match self.pixels {
            Some(_) => u64::from(self.box_dims[0]) * u64::from(self.box_dims[1]),
            None => (0..self.rank).map(|index| u64::from(self.box_steps(index))).product(),
        };
        u32::try_from(elements * u64::from(element_bits) / 8).unwrap_or(u32::MAX)
    }

    /// Byte that is repeated for elements outside the tensor.
    ///
    /// The manual does not give the bits of `OOB-NaN`. All ones is a NaN in every floating-point type.
    pub fn fill_byte(&self) -> u8 {
        match self.oob_fill {
            OobFill::Zero => 0,
            OobFill::Nan => 0xff,
        }
    }

    /// The tensor that a store through this map writes: its rows are extended to a multiple of 16 bytes. The manual
    /// does not mention this. An H200 writes every 16-byte piece that starts inside the tensor completely, and also
    /// reduces into all of it.
    pub fn stored(&self) -> TensorMap {
        let mut map = self.clone();
        map.dims[0] = map.dims[0].next_multiple_of(self.coordinate_multiple().into());
        map
    }

    /// Required multiple of the innermost coordinate, in elements: 128 for padded types (PTX ISA, "Tensor Copy
    /// restrictions"; on a B200, another coordinate is an illegal instruction, triton-lang/triton#8982), and 16 bytes for
    /// others. The manual does not mention the latter. On an H200, another coordinate is an illegal instruction.
    fn coordinate_multiple(&self) -> u32 {
        if self.data_type.is_padded() { 128 } else { 128 / self.data_type.bits() }
    }

    /// Calls `visit` for every piece of the copy of the box at `coordinates` (innermost first). The box in shared
    /// memory starts at `shared`. The pieces come in shared-memory order before the swizzle. A piece never crosses a
    /// swizzle atom or the tensor's edge.
    ///
    /// # Errors
    /// If the map breaks a rule ([`TensorMap::validate`]), the number of coordinates is wrong, the shared address is
    /// misaligned, the box is too large, or a feature is not modeled.
    pub fn visit(&self, coordinates: &[i32], shared: u32, visit: impl FnMut(Piece)) -> Result<(), TensorMapError> {
        let Some(&column) = coordinates.first().filter(|_| coordinates.len() == self.rank) else {
            return Err(TensorMapError::Coordinates { got: coordinates.len(), rank: self.rank });
        };
        if self.pixels.is_some() {
            return Err(TensorMapError::Mode("an im2col map"));
        }
        self.visit_rows(column, shared, |number| self.row_address(coordinates, number), visit)
    }

    /// Like [`TensorMap::visit`], for a column of pixels of an im2col map. `coordinates` are the coordinates of a
    /// channel and of the first pixel. `offsets` are added to each pixel's width, height and depth (PTX ISA, "Im2col
    /// mode").
    ///
    /// # Errors
    /// Like [`TensorMap::visit`], or if the map is not an im2col map.
    pub fn visit_pixels(
        &self,
        coordinates: &[i32],
        offsets: &[u16],
        shared: u32,
        visit: impl FnMut(Piece),
    ) -> Result<(), TensorMapError> {
        let Some(&column) = coordinates.first().filter(|_| coordinates.len() == self.rank) else {
            return Err(TensorMapError::Coordinates { got: coordinates.len(), rank: self.rank });
        };
        let pixels = self.pixels.ok_or(TensorMapError::Mode("tiled"))?;
        self.validate()?;
        // Pixels in order: along the width, then the height and the depth, inside the pixel box; then the next image.
        let mut at: Vec<i64> = coordinates[1..].iter().map(|&coordinate| coordinate.into()).collect();
        let spatial = self.rank - 2;
        let mut rows = Vec::with_capacity(self.box_dims[1] as usize);
        for _ in 0..self.box_dims[1] {
            let inside = |(n, &at): (usize, &i64)| {
                let at = at + i64::from(if n < spatial { offsets.get(n).copied().unwrap_or(0) } else { 0 });
                u64::try_from(at).ok().filter(|&at| at < self.dims[n + 1]).map(|at| at.wrapping_mul(self.strides[n]))
            };
            let mut parts = at.iter().enumerate().map(inside);
            rows.push(parts.try_fold(self.global_address, |address, part| Some(address.wrapping_add(part?))));
            for (n, place) in at.iter_mut().enumerate() {
                *place += i64::from(self.element_strides[n + 1]);
                if n == spatial || *place <= self.dims[n + 1] as i64 - 1 + i64::from(pixels.upper[n]) {
                    break;
                }
                *place = pixels.lower[n].into();
            }
        }
        self.visit_rows(column, shared, |number| rows[number as usize], visit)
    }

    /// Map of the four rows that `.tile::gather4` and `.tile::scatter4` copy. Each row has the box's width.
    pub fn four_rows(self) -> TensorMap {
        let (mut box_dims, mut element_strides) = (self.box_dims, self.element_strides);
        (box_dims[1], element_strides[1]) = (4, 1);
        TensorMap { box_dims, element_strides, ..self }
    }

    /// Like [`TensorMap::visit`], for a map of [`TensorMap::four_rows`]. `coordinates` are a column and four rows (PTX
    /// ISA, "Tiled Mode: tile::gather4, tile::scatter4").
    ///
    /// # Errors
    /// Like [`TensorMap::visit`], or if the tensor does not have two dimensions.
    pub fn visit_four_rows(
        &self,
        coordinates: &[i32],
        shared: u32,
        visit: impl FnMut(Piece),
    ) -> Result<(), TensorMapError> {
        let &[column, ref rows @ ..] = coordinates else {
            return Err(TensorMapError::Coordinates { got: 0, rank: self.rank });
        };
        if self.rank != 2 || rows.len() != 4 {
            return Err(TensorMapError::FourRows { rank: self.rank });
        }
        self.visit_rows(column, shared, |number| self.row_address(&[column, rows[number as usize]], 0), visit)
    }

    /// Visits the rows of a box, starting at the innermost coordinate `column`. `row_address` returns the address of a
    /// row's start.
    fn visit_rows(
        &self,
        column: i32,
        shared: u32,
        row_address: impl Fn(u32) -> Option<u64>,
        mut visit: impl FnMut(Piece),
    ) -> Result<(), TensorMapError> {
        self.validate()?;
        if self.interleave != Interleave::None {
            return Err(TensorMapError::Unsupported("a copy through an interleaved tensor map"));
        }
        if !shared.is_multiple_of(SHARED_ALIGN) {
            return Err(TensorMapError::SharedAddress { address: shared, align: SHARED_ALIGN });
        }
        if self.box_bytes() > SHARED_WINDOW {
            return Err(TensorMapError::BoxBytes(self.box_bytes()));
        }
        let bits = i64::from(self.data_type.bits());
        let shared_bits = i64::from(self.data_type.shared_bits());
        // Elements of the inner row that stay contiguous in both memories: the whole row, or a group of a padded type.
        let elements = i64::from(self.box_dims[0]);
        let unit = if self.data_type.is_padded() { PADDED_GROUP } else { elements };
        let first = i64::from(column);
        let multiple = self.coordinate_multiple();
        if first % i64::from(multiple) != 0 {
            return Err(TensorMapError::Coordinate { coordinate: column, multiple });
        }
        let unit_bytes = unit * bits / 8;
        let outer: u32 = match self.pixels {
            Some(_) => self.box_dims[1],
            None => (1..self.rank).map(|index| self.box_steps(index)).product(),
        };
        for number in 0..outer {
            let row_start = row_address(number);
            let row = shared + number * (elements * shared_bits / 8) as u32;
            for from in (0..elements).step_by(unit as usize) {
                let at = row + (from * shared_bits / 8) as u32;
                // Bytes [0, unit_bytes) of the unit. The part [inside_from, inside_to) is inside the tensor.
                let start = (first + from) * bits / 8;
                let extent = (self.dims[0] as i64 * bits) / 8;
                let mut run = |from: i64, to: i64, row_start: Option<u64>| {
                    let global = row_start.map(|address| address.wrapping_add_signed(start + from));
                    self.visit_run(global, at + from as u32, (to - from) as u32, &mut visit);
                };
                if row_start.is_some() {
                    let inside_from = (-start).clamp(0, unit_bytes);
                    let inside_to = (extent - start).clamp(inside_from, unit_bytes);
                    run(0, inside_from, None);
                    run(inside_from, inside_to, row_start);
                    run(inside_to, unit_bytes, None);
                } else {
                    run(0, unit_bytes, None);
                }
            }
        }
        Ok(())
    }

    /// Global address of inner coordinate zero in row `number` of the box, if the row is inside the tensor.
    fn row_address(&self, coordinates: &[i32], mut number: u32) -> Option<u64> {
        let mut address = self.global_address;
        for (index, &coordinate) in coordinates.iter().enumerate().skip(1) {
            let steps = self.box_steps(index);
            let step = number % steps * self.element_strides[index];
            number /= steps;
            let at = i64::from(coordinate) + i64::from(step);
            let at = u64::try_from(at).ok().filter(|&at| at < self.dims[index])?;
            address = address.wrapping_add(at.wrapping_mul(self.strides[index - 1]));
        }
        Some(address)
    }

    /// Splits a run of consecutive bytes at swizzle atoms.
    fn visit_run(&self, global: Option<u64>, linear: u32, bytes: u32, visit: &mut impl FnMut(Piece)) {
        let atom = if self.swizzle == Swizzle::None { u32::MAX } else { self.swizzle.atom_bytes() };
        let mut done = 0;
        while done < bytes {
            let at = linear + done;
            let length = (atom - at % atom).min(bytes - done);
            let global = global.map(|address| address + u64::from(done));
            visit(Piece { global, shared: self.swizzle.apply(at), bytes: length });
            done += length;
        }
    }

    /// `tensormap.replace`: sets one field to the instruction's operand. Combinations of fields are checked when the
    /// map is used.
    ///
    /// # Errors
    /// If the ordinal or the value is outside the field's range.
    pub fn replace(&mut self, field: Field, value: u64) -> Result<(), TensorMapError> {
        use TensorMapError::Replace;
        const ORDINAL: TensorMapError = Replace("the ordinal must be below the tensor map's five dimensions");
        let small = u32::try_from(value);
        match field {
            Field::GlobalAddress => self.global_address = value,
            // The operand is the rank minus one.
            Field::Rank if value < MAX_RANK as u64 => self.rank = value as usize + 1,
            Field::Rank => {
                return Err(Replace("the rank (the operand plus one) must be 1 to 5"));
            }
            Field::BoxDim(index) => {
                let dim = small.ok().filter(|dim| (1..=MAX_BOX).contains(dim));
                *self.box_dims.get_mut(index).ok_or(ORDINAL)? =
                    dim.ok_or(Replace("a box dimension must be 1 to 256"))?;
            }
            Field::GlobalDim(index) => *self.dims.get_mut(index).ok_or(ORDINAL)? = value,
            Field::GlobalStride(index) => *self.strides.get_mut(index).ok_or(ORDINAL)? = value,
            Field::ElementStride(index) => {
                let stride = small.ok().filter(|stride| (1..=MAX_ELEMENT_STRIDE).contains(stride));
                *self.element_strides.get_mut(index).ok_or(ORDINAL)? =
                    stride.ok_or(Replace("an element stride must be 1 to 8"))?;
            }
            Field::ElemType => {
                let data_type = small.ok().and_then(DataType::from_ptx);
                self.data_type = data_type.ok_or(Replace("unknown element type"))?;
            }
            Field::InterleaveLayout => {
                self.interleave = match value {
                    0 => Interleave::None,
                    1 => Interleave::B16,
                    2 => Interleave::B32,
                    _ => return Err(Replace("unknown interleave layout")),
                };
            }
            Field::SwizzleMode => {
                self.swizzle = match value {
                    0 => Swizzle::None,
                    1 => Swizzle::B32,
                    2 => Swizzle::B64,
                    3 => Swizzle::B128,
                    4 => Swizzle::B96,
                    _ => return Err(Replace("unknown swizzle mode")),
                };
            }
            Field::SwizzleAtomicity => {
                let wide = matches!(
                    self.swizzle,
                    Swizzle::B128 | Swizzle::B128Atom32 | Swizzle::B128Atom32Flip8 | Swizzle::B128Atom64
                );
                self.swizzle = match value {
                    0 if !wide => self.swizzle,
                    0 => Swizzle::B128,
                    1..=3 if !wide => {
                        return Err(Replace("an atomicity above 16 bytes needs the 128-byte swizzle"));
                    }
                    1 => Swizzle::B128Atom32,
                    2 => Swizzle::B128Atom32Flip8,
                    3 => Swizzle::B128Atom64,
                    _ => return Err(Replace("unknown swizzle atomicity")),
                };
            }
            Field::FillMode => {
                self.oob_fill = match value {
                    0 => OobFill::Zero,
                    1 => OobFill::Nan,
                    _ => return Err(Replace("unknown fill mode")),
                };
            }
        }
        Ok(())
    }

    /// The map that 128 bytes of zeros represent. `tensormap.replace` can fill in its fields one by one, as in kernels
    /// that create maps on the device. [`TensorMap::validate`] rejects the map until the fields are set.
    pub const ZEROED: TensorMap = TensorMap {
        data_type: DataType::U8,
        rank: 1,
        interleave: Interleave::None,
        swizzle: Swizzle::None,
        l2_promotion: L2Promotion::None,
        oob_fill: OobFill::Zero,
        global_address: 0,
        dims: [0; MAX_RANK],
        strides: [0; MAX_RANK - 1],
        box_dims: [0; MAX_RANK],
        element_strides: [1; MAX_RANK],
        pixels: None,
    };

    /// Serializes the map to the 128-byte object.
    pub fn to_bytes(&self) -> [u8; OBJECT_BYTES] {
        let mut bytes = [0; OBJECT_BYTES];
        let mut at = 0;
        let mut put = |field: &[u8]| {
            bytes[at..at + field.len()].copy_from_slice(field);
            at += field.len();
        };
        put(&MAGIC);
        put(&[
            self.data_type as u8,
            self.rank as u8,
            self.interleave as u8,
            self.swizzle as u8,
            self.l2_promotion as u8,
            self.oob_fill as u8,
        ]);
        put(&self.global_address.to_le_bytes());
        self.dims.iter().for_each(|dim| put(&dim.to_le_bytes()));
        self.strides.iter().for_each(|stride| put(&stride.to_le_bytes()));
        // Box dimensions are at most 256, element strides at most 8.
        self.box_dims.iter().for_each(|&dim| put(&(dim as u16).to_le_bytes()));
        self.element_strides.iter().for_each(|&stride| put(&[stride as u8]));
        put(&[self.pixels.is_some() as u8]);
        let PixelBox { lower, upper } = self.pixels.unwrap_or_default();
        lower.iter().chain(&upper).for_each(|corner| put(&corner.to_le_bytes()));
        let sum = checksum(&bytes[..CHECKSUM_AT]);
        bytes[CHECKSUM_AT..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Reads the 128-byte object. The rules are not checked again (see [`TensorMap::validate`]).
    ///
    /// # Errors
    /// [`TensorMapError::NotATensorMap`] and [`TensorMapError::Corrupt`].
    pub fn from_bytes(bytes: &[u8; OBJECT_BYTES]) -> Result<Self, TensorMapError> {
        let mut rest = &bytes[..];
        let mut take = |length: usize| {
            let (field, after) = rest.split_at(length);
            rest = after;
            field
        };
        if take(MAGIC.len()) != MAGIC {
            return Err(TensorMapError::NotATensorMap);
        }
        if checksum(&bytes[..CHECKSUM_AT]).to_le_bytes() != bytes[CHECKSUM_AT..] {
            return Err(TensorMapError::Corrupt);
        }
        const CORRUPT: TensorMapError = TensorMapError::Corrupt;
        let codes = take(6);
        let u64_at = |field: &[u8]| field.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte));
        let rank = usize::from(codes[1]);
        if !(1..=MAX_RANK).contains(&rank) {
            return Err(CORRUPT);
        }
        Ok(TensorMap {
            data_type: DataType::from_driver(codes[0].into()).ok_or(CORRUPT)?,
            rank,
            interleave: pick(&[Interleave::None, Interleave::B16, Interleave::B32], codes[2])?,
            swizzle: pick(&SWIZZLES, codes[3])?,
            l2_promotion: pick(&[L2Promotion::None, L2Promotion::B64, L2Promotion::B128, L2Promotion::B256], codes[4])?,
            oob_fill: pick(&[OobFill::Zero, OobFill::Nan], codes[5])?,
            global_address: u64_at(take(8)),
            dims: std::array::from_fn(|_| u64_at(take(8))),
            strides: std::array::from_fn(|_| u64_at(take(8))),
            box_dims: std::array::from_fn(|_| u64_at(take(2)) as u32),
            element_strides: std::array::from_fn(|_| take(1)[0].into()),
            pixels: {
                let given = take(1)[0] != 0;
                let mut corners = || std::array::from_fn(|_| u64_at(take(2)) as i16);
                let pixels = PixelBox { lower: corners(), upper: corners() };
                given.then_some(pixels)
            },
        })
    }
}

const MAGIC: [u8; 8] = *b"ptxTMAP1";
const CHECKSUM_AT: usize = OBJECT_BYTES - 4;
/// In declaration order, which `as u8` numbers.
const SWIZZLES: [Swizzle; 8] = [
    Swizzle::None,
    Swizzle::B32,
    Swizzle::B64,
    Swizzle::B96,
    Swizzle::B128,
    Swizzle::B128Atom32,
    Swizzle::B128Atom32Flip8,
    Swizzle::B128Atom64,
];

fn pick<T: Copy>(values: &[T], code: u8) -> Result<T, TensorMapError> {
    values.get(usize::from(code)).copied().ok_or(TensorMapError::Corrupt)
}

fn padded<T: Copy, const N: usize>(values: &[T], fill: T) -> [T; N] {
    std::array::from_fn(|index| values.get(index).copied().unwrap_or(fill))
}

/// FNV-1a, 32 bits.
fn checksum(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, &byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Map of the launch file's example: u8, 128×512, box 128×64, 128-byte swizzle.
    fn example() -> TensorMap {
        map_2d(DataType::U8, [128, 512], 128, [128, 64], Swizzle::B128).unwrap()
    }

    fn map_2d(
        data_type: DataType,
        dims: [u64; 2],
        stride: u64,
        box_dims: [u32; 2],
        swizzle: Swizzle,
    ) -> Result<TensorMap, TensorMapError> {
        TensorMap::tiled(
            data_type,
            0x1000,
            &dims,
            &[stride],
            &box_dims,
            &[1, 1],
            Interleave::None,
            swizzle,
            L2Promotion::None,
            OobFill::Zero,
        )
    }

    fn pieces(map: &TensorMap, coordinates: &[i32], shared: u32) -> Vec<Piece> {
        let mut all = Vec::new();
        map.visit(coordinates, shared, |piece| all.push(piece)).unwrap();
        all
    }

    /// Three images of 5 × 4 pixels with 16 channels: the columns of a 3 × 3 filter.
    #[test]
    fn pixel_column_matches_the_inputs_of_a_convolution() {
        let (width, height, images) = (5i64, 4i64, 3i64);
        for (stride, padding) in [(1i64, 1i64), (2, 1), (2, 0)] {
            let steps = [1, stride as u32, stride as u32, 1];
            let tiled = TensorMap::tiled(
                DataType::U8,
                0x1000,
                &[16, 5, 4, 3],
                &[16, 16 * 5, 16 * 20],
                &[16, 1, 1, 1],
                &steps,
                Interleave::None,
                Swizzle::None,
                L2Promotion::None,
                OobFill::Zero,
            );
            let (lower, upper) = (-padding as i32, (padding - 2) as i32);
            let map = tiled.unwrap().im2col(&[lower; 2], &[upper; 2], 16, 7).unwrap();
            assert_eq!(TensorMap::from_bytes(&map.to_bytes()).unwrap(), map);
            // The first pixel under the filter, for each output in order.
            let outputs = |size: i64| (size + 2 * padding - 3) / stride + 1;
            let mut firsts = Vec::new();
            for n in 0..images {
                for q in 0..outputs(height) {
                    firsts.extend((0..outputs(width)).map(|p| [p * stride - padding, q * stride - padding, n]));
                }
            }
            for (begin, [s, r]) in [(0, [0u16, 0u16]), (1, [2, 1]), (3, [1, 2])] {
                let mut found = Vec::new();
                let [w, h, n] = firsts[begin].map(|at| at as i32);
                map.visit_pixels(&[0, w, h, n], &[s, r], 0, |piece| found.push(piece.global)).unwrap();
                let expected = (begin..begin + 7).map(|output| {
                    let [w, h, n] = *firsts.get(output)?;
                    let (w, h) = (w + i64::from(s), h + i64::from(r));
                    let inside = (0..width).contains(&w) && (0..height).contains(&h);
                    inside.then(|| 0x1000 + (16 * (w + 5 * (h + 4 * n))) as u64)
                });
                assert_eq!(found, expected.collect::<Vec<_>>(), "stride {stride}, padding {padding}, from {begin}");
            }
        }
    }

    #[test]
    fn each_driver_rule_has_its_own_error() {
        use TensorMapError as E;
        let broken = |change: fn(&mut TensorMap)| {
            let mut map = example();
            change(&mut map);
            map.validate().unwrap_err()
        };
        assert_eq!(broken(|m| m.rank = 0), E::Rank(0));
        assert_eq!(broken(|m| m.interleave = Interleave::B16), E::InterleavedRank(2));
        assert!(matches!(broken(|m| m.global_address += 8), E::GlobalAddress { align: 16, .. }));
        assert!(matches!(broken(|m| m.dims[1] = 0), E::Dim { index: 1, .. }));
        assert!(matches!(broken(|m| m.dims[0] = (1 << 32) + 1), E::Dim { index: 0, .. }));
        assert!(matches!(broken(|m| m.strides[0] = 136), E::Stride { index: 1, .. }));
        assert!(matches!(broken(|m| m.strides[0] = 1 << 40), E::Stride { index: 1, .. }));
        assert!(matches!(broken(|m| m.box_dims[1] = 257), E::BoxDim { index: 1, .. }));
        assert!(matches!(broken(|m| m.box_dims[0] = 0), E::BoxDim { index: 0, .. }));
        assert!(matches!(broken(|m| m.box_dims[0] = 24), E::BoxInnerBytes { bytes: 24 }));
        assert!(matches!(broken(|m| m.element_strides[1] = 9), E::ElementStride { index: 1, .. }));
        assert!(matches!(broken(|m| m.data_type = DataType::U16), E::BoxExceedsSwizzle { bytes: 256, span: 128, .. }));
        assert_eq!(broken(|m| m.oob_fill = OobFill::Nan), E::NanFill(DataType::U8));
        assert!(matches!(
            broken(|m| {
                m.data_type = DataType::U4x16Align8;
                m.dims[0] = 127;
            }),
            E::PackedDim { multiple: 2, .. }
        ));
        assert!(matches!(
            broken(|m| {
                m.data_type = DataType::U4x16Align16;
                m.box_dims[0] = 64;
            }),
            E::PaddedBox { dim: 64 }
        ));
        assert!(matches!(
            broken(|m| {
                m.data_type = DataType::U4x16Align16;
                m.swizzle = Swizzle::B128Atom64;
            }),
            E::PackedType { .. }
        ));
        let interleaved = interleaved(Interleave::B32, Swizzle::B128);
        assert_eq!(interleaved, Err(E::InterleaveSwizzle(Swizzle::B128)));
    }

    #[test]
    fn foreign_or_changed_object_is_detected() {
        let bytes = example().to_bytes();
        assert_eq!(TensorMap::from_bytes(&bytes), Ok(example()));
        assert_eq!(TensorMap::from_bytes(&[0; 128]), Err(TensorMapError::NotATensorMap));
        for at in MAGIC.len()..OBJECT_BYTES {
            let mut changed = bytes;
            changed[at] ^= 0x10;
            assert_eq!(TensorMap::from_bytes(&changed), Err(TensorMapError::Corrupt), "byte {at}");
        }
    }

    #[test]
    fn rows_outside_the_tensor_are_filled_and_counted() {
        let map = map_2d(DataType::F16, [20, 3], 48, [16, 4], Swizzle::None).unwrap();
        assert_eq!(map.box_bytes(), 16 * 4 * 2);
        let inside = |global, shared, bytes| Piece { global: Some(global), shared, bytes };
        let fill = |shared, bytes| Piece { global: None, shared, bytes };
        assert_eq!(
            pieces(&map, &[8, 1], 256),
            [
                inside(0x1000 + 48 + 16, 256, 24),
                fill(256 + 24, 8),
                inside(0x1000 + 96 + 16, 288, 24),
                fill(288 + 24, 8),
                fill(320, 32),
                fill(352, 32),
            ]
        );
        // Negative coordinates: the first eight elements and the first row are outside.
        assert_eq!(pieces(&map, &[-8, -1], 0)[..3], [fill(0, 32), fill(32, 16), inside(0x1000, 48, 16)]);
        let error = TensorMapError::Coordinate { coordinate: 4, multiple: 8 };
        assert_eq!(map.visit(&[4, 0], 0, |_| ()), Err(error), "8 bytes is not a multiple of 16");
    }

    #[test]
    fn swizzle_depends_on_the_shared_address_of_a_row() {
        let map = example();
        let all = pieces(&map, &[0, 0], 0x400);
        assert_eq!(all.len(), 64 * 8);
        // Row 3 from a 1024-byte boundary: the fourth line in PTX ISA 5.5.7 is 3 2 1 0 7 6 5 4.
        let row: Vec<u32> = all[24..32].iter().map(|piece| (piece.shared & 127) / 16).collect();
        assert_eq!(row, [3, 2, 1, 0, 7, 6, 5, 4]);
        // One line later, the same row is in the fifth line of the pattern.
        let shifted = pieces(&map, &[0, 0], 0x480);
        let row: Vec<u32> = shifted[24..32].iter().map(|piece| (piece.shared & 127) / 16).collect();
        assert_eq!(row, [4, 5, 6, 7, 0, 1, 2, 3]);
    }

    #[test]
    fn four_rows_are_contiguous_in_shared_memory() {
        let map = map_2d(DataType::U8, [64, 8], 64, [32, 1], Swizzle::None).unwrap().four_rows();
        assert_eq!(map.transaction_bytes(), 4 * 32);
        let mut found = Vec::new();
        map.visit_four_rows(&[32, 5, 0, 8, 5], 128, |piece| found.push(piece)).unwrap();
        let row = |number: u32, row: Option<u64>| Piece {
            global: row.map(|row| 0x1000 + row * 64 + 32),
            shared: 128 + number * 32,
            bytes: 32,
        };
        assert_eq!(found, [row(0, Some(5)), row(1, Some(0)), row(2, None), row(3, Some(5))]);
    }

    #[test]
    fn element_strides_skip_rows() {
        let mut map = map_2d(DataType::U8, [16, 64], 16, [16, 8], Swizzle::None).unwrap();
        map.element_strides = [4, 3, 1, 1, 1];
        assert_eq!(map.box_bytes(), 16 * 3, "ceil(8 / 3) rows; the innermost stride is ignored");
        let rows: Vec<_> = pieces(&map, &[0, 2], 0).iter().map(|piece| piece.global).collect();
        assert_eq!(rows, [2, 5, 8].map(|row| Some(0x1000 + 16 * row)));
    }

    #[test]
    fn packed_4_bit_elements_are_copied_as_bytes() {
        let map = map_2d(DataType::U4x16Align8, [64, 8], 32, [64, 8], Swizzle::B32).unwrap();
        assert_eq!(map.box_bytes(), 64 * 8 / 2);
        assert_eq!(pieces(&map, &[32, 0], 0)[0].global, Some(0x1000 + 16));
        let error = map.visit(&[1, 0], 0, |_| ()).unwrap_err();
        assert_eq!(error, TensorMapError::Coordinate { coordinate: 1, multiple: 32 });
    }

    /// PTX ISA 5.5.1.1.1: sixteen contiguous elements, then 64 or 32 bits of padding that is not written.
    #[test]
    fn padded_types_are_spread_over_sixteen_byte_groups() {
        for (data_type, data) in [(DataType::U4x16Align16, 8u64), (DataType::U6x16Align16, 12)] {
            let map = map_2d(data_type, [256, 8], 256, [128, 2], Swizzle::B128).unwrap();
            assert_eq!((map.box_bytes(), map.transaction_bytes()), (256, 2 * 8 * data as u32));
            let all = pieces(&map, &[128, 1], 0x400);
            assert_eq!(all.len(), 2 * 8);
            let group = |row: u64, group: u64| Piece {
                global: Some(0x1000 + (1 + row) * 256 + (8 + group) * data),
                // Row 1 is in the second line of the pattern: 1 0 3 2 5 4 7 6.
                shared: (0x400 + row * 128 + (group ^ row) * 16) as u32,
                bytes: data as u32,
            };
            assert_eq!((all[3], all[8 + 3]), (group(0, 3), group(1, 3)));
            assert!(pieces(&map, &[256, 0], 0).iter().all(|piece| piece.global.is_none()));
            let error = TensorMapError::Coordinate { coordinate: 64, multiple: 128 };
            assert_eq!(map.visit(&[64, 0], 0, |_| ()), Err(error));
        }
    }

    #[test]
    fn box_larger_than_shared_memory_is_refused() {
        let map = TensorMap::tiled(
            DataType::U8,
            0,
            &[256; 5],
            &[256, 1 << 16, 1 << 24, 1 << 32],
            &[256; 5],
            &[1; 5],
            Interleave::None,
            Swizzle::None,
            L2Promotion::None,
            OobFill::Zero,
        );
        let error = map.unwrap().visit(&[0; 5], 0, |_| ()).unwrap_err();
        assert_eq!(error, TensorMapError::BoxBytes(u32::MAX), "2^40 bytes, saturated");
    }

    fn interleaved(interleave: Interleave, swizzle: Swizzle) -> Result<TensorMap, TensorMapError> {
        let (promotion, fill) = (L2Promotion::None, OobFill::Zero);
        let (dims, strides, shape) = ([64; 3], [64, 4096], [32, 2, 2]);
        TensorMap::tiled(DataType::U8, 0x1000, &dims, &strides, &shape, &[1; 3], interleave, swizzle, promotion, fill)
    }

    #[test]
    fn unsupported_and_malformed_copies_are_refused() {
        let interleaved = interleaved(Interleave::B16, Swizzle::None);
        let error = interleaved.unwrap().visit(&[0, 0, 0], 0, |_| ()).unwrap_err();
        assert!(matches!(error, TensorMapError::Unsupported(_)));
        assert!(matches!(example().visit(&[0], 0, |_| ()), Err(TensorMapError::Coordinates { .. })));
        assert!(matches!(example().visit(&[0, 0], 64, |_| ()), Err(TensorMapError::SharedAddress { .. })));
    }

    #[test]
    fn replace_edits_one_field_and_rejects_unlisted_values() {
        let mut map = example();
        map.replace(Field::Rank, 2).unwrap();
        map.replace(Field::GlobalDim(2), 7).unwrap();
        map.replace(Field::GlobalStride(1), 4096).unwrap();
        map.replace(Field::BoxDim(2), 3).unwrap();
        map.replace(Field::SwizzleMode, 3).unwrap();
        map.replace(Field::SwizzleAtomicity, 1).unwrap();
        map.replace(Field::ElemType, 9).unwrap();
        map.replace(Field::GlobalAddress, 0x2000).unwrap();
        assert_eq!((map.rank, map.dims[2], map.strides[1], map.box_dims[2]), (3, 7, 4096, 3));
        assert_eq!((map.swizzle, map.data_type), (Swizzle::B128Atom32, DataType::F64));
        assert_eq!(TensorMap::from_bytes(&map.to_bytes()), Ok(map.clone()));
        assert!(map.replace(Field::Rank, 5).is_err());
        assert!(map.replace(Field::BoxDim(5), 1).is_err());
        assert!(map.replace(Field::ElemType, 16).is_err());
        map.replace(Field::SwizzleMode, 2).unwrap();
        assert!(map.replace(Field::SwizzleAtomicity, 3).is_err());
    }

    /// Compares table 33 of PTX ISA 9.7.9.28 with the driver's enumeration.
    #[test]
    fn element_type_numbers_differ_between_ptx_and_the_driver() {
        let by_ptx: Vec<_> = (0..17).map(DataType::from_ptx).collect();
        use DataType::*;
        let table = [
            U8,
            U16,
            U32,
            S32,
            U64,
            S64,
            F16,
            F32,
            F32Ftz,
            F64,
            Bf16,
            Tf32,
            Tf32Ftz,
            U4x16Align8,
            U4x16Align16,
            U6x16Align16,
        ];
        assert_eq!(by_ptx[..16], table.map(Some));
        assert_eq!(by_ptx[16], None);
    }

    proptest! {
        /// Any fields give an error or pieces inside the box, never a panic.
        #[test]
        fn map_with_any_fields_is_used_or_refused(
            edits in prop::collection::vec((0u8..11, 0usize..6, any::<u64>(), 0u32..64), 1..12),
            coordinates in prop::collection::vec(any::<i32>(), 0..6),
            shared in 0u32..1 << 18,
        ) {
            let mut map = example();
            for (field, index, value, shift) in edits {
                let field = [
                    Field::GlobalAddress,
                    Field::Rank,
                    Field::BoxDim(index),
                    Field::GlobalDim(index),
                    Field::GlobalStride(index),
                    Field::ElementStride(index),
                    Field::ElemType,
                    Field::InterleaveLayout,
                    Field::SwizzleMode,
                    Field::SwizzleAtomicity,
                    Field::FillMode,
                ][usize::from(field)];
                let _ = map.replace(field, value >> shift);
            }
            prop_assert_eq!(TensorMap::from_bytes(&map.to_bytes()), Ok(map.clone()));
            let mut bytes = 0;
            if map.visit(&coordinates, shared, |piece| bytes += piece.bytes).is_ok() {
                prop_assert_eq!(bytes, map.transaction_bytes());
            }
        }

        /// Every byte of the box in shared memory is written exactly once. Elements inside the tensor come from the
        /// address that the strides give.
        #[test]
        fn copy_covers_its_box_once(
            swizzle in 0usize..3,
            rows in 1u32..20,
            x in (-5i32..9).prop_map(|pieces| 8 * pieces),
            y in -5i32..30,
            line in 0u32..8,
        ) {
            let (swizzle, inner) = [(Swizzle::None, 64), (Swizzle::B64, 32), (Swizzle::B128, 64)][swizzle];
            let (width, height) = (56u64, 24u64);
            let map = map_2d(DataType::U16, [width, height], 112, [inner, rows], swizzle).unwrap();
            let shared = line * 128;
            let mut source = std::collections::BTreeMap::new();
            for piece in pieces(&map, &[x, y], shared) {
                for byte in 0..piece.bytes {
                    let from = piece.global.map(|address| address + u64::from(byte));
                    prop_assert!(source.insert(piece.shared + byte, from).is_none());
                }
            }
            prop_assert_eq!(source.len() as u32, map.box_bytes());
            for row in 0..rows {
                for column in 0..inner {
                    let (gx, gy) = (i64::from(x) + i64::from(column), i64::from(y) + i64::from(row));
                    let inside = (0..width as i64).contains(&gx) && (0..height as i64).contains(&gy);
                    let expected = inside.then(|| 0x1000 + gy as u64 * 112 + gx as u64 * 2);
                    let at = swizzle.apply(shared + (row * inner + column) * 2);
                    prop_assert_eq!(source[&at], expected);
                }
            }
        }
    }
}
