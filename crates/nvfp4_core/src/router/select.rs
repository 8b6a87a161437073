//! Routing on the CPU, with the kernel's arithmetic in the order of its lanes.

use kernels_gpu::layer::router::score::{LANES, LEAST_SUM, key, power, score_of, sigmoid};
use rayon::prelude::*;

use super::{Logits, Router, Routes, Scoring};
use crate::error::Error;

/// Returns the experts and weights of each token.
///
/// # Errors
/// Returns an error if the number of logits is not a multiple of the number of experts.
pub fn route(router: &Router, logits: &Logits<'_>) -> Result<Routes, Error> {
    let choices = logits.tokens(router)? * router.top_k;
    let mut routes = Routes { ids: vec![0; choices], weights: vec![0.0; choices] };
    let numbers = logits.numbers();
    let of_token = routes.ids.par_chunks_mut(router.top_k).zip(routes.weights.par_chunks_mut(router.top_k));
    of_token.zip(numbers.par_chunks(router.experts)).for_each(|((ids, weights), logits)| {
        route_token(router, logits, ids, weights);
    });
    Ok(routes)
}

/// Writes the k experts and k weights of one token.
pub fn route_token(router: &Router, logits: &[f32], ids: &mut [i32], weights: &mut [f32]) {
    let mut keys: Vec<u32> = match router.bias() {
        None => logits.iter().map(|&logit| key(logit)).collect(),
        Some(bias) => logits.iter().zip(bias).map(|(&logit, bias)| key(sigmoid(logit) + bias)).collect(),
    };
    keep_groups(router, &mut keys);
    for id in ids.iter_mut() {
        let best = first_greatest(&keys);
        keys[best] = 0;
        *id = best as i32;
    }
    let chosen: Vec<f32> = ids.iter().map(|&id| logits[id as usize]).collect();
    if logits.iter().any(|logit| logit.is_nan()) {
        weights.fill(f32::NAN);
        return;
    }
    let powers = |logits: &[f32]| logits.iter().map(|&logit| power(logit, chosen[0])).collect::<Vec<_>>();
    let sigmoids = || chosen.iter().map(|&logit| sigmoid(logit)).collect::<Vec<_>>();
    let (numbers, sum, scale) = match router.scoring {
        Scoring::Softmax { renormalize: false } => (powers(&chosen), Some(sum(&powers(logits))), 1.0),
        Scoring::Softmax { renormalize: true } | Scoring::TopKSoftmax => {
            let powers = powers(&chosen);
            let sum = sum(&powers);
            (powers, Some(sum), 1.0)
        }
        Scoring::SigmoidTop1 => (sigmoids(), None, 1.0),
        Scoring::SigmoidGroups { renormalize, scale, .. } => {
            let sigmoids = sigmoids();
            let sum = renormalize.then(|| sum(&sigmoids) + LEAST_SUM);
            (sigmoids, sum, scale)
        }
    };
    for (weight, number) in weights.iter_mut().zip(numbers) {
        *weight = sum.map_or(number, |sum| number / sum) * scale;
    }
}

/// Removes the experts of all groups except the best.
fn keep_groups(router: &Router, keys: &mut [u32]) {
    let (groups, top_groups) = router.groups();
    if groups == 1 {
        return;
    }
    let size = keys.len() / groups;
    let score = |group: &[u32]| {
        let pair = group.iter().fold(
            (0, 0),
            |(first, second), &key| {
                if key > first { (key, first) } else { (first, second.max(key)) }
            },
        );
        key(score_of(pair.0) + score_of(pair.1))
    };
    let mut scores: Vec<u32> = keys.chunks(size).map(score).collect();
    for _ in 0..top_groups {
        let best = first_greatest(&scores);
        scores[best] = 0;
    }
    // 0 marks a group that was already taken; other scores are never 0.
    for (keys, _) in keys.chunks_mut(size).zip(scores).filter(|(_, score)| *score != 0) {
        keys.fill(0);
    }
}

/// Returns the index of the first maximum.
fn first_greatest(keys: &[u32]) -> usize {
    let best = keys.iter().enumerate().rev().max_by_key(|(_, key)| **key);
    best.expect("a router has experts").0
}

/// Returns the sum in a warp's order: each lane adds every 32nd number, then lanes are added in pairs.
fn sum(numbers: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    for numbers in numbers.chunks(LANES) {
        lanes.iter_mut().zip(numbers).for_each(|(lane, number)| *lane += number);
    }
    for distance in [16, 8, 4, 2, 1] {
        for lane in 0..distance {
            lanes[lane] += lanes[lane + distance];
        }
    }
    lanes[0]
}
