//! PyTorch's tensors: what they are, where they lie.

use nvfp4::bias::Bias;
use nvfp4::problem::{TokenDtype, TokenFormat};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyTuple;

use crate::error::invalid;

/// What packed weights of a GPU are a multiple of in bytes, and those of the CPU never.
pub const GPU_ALIGNMENT: usize = 256;

/// What tokens and their rows are aligned to on a GPU, in bytes: kernels read so many at once.
const ROW_ALIGNMENT: usize = 16;

/// The most dimensions that a tensor may have here.
const MOST_DIMENSIONS: usize = 8;

/// The types of elements that are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    F32,
    F16,
    Bf16,
    I32,
    U8,
    E4m3,
}

impl Dtype {
    const ALL: [(Self, &str); 6] = [
        (Self::Bf16, "bfloat16"),
        (Self::F16, "float16"),
        (Self::F32, "float32"),
        (Self::I32, "int32"),
        (Self::U8, "uint8"),
        (Self::E4m3, "float8_e4m3fn"),
    ];

    /// The type that PyTorch's object stands for; `None` for others.
    pub fn of(dtype: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        /// PyTorch's objects in the order of `ALL`; there is one of each.
        static OBJECTS: PyOnceLock<Vec<Py<PyAny>>> = PyOnceLock::new();

        let py = dtype.py();
        let objects = OBJECTS.get_or_try_init(py, || {
            let torch = py.import("torch")?;
            Self::ALL.iter().map(|(_, name)| Ok(torch.getattr(*name)?.unbind())).collect::<PyResult<Vec<_>>>()
        })?;
        Ok(objects.iter().position(|object| object.is(dtype)).map(|index| Self::ALL[index].0))
    }

    fn bytes(self) -> usize {
        match self {
            Self::F32 | Self::I32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::U8 | Self::E4m3 => 1,
        }
    }

    fn name(self) -> &'static str {
        Self::ALL.iter().find(|(dtype, _)| *dtype == self).map_or("", |(_, name)| name)
    }
}

/// Where a tensor lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Cpu,
    Cuda(u32),
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

/// A tensor that is an argument, with all that is asked of it.
pub struct Tensor<'py> {
    /// The argument's name.
    pub name: &'static str,
    pub dtype: Dtype,
    pub place: Place,
    pub address: u64,
    shape: [usize; MOST_DIMENSIONS],
    strides: [i64; MOST_DIMENSIONS],
    dimensions: usize,
    object: Bound<'py, PyAny>,
}

impl<'py> Tensor<'py> {
    /// Reads what a tensor is.
    ///
    /// # Errors
    /// `ValueError` if its type is none of [`Dtype`], its device is neither the CPU nor CUDA's, or it has too many dimensions.
    pub fn read(name: &'static str, object: &Bound<'py, PyAny>) -> PyResult<Self> {
        let py = object.py();
        let dtype = object.getattr(intern!(py, "dtype"))?;
        let dtype = Dtype::of(&dtype)?.ok_or_else(|| invalid(name, format_args!("the type {dtype} is not taken")))?;
        // -1 for the CPU, and for devices that no operator is registered for.
        let place = match object.call_method0(intern!(py, "get_device"))?.extract::<i32>()? {
            index if index >= 0 => Place::Cuda(index as u32),
            _ if object.getattr(intern!(py, "is_cpu"))?.extract()? => Place::Cpu,
            _ => {
                let device = object.getattr(intern!(py, "device"))?;
                return Err(invalid(name, format_args!("lies on {device}; only the CPU and CUDA devices compute")));
            }
        };
        let (mut shape, mut strides) = ([1; MOST_DIMENSIONS], [0; MOST_DIMENSIONS]);
        let sizes = object.getattr(intern!(py, "shape"))?;
        let sizes = sizes.cast::<PyTuple>()?;
        let dimensions = sizes.len();
        if dimensions > MOST_DIMENSIONS {
            return Err(invalid(
                name,
                format_args!("has {dimensions} dimensions, at most {MOST_DIMENSIONS} are taken"),
            ));
        }
        for (place, size) in shape.iter_mut().zip(sizes.iter()) {
            *place = size.extract()?;
        }
        // Most are contiguous, and asking for that takes less time than asking for strides.
        if object.call_method0(intern!(py, "is_contiguous"))?.extract()? {
            let mut stride = 1;
            for dimension in (0..dimensions).rev() {
                strides[dimension] = stride;
                stride *= shape[dimension].max(1) as i64;
            }
        } else {
            let steps = object.call_method0(intern!(py, "stride"))?;
            for (place, step) in strides.iter_mut().zip(steps.cast::<PyTuple>()?.iter()) {
                *place = step.extract()?;
            }
        }
        let address = object.call_method0(intern!(py, "data_ptr"))?.extract()?;
        Ok(Self { name, dtype, place, address, shape, strides, dimensions, object: object.clone() })
    }

