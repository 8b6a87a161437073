//! Descriptors that tell the tensor cores where a matrix is in shared memory and what to compute.
//!
//! PTX ISA 9.7.15.5.1.2 (`wgmma` matrix descriptors), 9.7.16.3–9.7.16.4 (`tcgen05` shared-memory and instruction
//! descriptors, major-ness, canonical layouts), 9.7.16.2 (legal shapes), 9.7.16.10.1–9.7.16.10.7 (transposition, type
//! and scale-factor combinations). Bit positions were compared with CUTLASS's `mma_sm90_desc.hpp` and
//! `mma_sm100_desc.hpp`.
//!
//! Decoding rejects everything that the manual forbids. Each violation has its own [`DescriptorError`].

use super::number::{self, Format};
use super::swizzle::Swizzle;

/// Error in a descriptor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum DescriptorError {
    #[error("reserved bits (mask {mask:#x}) of the {what} {value:#x} must be zero")]
    Reserved { what: &'static str, value: u64, mask: u64 },
    #[error("bits 46-48 of the shared-memory descriptor {value:#x} are {got:#05b}; tcgen05 requires 0b001")]
    Version { value: u64, got: u64 },
    #[error("swizzle code {0} of the shared-memory descriptor is undefined")]
    Swizzle(u64),
    #[error("{what} {code} is not defined for {kind}")]
    Type { what: &'static str, code: u32, kind: MmaKind },
    #[error("M = {m} is not valid for {kind} with cta_group::{cta_group}{}", ws(*weight_stationary))]
    M { m: u32, kind: MmaKind, cta_group: u32, weight_stationary: bool },
    #[error("N = {n} is not valid for {kind}, M = {m}, cta_group::{cta_group}{}", ws(*weight_stationary))]
    N { n: u32, m: u32, kind: MmaKind, cta_group: u32, weight_stationary: bool },
    #[error("N = {n} is not valid with an 8-bit transposed B; N must be a multiple of {multiple}")]
    TransposedN { n: u32, multiple: u32 },
    #[error("{kind} does not support {what}")]
    NotForKind { kind: MmaKind, what: &'static str },
    #[error("a {bits}-bit matrix in {major:?}-major order cannot have the {swizzle:?} swizzle")]
    Layout { bits: u32, major: Major, swizzle: Swizzle },
    #[error(
        "the row of {bytes} bytes along K that starts at {start:#x} crosses the end of its {swizzle:?} swizzle span"
    )]
    CrossesSpan { start: u32, bytes: u32, swizzle: Swizzle },
    #[error("scale factor id {id} is not valid for {vector:?}")]
    ScaleId { id: u32, vector: ScaleVector },
    #[error("{kind} with {scale:?} scales does not support {vector:?}")]
    ScaleVector { kind: MmaKind, scale: ScaleType, vector: ScaleVector },
    #[error("{0} is not modeled")]
    Unsupported(&'static str),
}

fn ws(weight_stationary: bool) -> &'static str {
    if weight_stationary { ".ws" } else { "" }
}

/// Bits `from..to` of `value`.
const fn field(value: u64, from: u32, to: u32) -> u64 {
    value >> from & ((1 << (to - from)) - 1)
}

/// Dimension along which a matrix's elements are contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Major {
    /// Along K, the dimension of the sum: not transposed.
    K,
    /// Along M (of A) or N (of B): transposed.
    Mn,
}

/// A multiplicand in shared memory, as described by a matrix descriptor.
///
/// The manual writes layouts for elements "normalized to 128 bits". All counts here are therefore in *chunks* of 16
/// bytes, which stay contiguous under every swizzle of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SharedMatrix {
    /// Address of the first element, in bytes from the start of the CTA's shared window (18 bits).
    pub start: u32,
    /// Leading dimension byte offset (LBO).
    pub leading: u32,
    /// Stride dimension byte offset (SBO).
    pub stride: u32,
    /// Swizzle of the matrix.
    pub swizzle: Swizzle,
}

/// Bytes per chunk.
pub const CHUNK_BYTES: u32 = 16;
/// Unit of the address fields: `matrix-descriptor-encode(x) = (x & 0x3FFFF) >> 4`.
const ENCODE_SHIFT: u32 = 4;

