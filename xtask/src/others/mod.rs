//! `cargo xtask others`: runs kernels of other projects in the emulator.
//!
//! It downloads no kernels. From given source trees it builds programs with nvcc, with kernels as PTX, and runs them
//! under `ptx-emulator run`. CUTLASS's examples verify themselves. The host code of DeepGEMM and learn-cuda needs
//! PyTorch, so `deepgemm.cu` and `learn_cuda.cu` beside this file launch their kernels. From a folder of PTX it runs
//! each launch file.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Instant;

use anyhow::{Context, ensure};

use crate::{table::Table, workspace};

/// Build kernels of other projects, run them in the emulator, and print kernel, level, schedule, verdict and time
#[derive(clap::Args)]
pub struct Args {
    /// Source tree of CUTLASS
    #[arg(long)]
    cutlass: Option<PathBuf>,
    /// Source tree of DeepGEMM; needs --cutlass too
    #[arg(long, requires = "cutlass")]
    deepgemm: Option<PathBuf>,
    /// Source tree of gau-nernst/learn-cuda; runs its products for sm_100
    #[arg(long)]
    learn_cuda: Option<PathBuf>,
    /// Folder of PTX with a launch file `NAME.json` per kernel. An optional `NAME.py` checks the results that the
    /// launch saved there and exits with 0 if they are right
    #[arg(long)]
    ptx: Option<PathBuf>,
    /// CUDA toolkit: a folder with bin/nvcc and include, such as PyPI's nvidia/cu13
    #[arg(long, default_value = "target/nvcc/nvidia/cu13")]
    cuda: PathBuf,
    /// Install the toolkit from PyPI into the folder of --cuda if it is missing
    #[arg(long)]
    install: bool,
    /// Only kernels whose name contains this text
    #[arg(long)]
    only: Vec<String>,
    /// Example of CUTLASS to run instead of the built-in list: `PATH[:ARCH[:ARGUMENT …]]`, below its `examples`. ARCH
    /// defaults to 100a if PATH contains "blackwell", otherwise to 90a
    #[arg(long)]
    example: Vec<String>,
    /// Levels of the emulator
    #[arg(long, default_values = ["default"])]
    level: Vec<String>,
    /// Schedules of the emulator
    #[arg(long, default_values = ["fair"])]
    schedule: Vec<String>,
}

/// PyPI packages of nvcc. CUTLASS's examples need curand's headers.
const PACKAGES: [&str; 6] = [
    "nvidia-cuda-nvcc==13.5.37",
    "nvidia-cuda-runtime==13.5.37",
    "nvidia-cuda-crt==13.5.37",
    "nvidia-nvvm==13.5.37",
    "nvidia-cuda-cccl",
    "nvidia-curand",
];

