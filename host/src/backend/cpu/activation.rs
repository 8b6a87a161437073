//! The activation of an MoE layer: computes an element of the intermediate from the sums of gate and up with their
//! biases. Plain arithmetic, which vectorizes and gives the same bits on every CPU.

use kernels_gpu::exp::exp_of_negative;

use crate::moe::{Activation, Form, Gate};

/// Computes one element of the intermediate. `gate` is ignored if the activation has no gate.
#[inline(always)]
pub(super) fn activated(activation: Activation, gate: f32, up: f32) -> f32 {
    let Gate { slope, cubic, limit, offset } = match activation.form() {
        Form::Formula(gate) => gate,
        Form::Curve(curve, numbers) => return curve.apply(numbers, gate, up),
        Form::Square => {
            // `if` instead of `max`, so that NaN stays NaN.
            let up = if up < 0.0 { 0.0 } else { up };
            return up * up;
        }
    };
    let [slope, cubic, limit, offset] = [slope, cubic, limit, offset].map(|number| number as f32);
    let x = if gate > limit { limit } else { gate };
    // Clamp the square to a finite value, so that its product with 0 is 0.
    let p = x * (slope + cubic * (x * x).min(f32::MAX));
    sigmoid_times(x, p, up.clamp(-limit, limit) + offset)
}

/// `silu(gate)·up`.
#[inline(always)]
pub(super) fn silu_times(gate: f32, up: f32) -> f32 {
    sigmoid_times(gate, gate, up)
}

/// `x·σ(p)·factor = x·factor/(1+e⁻ᵖ)`, computed so that an intermediate result overflows or underflows only if the
/// final result does. With s = e^(−|p|/2), the result is `x·factor/(1+s²)` if p is positive and
/// `(x·s)(factor·s)/(1+s²)` if p is negative.
#[inline(always)]
fn sigmoid_times(x: f32, p: f32, factor: f32) -> f32 {
    let s = exp_of_negative(p.abs() * -0.5);
    let share = if p < 0.0 { s } else { 1.0 };
    (x * share) * (factor * share) / (1.0 + s * s)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::silu;

    #[test]
    fn activations_keep_their_limits_and_nan() {
        let numbers: Vec<f32> = [0.0, 1e-30, 1e-3, 0.5, 3.0, 9.0, 40.0, 87.0, 89.0, 200.0, 1e5, 1e20]
            .into_iter()
            .flat_map(|x| [x, -x])
            .collect();
        let words = ["silu", "gelu", "gelu-tanh", "relu2", "relu2-gated", "silu-limit=2.5", "swiglu-step=1.5"];
        let words = words.into_iter().chain(["gpt-oss", "swigluoai=1.5,3,-0.5", "situ=2", "situ=8,4"]);
        for activation in words.map(|word| word.parse::<Activation>().unwrap()) {
            for (&gate, &up) in numbers.iter().flat_map(|gate| numbers.iter().map(move |up| (gate, up))) {
                let (got, want) = (activated(activation, gate, up), activation.apply(gate.into(), up.into()));
                // For large negative gates, the definition of gelu with tanh subtracts nearly equal numbers and loses
                // their digits.
                let least = f64::from(gate.abs() * up.abs()) * 1e-15 + f64::from(f32::MIN_POSITIVE);
                let close = (f64::from(got) - want).abs() <= want.abs() * 1e-5 + least;
                assert!(
                    close || got == want as f32,
                    "{activation} of gate {gate} and up {up}: {got} instead of {want}"
                );
            }
            assert!(activated(activation, 1.0, f32::NAN).is_nan());
            assert!(!activation.has_gate() || activated(activation, f32::NAN, 1.0).is_nan());
        }
    }

    #[test]
    fn silu_keeps_its_limits_and_never_gives_nan() {
        let numbers: Vec<f32> = [0.0, 1e-30, 1e-3, 0.5, 3.0, 40.0, 87.0, 89.0, 150.0, 200.0, 1e5, 1e20, f32::MAX]
            .into_iter()
            .flat_map(|x| [x, -x])
            .collect();
        for &gate in &numbers {
            for &up in &numbers {
                let (got, want) = (f64::from(silu_times(gate, up)), silu(gate.into()) * f64::from(up));
                let close = (got - want).abs() <= want.abs() * 1e-6 + f64::from(f32::MIN_POSITIVE);
                assert!(close || got == f64::from(want as f32), "silu({gate})·{up}: {got} instead of {want}");
            }
        }
    }
}