impl SharedMatrix {
    /// Decodes a `wgmma` descriptor (`sm_90a`).
    ///
    /// # Errors
    /// Reserved bits set, or a base offset, which is not modeled.
    pub fn wgmma(bits: u64) -> Result<Self, DescriptorError> {
        // Reserved bits: 14-15, 30-31, 46-48 and 52-61.
        check_reserved("wgmma descriptor", bits, 0x3ff1_c000_c000_c000)?;
        let swizzle = match field(bits, 62, 64) {
            0 => Swizzle::None,
            1 => Swizzle::B128,
            2 => Swizzle::B64,
            _ => Swizzle::B32,
        };
        Self::common(bits, swizzle)
    }

    /// Decodes a `tcgen05` descriptor (`sm_100` and later; PTX ISA 9.7.16.4.1, table 40).
    ///
    /// A descriptor without its [version](Self::has_version) is decoded like one with it.
    ///
    /// # Errors
    /// Reserved bits set, a wrong version or swizzle code, or something not modeled (base offset, absolute address).
    pub fn tcgen05(bits: u64) -> Result<Self, DescriptorError> {
        let version = field(bits, 46, 49);
        if version > 0b001 {
            return Err(DescriptorError::Version { value: bits, got: version });
        }
        // Reserved bits: 14-15, 30-31 and 53-60.
        check_reserved("shared-memory descriptor", bits, 0x1fe0_0000_c000_c000)?;
        let swizzle = match field(bits, 61, 64) {
            0 => Swizzle::None,
            1 => Swizzle::B128Atom32,
            2 => Swizzle::B128,
            4 => Swizzle::B64,
            6 => Swizzle::B32,
            code => return Err(DescriptorError::Swizzle(code)),
        };
        if field(bits, 52, 53) == 1 {
            return Err(DescriptorError::Unsupported("the absolute leading-dimension address of sm_103a"));
        }
        Self::common(bits, swizzle)
    }

    /// Whether a `tcgen05` descriptor has the version that the manual requires. Shipped kernels of Triton 3.3 to 3.5 leave
    /// the version zero, and their products are right on B200s.
    pub fn has_version(bits: u64) -> bool {
        field(bits, 46, 49) == 0b001
    }

    fn common(bits: u64, swizzle: Swizzle) -> Result<Self, DescriptorError> {
        if field(bits, 49, 52) != 0 && swizzle != Swizzle::None {
            return Err(DescriptorError::Unsupported("a matrix base offset other than zero"));
        }
        let bytes = |from| (field(bits, from, from + 14) as u32) << ENCODE_SHIFT;
        Ok(SharedMatrix { start: bytes(0), leading: bytes(16), stride: bytes(32), swizzle })
    }

    /// Rows (of 128-bit chunks) per swizzle atom in the strided direction.
    const fn atom_rows(&self) -> u32 {
        match self.swizzle {
            Swizzle::B128Atom32 => 4,
            _ => 8,
        }
    }

    /// Chunks per swizzle atom in the contiguous direction.
    fn atom_chunks(&self) -> u32 {
        self.swizzle.span_bytes().map_or(1, |span| span / CHUNK_BYTES)
    }

    /// Shared-memory address of a 16-byte chunk (PTX ISA 9.7.16.3.3, canonical layouts).
    ///
    /// K-major: `row` is the index in M or N, `chunk` counts 16 bytes along K. MN-major: `row` is the index in K,
    /// `chunk` counts 16 bytes along M or N.
    pub fn chunk_address(&self, major: Major, row: u32, chunk: u32) -> u32 {
        let (rows, chunks) = (self.atom_rows(), self.atom_chunks());
        let (in_rows, row_atom) = (row % rows, row / rows);
        let (in_chunks, chunk_atom) = (chunk % chunks, chunk / chunks);
        let in_atom = (in_rows * chunks + in_chunks) * CHUNK_BYTES;
        let atom = match (major, self.swizzle) {
            (Major::K, Swizzle::None) => row_atom * self.stride + chunk_atom * self.leading,
            // The offset is "not used, assumed to be 1": the next chunk follows directly.
            (Major::K, _) => row_atom * self.stride + (chunk - in_chunks) * CHUNK_BYTES,
            (Major::Mn, Swizzle::None) => row_atom * self.leading + chunk_atom * self.stride,
            (Major::Mn, _) => row_atom * self.stride + chunk_atom * self.leading,
        };
        self.swizzle.apply(self.start + atom + in_atom)
    }

