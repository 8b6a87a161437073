//! Transforms of the tokens of a weight, as models store them: factors of the columns (`pre_quant_scale` of ModelOpt's
//! NVFP4_AWQ), or a Hadamard transform of blocks of columns (`transform_config` of compressed-tensors, which MR-GPTQ
//! models have).

use std::collections::BTreeMap;

use super::Checkpoint;
use super::block::{Block, Kind};
use super::convert::weights::PRE_QUANT_SCALE;
use super::model_config::{InputTransform, ModelConfig};
use super::names::Role;
use nvfp4_core::Error;
use nvfp4_core::moe::{ExpertTransforms, MoeExpert};
use nvfp4_core::transform::{TokenTransform, sylvester_element};

/// Transforms that were read, by the name of their matrix and whether it is transposed.
pub(super) type Matrices = BTreeMap<(String, bool), TokenTransform>;

impl Checkpoint {
    /// Returns the change of the tokens of a weight with this K; `None` if its tokens stay as they are.
    ///
    /// # Errors
    /// Returns an error if the transform is not computed, or its tensor is wrong.
    pub(super) fn token_transform(
        &self,
        module: &str,
        k: usize,
        config: Option<&ModelConfig>,
        matrices: &mut Matrices,
    ) -> Result<Option<TokenTransform>, Error> {
        let name = format!("{module}{PRE_QUANT_SCALE}");
        let factors = self.tensor(&name).map(|_| self.numbers(&name, &[k], "[K]")).transpose()?;
        if let Some(index) = factors.iter().flatten().position(|factor| !factor.is_finite()) {
            let factor = factors.map_or(f32::NAN, |factors| factors[index]);
            let what = format!("factor {index} of the tokens is {factor}; export the model again");
            return Err(Error::Invalid(what).at(self.place(&name)));
        }
        let described = config.map(|config| config.input_transform(module)).transpose()?.flatten();
        match (factors, described) {
            // A matrix that the configuration does not mention would be left out silently.
            (None, None) => match self.names_under(&format!("{module}.")).find(|name| self.is_input_matrix(name)) {
                Some(name) => Err(self.not_computed(name)),
                None => Ok(None),
            },
            (Some(factors), None) => Ok(Some(TokenTransform::of_factors(&factors))),
            (None, Some(described)) => self.hadamard(module, k, &described, matrices).map(Some),
            (Some(_), Some(described)) => {
                let what = format!("the tokens also have the transform {}, in an unknown order", described.group);
                Err(Error::NotComputed(format!("{what}; export the model with one of them")).at(self.place(&name)))
            }
        }
    }

    /// Returns a transform of the configuration with its matrix: `M.GROUP_input.weight`, entries ±1.
    fn hadamard(
        &self,
        module: &str,
        k: usize,
        transform: &InputTransform<'_>,
        matrices: &mut Matrices,
    ) -> Result<TokenTransform, Error> {
        let InputTransform { group, kind, block, inverse } = *transform;
        let size = block.unwrap_or(k);
        let at = |error: Error| error.at(self.place(module));
        if size == 0 || !k.is_multiple_of(size) {
            let what =
                format!("head_dim of transform {group} is {size}, which does not divide K {k}; export the model again");
            return Err(at(Error::Invalid(what)));
        }
        let part = input_part(group);
        // Modules with equal sizes share one matrix, which files hold once.
        let mut names = self.names().filter(|name| name.ends_with(&part));
        let fits = |name: &&str| self.tensor(name).is_some_and(|tensor| tensor.shape == [size, size]);
        let own = Some(format!("{module}{part}")).filter(|name| self.tensor(name).is_some());
        let Some(name) = own.or_else(|| names.find(fits).map(str::to_owned)) else {
            if kind == "hadamard" && size.is_power_of_two() {
                return Ok(TokenTransform::sylvester(size));
            }
            let remedy =
                format!("the matrix of a {kind} transform of size {size} cannot be computed; export the model again");
            return Err(at(Error::Missing { name: format!("a tensor *{part}"), remedy }));
        };
        let key = (name, inverse);
        if let Some(found) = matrices.get(&key) {
            return Ok(found.clone());
        }
        let transform = self.read_hadamard(&key.0, kind, size, inverse)?;
        Ok(matrices.entry(key).or_insert(transform).clone())
    }

