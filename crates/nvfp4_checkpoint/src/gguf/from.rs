//! From GGUF to safetensors.

use std::path::Path;

use super::names::{ARCHITECTURES, Module};
use super::read::{GgufFile, GgufTensor, Kind, SUPERBLOCK, SUPERBLOCK_BYTES};
use super::{permuted_head, row_of_head, unpack_row};
use crate::write::{TensorWriter, refuse_input};
use crate::{Dtype, Format, check_file};
use nvfp4_core::Error;
use nvfp4_core::format::BLOCK;

/// A tensor of the GGUF file whose output names are known.
struct Known<'f> {
    gguf: &'f str,
    tensor: &'f GgufTensor,
    module: Module,
    /// Part after the module: `.weight` or `.bias`.
    part: &'static str,
}

/// A conversion of a GGUF file that is planned and ready to write.
pub struct FromGguf {
    file: GgufFile,
    format: Format,
}

impl FromGguf {
    /// Opens a GGUF file and checks that all its tensors can be converted.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, its architecture or a tensor's name is unknown, or a tensor has a type
    /// other than F32, F16, BF16 and NVFP4.
    pub fn open(path: &Path, format: Format) -> Result<Self, Error> {
        let converted = Self { file: GgufFile::open(path)?, format };
        check_architecture(&converted.file)?;
        if !converted.known()?.iter().any(|known| known.tensor.kind == Kind::Nvfp4) {
            let what = "the file has no NVFP4 tensor (GGUF type 40); convert the original model with `nvfp4 quantize`";
            return Err(Error::Invalid(what.into()).at(path.display()));
        }
        Ok(converted)
    }