    /// Checks that the descriptor's layout allows elements of `element_bits` in this order (PTX ISA 9.7.16.10.3, table
    /// 54, and 9.7.16.10.6, table 55), and that a K-major row of `k_bytes` stays inside its swizzle span.
    ///
    /// # Errors
    /// [`DescriptorError::Layout`] and [`DescriptorError::CrossesSpan`].
    pub fn check(&self, major: Major, element_bits: u32, k_bytes: u32) -> Result<(), DescriptorError> {
        let swizzle = self.swizzle;
        let ok = match (major, element_bits) {
            (Major::K, _) => swizzle != Swizzle::B128Atom32,
            (Major::Mn, 8 | 16) => swizzle != Swizzle::B128Atom32,
            (Major::Mn, 32) => swizzle == Swizzle::B128Atom32,
            (Major::Mn, _) => false,
        };
        if !ok {
            return Err(DescriptorError::Layout { bits: element_bits, major, swizzle });
        }
        match swizzle.span_bytes() {
            Some(span) if major == Major::K && self.start % span + k_bytes > span => {
                Err(DescriptorError::CrossesSpan { start: self.start, bytes: k_bytes, swizzle })
            }
            _ => Ok(()),
        }
    }
}

fn check_reserved(what: &'static str, value: u64, mask: u64) -> Result<(), DescriptorError> {
    let set = value & mask;
    if set == 0 { Ok(()) } else { Err(DescriptorError::Reserved { what, value, mask: set }) }
}

/// `.kind` of `tcgen05.mma`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names are PTX's")]
pub enum MmaKind {
    F16,
    Tf32,
    F8f6f4,
    I8,
    Mxf8f6f4,
    Mxf4,
    Mxf4nvf4,
}

impl std::fmt::Display for MmaKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            MmaKind::F16 => ".kind::f16",
            MmaKind::Tf32 => ".kind::tf32",
            MmaKind::F8f6f4 => ".kind::f8f6f4",
            MmaKind::I8 => ".kind::i8",
            MmaKind::Mxf8f6f4 => ".kind::mxf8f6f4",
            MmaKind::Mxf4 => ".kind::mxf4",
            MmaKind::Mxf4nvf4 => ".kind::mxf4nvf4",
        })
    }
}

/// Element type of A or B.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names are PTX's")]
pub enum Element {
    F16,
    Bf16,
    Tf32,
    E4m3,
    E5m2,
    E2m3,
    E3m2,
    E2m1,
    U8,
    S8,
}

impl Element {
    /// Bits per value.
    pub const fn bits(self) -> u32 {
        match self {
            Element::F16 | Element::Bf16 => 16,
            Element::Tf32 => 32,
            Element::E4m3 | Element::E5m2 | Element::U8 | Element::S8 => 8,
            Element::E2m3 | Element::E3m2 => 6,
            Element::E2m1 => 4,
        }
    }

    /// Floating-point format; `None` for integers. `tf32` is the 19-bit format of [`number::TF32`].
    pub const fn format(self) -> Option<Format> {
        Some(match self {
            Element::F16 => number::F16,
            Element::Bf16 => number::BF16,
            Element::Tf32 => number::TF32,
            Element::E4m3 => number::E4M3,
            Element::E5m2 => number::E5M2,
            Element::E2m3 => number::E2M3,
            Element::E3m2 => number::E3M2,
            Element::E2m1 => number::E2M1,
            Element::U8 | Element::S8 => return None,
        })
    }
}

/// Element type of D.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names are PTX's")]
pub enum Accumulator {
    F16,
    F32,
    S32,
}

/// Type of the scale factors of both A and B.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names are PTX's")]
pub enum ScaleType {
    Ue4m3,
    Ue8m0,
}

/// `.scale_vec::NX`: scale factors per row over the K of one MMA (PTX ISA 9.7.16.10.7.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleVector {
    /// One scale factor: `.block32` of `mxf8f6f4`.
    X1 = 1,
    /// Two scale factors: `.block32` of the 4-bit kinds.
    X2 = 2,
    /// Four scale factors: `.block16`.
    X4 = 4,
}

/// A decoded `tcgen05` instruction descriptor (PTX ISA 9.7.16.4.2, tables 42 to 44).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct InstructionDescriptor {
    /// Kind of the instruction that the descriptor was decoded for.
    pub kind: MmaKind,
    /// Rows of A and D.
    pub m: u32,
    /// Columns of B and D.
    pub n: u32,
    /// Extent of the sum, determined by kind and sparsity.
    pub k: u32,
    /// Type of D.
    pub d: Accumulator,
    /// Type of A's elements.
    pub a: Element,
    /// Type of B's elements.
    pub b: Element,
    /// `true` if A is negated.
    pub negate_a: bool,
    /// `true` if B is negated.
    pub negate_b: bool,
    /// Order of A in shared memory.
    pub major_a: Major,
    /// Order of B in shared memory.
    pub major_b: Major,
    /// `true` if A is sparse.
    pub sparse: bool,
    /// Sparsity selector.
    pub sparsity_selector: u32,
    /// `true` if integer results saturate.
    pub saturate: bool,
    /// Maximum shift for the reuse of B in `.ws`: 0, 8, 16 or 32.
    pub max_shift: u32,
    /// Scale factor type of the block-scaled kinds.
    pub scale: Option<ScaleType>,
    /// Scale factor A id.
    pub scale_a_id: u32,
    /// Scale factor B id.
    pub scale_b_id: u32,
}

