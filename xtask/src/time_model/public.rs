//! Predictions of public kernels for a B200 (gau-nernst/gpu-mode-kernels, aee9cda6), with their published times.
//!
//! A prediction builds the kernel from a checkout, without the source's PyTorch code. Only the launch parameters, which
//! the sources state, are stored here.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, ensure};
use serde_json::{Value, json};

use super::prediction::{Prediction, UNMEASURED, time_launch, timeline};
use crate::tools;

/// A kernel with sizes for which its time was published.
pub struct Public {
    /// Folder in `nvidia/`, version and sizes.
    pub name: &'static str,
    /// Published time. The events tick in steps of about 2.05 us.
    pub us: f64,
    k: u32,
    /// Columns of K per stage, and number of stages.
    block_k: u32,
    stages: u32,
    sizes: Sizes,
}

/// Rows of the operands and of their tiles. They determine the launch.
enum Sizes {
    /// Rows of both operands and of their tiles. The kernel's last arguments serve its profiler.
    Gemm { operands: [(u32, u32); 2] },
    /// Tokens, rows of gate and of up, and rows of their tiles.
    Dual { m: u32, n: u32, tile_n: u32 },
    /// The same sizes, computed by pairs of CTAs.
    Pairs { m: u32, n: u32, tile_n: u32 },
    /// Tokens of each group in descending order, tokens per tile, and rows of each group's weights.
    Groups { m: &'static [u32], tile_m: u32, n: u32 },
    /// Matrices, rows per matrix, rows per thread, and threads that share a row along K.
    Vectors { matrices: u32, m: u32, thread_m: u32, thread_k: u32 },
}
use Sizes::{Dual, Gemm, Groups, Pairs, Vectors};

/// Rows of a tile of tokens, and rows of a block of scales.
const ROWS: u32 = 128;
/// Number of SMs that a grouped launch assumes.
const SMS: u32 = 148;

#[rustfmt::skip] // One kernel per line.
pub const KERNELS: [Public; 18] = [
    Public { name: "gemm v3b 7168x16384", us: 18.8, k: 16384, block_k: 256, stages: 8, sizes: Gemm { operands: [(7168, 128), (128, 64)] } },
    Public { name: "gemm v3b 4096x7168", us: 10.3, k: 7168, block_k: 512, stages: 5, sizes: Gemm { operands: [(4096, 64), (128, 64)] } },
    Public { name: "gemm v3b 7168x2048", us: 6.78, k: 2048, block_k: 256, stages: 6, sizes: Gemm { operands: [(7168, 128), (128, 64)] } },
    Public { name: "dual_gemm v1c dual-1", us: 14.7, k: 7168, block_k: 256, stages: 5, sizes: Dual { m: 256, n: 4096, tile_n: 64 } },
    Public { name: "dual_gemm v1c dual-2", us: 18.5, k: 7168, block_k: 256, stages: 4, sizes: Dual { m: 512, n: 4096, tile_n: 128 } },
    Public { name: "dual_gemm v1c dual-3", us: 10.3, k: 4096, block_k: 256, stages: 5, sizes: Dual { m: 256, n: 3072, tile_n: 64 } },
    Public { name: "dual_gemm v1c dual-4", us: 17.5, k: 7168, block_k: 256, stages: 4, sizes: Dual { m: 512, n: 3072, tile_n: 128 } },
    Public { name: "dual_gemm v2 dual-1", us: 12.4, k: 7168, block_k: 256, stages: 7, sizes: Pairs { m: 256, n: 4096, tile_n: 64 } },
    Public { name: "dual_gemm v2 dual-2", us: 16.4, k: 7168, block_k: 256, stages: 5, sizes: Pairs { m: 512, n: 4096, tile_n: 128 } },
    Public { name: "dual_gemm v2 dual-3", us: 9.43, k: 4096, block_k: 256, stages: 7, sizes: Pairs { m: 256, n: 3072, tile_n: 64 } },
    Public { name: "dual_gemm v2 dual-4", us: 16.3, k: 7168, block_k: 256, stages: 5, sizes: Pairs { m: 512, n: 3072, tile_n: 128 } },
    Public { name: "group_gemm v6b group-1", us: 27.9, k: 7168, block_k: 256, stages: 8, sizes: Groups { m: &[248, 176, 160, 128, 96, 80, 72, 64], tile_m: 128, n: 4096 } },
    Public { name: "group_gemm v6b group-2", us: 19.4, k: 2048, block_k: 256, stages: 5, sizes: Groups { m: &[196, 168, 164, 160, 148, 76, 72, 40], tile_m: 256, n: 7168 } },
    Public { name: "group_gemm v6b group-3", us: 8.48, k: 4096, block_k: 256, stages: 8, sizes: Groups { m: &[320, 192], tile_m: 128, n: 3072 } },
    Public { name: "group_gemm v6b group-4", us: 6.43, k: 1536, block_k: 256, stages: 8, sizes: Groups { m: &[384, 128], tile_m: 128, n: 4096 } },
    Public { name: "gemv v2c 7168x16384", us: 24.5, k: 16384, block_k: 4096, stages: 2, sizes: Vectors { matrices: 1, m: 7168, thread_m: 4, thread_k: 128 } },
    Public { name: "gemv v2c 8 of 4096x7168", us: 39.3, k: 7168, block_k: 1024, stages: 2, sizes: Vectors { matrices: 8, m: 4096, thread_m: 8, thread_k: 32 } },
    Public { name: "gemv v2c 4 of 7168x2048", us: 16.6, k: 2048, block_k: 1024, stages: 2, sizes: Vectors { matrices: 4, m: 7168, thread_m: 8, thread_k: 32 } },
];

impl Public {
    /// Name of the prediction.
    pub fn point(&self) -> String {
        format!("public {}", self.name)
    }

