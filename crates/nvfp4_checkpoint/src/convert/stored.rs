//! Finds the stored weights of a model: the tensor, the stored form, and the names under which they will be written.
//!
//! | tensor | form | found in |
//! |---|---|---|
//! | `M.weight` f32, f16, bf16 `[N, K]` | floats | most models |
//! | `M.weight` F8_E4M3 `[N, K]` with `M.weight_scale_inv`, `M.weight_scale` or `M.scale` | FP8 | DeepSeek, Qwen, ModelOpt, compressed-tensors |
//! | `M.weight`, `M.weight_packed` U8, I8 `[N, K/2]` with scales `[N, K/32]` of E8M0 | MXFP4 | DeepSeek-V4, Quark, compressed-tensors |
//! | `experts.gate_up_proj`, `experts.down_proj` `[E, H, 2I]`, `[E, I, H]` or `[E, 2I, H]`, `[E, H, I]` in floats or FP8 | all experts of a layer | Llama 4, gpt-oss, Qwen3-VL-MoE; Transformers 5 |
//! | `experts.gate_up_proj_blocks` U8 `[E, 2I, H/32, 16]` with `_scales` `[E, 2I, H/32]` | all experts of a layer in MXFP4 | gpt-oss |
//!
//! Experts stored in one tensor are written as separate tensors `experts.E.gate_proj`, as engines and this library read
//! them. In gpt-oss, rows of gate and up alternate along N; in all other models gate is the first half.

use super::config::Config;
use crate::file::Tensor;
use crate::floats::{DTYPES, Floats};
use crate::names::{Projection, Role};
use crate::source::{Elements, MX_BLOCK, Rows, Scales, Source};
use crate::{Checkpoint, Dtype, Format};
use nvfp4_core::Error;

/// Ending of the name of a weight; the module's name precedes it.
pub(super) const WEIGHT: &str = ".weight";

/// A tensor that holds weights.
#[derive(Debug)]
pub(crate) struct Stored<'a> {
    /// Name of the tensor.
    pub name: &'a str,
    /// Weights in the tensor.
    pub weights: Vec<Weight<'a>>,
    /// Whether the weights are floats, which can also stay unchanged.
    pub plain: bool,
    /// Scale tensors, which have no meaning without this tensor.
    pub scales: Vec<String>,
    /// Biases that are split in the same way as the weights.
    pub biases: Option<Biases<'a>>,
}

/// A matrix and the module that it belongs to.
#[derive(Debug)]
pub(crate) struct Weight<'a> {
    pub module: String,
    pub source: Source<'a>,
}

/// Biases `[E, N]` of all experts of a layer, in one tensor.
#[derive(Debug)]
pub(crate) struct Biases<'a> {
    pub name: String,
    pub tensor: Tensor<'a>,
    /// Module and position in the tensor of each bias.
    pub parts: Vec<(String, Rows)>,
}

impl Biases<'_> {
    /// Returns the bytes of one bias.
    pub(super) fn bytes(&self, rows: Rows) -> Vec<u8> {
        let size = self.tensor.dtype.bitsize() / 8;
        let elements = self.tensor.data.chunks_exact(size).skip(rows.first).step_by(rows.step).take(rows.count);
        elements.flatten().copied().collect()
    }
}

/// Classification of a tensor for a conversion.
#[derive(Debug)]
pub(super) enum Found<'a> {
    /// Tensor with weights.
    Weights(Stored<'a>),
    /// Tensor that is already NVFP4.
    Nvfp4(Format),
    /// Tensor with the name of a weight, which is copied for this reason.
    Left(String),
    /// Tensor with weights that cannot be read.
    Unreadable(Error),
}

/// Modules whose weights a tensor with this name would hold.
pub(super) fn modules(name: &str) -> Vec<String> {
    for ending in [WEIGHT, ".weight_packed", ".qweight"] {
        if let Some(module) = name.strip_suffix(ending) {
            return vec![module.to_owned()];
        }
    }
    vec![name.strip_suffix("_blocks").unwrap_or(name).to_owned()]
}

/// Classifies a tensor; `None` if a weight cannot have its name, type or shape.
pub(super) fn find<'a>(
    checkpoint: &'a Checkpoint,
    config: &Config,
    name: &'a str,
    tensor: Tensor<'a>,
) -> Option<Found<'a>> {
    let is_number = DTYPES.contains(&tensor.dtype) || tensor.dtype == Dtype::F8_E4M3;
    let read = Reader { checkpoint, config, name, tensor };
    let projection = Projection::parse(name);
    let found = match projection {
        Some(projection) if projection.part == "_blocks" => read.fused_mxfp4(&projection),
        Some(projection) if matches!(projection.part, "" | WEIGHT) && tensor.shape.len() == 3 && is_number => {
            read.fused(&projection)
        }
        _ => match name.rsplit_once('.') {
            Some((module, "weight")) => read.weight(module),
            Some((module, "weight_packed")) => read.packed(module),
            Some((_, "qweight")) => Err(unreadable("the weights are quantized to integers")),
            // Scales and biases are handled with their weight.
            Some((_, last)) if ["scale", "bias", "zero_point"].iter().any(|part| last.contains(part)) => return None,
            _ if tensor.shape.len() >= 2 && is_number => Err(Error::Invalid(
                "the tensor's name does not end in .weight; exclude it, or include fewer tensors".into(),
            )),
            _ => return None,
        },
    };
    Some(found.unwrap_or_else(Found::Unreadable))
}

