//! Parses tensor names: expert 5's gate projection of layer 3, a router, a part of the vision tower. No other module
//! knows how model families name tensors.
//!
//! Sources: the loaders of vLLM (`vllm/model_executor/models`) and the modules of transformers. Accepted names, where
//! `P` is a projection such as `gate_proj` or `w1`:
//!
//! | name after the layer number | found in |
//! |---|---|
//! | `mlp.P`, `feed_forward.P`, `mixer.P` | dense layers; Llama 4; Nemotron-H |
//! | `BLOCK.experts.E.P` | most models: `mlp`, `block_sparse_moe`, `feed_forward`, `ffn` (DeepSeek-V4), `mixer` (Nemotron-H), `moe` |
//! | `BLOCK.experts.P.E` | exports with one list per projection |
//! | `experts.E.P`, `experts.P` | experts beside the dense block (Gemma 4) |
//! | `BLOCK.experts.gate_up_proj`, `…_blocks`, `…_bias` | all experts in one tensor (Llama 4, gpt-oss, Qwen3-VL-MoE) |
//! | `BLOCK.experts.w13_weight`, `…w13_weight_scale` | all experts in one tensor, by vLLM's names |
//! | `BLOCK.shared_experts.P`, `shared_mlp.P`, `share_expert.P` | shared experts, which process every token; in the block or beside it (Granite, Step) |

/// Suffix of a module's bias.
pub(super) const BIAS: &str = ".bias";

/// Function of a projection, independent of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Role {
    /// Gate projection, the input of SiLU.
    Gate,
    /// Up projection, multiplied by the activated gate; without a gate, the first of two projections.
    Up,
    /// Down projection, back to the hidden size.
    Down,
    /// Gate and up in one tensor.
    GateUp,
}

impl Role {
    /// All functions.
    pub(crate) const ALL: [Self; 4] = [Self::Gate, Self::Up, Self::Down, Self::GateUp];
}

/// Names of the projections of feed-forward blocks.
const PROJECTIONS: [(&str, Role); 14] = [
    ("gate_proj", Role::Gate),
    ("up_proj", Role::Up),
    ("down_proj", Role::Down),
    ("w1", Role::Gate),
    ("w3", Role::Up),
    ("w2", Role::Down),
    ("gate_up_proj", Role::GateUp),
    ("gate_and_up_proj", Role::GateUp),
    ("up_gate_proj", Role::GateUp),
    ("w13", Role::GateUp),
    // Granite, which stores all experts in one tensor.
    ("input_linear", Role::GateUp),
    ("output_linear", Role::Down),
    // Blocks without a gate: one up projection and one down projection.
    ("fc1", Role::Up),
    ("fc2", Role::Down),
];

/// Names of routers below their block.
pub(crate) const ROUTER_WEIGHTS: [&str; 7] =
    ["gate", "router", "router.layer", "router.proj", "router.gate", "router.classifier", "gate.wg"];

/// Projections that read the same activations. Engines merge them into one matrix with one global scale, so they are
/// quantized with one global scale.
const MERGED: [&[&str]; 7] = [
    &["gate_proj", "up_proj"],
    &["w1", "w3"],
    &["q_proj", "k_proj", "v_proj"],
    &["q_a_proj", "kv_a_proj_with_mqa"],
    &["wq_a", "wkv"],
    &["in_proj_qkv", "in_proj_z"],
    &["in_proj_b", "in_proj_a"],
];

/// Expert of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Expert {
    /// Expert with this number, chosen by the router.
    Routed(usize),
    /// All routed experts in one tensor, with the expert as the first dimension.
    Fused,
    /// Block of a layer without a router, or the dense block beside the experts.
    Dense,
    /// Shared expert, which processes every token beside the routed experts.
    Shared,
}

/// A projection of a feed-forward block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Projection<'n> {
    /// Name before the number of the layer, including the dot: `model.layers.`.
    pub stack: &'n str,
    /// Number of the layer.
    pub layer: usize,
    /// Name between the layer number and the experts or the projection: `mlp`. Empty for experts directly below the
    /// layer.
    pub block: &'n str,
    /// Expert of the projection.
    pub expert: Expert,
    /// Function of the projection.
    pub role: Role,
    /// Name up to the end of the projection: `model.layers.3.mlp.experts.5.gate_proj`.
    pub module: &'n str,
    /// Rest of the name, including the dot or underscore: `.weight`, `_blocks`. Empty for a bare parameter.
    pub part: &'n str,
    /// Module name before and after the number of the expert. Without a number, the first string is the whole module
    /// name.
    pub around_expert: (&'n str, &'n str),
}

