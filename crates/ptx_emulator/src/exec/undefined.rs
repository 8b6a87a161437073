//! Undefined bits of results, as MemorySanitizer propagates them (Stepanov & Serebryany, "MemorySanitizer: fast detector
//! of uninitialized memory use in C++", 2015): only bits that can change a result make it undefined.

use crate::decode::parsed::Parsed;
use crate::machine::warp::Warp;
use crate::operand::{Dst, PredicateSrc, Src};
use crate::types::Type;

/// Undefined bits of a source of `bits` bits in one lane.
pub fn of(w: &Warp, source: Src, bits: u32, lane: usize) -> u64 {
    w.undefined_bits(source, lane) & (u64::MAX >> (64 - bits.min(64)))
}

/// Value of a source of `bits` bits in one lane.
fn value(w: &Warp, source: Src, bits: u32, lane: usize) -> u64 {
    w.lane(source, lane) & (u64::MAX >> (64 - bits.min(64)))
}

/// All bits from the lowest one upward, as carries spread them.
fn upward(bits: u64) -> u64 {
    if bits == 0 { 0 } else { u64::MAX << bits.trailing_zeros() }
}

/// Bits of `f` that change with the undefined bits of its arguments. Each bit of `f` depends only on the same bits of
/// its arguments.
fn open_bits<const N: usize>(values: [u64; N], undefined: [u64; N], f: impl Fn([u64; N]) -> u64) -> u64 {
    let (mut all, mut any) = (u64::MAX, 0);
    for choice in 0..1u32 << N {
        let result = f(std::array::from_fn(|n| {
            if choice >> n & 1 == 1 { values[n] | undefined[n] } else { values[n] & !undefined[n] }
        }));
        (all, any) = (all & result, any | result);
    }
    all ^ any
}

/// Propagates through a function of single bits.
pub fn bitwise<const N: usize>(
    i: &mut Parsed<'_>,
    (d, sources, ty): (Dst, [Src; N], Type),
    f: impl Fn([u64; N]) -> u64 + Send + Sync + 'static,
) {
    let bits = ty.bits();
    i.carries(move |w, lane| {
        let undefined = sources.map(|s| of(w, s, bits, lane));
        let open = open_bits(sources.map(|s| value(w, s, bits, lane)), undefined, &f);
        d.register.map(|register| (register, open)).into_iter().collect()
    });
}

/// Propagates through a function of two or three predicates, for each lane.
pub fn predicates<const N: usize>(
    i: &mut Parsed<'_>,
    d: Option<u32>,
    sources: [PredicateSrc; N],
    f: impl Fn([u64; N]) -> u64 + Send + Sync + 'static,
) {
    i.decides(move |w, _| {
        let undefined = sources.map(|p| u64::from(!p.defined(w)));
        let open = open_bits(sources.map(|p| p.mask(w).into()), undefined, &f);
        d.map(|d| (d, open as u32)).into_iter().collect()
    });
}

/// Propagates through a sum: an undefined bit changes all bits above it.
pub fn sum<const N: usize>(i: &mut Parsed<'_>, d: Dst, sources: [Src; N], ty: Type) {
    let bits = ty.bits();
    i.carries(move |w, lane| {
        let undefined = upward(sources.iter().fold(0, |all, s| all | of(w, *s, bits, lane)));
        d.register.map(|register| (register, undefined)).into_iter().collect()
    });
}

/// Part of an integer product that an instruction writes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The lower bits.
    Low,
    /// The upper bits.
    High,
    /// All bits.
    Wide,
}

/// Propagates through a product of integers, plus a third source if there is one. A product with a known zero is known,
/// and the trailing zeros of a known factor stay zeros.
pub fn product(i: &mut Parsed<'_>, (d, [a, b]): (Dst, [Src; 2]), c: Option<Src>, ty: Type, part: Part) {
    let bits = ty.bits();
    i.carries(move |w, lane| {
        let factor = |s| (value(w, s, bits, lane), of(w, s, bits, lane));
        let (a, b) = (factor(a), factor(b));
        let zero = |(value, undefined): (u64, u64)| value == 0 && undefined == 0;
        // Lowest bit of a factor that may be set.
        let lowest = |(value, undefined): (u64, u64)| (value | undefined).trailing_zeros();
        let known = zero(a) || zero(b) || (a.1 | b.1) == 0;
        let first = (a.1.trailing_zeros() + lowest(b)).min(b.1.trailing_zeros() + lowest(a));
        let of_product = match part {
            _ if known => 0,
            Part::High => u64::MAX,
            Part::Low | Part::Wide => u64::MAX.checked_shl(first).unwrap_or(0),
        };
        let wide = if part == Part::Wide { 2 * bits } else { bits };
        let added = c.map_or(0, |c| of(w, c, wide, lane));
        d.register.map(|register| (register, upward(of_product | added))).into_iter().collect()
    });
}

/// Propagates through a shift, an extraction or an insertion of bits: if all sources but the first `moved` are known,
/// the undefined bits move as the bits do. `f` moves bits.
pub fn moved<const N: usize>(
    i: &mut Parsed<'_>,
    (d, sources, ty): (Dst, [Src; N], Type),
    moved: usize,
    f: impl Fn([u64; N]) -> u64 + Send + Sync + 'static,
) {
    let bits = ty.bits();
    i.carries(move |w, lane| {
        let known = sources[moved..].iter().all(|s| of(w, *s, 32, lane) == 0);
        let undefined =
            std::array::from_fn(
                |n| {
                    if n < moved { of(w, sources[n], bits, lane) } else { value(w, sources[n], 32, lane) }
                },
            );
        let open = if known { f(undefined) } else { u64::MAX };
        d.register.map(|register| (register, open)).into_iter().collect()
    });
}

/// Undefined bits of a selection between two sources. An undefined condition matters where the sources differ.
pub fn selected(w: &Warp, [a, b]: [Src; 2], first: Option<bool>, lane: usize) -> u64 {
    let [ua, ub] = [a, b].map(|s| w.undefined_bits(s, lane));
    match first {
        Some(true) => ua,
        Some(false) => ub,
        None => ua | ub | w.lane(a, lane) ^ w.lane(b, lane),
    }
}

/// Smallest and largest value of a source whose undefined bits may be anything, as ordered by its type.
fn range(w: &Warp, source: Src, ty: Type, signed: bool, lane: usize) -> [u64; 2] {
    let bits = ty.bits();
    let (value, undefined) = (value(w, source, bits, lane), of(w, source, bits, lane));
    let (low, high) = (value & !undefined, value | undefined);
    let sign = undefined & 1 << (bits - 1);
    // An undefined sign bit is set in the smallest value.
    if signed { [low | sign, high & !sign] } else { [low, high] }
}

/// Lanes in which the undefined bits of two integers can change a comparison. `compare` compares two values.
pub fn comparison(
    w: &Warp,
    [a, b]: [Src; 2],
    ty: Type,
    (equality, signed): (bool, bool),
    compare: impl Fn(u64, u64) -> bool,
) -> u32 {
    (0..32)
        .filter(|&lane| {
            let undefined = of(w, a, ty.bits(), lane) | of(w, b, ty.bits(), lane);
            if undefined == 0 {
                return false;
            }
            if equality {
                return (value(w, a, ty.bits(), lane) ^ value(w, b, ty.bits(), lane)) & !undefined == 0;
            }
            let [a, b] = [a, b].map(|s| range(w, s, ty, signed, lane));
            compare(a[0], b[1]) != compare(a[1], b[0])
        })
        .fold(0, |mask, lane| mask | 1 << lane)
}
