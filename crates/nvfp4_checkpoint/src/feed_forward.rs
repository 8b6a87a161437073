//! A shared expert or a dense branch in another precision than the routed experts: floats, FP8 in any form, or a mixture. The
//! host computes it in f64, as it computes the projections around the experts.

use super::block::Block;
use super::file::Tensor;
use super::floats;
use super::model_config::ModelConfig;
use super::names::Role;
use super::projection::Projection;
use super::{Checkpoint, Dtype};
use nvfp4_core::Error;
use nvfp4_core::moe::Activation;

/// A feed-forward block with projections in any form: `activation(x·gateᵀ, x·upᵀ)·downᵀ`, with biases. Everything is f64, and
/// nothing is rounded between the projections.
#[derive(Clone, Debug)]
pub struct FeedForward {
    /// Activation of gate and up, whose limit can differ from the limit of the routed experts.
    pub activation: Activation,
    /// `[I, H]`; present if and only if the activation has a gate.
    pub gate: Option<Projection>,
    /// `[I, H]`.
    pub up: Projection,
    /// `[H, I]`.
    pub down: Projection,
}

impl FeedForward {
    /// H: number of elements of a token.
    pub fn hidden(&self) -> usize {
        self.up.k
    }

    /// I: number of rows of gate and up.
    pub fn intermediate(&self) -> usize {
        self.down.k
    }

    /// Gate, up and down, those that exist.
    pub fn projections(&self) -> impl Iterator<Item = &Projection> {
        self.gate.iter().chain([&self.up, &self.down])
    }

    /// Returns the output for one token.
    pub(super) fn apply(&self, token: &[f64]) -> Vec<f64> {
        let mut inner = self.up.product(token);
        match &self.gate {
            Some(gate) => {
                inner.iter_mut().zip(gate.product(token)).for_each(|(up, gate)| *up = self.activation.apply(gate, *up))
            }
            None => inner.iter_mut().for_each(|up| *up = self.activation.apply(0.0, *up)),
        }
        self.down.product(&inner)
    }
}

impl Checkpoint {
    /// Whether a block has a projection in floats or FP8. If so, the block is no layer of NVFP4 experts.
    pub(super) fn has_other_forms(&self, block: &Block<'_>) -> bool {
        let is_other = |tensor: Tensor<'_>| floats::DTYPES.contains(&tensor.dtype) || tensor.dtype == Dtype::F8_E4M3;
        let mut modules = Role::ALL.into_iter().flat_map(|role| block.modules(role));
        modules.any(|module| self.tensor(&format!("{module}.weight")).is_some_and(is_other))
    }

    /// Returns the names of the tensors of a block in floats or FP8; some of them may not exist.
    ///
    /// # Errors
    /// Returns an error if the weights of a projection cannot be read.
    pub(super) fn feed_forward_tensors(&self, block: &Block<'_>) -> Result<Vec<String>, Error> {
        let modules = Role::ALL.into_iter().flat_map(|role| block.modules(role));
        let names: Result<Vec<_>, Error> = modules.map(|module| self.projection_tensors(&module)).collect();
        Ok(names?.concat())
    }

    /// Loads a block whose projections have any form.
    ///
    /// # Errors
    /// Returns an error if a projection is missing or wrong, or the sizes do not match.
    pub(super) fn load_feed_forward(
        &self,
        config: &ModelConfig,
        block: &Block<'_>,
        activation: Activation,
    ) -> Result<FeedForward, Error> {
        block.check_roles(activation).map_err(|error| error.at(self.path().display()))?;
        let load = |role: Role| {
            let module = block.modules(role).into_iter().next();
            module.map(|module| self.projection(config, &module)).transpose()
        };
        let part = |role: Role| load(role).map(|found| found.expect("`check_roles` found the projection"));
        let (gate, up) = match load(Role::GateUp)? {
            Some(both) => {
                let (rows, place) = (both.rows(), self.place(&both.module));
                let [gate, up] = both.halves().ok_or_else(|| {
                    let what = format!("{rows} rows cannot be split into gate and up; export the model again");
                    Error::Invalid(what).at(place)
                })?;
                (Some(gate), up)
            }
            None => (load(Role::Gate)?, part(Role::Up)?),
        };
        let block = FeedForward { activation, gate, up, down: part(Role::Down)? };
        let [hidden, intermediate] = [block.hidden(), block.up.rows()];
        for projection in block.projections() {
            let is_down = std::ptr::eq(projection, &block.down);
            let [rows, columns] = if is_down { [hidden, intermediate] } else { [intermediate, hidden] };
            for (what, got, expected) in [("rows", projection.rows(), rows), ("columns", projection.k, columns)] {
                if got != expected {
                    return Err(Error::Mismatch { what, got, expected }.at(self.place(&projection.module)));
                }
            }
        }
        Ok(block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn projection(k: usize, weights: &[f32], bias: Option<&[f32]>) -> Projection {
        let bias = bias.map(<[f32]>::to_vec);
        Projection { module: "m".into(), form: "F32".into(), k, weights: weights.to_vec(), bias }
    }

    #[test]
    fn block_is_activation_of_gate_and_up_times_down() {
        let up = projection(2, &[1.0, 2.0, 3.0, -1.0], Some(&[0.5, 0.0]));
        let down = projection(2, &[1.0, 1.0, 2.0, -1.0, 0.0, 1.0], None);
        // up: [1·2 + 2·1 + 0.5, 3·2 − 1·1]
        let squares = FeedForward { activation: Activation::Relu2, gate: None, up: up.clone(), down: down.clone() };
        assert_eq!((squares.hidden(), squares.intermediate(), squares.projections().count()), (2, 2, 2));
        assert_eq!(squares.apply(&[2.0, 1.0]), [20.25 + 25.0, 40.5 - 25.0, 25.0]);
        // gate: [−1, 4]; the second is cut to 3, as is up.
        let gate = projection(2, &[0.0, -1.0, 2.0, 0.0], None);
        let activation = Activation::SiluLimit { limit: 3.0 };
        let limited = FeedForward { activation, gate: Some(gate), up, down };
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let inner = [silu(-1.0) * 3.0, silu(3.0) * 3.0];
        assert_eq!(
            limited.apply(&[2.0, 1.0]),
            [inner[0] + inner[1], 2.0 * inner[0] - inner[1], 0.0 * inner[0] + inner[1]]
        );
    }

    #[test]
    fn halves_of_a_projection_keep_their_biases() {
        let [gate, up] = projection(2, &[1., 2., 3., 4., 5., 6., 7., 8.], Some(&[1., 2., 3., 4.])).halves().unwrap();
        assert_eq!((gate.weights, gate.bias), (vec![1., 2., 3., 4.], Some(vec![1., 2.])));
        assert_eq!((up.weights, up.bias), (vec![5., 6., 7., 8.], Some(vec![3., 4.])));
        assert!(projection(1, &[1., 2., 3.], None).halves().is_none());
    }
}
