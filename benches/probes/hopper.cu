// Measures instructions of a Hopper SM beside each other: any kind beside wgmma, loads that hit L1, copies of 16 bytes to shared memory. Also
// measures streams from DRAM and L2 by the bytes in flight. One line per figure. The argument is a letter that selects a part:
// placement of CTAs (w), registers of accesses (r), L1 (l), L2 (2), beside wgmma (b), streams (s).
//
//   nvcc -O2 -std=c++17 -gencode=arch=compute_90a,code=sm_90a hopper.cu -o hopper && for part in w r l 2 b s; do ./hopper $part; done
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>
#include <cuda_runtime.h>

#define CHECK(call)                                                                                             \
    do {                                                                                                        \
        cudaError_t e = (call);                                                                                 \
        if (e != cudaSuccess) {                                                                                 \
            std::printf("%s: %s\n", #call, cudaGetErrorString(e));                                              \
            std::exit(1);                                                                                       \
        }                                                                                                       \
    } while (0)

// Sums of a thread by columns: D<n> are n / 2 registers.
#define S8 "d0,d1,d2,d3"
#define S16 S8 ",d4,d5,d6,d7"
#define S32 S16 ",d8,d9,d10,d11,d12,d13,d14,d15"
#define S64 S32 ",d16,d17,d18,d19,d20,d21,d22,d23,d24,d25,d26,d27,d28,d29,d30,d31"
#define S128 S64 ",d32,d33,d34,d35,d36,d37,d38,d39,d40,d41,d42,d43,d44,d45,d46,d47,d48,d49,d50,d51,d52,d53,d54,d55,d56,d57,d58,d59,d60,d61,d62,d63"
#define RS1(N, A) "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" S##N "}, {" A "}, %3, 1, 1, 1, 0;\n"
#define RS(N) RS1(N, "a0,a1,a2,a3") RS1(N, "a4,a5,a6,a7") RS1(N, "a8,a9,a10,a11") RS1(N, "a12,a13,a14,a15")
#define SS1(N) "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" S##N "}, %3, %3, 1, 1, 1, 0, 0;\n"
#define SS(N) SS1(N) SS1(N) SS1(N) SS1(N)
// Runs groups of eight products, one behind another. `count` is the number of products until the deadline.
#define MULTIPLY(WAY, N)                                                                                        \
    asm volatile("{\n.reg .f32 d<64>;\n.reg .b32 a<16>;\n.reg .b64 now;\n.reg .pred p;\n.reg .b32 done;\n"                         \
                 "mov.b32 a0, %4;mov.b32 a1, %5;mov.b32 a2, %6;mov.b32 a3, %7;mov.b32 a4, %8;mov.b32 a5, %9;mov.b32 a6, %10;mov.b32 a7, %11;mov.b32 a8, %12;mov.b32 a9, %13;mov.b32 a10, %14;mov.b32 a11, %15;mov.b32 a12, %16;mov.b32 a13, %17;mov.b32 a14, %18;mov.b32 a15, %19;\n" ZERO                           \
                 "mov.u32 %0, 0; mov.u32 done, 0;\n"                                                            \
                 "again:\nwgmma.fence.sync.aligned;\n" WAY(N) WAY(N) "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;\n"   \
                 "add.u32 done, done, 8;\nmov.u64 now, %%clock64;\nsetp.lt.s64 p, now, %20;\n@p mov.u32 %0, done;\n" \
                 "setp.lt.u32 p, done, %1;\n@p bra again;\n"        \
                 "wgmma.wait_group.sync.aligned 0;\n"                                                           \
                 "st.global.f32 [%2], d0;\n}"                                                                   \
                 : "=r"(count) : "r"((uint32_t)multiplies), "l"(out), "l"(descriptor), "r"(z[0]), "r"(z[1]), "r"(z[2]), "r"(z[3]), "r"(z[4]), "r"(z[5]), "r"(z[6]), "r"(z[7]), "r"(z[8]), "r"(z[9]), "r"(z[10]), "r"(z[11]), "r"(z[12]), "r"(z[13]), "r"(z[14]), "r"(z[15]), "l"(until) : "memory")
#define Z4(a, b, c, d) "mov.f32 d" #a ", 0f00000000; mov.f32 d" #b ", 0f00000000; mov.f32 d" #c ", 0f00000000; mov.f32 d" #d ", 0f00000000;\n"
#define ZERO                                                                                                    \
    Z4(0, 1, 2, 3) Z4(4, 5, 6, 7) Z4(8, 9, 10, 11) Z4(12, 13, 14, 15) Z4(16, 17, 18, 19) Z4(20, 21, 22, 23)      \
    Z4(24, 25, 26, 27) Z4(28, 29, 30, 31) Z4(32, 33, 34, 35) Z4(36, 37, 38, 39) Z4(40, 41, 42, 43)              \
    Z4(44, 45, 46, 47) Z4(48, 49, 50, 51) Z4(52, 53, 54, 55) Z4(56, 57, 58, 59) Z4(60, 61, 62, 63)

__device__ __forceinline__ uint32_t other(int kind, uint32_t v, uint32_t by, uint32_t shared) {
    switch (kind) {
    case 0: asm volatile("lop3.b32 %0, %0, %1, %2, 0x6a;" : "+r"(v) : "r"(by), "r"(shared)); break;
    case 1: asm volatile("mul.rn.f16x2 %0, %0, %1;" : "+r"(v) : "r"(by)); break;
    case 2: asm volatile("ld.volatile.shared.b32 %0, [%1];" : "=r"(v) : "r"(shared)); break;
    case 3: asm volatile("fma.rn.f32 %0, %0, %1, %1;" : "+r"(v) : "r"(by)); break;
    case 4: asm volatile("prmt.b32 %0, %0, %1, 0x5140;" : "+r"(v) : "r"(by)); break;
    case 5: asm volatile("mad.lo.u32 %0, %0, %1, %1;" : "+r"(v) : "r"(by)); break;
    case 8: asm volatile("fma.rn.f16x2 %0, %0, %1, %1;" : "+r"(v) : "r"(by)); break;
    case 9: asm volatile("mul.rn.bf16x2 %0, %0, %1;" : "+r"(v) : "r"(by)); break;
    case 6: asm volatile("lop3.b32 %0, %0, 0x6a6a, 0x1234, 0x6a;" : "+r"(v)); break;  // one register read
    }
    return v;
}

// One warpgroup multiplies; the others run one kind of instruction (7: a shift, two lop3 and a product of f16) until the deadline.
template <int N, bool IN_REGISTERS>
__global__ void beside(int kind, int multiplies, int cycles, uint64_t* counts, float* out) {
    extern __shared__ __align__(1024) char shared[];
    uint32_t at = (uint32_t)__cvta_generic_to_shared(shared);
    for (uint32_t i = threadIdx.x; i < 48 << 8; i += blockDim.x) ((uint32_t*)shared)[i] = 0;
    asm volatile("fence.proxy.async.shared::cta;");
    __syncthreads();
    uint32_t z[16], place_of_b = __shfl_sync(~0u, at >> 4 & 0x3fff, 0);
    uint32_t late = threadIdx.x;
    for (uint32_t& zero : z) asm volatile("add.u32 %1, %1, 1024; shr.u32 %0, %1, 20;" : "=r"(zero), "+r"(late));
    uint64_t descriptor = (uint64_t)place_of_b | 1ull << 16 | 64ull << 32 | 1ull << 62;
    long long start = clock64(), until = start + cycles;
    uint32_t count = 0;
    if (threadIdx.x < 128) {
        if (multiplies) {
            if constexpr (IN_REGISTERS) {
                if constexpr (N == 8) MULTIPLY(RS, 8);
                if constexpr (N == 16) MULTIPLY(RS, 16);
                if constexpr (N == 32) MULTIPLY(RS, 32);
                if constexpr (N == 64) MULTIPLY(RS, 64);
                if constexpr (N == 128) MULTIPLY(RS, 128);
            } else {
                if constexpr (N == 16) MULTIPLY(SS, 16);
                if constexpr (N == 64) MULTIPLY(SS, 64);
                if constexpr (N == 128) MULTIPLY(SS, 128);
            }
        }
    } else {
        uint32_t v[8], by = threadIdx.x & 1;
        for (int i = 0; i < 8; ++i) v[i] = threadIdx.x + i;
        uint32_t place = at + threadIdx.x % 32 * 4;
#define LOOP(K)                                                                                                 \
    case K:                                                                                                     \
        do {                                                                                                    \
            _Pragma("unroll") for (int n = 0; n < 8; ++n)                                                       \
                _Pragma("unroll") for (int i = 0; i < 8; ++i) v[i] = other(K, v[i], by, place);                 \
            count += 64;                                                                                        \
        } while (clock64() < until);                                                                            \
        break;
        switch (kind) {
            LOOP(0) LOOP(1) LOOP(2) LOOP(3) LOOP(4) LOOP(5) LOOP(6) LOOP(8) LOOP(9)
        case 7:
            do {
#pragma unroll
                for (int n = 0; n < 2; ++n)
#pragma unroll
                    for (int i = 0; i < 8; ++i) {
                        asm volatile("shf.r.wrap.b32 %0, %0, %1, 3;" : "+r"(v[i]) : "r"(by));
                        v[i] = other(0, v[i], by, place);
                        v[i] = other(0, v[i], by, place);
                        v[i] = other(1, v[i], by, place);
                    }
                count += 64;
            } while (clock64() < until);
            break;
        }
        uint32_t sum = 0;
        for (int i = 0; i < 8; ++i) sum ^= v[i];
        if (sum == 0x12345) out[1] = 1;
    }
    long long took = threadIdx.x < 128 ? cycles : clock64() - start;
    if (threadIdx.x % 32 == 0) {
        counts[threadIdx.x / 32 * 2] = count;
        counts[threadIdx.x / 32 * 2 + 1] = took;
    }
}

static uint64_t* counts;
static float* out;

template <int N, bool RSWAY>
static void beside_all() {
    auto kernel = beside<N, RSWAY>;
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 << 10));
    const char* kinds[] = {"lop3", "hmul2", "lds", "ffma", "prmt", "imad", "lop3-1reg", "mix", "hfma2", "hmul2.bf16"};
    auto run = [&](int kind, int multiplies, int groups) {
        multiplies *= 32768 / (N < 32 ? 13 : N / 2) / 8 * 8;
        kernel<<<1, 128 * (1 + groups), 64 << 10>>>(kind, multiplies, 30000, counts, out);
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
        double products = counts[0] ? (double)counts[1] / counts[0] : 0, others = 0;
        for (int w = 0; w < groups; ++w) others += (double)counts[(4 + 4 * w) * 2] / counts[(4 + 4 * w) * 2 + 1];
        return std::make_pair(products, others);
    };
    run(0, 1, 0);
    double alone = run(0, 1, 0).first;
    for (int kind = 0; kind < 10; ++kind)
        for (int groups : {1, 2, 3}) {
            if (groups == 3 && N > 64) continue;
            double rate = run(kind, 0, groups).second;
            auto [products, beside] = run(kind, 1, groups);
            std::printf("beside %s n%-3d %-10s %d groups: product %6.1f alone %6.1f with; others %.3f alone %.3f with; more cycles per instruction %.2f\n",
                        RSWAY ? "rs" : "ss", N, kinds[kind], groups, alone, products, rate, beside, 1 / beside - 1 / rate);
        }
}

