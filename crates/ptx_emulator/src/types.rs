//! Fundamental types and state spaces of PTX, with their names and widths (PTX ISA, "State Spaces, Types, and
//! Variables"). The code that executes instructions interprets the bits.

/// Declared type of an instruction or a variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the variants are the manual's type names")]
pub enum Type {
    B8,
    B16,
    B32,
    B64,
    B128,
    U8,
    U16,
    U32,
    U64,
    S8,
    S16,
    S32,
    S64,
    F16,
    F16x2,
    BF16,
    BF16x2,
    TF32,
    F32,
    F32x2,
    F64,
    U16x2,
    S16x2,
    Pred,
    E4M3x2,
    E5M2x2,
    E2M3x2,
    E3M2x2,
    E2M1x2,
    UE8M0x2,
    E4M3x4,
    E5M2x4,
    E2M3x4,
    E3M2x4,
    E2M1x4,
}

impl Type {
    /// The type that a modifier names, without its dot. `None`: the modifier is not a type.
    pub fn parse(name: &str) -> Option<Type> {
        use Type::*;
        Some(match name {
            "b8" => B8,
            "b16" => B16,
            "b32" => B32,
            "b64" => B64,
            "b128" => B128,
            "u8" => U8,
            "u16" => U16,
            "u32" => U32,
            "u64" => U64,
            "s8" => S8,
            "s16" => S16,
            "s32" => S32,
            "s64" => S64,
            "f16" => F16,
            "f16x2" => F16x2,
            "bf16" => BF16,
            "bf16x2" => BF16x2,
            "tf32" => TF32,
            "f32" => F32,
            "f32x2" => F32x2,
            "f64" => F64,
            "u16x2" => U16x2,
            "s16x2" => S16x2,
            "pred" => Pred,
            "e4m3x2" => E4M3x2,
            "e5m2x2" => E5M2x2,
            "e2m3x2" => E2M3x2,
            "e3m2x2" => E3M2x2,
            "e2m1x2" => E2M1x2,
            "ue8m0x2" => UE8M0x2,
            "e4m3x4" => E4M3x4,
            "e5m2x4" => E5M2x4,
            "e2m3x4" => E2M3x4,
            "e3m2x4" => E3M2x4,
            "e2m1x4" => E2M1x4,
            _ => return None,
        })
    }

    /// Width in bits; a predicate has one.
    pub fn bits(self) -> u32 {
        use Type::*;
        match self {
            Pred => 1,
            B8 | U8 | S8 | E2M1x2 => 8,
            B16 | U16 | S16 | F16 | BF16 | E4M3x2 | E5M2x2 | E2M3x2 | E3M2x2 | UE8M0x2 | E2M1x4 => 16,
            B32 | U32 | S32 | F32 | TF32 | F16x2 | BF16x2 | U16x2 | S16x2 | E4M3x4 | E5M2x4 | E2M3x4 | E3M2x4 => 32,
            B64 | U64 | S64 | F64 | F32x2 => 64,
            B128 => 128,
        }
    }

    /// Width in bytes in memory.
    pub fn bytes(self) -> u32 {
        self.bits().div_ceil(8)
    }

    /// Whether a load or a conversion sign-extends the type.
    pub fn is_signed(self) -> bool {
        matches!(self, Type::S8 | Type::S16 | Type::S32 | Type::S64)
    }

    /// Whether the type is a scalar integer (signed, unsigned or plain bits).
    pub fn is_integer(self) -> bool {
        use Type::*;
        matches!(self, B8 | B16 | B32 | B64 | U8 | U16 | U32 | U64 | S8 | S16 | S32 | S64)
    }
}

/// State space named by a declaration or a memory instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the variants are the manual's state spaces")]
pub enum Space {
    Generic,
    Global,
    Const,
    Shared,
    SharedCluster,
    Local,
    Param,
}

impl Space {
    /// The space that a modifier names, without its dot. `None`: the modifier is not a space.
    pub fn parse(name: &str) -> Option<Space> {
        Some(match name {
            "global" => Space::Global,
            "const" => Space::Const,
            "shared" | "shared::cta" => Space::Shared,
            "shared::cluster" => Space::SharedCluster,
            "local" => Space::Local,
            "param" | "param::entry" | "param::func" => Space::Param,
            _ => return None,
        })
    }

    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Space::Generic => "generic",
            Space::Global => "global",
            Space::Const => "const",
            Space::Shared => "shared",
            Space::SharedCluster => "shared::cluster",
            Space::Local => "local",
            Space::Param => "param",
        }
    }
}
