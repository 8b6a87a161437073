// Measures the constants of the time model on the card at hand; docs/time-model.md explains them. One line a constant:
// name, median, least, most, unit.
//
//   nvcc -O2 -std=c++17 -arch=native probes.cu -o probes && ./probes
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

constexpr int REPEATS = 15;

static void print(const char* name, std::vector<double> v, const char* unit) {
    std::sort(v.begin(), v.end());
    std::printf("%-28s %10.2f %10.2f %10.2f %s\n", name, v[v.size() / 2], v.front(), v.back(), unit);
}

// Events around work, in nanoseconds.
static double timed(const std::function<void()>& work) {
    static cudaEvent_t a = nullptr, b = nullptr;
    if (!a) { CHECK(cudaEventCreate(&a)); CHECK(cudaEventCreate(&b)); }
    CHECK(cudaEventRecord(a)); work(); CHECK(cudaEventRecord(b)); CHECK(cudaEventSynchronize(b));
    float ms; CHECK(cudaEventElapsedTime(&ms, a, b));
    return ms * 1e6;
}

__global__ void empty() {}

// Lets its dependents start, waits for what it depends on, and then takes a while; each is left out unless it is asked for.
__global__ void link(bool triggers, bool waits, int while_cycles) {
    if (triggers) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (waits) asm volatile("griddepcontrol.wait;" ::: "memory");
    for (long long start = clock64(); clock64() - start < while_cycles;) {}
}

// A chain of dependent loads, each of which says where the next is.
__global__ void chase(const uint64_t* from, int steps, long long* cycles) {
    const uint64_t* p = from;
    long long start = clock64();
    for (int i = 0; i < steps; ++i) p = (const uint64_t*)__ldcg(p);
    long long end = clock64();
    *cycles = (end - start) / steps + (p == nullptr);
}

__global__ void chase_l1(const uint64_t* from, int steps, long long* cycles) {
    const uint64_t* p = from;
    for (int i = 0; i < 2048; ++i) p = (const uint64_t*)__ldca(p);
    long long start = clock64();
    for (int i = 0; i < steps; ++i) p = (const uint64_t*)__ldca(p);
    long long end = clock64();
    *cycles = (end - start) / steps + (p == nullptr);
}

__global__ void chase_shared(int steps, long long* cycles) {
    __shared__ uint32_t next[64];
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < 64; ++i) next[i] = (i + 7) % 64;
        uint32_t at = 0;
        long long start = clock64();
        for (int i = 0; i < steps; ++i) at = ((volatile uint32_t*)next)[at];
        long long end = clock64();
        *cycles = (end - start) / steps + (at == 99);
    }
}

// 4096 instructions in a row, twice: cycles of each pass. The first fetches them.
__global__ void instructions(float by, long long* cycles, float* out) {
    float sum = by;
    for (int pass = 0; pass < 2; ++pass) {
        long long start = clock64();
#pragma unroll
        for (int i = 0; i < 4096; ++i) asm volatile("fma.rn.f32 %0, %0, %1, %1;" : "+f"(sum) : "f"(by));
        cycles[pass] = clock64() - start;
    }
    *out = sum;
}

// Loads of 16 bytes, `unroll` in flight a thread.
__global__ void read(const uint4* from, size_t count, uint32_t* out) {
    uint32_t sum = 0;
    size_t step = (size_t)gridDim.x * blockDim.x, at = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; at + 7 * step < count; at += 8 * step) {
        uint4 v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = __ldcg(from + at + i * step);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
    }
    if (sum == 0x12345678) *out = sum;
}