impl<'n> Projection<'n> {
    /// Parses the name of a tensor or module; `None` if it is not a projection of a layer.
    pub(crate) fn parse(name: &'n str) -> Option<Self> {
        let segments: Vec<(usize, &str)> = segments(name).collect();
        let number = |at: usize| segments.get(at).and_then(|(_, segment)| number(segment));
        let of_layers = (0..segments.len()).find(|&at| segments[at].1 == "layers" && number(at + 1).is_some())?;
        let layer = number(of_layers + 1)?;
        let stack = &name[..segments[of_layers + 1].0];
        let below = of_layers + 2;
        // First segment that names a projection; `experts.gate_proj.weight` has only one.
        let (at, (_, called), role) = (below..segments.len()).find_map(|at| {
            let (called, role) = projection(segments[at].1)?;
            Some((at, (segments[at].0, called), role))
        })?;
        let experts = (below..at).find(|&at| segments[at].1 == "experts");
        let shared = (below..at).find(|&at| is_shared(segments[at].1));
        let end_of = |at: usize| segments[at].0 + segments[at].1.len();
        let end = segments[at].0 + called.len();
        let (expert, of_expert, end) = match experts {
            _ if shared.is_some() => (Expert::Shared, None, end),
            // Pattern `experts.E.P`.
            Some(experts) if at == experts + 2 => (Expert::Routed(number(experts + 1)?), Some(experts + 1), end),
            Some(experts) if at == experts + 1 => match number(at + 1) {
                // Pattern `experts.P.E`.
                Some(expert) if called == segments[at].1 => (Expert::Routed(expert), Some(at + 1), end_of(at + 1)),
                _ => (Expert::Fused, None, end),
            },
            Some(_) => return None,
            // The first export of Gemma 4 stored all experts in `moe.gate_up_proj`.
            None if at > below && segments[at - 1].1 == "moe" && role != Role::Gate && role != Role::Up => {
                (Expert::Fused, None, end)
            }
            None => (Expert::Dense, None, end),
        };
        let end_of_block = shared.or(experts).unwrap_or(at);
        let block = match segments.get(below) {
            Some(&(start, _)) if end_of_block > below => &name[start..end_of(end_of_block - 1)],
            _ => "",
        };
        let around_expert = match of_expert {
            Some(number) => (&name[..segments[number].0], &name[end_of(number)..end]),
            None => (&name[..end], ""),
        };
        Some(Self { stack, layer, block, expert, role, module: &name[..end], part: &name[end..], around_expert })
    }
}

/// Returns the name before the layer number, including the dot, and the layer number.
pub(crate) fn layer_of(name: &str) -> Option<(&str, usize)> {
    let mut before = None;
    for (start, segment) in segments(name) {
        if let (Some("layers"), Some(layer)) = (before, number(segment)) {
            return Some((&name[..start], layer));
        }
        before = Some(segment);
    }
    None
}

/// Names of the modules that engines merge with `module` into one matrix.
pub(crate) fn merged_with(module: &str) -> impl Iterator<Item = String> {
    let found = segments(module).filter_map(|(start, segment)| {
        let names = MERGED.into_iter().find(|names| names.contains(&segment))?;
        Some((start, segment, names))
    });
    // `experts.w1.5` has the expert number after the projection.
    let (start, segment, names) = found.last().unwrap_or((0, "", &[]));
    let (before, after) = (&module[..start], &module[start + segment.len()..]);
    names.iter().filter(move |&&name| name != segment).map(move |name| format!("{before}{name}{after}"))
}

/// Part of a model outside the language model proper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Aside {
    /// Encoder for images, video or sound, or its connection to the language model.
    Tower,
    /// Layers that draft tokens (multi-token prediction, EAGLE).
    Draft,
    /// Router: the small matrix that chooses experts.
    Router,
}

