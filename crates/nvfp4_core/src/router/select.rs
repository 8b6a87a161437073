//! Routing on the CPU, with the kernel's arithmetic in the order of its lanes.

use kernels_gpu::layer::router::score::{LANES, LEAST_SUM, key, power, score_of, sigmoid, sqrt_softplus};
use rayon::prelude::*;

use super::{GroupScore, Logits, Router, Routes, Rule, Score, Table};
use crate::error::Error;

/// Returns the experts and weights of each token.
///
/// # Errors
/// Returns an error if the number of logits is not a multiple of the number of experts, or the router needs token ids.
pub fn route(router: &Router, logits: &Logits<'_>) -> Result<Routes, Error> {
    route_with_ids(router, logits, &[])
}

/// Returns the experts and weights of each token of a router with a table, from the logits and the id of each token.
///
/// # Errors
/// Returns an error if the number of logits or of ids does not fit, or the table is only in a device's memory.
pub fn route_with_ids(router: &Router, logits: &Logits<'_>, token_ids: &[i32]) -> Result<Routes, Error> {
    let tokens = logits.tokens(router)?;
    router.check_token_ids(tokens, token_ids)?;
    if router.rule.table.as_ref().is_some_and(|table| table.ids.is_empty() && table.vocabulary > 0) {
        return Err(Error::Invalid("router: the CPU needs the ids of the table; they are empty".into()));
    }
    let choices = tokens * router.top_k;
    let mut routes = Routes { ids: vec![0; choices], weights: vec![0.0; choices] };
    let numbers = logits.numbers();
    let of_token = routes.ids.par_chunks_mut(router.top_k).zip(routes.weights.par_chunks_mut(router.top_k));
    of_token.zip(numbers.par_chunks(router.experts)).enumerate().for_each(|(token, ((ids, weights), logits))| {
        route_token(router, logits, token_ids.get(token).copied(), ids, weights);
    });
    Ok(routes)
}

/// Writes the k experts and k weights of one token.
pub fn route_token(router: &Router, logits: &[f32], token_id: Option<i32>, ids: &mut [i32], weights: &mut [f32]) {
    let rule = &router.rule;
    let scores = Scores::of(rule, logits);
    match &rule.table {
        Some(table) => ids.copy_from_slice(&named(table, token_id, ids.len())),
        None => choose(rule, &scores, logits, ids),
    }
    let is_there = |id: i32| (0..logits.len() as i32).contains(&id);
    let numbers: Vec<f32> =
        ids.iter().map(|&id| if is_there(id) { scores.undivided(logits[id as usize]) } else { 0.0 }).collect();
    let divisor = match (rule.renormalize, rule.score) {
        (true, _) => Some(sum(&numbers) + LEAST_SUM),
        (false, Score::Softmax) => Some(scores.sum_of_all),
        (false, _) => None,
    };
    let has_nan = logits.iter().any(|logit| logit.is_nan());
    for ((weight, number), id) in weights.iter_mut().zip(numbers).zip(ids) {
        *weight = divisor.map_or(number, |sum| number / sum) * rule.scale;
        if !rule.expert_scale.is_empty() {
            *weight *= if is_there(*id) { rule.expert_scale[*id as usize] } else { 0.0 };
        }
        *weight = if has_nan { f32::NAN } else { *weight };
        if !is_there(*id) || *id as usize >= logits.len() - rule.null_experts {
            *id = -1;
        }
    }
}

/// Scores of a token's experts.
#[derive(Clone, Copy)]
pub(super) struct Scores {
    score: Score,
    largest: f32,
    /// Sum of the powers of all experts, for softmax.
    sum_of_all: f32,
}

impl Scores {
    pub(super) fn of(rule: &Rule, logits: &[f32]) -> Self {
        let largest = score_of(logits.iter().map(|&logit| key(logit)).max().unwrap_or_default());
        let powers = || logits.iter().map(|&logit| power(logit, largest)).collect::<Vec<_>>();
        let sum_of_all = if rule.score == Score::Softmax { sum(&powers()) } else { 0.0 };
        Self { score: rule.score, largest, sum_of_all }
    }

    /// Score of a logit, before softmax divides by the sum over all experts.
    fn undivided(self, logit: f32) -> f32 {
        match self.score {
            Score::Softmax => power(logit, self.largest),
            Score::Sigmoid => sigmoid(logit),
            Score::SqrtSoftplus => sqrt_softplus(logit),
        }
    }

    /// Score of a logit.
    pub(super) fn score(self, logit: f32) -> f32 {
        let score = self.undivided(logit);
        if self.score == Score::Softmax { score / self.sum_of_all } else { score }
    }
}

/// Returns the k experts that a table gives to a token id; -1 for an id that the table does not have.
pub(super) fn named(table: &Table, token_id: Option<i32>, top_k: usize) -> Vec<i32> {
    let row = token_id.and_then(|id| usize::try_from(id).ok()).filter(|&row| row < table.vocabulary);
    row.map_or_else(|| vec![-1; top_k], |row| table.ids[row * top_k..][..top_k].to_vec())
}

/// Writes the best experts, the best first.
fn choose(rule: &Rule, scores: &Scores, logits: &[f32], ids: &mut [i32]) {
    let mut keys: Vec<u32> = if rule.bias.is_empty() {
        logits.iter().map(|&logit| key(logit)).collect()
    } else {
        // A logit of −0 is compared as 0, and a NaN as the lowest.
        let compared = |logit: f32| score_of(key(logit));
        logits.iter().zip(&rule.bias).map(|(&logit, bias)| key(scores.score(compared(logit)) + bias)).collect()
    };
    keep_groups(rule, &mut keys);
    for id in ids {
        let best = first_greatest(&keys);
        keys[best] = 0;
        *id = best as i32;
    }
}

/// Removes the experts of all groups except the best.
fn keep_groups(rule: &Rule, keys: &mut [u32]) {
    if rule.groups == 1 {
        return;
    }
    let size = keys.len() / rule.groups;
    let score = |group: &[u32]| {
        let (first, second) = group
            .iter()
            .fold((0, 0), |(first, second), &key| if key > first { (key, first) } else { (first, second.max(key)) });
        match rule.group_score {
            GroupScore::Best => first,
            GroupScore::BestTwo => key(score_of(first) + score_of(second)),
        }
    };
    let mut scores: Vec<u32> = keys.chunks(size).map(score).collect();
    for _ in 0..rule.top_groups {
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
