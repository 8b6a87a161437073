//! All quantized weights of a model, in every form that can be read: NVFP4 (apart, or all experts in one tensor), FP8 and
//! MXFP4; and on request the weights in floats.

use std::collections::BTreeMap;

use super::config::Config;
use super::stored::{self, Found, Stored, WEIGHT, Weight};
use crate::file::{Tensor, TensorFile};
use crate::floats::{DTYPES, Floats};
use crate::fused;
use crate::names::{Expert, Projection, Role};
use crate::source::{Elements, Rows, Source};
use crate::{Checkpoint, Dtype, Format};
use nvfp4_core::Error;

/// Suffix of the factors of a weight's columns (AWQ).
pub(crate) const PRE_QUANT_SCALE: &str = ".pre_quant_scale";

/// Form in which a model stores a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Form {
    /// f32, f16 or bf16.
    Floats,
    /// FP8 with scales.
    Fp8,
    /// MXFP4.
    Mxfp4,
    /// NVFP4 with the names of ModelOpt.
    ModelOpt,
    /// NVFP4 with the names of compressed-tensors.
    CompressedTensors,
}

impl Form {
    /// Name for people and for `--json`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Floats => "floats",
            Self::Fp8 => "FP8",
            Self::Mxfp4 => "MXFP4",
            Self::ModelOpt => "NVFP4 (modelopt)",
            Self::CompressedTensors => "NVFP4 (compressed-tensors)",
        }
    }

    /// Whether the form is NVFP4.
    pub const fn is_nvfp4(self) -> bool {
        matches!(self, Self::ModelOpt | Self::CompressedTensors)
    }
}

impl From<Format> for Form {
    fn from(format: Format) -> Self {
        match format {
            Format::ModelOpt => Self::ModelOpt,
            Format::CompressedTensors => Self::CompressedTensors,
        }
    }
}

/// A tensor with weights, and the tensors that belong to it.
#[derive(Debug)]
pub(crate) struct Readable<'a> {
    pub form: Form,
    /// Tensor of the values, its weights by the names of separate experts, and the other tensors of the form.
    pub stored: Stored<'a>,
    /// Shape of the weights as floats, and the name of their tensor.
    pub shape: Vec<usize>,
    pub plain_name: String,
    /// Whether the weights as floats are `[E, K, N]`.
    pub transposed: bool,
}

/// Returns the weights of a model by the tensors that hold their values.
///
/// # Errors
/// Returns the first quantized weight that cannot be read, with file and tensor.
pub(crate) fn all<'a>(
    checkpoint: &'a Checkpoint,
    config: &Config,
    with_floats: bool,
) -> Result<BTreeMap<&'a str, Readable<'a>>, Error> {
    config.check_transforms()?;
    let mut found = BTreeMap::new();
    for (name, tensor) in checkpoint.files().iter().flat_map(TensorFile::tensors) {
        let at = |error: Error| error.at(checkpoint.place(name));
        if let Some(readable) = nvfp4(checkpoint, config, name, tensor) {
            found.insert(name, readable?);
            continue;
        }
        match stored::find(checkpoint, config, name, tensor) {
            Some(Found::Weights(stored)) if !stored.plain || with_floats => {
                found.insert(name, other(stored, tensor));
            }
            // A tensor of integers with the name of a weight is quantized in a form that is not known.
            Some(Found::Unreadable(error)) if !DTYPES.contains(&tensor.dtype) => return Err(at(error)),
            _ => {}
        }
    }
    Ok(found)
}

/// Returns the tensor of a module's weights `[N, K]`, in whatever form they are stored. It has exactly one weight.
///
/// # Errors
/// Returns an error if the module has no weights, or weights that cannot be read.
pub(crate) fn of_module<'a>(checkpoint: &'a Checkpoint, module: &str) -> Result<Stored<'a>, Error> {
    let config = Config::beside(checkpoint)?;
    let name = checkpoint
        .names_under(module)
        .find(|name| name.strip_prefix(module).is_some_and(|part| [WEIGHT, ".weight_packed"].contains(&part)));
    let found = name.and_then(|name| Some((name, checkpoint.tensor(name)?)));
    let (name, tensor) = found.ok_or_else(|| {
        let missing = Error::Missing { name: format!("{module}{WEIGHT}"), remedy: "download the model again".into() };
        missing.at(checkpoint.path().display())
    })?;
    match nvfp4(checkpoint, &config, name, tensor) {
        Some(readable) => readable.map(|readable| readable.stored),
        None => match stored::find(checkpoint, &config, name, tensor) {
            Some(Found::Weights(stored)) => Ok(stored),
            Some(Found::Unreadable(error)) => Err(error.at(checkpoint.place(name))),
            _ => {
                let expected = "[rows, columns]".into();
                Err(Error::Shape { got: tensor.shape.to_vec(), expected }.at(checkpoint.place(name)))
            }
        },
    }
}

/// Returns the entry of weights that are not NVFP4.
fn other<'a>(stored: Stored<'a>, tensor: Tensor<'a>) -> Readable<'a> {
    let form = match (stored.plain, tensor.dtype) {
        (true, _) => Form::Floats,
        (false, Dtype::F8_E4M3) => Form::Fp8,
        (false, _) => Form::Mxfp4,
    };
    let name = stored.name;
    let (plain_name, shape) = match (form, stored.weights.first(), tensor.shape) {
        // Transformers' gpt-oss stores floats as [E, K, N].
        (Form::Mxfp4, Some(weight), &[experts, lines, _, _]) => {
            let plain = name.strip_suffix("_blocks").unwrap_or(name);
            (plain.to_owned(), vec![experts, weight.source.sizes()[1], lines])
        }
        (Form::Mxfp4, Some(weight), _) => (format!("{}{WEIGHT}", weight.module), weight.source.sizes().to_vec()),
        _ => (name.to_owned(), tensor.shape.to_vec()),
    };
    let transposed = shape.len() == 3 && stored.weights.first().is_some_and(|weight| weight.source.is_transposed());
    let transposed = transposed || form == Form::Mxfp4 && shape.len() == 3;
    Readable { form, stored, shape, plain_name, transposed }
}

