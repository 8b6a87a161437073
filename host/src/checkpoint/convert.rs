//! A model in f32, f16 or bf16 becomes one in NVFP4: chosen weights quantised, everything else copied bit for bit.
//!
//! All names, types and shapes of the result are known before the first number is read, so headers are written first
//! and then tensor after tensor: memory holds one quantised tensor at a time.

use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::path::Path;

use super::file::{Tensor, TensorFile};
use super::floats::{self, Floats, Loss};
use super::names::merged_with;
use super::partial::PartialFolder;
use super::write::{TensorWriter, refuse_input};
use super::{Checkpoint, Dtype, Format, INDEX_NAME, place};
use crate::error::Error;
use crate::format::{BLOCK, Matrix};
use crate::problem::check_weight_size;
use crate::quantize::global_scale_for;

/// How the name of a weight ends; a module's name is what stands before.
const WEIGHT: &str = ".weight";

/// A conversion that was checked and can begin.
#[derive(Debug)]
pub struct Conversion<'a> {
    checkpoint: &'a Checkpoint,
    format: Format,
    /// The weights to quantise, by name.
    chosen: BTreeMap<&'a str, Tensor<'a>>,
}

/// Name, type and shape of a tensor.
type TensorLayout = (String, Dtype, Vec<usize>);

/// A tensor that was written.
#[derive(Debug)]
pub struct Written<'a> {
    /// Its name in the input.
    pub name: &'a str,
    /// Its bytes there.
    pub bytes: usize,
    /// N and K, and what quantising cost it; `None` if it was copied.
    pub quantised: Option<([usize; 2], Loss)>,
}

impl<'a> Conversion<'a> {
    /// Chooses the two-dimensional f32, f16 and bf16 tensors whose name `include` accepts, and checks their sizes.
    ///
    /// # Errors
    /// If there are none, one has a K that is no multiple of 16, an N that is no multiple of 8, or a name that does not
    /// end in `.weight`.
    pub fn new(checkpoint: &'a Checkpoint, format: Format, include: impl Fn(&str) -> bool) -> Result<Self, Error> {
        let mut chosen = BTreeMap::new();
        for (name, tensor) in checkpoint.files().iter().flat_map(TensorFile::tensors) {
            let [n, k] = *tensor.shape else { continue };
            if floats::DTYPES.contains(&tensor.dtype) && include(name) {
                let named = || Error::Invalid("its name does not end in .weight; narrow what is included".into());
                let checked = check_weight_size(n, k).and(module(name).map(drop).ok_or_else(named));
                checked.map_err(|error| error.at(checkpoint.place(name)))?;
                chosen.insert(name, tensor);
            }
        }
        if chosen.is_empty() {
            let what = "no two-dimensional f32, f16 or bf16 tensor is included, so nothing would be quantised";
            return Err(Error::Invalid(what.into()).at(checkpoint.path().display()));
        }
        Ok(Self { checkpoint, format, chosen })
    }

    /// Bytes of all tensors that will be read.
    pub fn bytes(&self) -> usize {
        self.checkpoint.files().iter().flat_map(TensorFile::tensors).map(|(_, tensor)| tensor.data.len()).sum()
    }

