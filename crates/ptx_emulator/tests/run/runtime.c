// A program for the CUDA runtime, as nvcc would generate it: it registers a fat binary with PTX, its kernel and its
// variable, and launches with the calls that `<<< >>>` expands to. The declarations come from crt/host_runtime.h.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned x, y, z; } dim3;
void **__cudaRegisterFatBinary(void *);
void __cudaRegisterFatBinaryEnd(void **);
void __cudaUnregisterFatBinary(void **);
void __cudaRegisterFunction(void **, const char *, char *, const char *, int, void *, void *, void *, void *, int *);
void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int);
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void *);
int __cudaPopCallConfiguration(dim3 *, dim3 *, size_t *, void **);
int __cudaGetKernel(void **, const void *);
int __cudaLaunchKernel(void *, dim3, dim3, void **, size_t, void *);
int cudaMalloc(void **, size_t);
int cudaFree(void *);
int cudaMemcpy(void *, const void *, size_t, int);
int cudaMemcpyToSymbol(const void *, const void *, size_t, size_t, int);
int cudaDeviceSynchronize(void);
int cudaGetLastError(void);
int cudaPeekAtLastError(void);
const char *cudaGetErrorName(int);

static const char PTX[] =
    ".version 8.0\n.target sm_90a\n.address_size 64\n"
    ".visible .const .align 4 .u32 factor = 1;\n"
    ".visible .entry _Z5scalePjj(.param .u64 p, .param .u32 n) {\n"
    ".reg .b32 %r<5>; .reg .b64 %d<4>; .reg .pred %q;\n"
    "ld.param.u64 %d1, [p];\nld.param.u32 %r3, [n];\nmov.u32 %r1, %tid.x;\nsetp.ge.u32 %q, %r1, %r3;\n@%q ret;\n"
    "mul.wide.u32 %d2, %r1, 4;\nadd.u64 %d3, %d1, %d2;\nld.const.u32 %r4, [factor];\n"
    "ld.global.u32 %r2, [%d3];\nmul.lo.u32 %r2, %r2, %r4;\nst.global.u32 [%d3], %r2;\nret;\n}\n";

// A fat binary: a header, then an image with its own header.
static struct {
    unsigned magic; unsigned short version, header; unsigned long long size;
    struct {
        unsigned short kind, version; unsigned header; unsigned long long padded; unsigned packed, zero;
        unsigned short minor, major; unsigned arch; unsigned long long name, flags, zeros, unpacked;
    } image;
    char text[(sizeof PTX + 7) / 8 * 8];
} binary = {0xba55ed50, 1, 16, 64 + sizeof binary.text, {1, 0x101, 64, sizeof binary.text, 0, 64, 0, 8, 90, 0, 0x11, 0, 0}, ""};
static struct { unsigned magic, version; const void *data; void *unused; } wrapper = {0x466243b1, 1, &binary, 0};

static unsigned factor; // Host-side handle of the variable.

static void scale(unsigned *p, unsigned n) { // Host-side handle of the kernel: the stub that nvcc generates.
    void *arguments[] = {&p, &n};
    static void *handle = 0;
    if (!handle) __cudaGetKernel(&handle, (const void *)scale);
    dim3 grid, block;
    size_t shared;
    void *stream;
    if (__cudaPopCallConfiguration(&grid, &block, &shared, &stream)) return;
    __cudaLaunchKernel(handle, grid, block, arguments, shared, stream);
}

int main(int count, char **arguments) {
    unsigned threads = count > 1 ? atoi(arguments[1]) : 32;
    unsigned values[4] = {1, 2, 3, 4}, three = 3;
    unsigned *memory;
    memcpy(binary.text, PTX, sizeof PTX);
    void **handle = __cudaRegisterFatBinary(&wrapper);
    __cudaRegisterFunction(handle, (const char *)scale, 0, "_Z5scalePjj", -1, 0, 0, 0, 0, 0);
    __cudaRegisterVar(handle, (char *)&factor, 0, "factor", 0, 4, 1, 0);
    __cudaRegisterFatBinaryEnd(handle);
    if (cudaMalloc((void **)&memory, sizeof values)) return 3;
    if (cudaMemcpy(memory, values, sizeof values, 1)) return 4;
    if (cudaMemcpyToSymbol(&factor, &three, 4, 0, 1)) return 5;
    if (!__cudaPushCallConfiguration((dim3){1, 1, 1}, (dim3){threads, 1, 1}, 0, 0)) scale(memory, 4);
    printf("%s ", cudaGetErrorName(cudaPeekAtLastError()));
    printf("%s ", cudaGetErrorName(cudaGetLastError()));
    printf("%s\n", cudaGetErrorName(cudaGetLastError()));
    if (cudaDeviceSynchronize()) return 6;
    if (cudaMemcpy(values, memory, sizeof values, 2)) return 7;
    if (cudaMemcpy(values, memory, sizeof values + 1, 2) != 1) return 8; // One byte past the end of the allocation.
    if (cudaFree(memory) || !cudaFree(memory)) return 9;
    printf("%u %u %u %u\n", values[0], values[1], values[2], values[3]);
    __cudaUnregisterFatBinary(handle);
    return 0;
}
