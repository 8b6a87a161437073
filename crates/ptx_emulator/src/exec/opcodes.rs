//! The table of all opcodes. Each row holds an opcode's name, its allowed modifiers, its section of the manual, the
//! class under which it is counted, and the handler that decodes it. Decoding, the check of the decoders' queries, and
//! the printed coverage all use this table.
//!
//! [`crate::decode::form`] describes the syntax of forms.

use super::instruction::issued;
use super::{
    alu, atomic, barrier, bulk, cluster, compare, control, convert, cp_async, float, launch_control, matrix, mbarrier,
    memory, mov, tcgen05, tensor_map, warp, wgmma,
};
use crate::config::report::Class;
use crate::decode::opcode::Opcode;

macro_rules! table {
    ($($class:ident, $section:literal => { $($name:literal [$($form:expr),+] $handler:path;)+ })+) => {
        /// Every opcode and form that the emulator executes.
        pub static OPCODES: &[Opcode] = &[
            $($($(Opcode {
                name: $name,
                form: $form,
                section: $section,
                class: Class::$class,
                handler: $handler,
            },)+)+)+
        ];
    };
}

const INT: &str = "{u16 u32 u64 s16 s32 s64}";
const SIGNED: &str = "{s16 s32 s64}";
const BITS: &str = "{b16 b32 b64}";
const PACKED: &str = "{u16x2 s16x2}";
const B32_64: &str = "{b32 b64}";
const F32_FTZ: &str = "[rn rz rm rp] [ftz] [sat] f32";
const F64_RND: &str = "[rn rz rm rp] f64";
// A fused operation must state its rounding mode.
const F32_FUSED: &str = "{rn rz rm rp} [ftz] [sat] f32";
const F64_FUSED: &str = "{rn rz rm rp} f64";
const HALF: &str = "[rn] [ftz] [sat] {f16 f16x2 bf16 bf16x2}";
const MIXED: &str = "[rn rz rm rp] [sat] f32 {f16 bf16}";
const EXTREMUM: &str = "[ftz] [NaN] [xorsign] [abs] f32";
const HALF_EXTREMUM: &str = "[ftz] [NaN] [xorsign] [abs] {f16 f16x2 bf16 bf16x2}";

/// Forms of `setp` and `set`: one form for each group of types with the same comparison operators. `$head` comes before
/// the type of the compared operands.
macro_rules! comparisons {
    ($head:literal) => {
        [
            concat!("{eq ne} [and or xor] ", $head, " {b16 b32 b64}"),
            concat!("{eq ne lt le gt ge lo ls hi hs} [and or xor] ", $head, " {u16 u32 u64}"),
            concat!("{eq ne lt le gt ge} [and or xor] ", $head, " {s16 s32 s64}"),
            concat!(
                "{eq ne lt le gt ge equ neu ltu leu gtu geu num nan} [and or xor] [ftz] ",
                $head,
                " {f32 f64 f16 bf16 f16x2 bf16x2}"
            ),
        ]
    };
}

const SETP: [&str; 4] = comparisons!("");
const SET: [&str; 4] = comparisons!("{u32 s32 f32 u16 s16 f16 bf16 f16x2 bf16x2}");

/// A form of `ld` or `st`: the memory ordering, then the part that all forms share.
macro_rules! access_form {
    (ld $order:literal) => {
        concat!(
            $order,
            " [global shared shared::cta shared::cluster local const param param::entry param::func] \
             [ca cg cs lu cv nc] \
             [L1::evict_normal L1::evict_unchanged L1::evict_first L1::evict_last L1::no_allocate] \
             [L2::evict_normal L2::evict_first L2::evict_last] [L2::cache_hint] [L2::64B L2::128B L2::256B] [unified] \
             [v2 v4 v8] {b8 b16 b32 b64 b128 u8 u16 u32 u64 s8 s16 s32 s64 f16 f32 f64}"
        )
    };
    (st $order:literal) => {
        concat!(
            $order,
            " [global shared shared::cta shared::cluster local param param::func] [wb cg cs wt] \
             [L1::evict_normal L1::evict_unchanged L1::evict_first L1::evict_last L1::no_allocate] \
             [L2::evict_normal L2::evict_first L2::evict_last] [L2::cache_hint] [v2 v4 v8] \
             {b8 b16 b32 b64 b128 u8 u16 u32 u64 s8 s16 s32 s64 f16 f32 f64}"
        )
    };
}

/// A form of `atom` or `red`: the memory ordering, then the operation and its type.
macro_rules! atomic_form {
    ($order:literal $operation:literal) => {
        concat!(
            $order,
            " [cta cluster gpu sys] [global shared shared::cta shared::cluster] [L2::cache_hint] ",
            $operation
        )
    };
    (atom $operation:literal) => {
        atomic_form!("[relaxed acquire release acq_rel]" $operation)
    };
    (red $operation:literal) => {
        atomic_form!("[relaxed release]" $operation)
    };
}

/// Joins the shapes `m64nNkK` for every N into a string literal.
macro_rules! wgmma_form {
    ($k:literal, $rest:literal) => {
        concat!(
            "mma_async sync aligned {",
            wgmma_form!(@ $k 8 16 24 32 40 48 56 64 72 80 88 96 104 112 120 128 136 144 152 160 168 176 184 192 200 208
                216 224 232 240 248 256),
            "} ",
            $rest
        )
    };
    (@ $k:literal $($n:literal)*) => { concat!($(" m64n", $n, "k", $k),*) };
}

