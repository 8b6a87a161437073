// The part of PyTorch's header of this name that learn-cuda's kernels use.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <tuple>

#define TORCH_CHECK(condition, ...)                                                                                         \
    do {                                                                                                                    \
        if (!(condition)) {                                                                                                 \
            printf("Failed: %s\n", #condition);                                                                             \
            exit(1);                                                                                                        \
        }                                                                                                                   \
    } while (0)