/// Returns the weights of a tensor of packed NVFP4 values; `None` if it is another tensor.
fn nvfp4<'a>(
    checkpoint: &'a Checkpoint,
    config: &Config,
    name: &'a str,
    tensor: Tensor<'a>,
) -> Option<Result<Readable<'a>, Error>> {
    if tensor.dtype != Dtype::U8 {
        return None;
    }
    if let Some(projection) = Projection::parse(name)
        && projection.expert == Expert::Fused
        && fused::is_values(projection.part)
        && checkpoint.is_fused(projection.module)
    {
        return Some(all_experts(checkpoint, config, name, &projection));
    }
    [Format::ModelOpt, Format::CompressedTensors].into_iter().find_map(|format| {
        let module = name.strip_suffix(format.values())?;
        checkpoint.tensor(&format!("{module}{}", format.global()))?;
        Some(alone(checkpoint, module, name, tensor))
    })
}

/// Returns the entry of one NVFP4 matrix.
fn alone<'a>(
    checkpoint: &'a Checkpoint,
    module: &str,
    name: &'a str,
    tensor: Tensor<'a>,
) -> Result<Readable<'a>, Error> {
    let weight = checkpoint.weight(module)?;
    let (format, [n, k]) = (weight.format, [weight.matrix.rows(), weight.matrix.k()]);
    let scales = checkpoint.tensor(&format!("{module}{}", format.scales())).expect("`weight` found the scales");
    let columns = columns(checkpoint, module, k)?;
    let global = weight.matrix.global_scale();
    let elements = Elements::Nvfp4 { codes: tensor.data, scales: scales.data, global, columns };
    let source = Source::new(elements, [n, k], false, Rows::all(n));
    let parts = [format.scales(), format.global(), format.input(), PRE_QUANT_SCALE, ".input_scale_2"];
    let parts = parts.map(|part| format!("{module}{part}"));
    let stored = Stored {
        name,
        weights: vec![Weight { module: module.to_owned(), source }],
        plain: false,
        scales: parts.into_iter().filter(|part| checkpoint.tensor(part).is_some()).collect(),
        biases: None,
    };
    Ok(Readable {
        form: format.into(),
        stored,
        shape: vec![n, k],
        plain_name: format!("{module}{WEIGHT}"),
        transposed: false,
    })
}

/// Returns the factors of a weight's columns, by which engines multiply the tokens.
fn columns<'a>(checkpoint: &'a Checkpoint, module: &str, k: usize) -> Result<Option<Floats<'a>>, Error> {
    let name = format!("{module}{PRE_QUANT_SCALE}");
    let Some(tensor) = checkpoint.tensor(&name) else { return Ok(None) };
    let at = |error: Error| error.at(checkpoint.place(&name));
    if tensor.shape != [k] {
        return Err(at(Error::Shape { got: tensor.shape.to_vec(), expected: format!("[{k}]") }));
    }
    let expected = || Error::Dtype { got: tensor.dtype, expected: DTYPES.to_vec(), remedy: "export the model again" };
    Ok(Some(Floats::of(tensor).ok_or_else(|| at(expected()))?))
}

/// Returns the entry of all experts of a projection in NVFP4.
fn all_experts<'a>(
    checkpoint: &'a Checkpoint,
    config: &Config,
    name: &'a str,
    projection: &Projection<'_>,
) -> Result<Readable<'a>, Error> {
    if let Some(scale) = checkpoint.names_under(projection.module).find(|name| name.ends_with("pre_quant_scale")) {
        let what = "this factor of the tokens (NVFP4_AWQ) is not known for experts in one tensor; export them apart";
        return Err(Error::NotComputed(what.into()).at(checkpoint.place(scale)));
    }
    let parts = if projection.role == Role::GateUp { 2 } else { 1 };
    let bias =
        fused::BIASES.iter().any(|suffix| checkpoint.tensor(&format!("{}{suffix}", projection.module)).is_some());
    let in_turn = match config.model_type() {
        Some(model) => model.contains("gpt_oss"),
        None => bias,
    };
    let fused = checkpoint.fused(projection.module, parts, in_turn)?;
    fused.check_scales()?;
    let [experts, n, k] = fused.sizes;
    let (before, names) = stored::names_apart(projection);
    let mut weights = Vec::with_capacity(experts * parts);
    for expert in 0..experts {
        for (part, called) in names.iter().enumerate() {
            weights.push(Weight { module: format!("{before}.{expert}.{called}"), source: fused.source(expert, part) });
        }
    }
    let suffixes = fused::suffixes_beside_values();
    let scales = suffixes.map(|suffix| format!("{}{suffix}", projection.module));
    let scales = scales.filter(|part| *part != name && checkpoint.tensor(part).is_some()).collect();
    let ending = match projection.part {
        ".weight" | ".weight_packed" => WEIGHT,
        "_weight" => "_weight",
        _ => "",
    };
    let transposed = fused.is_transposed();
    let shape = if transposed { vec![experts, k, n] } else { vec![experts, n, k] };
    let stored = Stored { name, weights, plain: false, scales, biases: None };
    let plain_name = format!("{}{ending}", projection.module);
    Ok(Readable { form: fused.format.into(), stored, shape, plain_name, transposed })
}
