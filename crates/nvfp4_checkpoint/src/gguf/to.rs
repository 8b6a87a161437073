//! From safetensors to GGUF, with the metadata and the other tensors of a GGUF file of the same model.

use std::collections::BTreeMap;
use std::path::Path;

use super::from::check_architecture;
use super::names::Module;
use super::read::{GgufFile, GgufTensor, Kind, SUPERBLOCK, SUPERBLOCK_BYTES};
use super::{SCALES, pack_row, permuted_head, row_of_head};
use crate::convert::{Config, weights};
use crate::partial::PartialFile;
use crate::source::Source;
use crate::write::refuse_input;
use crate::{Checkpoint, Dtype, check_file, place};
use nvfp4_core::Error;

/// `general.file_type` of a file whose matrices are NVFP4 (`LlamaFileType.MOSTLY_NVFP4` of the package `gguf`).
const MOSTLY_NVFP4: u32 = 39;

/// Version of the written files.
const VERSION: u32 = 3;

/// A conversion to GGUF that is planned and ready to write.
pub struct ToGguf<'a> {
    checkpoint: &'a Checkpoint,
    template: GgufFile,
    /// NVFP4 matrices by the tensor of the template that they replace: one, or one per expert.
    replaced: BTreeMap<String, Vec<(String, Source<'a>)>>,
    /// NVFP4 weights whose K is not a multiple of 64; the template's tensors stay.
    left: Vec<String>,
    input_scales: usize,
}

impl<'a> ToGguf<'a> {
    /// Finds the tensors of the template, a GGUF file of the same model, that NVFP4 weights replace.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read, the template's architecture is unknown, a weight has no tensor in the
    /// template or other sizes there, or only a part of the experts of a layer is NVFP4.
    pub fn new(checkpoint: &'a Checkpoint, template: &Path) -> Result<Self, Error> {
        let template = GgufFile::open(template)?;
        check_architecture(&template)?;
        let (config, _) = Config::and_others(checkpoint)?;
        let (mut sources, mut input_scales) = (BTreeMap::new(), 0);
        for readable in
            weights::all(checkpoint, &config, false)?.into_values().filter(|readable| readable.form.is_nvfp4())
        {
            input_scales += readable.stored.scales.iter().filter(|name| name.contains("input")).count();
            if let Some(name) = readable.stored.scales.iter().find(|name| name.ends_with(weights::PRE_QUANT_SCALE)) {
                let what = "GGUF has no pre_quant_scale (NVFP4_AWQ); `nvfp4 dequantize` multiplies it into the weight";
                return Err(Error::NotComputed(what.into()).at(checkpoint.place(name)));
            }
            sources.extend(readable.stored.weights.into_iter().map(|weight| (weight.module, weight.source)));
        }
        if sources.is_empty() {
            let what = "the model has no NVFP4 weight; quantize it with `nvfp4 quantize`";
            return Err(Error::Invalid(what.into()).at(checkpoint.path().display()));
        }
        let (mut replaced, mut left) = (BTreeMap::new(), Vec::new());
        for (name, tensor) in template.tensors() {
            let Some(module) = name.strip_suffix(".weight").and_then(Module::of) else { continue };
            let experts = if let Module::Experts(..) = module { tensor.shape.first().copied().unwrap_or(0) } else { 1 };
            let names = (0..experts).map(|expert| module.name(expert));
            let matrices: Vec<_> = names.filter_map(|name| sources.remove_entry(&name)).collect();
            let at = |what: String| Error::Invalid(what).at(place(template.mapped().path(), name));
            if matrices.is_empty() {
                continue;
            }
            let expected = tensor.shape.get(tensor.shape.len().saturating_sub(2)..).unwrap_or_default();
            if matrices.len() != experts {
                return Err(at(format!("{} of its {experts} experts are NVFP4; all or none must be", matrices.len())));
            }
            if let Some((module, source)) = matrices.iter().find(|(_, source)| source.sizes() != expected) {
                return Err(at(format!(
                    "the template's matrix is {expected:?}, but {module} is {:?}; use a template of the same model",
                    source.sizes()
                )));
            }
            if expected[1].is_multiple_of(SUPERBLOCK) {
                replaced.insert(name.clone(), matrices);
            } else {
                left.push(name.clone());
            }
        }
        if let Some(first) = sources.keys().next() {
            let (count, path) = (sources.len(), template.mapped().path().display());
            let what = format!("{count} weights have no tensor in {path}; give a GGUF file of the same model");
            return Err(Error::Invalid(what).at(place(checkpoint.path(), first)));
        }
        Ok(Self { checkpoint, template, replaced, left, input_scales })
    }

