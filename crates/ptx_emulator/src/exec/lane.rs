//! The lanes of a row as Rust values. Plain arithmetic is a closure on the values of one lane.

use crate::code::{Flow, Step};
use crate::operand::{Dst, Src};

/// A lane's value as a Rust type, in the low bits of the row.
pub trait Lane: Copy + Send + Sync + 'static {
    fn of(bits: u64) -> Self;
    fn bits(self) -> u64;
}

macro_rules! lanes {
    ($($t:ty, $u:ty;)*) => {$(
        impl Lane for $t {
            #[inline(always)]
            fn of(bits: u64) -> Self {
                bits as $t
            }
            #[inline(always)]
            fn bits(self) -> u64 {
                self as $u as u64
            }
        }
    )*};
}
lanes! { u8, u8; u16, u16; u32, u32; u64, u64; i8, u8; i16, u16; i32, u32; i64, u64; }

impl Lane for f32 {
    #[inline(always)]
    fn of(bits: u64) -> Self {
        f32::from_bits(bits as u32)
    }
    #[inline(always)]
    fn bits(self) -> u64 {
        u64::from(self.to_bits())
    }
}

impl Lane for f64 {
    #[inline(always)]
    fn of(bits: u64) -> Self {
        f64::from_bits(bits)
    }
    #[inline(always)]
    fn bits(self) -> u64 {
        self.to_bits()
    }
}

/// `d = f(a)` in every lane.
pub fn map1<A: Lane, D: Lane>(d: Dst, a: Src, f: impl Fn(A) -> D + Send + Sync + 'static) -> Step {
    Box::new(move |w, _, mask| {
        let a = w.get(a);
        let mut out = [0; 32];
        for i in 0..32 {
            out[i] = f(A::of(a[i])).bits();
        }
        d.write(w, mask, &out);
        Ok(Flow::Next)
    })
}

/// `d = f(a, b)` in every lane.
pub fn map2<A: Lane, B: Lane, D: Lane>(
    d: Dst,
    [a, b]: [Src; 2],
    f: impl Fn(A, B) -> D + Send + Sync + 'static,
) -> Step {
    Box::new(move |w, _, mask| {
        let (a, b) = (w.get(a), w.get(b));
        let mut out = [0; 32];
        for i in 0..32 {
            out[i] = f(A::of(a[i]), B::of(b[i])).bits();
        }
        d.write(w, mask, &out);
        Ok(Flow::Next)
    })
}

/// `d = f(a, b, c)` in every lane.
pub fn map3<A: Lane, B: Lane, C: Lane, D: Lane>(
    d: Dst,
    [a, b, c]: [Src; 3],
    f: impl Fn(A, B, C) -> D + Send + Sync + 'static,
) -> Step {
    Box::new(move |w, _, mask| {
        let (a, b, c) = (w.get(a), w.get(b), w.get(c));
        let mut out = [0; 32];
        for i in 0..32 {
            out[i] = f(A::of(a[i]), B::of(b[i]), C::of(c[i])).bits();
        }
        d.write(w, mask, &out);
        Ok(Flow::Next)
    })
}

/// Evaluates `body`, in which `$T` is the Rust integer type of a PTX type.
macro_rules! for_integer {
    ($ty:expr, $T:ident => $body:expr) => {
        match $ty {
            $crate::types::Type::U8 | $crate::types::Type::B8 => {
                type $T = u8;
                $body
            }
            $crate::types::Type::S8 => {
                type $T = i8;
                $body
            }
            $crate::types::Type::U16 | $crate::types::Type::B16 => {
                type $T = u16;
                $body
            }
            $crate::types::Type::S16 => {
                type $T = i16;
                $body
            }
            $crate::types::Type::U32 | $crate::types::Type::B32 => {
                type $T = u32;
                $body
            }
            $crate::types::Type::S32 => {
                type $T = i32;
                $body
            }
            $crate::types::Type::U64 | $crate::types::Type::B64 => {
                type $T = u64;
                $body
            }
            $crate::types::Type::S64 => {
                type $T = i64;
                $body
            }
            other => return Err($crate::decode::error::DecodeError::unsupported(format!("type {other:?}"))),
        }
    };
}
pub(crate) use for_integer;