/// CUTLASS examples to run by default: file, architecture, arguments. The sizes are small, so that each example takes
/// seconds.
const EXAMPLES: [(&str, &str, &str); 37] = [
    ("cute/tutorial/sgemm_1.cu", "90a", "256 256 64"),
    ("cute/tutorial/sgemm_sm80.cu", "90a", "256 256 64 T N"),
    ("cute/tutorial/hopper/wgmma_sm90.cu", "90a", "256 256 128"),
    ("cute/tutorial/hopper/wgmma_tma_sm90.cu", "90a", "256 256 128"),
    ("cute/tutorial/blackwell/01_mma_sm100.cu", "100a", "256 512 128"),
    ("cute/tutorial/blackwell/02_mma_tma_sm100.cu", "100a", "256 512 128"),
    ("cute/tutorial/blackwell/03_mma_tma_multicast_sm100.cu", "100a", "512 1024 128"),
    ("cute/tutorial/blackwell/04_mma_tma_2sm_sm100.cu", "100a", "512 1024 128"),
    ("cute/tutorial/blackwell/05_mma_tma_epi_sm100.cu", "100a", "512 1024 128"),
    ("48_hopper_warp_specialized_gemm/48_hopper_warp_specialized_gemm.cu", "90a", GEMM),
    ("50_hopper_gemm_with_epilogue_swizzle/50_hopper_gemm_with_epilogue_swizzle.cu", "90a", "--m=256 --n=256 --k=128"),
    (
        "51_hopper_gett/51_hopper_gett.cu",
        "90a",
        "--modeC=m,n,l --modeA=m,k,l --modeB=k,n,l --extents=m:256,n:256,k:128,l:1",
    ),
    ("54_hopper_fp8_warp_specialized_gemm/54_hopper_fp8_warp_specialized_gemm.cu", "90a", GEMM),
    ("55_hopper_mixed_dtype_gemm/55_hopper_int4_bf16_gemm.cu", "90a", GEMM),
    (
        "56_hopper_ptr_array_batched_gemm/56_hopper_ptr_array_batched_gemm.cu",
        "90a",
        "--m=128 --n=128 --k=64 --l=2 --iterations=0",
    ),
    ("57_hopper_grouped_gemm/57_hopper_grouped_gemm.cu", "90a", GROUPED),
    ("61_hopper_gemm_with_topk_and_softmax/61_hopper_gemm_with_topk_and_softmax.cu", "90a", "--iterations=0"),
    ("62_hopper_sparse_gemm/62_hopper_sparse_gemm.cu", "90a", "--m=128 --n=128 --k=128 --iterations=0"),
    ("63_hopper_gemm_with_weight_prefetch/63_hopper_gemm_with_weight_prefetch.cu", "90a", GEMM),
    (
        "67_hopper_fp8_warp_specialized_gemm_with_blockwise_scaling/\
         67_hopper_fp8_warp_specialized_gemm_with_blockwise_scaling.cu",
        "90a",
        GEMM,
    ),
    (
        "68_hopper_fp8_warp_specialized_grouped_gemm_with_blockwise_scaling/\
         68_hopper_fp8_warp_specialized_grouped_gemm_with_blockwise_scaling.cu",
        "90a",
        GROUPED,
    ),
    (
        "69_hopper_mixed_dtype_grouped_gemm/69_hopper_int4_bf16_grouped_gemm.cu",
        "90a",
        "--m=128 --n=128 --k=128 --groups=2 --mode=0 --iterations=0 --warmup=0",
    ),
    ("70_blackwell_gemm/70_blackwell_fp16_gemm.cu", "100a", GEMM),
    ("72_blackwell_narrow_precision_gemm/72b_blackwell_nvfp4_nvfp4_gemm.cu", "100a", GEMM),
    (
        "73_blackwell_gemm_preferred_cluster/blackwell_gemm_preferred_cluster.cu",
        "100a",
        "--m=1024 --n=1024 --k=128 --iterations=0",
    ),
    ("74_blackwell_gemm_streamk/blackwell_gemm_streamk.cu", "100a", GEMM),
    ("75_blackwell_grouped_gemm/75_blackwell_grouped_gemm.cu", "100a", GROUPED),
    (
        "76_blackwell_conv/76_blackwell_conv_fprop.cu",
        "100a",
        "--n=1 --d=1 --h=4 --w=8 --c=64 --k=64 --t=1 --r=3 --s=3 --pad_h=1 --pad_w=1 --pad_d=0 --iterations=0",
    ),
    (
        "77_blackwell_fmha/77_blackwell_fmha.cu",
        "100a",
        "--b=1 --h=1 --h_k=1 --q=256 --k=256 --d=64 --warmup_iterations=0 --iterations=1 --verify",
    ),
    ("78_blackwell_emulated_bf16x9_gemm/78_blackwell_emulated_bf16x9_gemm.cu", "100a", GEMM),
    (
        "80_blackwell_geforce_sparse_gemm/80a_blackwell_geforce_mxfp8_bf16_sparse_gemm.cu",
        "120a",
        "--m=128 --n=128 --k=256 --iterations=0",
    ),
    ("81_blackwell_gemm_blockwise/81_blackwell_gemm_blockwise.cu", "100a", GEMM),
    ("81_blackwell_gemm_blockwise/81_blackwell_grouped_gemm_groupwise.cu", "100a", GROUPED),
    ("83_blackwell_sparse_gemm/83_blackwell_sparse_gemm.cu", "100a", "--m=256 --n=128 --k=128 --iterations=0"),
    (
        "84_blackwell_narrow_precision_sparse_gemm/84a_blackwell_nvfp4_bf16_sparse_gemm.cu",
        "100a",
        "--m=256 --n=128 --k=256 --iterations=0",
    ),
    ("91_fp4_gemv/91_fp4_gemv.cu", "100a", "--m=256 --k=1024 --batch=1 --iterations=0"),
    (
        "113_hopper_gemm_activation_fusion/113_hopper_gemm_fused_gated_act.cu",
        "90a",
        "--m=256 --n=256 --k=256 --verify=1 --iterations=0",
    ),
];

