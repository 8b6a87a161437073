//! The general rule of a router. [`Scoring`](super::Scoring) names the usual ones.

use crate::error::Error;

/// Score of an expert, a function of the logits of a token, in f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Score {
    /// Softmax over all experts.
    #[default]
    Softmax,
    /// σ(logit), as in [`kernels_gpu::exp::sigmoid`].
    Sigmoid,
    /// √softplus(logit), as in [`kernels_gpu::layer::router::score::sqrt_softplus`] (DeepSeek-V4).
    SqrtSoftplus,
}

/// Number by which groups of experts are compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GroupScore {
    /// The largest number of the group's experts (DeepSeek-V2: `group_limited_greedy`).
    #[default]
    Best,
    /// The sum of the two largest numbers of the group's experts (DeepSeek-V3: `noaux_tc`).
    BestTwo,
}

/// Experts of each token id: hash routing, as in the first layers of DeepSeek-V4 (`tid2eid`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// Number of token ids.
    pub vocabulary: usize,
    /// `[vocabulary, k]`. Empty if the table is only in a device's memory.
    pub ids: Vec<i32>,
}

/// A rule that chooses and weights experts. `Rule::default()` is softmax, then the k largest.
///
/// Experts are compared by their logits or, with biases, by score + bias; a table replaces the comparison. The weight of
/// an expert is its score, then divided by the sum of the chosen experts' scores plus 1e-20 if `renormalize`, then
/// multiplied by `scale` and by the expert's own factor.
///
/// ```
/// use nvfp4_core::router::{Router, Rule, Score, Scoring};
///
/// // DeepSeek-V4 Pro: 6 of 384 experts by √softplus + bias, weights that sum to 2.5.
/// let rule = Rule { score: Score::SqrtSoftplus, bias: vec![0.0; 384], renormalize: true, scale: 2.5, ..Rule::default() };
/// let router = Router::new(384, 6, Scoring::Rule(rule))?;
/// # Ok::<_, nvfp4_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// Score of an expert.
    pub score: Score,
    /// One finite bias per expert, or none. Biases change comparisons, not weights (`e_score_correction_bias`,
    /// `expert_bias`).
    pub bias: Vec<f32>,
    /// Number of groups of consecutive experts, all of the same size; 1: no groups.
    pub groups: usize,
    /// Number of groups that are kept for each token.
    pub top_groups: usize,
    /// Number by which groups are compared. [`GroupScore::BestTwo`] requires biases (zeros for none).
    pub group_score: GroupScore,
    /// Whether weights are divided by their sum (`norm_topk_prob`).
    pub renormalize: bool,
    /// Factor of the weights (`routed_scaling_factor`).
    pub scale: f32,
    /// One finite factor of the weights per expert, or none (Gemma 4: `per_expert_scale`).
    pub expert_scale: Vec<f32>,
    /// Number of the last experts that have no weights (LongCat-Flash: `zero_expert_num`). If one of them is chosen, the
    /// id is -1, and the weight stays: an identity expert adds this weight times the token.
    pub null_experts: usize,
    /// Experts of each token id, if the token's id chooses its experts.
    pub table: Option<Table>,
}

impl Default for Rule {
    fn default() -> Self {
        Self {
            score: Score::Softmax,
            bias: Vec::new(),
            groups: 1,
            top_groups: 1,
            group_score: GroupScore::Best,
            renormalize: false,
            scale: 1.0,
            expert_scale: Vec::new(),
            null_experts: 0,
            table: None,
        }
    }
}

impl Rule {
    /// Checks the rule for `top_k` of `experts` experts.
    ///
    /// # Errors
    /// Returns an error that names the wrong number.
    pub(super) fn check(&self, experts: usize, top_k: usize) -> Result<(), Error> {
        let Self { groups, top_groups, .. } = *self;
        within("groups", groups, experts)?;
        within("top_groups", top_groups, groups)?;
        let (size, least) = (experts / groups, if self.group_score == GroupScore::BestTwo { 2 } else { 1 });
        if !experts.is_multiple_of(groups) || groups > 1 && size < least {
            return Err(Error::Invalid(format!(
                "router: {experts} experts in {groups} groups; all groups must have the same size, at least {least}"
            )));
        }
        within("top_k (limited by the experts of top_groups groups)", top_k, top_groups * size)?;
        for (what, name, numbers) in
            [("biases of the router", "bias", &self.bias), ("factors of the experts", "factor", &self.expert_scale)]
        {
            if !numbers.is_empty() && numbers.len() != experts {
                return Err(Error::Mismatch { what, got: numbers.len(), expected: experts });
            }
            if let Some(expert) = numbers.iter().position(|number| !number.is_finite()) {
                let number = numbers[expert];
                let text = format!("router: the {name} of expert {expert} is {number}; it must be finite");
                return Err(Error::Invalid(text));
            }
        }
        if !self.scale.is_finite() {
            return Err(Error::Invalid(format!("router: scale = {} must be finite", self.scale)));
        }
        if self.null_experts >= experts {
            let text = format!("router: null_experts = {} must be less than experts = {experts}", self.null_experts);
            return Err(Error::Invalid(text));
        }
        let Some(Table { vocabulary, ids }) = &self.table else { return Ok(()) };
        let expected = vocabulary.checked_mul(top_k).filter(|&all| all <= i32::MAX as usize).ok_or(Error::TooLarge)?;
        if !ids.is_empty() && ids.len() != expected {
            return Err(Error::Mismatch { what: "ids of the router's table", got: ids.len(), expected });
        }
        match ids.iter().position(|&id| !(0..experts as i32).contains(&id)) {
            None => Ok(()),
            Some(place) => Err(Error::Invalid(format!(
                "router: the table gives expert {} to token id {}; it must be from 0 to {}",
                ids[place],
                place / top_k,
                experts - 1
            ))),
        }
    }
}

/// Checks a size of a router.
pub(super) fn within(what: &str, got: usize, most: usize) -> Result<(), Error> {
    match got {
        got if (1..=most).contains(&got) => Ok(()),
        got => Err(Error::Invalid(format!("router: {what} = {got} must be from 1 to {most}"))),
    }
}
