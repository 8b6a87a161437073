//! What a tensor is, told from its name: expert 5's gate projection of layer 3, a router, a part of the vision tower.
//! The only place that knows how families of models name things.
//!
//! Sources: the loaders of vLLM (`vllm/model_executor/models`) and the modules of transformers. What is understood, with
//! `P` a projection such as `gate_proj` or `w1`:
//!
//! | name below the number of the layer | in |
//! |---|---|
//! | `mlp.P`, `feed_forward.P`, `mixer.P` | dense layers; Llama 4; Nemotron-H |
//! | `BLOCK.experts.E.P` | most: `mlp`, `block_sparse_moe`, `feed_forward`, `ffn` (DeepSeek-V4), `mixer` (Nemotron-H), `moe` |
//! | `BLOCK.experts.P.E` | exports that keep one list for each projection |
//! | `experts.E.P`, `experts.P` | experts beside the dense block (Gemma 4) |
//! | `BLOCK.experts.gate_up_proj`, `…_blocks`, `…_bias` | all experts in one tensor (Llama 4, gpt-oss, Qwen3-VL-MoE) |
//! | `BLOCK.shared_experts.P` | experts that every token passes |

/// What a projection does, whatever it is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Role {
    /// The projection under SiLU.
    Gate,
    /// The one that it is multiplied with; without a gate, the first of two.
    Up,
    /// The one back to the size of a token.
    Down,
    /// Gate and up in one tensor.
    GateUp,
}

/// How projections of feed-forward blocks are called.
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
    // Granite's, with all experts in one tensor.
    ("input_linear", Role::GateUp),
    ("output_linear", Role::Down),
    // Without a gate: one projection up, one down.
    ("fc1", Role::Up),
    ("fc2", Role::Down),
];

/// What routers are called below their block.
pub(crate) const ROUTER_WEIGHTS: [&str; 5] = ["gate", "router", "router.layer", "router.proj", "gate.wg"];

/// Projections that read the same activations. Engines load them into one matrix and keep one global scale of theirs, so
/// they are quantized with one.
const MERGED: [&[&str]; 7] = [
    &["gate_proj", "up_proj"],
    &["w1", "w3"],
    &["q_proj", "k_proj", "v_proj"],
    &["q_a_proj", "kv_a_proj_with_mqa"],
    &["wq_a", "wkv"],
    &["in_proj_qkv", "in_proj_z"],
    &["in_proj_b", "in_proj_a"],
];

/// Which of a layer's experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Expert {
    /// One of those that a router chooses.
    Routed(usize),
    /// All of those, in one tensor with the expert as first dimension.
    Fused,
    /// The one of a layer that has no router, or of the block beside the experts.
    Dense,
    /// One that every token passes, beside the routed ones.
    Shared,
}

/// A projection of a feed-forward block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Projection<'n> {
    /// What stands before the number of the layer, with its dot: `model.layers.`.
    pub stack: &'n str,
    /// The number of the layer.
    pub layer: usize,
    /// What stands between that and the experts or the projection: `mlp`; empty for experts right below the layer.
    pub block: &'n str,
    /// Whose it is.
    pub expert: Expert,
    /// What it does.
    pub role: Role,
    /// The name up to what belongs to the projection alone: `model.layers.3.mlp.experts.5.gate_proj`.
    pub module: &'n str,
    /// The rest, with the dot or the underscore in front: `.weight`, `_blocks`; empty for a bare parameter.
    pub part: &'n str,
    /// The module without the number of its expert: what stands before that and what behind. All of it stands before where
    /// there is no number.
    pub around_expert: (&'n str, &'n str),
}