impl Aside {
    /// Name for messages.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Tower => "a tower for images or sound",
            Self::Draft => "layers that draft tokens",
            Self::Router => "a router",
        }
    }

    /// Classifies the name of a tensor or module.
    pub(crate) fn of(name: &str) -> Option<Self> {
        const TOWERS: [&str; 10] =
            ["vision", "visual", "audio", "image", "img", "vit", "mm_projector", "multi_modal", "multimodal", "siglip"];
        const DRAFTS: [&str; 5] = ["mtp", "nextn", "eagle", "draft", "medusa"];
        // Router matrices, and the tensors beside them: biases and lookup tables of the choice.
        const ROUTERS: [&str; 11] = [
            "gate",
            "router",
            "shared_expert_gate",
            "wg",
            "gate_network",
            "e_score_correction_bias",
            "expert_bias",
            "router_bias",
            "moe_statics",
            "per_expert_scale",
            "tid2eid",
        ];
        let in_words = |segment: &str, words: &[&str]| {
            words.iter().any(|word| {
                // Whole words match: `vision_tower`, `visual`, `mtp_block`; `invitation` does not.
                segment == *word
                    || segment.split('_').any(|part| part == *word)
                    || segment.starts_with(&format!("{word}_"))
            })
        };
        // A projection can share its name with a tower, so only the module name is searched for towers.
        let module = Projection::parse(name).map_or(name, |projection| projection.module);
        for (_, segment) in segments(module) {
            if in_words(segment, &TOWERS) {
                return Some(Self::Tower);
            }
            if in_words(segment, &DRAFTS) {
                return Some(Self::Draft);
            }
        }
        segments(name).any(|(_, segment)| ROUTERS.contains(&segment)).then_some(Self::Router)
    }
}

/// Parses the number of a layer or expert: digits without leading zeros.
fn number(segment: &str) -> Option<usize> {
    (segment.bytes().all(|byte| byte.is_ascii_digit()) && (segment == "0" || !segment.starts_with('0')))
        .then(|| segment.parse().ok())
        .flatten()
}

/// Finds the projection in a segment; a part may follow after an underscore: `gate_up_proj_blocks`, `w13_weight`.
fn projection(segment: &str) -> Option<(&'static str, Role)> {
    PROJECTIONS.into_iter().find(|(called, _)| *called == segment).or_else(|| {
        PROJECTIONS.into_iter().find(|(called, _)| {
            let part = segment.strip_prefix(called).filter(|part| part.starts_with('_'));
            // Other names that begin with `w2_` are no projections.
            let is_part = |part: &str| ["_weight", "_input", "_bias"].iter().any(|start| part.starts_with(start));
            part.is_some_and(|part| called.ends_with("_proj") || ["w13", "w2"].contains(called) && is_part(part))
        })
    })
}

/// Returns `true` if a segment names shared experts, which process every token.
pub(crate) fn is_shared(segment: &str) -> bool {
    const NAMES: [&str; 3] = ["shared_mlp", "shared_ffn", "shared_feed_forward"];
    segment.starts_with("shared_expert") || segment.starts_with("share_expert") || NAMES.contains(&segment)
}

/// Returns `true` if a segment directly below the layer names something other than a feed-forward block: attention and
/// what takes its place, a norm, a factor of the residual stream, or embeddings that are added behind the block.
pub(crate) fn is_no_feed_forward(segment: &str) -> bool {
    // `per_layer`: Gemma 4's embeddings per layer.
    const PARTS: [&str; 8] = ["attn", "attention", "mamba", "norm", "conv", "indexer", "rotary", "per_layer"];
    // `hc`: DeepSeek-V4's residual streams. Kimi, Qwen and others name their linear attention by kind.
    const WORDS: [&str; 14] = [
        "ln",
        "hc",
        "ssm",
        "rnn",
        "recurrent",
        "temporal",
        "rope",
        "kda",
        "gla",
        "gdn",
        "deltanet",
        "scalar",
        "laurel",
        "altup",
    ];
    // `attn_mlp` is a branch that adds to the output, `attn_mlp_norm` is a norm.
    const BRANCHES: [&str; 4] = ["mlp", "ffn", "moe", "expert"];
    let has = |parts: &[&str]| parts.iter().any(|part| segment.contains(part));
    let is_branch = has(&["attn", "attention"]) && has(&BRANCHES) && !segment.contains("norm");
    let is_word = |word: &str| WORDS.contains(&word.trim_end_matches(|c: char| c.is_ascii_digit()));
    !is_branch && has(&PARTS) || segment.split('_').any(is_word)
}