    /// As [`Tensor::read`], of an argument that may be left out.
    pub fn read_optional(name: &'static str, object: Option<&Bound<'py, PyAny>>) -> PyResult<Option<Self>> {
        object.map(|object| Self::read(name, object)).transpose()
    }

    /// The tensor itself.
    pub fn object(&self) -> &Bound<'py, PyAny> {
        &self.object
    }

    /// Elements along each dimension.
    pub fn shape(&self) -> &[usize] {
        &self.shape[..self.dimensions]
    }

    /// Elements from one to the next along a dimension; those of a dimension of one element say nothing.
    pub fn stride(&self, dimension: usize) -> i64 {
        self.strides[dimension]
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.shape().iter().product()
    }

    /// An error about this argument.
    pub fn invalid(&self, text: impl std::fmt::Display) -> PyErr {
        invalid(self.name, text)
    }

    /// Asks for a type.
    pub fn expect_dtype(&self, wanted: &[Dtype]) -> PyResult<()> {
        if wanted.contains(&self.dtype) {
            return Ok(());
        }
        let wanted: Vec<_> = wanted.iter().map(|dtype| dtype.name()).collect();
        Err(self.invalid(format_args!("expected {}, got {}", wanted.join(" or "), self.dtype.name())))
    }

    /// Asks for a type of tokens.
    pub fn token_type(&self) -> PyResult<TokenDtype> {
        self.expect_dtype(&[Dtype::Bf16, Dtype::F16])?;
        Ok(if self.dtype == Dtype::Bf16 { TokenDtype::Bf16 } else { TokenDtype::F16 })
    }

    /// Asks for a shape.
    pub fn expect_shape(&self, wanted: &[usize]) -> PyResult<()> {
        if self.shape() == wanted {
            return Ok(());
        }
        Err(self.invalid(format_args!("expected the shape {wanted:?}, got {:?}", self.shape())))
    }

    /// Asks for so many dimensions.
    pub fn expect_dimensions<const N: usize>(&self, what: &str) -> PyResult<[usize; N]> {
        self.shape()
            .try_into()
            .map_err(|_| self.invalid(format_args!("expected {N} dimensions, {what}, got {:?}", self.shape())))
    }

    /// Asks for a place.
    pub fn expect_place(&self, wanted: Place) -> PyResult<()> {
        if self.place == wanted {
            return Ok(());
        }
        Err(self.invalid(format_args!("expected to lie on {wanted}, lies on {}", self.place)))
    }

    /// Asks that the dimensions from `first` on lie without gaps, in order.
    pub fn expect_dense_from(&self, first: usize) -> PyResult<()> {
        let mut wanted = 1;
        for dimension in (first..self.dimensions).rev() {
            let size = self.shape[dimension];
            if size > 1 && self.strides[dimension] != wanted && self.len() > 0 {
                return Err(self.invalid(format_args!(
                    "dimension {dimension} has stride {}, expected {wanted}; call .contiguous()",
                    self.strides[dimension]
                )));
            }
            wanted *= size.max(1) as i64;
        }
        Ok(())
    }

    /// Asks for elements without gaps, in order.
    pub fn expect_contiguous(&self) -> PyResult<()> {
        self.expect_dense_from(0)
    }

    /// Of a matrix whose rows lie without gaps, elements from one row to the next.
    pub fn row_stride(&self) -> PyResult<usize> {
        self.expect_dense_from(1)?;
        let [rows, columns] = self.expect_dimensions("[rows, columns]")?;
        let stride = self.strides[0];
        match usize::try_from(stride) {
            _ if rows <= 1 => Ok(columns),
            Ok(stride) if stride >= columns => Ok(stride),
            _ => Err(self.invalid(format_args!("rows are {stride} elements apart and have {columns}"))),
        }
    }

    /// Of a matrix of 16-bit numbers on a GPU, bytes from one row to the next, as kernels can read them.
    pub fn gpu_pitch(&self) -> PyResult<usize> {
        let pitch = size_of::<u16>() * self.row_stride()?;
        if !pitch.is_multiple_of(ROW_ALIGNMENT) || !self.address.is_multiple_of(ROW_ALIGNMENT as u64) {
            return Err(self.invalid(format_args!(
                "lies at {:#x}, its rows {pitch} bytes apart; expected multiples of {ROW_ALIGNMENT}: call .contiguous()",
                self.address
            )));
        }
        Ok(pitch)
    }

    /// Biases in host memory, f32 or of the tokens' type.
    pub fn bias(&self, dtype: TokenDtype, shape: &[usize]) -> PyResult<Bias<'py>> {
        let of_tokens = if dtype == TokenDtype::Bf16 { Dtype::Bf16 } else { Dtype::F16 };
        self.expect_dtype(&[Dtype::F32, of_tokens])?;
        self.expect_shape(shape)?;
        self.expect_place(Place::Cpu)?;
        self.expect_contiguous()?;
        // SAFETY: a contiguous tensor of so many elements; they are copied at once.
        Ok(unsafe {
            match self.dtype {
                Dtype::F32 => Bias::F32(self.elements::<f32>(self.len())?.to_vec().into()),
                _ => Bias::Token(self.elements::<u16>(self.len())?.to_vec().into()),
            }
        })
    }

    /// The first `len` elements in memory, which lie on the CPU.
    ///
    /// # Errors
    /// `ValueError` if they are not aligned.
    ///
    /// # Safety
    ///
    /// So many elements of this type lie there, are not written while the slice lives, and live as long.
    pub unsafe fn elements<'a, T>(&self, len: usize) -> PyResult<&'a [T]> {
        self.expect_aligned::<T>()?;
        if len == 0 {
            return Ok(&[]);
        }
        // SAFETY: the address is aligned, and not null since there are elements; `# Safety` above asks for the rest.
        Ok(unsafe { std::slice::from_raw_parts(self.address as *const T, len) })
    }

    /// As [`Tensor::elements`], to be written.
    ///
    /// # Errors
    /// As [`Tensor::elements`].
    ///
    /// # Safety
    ///
    /// As [`Tensor::elements`]; nobody else reads or writes them while the slice lives.
    pub unsafe fn elements_mut<'a, T>(&self, len: usize) -> PyResult<&'a mut [T]> {
        self.expect_aligned::<T>()?;
        if len == 0 {
            return Ok(&mut []);
        }
        // SAFETY: as in `elements`.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.address as *mut T, len) })
    }

    fn expect_aligned<T>(&self) -> PyResult<()> {
        assert_eq!(size_of::<T>(), self.dtype.bytes(), "the type was asked for");
        if !self.address.is_multiple_of(align_of::<T>() as u64) {
            return Err(self.invalid(format_args!("lies at {:#x}, not at a multiple of its element", self.address)));
        }
        Ok(())
    }
}

/// The type of tokens that PyTorch's object stands for.
pub fn token_type(dtype: &Bound<'_, PyAny>) -> PyResult<TokenDtype> {
    match Dtype::of(dtype)? {
        Some(Dtype::Bf16) => Ok(TokenDtype::Bf16),
        Some(Dtype::F16) => Ok(TokenDtype::F16),
        _ => Err(invalid("dtype", format_args!("expected torch.bfloat16 or torch.float16, got {dtype}"))),
    }
}

/// The format that tokens are multiplied in.
pub fn token_format(name: &str) -> PyResult<TokenFormat> {
    name.parse().map_err(|error: nvfp4::Error| invalid("token_format", error))
}
