//! Routing on the CPU compared with the reference, and refused inputs.

use half::{bf16, f16};
use proptest::prelude::*;

use super::compare::compare;
use super::*;

fn deepseek(experts: usize, groups: usize, top_groups: usize, renormalize: bool) -> Scoring {
    // Equal biases, and large biases that decide the choice.
    let bias = (0..experts).map(|expert| [0.0, 0.125, -0.25, 0.125, 3.0][expert * 7 % 5]).collect();
    Scoring::SigmoidGroups { bias, groups, top_groups, renormalize, scale: 2.5 }
}

/// Routers of each model family, with sizes of real models and with small sizes.
fn routers() -> Vec<Router> {
    [
        (128, 8, Scoring::Softmax { renormalize: true }),
        (64, 8, Scoring::Softmax { renormalize: false }),
        (8, 2, Scoring::Softmax { renormalize: false }),
        (512, 32, Scoring::Softmax { renormalize: false }),
        (128, 4, Scoring::TopKSoftmax),
        (1, 1, Scoring::TopKSoftmax),
        (128, 1, Scoring::SigmoidTop1),
        (256, 8, deepseek(256, 8, 4, true)),
        (384, 8, deepseek(384, 1, 1, true)),
        (36, 6, deepseek(36, 6, 2, false)),
        (64, 32, deepseek(64, 32, 32, true)),
    ]
    .into_iter()
    .map(|(experts, top_k, scoring)| Router::new(experts, top_k, scoring).unwrap())
    .collect()
}

fn checked(router: &Router, logits: &Logits<'_>) -> Routes {
    let routes = route(router, logits).unwrap();
    let wrong = compare(router, logits, &routes).unwrap();
    assert!(wrong.is_none(), "{router:?}: {}", wrong.unwrap());
    routes
}

/// A logit from a few values, which gives ties, or any number.
fn logit() -> impl Strategy<Value = f32> {
    let special = [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e30, -200.0];
    prop_oneof![
        8 => (-4i8..4).prop_map(|x| f32::from(x) / 2.0),
        8 => -30f32..30.0,
        2 => -1e4f32..1e4,
        1 => prop::sample::select(special.to_vec()),
    ]
}

proptest! {
    #[test]
    fn cpu_routes_within_the_error_bounds(
        index in 0..routers().len(), logits in prop::collection::vec(logit(), 3 * 512), finite in any::<bool>(), kind in 0..3,
    ) {
        let router = &routers()[index];
        let numbers = logits[..3 * router.experts()].iter().map(|&x| if finite && !x.is_finite() { 1.0 } else { x });
        let logits = match kind {
            0 => Logits::F32(numbers.collect()),
            1 => Logits::F16(numbers.map(|x| f16::from_f32(x).to_bits()).collect()),
            _ => Logits::Bf16(numbers.map(|x| bf16::from_f32(x).to_bits()).collect()),
        };
        let routes = checked(router, &logits);
        for (ids, logits) in routes.ids.chunks(router.top_k()).zip(logits.numbers().chunks(router.experts())) {
            let distinct: std::collections::BTreeSet<_> = ids.iter().collect();
            prop_assert!(distinct.len() == ids.len() && ids.iter().all(|&id| (0..logits.len() as i32).contains(&id)));
        }
    }

    #[test]
    fn corrupted_route_is_found(index in 0..routers().len(), seed in 0usize..1000, share in 1.00001f32..1.1) {
        let router = &routers()[index];
        let numbers: Vec<f32> = (0..2 * router.experts()).map(|i| ((i + seed) * 37 % 101) as f32 / 16.0 - 3.0).collect();
        let logits = Logits::F32(numbers.into());
        let routes = checked(router, &logits);
        let at = seed % routes.ids.len();
        let found = |routes: &Routes| compare(router, &logits, routes).unwrap().map(|wrong| (wrong.token, wrong.choice));
        let place = Some((at / router.top_k(), at % router.top_k()));
        let mut other = routes.clone();
        other.weights[at] *= share;
        prop_assert_eq!(found(&other), place);
        let mut other = routes.clone();
        other.ids[at] ^= 1;
        prop_assert_eq!(found(&other), place);
        let mut other = routes.clone();
        other.weights[at] = f32::NAN;
        prop_assert_eq!(found(&other), place);
        if !at.is_multiple_of(router.top_k()) {
            let mut other = routes;
            other.ids.swap(at - 1, at);
            other.weights.swap(at - 1, at);
            prop_assert_eq!(found(&other), Some(((at - 1) / router.top_k(), (at - 1) % router.top_k())));
        }
    }
}

