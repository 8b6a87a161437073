//! Compares a device's choices with the reference: experts must be sorted by their scores, exactly; weights are
//! compared in f64, within the error bound of f32.
//!
//! **The bound.**
//!
//! - e^d of a distance d ≤ 0 from the largest logit has a relative error of 2⁻²², and d a rounding error of 2⁻²⁴·|d|;
//!   below e⁻⁸⁷ the result may be 0.
//! - A sigmoid has a relative error of 3·2⁻²³, and may be 0 below e⁻⁸⁷.
//! - √softplus has a relative error of 8·2⁻²³, and may be 0 below e⁻⁸⁷.
//! - A sum of up to 1024 positive numbers (32 in sequence, 32 in pairs) has at most 37 roundings.
//! - A division or multiplication has one rounding.

use super::select::{Scores, named};
use super::{GroupScore, Logits, Router, Routes, Score};
use crate::error::Error;

/// A choice that differs from the reference.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouteMismatch {
    /// Index of the token.
    pub token: usize,
    /// Rank of the choice; 0 is the best.
    pub choice: usize,
    /// Expert and weight of the device.
    pub got: (i32, f32),
    /// Expert and weight of the reference.
    pub want: (i32, f64),
}

impl std::fmt::Display for RouteMismatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { token, choice, got: (id, weight), want: (wanted, wanted_weight) } = self;
        write!(
            f,
            "token {token}, choice {choice}: got expert {id} with weight {weight}, want {wanted} with {wanted_weight}"
        )
    }
}

/// An f64 number, and the allowed error of a device's number.
#[derive(Clone, Copy, Default)]
struct Bounded {
    value: f64,
    error: f64,
}

/// Half a unit in the last place of an f32, as a relative error.
const HALF_ULP: f64 = 1.0 / (1u64 << 24) as f64;

/// Returns the first wrong choice; `None` if all are correct.
///
/// # Errors
/// Returns an error if the lengths of logits or routes do not fit the router.
pub fn compare(router: &Router, logits: &Logits<'_>, routes: &Routes) -> Result<Option<RouteMismatch>, Error> {
    compare_with_ids(router, logits, &[], routes)
}

/// Same as [`compare`], for a router with a table and the id of each token.
///
/// # Errors
/// Returns an error if the lengths of logits, ids or routes do not fit the router.
pub fn compare_with_ids(
    router: &Router,
    logits: &Logits<'_>,
    token_ids: &[i32],
    routes: &Routes,
) -> Result<Option<RouteMismatch>, Error> {
    let (tokens, top_k) = (logits.tokens(router)?, router.top_k());
    router.check_token_ids(tokens, token_ids)?;
    for (what, got) in [("ids", routes.ids.len()), ("weights", routes.weights.len())] {
        if got != tokens * top_k {
            return Err(Error::Mismatch { what, got, expected: tokens * top_k });
        }
    }
    let numbers = logits.numbers();
    for (token, logits) in numbers.chunks(router.experts()).enumerate() {
        let experts = match &router.rule().table {
            Some(table) => named(table, token_ids.get(token).copied(), top_k),
            None => experts(router, logits).into_iter().map(|expert| expert as i32).collect(),
        };
        let weights = weights(router, logits, &experts);
        for (choice, (&expert, bounded)) in experts.iter().zip(weights).enumerate() {
            let at = token * top_k + choice;
            let got = (routes.ids[at], routes.weights[at]);
            let weight = f64::from(got.1);
            let is_near = match bounded.value.is_nan() {
                true => weight.is_nan(),
                // Equal infinities have no difference.
                false => weight == bounded.value || (weight - bounded.value).abs() <= bounded.error,
            };
            let has_weights = expert < (logits.len() - router.rule().null_experts) as i32;
            let want = if has_weights { expert } else { -1 };
            if got.0 != want || !is_near {
                return Ok(Some(RouteMismatch { token, choice, got, want: (want, bounded.value) }));
            }
        }
    }
    Ok(None)
}

/// Orders two experts or groups, the better one first. NaN ranks below every number.
fn better_first(a: (usize, f32), b: (usize, f32)) -> std::cmp::Ordering {
    let by_score = match (a.1.is_nan(), b.1.is_nan()) {
        (false, false) => b.1.partial_cmp(&a.1).expect("neither number is NaN"),
        (a, b) => a.cmp(&b),
    };
    by_score.then(a.0.cmp(&b.0))
}