/// Returns the first segment of a tensor's name after the number of its layer.
pub(crate) fn below_layer(name: &str) -> Option<&str> {
    let (before, layer) = layer_of(name)?;
    let rest = name[before.len()..].strip_prefix(&layer.to_string())?;
    rest.strip_prefix('.')?.split('.').next()
}

/// Sort key for natural order: 9 before 10.
pub fn natural(name: &str) -> impl Ord + use<> {
    let mut key = Vec::new();
    for piece in name.split_inclusive(|c: char| !c.is_ascii_digit()) {
        // Digits, followed by one other character except at the end of the name.
        let digits = piece.trim_end_matches(|c: char| !c.is_ascii_digit());
        if !digits.is_empty() {
            let number = digits.trim_start_matches('0');
            key.push((0, number.len(), number.to_owned()));
        }
        if digits.len() < piece.len() {
            key.push((1, 0, piece[digits.len()..].to_owned()));
        }
    }
    key
}

/// Returns the module name with `*` in place of the expert number.
pub fn without_expert(module: &str) -> String {
    match Projection::parse(module) {
        Some(Projection { expert: Expert::Routed(_), around_expert: (before, after), .. }) => {
            format!("{before}*{after}")
        }
        _ => module.to_owned(),
    }
}

/// Returns the tensor name with `*` in place of the expert number.
pub(crate) fn any_expert(name: &str) -> String {
    match Projection::parse(name) {
        Some(Projection { module, part, .. }) => without_expert(module) + part,
        None => name.to_owned(),
    }
}

