//! [`Variant`]: which of the ways to compute a step on a GPU, as one string. Pure data, knows no device.

use std::fmt;
use std::str::FromStr;

use crate::compare::Tolerance;
use crate::error::Error;
use crate::kernels::GroupedKernel;
use crate::oracle::Element;
use crate::problem::{Op, TokenDtype};

/// A way to compute a step on a GPU: words separated by commas, in any order, all of which may be left out.
///
/// - a launch schedule, [`LaunchSchedule`]: `persistent`, `per-group`, `streams=N`, `unfused`
/// - `graph`: the launches are captured into a CUDA graph, which is replayed when the same step comes again
/// - a kernel, [`GroupedKernel`]: `gated_sm90`, for instance [default: the one for the device]
/// - an instance of that kernel: `t64`, for tiles of 64 tokens [default: the best for the step]
///
/// ```
/// use nvfp4::plan::variant::{LaunchSchedule, Variant};
///
/// let variant: Variant = "t64_s2,graph,streams=4".parse()?;
/// assert_eq!((variant.schedule, variant.graph), (LaunchSchedule::Streams(4), true));
/// assert_eq!(variant.to_string(), "t64_s2,streams=4,graph");
/// # Ok::<_, nvfp4::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Variant {
    /// The kernel; the one for the device unless it is named.
    pub kernel: Option<GroupedKernel>,
    /// The instance of the kernel; the best for each step unless it is named.
    pub instance: Option<&'static str>,
    /// What is launched, and in which order it may run.
    pub schedule: LaunchSchedule,
    /// Whether the launches are captured into a CUDA graph.
    pub graph: bool,
}

/// What is launched for a step, and in which order it may run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum LaunchSchedule {
    /// One launch for all groups.
    #[default]
    Persistent,
    /// A launch for each group that has tokens, one after the other.
    PerGroup,
    /// A launch for each group that has tokens, dealt out to so many streams.
    Streams(u32),
    /// The baseline: a plain GEMM of all groups for gate, one for up, and a kernel for silu and product. Gate and up
    /// lie between them in the output's type, so this schedule has a [tolerance](Self::tolerance) of its own.
    Unfused,
}

impl LaunchSchedule {
    /// The most streams: the most grids that a device runs side by side (CUDA programming guide, "Technical
    /// Specifications per Compute Capability").
    pub const MAX_STREAMS: u32 = 128;

    /// Whether gate and up are rounded to the output's type before they are multiplied.
    pub fn rounds_gate_and_up(self) -> bool {
        self == Self::Unfused
    }

    /// How far an element of the output may lie from the exact one.
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

/// What one word of a variant says.
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

/// The instances of either operation's kernel.
fn instances(kernel: GroupedKernel) -> Vec<&'static str> {
    let mut names = kernel.instances(Op::Gated);
    let plain: Vec<_> = kernel.instances(Op::Plain).into_iter().filter(|name| !names.contains(name)).collect();
    names.extend(plain);
    names
}

impl FromStr for Variant {
    type Err = Error;

    /// # Errors
    /// [`Error::Invalid`] if a word is unknown, with the words that there are; or if two words decide the same thing.
    fn from_str(text: &str) -> Result<Self, Error> {
        fn set<T>(slot: &mut Option<T>, value: T, what: &str) -> Result<(), Error> {
            match slot.replace(value) {
                None => Ok(()),
                Some(_) => Err(Error::Invalid(format!("a variant has one {what}"))),
            }
        }
        let (mut kernel, mut instance, mut schedule, mut graph) = (None, None, None, None);
        for text in text.split(',').map(str::trim) {
            let word = word(text).ok_or_else(|| {
                let kernels = GroupedKernel::all().map(|kernel| format!("{} with {}", kernel.name(), instances(kernel).join(", ")));
                let kernels: Vec<_> = kernels.collect();
                Error::Invalid(format!(
                    "`{text}` is no word of a variant; there are the launch schedules persistent, per-group, streams=1 to \
                     streams={}, unfused; graph; the kernels and their instances {}",
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
    /// The same variant for a kernel whose code the caller gave: that kernel computes, if it computes groups.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the variant names another kernel.
    pub(crate) fn with_code_of(self, given: &str) -> Result<Self, Error> {
        match (GroupedKernel::named(given), self.kernel) {
            (Some(given), None) => Ok(Self { kernel: Some(given), ..self }),
            (Some(given), Some(named)) if given != named => {
                Err(Error::Invalid(format!("it is of {}, and the variant names {}", given.name(), named.name())))
            }
            _ => Ok(self),
        }
    }

    /// The operation that the kernel is launched for to compute a step of `op`.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is nothing to unfuse.
    pub(crate) fn kernel_op(&self, op: Op) -> Result<Op, Error> {
        match (self.schedule, op) {
            (LaunchSchedule::Unfused, Op::Gated) => Ok(Op::Plain),
            (LaunchSchedule::Unfused, Op::Plain) => {
                Err(Error::Invalid("unfused is a variant of gated; plain has nothing to unfuse".into()))
            }
            _ => Ok(op),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_unfused_schedule_has_a_tolerance_of_its_own() {
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
    fn words_come_in_any_order_and_print_in_one() {
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
    fn what_is_no_variant_is_refused_with_what_there_is() {
        let refusal = |text: &str| text.parse::<Variant>().unwrap_err().to_string();
        for text in ["", "t63", "streams", "streams=0", "streams=129", "streams=x", "Graph", "persistent,,graph"] {
            let refused = refusal(text);
            for there in ["per-group", "streams=128", "unfused", "graph", "gated_sm100 with t8, ", "gated_simt with "] {
                assert!(refused.contains("is no word of a variant") && refused.contains(there), "{refused}");
            }
        }
        assert_eq!(refusal("per-group,unfused"), "a variant has one launch schedule");
        assert_eq!(refusal("graph,graph"), "a variant has one `graph`");
        assert_eq!(refusal("gated_simt,gated_sm90"), "a variant has one kernel");
    }

    #[test]
    fn code_that_was_given_is_what_runs() {
        let with_code = |text: &str, given| text.parse::<Variant>().unwrap().with_code_of(given);
        assert_eq!(with_code("graph", "gated_sm90").unwrap().to_string(), "gated_sm90,persistent,graph");
        assert_eq!(with_code("gated_sm90", "silu_mul").unwrap().to_string(), "gated_sm90,persistent");
        let refused = with_code("gated_sm90", "gated_simt").unwrap_err().to_string();
        assert_eq!(refused, "it is of gated_simt, and the variant names gated_sm90");
    }

    #[test]
    fn an_unfused_plain_operation_is_refused() {
        let unfused: Variant = "unfused".parse().unwrap();
        assert_eq!(unfused.kernel_op(Op::Gated).unwrap(), Op::Plain);
        assert!(unfused.kernel_op(Op::Plain).unwrap_err().to_string().contains("nothing to unfuse"));
    }
}
