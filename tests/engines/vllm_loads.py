#!/usr/bin/env python3
"""Checks that vLLM's own code loads the models that `nvfp4 quantize` writes.

    vllm_loads.py PATH/TO/nvfp4             checks small models of several families, made by transformers
    vllm_loads.py PATH/TO/nvfp4 llama4      checks the models of one family
    vllm_loads.py --load MODEL_FOLDER       loads a quantized model

Needs a virtual environment with `pip install vllm==0.24.0` (about 10 GB) and a C compiler, but no GPU. It is not part of CI.

For each model, vLLM reads the configuration, builds the model for a Hopper GPU and loads the weights. This happens twice, with
different bytes in the parameters before loading. A parameter that differs afterwards was never loaded. No kernel runs.
"""

import ctypes
import json
import pathlib
import subprocess
import sys
import tempfile

# Parameters that a checkpoint may lack: scales of attention, and input scales of a model without calibration.
OF_ATTENTION = ("_scale", "_zero_point")
OF_INPUTS = ("input_scale", "input_global_scale")


def stub_driver():
    """Loads a stub of the CUDA driver without devices, for libraries that link to the driver."""
    folder = tempfile.mkdtemp()
    functions = ("cuGetProcAddress_v2", "cuPointerGetAttribute", "cuTensorMapEncodeTiled")
    source = "\n".join(f"int {name}(void) {{ return 100; }}" for name in functions)
    library = f"{folder}/libcuda.so.1"
    line = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o", library]
    subprocess.run(line, input=source, text=True, check=True)
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)


def pretend_hopper():
    """Makes vLLM see a platform of compute capability 9.0. Nothing may run on it."""
    import torch
    import vllm.platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class Hopper(CudaPlatformBase):
        get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
        get_device_name = classmethod(lambda cls, device_id=0: "H200")
        get_device_total_memory = classmethod(lambda cls, device_id=0: 141 << 30)
        num_compute_units = classmethod(lambda cls, device_id=0: 132)

        @classmethod
        def has_device_capability(cls, capability, device_id=0):
            wanted = capability if isinstance(capability, tuple) else divmod(capability, 10)
            return tuple(wanted) <= (9, 0)

    vllm.platforms._current_platform = Hopper()
    torch.cuda.Stream = type("Stream", (), {})
    # This module allocates on the device at import. vLLM uses another attention backend instead.
    sys.modules["vllm.v1.attention.backends.mla.flashinfer_mla"] = None


def load(folder):
    """Loads a quantized model as a server does, and prints the quantization method of its modules."""
    stub_driver()
    import torch

    pretend_hopper()
    from safetensors import safe_open
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    arguments = EngineArgs(model=str(folder), skip_tokenizer_init=True, enforce_eager=True, max_model_len=64)
    config = arguments.create_engine_config()

    def weights():
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                for name in file.keys():
                    yield name, file.get_tensor(name)

    def loaded(byte):
        with torch.device("cpu"):
            model = initialize_model(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data.view(-1).view(torch.uint8).fill_(byte)
        model.load_weights(weights())
        return model

    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as rendezvous:
        init_distributed_environment(1, 0, f"file://{rendezvous}/store", 0, backend="gloo")
        initialize_model_parallel(1, 1)
        torch.set_default_dtype(config.model_config.dtype)
        first = loaded(0)
        # vLLM refuses to register a layer name twice.
        config.compilation_config.static_forward_context.clear()
        second = loaded(1)
    others = dict(second.named_parameters())
    unwritten = []
    for name, parameter in first.named_parameters():
        optional = any(part in name for part in (".attn.", ".mla_attn.")) and name.endswith(OF_ATTENTION)
        optional |= not has_input_scales(folder) and name.endswith(OF_INPUTS)
        bytes_of = [p.data.view(-1).view(torch.uint8) for p in (parameter, others[name])]
        if not torch.equal(*bytes_of) and not optional:
            unwritten.append(name)
    methods = {}
    for name, module in first.named_modules():
        method = type(getattr(module, "quant_method", None)).__name__
        scheme = getattr(module, "scheme", None)
        method = type(scheme).__name__ if scheme is not None else method
        if method != "NoneType":
            methods[method] = methods.get(method, 0) + 1
    print(json.dumps({"unwritten": unwritten, "methods": methods, "parameters": len(others)}))


def has_input_scales(folder):
    description = json.loads((folder / "config.json").read_text())["quantization_config"]
    return description["config_groups"]["group_0"]["input_activations"] is not None


# Small models.

COMMON = {"vocab_size": 128, "max_position_embeddings": 128, "tie_word_embeddings": False, "num_hidden_layers": 2}


def configurations():
    import transformers as t

    attention = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64}
    moe = {"moe_intermediate_size": 32, "intermediate_size": 64, "num_experts_per_tok": 2}
    yield "llama", t.LlamaConfig(**COMMON, **attention, intermediate_size=64)
    yield "qwen3_moe", t.Qwen3MoeConfig(**COMMON, **attention, **moe, num_experts=4, mlp_only_layers=[0])
    yield "mixtral", t.MixtralConfig(**COMMON, **attention, intermediate_size=64, num_local_experts=4)
    llama4 = t.Llama4TextConfig(
        **COMMON, **attention, intermediate_size=64, intermediate_size_mlp=96, num_local_experts=2, num_experts_per_tok=1
    )
    yield "llama4", llama4
    yield (
        "deepseek_v3",
        t.DeepseekV3Config(
            **COMMON, **moe, hidden_size=256, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_group=1,
            topk_group=1, first_k_dense_replace=1, q_lora_rank=64, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128,
            v_head_dim=128, n_shared_experts=1,
        ),
    )  # fmt: skip


