// A program for the driver API in C. Its argument selects the mode, such as an error that it makes.
#include <stdio.h>
#include <string.h>

typedef unsigned long long CUdeviceptr;
int cuInit(unsigned);
int cuDeviceGet(int *, int);
int cuDeviceGetName(char *, int, int);
int cuDevicePrimaryCtxRetain(void **, int);
int cuCtxSetCurrent(void *);
int cuCtxSynchronize(void);
int cuModuleLoadData(void **, const void *);
int cuModuleGetFunction(void **, void *, const char *);
int cuMemAlloc_v2(CUdeviceptr *, size_t);
int cuMemFree_v2(CUdeviceptr);
int cuMemAllocManaged(CUdeviceptr *, size_t, unsigned);
int cuMemHostAlloc(void **, size_t, unsigned);
int cuMemcpyHtoD_v2(CUdeviceptr, const void *, size_t);
int cuMemcpyHtoDAsync_v2(CUdeviceptr, const void *, size_t, void *);
int cuMemcpyDtoH_v2(void *, CUdeviceptr, size_t);
int cuStreamCreate(void **, unsigned);
int cuStreamSynchronize(void *);
int cuStreamBeginCapture_v2(void *, int);
int cuStreamEndCapture(void *, void **);
int cuGraphInstantiateWithFlags(void **, void *, unsigned long long);
int cuGraphLaunch(void *, void *);
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
int cuGetErrorName(int, const char **);

static const char PTX[] =
    ".version 8.0\n.target sm_80\n.address_size 64\n"
    ".visible .entry twice(.param .u64 p) {\n"
    ".reg .b32 %r<3>; .reg .b64 %d<4>;\n"
    "ld.param.u64 %d1, [p];\nmov.u32 %r1, %tid.x;\nmul.wide.u32 %d2, %r1, 4;\nadd.u64 %d3, %d1, %d2;\n"
    "ld.global.u32 %r2, [%d3];\nshl.b32 %r2, %r2, 1;\nst.global.u32 [%d3], %r2;\nret;\n}\n";

#define CHECK(call) do { int code = call; if (code) { const char *name = "?"; cuGetErrorName(code, &name); \
    printf("%s: %s\n", #call, name); return 3; } } while (0)

int main(int count, char **arguments) {
    const char *mode = count > 1 ? arguments[1] : "";
    unsigned threads = strcmp(mode, "past") ? 4 : 5;
    unsigned values[4] = {1, 2, 3, 4};
    void *context, *module, *function, *stream, *graph, *executable;
    CUdeviceptr memory;
    char name[64];
    int device;
    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&device, 0));
    CHECK(cuDeviceGetName(name, 64, device));
    printf("%s\n", name);
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuModuleLoadData(&module, PTX));
    CHECK(cuModuleGetFunction(&function, module, "twice"));
    CHECK(cuStreamCreate(&stream, 1));
    if (!strcmp(mode, "managed")) CHECK(cuMemAllocManaged(&memory, 16, 1));
    CHECK(cuMemAlloc_v2(&memory, sizeof values));
    void *parameters[] = {&memory};
    if (!strcmp(mode, "graph")) {
        unsigned *locked;
        CHECK(cuMemHostAlloc((void **)&locked, sizeof values, 0));
        CHECK(cuStreamBeginCapture_v2(stream, 0));
        CHECK(cuMemcpyHtoDAsync_v2(memory, locked, sizeof values, stream));
        CHECK(cuLaunchKernel(function, 1, 1, 1, threads, 1, 1, 0, stream, parameters, 0));
        CHECK(cuLaunchKernel(function, 1, 1, 1, threads, 1, 1, 0, stream, parameters, 0));
        CHECK(cuStreamEndCapture(stream, &graph));
        CHECK(cuGraphInstantiateWithFlags(&executable, graph, 0));
        CHECK(cuGraphLaunch(executable, stream));
        memcpy(locked, values, sizeof values); // Before the wait for the graph, so the copy must still see it.
        CHECK(cuStreamSynchronize(stream));
    } else if (!strcmp(mode, "locked")) {
        unsigned *locked;
        CHECK(cuMemHostAlloc((void **)&locked, sizeof values, 2));
        memcpy(locked, values, sizeof values);
        memory = (CUdeviceptr)locked; // Host and device share one address space.
        CHECK(cuLaunchKernel(function, 1, 1, 1, threads, 1, 1, 0, stream, parameters, 0));
        CHECK(cuStreamSynchronize(stream));
        printf("%u %u %u %u\n", locked[0], locked[1], locked[2], locked[3]);
        return 0;
    } else {
        CHECK(cuMemcpyHtoD_v2(memory, values, sizeof values));
        CHECK(cuLaunchKernel(function, 1, 1, 1, threads, 1, 1, 0, stream, parameters, 0));
        CHECK(cuStreamSynchronize(stream));
    }
    CHECK(cuMemcpyDtoH_v2(values, memory, sizeof values));
    CHECK(cuMemFree_v2(memory));
    printf("%u %u %u %u\n", values[0], values[1], values[2], values[3]);
    return strcmp(mode, "seven") ? 0 : 7;
}