    /// Returns the source's path in `nvidia/`, and the kernel with its template arguments.
    fn code(&self) -> (&'static str, String) {
        let Public { k, block_k, stages, .. } = *self;
        match self.sizes {
            Gemm { operands: [(_, m), (_, n)] } => {
                ("nvfp4_gemm/submission_v3b.py", format!("kernel<{m}, {n}, {block_k}, true, {stages}, false>"))
            }
            Dual { tile_n, .. } => {
                ("nvfp4_dual_gemm/submission_v1c.py", format!("kernel<{k}, {ROWS}, {tile_n}, {block_k}, {stages}>"))
            }
            Pairs { tile_n, .. } => {
                ("nvfp4_dual_gemm/submission_v2.py", format!("kernel_cutlass<{k}, {tile_n}, {stages}, false>"))
            }
            Groups { m, tile_m, n } => (
                "nvfp4_group_gemm/submission_v6b.py",
                format!("kernel_cutlass<{}, {tile_m}, {n}, {k}, {stages}, 2>", m.len()),
            ),
            Vectors { thread_m, thread_k, .. } => {
                ("nvfp4_gemv/submission_v2c.py", format!("kernel<{thread_m}, {thread_k}, {stages}>"))
            }
        }
    }

    /// Builds the kernel with nvcc from a checkout of the repository, and predicts its time.
    pub fn predict(&self, checkout: &Path, install: bool) -> anyhow::Result<Prediction> {
        let (source, kernel) = self.code();
        let instance = format!("void *instance[] = {{(void *){kernel}}};\n");
        let path = checkout.join("nvidia").join(source);
        let source = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let kernel = kernel_of(&source)
            .with_context(|| format!("cannot find the kernel in {}; use a checkout of aee9cda6", path.display()))?;
        let folder = tempfile::tempdir()?;
        let file = |name: &str| folder.path().join(name);
        fs::write(
            file("kernel.cu"),
            format!("#include <algorithm>\n#include <cstdint>\n#include <cstring>\n{kernel}\n{instance}"),
        )?;
        let options = ["-O3", "-std=c++17", "-arch=sm_100a", "--use_fast_math", "--expt-relaxed-constexpr", "-ptx"];
        let mut nvcc = Command::new("nvcc");
        tools::output(nvcc.args(options).arg(file("kernel.cu")).arg("-o").arg(file("kernel.ptx")))
            .context("cannot compile the kernel; nvcc must be on PATH with its headers")?;
        time_launch(timeline(UNMEASURED)?, folder.path(), &self.launch().to_string(), install)
    }

