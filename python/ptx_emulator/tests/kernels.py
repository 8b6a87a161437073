"""PTX of the tests."""

HEAD = ".version 8.0\n.target {target}\n.address_size 64\n"


def entry(parameters: str, body: str, *, name: str = "k", target: str = "sm_80", before: str = "") -> str:
    """PTX of a kernel with registers %p, %r, %d, %f and the global thread index in %r1."""
    return (
        HEAD.format(target=target)
        + before
        + f".visible .entry {name}({parameters}) {{\n"
        + ".reg .pred %p<8>; .reg .b32 %r<32>; .reg .b64 %d<32>; .reg .f32 %f<16>;\n"
        + "mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x;\n"
        + "mad.lo.u32 %r1, %r2, %r3, %r4;\n"
        + body
        + "\nret;\n}\n"
    )


DOUBLE = entry(
    ".param .u64 x, .param .u64 y, .param .u32 n",
    """
ld.param.u64 %d1, [x]; ld.param.u64 %d2, [y]; ld.param.u32 %r5, [n];
setp.ge.u32 %p1, %r1, %r5;
@%p1 bra DONE;
mul.wide.u32 %d3, %r1, 4; add.u64 %d4, %d1, %d3; add.u64 %d5, %d2, %d3;
ld.global.f32 %f1, [%d4];
add.f32 %f2, %f1, %f1;
st.global.f32 [%d5], %f2;
DONE:""",
)

# All threads store their indices to one word.
RACE = entry(
    ".param .u64 out",
    "ld.param.u64 %d1, [out]; st.global.u32 [%d1], %r1;",
)

# A thread reads its neighbor's word of shared memory without a barrier. Only some schedules show wrong numbers.
NO_BARRIER = entry(
    ".param .u64 out",
    """
ld.param.u64 %d1, [out];
mov.u32 %r5, tile; shl.b32 %r6, %r4, 2; add.u32 %r7, %r5, %r6;
st.shared.u32 [%r7], %r4;
xor.b32 %r8, %r6, 128; add.u32 %r9, %r5, %r8;
ld.shared.u32 %r10, [%r9];
cvt.u64.u32 %d2, %r6; add.u64 %d3, %d1, %d2;
st.global.u32 [%d3], %r10;""",
    before=".shared .align 16 .b8 tile[256];\n",
)

SUM_OF_POINTERS = entry(
    ".param .u64 list, .param .u64 out",
    """
ld.param.u64 %d1, [list]; ld.param.u64 %d2, [out];
ld.global.u64 %d3, [%d1]; ld.global.u64 %d4, [%d1+8];
ld.global.u32 %r5, [%d3]; ld.global.u32 %r6, [%d4];
add.u32 %r7, %r5, %r6;
st.global.u32 [%d2], %r7;""",
)

SPIN = entry(
    ".param .u64 flag",
    "ld.param.u64 %d1, [flag];\nAGAIN: ld.volatile.global.u32 %r5, [%d1]; setp.eq.u32 %p1, %r5, 0;\n@%p1 bra AGAIN;",
)

COUNTER = entry(
    ".param .u64 out",
    """
ld.param.u64 %d1, [out];
atom.global.add.u32 %r5, [calls], 1;
st.global.u32 [%d1], %r5;""",
    before=".global .u32 calls = 0;\n",
)

EMPTY = entry("", "")

BULK = entry(
    ".param .align 64 .b8 map[128], .param .u64 out",
    """
ld.param.u64 %d1, [out];
mov.u64 %d2, map; cvta.param.u64 %d2, %d2;
mov.u32 %r5, tile; mov.u32 %r6, bar;
setp.ne.u32 %p1, %r4, 0;
@%p1 bra WAIT;
mbarrier.init.shared.b64 [%r6], 1;
fence.mbarrier_init.release.cluster;
fence.proxy.async;
mbarrier.arrive.expect_tx.shared.b64 %d5, [%r6], 128;
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r5], [%d2, {4, 2}], [%r6];
WAIT: bar.sync 0;
TRY: mbarrier.try_wait.parity.shared.b64 %p2, [%r6], 0;
@!%p2 bra TRY;
shl.b32 %r7, %r4, 2; add.u32 %r8, %r5, %r7; ld.shared.u32 %r9, [%r8];
cvt.u64.u32 %d3, %r7; add.u64 %d4, %d1, %d3;
st.global.u32 [%d4], %r9;""",
    target="sm_90a",
    before=".shared .align 128 .b8 tile[128];\n.shared .align 8 .b64 bar;\n",
)

# Each thread claims a place by an atomic addition, and writes its index there: no race, but the result depends on the order.
PLACES = entry(
    ".param .u64 out, .param .u64 next",
    """
ld.param.u64 %d1, [out]; ld.param.u64 %d2, [next];
and.b32 %r5, %r4, 31; setp.ne.u32 %p1, %r5, 0;
@%p1 ret;
atom.global.add.u32 %r6, [%d2], 1;
mul.wide.u32 %d3, %r6, 4; add.u64 %d3, %d1, %d3;
st.global.u32 [%d3], %r4;""",
)
