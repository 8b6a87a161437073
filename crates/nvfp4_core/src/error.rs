//! The library's error type. Each message says what is wrong, where, and how to fix it.

use std::path::{Path, PathBuf};

use safetensors::Dtype;

/// The error of this library.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// K is not a multiple of 16, or is out of range.
    #[error("K = {k} is not a multiple of 16 from 16 to 2^20; pad the tensor to whole blocks of 16")]
    BlockAlignment {
        /// Rejected K.
        k: usize,
    },
    /// N is zero or not a multiple of 8.
    #[error("N = {n} is not a positive multiple of 8; pad the weights with zero rows")]
    OutputAlignment {
        /// Rejected N.
        n: usize,
    },
    /// The length of a buffer differs from the length that the shape requires.
    #[error("{what}: the shape needs {expected} bytes, found {got}")]
    Length {
        /// Name of the buffer.
        what: &'static str,
        /// Length of the buffer in bytes.
        got: usize,
        /// Required length in bytes.
        expected: usize,
    },
    /// The product of the sizes exceeds the address space.
    #[error("the product of the sizes exceeds the address space of this machine; check the shape")]
    TooLarge,
    /// A block scale is negative or NaN.
    #[error(
        "scale {code:#04x} at row {row}, block {block} is {}; NVFP4 block scales must be 0x00 to 0x7e; quantize the tensor again",
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
    /// A global scale is negative, infinite or NaN.
    #[error("global scale {value} must be finite and at least 0; quantize the tensor again")]
    GlobalScale {
        /// Rejected scale.
        value: f32,
    },
    /// The product of the global scales is so large that a dot product could overflow f32.
    #[error(
        "the product of the global scales is {alpha:e}: a dot product over K = {k} can overflow f32; rescale the tensors"
    )]
    Alpha {
        /// Product of the global scales.
        alpha: f64,
        /// Length of the dot product.
        k: usize,
    },
    /// Two sizes that must be equal differ.
    #[error("{what}: got {got}, expected {expected}")]
    Mismatch {
        /// Name of the size.
        what: &'static str,
        /// Size found.
        got: usize,
        /// Size expected.
        expected: usize,
    },
    /// A number to quantize is NaN or infinite.
    #[error("element {index} is {value}; only finite numbers can be quantized")]
    NotFinite {
        /// Row-major index of the number.
        index: usize,
        /// Rejected number.
        value: f32,
    },
    /// The request is invalid; the message says why.
    #[error("{}", one_line(.0))]
    Invalid(String),
    /// A file cannot be read or written.
    #[error("{}: {cause}", printable(&path.to_string_lossy()))]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system. It is not a `source`, because the message already includes its text.
        cause: std::io::Error,
    },
    /// A file is not a valid safetensors file.
    #[error("not a valid safetensors file: {}; download or export it again", one_line(.0))]
    Safetensors(String),
    /// A tensor or a layer is missing.
    #[error("{} is missing; {}", one_line(name), one_line(remedy))]
    Missing {
        /// Name of the missing part.
        name: String,
        /// Remedy.
        remedy: String,
    },
    /// A tensor has the wrong type.
    #[error("its dtype is {got}, not {}; {remedy}", either(expected))]
    Dtype {
        /// Type of the tensor.
        got: Dtype,
        /// Accepted types.
        expected: Vec<Dtype>,
        /// Remedy.
        remedy: &'static str,
    },
    /// A tensor has the wrong shape.
    #[error("its shape is {got:?}, not {expected}; export the model again")]
    Shape {
        /// Shape of the tensor.
        got: Vec<usize>,
        /// Expected shape, in words.
        expected: String,
    },
    /// A global scale that divides is not positive and finite, or its inverse is not finite.
    #[error("global scale {value} must be positive, and it and its inverse must be finite; quantize the tensor again")]
    Divisor {
        /// Rejected scale.
        value: f32,
    },
    /// The model computes something that this library does not compute.
    #[error("{}", one_line(.0))]
    NotComputed(String),
    /// An error with its place in front: a file, a tensor or a group.
    #[error("{}: {error}", one_line(place))]
    At {
        /// File, tensor or group.
        place: String,
        /// Error at that place.
        error: Box<Error>,
    },
    /// A call of the CUDA driver failed.
    #[error("{call} failed on {device}: {source}")]
    Driver {
        /// Name of the driver's function.
        call: &'static str,
        /// Name of the device.
        device: String,
        /// Error of the driver.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The emulator stopped a launch: the kernel did something wrong, or uses a feature that the emulator lacks.
    #[error("{0}")]
    Fault(Box<dyn std::error::Error + Send + Sync>),
    /// No device of the requested kind exists.
    #[error("no CUDA device: {0}")]
    NoDevice(String),
}