// Bulk copies of `bytes`, `stages` in flight on each multiprocessor; cycles of one, from issue to issue. `wrap` is a multiple of `bytes`.
// If there are `sharers`, so many neighbouring multiprocessors copy the same `wrap` bytes over and over; if not, all go through one range.
__global__ void copies(const char* from, uint32_t bytes, int stages, int times, size_t wrap, unsigned sharers, long long* cycles) {
    extern __shared__ __align__(128) char stage[];
    __shared__ __align__(8) uint64_t full[16];
    if (threadIdx.x != 0) return;
    uint32_t bar = (uint32_t)__cvta_generic_to_shared(full), to = (uint32_t)__cvta_generic_to_shared(stage);
    for (int s = 0; s < stages; ++s) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(bar + 8 * s));
    asm volatile("fence.mbarrier_init.release.cluster;");
    asm volatile("fence.proxy.async.shared::cta;");
    size_t at = (size_t)blockIdx.x * times * bytes % wrap;
    if (sharers) {
        unsigned multiprocessor;
        asm volatile("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
        from += multiprocessor / sharers * wrap;
        at = 0;
    }
    auto issue = [&](int s) {
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar + 8 * s), "r"(bytes));
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to + s * bytes),
                     "l"(from + at), "r"(bytes), "r"(bar + 8 * s)
                     : "memory");
        at += bytes;
        if (at >= wrap) at -= wrap;
    };
    long long start = clock64();
    for (int s = 0; s < stages && s < times; ++s) issue(s);
    uint32_t parity = 0;
    for (int n = 0, s = 0; n < times; ++n) {
        uint32_t done = 0;
        while (!done)
            asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                         : "=r"(done) : "r"(bar + 8 * s), "r"(parity) : "memory");
        if (n + stages < times) issue(s);
        if (++s == stages) { s = 0; parity ^= 1; }
    }
    cycles[blockIdx.x] = (clock64() - start) / times;
}

// From one warp's arrival to another warp's next instruction and back, half of it.
__global__ void pingpong(int times, long long* cycles) {
    __shared__ __align__(8) uint64_t bars[2];
    uint32_t bar = (uint32_t)__cvta_generic_to_shared(bars);
    if (threadIdx.x == 0)
        for (int s = 0; s < 2; ++s) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(bar + 8 * s));
    __syncthreads();
    if (threadIdx.x % 32) return;
    int me = threadIdx.x / 32;
    long long start = clock64();
    for (int n = 0; n < times; ++n) {
        uint32_t mine = bar + 8 * me, other = bar + 8 * (1 - me), done = 0, parity = n & 1;
        if (me == 0) asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(other) : "memory");
        while (!done)
            asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                         : "=r"(done) : "r"(mine), "r"(parity) : "memory");
        if (me == 1) asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(other) : "memory");
    }
    if (me == 0) *cycles = (clock64() - start) / times / 2;
}

__global__ void barriers(int times, long long* cycles) {
    long long start = clock64();
    for (int n = 0; n < times; ++n) __syncthreads();
    if (threadIdx.x == 0) *cycles = (clock64() - start) / times;
}

// Products of a warp in chains, each of which waits for its own sums; cycles of a link.
template <int CHAINS>
__global__ void products(int times, long long* cycles, float* out) {
    constexpr int LINKS = 16;
    float sums[CHAINS][4] = {};
    uint32_t zero = threadIdx.x >> 10;
    long long start = clock64();
    for (int n = 0; n < times; ++n)
#pragma unroll
        for (int i = 0; i < LINKS; ++i)
#pragma unroll
            for (int c = 0; c < CHAINS; ++c)
                asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%4,%4,%4}, {%4,%4}, {%0,%1,%2,%3};"
                             : "+f"(sums[c][0]), "+f"(sums[c][1]), "+f"(sums[c][2]), "+f"(sums[c][3])
                             : "r"(zero));
    long long end = clock64();
    float sum = 0;
    for (int c = 0; c < CHAINS; ++c) sum += sums[c][0] + sums[c][1] + sums[c][2] + sums[c][3];
    out[threadIdx.x] = sum;
    if (threadIdx.x == 0) *cycles = (end - start) / times / LINKS;
}

