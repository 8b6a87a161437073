#!/usr/bin/env bash
# Runs a command with PyPI's CUDA 13.0, as candle's build asks for one, on a machine that needs neither a toolkit nor a GPU:
#
#     crates/nvfp4_candle/pypi_cuda.sh cargo build --release --manifest-path crates/nvfp4_candle/Cargo.toml --features cuda
#
# It wants Python, gcc and g++. The toolkit goes to target/pypi-cuda, 1.2 GB. candle's kernels are compiled for compute capability 9.0, or
# for the one in $CUDA_COMPUTE_CAP (86 for 8.6), and need a driver of CUDA 13.0 or later.
set -euo pipefail

folder=$(cd "$(dirname "$0")/../.." && pwd)/target/pypi-cuda
if [ ! -e "$folder/ready" ]; then
    python3 -m venv "$folder"
    "$folder/bin/pip" install --quiet nvidia-{cuda-nvcc,cuda-crt,nvvm,cuda-runtime,cuda-cccl,cuda-nvrtc,cublas}==13.0.* nvidia-curand==10.4.*
    cd "$folder"/lib/python3*/site-packages/nvidia/cu13/lib
    # The names that a linker looks for.
    for library in lib{cudart,nvrtc,cublas,cublasLt,curand}.so.*; do
        ln -sf "$library" "${library%%.so.*}.so"
    done
    ln -sfn lib ../lib64
    # The driver's library comes with a driver. For the linker it is one of its names.
    mkdir -p stubs
    echo '#include <cuda.h>' | gcc -E -I ../include - | grep -oE '\bcu[A-Z]\w*\(' | sort -u | sed 's/.*/int &) { return 100; }/' |
        gcc -w -shared -fPIC -Wl,-soname,libcuda.so.1 -o stubs/libcuda.so -x c -
    cd "$OLDPWD"
    touch "$folder/ready"
fi

CUDA_HOME=$(echo "$folder"/lib/python3*/site-packages/nvidia/cu13)
export CUDA_HOME CUDA_COMPUTE_CAP=${CUDA_COMPUTE_CAP:-90} PATH=$CUDA_HOME/bin:$PATH
exec "$@"