    /// Number of NVFP4 matrices that are written.
    pub fn converted(&self) -> usize {
        self.replaced.values().map(Vec::len).sum()
    }

    /// Names of the modules that are written as NVFP4.
    pub fn modules(&self) -> Vec<String> {
        self.replaced.values().flatten().map(|(module, _)| module.clone()).collect()
    }

    /// Number of tensors that are copied from the template.
    pub fn copied(&self) -> usize {
        self.layout().iter().filter(|new| matches!(new.content, Content::Copied(_))).count()
    }

    /// Notes for the user.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.input_scales > 0 {
            let count = self.input_scales;
            notes.push(format!(
                "{count} input scales are not written: llama.cpp quantizes tokens with scales of its own"
            ));
        }
        if let Some(first) = self.left.first() {
            let count = self.left.len();
            notes.push(format!(
                "{count} tensors of the template stay, because their K is not a multiple of 64: {first} …"
            ));
        }
        notes
    }

    /// Bytes of the tensors that are written.
    pub fn bytes(&self) -> usize {
        self.layout().iter().map(|new| new.bytes).sum()
    }

    /// Tensors of the output, in the order of the file.
    fn layout(&self) -> Vec<New<'_>> {
        let mut layout = Vec::new();
        for (name, tensor) in self.template.tensors() {
            let base = name.strip_suffix(".scale").or_else(|| name.strip_suffix(".input_scale"));
            if base.is_some_and(|base| self.replaced.contains_key(&format!("{base}.weight"))) {
                continue;
            }
            let shape = tensor.shape.clone();
            let Some(matrices) = self.replaced.get(name) else {
                let bytes = self.template.data(tensor).len();
                let content = Content::Copied(tensor);
                layout.push(New { name: name.clone(), kind: tensor.kind, shape, bytes, content });
                continue;
            };
            let bytes = shape.iter().product::<usize>() / SUPERBLOCK * SUPERBLOCK_BYTES;
            layout.push(New {
                name: name.clone(),
                kind: Kind::Nvfp4,
                shape,
                bytes,
                content: Content::Matrices(matrices),
            });
            let (scale, count) = (name.replace(".weight", ".scale"), matrices.len());
            let (kind, content) = (Kind::Floats(Dtype::F32), Content::Globals(matrices));
            layout.push(New { name: scale, kind, shape: vec![count], bytes: 4 * count, content });
        }
        layout
    }

    /// Writes the file. `done` receives the number of bytes written.
    ///
    /// # Errors
    /// Returns an error if `out` cannot be written, is an input, or an input changes meanwhile.
    pub fn write(&self, out: &Path, mut done: impl FnMut(usize)) -> Result<(), Error> {
        refuse_input(out, self.checkpoint.paths().chain([self.template.mapped().path()]))?;
        check_file(out)?;
        let layout = self.layout();
        let alignment = self.template.alignment();
        let (header, places) = self.header(&layout);
        let mut file = PartialFile::create(out)?;
        file.write(|file| std::io::Write::write_all(file, &header))?;
        for (new, place) in layout.iter().zip(&places) {
            let start = header.len() as u64 + place;
            match &new.content {
                Content::Copied(tensor) => {
                    for (index, bytes) in self.template.data(tensor).chunks(AT_ONCE).enumerate() {
                        file.write_at(bytes, start + (index * AT_ONCE) as u64)?;
                    }
                }
                Content::Globals(matrices) => {
                    let globals = matrices.iter().filter_map(|(_, source)| Some(source.nvfp4_global()?.to_le_bytes()));
                    file.write_at(&globals.flatten().collect::<Vec<u8>>(), start)?;
                }
                Content::Matrices(matrices) => self.write_matrices(&new.name, matrices, &file, start)?,
            }
            done(new.bytes);
            self.template.mapped().release();
            self.checkpoint.files().iter().for_each(crate::TensorFile::release);
        }
        // The end of the last tensor is padded like the others.
        let end = layout.last().zip(places.last()).map_or(0, |(new, place)| place + new.bytes as u64);
        let length = header.len() as u64 + end.next_multiple_of(alignment as u64);
        file.write(|file| file.set_len(length))?;
        self.template.mapped().check_unchanged()?;
        self.checkpoint.check_unchanged()?;
        file.finish()
    }

    /// Returns the header with padding, and the place of each tensor after it.
    fn header(&self, layout: &[New<'_>]) -> (Vec<u8>, Vec<u64>) {
        let alignment = self.template.alignment();
        let (metadata, entries) = self.template.metadata(MOSTLY_NVFP4);
        let mut header = [&b"GGUF"[..], &VERSION.to_le_bytes()].concat();
        header.extend((layout.len() as u64).to_le_bytes());
        header.extend(entries.to_le_bytes());
        header.extend(metadata);
        let (mut places, mut end) = (Vec::new(), 0u64);
        for new in layout {
            header.extend((new.name.len() as u64).to_le_bytes());
            header.extend(new.name.as_bytes());
            header.extend((new.shape.len() as u32).to_le_bytes());
            header.extend(new.shape.iter().rev().flat_map(|size| (*size as u64).to_le_bytes()));
            header.extend(new.kind.number().to_le_bytes());
            header.extend(end.to_le_bytes());
            places.push(end);
            end = (end + new.bytes as u64).next_multiple_of(alignment as u64);
        }
        header.resize(header.len().next_multiple_of(alignment), 0);
        (header, places)
    }

    fn write_matrices(
        &self,
        name: &str,
        matrices: &[(String, Source<'a>)],
        file: &PartialFile,
        start: u64,
    ) -> Result<(), Error> {
        let mut at = start;
        for (_, source) in matrices {
            let [n, k] = source.sizes();
            let (codes, scales, _) = source.nvfp4().expect("`new` keeps NVFP4 weights alone");
            let head = permuted_head(&self.template, name, n);
            let row_bytes = k / SUPERBLOCK * SUPERBLOCK_BYTES;
            let mut packed = vec![0; n * row_bytes];
            for (index, row) in packed.chunks_exact_mut(row_bytes).enumerate() {
                let from = head.map_or(index, |head| row_of_head(index, head));
                let scales_of_row = k / SUPERBLOCK * SCALES;
                pack_row(&codes[from * k / 2..][..k / 2], &scales[from * scales_of_row..][..scales_of_row], row);
            }
            file.write_at(&packed, at)?;
            at += packed.len() as u64;
        }
        Ok(())
    }
}

/// Bytes copied at once.
const AT_ONCE: usize = 16 << 20;

/// A tensor of the output.
struct New<'t> {
    name: String,
    kind: Kind,
    shape: Vec<usize>,
    bytes: usize,
    content: Content<'t>,
}

/// Where the bytes of a tensor come from.
enum Content<'t> {
    /// The tensor of the template.
    Copied(&'t GgufTensor),
    /// NVFP4 matrices.
    Matrices(&'t [(String, Source<'t>)]),
    /// Global scales of the matrices.
    Globals(&'t [(String, Source<'t>)]),
}
