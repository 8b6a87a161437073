//! Prepared CPU layers: each is kept with the tensor of packed weights that it was made from.

use std::sync::Arc;

use nvfp4::backend::cpu::{CpuLinearLayer, CpuMoeLayer};
use nvfp4::format::Bytes;
use nvfp4::linear::LinearSizes;
use nvfp4::moe::MoeSizes;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::tensor::Tensor;

/// A layer for the CPU, an attribute of the tensor of its packed weights. It lives as long as that tensor. Copies and
/// pickles of the tensor get `None` in its place and prepare a layer of their own.
#[pyclass(frozen, weakref, module = "nvfp4._native")]
pub struct Prepared {
    key: Key,
    layer: Layer,
}

/// State of a tensor's bytes. Another key means other bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Key {
    address: u64,
    /// PyTorch's count of writes. `None`: an inference tensor, which has no count.
    version: Option<u64>,
}

enum Layer {
    Moe(MoeSizes, CpuMoeLayer<'static>),
    /// One layer per projection with its own global scale.
    Linear(LinearSizes, Vec<CpuLinearLayer<'static>>),
}

#[pymethods]
impl Prepared {
    fn __deepcopy__(&self, _memo: &Bound<'_, PyAny>) -> Option<()> {
        None
    }

    /// Pickles as `NoneType()`, which is `None`.
    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        (py.None().bind(py).get_type(), ()).into_pyobject(py)
    }
}

impl Prepared {
    /// Returns the MoE layer of a tensor of packed weights. The first call makes it with `make`.
    ///
    /// # Errors
    /// The error of `make`.
    pub fn moe<'py>(
        py: Python<'py>,
        weights: &Tensor<'py>,
        sizes: &MoeSizes,
        make: impl FnOnce(Bytes<'static>) -> PyResult<CpuMoeLayer<'static>>,
    ) -> PyResult<Bound<'py, Self>> {
        // Top-k and the expert map belong to a call.
        let sizes = MoeSizes { top_k: 1, named_experts: sizes.experts, ..*sizes };
        let fits = |layer: &Layer| matches!(layer, Layer::Moe(other, _) if *other == sizes);
        Self::of(py, weights, fits, |bytes| Ok(Layer::Moe(sizes, make(bytes)?)))
    }

    /// Returns the linear layers of a tensor of packed weights. The first call makes them with `make`.
    ///
    /// # Errors
    /// The error of `make`.
    pub fn linear<'py>(
        py: Python<'py>,
        weights: &Tensor<'py>,
        sizes: &LinearSizes,
        make: impl FnOnce(Bytes<'static>) -> PyResult<Vec<CpuLinearLayer<'static>>>,
    ) -> PyResult<Bound<'py, Self>> {
        let fits = |layer: &Layer| matches!(layer, Layer::Linear(other, _) if other == sizes);
        Self::of(py, weights, fits, |bytes| Ok(Layer::Linear(*sizes, make(bytes)?)))
    }

    /// The MoE layer of a value from [`Prepared::moe`].
    pub fn moe_layer(&self) -> &CpuMoeLayer<'static> {
        let Layer::Moe(_, layer) = &self.layer else { unreachable!("`moe` returned this value") };
        layer
    }

    /// The linear layers of a value from [`Prepared::linear`].
    pub fn linear_layers(&self) -> &[CpuLinearLayer<'static>] {
        let Layer::Linear(_, layers) = &self.layer else { unreachable!("`linear` returned this value") };
        layers
    }

    fn of<'py>(
        py: Python<'py>,
        weights: &Tensor<'py>,
        fits: impl FnOnce(&Layer) -> bool,
        make: impl FnOnce(Bytes<'static>) -> PyResult<Layer>,
    ) -> PyResult<Bound<'py, Self>> {
        let (object, name) = (weights.object(), intern!(py, "_nvfp4_prepared"));
        let version = object.getattr(intern!(py, "_version")).and_then(|version| version.extract()).ok();
        let key = Key { address: weights.address, version };
        if let Ok(kept) = object.getattr(name)
            && let Ok(kept) = kept.cast_into::<Self>()
            && kept.get().key == key
            && fits(&kept.get().layer)
        {
            return Ok(kept);
        }
        let layer = make(shared_bytes(py, weights)?)?;
        let prepared = Bound::new(py, Self { key, layer })?;
        object.setattr(name, &prepared)?;
        Ok(prepared)
    }
}

/// Memory of a tensor, kept by its storage.
struct Storage {
    address: u64,
    bytes: usize,
    /// Not the tensor: the tensor keeps the prepared layer, so a reference to it would be a cycle.
    _storage: Py<PyAny>,
}

impl AsRef<[u8]> for Storage {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: `bytes` bytes lie at `address`, in the storage that `_storage` keeps. The operators' contract is that
        // nobody writes weights during a call; a later write changes the tensor's version, after which this value is
        // no longer used.
        unsafe { std::slice::from_raw_parts(self.address as *const u8, self.bytes) }
    }
}

/// Returns the bytes of a contiguous tensor of at least one byte on the CPU.
fn shared_bytes(py: Python<'_>, weights: &Tensor<'_>) -> PyResult<Bytes<'static>> {
    let storage = weights.object().call_method0(intern!(py, "untyped_storage"))?.unbind();
    let bytes = weights.len();
    Ok(Bytes::Shared(Arc::new(Storage { address: weights.address, bytes, _storage: storage }), 0..bytes))
}