#[test]
fn lower_of_equal_experts_comes_first() {
    let router = Router::new(6, 4, Scoring::TopKSoftmax).unwrap();
    let routes = checked(&router, &Logits::F32(vec![0.0, 1.0, -0.0, 1.0, 0.0, 1.0].into()));
    assert_eq!(routes.ids, [1, 3, 5, 0]);
    assert_eq!(routes.weights[..3], [routes.weights[0]; 3]);
    // Among equal groups, the lower group comes first too.
    let scoring =
        Scoring::SigmoidGroups { bias: vec![0.0; 6], groups: 3, top_groups: 1, renormalize: true, scale: 1.0 };
    let router = Router::new(6, 2, scoring).unwrap();
    assert_eq!(checked(&router, &Logits::F32(vec![0.0, 1.0, 1.0, 0.0, 0.5, 0.25].into())).ids, [1, 0]);
}

#[test]
fn weights_match_the_model_definitions() {
    let logits = || Logits::F32(vec![2.0, 1.0, 0.0, -1.0].into());
    let near = |router: Router, ids: &[i32], weights: &[f64]| {
        let routes = checked(&router, &logits());
        assert_eq!(routes.ids, ids);
        for (got, want) in routes.weights.iter().zip(weights) {
            assert!((f64::from(*got) - want).abs() < 1e-6, "{router:?}: {got} {want}");
        }
    };
    let new = |top_k, scoring| Router::new(4, top_k, scoring).unwrap();
    let e = |x: f64| x.exp();
    let all = e(2.0) + e(1.0) + 1.0 + e(-1.0);
    near(new(2, Scoring::Softmax { renormalize: false }), &[0, 1], &[e(2.0) / all, e(1.0) / all]);
    let both = [e(2.0) / (e(2.0) + e(1.0)), e(1.0) / (e(2.0) + e(1.0))];
    near(new(2, Scoring::Softmax { renormalize: true }), &[0, 1], &both);
    near(new(2, Scoring::TopKSoftmax), &[0, 1], &both);
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let llama = new(1, Scoring::SigmoidTop1);
    assert!(llama.weights_on_input());
    near(llama, &[0], &[sigmoid(2.0)]);
    // The bias affects the choice but not the weight; the second group is the best.
    let bias = vec![0.0, 0.0, 0.5, 1.0];
    let scoring =
        |renormalize| Scoring::SigmoidGroups { bias: bias.clone(), groups: 2, top_groups: 1, renormalize, scale: 2.5 };
    let [third, fourth] = [sigmoid(0.0), sigmoid(-1.0)];
    near(new(2, scoring(false)), &[3, 2], &[2.5 * fourth, 2.5 * third]);
    near(new(2, scoring(true)), &[3, 2], &[2.5 * fourth / (third + fourth), 2.5 * third / (third + fourth)]);
}