const GROUPED: &str = "--m=256 --n=256 --k=128 --groups=2 --iterations=0";
const GEMM: &str = "--m=256 --n=256 --k=256 --iterations=0";

/// Folder and functions of learn-cuda's products for sm_100. `v7c` is in `matmul_v7.cu` or `matmul_v7c.cu`.
const PRODUCTS: (&str, [&str; 12]) =
    ("02e_matmul_sm100", ["v0", "v1a", "v1b", "v2a", "v2b", "v3", "v4", "v5", "v6", "v7a", "v7b", "v7c"]);

/// Paths and options for building and running programs.
struct Tools<'a> {
    args: &'a Args,
    /// Folder of this workspace's command and libraries.
    built: PathBuf,
    /// Folder of the built programs.
    programs: PathBuf,
}

/// Builds and runs the selected kernels and prints the table of verdicts.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let built = workspace::target_dir().join("release");
    let programs = workspace::target_dir().join("others");
    fs::create_dir_all(&programs).with_context(|| programs.display().to_string())?;
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args([
        "build",
        "--release",
        "--package=ptx_emulator",
        "--package=emulated_driver",
        "--package=emulated_runtime",
    ]);
    ensure!(cargo.current_dir(workspace::root()).status()?.success(), "cannot build the emulator");
    if args.install && !args.cuda.join("bin/nvcc").exists() {
        install(&args.cuda)?;
    }
    let tools = Tools { args, built, programs };
    let mut table = Table::new(4, &["kernel", "level", "schedule", "verdict", "s"]);
    if let Some(cutlass) = &args.cutlass {
        for (path, arch, arguments) in examples(args) {
            if !chosen(args, &path) {
                continue;
            }
            let name = Path::new(&path).file_stem().map_or_else(|| path.clone(), |stem| stem.display().to_string());
            let include = ["include", "tools/util/include", "examples/common"].map(|folder| cutlass.join(folder));
            let source = cutlass.join("examples").join(&path);
            let program = Program { name: &name, source: &source, arch: &arch, include: &include, defines: &[] };
            tools.program(&mut table, &program, &arguments)?;
        }
    }
    if let (Some(deepgemm), Some(cutlass)) = (&args.deepgemm, &args.cutlass)
        && chosen(args, "deepgemm sm90_bf16_gemm")
    {
        let source = workspace::root().join("xtask/src/others/deepgemm.cu");
        let include = [deepgemm.join("deep_gemm/include"), cutlass.join("include")];
        let name = "DeepGEMM sm90_bf16_gemm";
        let program = Program { name, source: &source, arch: "90a", include: &include, defines: &[] };
        tools.program(&mut table, &program, "200 256 192")?;
    }
    if let Some(learn_cuda) = &args.learn_cuda {
        let source = workspace::root().join("xtask/src/others/learn_cuda.cu");
        let (folder, functions) = PRODUCTS;
        for function in functions {
            let name = format!("learn-cuda {folder} {function}");
            if !chosen(args, &name) {
                continue;
            }
            let file = |of: &str| learn_cuda.join(folder).join(format!("matmul_{of}.cu"));
            let own = Some(file(function)).filter(|file| file.exists());
            let file = own.unwrap_or_else(|| file(function.trim_end_matches(char::is_alphabetic)));
            let defines = [format!("-DPRODUCT_FILE=\"{}\"", file.display()), format!("-DPRODUCT=matmul_{function}")];
            let include = [stubs()];
            let program = Program { name: &name, source: &source, arch: "100a", include: &include, defines: &defines };
            tools.program(&mut table, &program, "512 512 512")?;
        }
    }
    if let Some(folder) = &args.ptx {
        tools.launches(&mut table, folder)?;
    }
    print!("{table}");
    Ok(())
}