/// Returns `message` escaped, on one line, and cut to a maximum length; files can put any text into a message.
fn one_line(message: &str) -> String {
    const LONGEST: usize = 1000;
    let mut line = printable(message);
    if let Some((end, _)) = line.char_indices().nth(LONGEST) {
        line.truncate(end);
        line.push('…');
    }
    line
}

/// Returns `text` with control characters, color codes and bidirectional marks escaped, so that a terminal prints it
/// safely.
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

/// Returns the types joined by "or".
fn either(dtypes: &[Dtype]) -> String {
    dtypes.iter().map(Dtype::to_string).collect::<Vec<_>>().join(" or ")
}

impl Error {
    /// Returns the error with a place in front.
    pub fn at(self, place: impl std::fmt::Display) -> Self {
        Self::At { place: place.to_string(), error: Box::new(self) }
    }

    /// Returns the error with the number of its group in front. A group that is planned alone reports group 0, which is
    /// replaced.
    pub fn of_group(self, index: usize) -> Self {
        let alone = match self {
            Self::At { error, .. } => *error,
            error => error,
        };
        alone.at(format_args!("group {index}"))
    }

    /// Returns an error about a part as an error about the whole; `before` elements precede the part.
    pub fn further_on(self, before: usize) -> Self {
        match self {
            Self::NotFinite { index, value } => Self::NotFinite { index: index + before, value },
            other => other,
        }
    }

    /// Returns the I/O error of a file.
    pub fn io(path: &Path, cause: std::io::Error) -> Self {
        Self::Io { path: path.to_owned(), cause }
    }

    /// Returns the kind of error as a code that stays the same when the message changes.
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
            Self::Fault(_) => "fault",
            Self::NoDevice(_) => "no-device",
        }
    }

    /// Returns `true` if the device is missing, `false` if the input is wrong.
    pub fn is_no_device(&self) -> bool {
        match self {
            Self::NoDevice(_) => true,
            Self::At { error, .. } => error.is_no_device(),
            _ => false,
        }
    }

    /// Returns the fault of the kernel, if the emulator found one: `F` is the emulator's type, `ptx_emulator::Fault`.
    pub fn fault<F: std::error::Error + 'static>(&self) -> Option<&F> {
        match self {
            Self::Fault(fault) => fault.downcast_ref(),
            Self::At { error, .. } => error.fault(),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_from_a_file_stays_on_one_short_line() {
        let message = Error::Invalid(format!("a\nb\u{1b}'\"\\{}", "é".repeat(5000))).to_string();
        assert!(message.starts_with(r#"a\nb\u{1b}'"\éé"#) && message.ends_with('…'), "{message}");
        assert_eq!(message.chars().count(), 1001);
        let io = Error::io("a\u{1b}[2J\u{202e}\u{9b}".as_ref(), std::io::ErrorKind::NotFound.into()).at("b\rc");
        assert_eq!(io.to_string(), r"b\rc: a\u{1b}[2J\u{202e}\u{9b}: entity not found");
    }

    #[test]
    fn system_error_is_printed_once() {
        let error = Error::io("x".as_ref(), std::io::ErrorKind::NotFound.into());
        assert!(std::error::Error::source(&error).is_none());
    }
}
