//! MoE layers on the CPU.

use nvfp4::Error;
use nvfp4::backend::cpu::{Cpu, CpuMoeLayer};
use nvfp4::bias::Bias;
use nvfp4::format::Matrix;
use nvfp4::moe::{Biases, MoeExpert, MoeInputs, MoeOutput, MoeSizes, MoeWeights};

use crate::pointer::{elements, elements_mut, value};
use crate::status::{guard, nvfp4_status};
use crate::types::{nvfp4_moe_call, nvfp4_moe_sizes, nvfp4_moe_tensors, nvfp4_tensor};

/// An MoE layer prepared for the CPU. Several threads may run calls at once.
pub struct nvfp4_moe_cpu(CpuMoeLayer<'static>);

/// Copies the experts of a layer.
///
/// # Safety
///
/// The tensors' pointers are null or point to host memory of these sizes.
unsafe fn experts(
    tensors: &nvfp4_moe_tensors,
    count: usize,
    sizes: &MoeSizes,
    intermediate: usize,
) -> Result<Vec<MoeExpert<'static>>, Error> {
    let hidden = sizes.hidden;
    let matrix = |tensor: &nvfp4_tensor, expert: usize, name: &str, rows: usize, k: usize| {
        let (values_len, scales_len) = (rows * k / 2, rows * k / 16);
        let [values, scales] = [(tensor.values, tensor.values_stride), (tensor.scales, tensor.scales_stride)]
            .map(|(first, stride)| if first.is_null() { first } else { first.wrapping_add(expert * stride) });
        // SAFETY: the caller guarantees that each pointer is null or points to host memory of this size.
        let (values, scales, globals) = unsafe {
            (
                elements(values, values_len, "values")?.to_vec(),
                elements(scales, scales_len, "scales")?.to_vec(),
                elements(tensor.global_scales, count, "global_scales")?,
            )
        };
        Matrix::new(rows, k, values, scales, globals[expert])
            .map_err(|error| error.at(format_args!("expert {expert}: {name}")))
    };
    let expert = |expert: usize| {
        let has_gate = sizes.activation.has_gate();
        let gate = has_gate.then(|| matrix(&tensors.gate, expert, "gate", intermediate, hidden)).transpose()?;
        let up = matrix(&tensors.up, expert, "up", intermediate, hidden)?;
        let down = matrix(&tensors.down, expert, "down", hidden, intermediate)?;
        let bias = |tensor: &nvfp4_tensor, rows: usize| {
            let is_there = sizes.biases && !tensor.bias.is_null();
            // SAFETY: the pointer is not null, so the caller guarantees `rows` biases per expert in host memory.
            let of_expert = || unsafe { elements(tensor.bias.wrapping_add(expert * rows), rows, "bias") };
            let numbers = is_there.then(of_expert).transpose()?;
            Ok::<_, Error>(numbers.map(|numbers| Bias::F32(numbers.to_vec().into())))
        };
        let biases = Biases {
            gate: if has_gate { bias(&tensors.gate, intermediate)? } else { None },
            up: bias(&tensors.up, intermediate)?,
            down: bias(&tensors.down, hidden)?,
        };
        Ok(MoeExpert { gate, up, down, biases })
    };
    (0..count).map(expert).collect()
}

