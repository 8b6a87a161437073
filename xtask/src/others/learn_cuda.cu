// Runs a product of learn-cuda without learn-cuda's host code, which needs PyTorch. PRODUCT_FILE defines the function
// PRODUCT. C = A B^T is compared with a sum on the host. The inputs are small integers, so only the result is rounded.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include PRODUCT_FILE

int main(int count, char **arguments) {
    const int m = count > 1 ? atoi(arguments[1]) : 512, n = count > 2 ? atoi(arguments[2]) : 512,
              k = count > 3 ? atoi(arguments[3]) : 512;
    std::vector<nv_bfloat16> a(m * k), b(n * k), c(m * n);
    for (size_t i = 0; i < a.size(); i++) a[i] = nv_bfloat16(float(int(i * 7 % 5) - 2));
    for (size_t i = 0; i < b.size(); i++) b[i] = nv_bfloat16(float(int(i * 3 % 7) - 3));
    nv_bfloat16 *da, *db, *dc;
    cudaMalloc(&da, a.size() * 2), cudaMalloc(&db, b.size() * 2), cudaMalloc(&dc, c.size() * 2);
    cudaMemcpy(da, a.data(), a.size() * 2, cudaMemcpyHostToDevice);
    cudaMemcpy(db, b.data(), b.size() * 2, cudaMemcpyHostToDevice);
    cudaMemset(dc, 0xff, c.size() * 2);
    PRODUCT(da, db, dc, m, n, k);
    cudaError_t error = cudaMemcpy(c.data(), dc, c.size() * 2, cudaMemcpyDeviceToHost);
    if (error) { printf("%s\n", cudaGetErrorString(error)); return 2; }
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            float sum = 0;
            for (int l = 0; l < k; l++) sum += float(a[i * k + l]) * float(b[j * k + l]);
            if (float(c[i * n + j]) != float(nv_bfloat16(sum))) {
                printf("Failed: c[%d, %d] is %g, expected %g\n", i, j, float(c[i * n + j]), float(nv_bfloat16(sum)));
                return 1;
            }
        }
    printf("Passed\n");
    return 0;
}