    /// Reads the matrix of a Hadamard transform.
    fn read_hadamard(&self, name: &str, kind: &str, size: usize, inverse: bool) -> Result<TokenTransform, Error> {
        let matrix = self.numbers(name, &[size, size], "[block, block]")?;
        let at = |what: &str| Error::NotComputed(format!("{what}; export the model again")).at(self.place(name));
        if let Some(index) = matrix.iter().position(|element| element.abs() != 1.0) {
            return Err(at(&format!("element {index} of this Hadamard matrix is {}, not 1 or -1", matrix[index])));
        }
        if kind == "hadamard" {
            let is_sylvester =
                |(index, &element): (usize, &f32)| element == sylvester_element(index / size, index % size);
            if !size.is_power_of_two() || !matrix.iter().enumerate().all(is_sylvester) {
                return Err(at(
                    "this matrix is not Sylvester's, with which engines compute a transform of type hadamard",
                ));
            }
            return Ok(TokenTransform::sylvester(size));
        }
        let root = (size as f64).sqrt();
        let element = |index: usize| {
            let (line, column) = (index / size, index % size);
            f64::from(if inverse { matrix[column * size + line] } else { matrix[index] }) / root
        };
        Ok(TokenTransform::of_matrix(size, (0..size * size).map(element).collect()))
    }

    /// Returns the transforms of the experts of a block, `experts`; factors of 1 are none.
    ///
    /// # Errors
    /// Returns an error if a transform is not computed, its tensor is wrong, or gate and up of an expert, which read the same
    /// tokens, have different transforms.
    pub(super) fn transforms_of(
        &self,
        block: &Block<'_>,
        config: &ModelConfig,
        experts: &[MoeExpert<'_>],
        matrices: &mut Matrices,
    ) -> Result<Vec<ExpertTransforms>, Error> {
        // Experts in one tensor have no transforms; `ModelConfig::check_transforms` refuses the
        // configuration's transforms.
        if block.kind == Kind::Fused {
            return Ok(vec![ExpertTransforms::default(); experts.len()]);
        }
        let [reading, inside] = [&[Role::Gate, Role::Up, Role::GateUp][..], &[Role::Down]]
            .map(|roles| roles.iter().map(|&role| block.modules(role)).collect::<Vec<_>>());
        let mut of_modules = |modules: &[Vec<String>], expert: usize, k: usize| {
            let mut found: Option<(&str, Option<TokenTransform>)> = None;
            for module in modules.iter().filter_map(|modules| modules.get(expert)) {
                let transform = self.token_transform(module, k, Some(config), matrices)?;
                match &found {
                    Some((other, first)) if *first != transform => {
                        let what = format!(
                            "the tokens of this projection and the tokens of {other} are transformed differently"
                        );
                        let remedy = "both read the same tokens; export the model again";
                        return Err(Error::NotComputed(format!("{what}; {remedy}")).at(self.place(module)));
                    }
                    _ => found = Some((module, transform)),
                }
            }
            Ok(found.and_then(|(_, transform)| transform).filter(|transform| !transform.is_identity()))
        };
        let transforms = experts.iter().enumerate().map(|(index, expert)| {
            let gate_up = of_modules(&reading, index, expert.up.k())?;
            Ok(ExpertTransforms { gate_up, down: of_modules(&inside, index, expert.down.k())? })
        });
        transforms.collect()
    }

    /// Whether a tensor can be the matrix of a transform of tokens.
    pub(super) fn is_input_matrix(&self, name: &str) -> bool {
        name.ends_with("_input.weight")
            && self.tensor(name).is_some_and(|tensor| super::floats::DTYPES.contains(&tensor.dtype))
    }
}

/// Returns the transform of the tokens that all experts share, if nothing else is transformed: the tokens can be transformed
/// once.
pub(super) fn shared_transform(transforms: &[ExpertTransforms]) -> Option<TokenTransform> {
    let first = transforms.first()?.gate_up.as_ref()?;
    let is_same = |of: &ExpertTransforms| of.gate_up.as_ref() == Some(first) && of.down.is_none();
    transforms.iter().all(is_same).then(|| first.clone())
}

/// Suffix of the matrix of a transform of a module's tokens.
fn input_part(group: &str) -> String {
    format!(".{group}_input.weight")
}
