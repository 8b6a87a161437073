//! Minimum time of a problem on a device: reading and writing each byte once, or executing each operation once.
//!
//! Source of the model: Williams, Waterman and Patterson, "Roofline: an insightful visual performance model".

use crate::format::BLOCK;
use crate::problem::{Group, GroupedProblem};

/// Peak rates of a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peaks {
    /// Memory bandwidth in bytes per second.
    pub bytes_per_second: f64,
    /// Operations per second (a multiply-add counts as two) in the best arithmetic for NVFP4.
    pub ops_per_second: f64,
}

/// A GPU that problems can be planned for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gpu {
    /// Name of the GPU on the command line.
    pub name: &'static str,
    /// Prefix of the driver's name of the device, without "NVIDIA ".
    pub device_prefix: &'static str,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Number of SMs.
    pub sms: usize,
    /// Peak rates.
    pub peaks: Peaks,
    /// Arithmetic that `peaks` counts.
    pub arithmetic: &'static str,
}

/// Known GPUs.
///
/// Sources:
/// - b200: the kernel competition's speed of light, 7.68 TB/s and 6.9 PFLOP/s.
/// - H200, H100 SXM, A100 80 GB SXM: memory bandwidth and dense f16 rate of NVIDIA's datasheets: 4.8 TB/s and 989
///   TFLOP/s, 3.35 TB/s and 989 TFLOP/s, 2.039 TB/s and 312 TFLOP/s. GPUs without FP4 units compute on exactly decoded
///   f16.
/// - GeForce RTX 5090 and 5070 Ti, RTX PRO 6000, GB10: the product pages and NVIDIA's "RTX Blackwell GPU Architecture":
///   170, 70, 188 and 48 SMs; 1.792, 0.896, 1.792 and 0.273 TB/s; half of the "AI TOPS" 3352, 1406, 4000 and 1000,
///   which count FP4 with sparsity.
pub const GPUS: &[Gpu] = {
    const fn gpu(
        name: &'static str,
        device_prefix: &'static str,
        capability: (u32, u32),
        sms: usize,
        terabytes: f64,
        teraops: f64,
        arithmetic: &'static str,
    ) -> Gpu {
        let peaks = Peaks { bytes_per_second: terabytes * 1e12, ops_per_second: teraops * 1e12 };
        Gpu { name, device_prefix, capability, sms, peaks, arithmetic }
    }
    &[
        gpu("b200", "B200", (10, 0), 148, 7.68, 6900.0, "FP4"),
        gpu("h200", "H200", (9, 0), 132, 4.8, 989.0, "f16"),
        gpu("h100", "H100", (9, 0), 132, 3.35, 989.0, "f16"),
        gpu("a100", "A100", (8, 0), 108, 2.039, 312.0, "f16"),
        gpu("rtx-5090", "GeForce RTX 5090", (12, 0), 170, 1.792, 1676.0, "FP4"),
        gpu("rtx-pro-6000", "RTX PRO 6000 Blackwell Workstation Edition", (12, 0), 188, 1.792, 2000.0, "FP4"),
        gpu("rtx-5070-ti", "GeForce RTX 5070 Ti", (12, 0), 70, 0.896, 703.0, "FP4"),
        gpu("gb10", "GB10", (12, 1), 48, 0.273, 500.0, "FP4"),
    ]
};

/// Resource that limits a problem on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// Memory bandwidth.
    Memory,
    /// Arithmetic.
    Compute,
}

/// Work of a problem, and its minimum time on a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Roofline {
    /// Bytes of weights: values and scales.
    pub weight_bytes: usize,
    /// Bytes of activations: values and scales.
    pub token_bytes: usize,
    /// Bytes of output.
    pub output_bytes: usize,
    /// Number of operations, a multiply-add counted as two; the activation is not counted.
    pub operations: f64,
}

impl Roofline {
    /// Counts the work of a problem. Experts without tokens add nothing: their weights are not read.
    pub fn new(problem: &GroupedProblem) -> Self {
        let projections = problem.op().projections();
        let sum =
            |count: &dyn Fn(&Group) -> usize| problem.groups().iter().filter(|group| group.m > 0).map(count).sum();
        let operand_bytes = |rows: usize, k: usize| rows * (k / 2 + k / BLOCK);
        Self {
            weight_bytes: sum(&|group| projections * operand_bytes(group.n, group.k)),
            token_bytes: sum(&|group| operand_bytes(group.m, group.k)),
            output_bytes: sum(&|group| 2 * group.m * group.n),
            operations: problem
                .groups()
                .iter()
                .map(|group| 2.0 * projections as f64 * group.m as f64 * group.n as f64 * group.k as f64)
                .sum(),
        }
    }

    /// Bytes read and written.
    pub fn bytes(&self) -> usize {
        self.weight_bytes + self.token_bytes + self.output_bytes
    }

    /// Minimum time for the bytes, in seconds.
    pub fn memory_seconds(&self, peaks: Peaks) -> f64 {
        self.bytes() as f64 / peaks.bytes_per_second
    }

    /// Minimum time for the operations, in seconds.
    pub fn compute_seconds(&self, peaks: Peaks) -> f64 {
        self.operations / peaks.ops_per_second
    }

    /// The larger of both times, in seconds: the speed of light.
    pub fn seconds(&self, peaks: Peaks) -> f64 {
        self.memory_seconds(peaks).max(self.compute_seconds(peaks))
    }

    /// Resource with the larger time.
    pub fn bound(&self, peaks: Peaks) -> Bound {
        if self.memory_seconds(peaks) >= self.compute_seconds(peaks) { Bound::Memory } else { Bound::Compute }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::TokenDtype;
    use crate::shape;

    #[test]
    fn competition_speed_of_light_is_reproduced() {
        let mut compared = 0;
        for shape in shape::builtin() {
            let Some(light_us) = shape.b200_light_us else { continue };
            let roofline = Roofline::new(&shape.problem(TokenDtype::F16).unwrap());
            let us = roofline.seconds(GPUS[0].peaks) * 1e6;
            assert!((us - light_us).abs() <= 0.001, "{}: {us} {light_us}", shape.name);
            compared += 1;
        }
        assert_eq!(compared, 8);
    }

    #[test]
    fn many_tokens_are_compute_bound_and_few_memory_bound() {
        let bound = |name: &str, gpu: Gpu| {
            let problem = shape::find(name).unwrap().problem(TokenDtype::F16).unwrap();
            Roofline::new(&problem).bound(gpu.peaks)
        };
        assert_eq!(bound("dual-1", GPUS[0]), Bound::Memory);
        assert_eq!(bound("dual-2", GPUS[0]), Bound::Compute);
        assert_eq!(bound("decode-1", GPUS[2]), Bound::Memory);
        assert_eq!(bound("moe-1", GPUS[2]), Bound::Compute);
    }

    #[test]
    fn experts_without_tokens_cost_nothing() {
        let shape = shape::parse(r#"{"op": "gated", "groups": [[0, 4096, 7168], [1, 8, 16]]}"#).unwrap();
        let roofline = Roofline::new(&shape[0].problem(TokenDtype::F16).unwrap());
        assert_eq!((roofline.weight_bytes, roofline.token_bytes, roofline.output_bytes), (144, 9, 16));
        assert_eq!(roofline.operations, 512.0);
    }
}
