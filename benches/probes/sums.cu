// Draws sums of every kind of floating-point product of a Hopper SM, and writes their bits. The example `card_sums` of ptx_emulator computes
// the same sums and compares.
//
//   nvcc -O2 -std=c++17 -gencode=arch=compute_90a,code=sm_90a benches/probes/sums.cu -o sums && ./sums sums.bin 1000 && card_sums sums.bin
//
// Arguments: the file, and the number of tiles of each kind and class of numbers. The file has the number of tiles, then for each kind and
// class the 32-bit results (an f16 in the low half) by tile, row and column.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
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

// A floating-point format. e4m3 has no infinity, and one NaN.
struct Format {
    int exponent_bits, mantissa_bits;
    bool ieee;
};
constexpr Format F16{5, 10, true}, BF16{8, 7, true}, TF32{8, 10, true}, E4M3{4, 3, false}, E5M2{5, 2, true}, F32{8, 23, true};

enum Role { A = 0, B = 1, C = 2 };
constexpr int CLASSES = 12;

// One of 2^64 random numbers. Indices are below 2^13, tiles below 2^24.
__device__ uint64_t draw(int kind, int cls, uint32_t tile, int role, int index) {
    uint64_t x = (((uint64_t)(kind * 16 + cls) << 24 | tile) << 2 | role) << 13 | index;
    x = (x + 1) * 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

__device__ uint32_t number(Format f, uint32_t sign, int exponent, uint32_t mantissa) {
    int most = (1 << f.exponent_bits) - (f.ieee ? 2 : 1);
    exponent = exponent < 0 ? 0 : exponent > most ? most : exponent;
    uint32_t fraction = mantissa & ((1u << f.mantissa_bits) - 1);
    if (!f.ieee && exponent == most && fraction == (1u << f.mantissa_bits) - 1) fraction--;
    return sign << (f.exponent_bits + f.mantissa_bits) | (uint32_t)exponent << f.mantissa_bits | fraction;
}

// An infinity or a NaN.
__device__ uint32_t special(Format f, uint32_t sign, bool nan) {
    uint32_t all = (1u << (f.exponent_bits + f.mantissa_bits)) - 1, infinity = all ^ ((1u << f.mantissa_bits) - 1);
    return sign << (f.exponent_bits + f.mantissa_bits) | (nan || !f.ieee ? all : infinity);
}

// The bits of an element of A or B. `wide`: the elements of the product have 8 exponent bits.
__device__ uint32_t element(Format f, int cls, int role, uint64_t h) {
    uint32_t sign = h & 1, mantissa = (uint32_t)(h >> 1) & 0x7fffff, r = (uint32_t)(h >> 33), choice = (uint32_t)(h >> 25) & 127;
    int bias = (1 << (f.exponent_bits - 1)) - 1, most = (1 << f.exponent_bits) - (f.ieee ? 2 : 1);
    bool wide = f.exponent_bits == 8;
    int any = wide ? bias - 60 + (int)(r % 121) : (int)(r % (most + 1)), spread = bias - 10 + (int)(r % 21);
    switch (cls) {
    case 0: return number(f, sign, bias - 1 + (int)(r % 3), mantissa);
    case 2: return number(f, sign, any, mantissa);
    case 4: return number(f, sign, role == A ? (int)(r % 3) : wide ? bias - 20 + (int)(r % 41) : any, mantissa);
    case 5:
        if (choice < 2) return number(f, sign, 0, 0);
        if (choice < 5) return special(f, sign, choice == 4);
        return number(f, sign, spread, mantissa);
    case 6: return role == A && choice < 64 ? number(f, sign, 0, 0) : number(f, sign, wide ? bias - 50 + (int)(r % 101) : any, mantissa);
    case 7: return number(f, sign, wide ? bias + 62 + (int)(r % 3) : most - (int)(r % 3), mantissa);
    case 9: return number(f, sign, bias + (int)(r % 3), mantissa & ~((1u << (f.mantissa_bits - 2)) - 1));
    case 10: return number(f, sign, wide ? bias - 75 + (int)(r % 20) : (int)(r % 4), mantissa);
    case 11: return number(f, sign, wide ? bias - 75 + (int)(r % 12) : (int)(r % 4), mantissa);
    default: return number(f, sign, spread, mantissa);
    }
}

// The bits of an accumulator.
__device__ uint32_t accumulator(Format f, bool wide, int cls, uint64_t h) {
    uint32_t sign = h & 1, mantissa = (uint32_t)(h >> 1) & 0x7fffff, r = (uint32_t)(h >> 33), choice = (uint32_t)(h >> 25) & 127;
    int bias = (1 << (f.exponent_bits - 1)) - 1, most = (1 << f.exponent_bits) - 2;
    bool half = f.exponent_bits == 5;
    switch (cls) {
    case 0: return number(f, sign, bias - 1 + (int)(r % 3), mantissa);
    case 2: return number(f, sign, half ? (int)(r % (most + 1)) : wide ? bias - 100 + (int)(r % 201) : bias - 50 + (int)(r % 81), mantissa);
    case 3: return choice < 64 ? number(f, sign, 0, 0) : number(f, sign, bias - 20 + (int)(r % 16), mantissa);
    case 4:
        if (choice < 32) return number(f, sign, 0, 0);
        return number(f, sign, half ? (int)(r % 3) : wide || choice < 64 ? (int)(r % 24) : bias - 50 + (int)(r % 30), mantissa);
    case 5:
        if (choice < 8) return number(f, sign, 0, 0);
        if (choice < 16) return special(f, sign, choice >= 12);
        return number(f, sign, bias - 10 + (int)(r % 21), mantissa);
    case 6: return choice < 32 ? number(f, sign, 0, 0) : number(f, sign, bias - 50 + (int)(r % 101), mantissa);
    case 7: return number(f, sign, most - (int)(r % 5), mantissa);
    case 8: return number(f, sign, bias - 30 + (int)(r % 61), mantissa);
    case 9: return number(f, sign, bias + 10 + (int)(r % 8), mantissa);
    case 10: return choice < 64 ? number(f, sign, 0, 0) : number(f, sign, (int)(r % 10), mantissa);
    case 11: return number(f, sign, 0, 0);
    default: return number(f, sign, bias - 10 + (int)(r % 21), mantissa);
    }
}

// An element of A (`line` is a row) or B (`line` is a column), as it is in memory.
__device__ uint32_t operand(Format f, int kind, int cls, uint32_t tile, int role, int line, int k, int depth) {
    // Class 3: products cancel in pairs, nearly always exactly.
    int from = cls == 3 ? k & ~1 : k;
    uint64_t h = draw(kind, cls, tile, role, line * depth + from);
    uint32_t bits = element(f, cls, role, h);
    if (cls == 3 && role == A && k % 2 == 1) {
        bits ^= 1u << (f.exponent_bits + f.mantissa_bits);
        bits ^= (uint32_t)(h >> 60) < 2;
    }
    // A tf32 is the upper part of a register. Its lower bits count for nothing.
    if (f.exponent_bits == 8 && f.mantissa_bits == 10) return bits << 13 | (cls == 5 ? 0 : (uint32_t)(h >> 44) & 0x1fff);
    return bits;
}

__host__ __device__ constexpr int bytes(Format f) { return f.mantissa_bits == 10 && f.exponent_bits == 8 ? 4 : (1 + f.exponent_bits + f.mantissa_bits) / 8; }

// Instructions. D, A and B are the registers of a thread; `descriptor` is of B in shared memory.
#define WARP(NAME, D, NA, NB, BODY) struct NAME { static __device__ void run(uint32_t* d, const uint32_t* a, const uint32_t* b, uint64_t descriptor) { BODY; } };
#define IO4 "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
#define IO2 "+r"(d[0]), "+r"(d[1])
#define MMA_4_2(NAME, TEXT) WARP(NAME, 4, 4, 2, asm volatile("mma.sync.aligned." TEXT " {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};" : IO4 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1])))
#define MMA_2_1(NAME, TEXT) WARP(NAME, 4, 2, 1, asm volatile("mma.sync.aligned." TEXT " {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};" : IO4 : "r"(a[0]), "r"(a[1]), "r"(b[0])))
#define MMA_HALF(NAME, TEXT) WARP(NAME, 2, 4, 2, asm volatile("mma.sync.aligned." TEXT " {%0,%1},{%2,%3,%4,%5},{%6,%7},{%0,%1};" : IO2 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1])))
#define BEGIN "wgmma.fence.sync.aligned;\n"
#define END "\nwgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;"
#define WGMMA(NAME, TEXT, TAIL) WARP(NAME, 4, 4, 0, asm volatile(BEGIN "wgmma.mma_async.sync.aligned." TEXT " {%0,%1,%2,%3},{%4,%5,%6,%7},%8,1,1,1" TAIL ";" END : IO4 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor) : "memory"))
#define WGMMA_HALF(NAME, TEXT, TAIL) WARP(NAME, 2, 4, 0, asm volatile(BEGIN "wgmma.mma_async.sync.aligned." TEXT " {%0,%1},{%2,%3,%4,%5},%6,1,1,1" TAIL ";" END : IO2 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor) : "memory"))

MMA_4_2(MmaF16, "m16n8k16.row.col.f32.f16.f16.f32")
MMA_4_2(MmaBf16, "m16n8k16.row.col.f32.bf16.bf16.f32")
MMA_4_2(MmaTf32, "m16n8k8.row.col.f32.tf32.tf32.f32")
MMA_HALF(MmaF16Half, "m16n8k16.row.col.f16.f16.f16.f16")
MMA_2_1(MmaF16Short, "m16n8k8.row.col.f32.f16.f16.f32")
MMA_2_1(MmaBf16Short, "m16n8k8.row.col.f32.bf16.bf16.f32")
MMA_2_1(MmaTf32Short, "m16n8k4.row.col.f32.tf32.tf32.f32")
MMA_4_2(MmaE4m3, "m16n8k32.row.col.f32.e4m3.e4m3.f32")
MMA_4_2(MmaE5m2, "m16n8k32.row.col.f32.e5m2.e5m2.f32")
MMA_4_2(MmaMixed, "m16n8k32.row.col.f32.e4m3.e5m2.f32")
MMA_HALF(MmaE4m3Half, "m16n8k32.row.col.f16.e4m3.e4m3.f16")
MMA_2_1(MmaE4m3Short, "m16n8k16.row.col.f32.e4m3.e4m3.f32")
WGMMA(WgmmaF16, "m64n8k16.f32.f16.f16", ",0")
WGMMA(WgmmaBf16, "m64n8k16.f32.bf16.bf16", ",0")
WGMMA(WgmmaTf32, "m64n8k8.f32.tf32.tf32", "")
WGMMA_HALF(WgmmaF16Half, "m64n8k16.f16.f16.f16", ",0")
WGMMA(WgmmaE4m3, "m64n8k32.f32.e4m3.e4m3", "")
WGMMA(WgmmaE5m2, "m64n8k32.f32.e5m2.e5m2", "")
WGMMA(WgmmaMixed, "m64n8k32.f32.e4m3.e5m2", "")
WGMMA_HALF(WgmmaE4m3Half, "m64n8k32.f16.e4m3.e4m3", "")

// A CTA of one warpgroup computes 64 rows and 8 columns: one tile of wgmma, or four of mma.
template <class Instruction, bool WARPGROUP, int DEPTH>
__global__ void sums(Format fa, Format fb, Format fc, int kind, int cls, uint32_t tiles, uint32_t* out) {
    __shared__ alignas(128) uint8_t matrix[256];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, t = lane % 4;
    uint32_t tile = WARPGROUP ? blockIdx.x : blockIdx.x * 4 + warp;
    int first = WARPGROUP ? 16 * warp : 0, width = bytes(fa), per = 4 / width;
    uint32_t a[4] = {}, b[2] = {}, d[4] = {};
    for (int r = 0; r < DEPTH / per / 2; r++)
        for (int i = 0; i < per; i++) {
            int row = first + group + 8 * (r % 2), k = t * per + i + r / 2 * 4 * per;
            a[r] |= operand(fa, kind, cls, tile, A, row, k, DEPTH) << (8 * width * i);
        }
    for (int r = 0; r < DEPTH / per / 4; r++)
        for (int i = 0; i < per; i++) b[r] |= operand(fb, kind, cls, tile, B, group, t * per + i + r * 4 * per, DEPTH) << (8 * width * i);
    if (WARPGROUP) {
        // Columns of B have 32 bytes: two core matrices of 8 rows of 16 bytes.
        if (warp == 0)
            for (int r = 0; r < 2; r++) *(uint32_t*)(matrix + r * 128 + group * 16 + t * 4) = b[r];
        asm volatile("fence.proxy.async;" ::: "memory");
        __syncthreads();
    }
    bool half = fc.exponent_bits == 5, wide = fa.exponent_bits == 8;
    for (int i = 0; i < 4; i++) {
        uint32_t c = accumulator(fc, wide, cls, draw(kind, cls, tile, C, (first + group + i / 2 * 8) * 8 + 2 * t + i % 2));
        if (half) d[i / 2] |= c << (16 * (i % 2));
        else d[i] = c;
    }
    uint64_t start = (uint64_t)__cvta_generic_to_shared(matrix) >> 4, offset = 128 >> 4;
    Instruction::run(d, a, b, start | offset << 16 | offset << 32);
    if (tile >= tiles) return;
    uint32_t* rows = out + (uint64_t)tile * (WARPGROUP ? 512 : 128);
    for (int i = 0; i < 4; i++) {
        uint32_t value = half ? d[i / 2] >> (16 * (i % 2)) & 0xffff : d[i];
        rows[(first + group + i / 2 * 8) * 8 + 2 * t + i % 2] = value;
    }
}

static FILE* file;
static int kinds = 0;

template <class Instruction, bool WARPGROUP, int DEPTH> void measure(const char* name, Format fa, Format fb, Format fc, uint32_t tiles) {
    uint64_t count = (uint64_t)tiles * (WARPGROUP ? 512 : 128);
    uint32_t* out;
    CHECK(cudaMalloc(&out, count * 4));
    std::vector<uint32_t> words(count);
    uint64_t digest = 0xcbf29ce484222325ull;
    for (int cls = 0; cls < CLASSES; cls++) {
        sums<Instruction, WARPGROUP, DEPTH><<<WARPGROUP ? tiles : (tiles + 3) / 4, 128>>>(fa, fb, fc, kinds, cls, tiles, out);
        CHECK(cudaGetLastError());
        CHECK(cudaMemcpy(words.data(), out, count * 4, cudaMemcpyDeviceToHost));
        for (uint32_t word : words) digest = (digest ^ word) * 0x100000001b3ull;
        std::fwrite(words.data(), 4, count, file);
    }
    std::printf("%-22s %9llu sums, digest %016llx\n", name, (unsigned long long)(count * CLASSES), (unsigned long long)digest);
    CHECK(cudaFree(out));
    kinds++;
}

int main(int count, char** arguments) {
    if (count != 3) return std::printf("usage: sums FILE TILES\n"), 1;
    uint32_t tiles = std::strtoul(arguments[2], nullptr, 10);
    file = std::fopen(arguments[1], "wb");
    if (!file || tiles == 0 || tiles >> 24) return std::printf("cannot write %s, or tiles are not 1 to 2^24 - 1\n", arguments[1]), 1;
    cudaDeviceProp device;
    CHECK(cudaGetDeviceProperties(&device, 0));
    std::printf("%s, compute capability %d.%d\n", device.name, device.major, device.minor);
    std::fwrite(&tiles, 4, 1, file);
    measure<MmaF16, false, 16>("mma f32 f16", F16, F16, F32, tiles);
    measure<MmaBf16, false, 16>("mma f32 bf16", BF16, BF16, F32, tiles);
    measure<MmaTf32, false, 8>("mma f32 tf32", TF32, TF32, F32, tiles);
    measure<MmaF16Half, false, 16>("mma f16 f16", F16, F16, F16, tiles);
    measure<MmaF16Short, false, 8>("mma k8 f32 f16", F16, F16, F32, tiles);
    measure<MmaBf16Short, false, 8>("mma k8 f32 bf16", BF16, BF16, F32, tiles);
    measure<MmaTf32Short, false, 4>("mma k4 f32 tf32", TF32, TF32, F32, tiles);
    measure<MmaE4m3, false, 32>("mma f32 e4m3", E4M3, E4M3, F32, tiles);
    measure<MmaE5m2, false, 32>("mma f32 e5m2", E5M2, E5M2, F32, tiles);
    measure<MmaMixed, false, 32>("mma f32 e4m3 e5m2", E4M3, E5M2, F32, tiles);
    measure<MmaE4m3Half, false, 32>("mma f16 e4m3", E4M3, E4M3, F16, tiles);
    measure<MmaE4m3Short, false, 16>("mma k16 f32 e4m3", E4M3, E4M3, F32, tiles);
    measure<WgmmaF16, true, 16>("wgmma f32 f16", F16, F16, F32, tiles);
    measure<WgmmaBf16, true, 16>("wgmma f32 bf16", BF16, BF16, F32, tiles);
    measure<WgmmaTf32, true, 8>("wgmma f32 tf32", TF32, TF32, F32, tiles);
    measure<WgmmaF16Half, true, 16>("wgmma f16 f16", F16, F16, F16, tiles);
    measure<WgmmaE4m3, true, 32>("wgmma f32 e4m3", E4M3, E4M3, F32, tiles);
    measure<WgmmaE5m2, true, 32>("wgmma f32 e5m2", E5M2, E5M2, F32, tiles);
    measure<WgmmaMixed, true, 32>("wgmma f32 e4m3 e5m2", E4M3, E5M2, F32, tiles);
    measure<WgmmaE4m3Half, true, 32>("wgmma f16 e4m3", E4M3, E4M3, F16, tiles);
    return std::fclose(file) != 0;
}
