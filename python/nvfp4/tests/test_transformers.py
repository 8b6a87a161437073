"""Small random models of several families, quantized by the command `nvfp4 quantize` and loaded by Transformers with `nvfp4.transformers`.

The command is `NVFP4_COMMAND`, or the one that cargo built. Needs Transformers 5 and safetensors.
"""

import os
import pathlib
import shutil
import subprocess

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5", reason="needs Transformers 5")

import nvfp4
import nvfp4.transformers
from nvfp4.transformers import Nvfp4Config, Nvfp4Experts

ROOT = pathlib.Path(__file__).resolve().parents[3]
COMMAND = os.environ.get("NVFP4_COMMAND") or next(
    (str(path) for kind in ("release", "debug") if (path := ROOT / "target" / kind / "nvfp4").exists()), shutil.which("nvfp4")
)
pytestmark = pytest.mark.skipif(COMMAND is None, reason="no command `nvfp4`: cargo build --release -p nvfp4 --features cli")

COMMON = {"vocab_size": 128, "max_position_embeddings": 128, "tie_word_embeddings": False, "num_hidden_layers": 2}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
HEADS = ATTENTION | {"head_dim": 16}
MOE = {"moe_intermediate_size": 32, "intermediate_size": 64, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
FAMILIES = {
    "llama": ("LlamaConfig", HEADS | {"intermediate_size": 64}),
    "qwen3_moe": ("Qwen3MoeConfig", HEADS | MOE | {"num_experts": 4, "mlp_only_layers": [0]}),
    "mixtral": ("MixtralConfig", HEADS | {"intermediate_size": 64, "num_local_experts": 4}),
    "gpt_oss": ("GptOssConfig", HEADS | {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm4_moe": ("Glm4MoeConfig", HEADS | MOE | ROUTED),
    "deepseek_v3": ("DeepseekV3Config", ATTENTION | MOE | ROUTED | LATENT | {"num_key_value_heads": 4}),
    "granitemoe": ("GraniteMoeConfig", ATTENTION | {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}),
    # Its experts have an interface of their own, so they are dequantized.
    "llama4": ("Llama4TextConfig", HEADS | {"intermediate_size": 64, "intermediate_size_mlp": 96, "num_local_experts": 2, "num_experts_per_tok": 1}),
}
# Layers of experts that `nvfp4` computes.
EXPERTS = {"llama": 0, "llama4": 0, "qwen3_moe": 1, "glm4_moe": 1, "deepseek_v3": 1}
PROJECTIONS = r"(_proj|_proj_with_mqa|w[123]|input_linear|output_linear)(\.weight)?$"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Returns a function that quantizes a family's model once per form, and returns the folders of the original and of the result."""
    folder = tmp_path_factory.mktemp("models")

    def make(family, form="modelopt", *options):
        original, quantized = folder / family, folder / "-".join((family, form, *options))
        if not original.exists():
            torch.manual_seed(0)
            name, sizes = FAMILIES[family]
            config = getattr(transformers, name)(**COMMON | sizes)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            with torch.no_grad():  # larger than the default, so that each layer counts
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        parameter.normal_(std=0.1)
            model.save_pretrained(original)
        if not quantized.exists():
            line = [COMMAND, "quantize", original, quantized, "--quiet", "--format", form, "--include", PROJECTIONS, *options]
            subprocess.run(line, check=True, capture_output=True, text=True)
        return original, quantized

    return make


def load(folder, device="cpu", dtype=torch.bfloat16, **options):
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        device_map=None if device == "cpu" else device,
        quantization_config=Nvfp4Config(**options),
        attn_implementation="eager",
        output_loading_info=True,
    )
    assert not any(report.values()), report
    return model


PROMPT = torch.arange(1, 25).reshape(2, 12)


@pytest.mark.parametrize("form", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_agree_with_the_dequantized_model(family, form, checkpoints, device):
    _, quantized = checkpoints(family, form)
    model, plain = load(quantized, device), load(quantized, device, dequantize=True)
    reference = load(quantized, "cpu", torch.float32, dequantize=True)
    assert sum(isinstance(module, Nvfp4Experts) for module in model.modules()) == EXPERTS.get(family, 2)
    assert sum(isinstance(module, nvfp4.Linear) for module in model.modules()) > 4
    assert not any(isinstance(module, (nvfp4.Linear, nvfp4.Moe)) for module in plain.modules())
    with torch.no_grad():
        ours, theirs, want = (m(PROMPT.to(m.device)).logits.float().cpu() for m in (model, plain, reference))
    # Rounding can change the experts of single tokens, so tokens are compared by the median, and all of them more loosely.
    error, allowed = ((got - want).square().mean(-1).sqrt().median() for got in (ours, theirs))
    assert error <= 1.5 * allowed + 1e-3, (error, allowed)
    everywhere = (ours - want).square().mean().sqrt()
    assert everywhere <= 0.3 * want.square().mean().sqrt()
    model.generation_config.eos_token_id = None  # otherwise padding follows it
    tokens = model.generate(PROMPT.to(device), max_new_tokens=8, do_sample=False, pad_token_id=0).cpu()
    with torch.no_grad():
        logits = reference(tokens).logits[:, PROMPT.shape[1] - 1 : -1]
    chosen = logits.gather(-1, tokens[:, PROMPT.shape[1] :, None]).squeeze(-1)
    assert (logits.amax(-1) - chosen <= 8 * torch.maximum(allowed, everywhere)).all(), "a generated token is not among the reference's best"


@pytest.mark.parametrize("form", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_weight_is_at_its_place(family, form, checkpoints):
    original, quantized = checkpoints(family, form)
    wanted = dict(transformers.AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32).named_parameters())
    found = dict(load(quantized, dtype=torch.float32, dequantize=True).named_parameters())
    assert wanted.keys() == found.keys()
    for name, want in wanted.items():
        # NVFP4 changes normally distributed weights by a tenth.
        assert (found[name] - want).norm() <= 0.15 * want.norm(), name


def test_layers_left_to_transformers_are_named(checkpoints, monkeypatch):
    messages = []
    monkeypatch.setattr("nvfp4._transformers.logger.warning", messages.append)
    load(checkpoints("llama4")[1])
    assert len(messages) == 1 and "feed_forward.experts (2 such modules)" in messages[0] and "Llama4TextExperts" in messages[0]
    messages.clear()
    load(checkpoints("qwen3_moe")[1])
    assert not messages


def test_experts_multiply_in_the_chosen_format(checkpoints):
    model = load(checkpoints("mixtral")[1], experts="fp8", linear="fp8")
    formats = {module.moe.token_format for module in model.modules() if isinstance(module, Nvfp4Experts)}
    assert formats == {"fp8"}
    assert model(PROMPT).logits.isfinite().all()


def test_configuration_keeps_the_description(checkpoints, tmp_path):
    _, quantized = checkpoints("llama", "compressed-tensors")
    model = load(quantized, linear="fp8")
    assert '"nvfp4-pack-quantized"' in repr(model.config)
    model.config.save_pretrained(tmp_path)
    kept = transformers.AutoConfig.from_pretrained(tmp_path).quantization_config
    assert kept["quant_method"] == "compressed-tensors" and kept["linear"] == "fp8"


def test_excluded_layers_stay_as_they_were(checkpoints):
    _, quantized = checkpoints("qwen3_moe", "modelopt", "--exclude", "model.layers.1")
    model = load(quantized)
    assert not any(isinstance(module, (nvfp4.Linear, Nvfp4Experts)) for module in model.model.layers[1].modules())
    assert any(isinstance(module, nvfp4.Linear) for module in model.model.layers[0].modules())


def test_adapters_get_gradients(checkpoints, device):
    _, quantized = checkpoints("qwen3_moe")
    gradients = []
    for options in ({"differentiable": True}, {"dequantize": True}):
        model = load(quantized, device, **options).requires_grad_(False)
        embedded = model.get_input_embeddings()(PROMPT.to(device)).requires_grad_()
        model(inputs_embeds=embedded).logits.float().square().mean().backward()
        gradients.append(embedded.grad.float())
    ours, want = gradients
    assert (ours - want).norm() <= 0.05 * want.norm()
    with pytest.raises(ValueError, match="differentiable=True"):
        load(quantized, device)(PROMPT.to(device)).logits.sum().backward()


def test_lora_adapters_learn(checkpoints, device):
    peft = pytest.importorskip("peft")
    model = load(checkpoints("qwen3_moe")[1], device, differentiable=True)
    config = nvfp4.transformers.lora(peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    model = peft.get_peft_model(model, config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * 2
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    losses = []
    for _ in range(10):
        loss = model(input_ids=PROMPT.to(device), labels=PROMPT.to(device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1, losses


def test_mistakes_name_the_remedy(checkpoints, tmp_path):
    original, quantized = checkpoints("llama")
    with pytest.raises(ValueError, match="no tensor is in NVFP4; `nvfp4 quantize"):
        load(original)
    with pytest.raises(ValueError, match="pass dtype=torch.bfloat16"):
        load(quantized, dtype=torch.float32)
    with pytest.raises(ValueError, match="experts: expected 16-bit, fp8 or nvfp4"):
        Nvfp4Config(experts="fp6")
    with pytest.raises(ValueError, match="serializable"):
        load(quantized).save_pretrained(tmp_path)