fn chosen(args: &Args, name: &str) -> bool {
    args.only.is_empty() || args.only.iter().any(|only| name.contains(only.as_str()))
}

/// Returns the requested examples, or the default list.
fn examples(args: &Args) -> Vec<(String, String, String)> {
    let named = args.example.iter().map(|text| {
        let mut parts = text.splitn(3, ':').map(str::to_owned);
        let path = parts.next().unwrap_or_default();
        let guess = if path.contains("blackwell") { "100a" } else { "90a" };
        (path, parts.next().unwrap_or_else(|| guess.into()), parts.next().unwrap_or_default())
    });
    let list =
        EXAMPLES.iter().map(|(path, arch, arguments)| (path.to_string(), arch.to_string(), arguments.to_string()));
    if args.example.is_empty() { list.collect() } else { named.collect() }
}

/// Installs nvcc from PyPI.
fn install(cuda: &Path) -> anyhow::Result<()> {
    let target = cuda
        .ancestors()
        .nth(2)
        .context("the path of --cuda must end with two folders of the package, such as nvidia/cu13")?;
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--target"]).arg(target).args(PACKAGES);
    ensure!(
        pip.status().context("cannot run python3")?.success(),
        "pip failed to install nvcc into {}",
        target.display()
    );
    Ok(())
}

/// Folder of the replacements for PyTorch headers.
fn stubs() -> PathBuf {
    workspace::root().join("xtask/src/others")
}

/// A program to build with nvcc.
struct Program<'a> {
    name: &'a str,
    source: &'a Path,
    arch: &'a str,
    include: &'a [PathBuf],
    defines: &'a [String],
}

impl Tools<'_> {
    /// Builds a program and runs it at every level with every schedule.
    fn program(&self, table: &mut Table, program: &Program<'_>, arguments: &str) -> anyhow::Result<()> {
        let Program { name, source, arch, include, defines } = *program;
        let program = self.programs.join(name.replace([' ', '/'], "_"));
        let began = Instant::now();
        let mut nvcc = Command::new(self.args.cuda.join("bin/nvcc"));
        nvcc.args(["-std=c++17", "-O1", "--expt-relaxed-constexpr", "-cudart", "none"])
            .arg("-gencode")
            .arg(format!("arch=compute_{arch},code=compute_{arch}"))
            .args(include.iter().flat_map(|folder| ["-I".as_ref(), folder.as_os_str()]))
            .args(defines)
            .arg(source)
            .args(["libemulated_runtime.so", "libemulated_driver.so"].map(|library| self.built.join(library)))
            .arg("-o")
            .arg(&program);
        // A program is rebuilt only if its command or its source changed.
        let command = format!("{nvcc:?}");
        let log = program.with_extension("command");
        let age = |file: &Path| file.metadata().and_then(|of| of.modified()).ok();
        let built = fs::read_to_string(&log).is_ok_and(|last| last == command) && age(&program) > age(source);
        if !built {
            let output = nvcc
                .output()
                .with_context(|| format!("cannot run {}; use --install or --cuda", nvcc.get_program().display()))?;
            eprintln!("{name}: nvcc took {:.0} s", began.elapsed().as_secs_f64());
            if !output.status.success() {
                let words = String::from_utf8_lossy(&output.stderr);
                let error = words.lines().find(|line| line.contains("error")).unwrap_or("nvcc failed");
                table.row([name.into(), "".into(), "".into(), format!("build failed: {error}"), "".into()]);
                return Ok(());
            }
            fs::write(&log, command).with_context(|| log.display().to_string())?;
        }
        let gpu = match arch.get(..2) {
            Some("10") => "b200",
            Some("12") => "rtx-5090",
            _ => "h200",
        };
        self.each(table, name, |level, schedule| {
            let mut run = Command::new(self.built.join("ptx-emulator"));
            run.args(["run", "--gpu", gpu, "--level", level, "--schedule", schedule, "--"]).arg(&program);
            run.args(arguments.split_whitespace());
            Ok(verdict(&run.output()?))
        })
    }

    /// Runs each launch file of a folder, and then the script that checks its results.
    fn launches(&self, table: &mut Table, folder: &Path) -> anyhow::Result<()> {
        let files = folder.read_dir().with_context(|| folder.display().to_string())?;
        let mut files: Vec<PathBuf> = files.flatten().map(|file| file.path()).collect();
        files.retain(|file| file.extension().is_some_and(|extension| extension == "json"));
        files.sort();
        for file in files {
            let name = file.file_stem().unwrap_or_default().display().to_string();
            if !chosen(self.args, &name) {
                continue;
            }
            self.each(table, &name, |level, schedule| {
                let mut launch = Command::new(self.built.join("ptx-emulator"));
                launch.arg("launch").arg(&file).args(["--level", level, "--schedule", schedule]);
                let output = launch.output()?;
                let check = file.with_extension("py");
                if !output.status.success() || !check.exists() {
                    return Ok(verdict(&output));
                }
                let check =
                    Command::new("python3").arg(check.file_name().unwrap_or_default()).current_dir(folder).output()?;
                Ok(if check.status.success() {
                    "right".into()
                } else {
                    format!("wrong: {}", first_line(&check.stdout))
                })
            })?;
        }
        Ok(())
    }

    /// Adds a table row per level and schedule.
    fn each(
        &self,
        table: &mut Table,
        name: &str,
        run: impl Fn(&str, &str) -> anyhow::Result<String>,
    ) -> anyhow::Result<()> {
        for level in &self.args.level {
            for schedule in &self.args.schedule {
                let began = Instant::now();
                let verdict = run(level, schedule)?;
                let seconds = began.elapsed().as_secs_f64();
                eprintln!("{name}, {level}, {schedule}: {verdict}, {seconds:.1} s");
                table.row([name.into(), level.clone(), schedule.clone(), verdict, format!("{seconds:.1}")]);
            }
        }
        Ok(())
    }
}