// ---- placement of CTAs
__global__ void where(uint32_t* sm) {
    extern __shared__ char shared[];
    uint32_t n;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(n));
    if (threadIdx.x == 0) sm[blockIdx.x] = n;
    for (long long start = clock64(); clock64() - start < 20000;) {}
}

// ---- bulk copies from L2 of lines that pairs of SMs share, one of the pair late
__global__ void shared_copies(const char* from, int times, uint32_t wrap, int distance, int late, int active, long long* cycles) {
    extern __shared__ __align__(1024) char stage[];
    __shared__ __align__(8) uint64_t full[16];
    if (threadIdx.x != 0) return;
    constexpr uint32_t BYTES = 16384, STAGES = 8;
    uint32_t bar = (uint32_t)__cvta_generic_to_shared(full), to = (uint32_t)__cvta_generic_to_shared(stage);
    for (uint32_t s = 0; s < STAGES; ++s) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(bar + 8 * s));
    asm volatile("fence.mbarrier_init.release.cluster;");
    asm volatile("fence.proxy.async.shared::cta;");
    uint32_t sm, at = 0;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    // SMs n and n + distance have the same lines; 0: every SM has its own.
    // Idle SMs: none, every second, every second pair, the upper half, from 16 on, from 2 on.
    if ((active == 1 && sm % 2) || (active == 2 && sm / 2 % 2) || (active == 3 && sm >= 66) || (active == 4 && sm >= 16) || (active == 5 && sm >= 2)) { cycles[blockIdx.x] = 0; return; }
    bool second = distance && sm / distance % 2;
    uint32_t group = distance ? sm / (2 * distance) * distance + sm % distance : sm;
    from += (size_t)group * wrap;
    auto issue = [&](uint32_t s) {
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar + 8 * s), "r"(BYTES));
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to + s * BYTES),
                     "l"(from + at), "r"(BYTES), "r"(bar + 8 * s)
                     : "memory");
        at += BYTES;
        if (at >= wrap) at -= wrap;
    };
    long long start = clock64();
    if (second) while (clock64() - start < late) {}
    start = clock64();
    for (uint32_t s = 0; s < STAGES; ++s) issue(s);
    uint32_t parity = 0;
    for (uint32_t n = 0, s = 0; n < times; ++n) {
        uint32_t done = 0;
        while (!done)
            asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                         : "=r"(done) : "r"(bar + 8 * s), "r"(parity) : "memory");
        if (n + STAGES < times) issue(s);
        if (++s == STAGES) { s = 0; parity ^= 1; }
    }
    cycles[blockIdx.x] = clock64() - start;
}