/// Returns the name of the experts, and the names of the projections, when experts that share a tensor are written as
/// separate tensors `EXPERTS.E.PROJECTION`.
pub(super) fn names_apart<'n>(projection: &Projection<'n>) -> (String, Vec<&'n str>) {
    let (before, called) = projection.module.rsplit_once('.').unwrap_or(("", projection.module));
    let before = match before.rsplit('.').next() {
        Some("experts") => before.to_owned(),
        _ => format!("{before}.experts"),
    };
    let names = match (projection.role, called) {
        (Role::GateUp, "w13" | "input_linear") => vec!["w1", "w3"],
        (Role::GateUp, _) => vec!["gate_proj", "up_proj"],
        (_, "output_linear") => vec!["w2"],
        _ => vec![called],
    };
    (before, names)
}

fn unreadable(what: &str) -> Error {
    Error::Invalid(format!(
        "{what}; supported types are f32, f16, bf16, FP8 with scales and MXFP4: exclude the tensor or export it again"
    ))
}

struct Reader<'a, 'c> {
    checkpoint: &'a Checkpoint,
    config: &'c Config,
    name: &'a str,
    tensor: Tensor<'a>,
}

impl<'a> Reader<'a, '_> {
    /// Classifies `M.weight`.
    fn weight(&self, module: &str) -> Result<Found<'a>, Error> {
        let Tensor { dtype, shape, .. } = self.tensor;
        let has = |format: Format| self.checkpoint.tensor(&format!("{module}{}", format.global())).is_some();
        if dtype == Dtype::U8 && has(Format::ModelOpt) {
            return Ok(Found::Nvfp4(Format::ModelOpt));
        }
        let &[lines, length] = shape else {
            return Ok(Found::Left(match shape.len() {
                1 => "a vector".into(),
                other => format!("it has {other} dimensions"),
            }));
        };
        if let Some(floats) = Floats::of(self.tensor) {
            return Ok(self.alone(module, Elements::Floats(floats), [lines, length], None));
        }
        match dtype {
            Dtype::F8_E4M3 => {
                let (name, scale) = self.scale(&[".weight_scale_inv", ".weight_scale", ".scale"], module)?;
                let scales = self.scales(scale, scale.shape, shape)?;
                let elements = Elements::Fp8 { codes: self.tensor.data, scales };
                Ok(self.alone(module, elements, [lines, length], Some(name)))
            }
            Dtype::U8 | Dtype::I8 | Dtype::F4 => self.mxfp4(module),
            other => Err(unreadable(&format!("its dtype is {other}"))),
        }
    }

    /// Classifies `M.weight_packed` of compressed-tensors.
    fn packed(&self, module: &str) -> Result<Found<'a>, Error> {
        if self.checkpoint.tensor(&format!("{module}{}", Format::CompressedTensors.global())).is_some() {
            return Ok(Found::Nvfp4(Format::CompressedTensors));
        }
        self.mxfp4(module)
    }

    /// Classifies packed values with one scale per 32.
    fn mxfp4(&self, module: &str) -> Result<Found<'a>, Error> {
        let other =
            || unreadable(&format!("the dtype is {} and there is no scale per {MX_BLOCK} values", self.tensor.dtype));
        let (name, scale) = self.scale(&[".scale", ".weight_scale"], module).map_err(|_| other())?;
        let values = if self.tensor.dtype == Dtype::F4 { 1 } else { 2 };
        let (&[lines, packed], Dtype::U8 | Dtype::F8_E8M0) = (self.tensor.shape, scale.dtype) else {
            return Err(other());
        };
        let length = packed.checked_mul(values).ok_or(Error::TooLarge)?;
        if scale.shape != [lines, length / MX_BLOCK] || !length.is_multiple_of(MX_BLOCK) {
            return Err(other());
        }
        let elements = Elements::Mxfp4 { codes: self.tensor.data, exponents: scale.data };
        Ok(self.alone(module, elements, [lines, length], Some(name)))
    }

    /// Returns the entry of one matrix `[N, K]`.
    fn alone(&self, module: &str, elements: Elements<'a>, stored: [usize; 2], scale: Option<String>) -> Found<'a> {
        let source = Source::new(elements, stored, false, Rows::all(stored[0]));
        let other_scales = [".input_scale", ".activation_scale", ".weight_shape"].map(|part| format!("{module}{part}"));
        Found::Weights(Stored {
            name: self.name,
            weights: vec![Weight { module: module.to_owned(), source }],
            plain: scale.is_none(),
            scales: scale.map_or_else(Vec::new, |scale| std::iter::once(scale).chain(other_scales).collect()),
            biases: None,
        })
    }

    /// Returns the first existing tensor among the suffixes `parts`.
    fn scale(&self, parts: &[&str], module: &str) -> Result<(String, Tensor<'a>), Error> {
        let found = parts.iter().find_map(|part| {
            let name = format!("{module}{part}");
            self.checkpoint.tensor(&name).map(|tensor| (name, tensor))
        });
        let remedy =
            format!("expected one of {}: download or export the model again, or exclude the tensor", parts.join(", "));
        found.ok_or(Error::Missing { name: "its scale".into(), remedy })
    }

    /// Returns the scales of a matrix; dimensions of size 1 may be omitted in their shape.
    fn scales(&self, tensor: Tensor<'a>, shape: &[usize], stored: &[usize]) -> Result<Scales<'a>, Error> {
        let &[lines, length] = stored else { unreachable!("a matrix") };
        let grid = match *shape {
            [] => [1, 1],
            [1] => [1, 1],
            [count] if count == lines => [lines, 1],
            [count] if count == length => [1, length],
            [a, b] => [a, b],
            _ => return Err(Error::Shape { got: shape.to_vec(), expected: format!("scales of a {stored:?} matrix") }),
        };
        Scales::new(tensor, grid, [lines, length], self.config.fp8_block())
    }

    /// Classifies all experts of a layer in floats or FP8, `[E, …]`.
    fn fused(&self, projection: &Projection<'_>) -> Result<Found<'a>, Error> {
        let &[experts, lines, length] = self.tensor.shape else { unreachable!("three dimensions") };
        let transposed = self.transposed(projection, [lines, length])?;
        let size = self.tensor.dtype.bitsize() / 8 * lines * length;
        let (mut scale_names, mut scale) = (Vec::new(), None);
        if self.tensor.dtype == Dtype::F8_E4M3 {
            let parts = ["_scale_inv", ".weight_scale_inv", "_weight_scale", ".weight_scale", "_scale", ".scale"];
            let (name, found) = self.scale(&parts, projection.module)?;
            let all = *found.shape.first().unwrap_or(&0) == experts || found.shape == [1] || found.shape.is_empty();
            if !all {
                return Err(Error::Shape { got: found.shape.to_vec(), expected: format!("[{experts}, …]") }.at(name));
            }
            scale_names = vec![name, format!("{}_input_scale", projection.module)];
            scale = Some(found);
        }
        let slice = |expert: usize| -> Result<Elements<'a>, Error> {
            let data = &self.tensor.data[expert * size..][..size];
            let part = Tensor { data, ..self.tensor };
            let Some(scale) = scale else { return Ok(Elements::Floats(Floats::of(part).expect("floats"))) };
            let shape = scale.shape.get(1..).unwrap_or_default();
            let scale_bytes = scale.data.len() / if scale.shape.first() == Some(&experts) { experts } else { 1 };
            let start = if scale_bytes == scale.data.len() { 0 } else { expert * scale_bytes };
            let mine = Tensor { data: &scale.data[start..][..scale_bytes], ..scale };
            Ok(Elements::Fp8 { codes: data, scales: self.scales(mine, shape, &[lines, length])? })
        };
        let plain = scale.is_none();
        self.apart(projection, experts, [lines, length], transposed, plain, scale_names, slice)
    }

    /// Classifies all experts of a layer in MXFP4, `[E, N, K/32, 16]`.
    fn fused_mxfp4(&self, projection: &Projection<'_>) -> Result<Found<'a>, Error> {
        let scales = format!("{}_scales", projection.module);
        let wrong = || unreadable(&format!("expected U8 [E, N, K/32, 16] and scales {scales} [E, N, K/32]"));
        let &[experts, lines, blocks, 16] = self.tensor.shape else { return Err(wrong()) };
        let exponents = self.checkpoint.tensor(&scales).ok_or_else(wrong)?;
        let types = (self.tensor.dtype, exponents.dtype);
        if exponents.shape != [experts, lines, blocks] || !matches!(types, (Dtype::U8, Dtype::U8 | Dtype::F8_E8M0)) {
            return Err(wrong());
        }
        let count = lines * blocks;
        let slice = |expert: usize| {
            Ok(Elements::Mxfp4 {
                codes: &self.tensor.data[expert * count * 16..][..count * 16],
                exponents: &exponents.data[expert * count..][..count],
            })
        };
        let scales = vec![scales];
        self.apart(projection, experts, [lines, blocks * MX_BLOCK], false, false, scales, slice)
    }

    /// Splits the experts of a tensor into weights with separate names.
    #[expect(clippy::too_many_arguments, reason = "the arguments describe one tensor")]
    fn apart(
        &self,
        projection: &Projection<'_>,
        experts: usize,
        stored: [usize; 2],
        transposed: bool,
        plain: bool,
        scales: Vec<String>,
        slice: impl Fn(usize) -> Result<Elements<'a>, Error>,
    ) -> Result<Found<'a>, Error> {
        let n = stored[usize::from(transposed)];
        let (before, names) = names_apart(projection);
        if !n.is_multiple_of(names.len()) {
            return Err(unreadable(&format!("{n} rows cannot be split into gate and up")));
        }
        let bias = [format!("{}_bias", projection.module), format!("{}.bias", projection.module)];
        let bias = bias.into_iter().find_map(|name| self.checkpoint.tensor(&name).map(|tensor| (name, tensor)));
        let interleaved = names.len() == 2 && self.interleaved(projection, bias.is_some());
        let rows = |part: usize| match interleaved {
            true => Rows { first: part, step: 2, count: n / 2 },
            false => Rows { first: part * (n / names.len()), step: 1, count: n / names.len() },
        };
        let (mut weights, mut parts) = (Vec::new(), Vec::new());
        for expert in 0..experts {
            let elements = slice(expert)?;
            for (part, name) in names.iter().enumerate() {
                let module = format!("{before}.{expert}.{name}");
                let rows = rows(part);
                parts.push((module.clone(), Rows { first: expert * n + rows.first, ..rows }));
                weights.push(Weight { module, source: Source::new(elements, stored, transposed, rows) });
            }
        }
        let biases = match bias {
            Some((name, tensor)) if tensor.shape == [experts, n] && tensor.dtype.bitsize() >= 8 => {
                Some(Biases { name, tensor, parts })
            }
            Some((name, tensor)) => {
                return Err(Error::Shape { got: tensor.shape.to_vec(), expected: format!("[{experts}, {n}]") }.at(name));
            }
            None => None,
        };
        Ok(Found::Weights(Stored { name: self.name, weights, plain, scales, biases }))
    }

    /// Whether rows of gate and up alternate, as in gpt-oss.
    fn interleaved(&self, projection: &Projection<'_>, has_bias: bool) -> bool {
        match self.config.model_type() {
            Some(model) => model.contains("gpt_oss"),
            // Without a configuration: only gpt-oss has these.
            None => has_bias || projection.part == "_blocks",
        }
    }

    /// Whether the experts are stored as `[E, K, N]`.
    fn transposed(&self, projection: &Projection<'_>, [a, b]: [usize; 2]) -> Result<bool, Error> {
        let hidden = self.config.number("hidden_size");
        let other = |names: &[&str]| {
            let before = projection.module.rsplit_once('.').map_or("", |(before, _)| before);
            let shapes = names.iter().filter_map(|name| {
                let tensor = self.checkpoint.tensor(&format!("{before}.{name}{}", projection.part))?;
                <[usize; 3]>::try_from(tensor.shape).ok()
            });
            shapes.map(|[_, a, b]| [a, b]).next()
        };
        const UP: [&str; 6] = ["gate_up_proj", "gate_and_up_proj", "w13", "input_linear", "up_proj", "w3"];
        const DOWN: [&str; 3] = ["down_proj", "w2", "output_linear"];
        // Sizes of gate_up and down, read as [K, N], as if both were stored transposed.
        let pair = match projection.role {
            Role::Down => other(&UP).map(|up| (up, [a, b])),
            _ => other(&DOWN).map(|down| ([a, b], down)),
        };
        let fused = projection.role == Role::GateUp || projection.role == Role::Down && other(&UP[..4]).is_some();
        if let (Some(([a, b], [c, d])), true) = (pair, fused) {
            let (transposed, straight) = (a == d && Some(b) == c.checked_mul(2), b == c && Some(a) == d.checked_mul(2));
            if transposed != straight {
                return Ok(transposed);
            }
        }
        // Compares both sizes with the model's hidden size.
        let of_k = match projection.role {
            Role::Down => [b, a],
            _ => [a, b],
        };
        match hidden {
            Some(hidden) if of_k[0] == hidden && of_k[1] != hidden => Ok(true),
            Some(hidden) if of_k[1] == hidden && of_k[0] != hidden => Ok(false),
            // A parameter without `.weight` is the right operand of its product, so it is transposed.
            Some(hidden) if of_k == [hidden; 2] => Ok(projection.part.is_empty()),
            _ => Err(unreadable(
                "cannot tell which dimension is K: neither the other projection nor hidden_size in \
                 config.json fits",
            )),
        }
    }
}
