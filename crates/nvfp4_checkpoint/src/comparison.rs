//! Compares the weights of two models number by number, whatever forms they are stored in, and all other tensors byte by
//! byte.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use rayon::prelude::*;

use super::convert::weights::{self, Readable};
use super::convert::{Config, Form};
use super::names::{layer_of, natural};
use super::source::Source;
use super::{Checkpoint, TensorFile};
use nvfp4_core::Error;

/// Sums over pairs of numbers: one of a reference, one of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Errors {
    /// Sum of the squared numbers of the reference.
    reference: f64,
    /// Sum of the squared numbers of the model.
    model: f64,
    /// Sum of the products.
    products: f64,
    /// Sum of the squared differences.
    differences: f64,
    /// Largest absolute difference, with its row-major index; the first one among equal differences.
    largest: f64,
    at: usize,
    /// Number of pairs in which a number is NaN or infinite. They are in no sum.
    not_finite: usize,
    /// Number of pairs.
    count: usize,
}

impl Errors {
    /// Compares two slices of equal length; `first` is the index of their first number.
    fn of(reference: &[f32], model: &[f32], first: usize) -> Self {
        let mut errors = Self { count: reference.len(), ..Self::default() };
        for (index, (&is, &got)) in reference.iter().zip(model).enumerate() {
            let (is, got) = (f64::from(is), f64::from(got));
            let difference = got - is;
            if !difference.is_finite() {
                errors.not_finite += 1;
                continue;
            }
            errors.reference += is * is;
            errors.model += got * got;
            errors.products += is * got;
            errors.differences += difference * difference;
            if difference.abs() > errors.largest {
                (errors.largest, errors.at) = (difference.abs(), first + index);
            }
        }
        errors
    }

    /// Joins the sums of two sets of pairs. The place of the largest difference stays meaningful within one matrix.
    #[must_use]
    pub fn join(self, other: Self) -> Self {
        let (largest, at) =
            if other.largest > self.largest { (other.largest, other.at) } else { (self.largest, self.at) };
        Self {
            reference: self.reference + other.reference,
            model: self.model + other.model,
            products: self.products + other.products,
            differences: self.differences + other.differences,
            largest,
            at,
            not_finite: self.not_finite + other.not_finite,
            count: self.count + other.count,
        }
    }

    /// Root-mean-square difference relative to the root-mean-square number of the reference. Infinite if only the
    /// reference is zero.
    pub fn relative_rms(self) -> f64 {
        if self.differences == 0.0 { 0.0 } else { f64::sqrt(self.differences / self.reference) }
    }

    /// Signal-to-noise ratio in decibels; infinite for equal numbers.
    pub fn snr_db(self) -> f64 {
        -20.0 * self.relative_rms().log10()
    }

    /// Cosine of the angle between both matrices as vectors; 1 for equal numbers, also if all are zero.
    pub fn cosine(self) -> f64 {
        if self.differences == 0.0 {
            return 1.0;
        }
        // Rounding could give a little more than 1.
        let size = f64::sqrt(self.reference) * f64::sqrt(self.model);
        if size == 0.0 { 0.0 } else { (self.products / size).clamp(-1.0, 1.0) }
    }

    /// Largest absolute difference.
    pub fn max_abs(self) -> f64 {
        self.largest
    }

    /// Number of pairs in which a number is NaN or infinite.
    pub fn not_finite(self) -> usize {
        self.not_finite
    }

    /// Number of pairs.
    pub fn count(self) -> usize {
        self.count
    }
}

/// A weight of both models, compared.
#[derive(Clone, Debug)]
pub struct ComparedWeight {
    /// Name of the module; experts that share a tensor have the names of separate experts.
    pub module: String,
    /// N and K.
    pub sizes: [usize; 2],
    /// Form in the reference and in the model.
    pub forms: [Form; 2],
    /// Errors.
    pub errors: Errors,
}

impl ComparedWeight {
    /// Whether the model stores the weight in another form than floats.
    pub fn is_quantized(&self) -> bool {
        self.forms[1] != Form::Floats
    }

    /// Whether all numbers are equal and finite.
    pub fn is_equal(&self) -> bool {
        self.errors.largest == 0.0 && self.errors.not_finite == 0
    }

    /// Name of the layer, such as `model.layers.3`; `None` outside of layers.
    pub fn layer(&self) -> Option<&str> {
        let (before, layer) = layer_of(&self.module)?;
        Some(&self.module[..before.len() + layer.to_string().len()])
    }

    /// Row and column of the largest difference.
    pub fn worst_place(&self) -> [usize; 2] {
        let k = self.sizes[1].max(1);
        [self.errors.at / k, self.errors.at % k]
    }
}