int main() {
    cudaDeviceProp card;
    CHECK(cudaGetDeviceProperties(&card, 0));
    std::printf("# %s, %d multiprocessors\n# name, median, least, most, unit\n", card.name, card.multiProcessorCount);
    int sms = card.multiProcessorCount;
    size_t big = 4ull << 30;
    char* memory; CHECK(cudaMalloc(&memory, big)); CHECK(cudaMemset(memory, 1, big));
    long long* cycles; CHECK(cudaMallocManaged(&cycles, 8192));
    uint32_t* out; CHECK(cudaMalloc(&out, 4096));
    auto repeat = [&](const char* name, const char* unit, std::function<double()> one) {
        std::vector<double> v;
        one();
        for (int i = 0; i < REPEATS; ++i) v.push_back(one());
        print(name, v, unit);
    };
    repeat("launch-floor", "ns", [&] { return timed([&] { empty<<<1, 32>>>(); }); });
    repeat("launch-floor-all", "ns", [&] { return timed([&] { empty<<<sms, 640>>>(); }); });
    // Kernels of a graph, each behind the other: what a link takes beyond the time that its kernel spends, in which the next is
    // made ready. The kernels of a stream would wait for their host.
    auto graph = [&](int links, bool programmatic, bool triggers, bool waits, int while_cycles) {
        cudaStream_t stream; CHECK(cudaStreamCreate(&stream));
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        for (int i = 0; i < links; ++i) {
            cudaLaunchAttribute serial{};
            serial.id = cudaLaunchAttributeProgrammaticStreamSerialization;
            serial.val.programmaticStreamSerializationAllowed = 1;
            cudaLaunchConfig_t config{};
            config.gridDim = sms; config.blockDim = 128; config.stream = stream;
            config.attrs = &serial; config.numAttrs = programmatic && i > 0;
            CHECK(cudaLaunchKernelEx(&config, link, triggers, waits, while_cycles));
        }
        cudaGraph_t captured; cudaGraphExec_t ready;
        CHECK(cudaStreamEndCapture(stream, &captured));
        CHECK(cudaGraphInstantiate(&ready, captured, 0));
        CHECK(cudaStreamDestroy(stream)); CHECK(cudaGraphDestroy(captured));
        return ready;
    };
    auto links = [&](const char* name, bool programmatic, bool triggers, bool waits, int while_cycles) {
        constexpr int MANY = 21;
        auto one = graph(1, programmatic, triggers, waits, while_cycles), many = graph(MANY, programmatic, triggers, waits, while_cycles);
        auto none = graph(1, programmatic, triggers, waits, 0);
        auto ns = [&](cudaGraphExec_t graph) {
            std::vector<double> v;
            for (int i = 0; i < 5; ++i) v.push_back(timed([&] { CHECK(cudaGraphLaunch(graph, 0)); }));
            std::sort(v.begin(), v.end());
            return v[2];
        };
        repeat(name, "ns", [&] {
            double spent = ns(one) - ns(none);
            return (ns(many) - ns(one)) / (MANY - 1) - spent;
        });
        for (auto graph : {one, many, none}) CHECK(cudaGraphExecDestroy(graph));
    };
    links("launch-gap", false, false, false, 8000);
    links("launch-gap-empty", false, false, false, 0);
    links("dependent-start+grid-end", true, false, true, 8000);
    links("dependent-start+grid-end-empty", true, false, true, 0);
    links("grid-end", true, true, true, 8000);
    links("grid-end-empty", true, true, true, 0);
    // What reads `memory` next reads it from DRAM.
    auto flush = [&] { CHECK(cudaMemset(memory + big / 2, 2, 512 << 20)); CHECK(cudaDeviceSynchronize()); };
    auto chain = [&](size_t span, size_t stride) {
        size_t count = span / stride;
        std::vector<uint64_t> host(span / 8);
        for (size_t i = 0; i < count; ++i) host[i * stride / 8] = (uint64_t)memory + (i + 7919) % count * stride;
        CHECK(cudaMemcpy(memory, host.data(), span, cudaMemcpyHostToDevice));
    };
    auto answer = [&](const std::function<void()>& launch) {
        launch(); CHECK(cudaGetLastError()); CHECK(cudaDeviceSynchronize());
        return (double)cycles[0];
    };
    repeat("shared-latency", "cycles", [&] { return answer([&] { chase_shared<<<1, 32>>>(4096, cycles); }); });
    chain(16 << 10, 128);
    repeat("l1-latency", "cycles", [&] { return answer([&] { chase_l1<<<1, 1>>>((uint64_t*)memory, 4096, cycles); }); });
    chain(8 << 20, 128 * 3);
    answer([&] { chase<<<1, 1>>>((uint64_t*)memory, 30000, cycles); });
    repeat("l2-latency", "cycles", [&] { return answer([&] { chase<<<1, 1>>>((uint64_t*)memory, 8192, cycles); }); });
    // Each line once: the second number is with pages that a TLB does not hold.
    for (size_t span : {32 << 20, 1 << 30}) {
        chain(span, 4096 + 128);
        repeat(span < 64 << 20 ? "dram-latency" : "dram-latency-of-1-GB", "cycles", [&] {
            flush();
            return answer([&] { chase<<<1, 1>>>((uint64_t*)memory, 4096, cycles); });
        });
    }
    // 16 bytes each; of a line of 128, what its fetch adds.
    for (bool cold : {true, false})
        repeat(cold ? "instruction-line-dram" : "instruction-line-again", "cycles", [&] {
            if (cold) flush();
            answer([&] { instructions<<<1, 1>>>(0.5f, cycles, (float*)out); });
            return (double)(cycles[0] - cycles[1]) / (4096 / 8);
        });
    repeat("mbarrier-wake+arrive", "cycles", [&] { return answer([&] { pingpong<<<1, 64>>>(2000, cycles); }); });
    repeat("barrier-latency-4-warps", "cycles", [&] { return answer([&] { barriers<<<1, 128>>>(2000, cycles); }); });
    repeat("dram-bandwidth-loads", "GB/s", [&] {
        return big / timed([&] { read<<<sms * 8, 256>>>((uint4*)memory, big / 16, out); });
    });
    repeat("l2-bandwidth-loads", "GB/s", [&] {
        size_t span = 16 << 20;
        read<<<sms * 4, 256>>>((uint4*)memory, span / 16, out);
        return 20.0 * span / timed([&] { for (int i = 0; i < 20; ++i) read<<<sms * 4, 256>>>((uint4*)memory, span / 16, out); });
    });
    repeat("mma-m16n8k16-1-chain", "cycles", [&] { return answer([&] { products<1><<<1, 32>>>(200, cycles, (float*)out); }); });
    repeat("mma-m16n8k16-4-chains", "cycles", [&] { return answer([&] { products<4><<<1, 32>>>(200, cycles, (float*)out); }); });
    repeat("mma-m16n8k16-4-chains-on-8-warps", "cycles", [&] { return answer([&] { products<4><<<1, 256>>>(200, cycles, (float*)out); }); });
    CHECK(cudaFuncSetAttribute(copies, cudaFuncAttributeMaxDynamicSharedMemorySize, 220 << 10));
    auto run = [&](const char* what, uint32_t bytes, int stages, int blocks, size_t wrap, unsigned sharers = 0, int times = 64) {
        char name[64]; std::snprintf(name, sizeof name, "%s-%u-x%d-on-%d", what, bytes, stages, blocks);
        if (sharers) std::snprintf(name, sizeof name, "%s-%u-x%d-same-for-%u", what, bytes, stages, sharers);
        std::vector<double> each, rate;
        for (int i = 0; i < REPEATS + 1; ++i) {
            if (wrap == big) flush();
            double ns = timed([&] { copies<<<blocks, 32, bytes * stages + 1024>>>(memory, bytes, stages, times, wrap, sharers, cycles); });
            CHECK(cudaDeviceSynchronize());
            std::vector<long long> c(cycles, cycles + blocks);
            std::sort(c.begin(), c.end());
            if (i) { each.push_back((double)c[c.size() / 2]); rate.push_back((double)bytes * times * blocks / ns); }
        }
        print(name, each, "cycles");
        print("  of which", rate, "GB/s");
    };
    for (uint32_t bytes = 512; bytes <= 131072; bytes *= 4) run("copy-dram", bytes, 1, sms, big);
    for (uint32_t bytes : {4096u, 16384u, 65536u}) run("copy-dram", bytes, 1, 1, big);
    for (int stages : {2, 4, 8, 12}) run("copy-dram", 16384, stages, sms, big);
    for (uint32_t bytes : {512u, 4096u, 16384u}) run("copy-l2", bytes, 1, 1, 8 << 20);
    for (int stages : {2, 4, 8}) run("copy-l2", 16384, stages, 1, 8 << 20);
    for (int stages : {1, 2, 4, 8}) run("copy-l2", 16384, stages, sms, 8 << 20);
    // Lines of its own for each multiprocessor, then lines that some of them share: 17 MB at most.
    for (unsigned sharers : {1, 2, 4, 16, 132}) run("copy-l2", 16384, 8, sms, 128 << 10, sharers, 1024);
    return 0;
}
