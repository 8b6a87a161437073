//! Arguments of `nvfp4 run`.

use std::path::PathBuf;

use clap::builder::PossibleValue;
use clap::{ValueEnum, ValueHint};
use nvfp4::backend::emulated::{self, Card};
use nvfp4::checkpoint::Checkpoint;
use nvfp4::generate::Generator;
use nvfp4::kernels::GroupedKernel;
use nvfp4::moe::generate::Routing;
use nvfp4::moe::shape;
use nvfp4::plan::variant::Variant;
use nvfp4::problem::{Op, TokenDtype, TokenFormat};

use crate::cli::parse;

/// Run an MoE layer, a linear layer or a grouped GEMM, check it against the exact reference, and report its speed.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  nvfp4 run                                      the default shape on the best device of this machine
  nvfp4 run --shape decode-1 --backend cpu --repeat 20
  nvfp4 run --shape mine.json#layer-3 --input all-codes --json
  nvfp4 run --shape group-test-1 --backend emulated --arch sm_90a --schedule worst
  nvfp4 run --shape group-test-1 --backend emulated --ptx target/ptx/gated_sm90.sm_90a.ptx
  nvfp4 run --variant streams=4,graph            one launch per group over 4 streams, replayed as a CUDA graph
  nvfp4 run --op moe --shape mixtral-8x7b --tokens 8 --routing zipf
  nvfp4 run --op linear --shape 16,4096,7168     one matrix with sizes M,N,K
  nvfp4 run --op moe --weights model/ --layer 3 --tokens 64
  nvfp4 run --op moe --weights model/ --layer 3 --activations hidden.safetensors --output out.safetensors
  nvfp4 run --op linear --weights model/ --tensor model.layers.0.self_attn.q_proj
  nvfp4 run --weights model/ --layer 3 --tokens 16
  nvfp4 run --weights model/ --layer 3 --activations tokens.safetensors --output out.safetensors

