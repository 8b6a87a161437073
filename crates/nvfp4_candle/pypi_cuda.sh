#!/usr/bin/env bash
# Runs a command with PyPI's CUDA 13.0, which candle's build can use, on a machine without a toolkit or a GPU:
#
#     crates/nvfp4_candle/pypi_cuda.sh cargo build --release --manifest-path crates/nvfp4_candle/Cargo.toml --features cuda
#
# It needs Python, gcc and g++. The toolkit (1.2 GB) goes to target/pypi-cuda. candle's kernels are compiled for compute
# capability 9.0 or for $CUDA_COMPUTE_CAP (86 for 8.6), and need a driver for CUDA 13.0 or later.
set -euo pipefail

folder=$(cd "$(dirname "$0")/../.." && pwd)/target/pypi-cuda
if [ ! -e "$folder/ready" ]; then
    python3 -m venv "$folder"
    "$folder/bin/pip" install --quiet nvidia-{cuda-nvcc,cuda-crt,nvvm,cuda-runtime,cuda-cccl,cuda-nvrtc,cublas}==13.0.* nvidia-curand==10.4.*
    cd "$folder"/lib/python3*/site-packages/nvidia/cu13/lib
    # The linker looks for library names without versions.
    for library in lib{cudart,nvrtc,cublas,cublasLt,curand}.so.*; do
        ln -sf "$library" "${library%%.so.*}.so"
    done
    ln -sfn lib ../lib64
    # libcuda comes with a driver. This stub has its functions, for the linker.
    mkdir -p stubs
    echo '#include <cuda.h>' | gcc -E -I ../include - | grep -oE '\bcu[A-Z]\w*\(' | sort -u | sed 's/.*/int &) { return 100; }/' |
        gcc -w -shared -fPIC -Wl,-soname,libcuda.so.1 -o stubs/libcuda.so -x c -
    cd "$OLDPWD"
    touch "$folder/ready"
fi

CUDA_HOME=$(echo "$folder"/lib/python3*/site-packages/nvidia/cu13)
export CUDA_HOME CUDA_COMPUTE_CAP=${CUDA_COMPUTE_CAP:-90} PATH=$CUDA_HOME/bin:$PATH
exec "$@"