/// Returns all experts, sorted for one token.
fn experts(router: &Router, logits: &[f32]) -> Vec<usize> {
    let of_token = Scores::of(router.rule(), logits);
    let scores: Vec<f32> = match router.bias() {
        None => logits.to_vec(),
        Some(bias) => logits.iter().zip(bias).map(|(&logit, bias)| of_token.score(logit) + bias).collect(),
    };
    let sorted = |mut of: Vec<(usize, f32)>| {
        of.sort_by(|&a, &b| better_first(a, b));
        of
    };
    let (groups, top_groups) = (router.rule().groups, router.rule().top_groups);
    let size = scores.len() / groups;
    let mut candidates: Vec<(usize, f32)> = scores.iter().copied().enumerate().collect();
    if groups > 1 {
        let of_group = |group: usize| {
            let best = sorted(candidates[group * size..][..size].to_vec());
            match router.rule().group_score {
                GroupScore::Best => (group, best[0].1),
                GroupScore::BestTwo => (group, best[0].1 + best[1].1),
            }
        };
        let best: Vec<_> = sorted((0..groups).map(of_group).collect()).into_iter().take(top_groups).collect();
        candidates.retain(|(expert, _)| best.iter().any(|(group, _)| expert / size == *group));
    }
    sorted(candidates).into_iter().take(router.top_k()).map(|(expert, _)| expert).collect()
}

/// Returns the weights of these experts. A negative expert has the weight 0.
fn weights(router: &Router, logits: &[f32], experts: &[i32]) -> Vec<Bounded> {
    /// Smallest normal f32; quotients of smaller numbers may have this error.
    const SMALLEST: f64 = f32::MIN_POSITIVE as f64;
    if logits.iter().any(|logit| logit.is_nan()) {
        return vec![Bounded { value: f64::NAN, error: 0.0 }; experts.len()];
    }
    let logit = |expert: usize| f64::from(logits[expert]);
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let power = |expert: usize| {
        let distance = if logits[expert] == largest { 0.0 } else { logit(expert) - f64::from(largest) };
        let value = distance.exp();
        // Beyond this distance the result is 0 anyway, so a larger error does not matter.
        let off = 4.0 * HALF_ULP + 1.01 * HALF_ULP * distance.abs().min(100.0);
        Bounded { value, error: off * value + 2.0 * SMALLEST }
    };
    let sigmoid = |expert: usize| {
        let value = 1.0 / (1.0 + (-logit(expert)).exp());
        Bounded { value, error: 6.0 * HALF_ULP * value + 2.0 * SMALLEST }
    };
    let sqrt_softplus = |expert: usize| {
        let value = (logit(expert).max(0.0) + (-logit(expert).abs()).exp().ln_1p()).sqrt();
        Bounded { value, error: 16.0 * HALF_ULP * value + 2.0 * SMALLEST.sqrt() }
    };
    let sum = |numbers: &mut dyn Iterator<Item = Bounded>| {
        let all = numbers.fold(Bounded::default(), |sum, number| Bounded {
            value: sum.value + number.value,
            error: sum.error + number.error,
        });
        Bounded { error: all.error + 37.5 * HALF_ULP * (all.value + all.error), ..all }
    };
    let divided = |number: Bounded, by: Bounded| {
        let value = number.value / by.value;
        let high = (number.value + number.error) / (by.value - by.error).max(f64::MIN_POSITIVE);
        let low = (number.value - number.error).max(0.0) / (by.value + by.error);
        Bounded { value, error: (high - value).max(value - low) + 1.01 * HALF_ULP * high + SMALLEST }
    };
    let scaled = |number: Bounded, scale: f32| {
        let scale = f64::from(scale);
        let value = number.value * scale;
        Bounded { value, error: number.error * scale.abs() + 1.01 * HALF_ULP * value.abs() + SMALLEST }
    };
    let rule = router.rule();
    let score = |expert: usize| match rule.score {
        Score::Softmax => power(expert),
        Score::Sigmoid => sigmoid(expert),
        Score::SqrtSoftplus => sqrt_softplus(expert),
    };
    let chosen = || experts.iter().map(|&expert| usize::try_from(expert).ok());
    let scores = || chosen().map(|expert| expert.map_or(Bounded::default(), score));
    let divisor = if rule.renormalize {
        let all = sum(&mut scores());
        let least = f64::from(1e-20f32);
        Some(Bounded { value: all.value + least, error: all.error + 1.01 * HALF_ULP * (all.value + least) })
    } else {
        (rule.score == Score::Softmax).then(|| sum(&mut (0..logits.len()).map(power)))
    };
    let weight = |(score, expert): (Bounded, Option<usize>)| {
        let share = scaled(divisor.map_or(score, |by| divided(score, by)), rule.scale);
        match expert {
            Some(expert) if !rule.expert_scale.is_empty() => scaled(share, rule.expert_scale[expert]),
            _ => share,
        }
    };
    scores().zip(chosen()).map(weight).collect()
}
