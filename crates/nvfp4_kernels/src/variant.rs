//! [`Variant`]: how a step is computed on a GPU, as one string. Pure data, independent of a device.

use std::fmt;
use std::str::FromStr;

use crate::GroupedKernel;
use nvfp4_core::Error;
use nvfp4_core::compare::Tolerance;
use nvfp4_core::oracle::Element;
use nvfp4_core::problem::{Op, TokenDtype};

/// A way to compute a step on a GPU: optional words separated by commas, in any order:
///
/// - a launch schedule, [`LaunchSchedule`]: `persistent`, `per-group`, `streams=N`, `unfused`
/// - `graph`: the launches are captured into a CUDA graph, which is replayed when the same step comes again
/// - a kernel, [`GroupedKernel`]: for example `gated_sm90` [default: the kernel for the device]
/// - an instance of this kernel: for example `t64`, with tiles of 64 tokens [default: the best instance for the step]
///
/// ```
/// use nvfp4_kernels::variant::{LaunchSchedule, Variant};
///
/// let variant: Variant = "t64_s2,graph,streams=4".parse()?;
/// assert_eq!((variant.schedule, variant.graph), (LaunchSchedule::Streams(4), true));
/// assert_eq!(variant.to_string(), "t64_s2,streams=4,graph");
/// # Ok::<_, nvfp4_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Variant {
    /// Kernel; `None`: the kernel for the device.
    pub kernel: Option<GroupedKernel>,
    /// Instance of the kernel; `None`: the best instance for each step.
    pub instance: Option<&'static str>,
    /// Launches, and their possible order.
    pub schedule: LaunchSchedule,
    /// Whether the launches are captured into a CUDA graph.
    pub graph: bool,
}

/// Launches of a step, and their possible order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum LaunchSchedule {
    /// One launch for all groups.
    #[default]
    Persistent,
    /// One launch per group with tokens, one after the other.
    PerGroup,
    /// One launch per group with tokens, distributed over this number of streams.
    Streams(u32),
    /// The baseline: a GEMM of all groups for gate, one for up, and a kernel for silu and product. Gate and up are
    /// stored in the output type between the launches, so this schedule has a separate [tolerance](Self::tolerance).
    Unfused,
}

impl LaunchSchedule {
    /// Maximum number of streams: the maximum number of concurrent grids of a device (CUDA programming guide,
    /// "Technical Specifications per Compute Capability").
    pub const MAX_STREAMS: u32 = 128;

    /// Whether gate and up are rounded to the output type before they are multiplied.
    pub fn rounds_gate_and_up(self) -> bool {
        self == Self::Unfused
    }

    /// Returns the allowed error of an output element.
    pub fn tolerance(self, dtype: TokenDtype, element: &Element) -> Tolerance {
        if self.rounds_gate_and_up() { Tolerance::unfused(dtype, element) } else { Tolerance::of(dtype) }
    }
}

impl fmt::Display for LaunchSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Persistent => f.write_str("persistent"),
            Self::PerGroup => f.write_str("per-group"),
            Self::Streams(streams) => write!(f, "streams={streams}"),
            Self::Unfused => f.write_str("unfused"),
        }
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for word in self.kernel.map(GroupedKernel::name).into_iter().chain(self.instance) {
            write!(f, "{word},")?;
        }
        write!(f, "{}{}", self.schedule, if self.graph { ",graph" } else { "" })
    }
}

/// Meaning of one word of a variant.
enum Word {
    Kernel(GroupedKernel),
    Instance(&'static str),
    Schedule(LaunchSchedule),
    Graph,
}

fn word(text: &str) -> Option<Word> {
    let schedule = match text.strip_prefix("streams=") {
        Some(count) => {
            let count = count.parse().ok().filter(|count| (1..=LaunchSchedule::MAX_STREAMS).contains(count));
            Some(LaunchSchedule::Streams(count?))
        }
        None => [LaunchSchedule::Persistent, LaunchSchedule::PerGroup, LaunchSchedule::Unfused]
            .into_iter()
            .find(|schedule| schedule.to_string() == text),
    };
    let kernel = || GroupedKernel::named(text).map(Word::Kernel);
    let instance = || GroupedKernel::all().flat_map(instances).find(|name| *name == text).map(Word::Instance);
    let graph = || (text == "graph").then_some(Word::Graph);
    schedule.map(Word::Schedule).or_else(graph).or_else(kernel).or_else(instance)
}

/// Returns the instances for both operations of a kernel.
fn instances(kernel: GroupedKernel) -> Vec<&'static str> {
    let mut names = kernel.instances(Op::Gated);
    let plain: Vec<_> = kernel.instances(Op::Plain).into_iter().filter(|name| !names.contains(name)).collect();
    names.extend(plain);
    names
}

impl FromStr for Variant {
    type Err = Error;