def make(name, config, folder):
    """Writes a model of random numbers. DeepSeek's weights are FP8, as in its published models."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    if name != "deepseek_v3":
        return
    tensors = load_file(folder / "model.safetensors")
    for key, weight in list(tensors.items()):
        if not key.endswith("_proj.weight") and "kv_a_proj" not in key:
            continue
        if weight.dim() != 2:
            continue
        n, k = weight.shape
        padded = torch.zeros(-(-n // 128) * 128, -(-k // 128) * 128)
        padded[:n, :k] = weight.float()
        blocks = padded.view(padded.shape[0] // 128, 128, -1, 128)
        scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-8) / 448
        codes = (blocks / scale[:, None, :, None]).view(padded.shape)[:n, :k].to(torch.float8_e4m3fn)
        tensors[key] = codes.contiguous()
        tensors[f"{key}_scale_inv"] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    described |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    described["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    (folder / "config.json").write_text(json.dumps(described))


def run_small_models(command, wanted):
    import transformers

    transformers.logging.set_verbosity_error()
    failed = 0
    for name, config in configurations():
        if wanted not in ("", name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            make(name, config, folder / "in")
            (folder / "amax.json").write_text('{"*": 3.5}')
            variants = {
                "modelopt": [],
                "modelopt, input scales": ["--calibrate", folder / "amax.json"],
                "modelopt, attention": ["--include", r"(_proj|w[123]|kv_a_proj_with_mqa)\.weight$"],
                "compressed-tensors": ["--format", "compressed-tensors"],
                "compressed-tensors, input scales": ["--format", "compressed-tensors", "--calibrate", folder / "amax.json"],
                "modelopt, one layer excluded": ["--exclude", "model.layers.1"],
            }
            for number, (variant, arguments) in enumerate(variants.items()):
                target = folder / str(number)
                line = [command, "quantize", folder / "in", target, "--quiet", *arguments]
                done = subprocess.run(line, capture_output=True, text=True)
                if done.returncode == 0:
                    done = subprocess.run([sys.executable, __file__, "--load", target], capture_output=True, text=True)
                lines = done.stdout.strip().splitlines()
                if done.returncode != 0 or not lines or json.loads(lines[-1])["unwritten"]:
                    failed += 1
                    print(f"{name}, {variant}: FAILED\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}", flush=True)
                else:
                    print(f"{name}, {variant}: {json.loads(lines[-1])['methods']}", flush=True)
    print(f"{failed} models failed")
    return failed


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "--load":
        load(pathlib.Path(sys.argv[2]))
    elif len(sys.argv) in (2, 3):
        sys.exit(min(run_small_models(pathlib.Path(sys.argv[1]).resolve(), "".join(sys.argv[2:])), 1))
    else:
        sys.exit(__doc__)