/// What differs in a tensor that has the same name in both models and is no weight in two forms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Difference {
    /// Types and shapes, of the reference and the model.
    Layout([String; 2]),
    /// Number of different bytes, and of all bytes.
    Bytes {
        /// Different bytes.
        different: usize,
        /// All bytes.
        all: usize,
    },
}

/// A comparison that is planned.
pub struct Comparison<'a> {
    models: [&'a Checkpoint; 2],
    /// Weights that both models have, by module.
    weights: BTreeMap<String, [Matrix<'a>; 2]>,
    /// Weights that only the reference has, and weights that only the model has.
    alone: [Vec<String>; 2],
    /// Tensors that only the reference has, and tensors that only the model has, without the compared weights' tensors.
    tensors_alone: [Vec<&'a str>; 2],
    /// Tensors that both models have and that belong to no weight.
    others: Vec<&'a str>,
}

/// A weight of one model.
#[derive(Clone, Copy)]
struct Matrix<'a> {
    source: Source<'a>,
    form: Form,
    file: &'a TensorFile,
}

impl<'a> Comparison<'a> {
    /// Finds the weights and tensors to compare. `chosen` returns `true` for the names of tensors, and of weights
    /// (`M.weight`), that are compared.
    ///
    /// # Errors
    /// Returns an error if a weight cannot be read, the sizes of a weight differ, or both models have no weight in common.
    pub fn new(reference: &'a Checkpoint, model: &'a Checkpoint, chosen: &dyn Fn(&str) -> bool) -> Result<Self, Error> {
        let models = [reference, model];
        let (mut matrices, mut belonging) = (Vec::new(), Vec::new());
        for checkpoint in models {
            let (of_modules, names) = matrices_of(checkpoint, chosen)?;
            matrices.push(of_modules);
            belonging.push(names);
        }
        let [of_model, of_reference] = [matrices.pop(), matrices.pop()].map(Option::unwrap_or_default);
        let (mut weights, mut alone) = (BTreeMap::new(), [Vec::new(), Vec::new()]);
        for (module, matrix) in &of_reference {
            let Some(other) = of_model.get(module) else {
                alone[0].push(module.clone());
                continue;
            };
            let [expected, got] = [matrix, other].map(|matrix| matrix.source.sizes());
            if expected != got {
                let what = format!("its sizes are {got:?}, but {expected:?} in {}", reference.path().display());
                return Err(Error::Invalid(what).at(super::place(model.path(), module)));
            }
            weights.insert(module.clone(), [*matrix, *other]);
        }
        alone[1].extend(of_model.keys().filter(|module| !of_reference.contains_key(*module)).cloned());
        if weights.is_empty() {
            let example = |names: &Vec<String>| names.first().cloned().unwrap_or_else(|| "none".into());
            let what = format!(
                "no weight has the same name in both models (first weights: {} and {}); give two forms of one model, and \
                 check --filter",
                example(&alone[0]),
                example(&alone[1])
            );
            return Err(Error::Invalid(what).at(model.path().display()));
        }
        let rest = |index: usize| -> BTreeSet<&'a str> {
            let names = models[index].names().filter(|name| !belonging[index].contains(*name) && chosen(name));
            names.collect()
        };
        let [of_reference, of_model] = [rest(0), rest(1)];
        let tensors_alone = [
            of_reference.difference(&of_model).copied().collect(),
            of_model.difference(&of_reference).copied().collect(),
        ];
        let others = of_reference.intersection(&of_model).copied().collect();
        alone.iter_mut().for_each(|names| names.sort_by_cached_key(|name| natural(name)));
        Ok(Self { models, weights, alone, tensors_alone, others })
    }

    /// Weights of only the reference, and of only the model, in natural order.
    pub fn weights_alone(&self) -> &[Vec<String>; 2] {
        &self.alone
    }

    /// Tensors of only the reference, and of only the model, that belong to no weight.
    pub fn tensors_alone(&self) -> &[Vec<&'a str>; 2] {
        &self.tensors_alone
    }

    /// Number of tensors that belong to no weight and are in both models.
    pub fn other_tensors(&self) -> usize {
        self.others.len()
    }

    /// Number of numbers in all weights, and of bytes in the other tensors: the units of progress.
    pub fn work(&self) -> usize {
        let numbers = self.weights.values().map(|[matrix, _]| matrix.source.sizes().iter().product::<usize>());
        let bytes = self.others.iter().filter_map(|name| self.models[0].tensor(name)).map(|tensor| tensor.data.len());
        numbers.chain(bytes).sum()
    }

    /// Compares all weights, in natural order. `done` receives completed units of [`Comparison::work`].
    ///
    /// # Errors
    /// Returns an error if a file changed meanwhile.
    pub fn weights(&self, done: &(dyn Fn(usize) + Sync)) -> Result<Vec<ComparedWeight>, Error> {
        let mut compared: Vec<_> = self
            .weights
            .iter()
            .map(|(module, matrices)| {
                let [reference, model] = matrices;
                let errors = compare(&reference.source, &model.source, done);
                matrices.iter().for_each(|matrix| matrix.file.release());
                let (sizes, forms) = (reference.source.sizes(), [reference.form, model.form]);
                ComparedWeight { module: module.clone(), sizes, forms, errors }
            })
            .collect();
        self.check_unchanged()?;
        compared.sort_by_cached_key(|weight| natural(&weight.module));
        Ok(compared)
    }

    /// Compares all other tensors; returns those that differ, in order.
    ///
    /// # Errors
    /// Returns an error if a file changed meanwhile.
    pub fn differences(&self, done: &(dyn Fn(usize) + Sync)) -> Result<Vec<(&'a str, Difference)>, Error> {
        let mut different = Vec::new();
        for &name in &self.others {
            let [Some(one), Some(other)] = self.models.map(|model| model.tensor(name)) else { continue };
            if (one.dtype, one.shape) != (other.dtype, other.shape) {
                let layouts = [one, other].map(|tensor| format!("{} {:?}", tensor.dtype, tensor.shape));
                different.push((name, Difference::Layout(layouts)));
            } else {
                let pairs = one.data.par_chunks(CHUNK).zip(other.data.par_chunks(CHUNK));
                let count = pairs.map(|(one, other)| match one == other {
                    true => 0,
                    false => one.iter().zip(other).filter(|(one, other)| one != other).count(),
                });
                let (count, all) = (count.sum::<usize>(), one.data.len());
                if count > 0 {
                    different.push((name, Difference::Bytes { different: count, all }));
                }
            }
            done(one.data.len());
            self.models.iter().for_each(|model| model.file_with(name).release());
        }
        self.check_unchanged()?;
        Ok(different)
    }

    fn check_unchanged(&self) -> Result<(), Error> {
        self.models.iter().try_for_each(|model| model.check_unchanged())
    }
}

