// Measures what fences, releases and acquires cost on a GPU, in cycles, for one CTA and for a CTA on each SM.
//
//   nvcc -O2 -arch=sm_90a fences.cu -o fences
#include <cstdio>
#include <cuda_runtime.h>

constexpr int TURNS = 256, RUNS = 5, SMS = 132, WORDS = 1024;

enum Operation {
    FENCE_CTA,
    FENCE_CLUSTER,
    FENCE_GPU,
    FENCE_SYSTEM,
    STORE_THEN_FENCE,
    STORE_RELAXED,
    STORE_RELEASE,
    LOAD_RELAXED,
    LOAD_ACQUIRE,
};

// `word` belongs to the thread. The loaded value has no use but to be waited for.
template <Operation OPERATION> __device__ unsigned turn(unsigned *word)
{
    unsigned value = 0;
    if constexpr (OPERATION == FENCE_CTA) asm volatile("fence.acq_rel.cta;" ::: "memory");
    if constexpr (OPERATION == FENCE_CLUSTER) asm volatile("fence.acq_rel.cluster;" ::: "memory");
    if constexpr (OPERATION == STORE_THEN_FENCE) asm volatile("st.global.u32 [%0], 1;" ::"l"(word) : "memory");
    if constexpr (OPERATION == FENCE_GPU || OPERATION == STORE_THEN_FENCE) asm volatile("fence.acq_rel.gpu;" ::: "memory");
    if constexpr (OPERATION == FENCE_SYSTEM) asm volatile("fence.acq_rel.sys;" ::: "memory");
    if constexpr (OPERATION == STORE_RELAXED) asm volatile("st.relaxed.gpu.global.u32 [%0], 1;" ::"l"(word) : "memory");
    if constexpr (OPERATION == STORE_RELEASE) asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(word) : "memory");
    if constexpr (OPERATION == LOAD_RELAXED) asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    if constexpr (OPERATION == LOAD_ACQUIRE) asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

template <Operation OPERATION> __global__ void probe(unsigned *words, unsigned long long *cycles)
{
    unsigned *word = words + WORDS * blockIdx.x + threadIdx.x;
    unsigned sum = turn<OPERATION>(word);
    unsigned long long start = clock64();
    for (int i = 0; i < TURNS; ++i) sum = turn<OPERATION>(word + (sum & 0x80000000));
    unsigned long long end = clock64();
    if (threadIdx.x == 0) cycles[blockIdx.x] = end - start + (sum >> 31);
}

template <Operation OPERATION> void print(const char *name, unsigned *words, unsigned long long *cycles)
{
    for (int blocks : {1, SMS}) {
        unsigned long long best = ~0ull, first;
        for (int run = 0; run < RUNS; ++run) {
            probe<OPERATION><<<blocks, 32>>>(words, cycles);
            if (cudaMemcpy(&first, cycles, sizeof first, cudaMemcpyDeviceToHost) != cudaSuccess) {
                printf("%s\n", cudaGetErrorString(cudaGetLastError()));
                return;
            }
            best = first < best ? first : best;
        }
        printf("%-32s %3d CTAs %7.1f cycles\n", name, blocks, double(best) / TURNS);
    }
}

int main()
{
    unsigned *words;
    unsigned long long *cycles;
    if (cudaMalloc(&words, sizeof(unsigned) * WORDS * SMS) || cudaMalloc(&cycles, sizeof(unsigned long long) * SMS) ||
        cudaMemset(words, 0, sizeof(unsigned) * WORDS * SMS)) {
        printf("%s\n", cudaGetErrorString(cudaGetLastError()));
        return 1;
    }
    print<FENCE_CTA>("fence.acq_rel.cta", words, cycles);
    print<FENCE_CLUSTER>("fence.acq_rel.cluster", words, cycles);
    print<FENCE_GPU>("fence.acq_rel.gpu", words, cycles);
    print<FENCE_SYSTEM>("fence.acq_rel.sys", words, cycles);
    print<STORE_THEN_FENCE>("st; fence.acq_rel.gpu", words, cycles);
    print<STORE_RELAXED>("st.relaxed.gpu", words, cycles);
    print<STORE_RELEASE>("st.release.gpu", words, cycles);
    print<LOAD_RELAXED>("ld.relaxed.gpu", words, cycles);
    print<LOAD_ACQUIRE>("ld.acquire.gpu", words, cycles);
}