    /// Tensors with their names; scales belong to their weight.
    fn known(&self) -> Result<Vec<Known<'_>>, Error> {
        let mut all = Vec::new();
        let is_scale = |name: &str| {
            let base = name.strip_suffix(".input_scale").or_else(|| name.strip_suffix(".scale"));
            base.and_then(|base| self.file.tensors().get(&format!("{base}.weight")))
                .is_some_and(|weight| weight.kind == Kind::Nvfp4)
        };
        for (name, tensor) in self.file.tensors().iter().filter(|(name, _)| !is_scale(name)) {
            let at = |what: String| Err(Error::Invalid(what).at(self.place(name)));
            let mut parts = [".weight", ".bias"].into_iter();
            let found = parts.find_map(|part| Some((Module::of(name.strip_suffix(part)?)?, part)));
            let Some((module, part)) = found else {
                return at("the name of this tensor is unknown, so the output would be incomplete".into());
            };
            if let Kind::Other(kind) = tensor.kind {
                return at(format!(
                    "its GGUF type is {kind}; only F32, F16, BF16 and NVFP4 (40) are converted, start from the original model"
                ));
            }
            let experts = matches!(module, Module::Experts(..));
            let dimensions = tensor.shape.len();
            if experts && dimensions < 2 || tensor.kind == Kind::Nvfp4 && dimensions != 2 + usize::from(experts) {
                return at(format!("its shape {:?} does not fit this weight", tensor.shape));
            }
            all.push(Known { gguf: name, tensor, module, part });
        }
        Ok(all)
    }

    fn place(&self, name: &str) -> String {
        format!("{}: {name}", self.file.mapped().path().display())
    }

    /// Names of the modules that are NVFP4.
    ///
    /// # Errors
    /// Never after [`FromGguf::open`].
    pub fn modules(&self) -> Result<Vec<String>, Error> {
        let known = self.known()?;
        let nvfp4 = known.iter().filter(|known| known.tensor.kind == Kind::Nvfp4);
        Ok(nvfp4.flat_map(|known| (0..known.experts()).map(|expert| known.module.name(expert))).collect())
    }

    /// Number of NVFP4 tensors.
    pub fn nvfp4_tensors(&self) -> usize {
        self.file.tensors().values().filter(|tensor| tensor.kind == Kind::Nvfp4).count()
    }

    /// Total bytes of the tensors.
    pub fn bytes(&self) -> usize {
        self.file.tensors().values().map(|tensor| self.file.data(tensor).len()).sum()
    }

    /// Writes all tensors to one safetensors file. `done` receives the number of bytes read.
    ///
    /// # Errors
    /// Returns an error if `out` cannot be written, a block scale is negative, a global scale is unusable, or the input
    /// changes meanwhile.
    pub fn write(&self, out: &Path, mut done: impl FnMut(usize)) -> Result<(), Error> {
        refuse_input(out, [self.file.mapped().path()])?;
        check_file(out)?;
        let known = self.known()?;
        let mut layout = Vec::new();
        for known in &known {
            layout.extend(self.layout(known)?);
        }
        let mut writer = TensorWriter::create(out, None, layout)?;
        for known in &known {
            match known.tensor.kind {
                Kind::Nvfp4 => {
                    self.write_nvfp4(known, &mut writer).map_err(|error| error.at(self.place(known.gguf)))?
                }
                _ => self.write_floats(known, &mut writer)?,
            }
            done(self.file.data(known.tensor).len());
            self.file.mapped().release();
        }
        self.file.mapped().check_unchanged()?;
        writer.finish()
    }

    /// Returns a scale of each expert, or of the only matrix; `None` if the file has none.
    fn scales(&self, known: &Known<'_>, part: &str) -> Result<Option<Vec<f32>>, Error> {
        let name = format!("{}{part}", known.gguf.trim_end_matches(".weight"));
        let Some(tensor) = self.file.tensors().get(&name) else { return Ok(None) };
        let at = |error: Error| error.at(self.place(&name));
        let scales = self.file.vector(&name).unwrap_or_default();
        let experts = known.experts();
        if ![1, experts].contains(&scales.len()) || scales.is_empty() {
            return Err(at(Error::Shape { got: tensor.shape.clone(), expected: format!("F32 [1] or [{experts}]") }));
        }
        let spread: Vec<f32> = (0..experts).map(|expert| scales[expert.min(scales.len() - 1)]).collect();
        match spread.iter().find(|scale| !(scale.is_finite() && **scale > 0.0 && scale.recip().is_finite())) {
            Some(&value) => Err(at(Error::GlobalScale { value })),
            None => Ok(Some(spread)),
        }
    }

    fn layout(&self, known: &Known<'_>) -> Result<Vec<(String, Dtype, Vec<usize>)>, Error> {
        let Known { tensor, module, part, .. } = known;
        let shape = known.shape();
        let Kind::Floats(dtype) = tensor.kind else {
            let [n, k] = [shape[0], shape[1]];
            let scalar = match self.format {
                Format::ModelOpt => vec![],
                Format::CompressedTensors => vec![1],
            };
            let has_input = self.scales(known, ".input_scale")?.is_some();
            let of_expert = |expert: usize| {
                let name = module.name(expert);
                let named = |suffix: &str| format!("{name}{suffix}");
                let mut layout = vec![
                    (named(self.format.values()), Dtype::U8, vec![n, k / 2]),
                    (named(self.format.scales()), Dtype::F8_E4M3, vec![n, k / BLOCK]),
                    (named(self.format.global()), Dtype::F32, scalar.clone()),
                ];
                if has_input {
                    layout.push((named(self.format.input()), Dtype::F32, scalar.clone()));
                }
                layout
            };
            return Ok((0..known.experts()).flat_map(of_expert).collect());
        };
        Ok((0..known.experts())
            .map(|expert| (format!("{}{part}", module.name(expert)), dtype, shape.clone()))
            .collect())
    }

    fn write_floats(&self, known: &Known<'_>, writer: &mut TensorWriter) -> Result<(), Error> {
        let (data, experts) = (self.file.data(known.tensor), known.experts());
        let rows = known.shape().first().copied().unwrap_or(1).max(1);
        for expert in 0..experts {
            let of_expert = &data[expert * data.len() / experts..(expert + 1) * data.len() / experts];
            let name = format!("{}{}", known.module.name(expert), known.part);
            match permuted_head(&self.file, known.gguf, rows) {
                None => writer.write(&name, of_expert)?,
                Some(head) => {
                    let size = of_expert.len() / rows;
                    let mut ordered = vec![0; of_expert.len()];
                    for (row, bytes) in of_expert.chunks_exact(size).enumerate() {
                        ordered[row_of_head(row, head) * size..][..size].copy_from_slice(bytes);
                    }
                    writer.write(&name, &ordered)?;
                }
            }
        }
        Ok(())
    }

    fn write_nvfp4(&self, known: &Known<'_>, writer: &mut TensorWriter) -> Result<(), Error> {
        let shape = known.shape();
        let ([n, k], experts) = ([shape[0], shape[1]], known.experts());
        let row_bytes = k / SUPERBLOCK * SUPERBLOCK_BYTES;
        let head = permuted_head(&self.file, known.gguf, n);
        let (globals, inputs) = (self.scales(known, ".scale")?, self.scales(known, ".input_scale")?);
        let stored = |factor: f32| match self.format {
            Format::ModelOpt => factor.to_le_bytes(),
            Format::CompressedTensors => factor.recip().to_le_bytes(),
        };
        let data = self.file.data(known.tensor);
        let (mut codes, mut scales) = (vec![0; n * k / 2], vec![0; n * k / BLOCK]);
        for expert in 0..experts {
            let name = known.module.name(expert);
            for (index, row) in data[expert * n * row_bytes..][..n * row_bytes].chunks_exact(row_bytes).enumerate() {
                let row_at = head.map_or(index, |head| row_of_head(index, head));
                let (codes, scales) =
                    (&mut codes[row_at * k / 2..][..k / 2], &mut scales[row_at * k / BLOCK..][..k / BLOCK]);
                if let Some(block) = unpack_row(row, codes, scales) {
                    let what =
                        format!("row {index}, block {block}: a scale has its sign bit set; export the model again");
                    return Err(Error::Invalid(what));
                }
            }
            writer.write(&format!("{name}{}", self.format.values()), &codes)?;
            writer.write(&format!("{name}{}", self.format.scales()), &scales)?;
            let global = globals.as_ref().map_or(1.0, |globals| globals[expert]);
            writer.write(&format!("{name}{}", self.format.global()), &stored(global))?;
            if let Some(inputs) = &inputs {
                writer.write(&format!("{name}{}", self.format.input()), &stored(inputs[expert]))?;
            }
        }
        Ok(())
    }
}

impl Known<'_> {
    /// Number of experts; 1 for one module.
    fn experts(&self) -> usize {
        match self.module {
            Module::One(_) => 1,
            Module::Experts(..) => self.tensor.shape[0],
        }
    }

    /// Shape of the output: without the experts.
    fn shape(&self) -> Vec<usize> {
        match self.module {
            Module::One(_) => self.tensor.shape.clone(),
            Module::Experts(..) => self.tensor.shape[1..].to_vec(),
        }
    }
}

/// Refuses files of architectures whose names or orders of rows are not known.
pub(super) fn check_architecture(file: &GgufFile) -> Result<(), Error> {
    let architecture = file.text("general.architecture").unwrap_or_default();
    if ARCHITECTURES.contains(&architecture) {
        return Ok(());
    }
    let what = format!(
        "general.architecture is {architecture:?}; the names of tensors are known for {}",
        ARCHITECTURES.join(", ")
    );
    Err(Error::NotComputed(what).at(file.mapped().path().display()))
}