impl InstructionDescriptor {
    /// Decodes `bits` for an instruction of this kind, `cta_group` (1 or 2) and form. Checks shape and types.
    ///
    /// # Errors
    /// The first rule that the descriptor breaks.
    pub fn decode(kind: MmaKind, cta_group: u32, weight_stationary: bool, bits: u32) -> Result<Self, DescriptorError> {
        let get = |from, to| field(bits.into(), from, to) as u32;
        let flag = |bit| get(bit, bit + 1) == 1;
        let major = |bit| if flag(bit) { Major::Mn } else { Major::K };
        let scaled = matches!(kind, MmaKind::Mxf8f6f4 | MmaKind::Mxf4 | MmaKind::Mxf4nvf4);
        let four_bit = matches!(kind, MmaKind::Mxf4 | MmaKind::Mxf4nvf4);
        let reserved: u64 = match (scaled, four_bit) {
            // Reserved: bits 6, 23, 29.
            (false, _) => 0x2080_0040,
            // Reserved: bits 0-1, 3, 6, 24-26, 31.
            (true, false) => 0x8700_004b,
            // Reserved: bits 0-1, 3, 6, 12, 24-26.
            (true, true) => 0x0700_104b,
        };
        check_reserved("instruction descriptor", bits.into(), reserved)?;
        let b_bits = if four_bit { get(10, 12) } else { get(10, 13) };
        let sparse = flag(2);
        if four_bit && flag(31) {
            return Err(DescriptorError::Unsupported("K = 96 of sm_103a"));
        }
        let dense_k = match kind {
            MmaKind::F16 => 16,
            MmaKind::Tf32 => 8,
            MmaKind::F8f6f4 | MmaKind::I8 | MmaKind::Mxf8f6f4 => 32,
            MmaKind::Mxf4 | MmaKind::Mxf4nvf4 => 64,
        };
        let this = InstructionDescriptor {
            kind,
            m: if scaled { get(27, 29) << 7 } else { get(24, 29) << 4 },
            n: get(17, 23) << 3,
            k: if sparse { 2 * dense_k } else { dense_k },
            d: if scaled { Accumulator::F32 } else { accumulator(kind, get(4, 6))? },
            a: element(kind, "type of A", get(7, 10))?,
            b: element(kind, "type of B", b_bits)?,
            negate_a: flag(13),
            negate_b: flag(14),
            major_a: major(15),
            major_b: major(16),
            sparse,
            sparsity_selector: if scaled { 0 } else { get(0, 2) },
            saturate: !scaled && flag(3),
            max_shift: if scaled { 0 } else { [0, 8, 16, 32][get(30, 32) as usize] },
            scale: match (scaled, flag(23)) {
                (false, _) => None,
                (true, true) => Some(ScaleType::Ue8m0),
                (true, false) if kind == MmaKind::Mxf4nvf4 => Some(ScaleType::Ue4m3),
                (true, false) => {
                    return Err(DescriptorError::Type { what: "scale type", code: 0, kind });
                }
            },
            scale_a_id: if scaled { get(29, 31) } else { 0 },
            scale_b_id: if scaled { get(4, 6) } else { 0 },
        };
        this.check(cta_group, weight_stationary)?;
        Ok(this)
    }