    /// # Errors
    /// [`Error::Invalid`] if a word is unknown (the message lists the words), or two words set the same property.
    fn from_str(text: &str) -> Result<Self, Error> {
        fn set<T>(slot: &mut Option<T>, value: T, what: &str) -> Result<(), Error> {
            match slot.replace(value) {
                None => Ok(()),
                Some(_) => Err(Error::Invalid(format!("a variant accepts only one {what}"))),
            }
        }
        let (mut kernel, mut instance, mut schedule, mut graph) = (None, None, None, None);
        for text in text.split(',').map(str::trim) {
            let word = word(text).ok_or_else(|| {
                let kernels = GroupedKernel::all().map(|kernel| format!("{} with {}", kernel.name(), instances(kernel).join(", ")));
                let kernels: Vec<_> = kernels.collect();
                Error::Invalid(format!(
                    "unknown word `{text}` in the variant; expected a launch schedule (persistent, per-group, streams=1 to \
                     streams={}, unfused), graph, or a kernel and its instance: {}",
                    LaunchSchedule::MAX_STREAMS,
                    kernels.join("; ")
                ))
            })?;
            match word {
                Word::Kernel(value) => set(&mut kernel, value, "kernel")?,
                Word::Instance(value) => set(&mut instance, value, "instance")?,
                Word::Schedule(value) => set(&mut schedule, value, "launch schedule")?,
                Word::Graph => set(&mut graph, (), "`graph`")?,
            }
        }
        Ok(Self { kernel, instance, schedule: schedule.unwrap_or_default(), graph: graph.is_some() })
    }
}

impl Variant {
    /// Returns the variant for code that the caller gave: the kernel of this code computes, if it is a grouped kernel.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the variant names another kernel.
    pub fn with_code_of(self, given: &str) -> Result<Self, Error> {
        match (GroupedKernel::named(given), self.kernel) {
            (Some(given), None) => Ok(Self { kernel: Some(given), ..self }),
            (Some(given), Some(named)) if given != named => {
                Err(Error::Invalid(format!("the code is for {}, but the variant names {}", given.name(), named.name())))
            }
            _ => Ok(self),
        }
    }

    /// Returns the operation that the kernel is launched for in a step of `op`.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the schedule is unfused and the operation is not gated.
    pub fn kernel_op(&self, op: Op) -> Result<Op, Error> {
        match (self.schedule, op) {
            (LaunchSchedule::Unfused, Op::Gated) => Ok(Op::Plain),
            (LaunchSchedule::Unfused, Op::Plain) => {
                Err(Error::Invalid("the schedule unfused works only with --op gated; remove it for --op plain".into()))
            }
            _ => Ok(op),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_unfused_schedule_has_a_separate_tolerance() {
        let element = Element { pre: [2.0, 3.0], value: 5.0 };
        for dtype in [TokenDtype::F16, TokenDtype::Bf16] {
            let of = |schedule: LaunchSchedule| schedule.tolerance(dtype, &element);
            for schedule in [LaunchSchedule::Persistent, LaunchSchedule::PerGroup, LaunchSchedule::Streams(2)] {
                assert_eq!(of(schedule), Tolerance::of(dtype));
            }
            assert_eq!(of(LaunchSchedule::Unfused), Tolerance::unfused(dtype, &element));
            assert!(of(LaunchSchedule::Unfused).absolute > Tolerance::of(dtype).absolute);
        }
    }

    #[test]
    fn words_parse_in_any_order() {
        for (text, printed) in [
            ("persistent", "persistent"),
            ("graph", "persistent,graph"),
            ("streams=4, graph, t64_s2", "t64_s2,streams=4,graph"),
            ("per-group,small,gated_simt", "gated_simt,small,per-group"),
            ("gated_sm90,unfused", "gated_sm90,unfused"),
        ] {
            let variant: Variant = text.parse().unwrap();
            assert_eq!(variant.to_string(), printed);
            assert_eq!(printed.parse::<Variant>().unwrap(), variant);
        }
        assert_eq!("persistent".parse::<Variant>().unwrap(), Variant::default());
    }

    #[test]
    fn every_instance_of_every_kernel_is_a_word() {
        for kernel in GroupedKernel::all() {
            for name in [Op::Gated, Op::Plain].into_iter().flat_map(|op| kernel.instances(op)) {
                let variant: Variant = format!("{},{name}", kernel.name()).parse().unwrap();
                assert_eq!((variant.kernel, variant.instance), (Some(kernel), Some(name)));
            }
        }
    }

    #[test]
    fn unknown_variant_is_refused_and_lists_the_words() {
        let refusal = |text: &str| text.parse::<Variant>().unwrap_err().to_string();
        for text in ["", "t63", "streams", "streams=0", "streams=129", "streams=x", "Graph", "persistent,,graph"] {
            let refused = refusal(text);
            for there in ["per-group", "streams=128", "unfused", "graph", "gated_sm100 with t8, ", "gated_simt with "] {
                assert!(refused.contains("unknown word") && refused.contains(there), "{refused}");
            }
        }
        assert_eq!(refusal("per-group,unfused"), "a variant accepts only one launch schedule");
        assert_eq!(refusal("graph,graph"), "a variant accepts only one `graph`");
        assert_eq!(refusal("gated_simt,gated_sm90"), "a variant accepts only one kernel");
    }

    #[test]
    fn given_code_selects_the_kernel() {
        let with_code = |text: &str, given| text.parse::<Variant>().unwrap().with_code_of(given);
        assert_eq!(with_code("graph", "gated_sm90").unwrap().to_string(), "gated_sm90,persistent,graph");
        assert_eq!(with_code("gated_sm90", "silu_mul").unwrap().to_string(), "gated_sm90,persistent");
        let refused = with_code("gated_sm90", "gated_simt").unwrap_err().to_string();
        assert_eq!(refused, "the code is for gated_simt, but the variant names gated_sm90");
    }

    #[test]
    fn unfused_plain_operation_is_refused() {
        let unfused: Variant = "unfused".parse().unwrap();
        assert_eq!(unfused.kernel_op(Op::Gated).unwrap(), Op::Plain);
        assert!(unfused.kernel_op(Op::Plain).unwrap_err().to_string().contains("works only with --op gated"));
    }
}