const WGMMA_F16: &str = wgmma_form!(16, "{f16 f32} f16 f16");
const WGMMA_BF16: &str = wgmma_form!(16, "f32 bf16 bf16");
const WGMMA_TF32: &str = wgmma_form!(8, "f32 tf32 tf32");
const WGMMA_F8: &str = wgmma_form!(32, "{f16 f32} {e4m3 e5m2} {e4m3 e5m2}");
const WGMMA_I8: &str = wgmma_form!(32, "[satfinite] s32 {u8 s8} {u8 s8}");
// With a sparse A, which stores half of K.
const WGMMA_SP_F16: &str = wgmma_form!(32, "sp {f16 f32} f16 f16");
const WGMMA_SP_BF16: &str = wgmma_form!(32, "sp f32 bf16 bf16");
const WGMMA_SP_TF32: &str = wgmma_form!(16, "sp f32 tf32 tf32");
const WGMMA_SP_F8: &str = wgmma_form!(64, "sp {f16 f32} {e4m3 e5m2} {e4m3 e5m2}");
const WGMMA_SP_I8: &str = wgmma_form!(64, "sp [satfinite] s32 {u8 s8} {u8 s8}");

table! {
    Integer, "Integer Arithmetic Instructions" => {
        "add" [INT, PACKED, "sat s32"] alu::add;
        "sub" [INT, "sat s32"] alu::sub;
        "mul" ["{hi lo wide} {u16 u32 u64 s16 s32 s64}"] alu::mul;
        "mad" ["{hi lo wide} {u16 u32 u64 s16 s32 s64}", "hi sat s32"] alu::mad;
        "mul24" ["{hi lo} {u32 s32}"] alu::mad24;
        "mad24" ["{hi lo} {u32 s32}", "hi sat s32"] alu::mad24;
        "sad" [INT] alu::sad;
        "div" [INT] alu::div;
        "rem" [INT] alu::rem;
        "abs" [SIGNED] alu::abs;
        "neg" [SIGNED] alu::neg;
        "min" [INT, PACKED, "relu {s16x2 s32}"] alu::min;
        "max" [INT, PACKED, "relu {s16x2 s32}"] alu::max;
        "popc" [B32_64] alu::popc;
        "clz" [B32_64] alu::clz;
        "bfind" ["[shiftamt] {u32 u64 s32 s64}"] alu::bfind;
        "fns" ["b32"] alu::fns;
        "brev" [B32_64] alu::brev;
        "bfe" ["{u32 u64 s32 s64}"] alu::bfe;
        "bfi" [B32_64] alu::bfi;
        "bmsk" ["[clamp wrap] b32"] alu::bmsk;
        "szext" ["[clamp wrap] {u32 s32}"] alu::szext;
        "dp4a" ["{u32 s32} {u32 s32}"] alu::dot;
        "dp2a" ["{lo hi} {u32 s32} {u32 s32}"] alu::dot;
    }
    Integer, "Extended-Precision Integer Arithmetic Instructions" => {
        "add" ["cc {u32 s32 u64 s64}"] alu::carry;
        "addc" ["[cc] {u32 s32 u64 s64}"] alu::carry;
        "sub" ["cc {u32 s32 u64 s64}"] alu::carry;
        "subc" ["[cc] {u32 s32 u64 s64}"] alu::carry;
        "mad" ["{hi lo} cc {u32 s32 u64 s64}"] alu::carry;
        "madc" ["{hi lo} [cc] {u32 s32 u64 s64}"] alu::carry;
    }
    Integer, "Logic and Shift Instructions" => {
        "and" ["{pred b16 b32 b64}"] alu::logic;
        "or" ["{pred b16 b32 b64}"] alu::logic;
        "xor" ["{pred b16 b32 b64}"] alu::logic;
        "not" ["{pred b16 b32 b64}"] alu::not;
        "cnot" [BITS] alu::cnot;
        "lop3" ["b32", "{and or} b32"] alu::lop3;
        "shf" ["{l r} {clamp wrap} b32"] alu::shf;
        "shl" [BITS] alu::shl;
        "shr" ["{b16 b32 b64 u16 u32 u64 s16 s32 s64}"] alu::shr;
    }
    Float, "Floating Point Instructions" => {
        "testp" ["{finite infinite number notanumber normal subnormal} {f32 f64}"] compare::testp;
        "copysign" ["{f32 f64}"] float::copysign;
        "add" [F32_FTZ, F64_RND, "[rn rz rm rp] [ftz] f32x2"] float::binary;
        "sub" [F32_FTZ, F64_RND, "[rn rz rm rp] [ftz] f32x2"] float::binary;
        "mul" [F32_FTZ, F64_RND, "[rn rz rm rp] [ftz] f32x2"] float::binary;
        "fma" [F32_FUSED, F64_FUSED, "{rn rz rm rp} [ftz] f32x2"] float::fma;
        "mad" [F32_FUSED, F64_FUSED] float::fma;
        "div" ["{approx full} [ftz] f32", "{rn rz rm rp} [ftz] f32", "{rn rz rm rp} f64"] float::div;
        "abs" ["[ftz] f32", "f64"] float::sign;
        "neg" ["[ftz] f32", "f64"] float::sign;
        "min" [EXTREMUM, "f64"] float::extremum;
        "max" [EXTREMUM, "f64"] float::extremum;
        "rcp" ["{approx rn rz rm rp} [ftz] f32", "{rn rz rm rp} f64", "approx ftz f64"] float::function;
        "sqrt" ["{approx rn rz rm rp} [ftz] f32", "{rn rz rm rp} f64"] float::function;
        "rsqrt" ["approx [ftz] f32", "approx [ftz] f64"] float::function;
        "sin" ["approx [ftz] f32"] float::function;
        "cos" ["approx [ftz] f32"] float::function;
        "lg2" ["approx [ftz] f32"] float::function;
        "ex2" ["approx [ftz] f32"] float::function;
        "tanh" ["approx f32"] float::function;
    }
    Float, "Half Precision Floating Point Instructions" => {
        "add" [HALF] float::binary;
        "sub" [HALF] float::binary;
        "mul" [HALF] float::binary;
        "fma" ["rn [ftz] [sat relu] {f16 f16x2 bf16 bf16x2}"] float::fma;
        "neg" ["[ftz] {f16 f16x2 bf16 bf16x2}"] float::sign;
        "abs" ["[ftz] {f16 f16x2 bf16 bf16x2}"] float::sign;
        "min" [HALF_EXTREMUM] float::extremum;
        "max" [HALF_EXTREMUM] float::extremum;
        "tanh" ["approx {f16 f16x2 bf16 bf16x2}"] float::function;
        "ex2" ["approx [ftz] {f16 f16x2 bf16 bf16x2}"] float::function;
    }
    Float, "Mixed Precision Floating Point Instructions" => {
        "add" [MIXED] float::binary;
        "sub" [MIXED] float::binary;
        "fma" ["{rn rz rm rp} [sat] f32 {f16 bf16}"] float::fma;
    }
    Integer, "Comparison and Selection Instructions" => {
        "set" [SET[0], SET[1], SET[2], SET[3]] compare::set;
        "setp" [SETP[0], SETP[1], SETP[2], SETP[3]] compare::setp;
        "selp" ["{b16 b32 b64 u16 u32 u64 s16 s32 s64 f32 f64}"] compare::selp;
        "slct" ["[ftz] {b16 b32 b64 u16 u32 u64 s16 s32 s64 f32 f64} {s32 f32}"] compare::slct;
    }
    Move, "Data Movement: mov, prmt" => {
        "mov" ["{pred b16 b32 b64 b128 u16 u32 u64 s16 s32 s64 f32 f64}"] mov::mov;
        "prmt" ["b32 [f4e b4e rc8 ecl ecr rc16]"] mov::prmt;
    }
    Memory, "Data Movement: ld, ldu, st, prefetch" => {
        "ld" [access_form!(ld "[weak volatile]"), access_form!(ld "{relaxed acquire} {cta cluster gpu sys}"),
              access_form!(ld "mmio relaxed sys"),
              "global [ca cg cs] nc \
               [L1::evict_normal L1::evict_unchanged L1::evict_first L1::evict_last L1::no_allocate] \
               [L2::evict_normal L2::evict_first L2::evict_last] [L2::cache_hint] [L2::64B L2::128B L2::256B] \
               [v2 v4 v8] {b8 b16 b32 b64 b128 u8 u16 u32 u64 s8 s16 s32 s64 f32 f64}"] issued::<memory::Ld>;
        "ldu" ["[global] [v2 v4] {b8 b16 b32 b64 b128 u8 u16 u32 u64 s8 s16 s32 s64 f32 f64}"] issued::<memory::Ld>;
        "st" ["bulk [weak] [shared::cta]"] issued::<memory::StBulk>;
        "st" [access_form!(st "[weak volatile]"), access_form!(st "{relaxed release} {cta cluster gpu sys}"),
              access_form!(st "mmio relaxed sys")] issued::<memory::St>;
        "prefetch" ["[global local] {L1 L2}", "global {L2::evict_last L2::evict_normal}",
                    "[const param] tensormap"] memory::hint;
        "prefetchu" ["L1"] memory::hint;
        "applypriority" ["[global] L2::evict_normal"] memory::hint;
        "discard" ["[global] L2"] memory::hint;
        "createpolicy" ["fractional {L2::evict_last L2::evict_normal L2::evict_first L2::evict_unchanged} \
                         [L2::evict_first L2::evict_unchanged] b64",
                        "range [global] {L2::evict_last L2::evict_normal L2::evict_first L2::evict_unchanged} \
                         [L2::evict_first L2::evict_unchanged] b64",
                        "cvt L2 b64"] memory::createpolicy;
        "mapa" ["[shared::cluster] {u32 u64}"] memory::mapa;
        "getctarank" ["[shared::cluster] {u32 u64}"] memory::getctarank;
    }
    Convert, "Data Movement: cvt, cvt.pack, cvta, isspacep" => {
        "cvt" ["[sat] {u8 u16 u32 u64 s8 s16 s32 s64} {u8 u16 u32 u64 s8 s16 s32 s64}",
               "{rni rzi rmi rpi} [ftz] [sat] {u8 u16 u32 u64 s8 s16 s32 s64} {f16 bf16 f32 f64}",
               "{rn rz rm rp} [sat] {f16 bf16 f32 f64} {u8 u16 u32 u64 s8 s16 s32 s64}",
               "[rni rzi rmi rpi] [ftz] [sat] f32 f32", "[rni rzi rmi rpi] [sat] f64 f64",
               "[rni rzi rmi rpi] [ftz] [sat] f16 f16", "[rni rzi rmi rpi] [ftz] [sat] bf16 bf16",
               "[ftz] [sat] f32 {f16 bf16}", "[ftz] [sat] f64 {f16 bf16 f32}",
               "{rn rz rm rp} [ftz] [sat] f32 f64", "{rn rz rm rp} [ftz] [sat] f16 {bf16 f32 f64}",
               "[rn rz rm rp] [ftz] [sat] bf16 f16", "{rn rz rm rp} [ftz] [sat] bf16 {f32 f64}",
               "{rn rz rna} [relu] [satfinite] {f16 bf16 f16x2 bf16x2 tf32} f32",
               "rn satfinite [relu] {e4m3x2 e5m2x2} {f32 f16x2 bf16x2}",
               "rn [relu] {f16x2 bf16x2} {e4m3x2 e5m2x2 e2m3x2 e3m2x2 e2m1x2}",
               "rn satfinite [relu] {e2m3x2 e3m2x2 e2m1x2} {f32 f16x2 bf16x2}",
               "{rz rp} [satfinite] ue8m0x2 {f32 bf16x2}",
               "rn bf16x2 ue8m0x2"] convert::cvt;
        "cvt" ["pack sat {s16 u16 s8 u8 s4 u4 s2 u2} s32 [b32]"] convert::pack;
        "cvta" ["[to] {global shared shared::cta shared::cluster local const param param::entry} {u32 u64}"]
            convert::cvta;
        "isspacep" ["{global shared shared::cta shared::cluster local const param param::entry}"] convert::isspacep;
    }
    Async, "Data Movement: cp.async" => {
        "cp" ["async {ca cg} {shared shared::cta} global [L2::cache_hint] [L2::64B L2::128B L2::256B]"] issued::<cp_async::CpAsync>;
        "cp" ["async commit_group"] issued::<cp_async::CommitGroup>;
        "cp" ["async {wait_group wait_all}"] issued::<cp_async::WaitGroup>;
    }
    Async, "Data Movement: cp.async.bulk, cp.reduce.async.bulk" => {
        "cp" ["async bulk {shared::cluster shared::cta} global mbarrier::complete_tx::bytes [multicast::cluster] \
               [L2::cache_hint]"] issued::<bulk::linear::Load>;
        "cp" ["async bulk shared::cluster shared::cta mbarrier::complete_tx::bytes"] issued::<bulk::linear::SharedToShared>;
        "cp" ["async bulk global shared::cta bulk_group [L2::cache_hint]"] issued::<bulk::linear::Store>;
        "cp" ["reduce async bulk shared::cluster shared::cta mbarrier::complete_tx::bytes \
               {and or xor add inc dec min max} {s32 u32 s64 u64 b32}"] issued::<bulk::linear::SharedToShared>;
        "cp" ["reduce async bulk global shared::cta bulk_group [L2::cache_hint] \
               {and or xor add inc dec min max} [noftz] {f16 bf16 b32 u32 s32 b64 u64 s64 f32 f64}"]
            issued::<bulk::linear::Store>;
        "cp" ["async bulk prefetch L2 global [L2::cache_hint]",
              "async bulk prefetch tensor {1d 2d 3d 4d 5d} L2 global [tile tile::gather4 im2col] [L2::cache_hint]"] bulk::linear::prefetch;
        "cp" ["async bulk commit_group"] issued::<cp_async::CommitGroup>;
        "cp" ["async bulk wait_group [read]"] issued::<bulk::groups::WaitGroup>;
        "st" ["async [weak] [shared::cluster] mbarrier::complete_tx::bytes [v2 v4] \
               {b32 b64 u32 u64 s32 s64 f32 f64}"] issued::<bulk::st_async::StAsync>;
        "red" ["async [relaxed] [cluster] [shared::cluster] mbarrier::complete_tx::bytes \
                {inc dec min max add and or xor} {u32 s32 u64 s64 b32 b64}"] issued::<bulk::st_async::StAsync>;
    }
    Async, "Data Movement: cp.async.bulk.tensor, cp.reduce.async.bulk.tensor" => {
        "cp" ["async bulk tensor {1d 2d 3d 4d 5d} {shared::cluster shared::cta} global [tile tile::gather4 im2col] \
               mbarrier::complete_tx::bytes [multicast::cluster] [cta_group::1 cta_group::2] [L2::cache_hint]"]
            issued::<bulk::tensor::Load>;
        "cp" ["async bulk tensor {1d 2d 3d 4d 5d} global shared::cta [tile tile::scatter4 im2col_no_offs] bulk_group \
               [L2::cache_hint]",
              "reduce async bulk tensor {1d 2d 3d 4d 5d} global shared::cta {add min max inc dec and or xor} \
               [tile im2col_no_offs] bulk_group [L2::cache_hint]"] issued::<bulk::tensor::Store>;
    }
    Async, "Data Movement: tensormap.replace; Parallel Synchronization: tensormap.cp_fenceproxy" => {
        "tensormap" ["replace tile {global_address rank box_dim global_dim global_stride element_stride elemtype \
                      interleave_layout swizzle_mode swizzle_atomicity fill_mode} \
                      [global shared::cta] b1024 {b32 b64}"] issued::<tensor_map::Replace>;
        "tensormap" ["cp_fenceproxy global shared::cta tensormap::generic release {cta cluster gpu sys} sync aligned"]
            issued::<tensor_map::CpFenceproxy>;
    }
    Control, "Control Flow Instructions" => {
        "bra" ["[uni]"] control::bra;
        "brx" ["idx [uni]"] control::brx;
        "call" ["[uni]"] control::call;
        "ret" ["[uni]"] control::ret;
        "exit" [""] control::exit;
    }
    Other, "Miscellaneous Instructions" => {
        "trap" [""] control::trap;
        "brkpt" [""] control::trap;
        "nanosleep" ["u32"] control::pause;
        "pmevent" ["[mask]"] control::pause;
    }
    Warp, "Data Movement: shfl.sync" => {
        "shfl" ["sync {up down bfly idx} b32"] issued::<warp::Shfl>;
    }
    Warp, "Parallel Synchronization: vote.sync, match.sync, activemask, redux.sync, elect.sync" => {
        "vote" ["sync {all any uni} pred", "sync ballot b32"] issued::<warp::Vote>;
        "match" ["sync {any all} {b32 b64}"] issued::<warp::Match>;
        "activemask" ["b32"] warp::activemask;
        "redux" ["sync {add min max} {u32 s32}", "sync {and or xor} b32", "sync {min max} [abs] [NaN] f32"]
            issued::<warp::Redux>;
        "elect" ["sync"] issued::<warp::Elect>;
    }
    Barrier, "Parallel Synchronization: bar, barrier, bar.warp.sync" => {
        "bar" ["warp sync"] issued::<warp::SyncMembers>;
        "bar" ["[cta] {sync arrive}", "[cta] red popc u32", "[cta] red {and or} pred"] issued::<barrier::Bar>;
        "barrier" ["[cta] {sync arrive} [aligned]", "[cta] red popc [aligned] u32",
                   "[cta] red {and or} [aligned] pred"] issued::<barrier::Bar>;
    }
    Barrier, "Parallel Synchronization: membar, fence" => {
        "membar" ["{cta gl sys}"] issued::<atomic::Fence>;
        "fence" ["[sc acq_rel acquire release] {cta cluster gpu sys}",
                 "acquire sync_restrict::shared::cluster cluster",
                 "release sync_restrict::shared::cta cluster",
                 "mbarrier_init release cluster",
                 "proxy tensormap::generic {acquire release} {cta cluster gpu sys}"] issued::<atomic::Fence>;
        "fence" ["proxy {async async::global async::shared::cta async::shared::cluster alias}",
                 "proxy async {global shared::cta shared::cluster}",
                 "proxy async::generic acquire sync_restrict::shared::cluster cluster",
                 "proxy async::generic release sync_restrict::shared::cta cluster"] issued::<atomic::ProxyFence>;
    }
    Barrier, "Parallel Synchronization: mbarrier" => {
        "mbarrier" ["init [shared shared::cta] b64"] issued::<mbarrier::Init>;
        "mbarrier" ["inval [shared shared::cta] b64"] issued::<mbarrier::Inval>;
        "mbarrier" ["{expect_tx complete_tx} [relaxed] [cta cluster] [shared shared::cta shared::cluster] b64"]
            issued::<mbarrier::Transaction>;
        "mbarrier" ["{arrive arrive_drop} [expect_tx] [noComplete] [release relaxed] [cta cluster] \
                     [shared shared::cta shared::cluster] b64"] issued::<mbarrier::Arrive>;
        "mbarrier" ["{test_wait try_wait} [parity] [acquire relaxed] [cta cluster] [shared shared::cta] b64"]
            issued::<mbarrier::Wait>;
        "cp" ["async mbarrier arrive [noinc] [shared shared::cta] b64"] issued::<cp_async::MbarrierArrive>;
    }
    Barrier, "Parallel Synchronization: barrier.cluster" => {
        "barrier" ["cluster arrive [release relaxed] [aligned]"] issued::<cluster::Arrive>;
        "barrier" ["cluster wait [acquire] [aligned]"] issued::<cluster::Wait>;
    }
    Async, "Parallel Synchronization: clusterlaunchcontrol, griddepcontrol" => {
        "clusterlaunchcontrol" ["try_cancel async [shared::cta] mbarrier::complete_tx::bytes \
                                 [multicast::cluster::all] b128"] issued::<launch_control::TryCancel>;
        "clusterlaunchcontrol" ["query_cancel is_canceled pred b128",
                                "query_cancel get_first_ctaid v4 b32 b128",
                                "query_cancel {get_first_ctaid::x get_first_ctaid::y get_first_ctaid::z} b32 b128"]
            issued::<launch_control::QueryCancel>;
        "griddepcontrol" ["{wait launch_dependents}"] issued::<launch_control::GridDepControl>;
    }
    Other, "Miscellaneous Instructions: setmaxnreg" => {
        "setmaxnreg" ["{inc dec} sync aligned u32"] issued::<launch_control::SetMaxNReg>;
    }
    Matrix, "Warp Level Matrix Multiply-Accumulate: mma, ldmatrix, stmatrix, movmatrix" => {
        "mma" ["sync aligned {m16n8k8 m16n8k16} row col {f16 f32} f16 f16 {f16 f32}",
               "sync aligned {m16n8k8 m16n8k16} row col f32 bf16 bf16 f32",
               "sync aligned {m16n8k4 m16n8k8} row col f32 tf32 tf32 f32",
               "sync aligned {m16n8k16 m16n8k32} row col {f16 f32} {e4m3 e5m2} {e4m3 e5m2} {f16 f32}",
               "sync aligned {m16n8k16 m16n8k32} row col [satfinite] s32 {u8 s8} {u8 s8} s32",
               "sync aligned m16n8k32 row col kind::f8f6f4 \
                {f16 f32} {e4m3 e5m2 e2m3 e3m2 e2m1} {e4m3 e5m2 e2m3 e3m2 e2m1} {f16 f32}",
               "{sp sp::ordered_metadata} sync aligned {m16n8k16 m16n8k32} row col {f16 f32} f16 f16 {f16 f32}",
               "{sp sp::ordered_metadata} sync aligned {m16n8k16 m16n8k32} row col f32 bf16 bf16 f32",
               "{sp sp::ordered_metadata} sync aligned {m16n8k8 m16n8k16} row col f32 tf32 tf32 f32",
               "{sp sp::ordered_metadata} sync aligned m16n8k64 row col f32 {e4m3 e5m2} {e4m3 e5m2} f32",
               "sp::ordered_metadata sync aligned m16n8k64 row col kind::f8f6f4 \
                {f16 f32} {e4m3 e5m2 e2m3 e3m2 e2m1} {e4m3 e5m2 e2m3 e3m2 e2m1} {f16 f32}",
               "{sp sp::ordered_metadata} sync aligned {m16n8k32 m16n8k64} row col [satfinite] s32 {u8 s8} {u8 s8} s32"]
            issued::<matrix::mma::Mma>;
        "mma" ["sync aligned {m8n8k4 m16n8k4 m16n8k8 m16n8k16} row col f64 f64 f64 f64 [rn]"]
            issued::<matrix::double::DoubleMma>;
        "mma" ["sync aligned m16n8k64 row col kind::mxf4nvf4 block_scale scale_vec::4X f32 e2m1 e2m1 f32 {ue4m3 ue8m0}",
               "sync aligned m16n8k64 row col kind::mxf4nvf4 block_scale scale_vec::2X f32 e2m1 e2m1 f32 ue8m0",
               "sync aligned m16n8k64 row col kind::mxf4 block_scale [scale_vec::2X] f32 e2m1 e2m1 f32 ue8m0",
               "sync aligned m16n8k32 row col kind::mxf8f6f4 block_scale [scale_vec::1X] \
                f32 {e4m3 e5m2 e2m3 e3m2 e2m1} {e4m3 e5m2 e2m3 e3m2 e2m1} f32 ue8m0",
               "sp::ordered_metadata sync aligned m16n8k128 row col kind::mxf4nvf4 block_scale scale_vec::4X \
                f32 e2m1 e2m1 f32 {ue4m3 ue8m0}",
               "sp::ordered_metadata sync aligned m16n8k128 row col kind::mxf4nvf4 block_scale scale_vec::2X \
                f32 e2m1 e2m1 f32 ue8m0",
               "sp::ordered_metadata sync aligned m16n8k128 row col kind::mxf4 block_scale [scale_vec::2X] f32 e2m1 e2m1 f32 ue8m0",
               "sp::ordered_metadata sync aligned m16n8k64 row col kind::mxf8f6f4 block_scale [scale_vec::1X] \
                f32 {e4m3 e5m2 e2m3 e3m2 e2m1} {e4m3 e5m2 e2m3 e3m2 e2m1} f32 ue8m0"] issued::<matrix::scaled::ScaledMma>;
        "ldmatrix" ["sync aligned m8n8 {x1 x2 x4} [trans] [shared shared::cta] b16",
                    "sync aligned m8n16 {x1 x2 x4} [shared shared::cta] b8x16 {b6x16_p32 b4x16_p64}",
                    "sync aligned m16n16 {x1 x2} trans [shared shared::cta] b8",
                    "sync aligned m16n16 {x1 x2} trans [shared shared::cta] b8x16 {b6x16_p32 b4x16_p64}"]
            issued::<matrix::moves::LdMatrix>;
        "stmatrix" ["sync aligned m8n8 {x1 x2 x4} [trans] [shared shared::cta] b16",
                    "sync aligned m16n8 {x1 x2 x4} trans [shared shared::cta] b8"] issued::<matrix::moves::StMatrix>;
        "movmatrix" ["sync aligned m8n8 trans b16"] matrix::moves::movmatrix;
    }
    Matrix, "Warp Level Matrix Instructions: wmma.load, wmma.store, wmma.mma" => {
        "wmma" ["load {a b} sync aligned {row col} {m16n16k16 m8n32k16 m32n8k16} [global shared shared::cta] {f16 bf16 u8 s8}",
                "load {a b} sync aligned {row col} m16n16k8 [global shared shared::cta] tf32",
                "load {a b c} sync aligned {row col} m8n8k4 [global shared shared::cta] f64",
                "load c sync aligned {row col} {m16n16k16 m8n32k16 m32n8k16} [global shared shared::cta] {f16 f32 s32}",
                "load c sync aligned {row col} m16n16k8 [global shared shared::cta] f32"] issued::<matrix::wmma::Load>;
        "wmma" ["store d sync aligned {row col} {m16n16k16 m8n32k16 m32n8k16} [global shared shared::cta] {f16 f32 s32}",
                "store d sync aligned {row col} m16n16k8 [global shared shared::cta] f32",
                "store d sync aligned {row col} m8n8k4 [global shared shared::cta] f64"] issued::<matrix::wmma::Store>;
        "wmma" ["mma sync aligned {row col} {row col} {m16n16k16 m8n32k16 m32n8k16} {f16 f32} {f16 f32}",
                "mma sync aligned {row col} {row col} {m16n16k16 m8n32k16 m32n8k16} f32 bf16 bf16 f32",
                "mma sync aligned {row col} {row col} m16n16k8 f32 tf32 tf32 f32",
                "mma sync aligned {row col} {row col} {m16n16k16 m8n32k16 m32n8k16} s32 {u8 s8} {u8 s8} s32 [satfinite]"]
            issued::<matrix::wmma::Mma>;
        "wmma" ["mma sync aligned {row col} {row col} m8n8k4 [rn rz rm rp] f64 f64 f64 f64"] issued::<matrix::double::DoubleWmma>;
    }
    Matrix, "Asynchronous Warpgroup Level Matrix Instructions" => {
        "wgmma" [WGMMA_F16, WGMMA_BF16, WGMMA_TF32, WGMMA_F8, WGMMA_I8, WGMMA_SP_F16, WGMMA_SP_BF16, WGMMA_SP_TF32, WGMMA_SP_F8,
                 WGMMA_SP_I8] issued::<wgmma::MmaAsync>;
        "wgmma" ["fence sync aligned"] issued::<wgmma::Fence>;
        "wgmma" ["commit_group sync aligned"] issued::<wgmma::CommitGroup>;
        "wgmma" ["wait_group sync aligned"] issued::<wgmma::WaitGroup>;
    }
    Matrix, "TensorCore 5th Generation: alloc, dealloc, relinquish_alloc_permit" => {
        "tcgen05" ["alloc {cta_group::1 cta_group::2} sync aligned [shared::cta] b32"] issued::<tcgen05::allocate::Alloc>;
        "tcgen05" ["dealloc {cta_group::1 cta_group::2} sync aligned b32"] issued::<tcgen05::allocate::Dealloc>;
        "tcgen05" ["relinquish_alloc_permit {cta_group::1 cta_group::2} sync aligned"] issued::<tcgen05::allocate::Relinquish>;
    }
    Matrix, "TensorCore 5th Generation: ld, st, wait, fence, commit" => {
        "tcgen05" ["ld sync aligned {32x32b 16x64b 16x128b 16x256b 16x32bx2} \
                    {x1 x2 x4 x8 x16 x32 x64 x128} [pack::16b] b32"] issued::<tcgen05::access::Ld>;
        "tcgen05" ["st sync aligned {32x32b 16x64b 16x128b 16x256b 16x32bx2} \
                    {x1 x2 x4 x8 x16 x32 x64 x128} [unpack::16b] b32"] issued::<tcgen05::access::St>;
        "tcgen05" ["{wait::ld wait::st} sync aligned"] issued::<tcgen05::access::Wait>;
        "tcgen05" ["{fence::before_thread_sync fence::after_thread_sync}"] issued::<tcgen05::fence::Fence>;
        "tcgen05" ["commit {cta_group::1 cta_group::2} mbarrier::arrive::one [shared::cluster] \
                    [multicast::cluster] b64"] issued::<tcgen05::commit::Commit>;
    }
    Matrix, "TensorCore 5th Generation: cp, shift, mma" => {
        "tcgen05" ["shift {cta_group::1 cta_group::2} down"] issued::<tcgen05::shift::Shift>;
        "tcgen05" ["cp {cta_group::1 cta_group::2} {128x256b 4x256b 128x128b}",
                   "cp {cta_group::1 cta_group::2} 64x128b {warpx2::02_13 warpx2::01_23}",
                   "cp {cta_group::1 cta_group::2} 32x128b warpx4"] issued::<tcgen05::cp::Cp>;
        "tcgen05" ["mma [sp] {cta_group::1 cta_group::2} {kind::f16 kind::tf32 kind::f8f6f4 kind::i8} \
                    [collector::a::fill collector::a::use collector::a::lastuse collector::a::discard]",
                   "mma ws cta_group::1 {kind::f16 kind::tf32 kind::f8f6f4 kind::i8} \
                    [collector::b0::fill collector::b0::use collector::b0::lastuse collector::b0::discard \
                     collector::b1::fill collector::b1::use collector::b1::lastuse collector::b1::discard \
                     collector::b2::fill collector::b2::use collector::b2::lastuse collector::b2::discard \
                     collector::b3::fill collector::b3::use collector::b3::lastuse collector::b3::discard]",
                   "mma [sp] {cta_group::1 cta_group::2} {kind::mxf8f6f4 kind::mxf4 kind::mxf4nvf4} block_scale \
                    [block16 block32 scale_vec::1X scale_vec::2X scale_vec::4X] \
                    [collector::a::fill collector::a::use collector::a::lastuse collector::a::discard]"] issued::<tcgen05::mma::Mma>;
    }
    Memory, "Parallel Synchronization: atom, red" => {
        "atom" [atomic_form!(atom "{and or xor} {b32 b64}"), atomic_form!(atom "cas {b16 b32 b64 b128}"),
                atomic_form!(atom "exch {b32 b64 b128}"), atomic_form!(atom "{inc dec} u32"),
                atomic_form!(atom "{min max} {u32 u64 s32 s64}"), atomic_form!(atom "add {u32 u64 s32 f32 f64}"),
                atomic_form!(atom "add noftz {f16 f16x2 bf16 bf16x2}"),
                atomic_form!(atom "{add min max} [noftz] {v2 v4 v8} {f16 f16x2 bf16 bf16x2 f32}")] issued::<atomic::Atom>;
        "red" [atomic_form!(red "{and or xor} {b32 b64}"), atomic_form!(red "{inc dec} u32"),
               atomic_form!(red "{min max} {u32 u64 s32 s64}"), atomic_form!(red "add {u32 u64 s32 f32 f64}"),
               atomic_form!(red "add noftz {f16 f16x2 bf16 bf16x2}"),
               atomic_form!(red "{add min max} [noftz] {v2 v4 v8} {f16 f16x2 bf16 bf16x2 f32}")] issued::<atomic::Red>;
    }
}