// ---- streams: each warp copies groups of LINES x 512 bytes by cp.async of 16 bytes per lane, with AHEAD groups in flight
template <int AHEAD, int LINES>
__global__ void stream_copies(const char* from, int groups, long long* cycles) {
    extern __shared__ __align__(1024) char stage[];
    constexpr int BYTES = 512 * LINES;
    int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t to = (uint32_t)__cvta_generic_to_shared(stage) + warp * (AHEAD + 1) * BYTES + lane * 16;
    const char* p = from + ((size_t)(blockIdx.x * warps + warp) * groups) * BYTES + lane * 16;
    __syncthreads();
    long long start = clock64();
    int slot = 0;
    auto issue = [&](bool there) {
        if (there)
#pragma unroll
            for (int i = 0; i < LINES; ++i)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + slot * BYTES + i * 512), "l"(p + i * 512) : "memory");
        asm volatile("cp.async.commit_group;" ::: "memory");
        p += BYTES;
        if (++slot > AHEAD) slot = 0;
    };
    for (int g = 0; g < AHEAD; ++g) issue(g < groups);
    uint32_t sum = 0;
    for (int g = 0, read = 0; g < groups; ++g) {
        asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD - 1) : "memory");
        __syncwarp();
        uint32_t v;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(to + read * BYTES));
        sum += v;
        if (++read > AHEAD) read = 0;
        issue(g + AHEAD < groups);
    }
    __syncthreads();
    if (threadIdx.x == 0) cycles[blockIdx.x] = clock64() - start + (sum == 0x12345);
}

