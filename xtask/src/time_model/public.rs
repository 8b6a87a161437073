//! Kernels of others for a B200, with the times that they published (gau-nernst/gpu-mode-kernels, aee9cda6), on the model.
//!
//! They are built from a checkout when they are predicted: of a source the kernel alone, without what calls it from PyTorch. Nothing
//! of them is kept here but how they are launched, which their sources say.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, ensure};
use ptx_emulator::{Card, Listing, Timeline, launch_json::LaunchFile};
use serde_json::{Value, json};

use super::Prediction;
use crate::tools::{self, NVDISASM, PTXAS};

/// A kernel and sizes on which its time was published.
pub struct Public {
    /// Its folder in `nvidia/`, its version, and the sizes.
    pub name: &'static str,
    source: &'static str,
    /// As published: between events that tick in steps of about 2.05 us.
    pub us: f64,
    /// Arguments of the kernel's template.
    template: &'static str,
    k: u32,
    /// Columns of K in a stage, and stages.
    block_k: u32,
    stages: u32,
    /// Rows of each operand, and of its tile.
    operands: &'static [(u32, u32)],
    /// Whether its mbarriers are in the shared memory that the launch gives.
    mbarriers: bool,
    /// What follows the operands, their scales and the output.
    rest: fn(&Public) -> Vec<Value>,
}

const GEMM: &str = "nvfp4_gemm/submission_v3b.py";
const DUAL: &str = "nvfp4_dual_gemm/submission_v1c.py";

/// `(M, N, K, null, 0)`: the last two are of its profiler.
fn of_gemm(kernel: &Public) -> Vec<Value> {
    let [(m, _), (n, _)] = [kernel.operands[0], kernel.operands[1]];
    vec![json!({"u32": m}), json!({"u32": n}), json!({"u32": kernel.k}), json!({"u64": 0}), json!({"u32": 0})]
}

/// `(M, N)`.
fn of_dual(kernel: &Public) -> Vec<Value> {
    kernel.operands[..2].iter().map(|(rows, _)| json!({"u32": rows})).collect()
}

#[rustfmt::skip] // A kernel, a line or two.
pub const KERNELS: [Public; 7] = [
    Public { name: "gemm v3b 7168x16384", source: GEMM, us: 18.8, template: "128, 64, 256, true, 8, false", k: 16384, block_k: 256,
        stages: 8, operands: &[(7168, 128), (128, 64)], mbarriers: false, rest: of_gemm },
    Public { name: "gemm v3b 4096x7168", source: GEMM, us: 10.3, template: "64, 64, 512, true, 5, false", k: 7168, block_k: 512,
        stages: 5, operands: &[(4096, 64), (128, 64)], mbarriers: false, rest: of_gemm },
    Public { name: "gemm v3b 7168x2048", source: GEMM, us: 6.78, template: "128, 64, 256, true, 6, false", k: 2048, block_k: 256,
        stages: 6, operands: &[(7168, 128), (128, 64)], mbarriers: false, rest: of_gemm },
    Public { name: "dual_gemm v1c dual-1", source: DUAL, us: 14.7, template: "7168, 128, 64, 256, 5", k: 7168, block_k: 256,
        stages: 5, operands: &[(256, 128), (4096, 64), (4096, 64)], mbarriers: true, rest: of_dual },
    Public { name: "dual_gemm v1c dual-2", source: DUAL, us: 18.5, template: "7168, 128, 128, 256, 4", k: 7168, block_k: 256,
        stages: 4, operands: &[(512, 128), (4096, 128), (4096, 128)], mbarriers: true, rest: of_dual },
    Public { name: "dual_gemm v1c dual-3", source: DUAL, us: 10.3, template: "4096, 128, 64, 256, 5", k: 4096, block_k: 256,
        stages: 5, operands: &[(256, 128), (3072, 64), (3072, 64)], mbarriers: true, rest: of_dual },
    Public { name: "dual_gemm v1c dual-4", source: DUAL, us: 17.5, template: "7168, 128, 128, 256, 4", k: 7168, block_k: 256,
        stages: 4, operands: &[(512, 128), (3072, 128), (3072, 128)], mbarriers: true, rest: of_dual },
];

impl Public {
    /// Its name among predictions.
    pub fn point(&self) -> String {
        format!("public {}", self.name)
    }

