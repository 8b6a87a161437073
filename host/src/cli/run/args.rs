//! The arguments of `nvfp4 run`.

use std::path::PathBuf;

use clap::{ValueEnum, ValueHint};
use nvfp4::backend::emulated::{self, Card};
use nvfp4::generate::Generator;
use nvfp4::kernels::GroupedKernel;
use nvfp4::moe::generate::Routing;
use nvfp4::moe::shape;
use nvfp4::plan::variant::Variant;
use nvfp4::problem::{Op, TokenDtype, TokenFormat};

use crate::cli::parse;

/// Run an MoE layer's grouped GEMM, check it against the exact reference, and report its speed.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  nvfp4 run                                      the default shape on the best device here
  nvfp4 run --shape decode-1 --backend cpu --repeat 20
  nvfp4 run --shape mine.json#layer-3 --input all-codes --json
  nvfp4 run --shape group-test-1 --backend emulated --arch sm_90a --schedule worst
  nvfp4 run --shape group-test-1 --backend emulated --ptx target/ptx/gated_sm90.sm_90a.ptx
  nvfp4 run --variant streams=4,graph            a launch for each group over 4 streams, replayed as a CUDA graph
  nvfp4 run --op moe --shape mixtral-8x7b --tokens 8 --routing zipf
  nvfp4 run --op linear --shape 16,4096,7168     one matrix, M,N,K
  nvfp4 run --op moe --weights model/ --layer 3 --tokens 64
  nvfp4 run --op linear --weights model/ --tensor model.layers.0.self_attn.q_proj
  nvfp4 run --weights model/ --layer 3 --tokens 16
  nvfp4 run --weights model/ --layer 3 --activations tokens.safetensors --output out.safetensors

Exit codes: 0 nothing wrong, 1 a wrong result or a fault of the kernel, 2 bad input or usage, 3 no such device.")]
pub struct Args {
    /// A built-in shape or layer (see `nvfp4 shapes`), FILE.json or FILE.json#NAME; M,N,K of --op linear [default: moe-1;
    /// qwen3-30b-a3b of --op moe; 16,2048,4096 of --op linear].
    #[arg(long, conflicts_with = "weights", value_parser = parse::shape(), hide_possible_values = true)]
    pub shape: Option<String>,
    /// The operation, in place of the shape's own: gated, SiLU of the gate projection times the up projection; plain, one
    /// matrix product; moe, a whole layer from hidden states to hidden states; or linear, one matrix with tokens of 16 bits. Of
    /// a checkpoint gated takes gate and up projections, plain the down projections [default: gated; moe of a built-in layer].
    #[arg(long, value_parser = parse::named(&Operation::ALL, |op| op.name()))]
    pub op: Option<Operation>,
    /// Where to run; auto takes a CUDA GPU if there is one.
    #[arg(long, value_enum, default_value_t = Choice::Auto)]
    pub backend: Choice,
    #[arg(long, value_name = "WORD,…", default_value_t, help = variant_help())]
    pub variant: Variant,
    /// Do not ask what self-tests have found on this card: a kernel that failed there may be named, and none is tried before it is
    /// used.
    #[arg(long)]
    pub force: bool,
    #[arg(long, help = arch_help(), value_parser = parse::suggested::<String>(emulated::arches()), hide_possible_values = true)]
    pub arch: Option<String>,
    /// Multiprocessors of the emulated GPU [default: those of the first card of its architecture].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub sms: Option<u32>,
    /// PTX that runs in place of the kernel whose entries it has, from `cargo xtask build-ptx` for instance: a kernel is changed
    /// without a build of this command. The emulated GPU is then the one that it was compiled for, unless --arch says another; a
    /// card takes machine code (.cubin) too.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub ptx: Option<PathBuf>,
    /// Which warp the emulated GPU runs next, and when its asynchronous operations complete: fair, seed:N or worst
    /// [default: fair].
    #[arg(long, value_parser = parse::suggested::<emulated::Schedule>(["fair", "worst"]), hide_possible_values = true)]
    pub schedule: Option<emulated::Schedule>,
    /// Predict the time on a card (docs/time-model.md says how, and how far to trust it). No hazards are looked for.
    #[arg(long, requires = "gpu")]
    pub timed: bool,
    /// The card of --timed: h200, b200, rtx-5090, rtx-pro-6000, rtx-5070-ti or gb10.
    #[arg(long, value_parser = Card::NAMES, requires = "timed")]
    pub gpu: Option<String>,
    /// With --timed: a constant of the card, in place of its own (docs/time-model.md lists them). May be given several times.
    #[arg(long, value_name = "NAME=VALUE", requires = "timed")]
    pub constant: Vec<String>,
    /// With --timed: leave out arithmetic that no control flow depends on. The output is not checked then.
    #[arg(long, requires = "timed")]
    pub no_values: bool,
    /// With --no-values: run so many multiprocessors with their share of each launch's CTAs, of L2 and of DRAM, in place of all. CTAs may
    /// not wait for each other then.
    #[arg(long, value_name = "N", requires = "no_values", value_parser = clap::value_parser!(u32).range(1..))]
    pub sample: Option<u32>,
    /// With --timed: how the prediction changes when each assumed constant of the card is halved or doubled. It takes a run each.
    #[arg(long, requires = "timed")]
    pub sensitivity: bool,
    /// With --timed: what some multiprocessors did, for https://ui.perfetto.dev.
    #[arg(long, value_name = "FILE.json", value_hint = ValueHint::FilePath, requires = "timed")]
    pub trace: Option<PathBuf>,
    /// How inputs are made [default: the shape's own, or gaussian].
    #[arg(long, value_name = "GENERATOR", value_parser = parse::generator())]
    pub input: Option<Generator>,
    /// Seed of the inputs.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Which experts the tokens of --op moe name: uniform, or zipf, few of them often [default: the layer's own, or uniform].
    #[arg(long, value_parser = parse::routing())]
    pub routing: Option<Routing>,
    /// Type of the output, and of the tokens of --op moe and linear [default: f16; bf16 of --op moe and linear].
    #[arg(long, visible_alias = "dtype", value_name = "DTYPE", value_parser = parse::out_dtype())]
    pub out_dtype: Option<TokenDtype>,
    /// As what tokens of --op moe and linear are multiplied: 16-bit, as they are; fp8, as e4m3 with a scale for each token; or nvfp4,
    /// with the checkpoint's input scales, or else a global scale for each token (docs/accuracy.md says what that costs) [default: the
    /// layer's own, or 16-bit; nvfp4 of --op moe on B200 and B300].
    #[arg(long, value_name = "FORMAT", value_parser = parse::token_format())]
    pub token_format: Option<TokenFormat>,
    /// An NVFP4 checkpoint: a .safetensors file, its index, or the folder of a model.
    #[arg(long, value_name = "CHECKPOINT", requires = "place", value_hint = ValueHint::AnyPath)]
    pub weights: Option<PathBuf>,
    /// The layer of the checkpoint.
    #[arg(long, requires = "weights", group = "place")]
    pub layer: Option<usize>,
    /// The weight of the checkpoint, of --op linear: a module such as model.layers.0.self_attn.q_proj.
    #[arg(long, value_name = "NAME", requires = "weights", group = "place")]
    pub tensor: Option<String>,
    /// Generated tokens: for each expert of the checkpoint [default: 16], or those of --op moe and linear [default: the shape's
    /// own].
    #[arg(long, value_name = "N")]
    pub tokens: Option<usize>,
    /// Tokens from a file: `hidden` [T, K] and `group_sizes` [experts], sorted by expert.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "weights", conflicts_with_all = ["tokens", "input", "seed"])]
    pub activations: Option<PathBuf>,
    /// Where the output goes, as `output` [T, N] of a .safetensors file.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub output: Option<PathBuf>,
    /// How much of the output is checked.
    #[arg(long, value_enum, default_value_t = Verify::Full)]
    pub verify: Verify,
    /// Timed runs, after one to warm up [default: 5]. The emulator times nothing: there it runs once, unless told.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub repeat: Option<u32>,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// What `--help` says of `--variant`.
fn variant_help() -> String {
    let names = |kernels: &mut dyn Iterator<Item = GroupedKernel>| {
        kernels.map(GroupedKernel::name).collect::<Vec<_>>().join(", ")
    };
    let unproven =
        names(&mut GroupedKernel::all().filter(|kernel| !GroupedKernel::proven().any(|proven| proven == *kernel)));
    let mut help = format!(
        "How a GPU computes it: words separated by commas, of which all may be left out. A launch schedule: persistent (one \
         launch), per-group, streams=N or unfused (the baseline of three kernels); graph (replayed as a CUDA graph); a kernel: \
         {}; one of its instances, such as t64",
        names(&mut GroupedKernel::all())
    );
    if !unproven.is_empty() {
        help += &format!(". Is a card's default once it has passed `nvfp4 selftest` there: {unproven}");
    }
    help
}

/// What `--help` says of `--arch`.
fn arch_help() -> String {
    let (arches, default, moe) = (emulated::arches().join(", "), emulated::default_arch(), emulated::moe_arch());
    format!("The emulated GPU: {arches} [default: {default}; {moe} of --op moe and linear]")
}

/// What is computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Operation {
    /// Groups of tokens, each with an expert.
    Groups(Op),
    /// A whole MoE layer.
    Moe,
    /// A linear layer.
    Linear,
}