/// Bytes compared at once.
const CHUNK: usize = 1 << 20;

/// Weights of a model by module.
type Matrices<'a> = BTreeMap<String, Matrix<'a>>;

/// Returns the chosen weights of a model by module, and the names of all tensors that belong to weights.
fn matrices_of<'a>(
    checkpoint: &'a Checkpoint,
    chosen: &dyn Fn(&str) -> bool,
) -> Result<(Matrices<'a>, BTreeSet<String>), Error> {
    let (config, _) = Config::and_others(checkpoint)?;
    let (mut matrices, mut belonging) = (BTreeMap::new(), BTreeSet::new());
    for (name, Readable { form, stored, .. }) in weights::all(checkpoint, &config, true)? {
        let file = checkpoint.file_with(name);
        for weight in stored.weights {
            if !chosen(name) && !chosen(&format!("{}.weight", weight.module)) {
                continue;
            }
            let matrix = Matrix { source: weight.source, form, file };
            if matrices.insert(weight.module.clone(), matrix).is_some() {
                let what = "the model has this weight in two forms; remove one of them";
                return Err(Error::Invalid(what.into()).at(super::place(checkpoint.path(), &weight.module)));
            }
        }
        belonging.insert(name.to_owned());
        belonging.extend(stored.scales);
    }
    Ok((matrices, belonging))
}

/// Compares two matrices of equal sizes.
fn compare(reference: &Source<'_>, model: &Source<'_>, done: &(dyn Fn(usize) + Sync)) -> Errors {
    let k = reference.sizes()[1];
    let chunks = reference.chunks().map_init(
        || (Vec::new(), Vec::new()),
        |(is, got), rows: Range<usize>| {
            let errors =
                Errors::of(reference.decoded(rows.clone(), is), model.decoded(rows.clone(), got), rows.start * k);
            done(rows.len() * k);
            errors
        },
    );
    // Sums are joined in order, so they do not depend on the number of threads.
    let chunks: Vec<Errors> = chunks.collect();
    chunks.into_iter().fold(Errors::default(), Errors::join)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_follow_their_definitions() {
        let errors = Errors::of(&[3.0, 4.0, 0.0], &[3.0, 3.0, 1.0], 5);
        assert_eq!((errors.max_abs(), errors.at, errors.count()), (1.0, 6, 3));
        assert!((errors.relative_rms() - f64::sqrt(2.0 / 25.0)).abs() < 1e-15);
        assert!((errors.cosine() - 21.0 / f64::sqrt(25.0 * 19.0)).abs() < 1e-15);
        assert_eq!(Errors::of(&[1.0], &[1.0], 0).snr_db(), f64::INFINITY);
        assert_eq!(Errors::of(&[0.0], &[1.0], 0).relative_rms(), f64::INFINITY);
        assert_eq!(Errors::of(&[f32::NAN, 1.0], &[0.0, 1.0], 0).not_finite(), 1);
    }
}