/// Segments of a name between dots, with the offset of each.
fn segments(name: &str) -> impl Iterator<Item = (usize, &str)> {
    name.split('.').map(|segment| (segment.as_ptr() as usize - name.as_ptr() as usize, segment))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns stack, layer, block, expert, role and part.
    fn parsed(name: &str) -> Option<(&str, usize, &str, Expert, Role, &str)> {
        let found = Projection::parse(name)?;
        assert_eq!(format!("{}{}", found.module, found.part), name);
        let (before, after) = found.around_expert;
        match found.expert {
            Expert::Routed(expert) => assert_eq!(format!("{before}{expert}{after}"), found.module),
            _ => assert_eq!((before, after), (found.module, "")),
        }
        Some((found.stack, found.layer, found.block, found.expert, found.role, found.part))
    }

    #[test]
    fn projection_names_of_every_family_are_parsed() {
        use Expert::{Dense, Fused, Routed, Shared};
        use Role::{Down, Gate, GateUp, Up};
        for (name, expected) in [
            ("model.layers.3.mlp.gate_proj.weight", ("model.layers.", 3, "mlp", Dense, Gate, ".weight")),
            (
                "model.layers.3.mlp.experts.12.up_proj.weight_scale_2",
                ("model.layers.", 3, "mlp", Routed(12), Up, ".weight_scale_2"),
            ),
            (
                "model.layers.0.block_sparse_moe.experts.7.w2.weight",
                ("model.layers.", 0, "block_sparse_moe", Routed(7), Down, ".weight"),
            ),
            (
                "language_model.model.layers.1.feed_forward.experts.gate_up_proj",
                ("language_model.model.layers.", 1, "feed_forward", Fused, GateUp, ""),
            ),
            (
                "model.layers.1.feed_forward.experts.4.w1.weight",
                ("model.layers.", 1, "feed_forward", Routed(4), Gate, ".weight"),
            ),
            (
                "language_model.model.layers.1.feed_forward.shared_expert.down_proj.weight",
                ("language_model.model.layers.", 1, "feed_forward", Shared, Down, ".weight"),
            ),
            (
                "model.layers.3.mlp.experts.gate_proj.5.weight_packed",
                ("model.layers.", 3, "mlp", Routed(5), Gate, ".weight_packed"),
            ),
            (
                "model.language_model.layers.3.experts.5.down_proj.weight",
                ("model.language_model.layers.", 3, "", Routed(5), Down, ".weight"),
            ),
            (
                "model.language_model.layers.3.experts.gate_up_proj",
                ("model.language_model.layers.", 3, "", Fused, GateUp, ""),
            ),
            (
                "model.language_model.layers.3.moe.gate_up_proj",
                ("model.language_model.layers.", 3, "moe", Fused, GateUp, ""),
            ),
            ("model.layers.3.moe.experts.0.gate_proj.weight", ("model.layers.", 3, "moe", Routed(0), Gate, ".weight")),
            ("model.layers.2.mlp.experts.gate_up_proj_blocks", ("model.layers.", 2, "mlp", Fused, GateUp, "_blocks")),
            ("model.layers.2.mlp.experts.down_proj_bias", ("model.layers.", 2, "mlp", Fused, Down, "_bias")),
            (
                "backbone.layers.6.mixer.experts.3.up_proj.weight",
                ("backbone.layers.", 6, "mixer", Routed(3), Up, ".weight"),
            ),
            (
                "backbone.layers.6.mixer.shared_experts.down_proj.weight",
                ("backbone.layers.", 6, "mixer", Shared, Down, ".weight"),
            ),
            ("layers.60.ffn.experts.255.w3.scale", ("layers.", 60, "ffn", Routed(255), Up, ".scale")),
            (
                "model.layers.3.mlp.experts.w13_weight_scale",
                ("model.layers.", 3, "mlp", Fused, GateUp, "_weight_scale"),
            ),
            ("model.layers.0.shared_mlp.input_linear.weight", ("model.layers.", 0, "", Shared, GateUp, ".weight")),
            ("model.layers.4.share_expert.up_proj.weight", ("model.layers.", 4, "", Shared, Up, ".weight")),
            ("layers.60.ffn.shared_experts.w1.weight", ("layers.", 60, "ffn", Shared, Gate, ".weight")),
            ("model.layers.3.mlp.experts.1.gate_proj", ("model.layers.", 3, "mlp", Routed(1), Gate, "")),
        ] {
            assert_eq!(parsed(name), Some(expected), "{name}");
        }
    }

    #[test]
    fn other_names_are_not_projections() {
        for name in [
            "",
            ".",
            "layers",
            "layers.",
            "layers.3",
            "model.layers.x.mlp.gate_proj.weight",
            "model.layers.03.mlp.gate_proj.weight",
            "model.layers.-1.mlp.gate_proj.weight",
            "model.layers.99999999999999999999999.mlp.gate_proj.weight",
            "model.layers.3.mlp.gate.weight",
            "model.layers.3.mlp.experts.x.gate_proj.weight",
            "model.layers.3.mlp.experts.1.2.gate_proj.weight",
            "model.layers.3.self_attn.q_proj.weight",
            "model.norm.weight",
            "lm_head.weight",
            "gate_proj.weight",
        ] {
            assert_eq!(parsed(name), None, "{name}");
        }
    }

    proptest! {
        #[test]
        fn module_and_part_make_up_any_name(words in proptest::collection::vec(0..WORDS.len(), 0..12)) {
            let name = words.iter().map(|&word| WORDS[word]).collect::<Vec<_>>().join(".");
            parsed(&name);
            layer_of(&name);
            Aside::of(&name);
            let merged = merged_with(&name).count();
            prop_assert!(merged <= 2);
        }
    }

    /// Segments of the generated names; some occur in no model.
    const WORDS: [&str; 20] = [
        "layers",
        "3",
        "0",
        "99999999999999999999",
        "experts",
        "mlp",
        "moe",
        "gate_proj",
        "w1",
        "w2",
        "gate_up_proj_blocks",
        "down_proj_",
        "weight",
        "shared_expert",
        "vision_tower",
        "mtp",
        "gate",
        "",
        "é",
        "*",
    ];

    #[test]
    fn merged_projections_find_each_other() {
        let merged = |module| merged_with(module).collect::<Vec<_>>();
        assert_eq!(merged("a.mlp.gate_proj"), ["a.mlp.up_proj"]);
        assert_eq!(merged("a.experts.3.w3"), ["a.experts.3.w1"]);
        assert_eq!(merged("a.experts.w3.3"), ["a.experts.w1.3"]);
        assert_eq!(merged("a.k_proj"), ["a.q_proj", "a.v_proj"]);
        assert_eq!(merged("a.self_attn.q_a_proj"), ["a.self_attn.kv_a_proj_with_mqa"]);
        assert_eq!(merged("layers.0.attn.wkv"), ["layers.0.attn.wq_a"]);
        assert_eq!(merged("w1"), ["w3"]);
        assert!(["a.down_proj", "", "a.o_proj"].iter().all(|module| merged(module).is_empty()));
    }

    #[test]
    fn parts_outside_the_language_model_are_recognized() {
        for (name, aside) in [
            ("model.visual.blocks.3.mlp.gate_proj.weight", Some(Aside::Tower)),
            ("vision_tower.encoder.layers.0.mlp.fc1.weight", Some(Aside::Tower)),
            ("model.vision_tower.layers.0.mlp.gate_proj.weight", Some(Aside::Tower)),
            ("thinker.audio_tower.layers.1.fc1.weight", Some(Aside::Tower)),
            ("multi_modal_projector.linear_1.weight", Some(Aside::Tower)),
            ("mtp.layers.0.mlp.experts.3.gate_proj.weight", Some(Aside::Draft)),
            ("model.mtp.0.ffn.experts.3.w1.weight", Some(Aside::Draft)),
            ("model.layers.3.mlp.gate.weight", Some(Aside::Router)),
            ("model.layers.3.router.proj.weight", Some(Aside::Router)),
            ("model.layers.3.mlp.shared_expert_gate.weight", Some(Aside::Router)),
            ("layers.3.ffn.gate.tid2eid", Some(Aside::Router)),
            ("model.layers.3.mlp.gate_proj.weight", None),
            ("model.language_model.layers.3.experts.5.down_proj.weight", None),
            ("model.embed_tokens.weight", None),
            ("invitation.weight", None),
        ] {
            assert_eq!(Aside::of(name), aside, "{name}");
        }
    }

    #[test]
    fn names_sort_by_their_numbers() {
        let mut names = ["a.10.b", "a.9.b", "a.9", "a.x", "b", "a.010.a", "a"];
        names.sort_by_key(|name| natural(name));
        assert_eq!(names, ["a", "a.9", "a.9.b", "a.010.a", "a.10.b", "a.x", "b"]);
    }

    #[test]
    fn only_the_expert_number_becomes_a_star() {
        for (module, expected) in [
            ("model.layers.3.mlp.experts.12.w1", "model.layers.3.mlp.experts.*.w1"),
            ("model.layers.3.mlp.experts.w1.3", "model.layers.3.mlp.experts.w1.*"),
            ("model.layers.3.mlp.shared_experts.w1", "model.layers.3.mlp.shared_experts.w1"),
            ("model.layers.3.self_attn.q_proj", "model.layers.3.self_attn.q_proj"),
        ] {
            assert_eq!(without_expert(module), expected);
        }
    }

    #[test]
    fn attention_and_norms_beside_a_block_are_recognized() {
        for name in [
            "model.layers.3.self_attn.q_proj.weight",
            "model.layers.3.linear_attn.in_proj_qkvz.weight",
            "model.layers.3.attention.query_key_value.weight",
            "model.layers.3.mamba.in_proj.weight",
            "model.layers.3.short_conv.weight",
            "model.layers.3.post_attention_layernorm.weight",
            "model.layers.3.ln_2.weight",
            "model.layers.3.attn_mlp_norm.weight",
            "layers.3.hc_ffn_fn",
            "model.layers.3.layer_scalar",
        ] {
            assert!(is_no_feed_forward(below_layer(name).unwrap()), "{name}");
        }
        for name in [
            "model.layers.3.mlp.x",
            "model.layers.3.residual_mlp.w1",
            "model.layers.3.shared_mlp.x",
            "layers.3.ffn",
            "model.layers.3.attn_mlp.w1",
            "layers.3.attention_expert",
        ] {
            assert!(!is_no_feed_forward(below_layer(name).unwrap()), "{name}");
        }
        assert_eq!(below_layer("layers.3"), None);
    }

    #[test]
    fn layer_number_of_any_tensor_is_found() {
        assert_eq!(layer_of("model.layers.61.eh_proj.weight"), Some(("model.layers.", 61)));
        assert_eq!(layer_of("layers.0"), Some(("layers.", 0)));
        assert!(["", "layers", "layers.x", "lm_head.weight"].iter().all(|name| layer_of(name).is_none()));
    }
}
