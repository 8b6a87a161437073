//! Kernels of others for a B200, with the times that they published (gau-nernst/gpu-mode-kernels, aee9cda6), on the model.
//!
//! They are built from a checkout when they are predicted: of a source the kernel alone, without what calls it from PyTorch. Nothing
//! of them is kept here but how they are launched, which their sources say.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, ensure};
use serde_json::{Value, json};

use super::{Prediction, UNMEASURED, time_launch, timeline};
use crate::tools;

/// A kernel and sizes on which its time was published.
pub struct Public {
    /// Its folder in `nvidia/`, its version, and the sizes.
    pub name: &'static str,
    /// As published: between events that tick in steps of about 2.05 us.
    pub us: f64,
    k: u32,
    /// Columns of K in a stage, and stages.
    block_k: u32,
    stages: u32,
    sizes: Sizes,
}

/// Rows of the operands and of their tiles, which decide how a kernel is launched.
enum Sizes {
    /// Both operands and their tiles. The last arguments are of its profiler.
    Gemm { operands: [(u32, u32); 2] },
    /// Tokens, rows of gate and of up, and of their tiles.
    Dual { m: u32, n: u32, tile_n: u32 },
    /// The same by pairs of CTAs.
    Pairs { m: u32, n: u32, tile_n: u32 },
    /// Tokens of each group in falling order and of a tile, and rows of each group's weights.
    Groups { m: &'static [u32], tile_m: u32, n: u32 },
    /// Matrices, rows of each, rows of a thread, and threads that share them.
    Vectors { matrices: u32, m: u32, thread_m: u32, thread_k: u32 },
}
use Sizes::{Dual, Gemm, Groups, Pairs, Vectors};

/// Rows of a tile of tokens, and of what has scales together.
const ROWS: u32 = 128;
/// Multiprocessors that a launch of groups reckons with.
const SMS: u32 = 148;

#[rustfmt::skip] // A kernel, a line.
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
    /// Its name among predictions.
    pub fn point(&self) -> String {
        format!("public {}", self.name)
    }

    /// Where its source is in `nvidia/`, and the kernel with its template's arguments.
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

    /// Predicts it: built with nvcc from a checkout of the repository.
    pub fn predict(&self, checkout: &Path, install: bool) -> anyhow::Result<Prediction> {
        let (source, kernel) = self.code();
        let instance = format!("void *instance[] = {{(void *){kernel}}};\n");
        let path = checkout.join("nvidia").join(source);
        let source = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let kernel = kernel_of(&source).with_context(|| format!("{}: not as in aee9cda6", path.display()))?;
        let folder = tempfile::tempdir()?;
        let file = |name: &str| folder.path().join(name);
        fs::write(
            file("kernel.cu"),
            format!("#include <algorithm>\n#include <cstdint>\n#include <cstring>\n{kernel}\n{instance}"),
        )?;
        let options = ["-O3", "-std=c++17", "-arch=sm_100a", "--use_fast_math", "--expt-relaxed-constexpr", "-ptx"];
        let mut nvcc = Command::new("nvcc");
        tools::output(nvcc.args(options).arg(file("kernel.cu")).arg("-o").arg(file("kernel.ptx")))
            .context("nvcc, which should be on PATH with its headers")?;
        time_launch(timeline(UNMEASURED)?, folder.path(), &self.launch().to_string(), install)
    }

    /// The launch, as a launch file.
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

    /// Maps of the values of operands, then pointers to their scales.
    fn by_pointer(&self, buffers: &mut Buffers, operands: &[(u32, u32)]) -> Vec<Value> {
        let maps = operands.iter().map(|&(rows, tile)| json!({"tensor_map": self.values(buffers, rows, tile)}));
        let mut args: Vec<Value> = maps.collect();
        args.extend(operands.iter().map(|(rows, _)| json!({"pointer": buffers.add(rows * self.k / 16)})));
        args
    }

    /// The structure of arguments of all groups, and how many tiles of tokens they have.
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
        // Tokens of each group, then the tiles before each and of all.
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