// The same with loads of 16 bytes to registers, AHEAD x 512 bytes at once.
template <int AHEAD>
__global__ void stream_loads(const char* from, int groups, long long* cycles) {
    int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const char* p = from + ((size_t)(blockIdx.x * warps + warp) * groups) * 512 + lane * 16;
    __syncthreads();
    long long start = clock64();
    uint32_t sum = 0;
    for (int g = 0; g < groups; g += AHEAD, p += 512 * AHEAD) {
        uint4 v[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) v[i] = __ldcg((const uint4*)(p + i * 512));
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) sum ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
    }
    __syncthreads();
    if (threadIdx.x == 0) cycles[blockIdx.x] = clock64() - start + (sum == 0x12345);
}

// Bulk copies of `bytes` bytes by one thread, with `ahead` in flight.
__global__ void stream_bulk(const char* from, uint32_t bytes, int ahead, int times, long long* cycles) {
    extern __shared__ __align__(1024) char stage[];
    __shared__ __align__(8) uint64_t full[16];
    if (threadIdx.x != 0) return;
    uint32_t bar = (uint32_t)__cvta_generic_to_shared(full), to = (uint32_t)__cvta_generic_to_shared(stage);
    for (int s = 0; s < ahead; ++s) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(bar + 8 * s));
    asm volatile("fence.mbarrier_init.release.cluster;");
    asm volatile("fence.proxy.async.shared::cta;");
    from += (size_t)blockIdx.x * times * bytes;
    auto issue = [&](int s) {
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar + 8 * s), "r"(bytes));
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to + s * bytes),
                     "l"(from), "r"(bytes), "r"(bar + 8 * s)
                     : "memory");
        from += bytes;
    };
    long long start = clock64();
    for (int s = 0; s < ahead && s < times; ++s) issue(s);
    uint32_t parity = 0;
    for (int n = 0, s = 0; n < times; ++n) {
        uint32_t done = 0;
        while (!done)
            asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                         : "=r"(done) : "r"(bar + 8 * s), "r"(parity) : "memory");
        if (n + ahead < times) issue(s);
        if (++s == ahead) { s = 0; parity ^= 1; }
    }
    cycles[blockIdx.x] = clock64() - start;
}