#[test]
fn rules_match_the_model_definitions() {
    let logits = || Logits::F32(vec![2.0, 1.0, 0.0, -1.0].into());
    let near = |top_k, rule: Rule, token_ids: &[i32], ids: &[i32], weights: &[f64]| {
        let router = Router::new(4, top_k, Scoring::Rule(rule)).unwrap();
        let routes = route_with_ids(&router, &logits(), token_ids).unwrap();
        assert_eq!(compare::compare_with_ids(&router, &logits(), token_ids, &routes).unwrap(), None);
        assert_eq!(routes.ids, ids);
        for (got, want) in routes.weights.iter().zip(weights) {
            assert!((f64::from(*got) - want).abs() < 1e-6, "{router:?}: {got} {want}");
        }
    };
    let score = |x: f64| x.exp().ln_1p().sqrt();
    let all: f64 = [2.0, 1.0, 0.0, -1.0].map(f64::exp).iter().sum();
    // DeepSeek-V4: the bias affects the choice, the weights sum to the factor.
    let rule = Rule {
        score: Score::SqrtSoftplus,
        bias: vec![0.0, 0.0, 2.0, 0.0],
        renormalize: true,
        scale: 2.5,
        ..Rule::default()
    };
    let sum = score(0.0) + score(2.0);
    near(2, rule.clone(), &[], &[2, 0], &[2.5 * score(0.0) / sum, 2.5 * score(2.0) / sum]);
    // A table: token 1 has experts 3 and 1, token 7 has none.
    let table = Some(Table { vocabulary: 2, ids: vec![0, 1, 3, 1] });
    let sum = score(-1.0) + score(1.0);
    let hashed = Rule { table, ..rule };
    near(2, hashed.clone(), &[1], &[3, 1], &[2.5 * score(-1.0) / sum, 2.5 * score(1.0) / sum]);
    near(2, hashed, &[7], &[-1, -1], &[0.0, 0.0]);
    // LongCat-Flash: softmax plus biases; expert 3 has no weights.
    let rule = Rule { bias: vec![0.0, 0.0, 0.0, 1.0], null_experts: 1, scale: 6.0, ..Rule::default() };
    near(2, rule, &[], &[-1, 0], &[6.0 * (-1f64).exp() / all, 6.0 * 2f64.exp() / all]);
    // DeepSeek-V2: the group with the largest score. Gemma 4: a factor per expert.
    let rule = Rule { groups: 2, top_groups: 1, expert_scale: vec![0.5, 4.0, 1.0, 1.0], ..Rule::default() };
    near(2, rule, &[], &[0, 1], &[0.5 * 2f64.exp() / all, 4.0 * 1f64.exp() / all]);
}

#[test]
fn invalid_rules_are_refused_with_a_remedy() {
    let refused = |rule: Rule| Router::new(8, 2, Scoring::Rule(rule)).unwrap_err().to_string();
    let table = |ids: Vec<i32>| Some(Table { vocabulary: 2, ids });
    for (error, text) in [
        (refused(Rule { bias: vec![0.0; 7], ..Rule::default() }), "biases of the router: got 7, expected 8"),
        (refused(Rule { expert_scale: vec![f32::NAN; 8], ..Rule::default() }), "router: the factor of expert 0 is NaN"),
        (
            refused(Rule { null_experts: 8, ..Rule::default() }),
            "router: null_experts = 8 must be less than experts = 8",
        ),
        (refused(Rule { groups: 3, ..Rule::default() }), "router: 8 experts in 3 groups; all groups must have"),
        (refused(Rule { scale: f32::INFINITY, ..Rule::default() }), "router: scale = inf must be finite"),
        (refused(Rule { table: table(vec![0; 3]), ..Rule::default() }), "ids of the router's table: got 3, expected 4"),
        (
            refused(Rule { table: table(vec![0, 1, 8, 2]), ..Rule::default() }),
            "router: the table gives expert 8 to token id 1; it must be from 0 to 7",
        ),
    ] {
        assert!(error.starts_with(text), "{error}");
    }
    let router = Router::new(8, 2, Scoring::Rule(Rule { table: table(vec![0; 4]), ..Rule::default() })).unwrap();
    let error = route(&router, &Logits::F32(vec![0.0; 8].into())).unwrap_err().to_string();
    assert!(
        error.starts_with("token ids (one per token for a router with a table") && error.ends_with("got 0, expected 1")
    );
}