fn first_line(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).lines().next().unwrap_or_default().to_owned()
}

/// Returns the verdict of a run: a fault, a refusal, or its own verification. `ran`: the run verifies nothing.
fn verdict(output: &Output) -> String {
    let [out, error] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    let both = || out.lines().chain(error.lines());
    let kind = |begin: &str| both().find_map(|line| line.split(begin).nth(1)).map(|rest| rest.split(']').next());
    if let Some(Some(kind)) = kind("fault[") {
        return format!("fault: {kind}");
    }
    if let Some(line) = both().find_map(|line| line.split("unsupported: ").nth(1)) {
        return format!("unsupported: {line}");
    }
    if let Some(line) = both().find_map(|line| line.split("refused: ").nth(1)) {
        return format!("refused: {line}");
    }
    let says = |words: &[&str]| words.iter().any(|word| out.contains(word));
    match output.status.code() {
        Some(0) if says(&["Failed", "FAILED", "failed", "incorrect"]) => "wrong".into(),
        Some(0) if says(&["Passed", "PASSED", "passed", "successful"]) => "right".into(),
        Some(0) => "ran".into(),
        Some(code) => format!("wrong: exit code {code}"),
        None => "ended by a signal".into(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    use super::*;

    fn of(code: i32, out: &str, error: &str) -> String {
        verdict(&Output { status: ExitStatus::from_raw(code << 8), stdout: out.into(), stderr: error.into() })
    }

    #[test]
    fn verdict_is_read_from_the_output() {
        assert_eq!(of(0, "  Disposition: Passed\n", ""), "right");
        assert_eq!(of(0, "Disposition: Failed", ""), "wrong");
        assert_eq!(of(0, "7 GFlop/s", ""), "ran");
        assert_eq!(of(7, "", ""), "wrong: exit code 7");
        assert_eq!(of(1, "", "ptx-emulator: launch 1: fault[data-race]: data race: …"), "fault: data-race");
        assert_eq!(of(1, "", "ptx-emulator: refused: managed memory"), "refused: managed memory");
    }
}