// Fills L2 with lines that need no write-back.
__global__ void fill(const uint4* from, size_t count, uint32_t* out) {
    uint32_t sum = 0;
    for (size_t at = (size_t)blockIdx.x * blockDim.x + threadIdx.x; at < count; at += (size_t)gridDim.x * blockDim.x) sum ^= __ldcg(from + at).x;
    if (sum == 0x12345678) *out = sum;
}

// ---- throughput of L1 and shared memory: loads of a `kind`, eight in flight per warp. Result: cycles per instruction of a warp.
__global__ void l1(const char* from, int kind, int times, long long* cycles, uint32_t* out) {
    extern __shared__ __align__(1024) char shared[];
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, sum = 0;
    uint32_t place = (uint32_t)__cvta_generic_to_shared(shared) + lane * 16;
    // 0: 512 neighboring bytes; 1: four lanes have 16 of every 32 bytes, the other lanes the same; 2: like 1, in eight rows 4 KB apart; 3: all the same; 4: 4 bytes each
    uint32_t offset = kind == 0 ? lane * 16 : kind == 1 ? lane % 4 * 32 : kind == 2 ? lane % 4 * 32 + lane / 4 * 4096 : kind == 3 ? 0 : lane * 4;
    const char* p = from + offset;
    for (int i = 0; i < 8; ++i) sum ^= __ldca((const uint4*)(p + (kind == 0 ? i * 512 : i * 128))).x;
    __syncthreads();
    long long start = clock64();
    for (int n = 0; n < times; ++n) {
        if (kind <= 3) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                uint32_t a, b, c, d;
                asm volatile("ld.global.ca.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "l"(p + (kind == 0 ? i * 512 : i * 128)));
                sum ^= a ^ b ^ c ^ d;
            }
        } else if (kind == 4) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                uint32_t a;
                asm volatile("ld.global.ca.u32 %0, [%1];" : "=r"(a) : "l"(p + i * 128));
                sum ^= a;
            }
        } else if (kind == 5) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                uint32_t a, b, c, d;
                asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(place + i * 512));
                sum ^= a ^ b ^ c ^ d;
            }
        } else if (kind == 6 || kind == 7) {
            // Half of the loads from shared memory, half as in kind 0 or 1.
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                uint32_t a, b, c, d, e, f, g, h;
                asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(place + i * 512));
                asm volatile("ld.global.ca.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(e), "=r"(f), "=r"(g), "=r"(h)
                             : "l"(from + (kind == 6 ? lane * 16 + i * 512 : lane % 4 * 32 + i * 128)));
                sum ^= a ^ b ^ c ^ d ^ e ^ f ^ g ^ h;
            }
        } else if (kind == 8) {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place + warp * 4096 + i * 512), "l"(from + lane * 16 + warp * 4096 + i * 512) : "memory");
            asm volatile("cp.async.commit_group;\ncp.async.wait_group 1;" ::: "memory");
        } else {
            // Half copies, half loads from shared memory.
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                uint32_t a, b, c, d;
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place + warp * 4096 + i * 512), "l"(from + lane * 16 + warp * 4096 + i * 512) : "memory");
                asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(place + i * 512));
                sum ^= a ^ b ^ c ^ d;
            }
            asm volatile("cp.async.commit_group;\ncp.async.wait_group 1;" ::: "memory");
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) *cycles = clock64() - start;
    if (sum == 0x12345678) *out = sum;
}

