// Prints a hash (FNV-1a of 32-bit words) of 2^23 results of ex2.approx.ftz.f32 or rcp.approx.ftz.f32 for each class of arguments. A unit test in
// crates/ptx_emulator/src/hw/mufu.rs compares them. With a folder as argument, writes the results with arguments from 1 to 2 there, from which
// approximations.py computes the tables.
//
//   nvcc -O2 -std=c++17 -gencode=arch=compute_90a,code=sm_90a benches/probes/approximations.cu -o approximations && ./approximations .
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
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

constexpr uint32_t COUNT = 1 << 23;

enum Class { ONE, MINUS_ONE, SMALL, ANY };

__device__ uint32_t argument(Class cls, uint32_t i) {
    switch (cls) {
        case ONE: return 0x3f800000u | i;
        case MINUS_ONE: return 0xbf800000u | i;
        // Both signs, magnitudes from 2^-31 to 2.
        case SMALL: return (i >> 17 & 1) << 31 | (127 - (i >> 18 & 31)) << 23 | (i * 2654435761u) >> 9;
        default: {
            uint64_t z = (i + 1ull) * 0x9e3779b97f4a7c15ull;
            z = (z ^ z >> 29) * 0xbf58476d1ce4e5b9ull;
            return (uint32_t)(z ^ z >> 32);
        }
    }
}

__global__ void compute(bool reciprocal, Class cls, uint32_t* results) {
    uint32_t i = blockIdx.x * 256 + threadIdx.x;
    float x = __uint_as_float(argument(cls, i)), y;
    if (reciprocal) {
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    } else {
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    }
    results[i] = __float_as_uint(y);
}

int main(int argc, char** argv) {
    uint32_t* device;
    CHECK(cudaMalloc(&device, COUNT * 4));
    std::vector<uint32_t> results(COUNT);
    const char* classes[] = {"one", "minus_one", "small", "any"};
    for (int reciprocal = 0; reciprocal < 2; reciprocal++) {
        for (int cls = 0; cls < 4; cls++) {
            compute<<<COUNT / 256, 256>>>(reciprocal, (Class)cls, device);
            CHECK(cudaMemcpy(results.data(), device, COUNT * 4, cudaMemcpyDeviceToHost));
            uint64_t hash = 0xcbf29ce484222325ull;
            for (uint32_t word : results) hash = (hash ^ word) * 0x100000001b3ull;
            std::printf("%s %s %016llx\n", reciprocal ? "rcp" : "ex2", classes[cls], (unsigned long long)hash);
            if (cls == ONE && argc > 1) {
                std::string path = std::string(argv[1]) + (reciprocal ? "/rcp.bin" : "/ex2.bin");
                FILE* file = std::fopen(path.c_str(), "wb");
                if (!file || std::fwrite(results.data(), 4, COUNT, file) != COUNT || std::fclose(file)) {
                    std::printf("cannot write %s\n", path.c_str());
                    return 1;
                }
            }
        }
    }
}