    /// Returns the contents of the launch file.
    fn launch(&self) -> Value {
        let mut buffers = Buffers::default();
        let (cluster, grid, threads, stage_bytes, rest_bytes, args) = match self.sizes {
            Gemm { operands } => {
                let [(m, tile_m), (n, tile_n)] = operands;
                let mut args = self.by_pointer(&mut buffers, &operands);
                args.push(buffers.output(m * n));
                args.extend([m, n, self.k].map(number));
                args.extend([json!({"u64": 0}), number(0)]);
                (1, [m / tile_m * (n / tile_n), 1], tile_m + 64, self.stage_bytes(tile_m + tile_n, 2 * ROWS), 0, args)
            }
            Dual { m, n, tile_n } => {
                let mut args = self.by_pointer(&mut buffers, &[(m, ROWS), (n, tile_n), (n, tile_n)]);
                args.extend([buffers.output(m * n), number(m), number(n)]);
                let mbarriers = 8 * (2 * self.stages + 1);
                let stage_bytes = self.stage_bytes(ROWS + 2 * tile_n, 3 * ROWS);
                (1, [m / ROWS * (n / tile_n), 1], 192, stage_bytes, mbarriers, args)
            }
            Pairs { m, n, tile_n } => {
                let operands = [(m, ROWS), (n, tile_n / 2), (n, tile_n / 2)];
                let mut args = operands.map(|(rows, tile)| self.values(&mut buffers, rows, tile)).to_vec();
                args.extend(operands.map(|(rows, _)| self.scales(&mut buffers, rows, ROWS)));
                let args = args.into_iter().map(|map| json!({"tensor_map": map}));
                let args = args.chain([buffers.output(m * n), number(m), number(n)]).collect();
                let stage_bytes = self.stage_bytes(ROWS + tile_n, 3 * ROWS) + 16;
                (2, [m / ROWS, n / tile_n], 192, stage_bytes, 12, args)
            }
            Groups { m, tile_m, n } => {
                let (args, tiles) = self.groups(&mut buffers, m, tile_m, n);
                let stage_bytes = self.stage_bytes(tile_m / 2 + ROWS, tile_m + ROWS) + 16;
                let rest_bytes = 16 * (1 + tile_m / ROWS) + 4;
                (2, [n / ROWS, tiles.min(SMS / (n / ROWS))], 192, stage_bytes, rest_bytes, args)
            }
            Vectors { matrices, m, thread_m, thread_k } => {
                let threads = 128;
                let rows = threads / thread_k * thread_m;
                let values = [m, ROWS].map(|rows| json!({"pointer": buffers.add(matrices * rows * self.k / 2)}));
                let scales = [m, ROWS].map(|rows| json!({"pointer": buffers.add(matrices * rows * self.k / 16)}));
                let sizes = [matrices, m, self.k / 2].map(number);
                let output = buffers.output(matrices * m);
                let args = values.into_iter().chain(scales).chain([output]).chain(sizes).collect();
                (1, [m / rows, matrices], threads, self.stage_bytes(rows + 1, rows + 1), 0, args)
            }
        };
        json!({
            "ptx": "kernel.ptx", "cluster": [cluster, 1, 1], "grid": [grid[0], grid[1], 1], "block": [threads, 1, 1],
            "shared_bytes": self.stages * stage_bytes + rest_bytes, "sanitize": false, "buffers": buffers.0, "args": args,
        })
    }

    /// Returns tensor maps of the operands' values, then pointers to their scales.
    fn by_pointer(&self, buffers: &mut Buffers, operands: &[(u32, u32)]) -> Vec<Value> {
        let maps = operands.iter().map(|&(rows, tile)| json!({"tensor_map": self.values(buffers, rows, tile)}));
        let mut args: Vec<Value> = maps.collect();
        args.extend(operands.iter().map(|(rows, _)| json!({"pointer": buffers.add(rows * self.k / 16)})));
        args
    }

    /// Returns the argument structure of all groups, and the number of their token tiles.
    fn groups(&self, buffers: &mut Buffers, m: &[u32], tile_m: u32, n: u32) -> (Vec<Value>, u32) {
        let mut maps = Vec::new();
        maps.extend(m.iter().map(|&rows| self.values(buffers, rows, ROWS / 2)));
        maps.extend(m.iter().map(|_| self.values(buffers, n, ROWS)));
        maps.extend(m.iter().map(|&rows| self.scales(buffers, rows.next_multiple_of(ROWS), tile_m / 2)));
        maps.extend(m.iter().map(|_| self.scales(buffers, n, ROWS)));
        let mut patches: Vec<Value> =
            maps.into_iter().enumerate().map(|(i, map)| json!({"at": 128 * i, "tensor_map": map})).collect();
        let end = 128 * patches.len();
        for (i, rows) in m.iter().enumerate() {
            let mut output = buffers.output(rows.next_multiple_of(16) * n);
            output["at"] = json!(end + 8 * i);
            patches.push(output);
        }
        // Tokens of each group, then the number of tiles before each group, then the total.
        let mut tiles = vec![0];
        tiles.extend(m.iter().scan(0, |sum, rows| {
            *sum += rows.div_ceil(tile_m);
            Some(*sum)
        }));
        let mut bytes = vec![0; end + 8 * m.len()];
        bytes.extend(m.iter().chain(&tiles).flat_map(|word| word.to_le_bytes()));
        bytes.resize(bytes.len().next_multiple_of(128), 0);
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        (vec![json!({"hex": hex, "patches": patches}), number(self.k)], tiles[m.len()])
    }