Exit codes: 0 nothing wrong, 1 a wrong result or a fault of the kernel, 2 bad input or usage, 3 no such device.")]
pub struct Args {
    /// A built-in shape or layer (see `nvfp4 shapes`), FILE.json or FILE.json#NAME; for --op linear: M,N,K [default:
    /// moe-1; for --op moe: qwen3-30b-a3b; for --op linear: 16,2048,4096].
    #[arg(long, conflicts_with = "weights", value_parser = parse::shape(), hide_possible_values = true)]
    pub shape: Option<String>,
    /// The operation, instead of the shape's own: gated (SiLU of the gate projection times the up projection), plain
    /// (one matrix product), moe (a whole layer from hidden states to hidden states) or linear (one matrix with 16-bit
    /// tokens). From a checkpoint, gated uses gate and up projections, and plain the down projections [default: gated;
    /// for a built-in layer: moe].
    #[arg(long, value_enum)]
    pub op: Option<Operation>,
    /// Where to run; auto uses a CUDA GPU if there is one.
    #[arg(long, value_enum, default_value_t = Choice::Auto)]
    pub backend: Choice,
    #[arg(long, value_name = "WORD,…", default_value_t, help = variant_help())]
    pub variant: Variant,
    /// For --op moe and linear: print the plan before the run, which instances a GPU takes and what it expects of the
    /// others, as `nvfp4 explain` does.
    #[arg(long)]
    pub explain: bool,
    /// Ignore the verdicts of self-tests on this GPU: a kernel that failed there may be named, and no kernel is tested
    /// before its first use.
    #[arg(long)]
    pub force: bool,
    #[arg(long, help = arch_help(), value_parser = parse::suggested::<String>(emulated::arches()), hide_possible_values = true)]
    pub arch: Option<String>,
    /// Number of SMs of the emulated GPU [default: as on the first GPU of its architecture].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub sms: Option<u32>,
    /// PTX to run instead of the built-in kernel with the same entries, for example from `cargo xtask build-ptx`: tests
    /// a changed kernel without a rebuild of this command. The emulated GPU then has the architecture of the PTX,
    /// unless --arch is given. A real GPU also accepts machine code (.cubin).
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub ptx: Option<PathBuf>,
    /// How the emulated GPU selects the next warp and completes asynchronous operations: fair, seed:N or worst
    /// [default: fair].
    #[arg(long, value_parser = parse::suggested::<emulated::Schedule>(["fair", "worst"]), hide_possible_values = true)]
    pub schedule: Option<emulated::Schedule>,
    /// Predict the time on a GPU (method and accuracy: the book's page "The time model"). The emulator then does not look
    /// for hazards.
    #[arg(long, requires = "gpu")]
    pub timed: bool,
    /// GPU of --timed.
    #[arg(long, value_parser = Card::NAMES, requires = "timed")]
    pub gpu: Option<String>,
    /// With --timed: set a constant of the GPU (the book's page "The time model" lists them). May be given several times.
    #[arg(long, value_name = "NAME=VALUE", requires = "timed")]
    pub constant: Vec<String>,
    /// With --timed: skip arithmetic that no control flow depends on. The output is then not checked.
    #[arg(long, requires = "timed")]
    pub no_values: bool,
    /// With --no-values: run only N SMs, with their share of each launch's CTAs, of L2 and of DRAM. CTAs must not wait
    /// for each other.
    #[arg(long, value_name = "N", requires = "no_values", value_parser = clap::value_parser!(u32).range(1..))]
    pub sample: Option<u32>,
    /// With --timed: show how the prediction changes if each assumed constant of the GPU is halved or doubled. Takes
    /// two runs per constant.
    #[arg(long, requires = "timed")]
    pub sensitivity: bool,
    /// With --timed: write a trace of some SMs for https://ui.perfetto.dev.
    #[arg(long, value_name = "FILE.json", value_hint = ValueHint::FilePath, requires = "timed")]
    pub trace: Option<PathBuf>,
    /// How to generate inputs [default: the shape's own generator, or gaussian].
    #[arg(long, value_name = "GENERATOR", value_parser = parse::generator())]
    pub input: Option<Generator>,
    /// Seed of the inputs.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// How tokens of --op moe choose experts: uniform, or zipf (a few experts often) [default: the layer's own, or
    /// uniform].
    #[arg(long, value_parser = parse::routing())]
    pub routing: Option<Routing>,
    /// Type of the output, and of the tokens of --op moe and linear [default: f16; for --op moe and linear: the type of
    /// --activations, or bf16].
    #[arg(long, visible_alias = "dtype", value_name = "DTYPE", value_parser = parse::out_dtype())]
    pub out_dtype: Option<TokenDtype>,
    /// Format in which tokens of --op moe and linear are multiplied: 16-bit; fp8, as e4m3 with one scale per token; or
    /// nvfp4, with the checkpoint's input scales or one global scale per token (accuracy cost: the book's page "Accuracy")
    /// [default: the layer's own, or 16-bit; for --op moe on B200 and B300: nvfp4].
    #[arg(long, value_name = "FORMAT", value_parser = parse::token_format())]
    pub token_format: Option<TokenFormat>,
    /// An NVFP4 checkpoint: a .safetensors file, its index, or a model folder.
    #[arg(long, value_name = "CHECKPOINT", requires = "place", value_hint = ValueHint::AnyPath)]
    pub weights: Option<PathBuf>,
    /// Layer of the checkpoint.
    #[arg(long, requires = "weights", group = "place")]
    pub layer: Option<usize>,
    /// Part of a model with several stacks of layers, such as talker.
    #[arg(long, value_name = "NAME", requires = "layer")]
    pub stack: Option<String>,
    /// Weight of the checkpoint for --op linear: a module such as model.layers.0.self_attn.q_proj.
    #[arg(long, value_name = "NAME", requires = "weights", group = "place")]
    pub tensor: Option<String>,
    /// Number of generated tokens: per expert of the checkpoint [default: 16], or of --op moe and linear [default: the
    /// shape's own].
    #[arg(long, value_name = "N")]
    pub tokens: Option<usize>,
    /// Read tokens from a file: `hidden` [T, K]; for --op gated and plain also `group_sizes` [experts], sorted by
    /// expert.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "weights", conflicts_with_all = ["tokens", "input", "seed"])]
    pub activations: Option<PathBuf>,
    /// Write the output as `output` [T, N] to a .safetensors file.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub output: Option<PathBuf>,
    /// How much of the output to check.
    #[arg(long, value_enum, default_value_t = Verify::Full)]
    pub verify: Verify,
    /// Timed runs, after one warm-up run [default: 5; with --backend emulated: 1].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub repeat: Option<u32>,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Returns the help of `--variant`.
fn variant_help() -> String {
    let names = |kernels: &mut dyn Iterator<Item = GroupedKernel>| {
        kernels.map(GroupedKernel::name).collect::<Vec<_>>().join(", ")
    };
    let unproven =
        names(&mut GroupedKernel::all().filter(|kernel| !GroupedKernel::proven().any(|proven| proven == *kernel)));
    let mut help = format!(
        "How a GPU computes: optional words, separated by commas. A launch schedule: persistent (one \
         launch), per-group, streams=N or unfused (the baseline of three kernels); graph (replay as a CUDA graph); a kernel: \
         {}; one of its instances, such as t64",
        names(&mut GroupedKernel::all())
    );
    if !unproven.is_empty() {
        help += &format!(". These kernels become a GPU's default after they pass `nvfp4 selftest` there: {unproven}");
    }
    help
}

/// Returns the help of `--arch`.
fn arch_help() -> String {
    let (arches, default, moe) = (emulated::arches().join(", "), emulated::default_arch(), emulated::moe_arch());
    format!("The emulated GPU: {arches} [default: {default}; for --op moe and linear: {moe}]")
}

/// The operation to compute.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Operation {
    /// Groups of tokens, each with its own expert.
    Groups(Op),
    /// A whole MoE layer.
    Moe,
    /// A linear layer.
    Linear,
}