    /// Writes the model: a file if a file was opened, else a folder of files of the same names with their index. `done` is
    /// called after each tensor. Until all is written nothing is at `out`, or what was there before.
    ///
    /// # Errors
    /// If `out` cannot be written, is the input, is a folder with something in it, or a chosen tensor holds NaN or an
    /// infinity.
    pub fn write(&self, out: &Path, mut done: impl FnMut(Written<'a>)) -> Result<(), Error> {
        refuse_input(out, self.checkpoint.paths())?;
        if let [file] = self.checkpoint.files()
            && file.path() == self.checkpoint.path()
        {
            let create = |metadata, layout| TensorWriter::create(out, metadata, layout);
            return self.write_file(file, create, &mut done).map(drop);
        }
        let mut folder = PartialFolder::create(out)?;
        let mut weight_map = BTreeMap::new();
        let mut total_size = 0;
        for file in self.checkpoint.files() {
            let name = Path::new(file.path().file_name().expect("a file was opened"));
            let create = |metadata, layout| TensorWriter::create_in(&mut folder, name, metadata, layout);
            for (tensor, bytes) in self.write_file(file, create, &mut done)? {
                weight_map.insert(tensor, name.display().to_string());
                total_size += bytes;
            }
        }
        if self.checkpoint.files().len() > 1 {
            let index = serde_json::json!({"metadata": {"total_size": total_size}, "weight_map": weight_map});
            let mut file = folder.create_file(Path::new(INDEX_NAME))?;
            file.write(|file| writeln!(file, "{index:#}"))?;
            file.finish()?;
        }
        folder.finish()
    }

    /// Writes one file; returns the names and bytes of the tensors in it.
    fn write_file(
        &self,
        file: &'a TensorFile,
        create: impl FnOnce(Option<HashMap<String, String>>, Vec<TensorLayout>) -> Result<TensorWriter, Error>,
        done: &mut impl FnMut(Written<'a>),
    ) -> Result<Vec<(String, usize)>, Error> {
        let mut layout = Vec::new();
        for (name, tensor) in file.tensors() {
            match self.chosen.get(name).and_then(|_| module(name)) {
                Some(module) => layout.extend(quantised_layout(self.format, module, tensor.shape)),
                None => layout.push((name.to_owned(), tensor.dtype, tensor.shape.to_vec())),
            }
        }
        let mut writer = create(file.metadata().cloned(), layout)?;
        let contents = writer.missing().map(|(name, bytes)| (name.to_owned(), bytes)).collect();
        for (name, tensor) in file.tensors() {
            let quantised = match self.chosen.get(name).and_then(|_| module(name)) {
                Some(module) => {
                    let result = self.quantize(module, tensor).map_err(|error| error.at(place(file.path(), name)));
                    let (matrix, stored, loss) = result?;
                    for (suffix, bytes) in [
                        (self.format.values(), matrix.values()),
                        (self.format.scales(), matrix.scales()),
                        (self.format.global(), &stored.to_le_bytes()),
                    ] {
                        writer.write(&format!("{module}{suffix}"), bytes)?;
                    }
                    Some(([matrix.rows(), matrix.k()], loss))
                }
                None => {
                    writer.write(name, tensor.data)?;
                    None
                }
            };
            file.release();
            done(Written { name, bytes: tensor.data.len(), quantised });
        }
        writer.finish()?;
        Ok(contents)
    }

    /// The quantised weight, its global scale as the format stores it, and the loss.
    fn quantize(&self, module: &str, tensor: Tensor<'_>) -> Result<(Matrix<'static>, f32, Loss), Error> {
        let numbers = Floats::of(tensor).expect("tensors of numbers were chosen");
        let &[n, k] = tensor.shape else { unreachable!("two-dimensional tensors were chosen") };
        let mut amax = numbers.amax()?;
        for partner in merged_with(module).filter_map(|name| self.chosen.get(&format!("{name}{WEIGHT}")[..])) {
            // A partner that cannot be quantised is refused in its own turn.
            let other = Floats::of(*partner).expect("tensors of numbers were chosen").amax();
            amax = other.map_or(amax, |other| amax.max(other));
        }
        let global = global_scale_for(amax);
        let stored = match self.format {
            Format::ModelOpt => global,
            Format::CompressedTensors => global.recip(),
        };
        // What a reader will make of it: the block scales are chosen for that.
        let matrix = numbers.quantize_rows(0..n, k, self.format.factor(stored)?)?;
        let loss = numbers.loss(&matrix);
        Ok((matrix, stored, loss))
    }
}

/// The module that a weight belongs to.
fn module(name: &str) -> Option<&str> {
    name.strip_suffix(WEIGHT)
}

/// Names, types and shapes of the parts of a quantised weight.
fn quantised_layout(format: Format, module: &str, shape: &[usize]) -> [(String, Dtype, Vec<usize>); 3] {
    let &[n, k] = shape else { unreachable!("two-dimensional tensors were chosen") };
    let scalar = match format {
        Format::ModelOpt => vec![],
        Format::CompressedTensors => vec![1],
    };
    [
        (format!("{module}{}", format.values()), Dtype::U8, vec![n, k / 2]),
        (format!("{module}{}", format.scales()), Dtype::F8_E4M3, vec![n, k / BLOCK]),
        (format!("{module}{}", format.global()), Dtype::F32, scalar),
    ]
}