// ---- when an instruction releases the registers that it reads: a loop of one copy or store, whose address register changes behind it
template <int KIND>
__global__ void release(const char* from, int times, uint32_t mask, long long* cycles) {
    extern __shared__ __align__(1024) char shared[];
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, offset = lane * 16;
    uint32_t to = (uint32_t)__cvta_generic_to_shared(shared) + warp * 4096 + lane * 16;
    const char* base = from + (size_t)(blockIdx.x * 16 + warp) * 65536;
    __syncthreads();
    long long start = clock64();
#pragma unroll 1
    for (int n = 0; n < times; ++n) {
        const char* p = base + offset;
        if (KIND == 0) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(p) : "memory");
        if (KIND == 1) asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(p) : "memory");
        if (KIND == 2) asm volatile("st.shared.v4.b32 [%0], {%0, %0, %0, %0};" ::"r"(to) : "memory");
        if (KIND == 3) asm volatile("prefetch.global.L1 [%0];" ::"l"(p) : "memory");
        if (KIND == 4) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(p) : "memory");
            asm volatile("cp.async.commit_group;" ::: "memory");
        }
        if (KIND == 5) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(p) : "memory");
            asm volatile("cp.async.commit_group;\ncp.async.wait_group 6;" ::: "memory");
        }
        offset = (offset + 512) & mask;
        if (KIND == 2) to ^= 512;
    }
    long long end = clock64();
    asm volatile("cp.async.wait_all;" ::: "memory");
    if (threadIdx.x == 0) *cycles = end - start + (offset == 1);
}

static double median(std::vector<double> v) { std::sort(v.begin(), v.end()); return v[v.size() / 2]; }

