// Shows how compute-sanitizer's racecheck follows barriers in shared memory. The program has a ring of stages like the kernels: a thread
// fills them by bulk copies, and warps load from them and hand them back. The argument selects how a warp hands a stage back:
//
//   nvcc -O3 -lineinfo -arch=sm_90a racecheck.cu -o racecheck
//   compute-sanitizer --tool racecheck ./racecheck 0
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>
#include <cuda_runtime.h>

constexpr int STAGES = 8, WARPS = 16, BYTES = 32 * WARPS * 16, ROUNDS = 12, BLOCKS = 8;

enum Way {
    LANE_FOR_WARP,      // bar.warp.sync, then lane 0 arrives for the warp: correct
    LANE_BEHIND_BAR,    // the same with bar.sync of the warp's 32 threads: correct
    EVERY_LANE,         // every lane arrives for itself: correct
    NOT_AWAITED,        // the same, but sometimes the copying thread does not wait: wrong
};
const char* const NAMES[] = {"lane 0 arrives for the warp, behind bar.warp.sync", "lane 0 arrives for the warp, behind bar.sync of 32 threads",
                             "every lane arrives", "every lane arrives, sometimes without a wait (wrong)"};

__device__ uint32_t shared(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ void init(uint64_t* bar, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared(bar)), "r"(arrivals));
}

__device__ void arrive(uint64_t* bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared(bar)) : "memory"); }

__device__ void wait(uint64_t* bar, uint32_t parity) {
    uint32_t complete;
    do {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(complete) : "r"(shared(bar)), "r"(parity) : "memory");
    } while (!complete);
}

template <int WAY>
__global__ void __launch_bounds__(32 * (1 + WARPS), 1) ring(const uint8_t* source, uint32_t* sums) {
    extern __shared__ __align__(1024) uint8_t stages[];
    __shared__ uint64_t full[STAGES], empty[STAGES];
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) { init(&full[i], 1); init(&empty[i], WAY >= EVERY_LANE ? 32 * WARPS : WARPS); }
        asm volatile("fence.mbarrier_init.release.cluster;");
    }
    __syncthreads();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t sum = 0;
    for (int i = 0; i < ROUNDS * STAGES; ++i) {
        const int stage = i % STAGES, phase = i / STAGES % 2;
        if (warp == 0) {
            if (WAY != NOT_AWAITED || i % 17 != 16) wait(&empty[stage], phase ^ 1);
            if (lane == 0) {
                asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared(&full[stage])), "r"(BYTES) : "memory");
                asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                             ::"r"(shared(stages + stage * BYTES)), "l"(source + i % 5 * BYTES), "r"(BYTES), "r"(shared(&full[stage])) : "memory");
            }
            __syncwarp();
        } else {
            wait(&full[stage], phase);
            uint4 v;
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                         : "r"(shared(stages + stage * BYTES + (threadIdx.x - 32) * 16)) : "memory");
            // Orders the next copy's writes behind this thread's reads.
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            if (WAY == LANE_FOR_WARP) __syncwarp();
            if (WAY == LANE_BEHIND_BAR) asm volatile("bar.sync %0, 32;" ::"r"(warp) : "memory");
            if (WAY >= EVERY_LANE || lane == 0) arrive(&empty[stage]);
            sum = sum * 31 + v.x + 3 * v.y + 5 * v.z + 7 * v.w;
        }
    }
    if (warp > 0) sums[blockIdx.x * 32 * WARPS + threadIdx.x - 32] = sum;
}

template <int WAY>
void launch(const uint8_t* source, uint32_t* sums) {
    cudaFuncSetAttribute(ring<WAY>, cudaFuncAttributeMaxDynamicSharedMemorySize, STAGES * BYTES);
    ring<WAY><<<BLOCKS, 32 * (1 + WARPS), STAGES * BYTES>>>(source, sums);
}

int main(int argc, char** argv) {
    void (*const ways[])(const uint8_t*, uint32_t*) = {launch<0>, launch<1>, launch<2>, launch<3>};
    const int way = argc > 1 ? std::atoi(argv[1]) % 4 : 0;
    std::vector<uint32_t> words(5 * BYTES / 4), got(BLOCKS * 32 * WARPS);
    for (size_t i = 0; i < words.size(); ++i) words[i] = static_cast<uint32_t>(i) * 2654435761u;
    uint8_t* source; uint32_t* sums;
    cudaMalloc(&source, words.size() * 4); cudaMalloc(&sums, got.size() * 4);
    cudaMemcpy(source, words.data(), words.size() * 4, cudaMemcpyHostToDevice);
    ways[way](source, sums);
    cudaMemcpy(got.data(), sums, got.size() * 4, cudaMemcpyDeviceToHost);
    int wrong = 0;
    for (size_t thread = 0; thread < got.size(); ++thread) {
        uint32_t sum = 0;
        for (int i = 0; i < ROUNDS * STAGES; ++i) {
            const uint32_t* v = &words[i % 5 * (BYTES / 4) + thread % (32 * WARPS) * 4];
            sum = sum * 31 + v[0] + 3 * v[1] + 5 * v[2] + 7 * v[3];
        }
        wrong += got[thread] != sum;
    }
    std::printf("%s: %s, %d of %zu sums are wrong\n", NAMES[way], cudaGetErrorString(cudaDeviceSynchronize()), wrong, got.size());
}
