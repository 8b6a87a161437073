//! PyTorch's tensors: their types, places, shapes and strides, with checks.

use nvfp4::bias::Bias;
use nvfp4::problem::{TokenDtype, TokenFormat};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyTuple;

use crate::error::invalid;

/// Alignment of GPU memory in bytes. The size of weights packed for a GPU is a multiple of it; the size for the CPU
/// never is.
pub const GPU_ALIGNMENT: usize = 256;

/// Alignment of tokens and of their rows on a GPU, in bytes: the kernels' access size.
const ROW_ALIGNMENT: usize = 16;

/// Maximum number of dimensions of a tensor.
const MOST_DIMENSIONS: usize = 8;

/// Supported element types.
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

    /// Returns the type of a PyTorch dtype object; `None` for unsupported types.
    pub fn of(dtype: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        /// PyTorch's dtype objects in the order of `ALL`; each exists once.
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

/// Device of a tensor.
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

/// A tensor argument and its properties.
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
    /// Reads a tensor's properties.
    ///
    /// # Errors
    /// `ValueError` if the type is not a [`Dtype`], the device is neither the CPU nor a CUDA device, or there are too
    /// many dimensions.
    pub fn read(name: &'static str, object: &Bound<'py, PyAny>) -> PyResult<Self> {
        let py = object.py();
        let dtype = object.getattr(intern!(py, "dtype"))?;
        let dtype = Dtype::of(&dtype)?.ok_or_else(|| invalid(name, format_args!("unsupported type {dtype}")))?;
        // -1 on the CPU, and on devices for which no operator is registered.
        let place = match object.call_method0(intern!(py, "get_device"))?.extract::<i32>()? {
            index if index >= 0 => Place::Cuda(index as u32),
            _ if object.getattr(intern!(py, "is_cpu"))?.extract()? => Place::Cpu,
            _ => {
                let device = object.getattr(intern!(py, "device"))?;
                return Err(invalid(name, format_args!("is on {device}; move it to the CPU or a CUDA device")));
            }
        };
        let (mut shape, mut strides) = ([1; MOST_DIMENSIONS], [0; MOST_DIMENSIONS]);
        let sizes = object.getattr(intern!(py, "shape"))?;
        let sizes = sizes.cast::<PyTuple>()?;
        let dimensions = sizes.len();
        if dimensions > MOST_DIMENSIONS {
            return Err(invalid(name, format_args!("has {dimensions} dimensions; expected at most {MOST_DIMENSIONS}")));
        }
        for (place, size) in shape.iter_mut().zip(sizes.iter()) {
            *place = size.extract()?;
        }
        // Most tensors are contiguous, and PyTorch answers `is_contiguous` faster than `stride`.
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

    /// Like [`Tensor::read`], for an optional argument.
    pub fn read_optional(name: &'static str, object: Option<&Bound<'py, PyAny>>) -> PyResult<Option<Self>> {
        object.map(|object| Self::read(name, object)).transpose()
    }

    /// The PyTorch object.
    pub fn object(&self) -> &Bound<'py, PyAny> {
        &self.object
    }

    /// Number of elements along each dimension.
    pub fn shape(&self) -> &[usize] {
        &self.shape[..self.dimensions]
    }

    /// Number of elements from one index to the next along a dimension. Meaningless for a dimension of one element.
    pub fn stride(&self, dimension: usize) -> i64 {
        self.strides[dimension]
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape().iter().product()
    }

    /// Returns a `ValueError` about this argument.
    pub fn invalid(&self, text: impl std::fmt::Display) -> PyErr {
        invalid(self.name, text)
    }

    /// Checks the type.
    pub fn expect_dtype(&self, wanted: &[Dtype]) -> PyResult<()> {
        if wanted.contains(&self.dtype) {
            return Ok(());
        }
        let wanted: Vec<_> = wanted.iter().map(|dtype| dtype.name()).collect();
        Err(self.invalid(format_args!("expected {}, got {}", wanted.join(" or "), self.dtype.name())))
    }

    /// Checks that the type is a token type, and returns it.
    pub fn token_type(&self) -> PyResult<TokenDtype> {
        self.expect_dtype(&[Dtype::Bf16, Dtype::F16])?;
        Ok(if self.dtype == Dtype::Bf16 { TokenDtype::Bf16 } else { TokenDtype::F16 })
    }

    /// Checks the shape.
    pub fn expect_shape(&self, wanted: &[usize]) -> PyResult<()> {
        if self.shape() == wanted {
            return Ok(());
        }
        Err(self.invalid(format_args!("expected the shape {wanted:?}, got {:?}", self.shape())))
    }

    /// Checks the number of dimensions and returns the shape. `what` describes the dimensions in the error.
    pub fn expect_dimensions<const N: usize>(&self, what: &str) -> PyResult<[usize; N]> {
        self.shape()
            .try_into()
            .map_err(|_| self.invalid(format_args!("expected {N} dimensions, {what}, got {:?}", self.shape())))
    }

    /// Checks the device.
    pub fn expect_place(&self, wanted: Place) -> PyResult<()> {
        if self.place == wanted {
            return Ok(());
        }
        Err(self.invalid(format_args!("expected a tensor on {wanted}, got one on {}", self.place)))
    }

    /// Checks that the dimensions from `first` on are contiguous and in order.
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

    /// Checks that all elements are contiguous and in order.
    pub fn expect_contiguous(&self) -> PyResult<()> {
        self.expect_dense_from(0)
    }

    /// Returns the elements from one row to the next of a matrix. Checks that each row is contiguous.
    pub fn row_stride(&self) -> PyResult<usize> {
        self.expect_dense_from(1)?;
        let [rows, columns] = self.expect_dimensions("[rows, columns]")?;
        let stride = self.strides[0];
        match usize::try_from(stride) {
            _ if rows <= 1 => Ok(columns),
            Ok(stride) if stride >= columns => Ok(stride),
            _ => Err(self.invalid(format_args!("expected a row stride of at least {columns} elements, got {stride}"))),
        }
    }

    /// Returns the bytes from one row to the next of a matrix of 16-bit numbers on a GPU. Checks the alignment that
    /// kernels need.
    pub fn gpu_pitch(&self) -> PyResult<usize> {
        let pitch = size_of::<u16>() * self.row_stride()?;
        if !pitch.is_multiple_of(ROW_ALIGNMENT) || !self.address.is_multiple_of(ROW_ALIGNMENT as u64) {
            return Err(self.invalid(format_args!(
                "address {:#x} and row pitch {pitch} must be multiples of {ROW_ALIGNMENT} bytes; call .contiguous()",
                self.address
            )));
        }
        Ok(pitch)
    }

    /// Reads biases in host memory, in f32 or the token type.
    pub fn bias(&self, dtype: TokenDtype, shape: &[usize]) -> PyResult<Bias<'py>> {
        let of_tokens = if dtype == TokenDtype::Bf16 { Dtype::Bf16 } else { Dtype::F16 };
        self.expect_dtype(&[Dtype::F32, of_tokens])?;
        self.expect_shape(shape)?;
        self.expect_place(Place::Cpu)?;
        self.expect_contiguous()?;
        // SAFETY: the tensor is contiguous, on the CPU, and has `len` elements of this type. They are copied at once.
        Ok(unsafe {
            match self.dtype {
                Dtype::F32 => Bias::F32(self.elements::<f32>(self.len())?.to_vec().into()),
                _ => Bias::Token(self.elements::<u16>(self.len())?.to_vec().into()),
            }
        })
    }

    /// Returns the first `len` elements in memory of a CPU tensor.
    ///
    /// # Errors
    /// `ValueError` if the address is not aligned to the element size.
    ///
    /// # Safety
    ///
    /// `len` elements of type `T` are at the tensor's address for the lifetime `'a`, and nothing writes them during
    /// that time.
    pub unsafe fn elements<'a, T>(&self, len: usize) -> PyResult<&'a [T]> {
        self.expect_aligned::<T>()?;
        if len == 0 {
            return Ok(&[]);
        }
        // SAFETY: the address is aligned, and not null because there are elements. The caller guarantees the rest.
        Ok(unsafe { std::slice::from_raw_parts(self.address as *const T, len) })
    }

    /// Like [`Tensor::elements`], for writing.
    ///
    /// # Errors
    /// `ValueError` if the address is not aligned to the element size.
    ///
    /// # Safety
    ///
    /// `len` elements of type `T` are at the tensor's address for the lifetime `'a`, and nothing else reads or writes
    /// them during that time.
    pub unsafe fn elements_mut<'a, T>(&self, len: usize) -> PyResult<&'a mut [T]> {
        self.expect_aligned::<T>()?;
        if len == 0 {
            return Ok(&mut []);
        }
        // SAFETY: the address is aligned, and not null because there are elements. The caller guarantees the rest.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.address as *mut T, len) })
    }

    fn expect_aligned<T>(&self) -> PyResult<()> {
        assert_eq!(size_of::<T>(), self.dtype.bytes(), "callers check the type first");
        if !self.address.is_multiple_of(align_of::<T>() as u64) {
            return Err(self.invalid(format_args!("address {:#x} is not aligned to the element size", self.address)));
        }
        Ok(())
    }
}

/// Returns the token type of a PyTorch dtype object.
pub fn token_type(dtype: &Bound<'_, PyAny>) -> PyResult<TokenDtype> {
    match Dtype::of(dtype)? {
        Some(Dtype::Bf16) => Ok(TokenDtype::Bf16),
        Some(Dtype::F16) => Ok(TokenDtype::F16),
        _ => Err(invalid("dtype", format_args!("expected torch.bfloat16 or torch.float16, got {dtype}"))),
    }
}

/// Parses a token format.
pub fn token_format(name: &str) -> PyResult<TokenFormat> {
    name.parse().map_err(|error: nvfp4::Error| invalid("token_format", error))
}