    /// Returns a tensor map of an operand's values.
    fn values(&self, buffers: &mut Buffers, rows: u32, tile: u32) -> Value {
        let Public { k, block_k, .. } = *self;
        json!({
            "buffer": buffers.add(rows * k / 2), "type": "u4x16_align8", "dims": [256, rows, k / 256], "strides": [k / 2, 128],
            "box": [256, tile, block_k / 256], "swizzle": "128B",
        })
    }

    /// Returns a tensor map of an operand's scales in words of eight bytes.
    fn scales(&self, buffers: &mut Buffers, rows: u32, tile: u32) -> Value {
        let bytes = rows * self.k / 16;
        let words = tile * self.block_k / 16 / 8;
        json!({"buffer": buffers.add(bytes), "type": "s64", "dims": [bytes / 8], "strides": [], "box": [words]})
    }

    /// Bytes of a stage with `values` rows of values and `scales` rows of scales.
    fn stage_bytes(&self, values: u32, scales: u32) -> u32 {
        values * self.block_k / 2 + scales * self.block_k / 16
    }
}

fn number(value: u32) -> Value {
    json!({"u32": value})
}

/// Buffers of a launch, by name.
#[derive(Default)]
struct Buffers(serde_json::Map<String, Value>);

impl Buffers {
    /// Adds a buffer and returns its name.
    fn add(&mut self, bytes: u32) -> String {
        let name = format!("buffer{}", self.0.len());
        self.0.insert(name.clone(), json!({"bytes": bytes}));
        name
    }

    /// Adds a buffer of f16 numbers and returns a pointer to it.
    fn output(&mut self, numbers: u32) -> Value {
        json!({"pointer": self.add(2 * numbers)})
    }
}

/// Returns the kernel of a submission: its CUDA source up to the first host function.
fn kernel_of(source: &str) -> anyhow::Result<String> {
    let (_, source) = source.split_once("CUDA_SRC = r\"\"\"").context("the source has no CUDA_SRC")?;
    let ends = ["void check_cu(", "void gemv("];
    let (kernel, _) =
        ends.iter().find_map(|end| source.split_once(end)).context("the source has no known host function")?;
    ensure!(kernel.contains("__global__"), "the source has no kernel before its host functions");
    let of_torch = |line: &&str| line.starts_with("#include <torch/") || line.starts_with("#include <ATen/");
    Ok(kernel.lines().filter(|line| !of_torch(line)).collect::<Vec<_>>().join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_kernel_of_a_submission_is_kept() {
        let source = "CUDA_SRC = r\"\"\"\n#include <cuda_fp16.h>\n#include <torch/library.h>\n__global__ void kernel() {}\n\
                      void check_cu(CUresult err) {}\n\"\"\"\n";
        assert_eq!(kernel_of(source).unwrap(), "\n#include <cuda_fp16.h>\n__global__ void kernel() {}");
        assert!(kernel_of("CUDA_SRC = r\"\"\"\"\"\"").is_err());
    }

    #[test]
    fn launches_match_the_public_sources() {
        // submission_v1c.py on dual-1: 128 CTAs of six warps, five stages of 38 KB.
        let launch = KERNELS[3].launch();
        assert_eq!(launch["grid"], json!([128, 1, 1]));
        assert_eq!(launch["block"], json!([192, 1, 1]));
        assert_eq!(launch["shared_bytes"], json!(5 * (32768 + 6144) + 88));
        assert_eq!(launch["args"].as_array().unwrap().len(), 9);
        // submission_v2.py on dual-4: the maximum number of stages in 227,000 bytes.
        let launch = KERNELS[10].launch();
        assert_eq!(launch["grid"], json!([4, 24, 1]));
        assert_eq!(launch["shared_bytes"], json!((227_000 - 12) / 38_928 * 38_928 + 12));
        // submission_v6b.py on group-2: two tiles of 256 tokens and 56 of weights at a time, and 32 tensor maps.
        let launch = KERNELS[12].launch();
        assert_eq!(launch["grid"], json!([56, 2, 1]));
        assert_eq!(launch["args"][0]["patches"].as_array().unwrap().len(), 40);
    }
}
