//! Everything that can be wrong, with its text: what, where, and what would be right.

use std::path::{Path, PathBuf};

use safetensors::Dtype;

/// The error of this library.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// K is no whole number of blocks, or out of range.
    #[error("K = {k} is not a multiple of 16 from 16 to 2^20; pad the tensor to whole blocks of 16")]
    BlockAlignment {
        /// The K at fault.
        k: usize,
    },
    /// N is zero or not a multiple of 8.
    #[error("N = {n} is not a positive multiple of 8; pad the weights with zero rows")]
    OutputAlignment {
        /// The N at fault.
        n: usize,
    },
    /// A buffer does not have the bytes that its shape asks for.
    #[error("{what}: {got} bytes where the shape asks for {expected}")]
    Length {
        /// Which buffer.
        what: &'static str,
        /// Its bytes.
        got: usize,
        /// The bytes it should have.
        expected: usize,
    },
    /// The product of sizes does not fit the address space.
    #[error("the sizes multiply to more than this machine can address; check the shape")]
    TooLarge,
    /// A block scale that tensor cores cannot read.
    #[error(
        "scale {code:#04x} at row {row}, block {block} is {}; NVFP4 scales are 0x00 to 0x7e: quantize the tensor again",
        if code & 0x7F == 0x7F { "NaN" } else { "negative" }
    )]
    BlockScale {
        /// The E4M3 code.
        code: u8,
        /// Row of the matrix.
        row: usize,
        /// Block of 16 along K.
        block: usize,
    },
    /// A global scale that is no finite number of zero or more.
    #[error("global scale {value} is not a finite number of zero or more; quantize the tensor again")]
    GlobalScale {
        /// The scale.
        value: f32,
    },
    /// Products of global scales so large that a dot product could leave f32.
    #[error(
        "global scales multiply to {alpha:e}, which lets a dot product over K = {k} overflow f32; rescale the tensors"
    )]
    Alpha {
        /// The product.
        alpha: f64,
        /// The length of the dot product.
        k: usize,
    },
    /// Two things that must have the same size differ.
    #[error("{what}: got {got}, expected {expected}")]
    Mismatch {
        /// What has that size.
        what: &'static str,
        /// The size it has.
        got: usize,
        /// The size it should have.
        expected: usize,
    },
    /// The numbers to quantize hold NaN or an infinity.
    #[error("element {index} is {value}; only finite numbers can be quantized")]
    NotFinite {
        /// Its place, row-major.
        index: usize,
        /// The number.
        value: f32,
    },
    /// A request that makes no sense as given.
    #[error("{}", one_line(.0))]
    Invalid(String),
    /// A file that cannot be read or written.
    #[error("{}: {cause}", printable(&path.to_string_lossy()))]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said. Not a `source`: the text has it, and would be followed by it again.
        cause: std::io::Error,
    },
    /// A file that is no valid safetensors file.
    #[error("not a valid safetensors file: {}; download or export it again", one_line(.0))]
    Safetensors(String),
    /// A tensor, or all of a layer, that should be there.
    #[error("{} is missing; {}", one_line(name), one_line(remedy))]
    Missing {
        /// What is missing.
        name: String,
        /// What to do.
        remedy: String,
    },
    /// A tensor of the wrong type.
    #[error("its dtype is {got}, not {}; {remedy}", either(expected))]
    Dtype {
        /// The type it has.
        got: Dtype,
        /// The types it may have.
        expected: Vec<Dtype>,
        /// What to do.
        remedy: &'static str,
    },
    /// A tensor of the wrong shape.
    #[error("its shape is {got:?}, not {expected}; export the model again")]
    Shape {
        /// The shape it has.
        got: Vec<usize>,
        /// The shape it should have.
        expected: String,
    },
    /// A global scale to divide by that is no positive finite number, or has no finite inverse.
    #[error("global scale {value} cannot be divided by; quantize the tensor again")]
    Divisor {
        /// The scale.
        value: f32,
    },
    /// Something that a model computes and this library does not.
    #[error("{}", one_line(.0))]
    NotComputed(String),
    /// An error with its place in front: a file, a tensor, a group.
    #[error("{}: {error}", one_line(place))]
    At {
        /// Where.
        place: String,
        /// What.
        error: Box<Error>,
    },
    /// A call of the CUDA driver failed.
    #[error("{call} failed on {device}: {source}")]
    Driver {
        /// The driver's function.
        call: &'static str,
        /// The device, in words.
        device: String,
        /// What the driver said.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The emulator ended a launch: for what the kernel did wrong, or for what it cannot do itself.
    #[cfg(feature = "emulated")]
    #[error("{0}")]
    Fault(ptx_emulator::Fault),
    /// No device of the wanted kind.
    #[error("no CUDA device: {0}")]
    NoDevice(String),
}