int main(int count, char** arguments) {
    char section = count > 1 ? arguments[1][0] : 'b';
    CHECK(cudaMallocManaged(&counts, 65536));
    CHECK(cudaMalloc(&out, 65536));
    long long* cycles = (long long*)counts + 1024;
    size_t big = 8ull << 30;
    char* memory; CHECK(cudaMalloc(&memory, big)); CHECK(cudaMemset(memory, 1, big));
    CHECK(cudaDeviceSynchronize());
    if (section == 'w') {
    CHECK(cudaFuncSetAttribute(where, cudaFuncAttributeMaxDynamicSharedMemorySize, 220 << 10));
    for (int shared : {200 << 10, 100 << 10, 50 << 10}) {
        int blocks = 132 * (shared > 150 << 10 ? 1 : shared > 80 << 10 ? 2 : 4);
        where<<<blocks, 128, shared>>>((uint32_t*)counts);
        CHECK(cudaDeviceSynchronize());
        std::printf("where %d bytes:", shared);
        for (int i = 0; i < blocks; ++i) std::printf(" %u", ((uint32_t*)counts)[i]);
        std::printf("\n");
    }
    }
    if (section == 'b') {
    beside_all<8, true>(); beside_all<16, true>(); beside_all<32, true>(); beside_all<64, true>(); beside_all<128, true>();
    beside_all<16, false>(); beside_all<64, false>(); beside_all<128, false>();
    }
    auto releases = [&](auto kernel, const char* name) {
        CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 100 << 10));
        for (uint32_t mask : {0x1ffu, 0x7fffu})
            for (int warps : {1, 4, 8, 12, 16}) {
                constexpr int TIMES = 256;
                for (int i = 0; i < 3; ++i) { kernel<<<1, warps * 32, 80 << 10>>>(memory, TIMES, mask, cycles); CHECK(cudaGetLastError()); CHECK(cudaDeviceSynchronize()); }
                std::printf("release %-22s mask %5x %2d warps: %.1f cycles per iteration\n", name, mask, warps, (double)cycles[0] / TIMES);
            }
    };
    if (section == 'r') {
    releases(release<0>, "cp.async16"); releases(release<1>, "cp.async4"); releases(release<2>, "sts16"); releases(release<3>, "prefetch");
    releases(release<4>, "cp.async16+commit"); releases(release<5>, "cp.async16+commit+wait6");
    }
    CHECK(cudaFuncSetAttribute(l1, cudaFuncAttributeMaxDynamicSharedMemorySize, 100 << 10));
    const char* l1_kinds[] = {"ldg16-512", "ldg16-4-of-32", "ldg16-8-rows", "ldg16-same", "ldg4-128", "lds16", "lds16+ldg16-512", "lds16+ldg16-4-of-32", "cp.async16", "cp.async16+lds16"};
    if (section == 'l')
    for (int kind = 0; kind < 10; ++kind)
        for (int warps : {1, 4, 8, 12, 16}) {
            constexpr int TIMES = 200;
            for (int i = 0; i < 2; ++i) { l1<<<1, warps * 32, 80 << 10>>>(memory, kind, TIMES, cycles, (uint32_t*)out); CHECK(cudaGetLastError()); CHECK(cudaDeviceSynchronize()); }
            std::printf("l1 %-20s %2d warps: %.2f cycles per instruction\n", l1_kinds[kind], warps, (double)cycles[0] / TIMES / 8 / warps);
        }
    // L2
    CHECK(cudaFuncSetAttribute(shared_copies, cudaFuncAttributeMaxDynamicSharedMemorySize, 220 << 10));
    struct { int distance, late, active; } ways[] = {{0, 0}, {0, 0, 1}, {0, 0, 2}, {0, 0, 3}, {0, 0, 4}, {0, 0, 5}, {1, 0, 5}, {1, 0, 2}, {1, 0, 3}, {1, 0}, {2, 0}, {6, 0}, {66, 0}, {1, 100}, {1, 300}, {1, 600}, {1, 1000}, {66, 600}};
    if (section == '2') for (auto [distance, late, active] : ways) {
        std::vector<double> rate;
        for (int i = 0; i < 8; ++i) {
            shared_copies<<<132, 32, 132 << 10>>>(memory, 512, 128 << 10, distance, late, active, cycles);
            CHECK(cudaGetLastError()); CHECK(cudaDeviceSynchronize());
            std::vector<double> c;
            for (int b = 0; b < 132; ++b) if (cycles[b]) c.push_back((double)cycles[b]);
            if (i) rate.push_back(512 * 16384.0 / median(c));
        }
        std::printf("l2 pairs %d apart, the second %d cycles late, active %d: %.2f bytes per cycle and SM\n", distance, late, active, median(rate));
    }
    // DRAM
    size_t next = 0;
    auto fresh = [&](size_t bytes) {
        bytes = (bytes + 127) / 128 * 128;
        if (next + bytes > big / 2) next = 0;
        const char* at = memory + next;
        next += bytes;
        return at;
    };
    auto stream = [&](const char* name, size_t total, const std::function<void(const char*)>& launch) {
        std::vector<double> c, most, first;
        for (int i = 0; i < 6; ++i) {
            fill<<<1056, 256>>>((const uint4*)(memory + big / 2), (128 << 20) / 16, (uint32_t*)out);
            launch(fresh(total));
            CHECK(cudaGetLastError()); CHECK(cudaDeviceSynchronize());
            std::vector<double> each(cycles, cycles + 132);
            if (i) { c.push_back(median(each)); most.push_back(*std::max_element(each.begin(), each.end())); }
        }
        double m = median(c), last = median(most);
        std::printf("stream %-34s %9zu bytes: median %8.0f slowest %8.0f cycles, %.2f bytes per cycle and SM\n", name, total, m, last, total / 132.0 / m);
    };
    char name[80];
    if (section != 's') return 0;