    /// Predicts it: built with nvcc from a checkout of the repository.
    pub fn predict(&self, checkout: &Path, install: bool) -> anyhow::Result<Prediction> {
        let path = checkout.join("nvidia").join(self.source);
        let source = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let kernel = kernel_of(&source).with_context(|| format!("{}: not as in aee9cda6", path.display()))?;
        let folder = tempfile::tempdir()?;
        let file = |name: &str| folder.path().join(name);
        let instance = format!("void *instance[] = {{(void *)kernel<{}>}};\n", self.template);
        fs::write(file("kernel.cu"), format!("#include <algorithm>\n#include <cstdint>\n{kernel}\n{instance}"))?;
        let options = ["-O3", "-std=c++17", "-arch=sm_100a", "--use_fast_math", "--expt-relaxed-constexpr", "-ptx"];
        let mut nvcc = Command::new("nvcc");
        tools::output(nvcc.args(options).arg(file("kernel.cu")).arg("-o").arg(file("kernel.ptx")))
            .context("nvcc, which should be on PATH with its headers")?;
        let mut ptxas = Command::new(PTXAS.find(install)?);
        ptxas.args(["-lineinfo", "--gpu-name", "sm_100a", "-o"]).arg(file("kernel.cubin")).arg(file("kernel.ptx"));
        tools::output(&mut ptxas)?;
        let mut nvdisasm = Command::new(NVDISASM.find(install)?);
        let (listing, _) = tools::output(nvdisasm.args(["-gp", "-hex", "-c"]).arg(file("kernel.cubin")))?;
        let mut timeline = Timeline::new(Card::named("b200").context("a card's name")?).without_values();
        timeline.add_listing(Listing::parse(&listing).into());
        LaunchFile::parse(&self.launch().to_string())?.prepare(folder.path())?.time(&mut timeline)?;
        let launch = timeline.launches().first().context("a launch")?;
        let phases = launch.phases.iter().map(|phase| (phase.to_us - phase.from_us, phase.busy, phase.unit));
        Ok(Prediction::new(timeline.predicted_us(), phases, launch.from_machine_code))
    }

    /// The launch, as a launch file.
    fn launch(&self) -> Value {
        let Public { k, block_k, stages, operands, .. } = *self;
        let (mut buffers, mut arguments, mut scales) = (serde_json::Map::new(), Vec::new(), Vec::new());
        let mut stage_bytes = 0;
        for (n, &(rows, tile)) in operands.iter().enumerate() {
            let (values, scale) = (format!("values{n}"), format!("scales{n}"));
            arguments.push(json!({"tensor_map": {
                "buffer": &values, "type": "u4x16_align8", "dims": [256, rows, k / 256], "strides": [k / 2, 128],
                "box": [256, tile, block_k / 256], "swizzle": "128B",
            }}));
            scales.push(json!({"pointer": &scale}));
            buffers.insert(values, json!({"bytes": rows * k / 2}));
            buffers.insert(scale, json!({"bytes": rows * k / 16}));
            // Scales of 128 rows, whatever the tile.
            stage_bytes += tile * block_k / 2 + 128 * block_k / 16;
        }
        let [(m, tile_m), (n, tile_n)] = [operands[0], operands[1]];
        buffers.insert("out".to_owned(), json!({"bytes": 2 * m * n}));
        arguments.extend(scales);
        arguments.push(json!({"pointer": "out"}));
        arguments.extend((self.rest)(self));
        let mbarriers = if self.mbarriers { 8 * (2 * stages + 1) } else { 0 };
        json!({
            "ptx": "kernel.ptx", "grid": [m / tile_m * (n / tile_n), 1, 1], "block": [tile_m + 64, 1, 1],
            "shared_bytes": stages * stage_bytes + mbarriers, "sanitize": false, "buffers": buffers, "args": arguments,
        })
    }
}

/// The kernel of a submission: its CUDA source up to its host's functions.
fn kernel_of(source: &str) -> anyhow::Result<String> {
    let (_, source) = source.split_once("CUDA_SRC = r\"\"\"").context("no CUDA_SRC")?;
    let (kernel, _) = source.split_once("void check_cu(").context("no check_cu")?;
    ensure!(kernel.contains("__global__"), "no kernel before check_cu");
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
    }
}