    fn check(&self, cta_group: u32, weight_stationary: bool) -> Result<(), DescriptorError> {
        let InstructionDescriptor { kind, m, n, sparse, .. } = *self;
        let not = |what| Err(DescriptorError::NotForKind { kind, what });
        let scaled = self.scale.is_some();
        if self.saturate && kind != MmaKind::I8 {
            return not("saturation");
        }
        if kind == MmaKind::I8 && (self.negate_a || self.negate_b) {
            return not("negation");
        }
        let transposed = |major, element: Element| major == Major::Mn && element.bits() < 8;
        if transposed(self.major_a, self.a) || transposed(self.major_b, self.b) {
            return not("transposing a 4- or 6-bit matrix");
        }
        if weight_stationary && scaled {
            return not(".ws");
        }
        if self.max_shift != 0 && !weight_stationary {
            return not("a maximum shift without .ws");
        }
        // Table 39 of PTX ISA 9.7.16.2.1.
        let legal_m: &[u32] = match (cta_group, weight_stationary, scaled, sparse) {
            (1, true, _, _) => &[32, 64, 128],
            (1, false, false, _) => &[64, 128],
            (1, false, true, _) => &[128],
            (2, false, true, true) => &[256],
            (2, false, _, _) => &[128, 256],
            _ => &[],
        };
        if !legal_m.contains(&m) {
            return Err(DescriptorError::M { m, kind, cta_group, weight_stationary });
        }
        let legal_n = match (kind, cta_group) {
            _ if weight_stationary => n == 64 || n == 128 || n == 256 && !sparse,
            (MmaKind::I8, 1) => n.is_multiple_of(16) || n == 8 || n == 24,
            (MmaKind::I8, _) => n.is_multiple_of(32),
            (_, 1) => n.is_multiple_of(8),
            (_, _) => n.is_multiple_of(16),
        };
        if !legal_n || !(8..=256).contains(&n) {
            return Err(DescriptorError::N { n, m, kind, cta_group, weight_stationary });
        }
        // Table 52 of PTX ISA 9.7.16.10.1.
        let multiple = 16 * cta_group;
        if self.major_b == Major::Mn && self.b.bits() == 8 && !n.is_multiple_of(multiple) {
            return Err(DescriptorError::TransposedN { n, multiple });
        }
        Ok(())
    }

    /// Checks the scale factor ids and type against the instruction's `.scale_vec` (PTX ISA 9.7.16.10.7, tables 56 and
    /// 57).
    ///
    /// # Errors
    /// [`DescriptorError::ScaleVector`] and [`DescriptorError::ScaleId`].
    pub fn check_scales(&self, vector: ScaleVector) -> Result<(), DescriptorError> {
        use ScaleType::{Ue4m3, Ue8m0};
        use ScaleVector::{X1, X2, X4};
        let kind = self.kind;
        let Some(scale) = self.scale else {
            return Err(DescriptorError::NotForKind { kind, what: "block scaling" });
        };
        let legal = match (kind, scale) {
            (MmaKind::Mxf8f6f4, Ue8m0) => vector == X1,
            (MmaKind::Mxf4, Ue8m0) => vector == X2,
            (MmaKind::Mxf4nvf4, Ue8m0) => vector != X1,
            (MmaKind::Mxf4nvf4, Ue4m3) => vector == X4,
            _ => false,
        };
        if !legal {
            return Err(DescriptorError::ScaleVector { kind, scale, vector });
        }
        for id in [self.scale_a_id, self.scale_b_id] {
            let legal = match vector {
                X1 => true,
                X2 => id.is_multiple_of(2),
                X4 => id == 0,
            };
            if !legal {
                return Err(DescriptorError::ScaleId { id, vector });
            }
        }
        Ok(())
    }

    /// Elements of K per scale factor.
    pub const fn scale_block(&self, vector: ScaleVector) -> u32 {
        self.k / vector as u32
    }
}

fn accumulator(kind: MmaKind, code: u32) -> Result<Accumulator, DescriptorError> {
    match (kind, code) {
        (MmaKind::F16 | MmaKind::F8f6f4, 0) => Ok(Accumulator::F16),
        (MmaKind::F16 | MmaKind::F8f6f4 | MmaKind::Tf32, 1) => Ok(Accumulator::F32),
        (MmaKind::I8, 2) => Ok(Accumulator::S32),
        _ => Err(DescriptorError::Type { what: "type of D", code, kind }),
    }
}