impl Operation {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Groups(Op::Gated), Self::Groups(Op::Plain), Self::Moe, Self::Linear];

    /// Its name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Groups(op) => op.name(),
            Self::Moe => "moe",
            Self::Linear => "linear",
        }
    }
}

/// Where to run.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub enum Choice {
    Auto,
    Cpu,
    Cuda,
    /// The GPU's kernel executed on the CPU, its faults found.
    Emulated,
}

impl Args {
    /// The card of --timed.
    pub fn card(&self) -> anyhow::Result<Option<Card>> {
        let Some(card) = self.gpu.as_deref().and_then(Card::named) else { return Ok(None) };
        let set = |card: Card, constant: &String| card.with(constant).map_err(|text| anyhow::anyhow!(text));
        self.constant.iter().try_fold(card, set).map(Some)
    }

    /// Whether a whole layer is to be computed: it was asked for, or the shape is one of a layer.
    pub fn is_moe(&self) -> bool {
        let is_layer = |name: &String| shape::builtin().iter().any(|layer| layer.name == *name);
        self.op == Some(Operation::Moe) || self.op.is_none() && self.shape.as_ref().is_some_and(is_layer)
    }

    /// The operation of groups, if one was asked for.
    pub fn grouped_op(&self) -> Option<Op> {
        self.op.and_then(|op| if let Operation::Groups(op) = op { Some(op) } else { None })
    }

    /// Runs that are reported, and runs before them that warm caches and buffers.
    pub fn runs(&self) -> (usize, usize) {
        let emulated = self.backend == Choice::Emulated;
        let (timed, warm_up) = if emulated { (1, 0) } else { (5, 1) };
        (self.repeat.map_or(timed, |repeat| repeat as usize), warm_up)
    }
}

/// How much is checked.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub enum Verify {
    /// Every element.
    Full,
    /// Some thousand elements, drawn by the seed.
    Sample,
    /// None.
    Off,
}