    /// A tensor map of an operand's values.
    fn values(&self, buffers: &mut Buffers, rows: u32, tile: u32) -> Value {
        let Public { k, block_k, .. } = *self;
        json!({
            "buffer": buffers.add(rows * k / 2), "type": "u4x16_align8", "dims": [256, rows, k / 256], "strides": [k / 2, 128],
            "box": [256, tile, block_k / 256], "swizzle": "128B",
        })
    }

    /// A tensor map of an operand's scales, as words of eight.
    fn scales(&self, buffers: &mut Buffers, rows: u32, tile: u32) -> Value {
        let bytes = rows * self.k / 16;
        let words = tile * self.block_k / 16 / 8;
        json!({"buffer": buffers.add(bytes), "type": "s64", "dims": [bytes / 8], "strides": [], "box": [words]})
    }

    /// Bytes of a stage: so many rows of values, and scales of so many.
    fn stage_bytes(&self, values: u32, scales: u32) -> u32 {
        values * self.block_k / 2 + scales * self.block_k / 16
    }
}

fn number(value: u32) -> Value {
    json!({"u32": value})
}

/// The buffers of a launch, by name.
#[derive(Default)]
struct Buffers(serde_json::Map<String, Value>);

impl Buffers {
    /// The name of a new one.
    fn add(&mut self, bytes: u32) -> String {
        let name = format!("buffer{}", self.0.len());
        self.0.insert(name.clone(), json!({"bytes": bytes}));
        name
    }

    /// A pointer to so many numbers of f16.
    fn output(&mut self, numbers: u32) -> Value {
        json!({"pointer": self.add(2 * numbers)})
    }
}

/// The kernel of a submission: its CUDA source up to its host's functions.
fn kernel_of(source: &str) -> anyhow::Result<String> {
    let (_, source) = source.split_once("CUDA_SRC = r\"\"\"").context("no CUDA_SRC")?;
    let ends = ["void check_cu(", "void gemv("];
    let (kernel, _) = ends.iter().find_map(|end| source.split_once(end)).context("no function of the host")?;
    ensure!(kernel.contains("__global__"), "no kernel before the host's functions");
    let of_torch = |line: &&str| line.starts_with("#include <torch/") || line.starts_with("#include <ATen/");
    Ok(kernel.lines().filter(|line| !of_torch(line)).collect::<Vec<_>>().join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_submission_only_the_kernel_is_left() {
        let source = "CUDA_SRC = r\"\"\"\n#include <cuda_fp16.h>\n#include <torch/library.h>\n__global__ void kernel() {}\n\
                      void check_cu(CUresult err) {}\n\"\"\"\n";
        assert_eq!(kernel_of(source).unwrap(), "\n#include <cuda_fp16.h>\n__global__ void kernel() {}");
        assert!(kernel_of("CUDA_SRC = r\"\"\"\"\"\"").is_err());
    }

    #[test]
    fn launches_are_as_the_sources_say() {
        // submission_v1c.py on dual-1: 128 blocks of six warps with five stages of 38 KB.
        let launch = KERNELS[3].launch();
        assert_eq!(launch["grid"], json!([128, 1, 1]));
        assert_eq!(launch["block"], json!([192, 1, 1]));
        assert_eq!(launch["shared_bytes"], json!(5 * (32768 + 6144) + 88));
        assert_eq!(launch["args"].as_array().unwrap().len(), 9);
        // submission_v2.py on dual-4: as many stages as 227,000 bytes hold.
        let launch = KERNELS[10].launch();
        assert_eq!(launch["grid"], json!([4, 24, 1]));
        assert_eq!(launch["shared_bytes"], json!((227_000 - 12) / 38_928 * 38_928 + 12));
        // submission_v6b.py on group-2: two tiles of 256 tokens at a time for 56 of weights; 32 maps in front.
        let launch = KERNELS[12].launch();
        assert_eq!(launch["grid"], json!([56, 2, 1]));
        assert_eq!(launch["args"][0]["patches"].as_array().unwrap().len(), 40);
    }
}