fn element(kind: MmaKind, what: &'static str, code: u32) -> Result<Element, DescriptorError> {
    match (kind, code) {
        (MmaKind::F16, 0) => Ok(Element::F16),
        (MmaKind::F16, 1) => Ok(Element::Bf16),
        (MmaKind::Tf32, 2) => Ok(Element::Tf32),
        (MmaKind::I8, 0) => Ok(Element::U8),
        (MmaKind::I8, 1) => Ok(Element::S8),
        (MmaKind::F8f6f4 | MmaKind::Mxf8f6f4, 0) => Ok(Element::E4m3),
        (MmaKind::F8f6f4 | MmaKind::Mxf8f6f4, 1) => Ok(Element::E5m2),
        (MmaKind::F8f6f4 | MmaKind::Mxf8f6f4, 3) => Ok(Element::E2m3),
        (MmaKind::F8f6f4 | MmaKind::Mxf8f6f4, 4) => Ok(Element::E3m2),
        (MmaKind::F8f6f4 | MmaKind::Mxf8f6f4, 5) => Ok(Element::E2m1),
        (MmaKind::Mxf4 | MmaKind::Mxf4nvf4, 1) => Ok(Element::E2m1),
        _ => Err(DescriptorError::Type { what, code, kind }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Any bits give an error or a descriptor with computable addresses, never a panic.
        #[test]
        fn descriptors_of_any_bits_decode_or_are_refused(matrix: u64, instruction: u32, cta_group in 0u32..4, ws: bool) {
            for fix in [0, VERSION] {
                for decoded in [SharedMatrix::wgmma(matrix), SharedMatrix::tcgen05(matrix & !(7 << 46) | fix)] {
                    let Ok(matrix) = decoded else { continue };
                    for major in [Major::K, Major::Mn] {
                        let _ = matrix.check(major, 16, 32);
                        prop_assert!(matrix.chunk_address(major, 255, 31) >= matrix.start & !1023);
                    }
                }
            }
            use MmaKind::*;
            for kind in [F16, Tf32, F8f6f4, I8, Mxf8f6f4, Mxf4, Mxf4nvf4] {
                if let Ok(decoded) = InstructionDescriptor::decode(kind, cta_group, ws, instruction) {
                    prop_assert!(decoded.m <= 256 && (8..=256).contains(&decoded.n));
                    let _ = decoded.check_scales(ScaleVector::X4);
                }
            }
        }
    }

    const VERSION: u64 = 1 << 46;

    /// Evaluates a CuTe layout: nested modes flattened to (extent, stride) pairs, first fastest.
    fn cute(modes: &[(u32, u32)], mut index: u32) -> u32 {
        let mut offset = 0;
        for &(extent, stride) in modes {
            offset += index % extent * stride;
            index /= extent;
        }
        offset
    }

    /// `Swizzle<bits, 4, 3>` on byte addresses.
    fn cute_swizzle(bits: u32, address: u32) -> u32 {
        address ^ (address >> 3 & ((1 << bits) - 1) << 4)
    }

    /// Examples of PTX ISA 9.7.16.3.3: swizzle bits, rows, columns ("Exact layout" in elements), element size, encoded
    /// LBO and SBO. The first list of modes covers M or N, the second covers K.
    #[test]
    fn canonical_layouts_match_the_examples_of_the_manual() {
        type Modes = &'static [(u32, u32)];
        type Example = (Major, u64, u32, Modes, Modes, u32, u64, u64);
        let examples: [Example; 5] = [
            (Major::K, 0, 0, &[(8, 4), (2, 32)], &[(4, 1), (4, 64)], 4, 16, 8),
            (Major::K, 6, 1, &[(8, 8), (2, 64)], &[(4, 1), (2, 4)], 4, 1, 16),
            (Major::Mn, 0, 0, &[(8, 1), (1, 8), (2, 64)], &[(8, 8), (2, 128)], 2, 16, 8),
            (Major::Mn, 6, 1, &[(8, 1), (2, 8), (2, 128)], &[(8, 16), (2, 256)], 2, 16, 32),
            (Major::Mn, 4, 2, &[(8, 1), (4, 8), (2, 256)], &[(8, 32), (2, 512)], 2, 32, 64),
        ];
        for (major, code, bits, mn_modes, k_modes, size, lbo, sbo) in examples {
            let start = 0x2000;
            let descriptor = start >> 4 | lbo << 16 | sbo << 32 | VERSION | code << 61;
            let matrix = SharedMatrix::tcgen05(descriptor).unwrap();
            let extent = |modes: Modes| modes.iter().map(|mode| mode.0).product::<u32>();
            let per_chunk = CHUNK_BYTES / size;
            for mn in 0..extent(mn_modes) {
                for k in 0..extent(k_modes) {
                    let linear = (cute(mn_modes, mn) + cute(k_modes, k)) * size;
                    let expected = cute_swizzle(bits, start as u32 + linear);
                    let (row, along) = if major == Major::K { (mn, k) } else { (k, mn) };
                    let chunk = matrix.chunk_address(major, row, along / per_chunk);
                    assert_eq!(chunk + along % per_chunk * size, expected, "{major:?} {code} mn {mn} k {k}");
                }
            }
        }
    }

    /// Table 55: an MN-major atom of the 32-byte atomicity is 8 chunks by 4 rows (CUTLASS: Swizzle<2,5,2> on 4 rows).
    #[test]
    fn layout_of_32_byte_atoms_repeats_after_four_rows() {
        let matrix = SharedMatrix { start: 0, leading: 4096, stride: 512, swizzle: Swizzle::B128Atom32 };
        assert_eq!(matrix.chunk_address(Major::Mn, 1, 0), 128 + 32);
        assert_eq!(matrix.chunk_address(Major::Mn, 3, 2), 384 + 64);
        assert_eq!(matrix.chunk_address(Major::Mn, 4, 0), 512);
        assert_eq!(matrix.chunk_address(Major::Mn, 0, 8), 4096);
    }

    /// Adding 32 bytes to the start address inside a 128-byte swizzle row reaches the next K step, because the swizzle
    /// permutes addresses.
    #[test]
    fn k_step_inside_a_swizzle_atom_adds_to_the_start_address() {
        let whole = SharedMatrix { start: 0x4000, leading: 0, stride: 1024, swizzle: Swizzle::B128 };
        let step = SharedMatrix { start: 0x4020, ..whole };
        for row in 0..32 {
            for chunk in 0..2 {
                assert_eq!(step.chunk_address(Major::K, row, chunk), whole.chunk_address(Major::K, row, chunk + 2));
            }
        }
        assert_eq!(step.check(Major::K, 16, 32), Ok(()));
        let last = SharedMatrix { start: 0x4070, ..whole };
        assert!(matches!(last.check(Major::K, 16, 32), Err(DescriptorError::CrossesSpan { .. })));
    }

    #[test]
    fn each_malformed_shared_descriptor_has_its_own_error() {
        use DescriptorError as E;
        assert!(matches!(SharedMatrix::tcgen05(2 << 46 | 2 << 61), Err(E::Version { got: 2, .. })));
        assert_eq!(SharedMatrix::tcgen05(VERSION | 3 << 61), Err(E::Swizzle(3)));
        assert!(matches!(SharedMatrix::tcgen05(VERSION | 1 << 14), Err(E::Reserved { .. })));
        assert!(matches!(SharedMatrix::tcgen05(VERSION | 1 << 60), Err(E::Reserved { .. })));
        assert!(matches!(SharedMatrix::tcgen05(VERSION | 1 << 52), Err(E::Unsupported(_))));
        let based = VERSION | 1 << 49 | 2 << 61;
        assert!(matches!(SharedMatrix::tcgen05(based), Err(E::Unsupported(_))));
        assert!(matches!(SharedMatrix::wgmma(1 << 46), Err(E::Reserved { .. })));
        let wgmma = SharedMatrix::wgmma(0x4000 >> 4 | 1 << 16 | 64 << 32 | 1 << 62).unwrap();
        let expected = SharedMatrix { start: 0x4000, leading: 16, stride: 1024, swizzle: Swizzle::B128 };
        assert_eq!(wgmma, expected);
        assert!(matches!(
            SharedMatrix { swizzle: Swizzle::B128, ..expected }.check(Major::Mn, 32, 32),
            Err(E::Layout { .. })
        ));
        assert!(matches!(expected.check(Major::Mn, 4, 32), Err(E::Layout { .. })));
    }

    const fn shape(m_over_16: u32, n: u32) -> u32 {
        m_over_16 << 24 | (n >> 3) << 17
    }

    #[test]
    fn nvfp4_descriptors_decode_field_by_field() {
        // E2M1 is 1 in this kind; scale type bit 0 = UE4M3; M = 128.
        let bits = 1 << 7 | 1 << 10 | 1 << 13 | shape(8, 72);
        let decoded = InstructionDescriptor::decode(MmaKind::Mxf4nvf4, 1, false, bits).unwrap();
        let expected = InstructionDescriptor {
            kind: MmaKind::Mxf4nvf4,
            m: 128,
            n: 72,
            k: 64,
            d: Accumulator::F32,
            a: Element::E2m1,
            b: Element::E2m1,
            negate_a: true,
            negate_b: false,
            major_a: Major::K,
            major_b: Major::K,
            sparse: false,
            sparsity_selector: 0,
            saturate: false,
            max_shift: 0,
            scale: Some(ScaleType::Ue4m3),
            scale_a_id: 0,
            scale_b_id: 0,
        };
        assert_eq!(decoded, expected);
        assert_eq!(decoded.check_scales(ScaleVector::X4), Ok(()));
        assert_eq!(decoded.scale_block(ScaleVector::X4), 16);
        assert!(decoded.check_scales(ScaleVector::X2).is_err());
        // UE8M0 with ids 2 (A) and 0 (B): valid for two scales per row, invalid for four.
        let bits = bits | 1 << 23 | 2 << 29;
        let decoded = InstructionDescriptor::decode(MmaKind::Mxf4nvf4, 1, false, bits).unwrap();
        assert_eq!((decoded.scale, decoded.scale_a_id), (Some(ScaleType::Ue8m0), 2));
        assert_eq!(decoded.check_scales(ScaleVector::X2), Ok(()));
        let id = DescriptorError::ScaleId { id: 2, vector: ScaleVector::X4 };
        assert_eq!(decoded.check_scales(ScaleVector::X4), Err(id));
    }

    #[test]
    fn unscaled_descriptors_decode_field_by_field() {
        let bits = 1 << 4 | 1 << 7 | 1 << 10 | 1 << 16 | shape(4, 40);
        let decoded = InstructionDescriptor::decode(MmaKind::F16, 1, false, bits).unwrap();
        assert_eq!((decoded.m, decoded.n, decoded.k), (64, 40, 16));
        assert_eq!((decoded.a, decoded.b, decoded.d), (Element::Bf16, Element::Bf16, Accumulator::F32));
        assert_eq!((decoded.major_a, decoded.major_b), (Major::K, Major::Mn));
        let bits = 1 << 3 | 2 << 4 | 1 << 7 | shape(16, 64);
        let decoded = InstructionDescriptor::decode(MmaKind::I8, 2, false, bits).unwrap();
        assert_eq!((decoded.m, decoded.a, decoded.b), (256, Element::S8, Element::U8));
        assert!(decoded.saturate);
        let bits = 1 << 4 | 5 << 7 | 3 << 10 | shape(8, 8);
        let decoded = InstructionDescriptor::decode(MmaKind::F8f6f4, 1, false, bits).unwrap();
        assert_eq!((decoded.a, decoded.b, decoded.k), (Element::E2m1, Element::E2m3, 32));
    }

    /// Cases at the limits of table 39.
    #[test]
    fn illegal_shapes_are_rejected() {
        let ok = |kind, cta_group, ws, bits| InstructionDescriptor::decode(kind, cta_group, ws, bits).is_ok();
        let f16 = 1 << 4;
        assert!(ok(MmaKind::F16, 1, false, f16 | shape(4, 8)));
        assert!(ok(MmaKind::F16, 1, false, f16 | shape(8, 256)));
        assert!(!ok(MmaKind::F16, 1, false, f16 | shape(16, 64)), "M = 256 needs two CTAs");
        assert!(!ok(MmaKind::F16, 2, false, f16 | shape(4, 64)), "M = 64 has one CTA");
        assert!(!ok(MmaKind::F16, 2, false, f16 | shape(8, 24)), "two CTAs step N by 16");
        assert!(!ok(MmaKind::F16, 1, false, f16 | shape(8, 264)));
        assert!(!ok(MmaKind::F16, 1, false, f16 | shape(8, 0)));
        assert!(ok(MmaKind::F16, 1, true, f16 | shape(2, 64)));
        assert!(!ok(MmaKind::F16, 1, true, f16 | shape(2, 72)));
        let i8 = 2 << 4;
        assert!(ok(MmaKind::I8, 1, false, i8 | shape(8, 24)));
        assert!(!ok(MmaKind::I8, 1, false, i8 | shape(8, 40)));
        assert!(!ok(MmaKind::I8, 2, false, i8 | shape(8, 48)));
        let nvfp4 = 1 << 7 | 1 << 10;
        assert!(!ok(MmaKind::Mxf4nvf4, 1, false, nvfp4 | 4 << 24 | 8 << 17), "bits 24-26 are reserved");
        assert!(!ok(MmaKind::Mxf4nvf4, 1, false, nvfp4 | shape(16, 64)));
        assert!(ok(MmaKind::Mxf4nvf4, 2, false, nvfp4 | shape(16, 64)));
        assert!(!ok(MmaKind::Mxf4, 1, false, nvfp4 | shape(8, 64)), "mxf4 has UE8M0 scales only");
        assert!(!ok(MmaKind::Mxf4, 1, false, nvfp4 | 1 << 15 | 1 << 23 | shape(8, 64)), "no transpose");
        assert!(!ok(MmaKind::I8, 1, false, i8 | 1 << 13 | shape(8, 64)), "no negation of integers");
        assert!(!ok(MmaKind::F8f6f4, 1, false, f16 | 1 << 16 | shape(8, 24)), "8-bit transposed B");
        assert!(!ok(MmaKind::F16, 1, false, f16 | 2 << 7 | shape(8, 64)), "tf32 in kind::f16");
    }
}
