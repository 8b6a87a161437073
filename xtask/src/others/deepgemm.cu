// Runs DeepGEMM's bf16 kernel for Hopper without DeepGEMM's host code, which needs PyTorch. Instantiates the kernel as
// DeepGEMM's `sm90_bf16_gemm.hpp` does and compares with a sum on the host. The inputs are small integers, so only the
// result is rounded.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <deep_gemm/impls/sm90_bf16_gemm.cuh>

using bf16 = cutlass::bfloat16_t;

constexpr uint32_t BLOCK_M = 128, BLOCK_N = 128, BLOCK_K = 64, STAGES = 4, MULTIPROCESSORS = 4;
constexpr uint32_t SWIZZLE = 128, COPY_THREADS = 128, MATH_THREADS = 256;

// Rows of `columns` values, copied in boxes as wide as the swizzle.
static CUtensorMap map_of(void *data, uint64_t rows, uint64_t columns, uint32_t box_rows) {
    cuuint64_t dims[] = {columns, rows}, strides[] = {columns * sizeof(bf16)};
    cuuint32_t box[] = {SWIZZLE / sizeof(bf16), box_rows}, steps[] = {1, 1};
    CUtensorMap map;
    CUresult code = cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, data, dims, strides, box, steps,
                                           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (code) exit(3);
    return map;
}

int main(int count, char **arguments) {
    const uint32_t m = count > 1 ? atoi(arguments[1]) : 200, n = count > 2 ? atoi(arguments[2]) : 256,
                   k = count > 3 ? atoi(arguments[3]) : 192;
    std::vector<bf16> a(m * k), b(n * k), d(m * n);
    for (size_t i = 0; i < a.size(); i++) a[i] = bf16(float(int(i * 7 % 5) - 2));
    for (size_t i = 0; i < b.size(); i++) b[i] = bf16(float(int(i * 3 % 7) - 3));
    void *da, *db, *dd;
    cudaMalloc(&da, a.size() * 2), cudaMalloc(&db, b.size() * 2), cudaMalloc(&dd, d.size() * 2);
    cudaMemcpy(da, a.data(), a.size() * 2, cudaMemcpyHostToDevice);
    cudaMemcpy(db, b.data(), b.size() * 2, cudaMemcpyHostToDevice);
    cudaMemset(dd, 0xff, d.size() * 2);
    CUtensorMap map_a = map_of(da, m, k, BLOCK_M), map_b = map_of(db, n, k, BLOCK_N), map_d = map_of(dd, m, n, BLOCK_M);

    auto kernel = &deep_gemm::sm90_bf16_gemm_impl<
        cute::UMMA::Major::K, cute::UMMA::Major::K, 0, 0, 0, 1, BLOCK_M, BLOCK_N, BLOCK_K, SWIZZLE, SWIZZLE, SWIZZLE, STAGES,
        COPY_THREADS, MATH_THREADS, 1, false, MULTIPROCESSORS, deep_gemm::GemmType::Normal, false, bf16>;
    int shared_bytes = 200 << 10;
    cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    kernel<<<MULTIPROCESSORS, COPY_THREADS + MATH_THREADS, shared_bytes>>>(nullptr, m, n, k, map_a, map_b, map_d);
    cudaError_t error = cudaMemcpy(d.data(), dd, d.size() * 2, cudaMemcpyDeviceToHost);
    if (error) { printf("%s\n", cudaGetErrorString(error)); return 2; }
    for (uint32_t i = 0; i < m; i++)
        for (uint32_t j = 0; j < n; j++) {
            float sum = 0;
            for (uint32_t l = 0; l < k; l++) sum += float(a[i * k + l]) * float(b[j * k + l]);
            if (float(d[i * n + j]) != float(bf16(sum))) {
                printf("Failed: d[%u, %u] is %g, expected %g\n", i, j, float(d[i * n + j]), float(bf16(sum)));
                return 1;
            }
        }
    printf("Passed\n");
    return 0;
}