/// Makes a layer from tensors in host memory, and copies them. `shared` is null if `sizes` has no shared expert.
/// `expert_map` is null if tokens name experts by their index in the layer. Otherwise it has `named_experts` indices,
/// negative for experts on other devices.
///
/// # Safety
///
/// The pointers point to host memory of these sizes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvfp4_moe_cpu_create(
    sizes: *const nvfp4_moe_sizes,
    tensors: *const nvfp4_moe_tensors,
    shared: *const nvfp4_moe_tensors,
    expert_map: *const i32,
    layer: *mut *mut nvfp4_moe_cpu,
) -> nvfp4_status {
    guard(|| {
        // SAFETY: the caller guarantees that the pointers are null or point to host memory of these sizes.
        let (sizes, tensors, shared, layer) = unsafe {
            (
                value(sizes, "sizes")?.checked()?,
                value(tensors, "tensors")?,
                shared.as_ref(),
                elements_mut(layer, 1, "layer")?,
            )
        };
        let MoeSizes { experts: count, named_experts, top_k, shared_intermediate, dtype, activation, .. } = sizes;
        // SAFETY: the caller guarantees that the tensors are in host memory, with these sizes.
        let routed = unsafe { experts(tensors, count, &sizes, sizes.intermediate)? };
        let weights = MoeWeights::with_activation(dtype, top_k, activation, routed)?;
        let mut weights = weights.with_token_format(sizes.token_format);
        match (shared, shared_intermediate) {
            (None, None) => {}
            (Some(shared), Some(intermediate)) => {
                // SAFETY: the caller guarantees that the shared expert's tensors are in host memory, with these sizes.
                let shared = unsafe { experts(shared, 1, &sizes, intermediate)? }.remove(0);
                weights = weights.with_shared(shared)?;
            }
            _ => return Err(Error::Invalid("give both shared and sizes.shared_intermediate, or neither".into())),
        }
        if sizes.input_scales {
            // SAFETY: the caller guarantees that the input scales are in host memory, one per expert.
            let (mut all, of_shared) = unsafe {
                let of_shared = shared.map(|shared| shared.input_scales(1, &sizes)).transpose()?;
                (tensors.input_scales(count, &sizes)?, of_shared)
            };
            all.extend(of_shared.into_iter().flatten());
            weights = weights.with_input_scales(all)?;
        }
        if !expert_map.is_null() {
            // SAFETY: the pointer is not null, so the caller guarantees `named_experts` indices in host memory.
            weights =
                weights.with_expert_map(unsafe { elements(expert_map, named_experts, "expert_map")? }.to_vec())?;
        } else if named_experts != count {
            return Err(Error::Mismatch {
                what: "sizes.named_experts without expert_map",
                got: named_experts,
                expected: count,
            });
        }
        layer[0] = Box::into_raw(Box::new(nvfp4_moe_cpu(Cpu::new().prepare_moe_layer(&weights)?)));
        Ok(())
    })
}

/// Computes a call. Its pointers point to host memory.
///
/// # Safety
///
/// The layer was made by `nvfp4_moe_cpu_create` and not destroyed. The call's memory has the sizes that the call
/// states.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvfp4_moe_cpu_run(layer: *mut nvfp4_moe_cpu, call: *const nvfp4_moe_call) -> nvfp4_status {
    guard(|| {
        // SAFETY: the caller guarantees that the layer and the call are null or valid.
        let (nvfp4_moe_cpu(layer), call) = unsafe { (value(layer.cast_const(), "layer")?, value(call, "call")?) };
        let MoeSizes { hidden, top_k, .. } = layer.sizes();
        let rows = |stride: usize, name: &str| {
            if stride < hidden {
                return Err(Error::Invalid(format!("{name} is {stride}, less than the hidden size {hidden}")));
            }
            let before = call.tokens.saturating_sub(1).checked_mul(stride).ok_or(Error::TooLarge)?;
            Ok(if call.tokens == 0 { 0 } else { before.checked_add(hidden).ok_or(Error::TooLarge)? })
        };
        let choices = call.tokens.checked_mul(top_k).ok_or(Error::TooLarge)?;
        // SAFETY: the caller guarantees that the call's pointers are null or point to host memory of these sizes.
        let (inputs, output) = unsafe {
            let shared = match call.shared_weights {
                weights if weights.is_null() => None,
                weights => Some(elements(weights, call.tokens, "shared_weights")?.into()),
            };
            let inputs = MoeInputs {
                tokens: call.tokens,
                hidden: elements(call.hidden_states, rows(call.hidden_stride, "hidden_stride")?, "hidden_states")?
                    .into(),
                stride: call.hidden_stride,
                ids: elements(call.topk_ids, choices, "topk_ids")?.into(),
                weights: elements(call.topk_weights, choices, "topk_weights")?.into(),
                weights_on_input: call.weights_on_input,
                shared_weights: shared,
            };
            (inputs, elements_mut(call.output, rows(call.output_stride, "output_stride")?, "output")?)
        };
        let step = layer.step(inputs)?;
        let mut computed = MoeOutput::new(&step);
        layer.execute(&step, &mut computed)?;
        for (row, from) in computed.hidden.chunks_exact(hidden).enumerate() {
            output[row * call.output_stride..][..hidden].copy_from_slice(from);
        }
        Ok(())
    })
}

/// Frees a layer. Does nothing for null.
///
/// # Safety
///
/// The layer was made by `nvfp4_moe_cpu_create`, no call uses it, and it is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvfp4_moe_cpu_destroy(layer: *mut nvfp4_moe_cpu) {
    if !layer.is_null() {
        guard(|| {
            // SAFETY: `nvfp4_moe_cpu_create` made the pointer from a box, and the caller guarantees that this is its
            // last use.
            drop(unsafe { Box::from_raw(layer) });
            Ok(())
        });
    }
}