impl<'n> Projection<'n> {
    /// What the name of a tensor or of a module says, if it is that of a projection of a layer.
    pub(crate) fn parse(name: &'n str) -> Option<Self> {
        let segments: Vec<(usize, &str)> = segments(name).collect();
        let number = |at: usize| segments.get(at).and_then(|(_, segment)| number(segment));
        let of_layers = (0..segments.len()).find(|&at| segments[at].1 == "layers" && number(at + 1).is_some())?;
        let layer = number(of_layers + 1)?;
        let stack = &name[..segments[of_layers + 1].0];
        let below = of_layers + 2;
        // The first segment that names a projection; `experts.gate_proj.weight` has but one.
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
            // experts.E.P
            Some(experts) if at == experts + 2 => (Expert::Routed(number(experts + 1)?), Some(experts + 1), end),
            Some(experts) if at == experts + 1 => match number(at + 1) {
                // experts.P.E
                Some(expert) if called == segments[at].1 => (Expert::Routed(expert), Some(at + 1), end_of(at + 1)),
                _ => (Expert::Fused, None, end),
            },
            Some(_) => return None,
            // Gemma 4's first export had all experts in `moe.gate_up_proj`.
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

/// The number of the layer that a tensor belongs to, and what stands before it, with its dot.
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

/// The modules that engines load into one matrix together with this one, under the names that they would have.
pub(crate) fn merged_with(module: &str) -> impl Iterator<Item = String> {
    let found = segments(module).filter_map(|(start, segment)| {
        let names = MERGED.into_iter().find(|names| names.contains(&segment))?;
        Some((start, segment, names))
    });
    // `experts.w1.5` has a number behind it.
    let (start, segment, names) = found.last().unwrap_or((0, "", &[]));
    let (before, after) = (&module[..start], &module[start + segment.len()..]);
    names.iter().filter(move |&&name| name != segment).map(move |name| format!("{before}{name}{after}"))
}

/// What a tensor belongs to that is not the language model itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Aside {
    /// An encoder of images, video or sound, or what joins it to the language model.
    Tower,
    /// Layers that draft tokens ahead (multi-token prediction, EAGLE).
    Draft,
    /// The small matrix that chooses experts.
    Router,
}

impl Aside {
    /// In words.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Tower => "a tower for images or sound",
            Self::Draft => "layers that draft tokens",
            Self::Router => "a router",
        }
    }

    /// What the name of a tensor or a module says.
    pub(crate) fn of(name: &str) -> Option<Self> {
        const TOWERS: [&str; 10] =
            ["vision", "visual", "audio", "image", "img", "vit", "mm_projector", "multi_modal", "multimodal", "siglip"];
        const DRAFTS: [&str; 5] = ["mtp", "nextn", "eagle", "draft", "medusa"];
        // With what some put beside the router's matrix: biases of its choice, tables of its choices.
        const ROUTERS: [&str; 10] = [
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
        ];
        let in_words = |segment: &str, words: &[&str]| {
            words.iter().any(|word| {
                // A whole word of the segment: `vision_tower`, `visual`, `mtp_block`; not `invitation`.
                segment == *word
                    || segment.split('_').any(|part| part == *word)
                    || segment.starts_with(&format!("{word}_"))
            })
        };
        // A projection may be called what a tower is: only what stands before it tells.
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

/// The number of a layer or an expert; digits alone.
fn number(segment: &str) -> Option<usize> {
    (segment.bytes().all(|byte| byte.is_ascii_digit()) && (segment == "0" || !segment.starts_with('0')))
        .then(|| segment.parse().ok())
        .flatten()
}

/// The projection that a segment is named after, perhaps with a part behind an underscore: `gate_up_proj_blocks`.
fn projection(segment: &str) -> Option<(&'static str, Role)> {
    PROJECTIONS.into_iter().find(|(called, _)| *called == segment).or_else(|| {
        PROJECTIONS.into_iter().find(|(called, _)| {
            called.ends_with("_proj") && segment.strip_prefix(called).is_some_and(|rest| rest.starts_with('_'))
        })
    })
}

/// Whether a segment names experts that every token passes.
pub(crate) fn is_shared(segment: &str) -> bool {
    segment.starts_with("shared_expert") || segment == "shared_mlp"
}

/// A key that puts names in natural order: 9 before 10.
pub fn natural(name: &str) -> impl Ord + use<> {
    let mut key = Vec::new();
    for piece in name.split_inclusive(|c: char| !c.is_ascii_digit()) {
        // Digits, then one other character unless the name ends.
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

/// A module's name with `*` for the number of its expert.
pub fn without_expert(module: &str) -> String {
    match Projection::parse(module) {
        Some(Projection { expert: Expert::Routed(_), around_expert: (before, after), .. }) => {
            format!("{before}*{after}")
        }
        _ => module.to_owned(),
    }
}

/// The parts of a name between its dots, and where each starts.
fn segments(name: &str) -> impl Iterator<Item = (usize, &str)> {
    name.split('.').map(|segment| (segment.as_ptr() as usize - name.as_ptr() as usize, segment))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Stack, layer, block, expert, role, part.
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
    fn names_of_every_family_say_the_same() {
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
            ("layers.60.ffn.shared_experts.w1.weight", ("layers.", 60, "ffn", Shared, Gate, ".weight")),
            ("model.layers.3.mlp.experts.1.gate_proj", ("model.layers.", 3, "mlp", Routed(1), Gate, "")),
        ] {
            assert_eq!(parsed(name), Some(expected), "{name}");
        }
    }

    #[test]
    fn other_names_are_no_projections_of_a_layer() {
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
        fn any_name_is_its_module_and_its_part(words in proptest::collection::vec(0..WORDS.len(), 0..12)) {
            let name = words.iter().map(|&word| WORDS[word]).collect::<Vec<_>>().join(".");
            parsed(&name);
            layer_of(&name);
            Aside::of(&name);
            let merged = merged_with(&name).count();
            prop_assert!(merged <= 2);
        }
    }

    /// Of which names are made, and what stands in none.
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
    fn what_is_not_the_language_model_is_told_apart() {
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
    fn names_are_ordered_by_the_numbers_in_them() {
        let mut names = ["a.10.b", "a.9.b", "a.9", "a.x", "b", "a.010.a", "a"];
        names.sort_by_key(|name| natural(name));
        assert_eq!(names, ["a", "a.9", "a.9.b", "a.010.a", "a.10.b", "a.x", "b"]);
    }

    #[test]
    fn only_the_number_of_an_expert_is_left_out() {
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
    fn the_layer_of_any_tensor_is_found() {
        assert_eq!(layer_of("model.layers.61.eh_proj.weight"), Some(("model.layers.", 61)));
        assert_eq!(layer_of("layers.0"), Some(("layers.", 0)));
        assert!(["", "layers", "layers.x", "lm_head.weight"].iter().all(|name| layer_of(name).is_none()));
    }
}
