//! Lists what stays unquantized, for the configurations of servers.

use super::stored::WEIGHT;
use crate::file::TensorFile;
use crate::names::Projection;
use crate::{Checkpoint, Format};

/// Returns the modules of all matrices that are not quantized. `is_quantized` receives names of tensors.
pub(super) fn unquantized(checkpoint: &Checkpoint, format: Format, is_quantized: &dyn Fn(&str) -> bool) -> Vec<String> {
    let mut left = vec!["lm_head".to_owned()];
    for (name, tensor) in checkpoint.files().iter().flat_map(TensorFile::tensors) {
        if is_quantized(name) {
            continue;
        }
        let module = name.strip_suffix(WEIGHT).unwrap_or(name);
        let last = module.rsplit('.').next().unwrap_or_default();
        if tensor.shape.len() == 2 && name.ends_with(WEIGHT) && !last.contains("embed") {
            left.push(module.to_owned());
        } else if let Some(Projection { module, part: "" | WEIGHT, .. }) = Projection::parse(name)
            && tensor.shape.len() == 3
        {
            // For experts that stay in one tensor, engines look up the block of the experts.
            let before = module.rsplit_once('.').map_or(module, |(before, _)| before);
            left.push(before.to_owned());
            if format == Format::CompressedTensors {
                left.push(format!("re:{}\\..*", before.replace('.', "\\.")));
            }
        }
    }
    left
}