#[test]
fn nan_ranks_last_and_affects_only_its_token() {
    for scoring in [Scoring::TopKSoftmax, Scoring::Softmax { renormalize: false }, deepseek(4, 2, 1, true)] {
        let router = Router::new(4, 2, scoring).unwrap();
        let mut numbers = vec![1.0, 2.0, 0.0, 3.0, 1.0, 2.0, 0.0, 3.0];
        let clean = checked(&router, &Logits::F32(numbers.clone().into()));
        numbers[3] = f32::NAN;
        let spoilt = checked(&router, &Logits::F32(numbers.into()));
        assert!(spoilt.weights[..2].iter().all(|weight| weight.is_nan()));
        assert_eq!((&spoilt.ids[2..], &spoilt.weights[2..]), (&clean.ids[2..], &clean.weights[2..]));
    }
    let router = Router::new(3, 3, Scoring::TopKSoftmax).unwrap();
    assert_eq!(checked(&router, &Logits::F32(vec![f32::NAN, f32::NEG_INFINITY, 1.0].into())).ids, [2, 1, 0]);
}

#[test]
fn infinite_logits_take_all_weight() {
    let router = Router::new(4, 3, Scoring::Softmax { renormalize: false }).unwrap();
    let numbers = vec![1.0, f32::INFINITY, f32::NEG_INFINITY, f32::INFINITY];
    let routes = checked(&router, &Logits::F32(numbers.into()));
    assert_eq!((routes.ids, routes.weights), (vec![1, 3, 0], vec![0.5, 0.5, 0.0]));
    let routes = checked(&router, &Logits::F32(vec![f32::NEG_INFINITY; 4].into()));
    assert_eq!((routes.ids, routes.weights), (vec![0, 1, 2], vec![0.25; 3]));
}

#[test]
fn invalid_router_is_refused_with_a_remedy() {
    let groups = |bias: usize, groups, top_groups| Scoring::SigmoidGroups {
        bias: vec![0.0; bias],
        groups,
        top_groups,
        renormalize: true,
        scale: 1.0,
    };
    let refused = |experts, top_k, scoring| Router::new(experts, top_k, scoring).unwrap_err().to_string();
    for (error, text) in [
        (refused(0, 1, Scoring::TopKSoftmax), "router: experts = 0 must be from 1 to 1024"),
        (refused(1025, 1, Scoring::TopKSoftmax), "router: experts = 1025 must be from 1 to 1024"),
        (refused(4, 5, Scoring::TopKSoftmax), "router: top_k = 5 must be from 1 to 4"),
        (refused(64, 33, Scoring::TopKSoftmax), "router: top_k = 33 must be from 1 to 32"),
        (refused(4, 2, Scoring::SigmoidTop1), "router: top_k of sigmoid top-1 = 2 must be from 1 to 1"),
        (refused(8, 2, groups(7, 2, 1)), "biases of the router: got 7, expected 8"),
        (refused(8, 2, groups(8, 3, 1)), "router: 8 experts in 3 groups; all groups must have"),
        (refused(8, 2, groups(8, 8, 1)), "router: 8 experts in 8 groups; all groups must have"),
        (refused(8, 2, groups(8, 2, 3)), "router: top_groups = 3 must be from 1 to 2"),
        (
            refused(8, 5, groups(8, 2, 1)),
            "router: top_k (limited by the experts of top_groups groups) = 5 must be from 1 to 4",
        ),
    ] {
        assert!(error.starts_with(text), "{error}");
    }
    let router = Router::new(4, 2, Scoring::TopKSoftmax).unwrap();
    let error = route(&router, &Logits::F32(vec![0.0; 6].into())).unwrap_err().to_string();
    assert_eq!(error, "logits (one per token and expert): got 6, expected 8");
    assert_eq!(route(&router, &Logits::F32(vec![].into())).unwrap(), Routes::default());
}