/// Returns the coverage list: a Markdown table of every opcode with its forms and its manual section.
pub fn coverage() -> String {
    let mut out = String::from("| opcode | modifiers | PTX ISA section |\n| --- | --- | --- |\n");
    for o in OPCODES {
        let form = o.form.split_whitespace().collect::<Vec<_>>().join(" ");
        out.push_str(&format!("| `{}` | `{form}` | {} |\n", o.name, o.section));
    }
    out
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;
    use std::sync::Arc;

    use super::*;
    use crate::code::Kernel;
    use crate::decode::form::{allows, groups};
    use crate::decode::kernel;
    use crate::decode::opcode::find;
    use crate::parser;
    use crate::parser::ast::{Ast, Function, Statement};
    use crate::parser::error::ParseError;

    #[test]
    fn every_form_is_well_formed() {
        for o in OPCODES {
            for g in groups(o.form) {
                assert!(!g.names.is_empty() && g.names.iter().all(|n| !n.contains(['{', '}', '[', ']'])), "{}", o.form);
            }
        }
    }

    const FORMS: &str = include_str!("testdata/forms.ptx");

    /// Returns the module of `testdata/forms.ptx` and its entry.
    fn forms() -> (Rc<Ast>, Function) {
        let mut ast = parser::parse(FORMS).unwrap();
        let at = ast.functions.iter().position(|f| f.entry).unwrap();
        let function = ast.functions.remove(at);
        (Rc::new(ast), function)
    }

    fn decode(ast: &Rc<Ast>, function: &Function) -> Result<Kernel, ParseError> {
        kernel::decode(ast, &Arc::default(), function, &Rc::default(), OPCODES)
    }

    #[test]
    fn sample_of_every_form_decodes() {
        let (ast, function) = forms();
        assert_eq!(decode(&ast, &function).unwrap().unsupported, []);
        let instructions = function.body.iter().flatten().filter_map(|s| match s {
            Statement::Instruction(i) => Some(i),
            _ => None,
        });
        let shown: Vec<*const Opcode> = instructions.map(|i| find(OPCODES, i).unwrap() as _).collect();
        let missing = OPCODES.iter().filter(|&o| !shown.contains(&(o as _)));
        let missing: Vec<_> = missing.map(|o| format!("`{}` with the form `{}`", o.name, o.form)).collect();
        assert!(missing.is_empty(), "testdata/forms.ptx has no sample of {missing:#?}");
    }

    /// Decodes each instruction of `testdata/forms.ptx` with each modifier of its form. Some combinations do not fit
    /// the operands and fail to decode. A decoder panics if it queries a modifier that none of its opcode's forms has.
    #[test]
    fn decoders_ask_for_modifiers_of_their_opcode() {
        let (ast, mut function) = forms();
        let (samples, mut body): (Vec<_>, Vec<_>) =
            function.body.take().unwrap().into_iter().partition(|s| matches!(s, Statement::Instruction(_)));
        body.push(Statement::Block(Vec::new()));
        function.body = Some(body);
        let mut decoded = 0;
        for sample in samples {
            let Statement::Instruction(sample) = sample else { unreachable!() };
            let opcode = find(OPCODES, &sample).unwrap();
            for group in groups(opcode.form) {
                let at = sample.modifiers.iter().position(|m| group.names.contains(&m.as_str()));
                for name in group.names {
                    let mut changed = sample.clone();
                    match at {
                        Some(at) => changed.modifiers[at] = name.into(),
                        None => changed.modifiers.push(name.into()),
                    }
                    *function.body.as_mut().unwrap().last_mut().unwrap() = Statement::Instruction(changed);
                    decoded += u32::from(decode(&ast, &function).is_ok());
                }
            }
        }
        assert!(decoded > 1500, "{decoded}");
    }

    /// The full opcodes of 28 GEMM kernels that three independent compilers generated for sm_90a and sm_100a.
    #[test]
    fn opcodes_of_real_gemm_kernels_are_known() {
        let list = include_str!("testdata/gemm_opcodes.txt");
        let unknown: Vec<&str> = list.lines().filter(|name| !known(name)).collect();
        assert!(unknown.is_empty(), "{unknown:#?}");
    }

    /// Opcodes that `ptxas` rejects.
    #[test]
    fn nonexistent_forms_are_unknown() {
        let wrong = [
            "cvt.f32.u32",
            "cvt.u32.f32",
            "cvt.f16.f32",
            "cvt.rn.u32.u16",
            "cvt.rn.f32.f16",
            "cvt.rz.u32.f32",
            "fma.f32",
            "setp.lo.s32",
            "setp.lt.b32",
            "setp.num.u32",
            "atom.shared.inc.s32",
            "atom.shared.add.b32",
            "atom.shared.and.u32",
            "atom.shared.min.f32",
            "ld.relaxed.u32",
            "ld.weak.gpu.u32",
            "st.release.global.u32",
        ];
        let known: Vec<_> = wrong.into_iter().filter(|name| known(name)).collect();
        assert!(known.is_empty(), "{known:#?}");
    }

    fn known(full_name: &str) -> bool {
        let mut parts = full_name.split('.').map(String::from);
        let name = parts.next().unwrap();
        let modifiers: Vec<String> = parts.collect();
        OPCODES.iter().any(|o| o.name == name && allows(o.form, &modifiers))
    }
}