impl ValueEnum for Operation {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Groups(Op::Gated), Self::Groups(Op::Plain), Self::Moe, Self::Linear]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(match self {
            Self::Groups(op) => op.name(),
            Self::Moe => "moe",
            Self::Linear => "linear",
        }))
    }
}

/// Where to run.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub enum Choice {
    Auto,
    Cpu,
    Cuda,
    /// Execute the GPU's kernel on the CPU and detect its faults.
    Emulated,
}

impl Args {
    /// Opens the checkpoint of --weights.
    pub fn checkpoint(&self) -> anyhow::Result<Option<Checkpoint>> {
        let Some(path) = &self.weights else { return Ok(None) };
        let checkpoint = Checkpoint::open(path)?;
        Ok(Some(match &self.stack {
            Some(stack) => checkpoint.in_stack(stack)?,
            None => checkpoint,
        }))
    }

    /// Returns the GPU of --timed with the constants of --constant.
    pub fn card(&self) -> anyhow::Result<Option<Card>> {
        let Some(card) = self.gpu.as_deref().and_then(Card::named) else { return Ok(None) };
        let set = |card: Card, constant: &String| card.with(constant).map_err(|text| anyhow::anyhow!(text));
        self.constant.iter().try_fold(card, set).map(Some)
    }

    /// `true` if `run` computes a whole layer: --op says so, or --shape names a built-in layer or a GPU's part of it.
    pub fn is_moe(&self) -> bool {
        let is_layer = |name: &String| {
            let whole = name.split('@').next();
            shape::builtin().iter().any(|layer| whole == Some(&layer.name))
        };
        self.op == Some(Operation::Moe) || self.op.is_none() && self.shape.as_ref().is_some_and(is_layer)
    }

    /// Returns the operation of groups that --op names.
    pub fn grouped_op(&self) -> Option<Op> {
        self.op.and_then(|op| if let Operation::Groups(op) = op { Some(op) } else { None })
    }

    /// Number of reported runs, and number of warm-up runs before them.
    pub fn runs(&self) -> (usize, usize) {
        let emulated = self.backend == Choice::Emulated;
        let (timed, warm_up) = if emulated { (1, 0) } else { (5, 1) };
        (self.repeat.map_or(timed, |repeat| repeat as usize), warm_up)
    }
}

/// How much to check.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub enum Verify {
    /// Check every element.
    Full,
    /// Check some thousand elements, drawn by the seed.
    Sample,
    /// Check nothing.
    Off,
}