/// A message on one line and of bounded length, whatever a file put into it.
fn one_line(message: &str) -> String {
    const LONGEST: usize = 1000;
    let mut line = printable(message);
    if let Some((end, _)) = line.char_indices().nth(LONGEST) {
        line.truncate(end);
        line.push('…');
    }
    line
}

/// A text fit for a terminal: what would move the cursor, change colors or the direction of writing is escaped.
pub fn printable(text: &str) -> String {
    let mut printable = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '"' | '\'' | '\\' => printable.push(c),
            c => printable.extend(c.escape_debug()),
        }
    }
    printable
}

/// Alternatives in words.
fn either(dtypes: &[Dtype]) -> String {
    dtypes.iter().map(Dtype::to_string).collect::<Vec<_>>().join(" or ")
}

impl Error {
    /// The same error with a place in front.
    pub fn at(self, place: impl std::fmt::Display) -> Self {
        Self::At { place: place.to_string(), error: Box::new(self) }
    }

    /// The same error under the group's own number. A group that is planned alone is planned as number 0.
    #[cfg(feature = "kernels")]
    pub(crate) fn of_group(self, index: usize) -> Self {
        let alone = match self {
            Self::At { error, .. } => *error,
            error => error,
        };
        alone.at(format_args!("group {index}"))
    }

    /// The error about a part of some numbers as one about all of them, of which so many stand before that part.
    pub(crate) fn further_on(self, before: usize) -> Self {
        match self {
            Self::NotFinite { index, value } => Self::NotFinite { index: index + before, value },
            other => other,
        }
    }

    /// An input or output error of a file.
    pub fn io(path: &Path, cause: std::io::Error) -> Self {
        Self::Io { path: path.to_owned(), cause }
    }

    /// What kind of error it is, in a word that does not change with the text.
    pub fn code(&self) -> &'static str {
        match self {
            Self::BlockAlignment { .. } => "k-alignment",
            Self::OutputAlignment { .. } => "n-alignment",
            Self::Length { .. } => "length",
            Self::TooLarge => "too-large",
            Self::BlockScale { .. } => "block-scale",
            Self::GlobalScale { .. } | Self::Divisor { .. } => "global-scale",
            Self::Alpha { .. } => "alpha",
            Self::Mismatch { .. } => "mismatch",
            Self::NotFinite { .. } => "not-finite",
            Self::Invalid(_) => "invalid",
            Self::Io { .. } => "io",
            Self::Safetensors(_) => "not-safetensors",
            Self::Missing { .. } => "missing",
            Self::Dtype { .. } => "dtype",
            Self::Shape { .. } => "shape",
            Self::NotComputed(_) => "not-computed",
            Self::At { error, .. } => error.code(),
            Self::Driver { .. } => "driver",
            #[cfg(feature = "emulated")]
            Self::Fault(_) => "fault",
            Self::NoDevice(_) => "no-device",
        }
    }

    /// Whether the device is missing, rather than the input wrong.
    pub fn is_no_device(&self) -> bool {
        match self {
            Self::NoDevice(_) => true,
            Self::At { error, .. } => error.is_no_device(),
            _ => false,
        }
    }

    /// The kernel's fault, rather than the input's.
    #[cfg(feature = "emulated")]
    pub fn fault(&self) -> Option<&ptx_emulator::Fault> {
        match self {
            Self::Fault(fault) => Some(fault),
            Self::At { error, .. } => error.fault(),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_file_puts_into_a_message_stays_on_one_short_line() {
        let message = Error::Invalid(format!("a\nb\u{1b}'\"\\{}", "é".repeat(5000))).to_string();
        assert!(message.starts_with(r#"a\nb\u{1b}'"\éé"#) && message.ends_with('…'), "{message}");
        assert_eq!(message.chars().count(), 1001);
        let io = Error::io("a\u{1b}[2J\u{202e}\u{9b}".as_ref(), std::io::ErrorKind::NotFound.into()).at("b\rc");
        assert_eq!(io.to_string(), r"b\rc: a\u{1b}[2J\u{202e}\u{9b}: entity not found");
    }

    #[test]
    fn what_the_system_said_is_said_once() {
        let error = Error::io("x".as_ref(), std::io::ErrorKind::NotFound.into());
        assert!(std::error::Error::source(&error).is_none());
    }
}
