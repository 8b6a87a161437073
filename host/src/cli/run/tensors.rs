//! Tensors of a checkpoint's layer that a run used and left, in reports.

use std::collections::BTreeSet;

use nvfp4::checkpoint::LayerTensors;
use nvfp4::printable;
use serde_json::{Value, json};

/// Returns the names of all tensors; `null` if the weights do not come from a checkpoint.
pub fn json(tensors: Option<&LayerTensors>) -> Value {
    tensors.map_or(Value::Null, |LayerTensors { used, left }| json!({"used": used, "left": left}))
}

/// Returns lines with the modules of the tensors, relative to the layer.
pub fn lines(tensors: Option<&LayerTensors>) -> Vec<String> {
    let Some(LayerTensors { used, left }) = tensors else { return Vec::new() };
    let prefix = common_prefix(used.iter().chain(left));
    let line = |(title, names): (&str, &Vec<String>)| {
        let modules: BTreeSet<&str> = names.iter().map(|name| module(&name[prefix.len()..])).collect();
        let modules = modules.into_iter().collect::<Vec<_>>().join(", ");
        (!modules.is_empty()).then(|| format!("{title}      {}", printable(&modules)))
    };
    [("used", used), ("left", left)].into_iter().filter_map(line).collect()
}

/// Returns the beginning, up to a dot, that all names share.
fn common_prefix<'n>(names: impl Iterator<Item = &'n String>) -> String {
    let shared = names.map(|name| name.split_inclusive('.').collect::<Vec<_>>()).reduce(|mut shared, name| {
        let count = shared.iter().zip(&name).take_while(|(one, other)| one == other).count();
        shared.truncate(count);
        shared
    });
    let segments = shared.unwrap_or_default();
    segments.into_iter().filter(|segment| segment.ends_with('.')).collect()
}

/// Returns the name without its last part: the module of a weight.
fn module(name: &str) -> &str {
    name.rsplit_once('.').map_or(name, |(module, _)| module)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_printed_relative_to_their_layer() {
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        let tensors = LayerTensors {
            used: names(&["model.layers.3.mlp.experts.*.w1.weight", "model.layers.3.mlp.experts.*.w1.weight_scale"]),
            left: names(&["model.layers.3.norm.weight", "model.layers.3.self_attn.q_proj.weight"]),
        };
        assert_eq!(lines(Some(&tensors)), ["used      mlp.experts.*.w1", "left      norm, self_attn.q_proj"]);
    }
}