#define COPIES(AHEAD, LINES)                                                                                    \
    CHECK(cudaFuncSetAttribute(stream_copies<AHEAD, LINES>, cudaFuncAttributeMaxDynamicSharedMemorySize, 220 << 10)); \
    for (int warps : {1, 4, 8, 12, 16})                                                                         \
        for (int each : {6, 48}) {                                                                              \
            if (warps * (AHEAD + 1) * LINES * 512 > 220 << 10) continue;                                        \
            std::snprintf(name, sizeof name, "cp.async %d x %d in flight, %d warps", AHEAD, LINES * 512, warps); \
            stream(name, (size_t)132 * warps * each * LINES * 512,                                              \
                   [&](const char* p) { stream_copies<AHEAD, LINES><<<132, warps * 32, 220 << 10>>>(p, each, cycles); }); \
        }
    COPIES(1, 2) COPIES(2, 2) COPIES(3, 2) COPIES(5, 2) COPIES(6, 2) COPIES(2, 1) COPIES(6, 1)
#define LOADS(AHEAD)                                                                                            \
    for (int warps : {4, 8, 16})                                                                                \
        for (int each : {8, 96}) {                                                                              \
            std::snprintf(name, sizeof name, "loads %d x 512 at once, %d warps", AHEAD, warps);                 \
            stream(name, (size_t)132 * warps * each * 512, [&](const char* p) { stream_loads<AHEAD><<<132, warps * 32>>>(p, each, cycles); }); \
        }
    LOADS(1) LOADS(4) LOADS(8)
    CHECK(cudaFuncSetAttribute(stream_bulk, cudaFuncAttributeMaxDynamicSharedMemorySize, 220 << 10));
    for (uint32_t bytes : {512u, 2048u, 4096u, 8192u, 16384u})
        for (int ahead : {1, 2, 4, 8, 12})
            for (int kb : {16, 64, 512}) {
                int times = kb * 1024 / bytes;
                if (bytes * ahead > 200 << 10 || times < 1) continue;
                std::snprintf(name, sizeof name, "bulk %d x %u in flight", ahead, bytes);
                stream(name, (size_t)132 * times * bytes, [&](const char* p) { stream_bulk<<<132, 32, bytes * ahead + 1024>>>(p, bytes, ahead, times, cycles); });
            }
    return 0;
}
