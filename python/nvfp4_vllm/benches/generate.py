#!/usr/bin/env python3
"""Measures tokens per second in vLLM with CUDA graphs, for this library's kernels, Humming or Marlin.

    generate.py CONTENDER [--model qwen3-30b-a3b] [--layers N] [--json FILE] [--turn FILE --processes N] [--seconds N]

CONTENDER is `nvfp4`, `nvfp4-fp8` (W4A8), `humming` (from vLLM 0.32 on), `humming-fp8` or `marlin`. The model has the shape of a known one
and random, valid weights: `qwen3-30b-a3b` in full, or `gpt-oss-120b` (experts with biases and clamped SwiGLU) with some of its layers.

It measures the first request after the start; batches of 1, 4, 16, 64 and 128 prompts of 32 tokens with 128 generated tokens each; and
prefills of 512, 2048 and 8192 tokens. Each number is the median of several runs after a warm-up run. A profile at the end shows how the
GPU's time is divided among kernels. Each contender runs in its own process. With --turn and --processes, several processes start up at once
and measure one after the other: each adds a line to the file when it is ready, and measures when all lines are there. A script adds the line
of a process that fails.
"""

import argparse
import collections
import contextlib
import fcntl
import json
import pathlib
import random
import signal
import statistics
import tempfile
import time

from model import CONTENDERS, MODELS, engine, write

BATCHES, PREFILLS = (1, 4, 16, 64, 128), (512, 2048, 8192)


def fill(tensor, name):
    """Fills a tensor of a model with random valid numbers. vLLM's dummy weights may have negative block scales."""
    import torch

    tensor = tensor.data  # since 0.33 also parameters with gradients
    if tensor.dtype == torch.uint8:
        tensor.random_(0, 256)
    elif tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8).random_(0x30, 0x40)
    elif name.endswith("weight_scale_2"):
        tensor.fill_(0.007)  # e2m1 codes are about 3, block scales about 1
    elif tensor.dim() == 1:
        tensor.fill_(1.0)
    elif tensor.is_floating_point():
        tensor.normal_(0, 0.02)


def fill_dummies():
    """Makes vLLM's loader of dummy weights use :func:`fill`. Since 0.33 it calls a function for each tensor."""
    from vllm.model_executor.model_loader import dummy_loader

    def fill_all(model, *_):
        for name, tensor in model.state_dict().items():
            fill(tensor, name)

    if hasattr(dummy_loader, "initialize_single_dummy_weight"):
        dummy_loader.initialize_single_dummy_weight = fill
    else:
        dummy_loader.initialize_dummy_weights = fill_all


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contender", choices=list(CONTENDERS))
    parser.add_argument("--model", choices=list(MODELS), default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, help="default: 48 of qwen3-30b-a3b, 8 of gpt-oss-120b")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--turn", type=pathlib.Path, help="lock file; one process measures at a time")
    parser.add_argument("--processes", type=int, default=1, help="lines of --turn's file for which the measuring waits")
    parser.add_argument("--seconds", type=int, help="the process ends itself after this time")
    arguments = parser.parse_args()
    if arguments.seconds:
        signal.alarm(arguments.seconds)
    fill_dummies()
    of_model, described = MODELS[arguments.model]
    layers = arguments.layers or of_model
    found = {"contender": arguments.contender, "model": arguments.model, "layers": layers, "generate": {}, "prefill": {}, "profile": {}}
    with tempfile.TemporaryDirectory() as folder:
        write(folder, described(layers))
        begin = time.time()
        llm = engine(
            folder, arguments.contender, load_format="dummy", max_model_len=8448, max_num_batched_tokens=8448, gpu_memory_utilization=0.2,
            kv_cache_memory_bytes=3 << 30, enable_prefix_caching=False, compilation_config={"cudagraph_capture_sizes": list(BATCHES)},
        )  # fmt: skip
    found["ready_seconds"] = time.time() - begin
    print(f"{arguments.contender}: ready after {found['ready_seconds']:.1f} s", flush=True)
    found |= versions()
    wait_for_others(arguments)
    with turn(arguments):
        measure(llm, found, arguments)
    with turn(arguments):
        for batch, prompt, generated in ((1, 32, 16), (16, 32, 16), (128, 32, 16), (1, 2048, 1)):
            found["profile"][f"{batch}x{prompt}"] = profile(lambda: run(llm, batch, prompt, generated))
            keep(arguments, found)


def versions():
    import torch
    import vllm

    return {"vllm": vllm.__version__, "torch": torch.__version__, "device": torch.cuda.get_device_name()}


def run(llm, batch, prompt, generated):
    """Returns the seconds of one call."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [random.randrange(1000, 100000) for _ in range(prompt)]} for _ in range(batch)]
    # Tokens are sampled: the likeliest tokens of a random model repeat and are the same for all prompts, so few experts are hit.
    parameters = SamplingParams(max_tokens=generated, min_tokens=generated, temperature=1, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    llm.generate(prompts, parameters, use_tqdm=False)
    return time.perf_counter() - start


def measure(llm, found, arguments):
    """Adds the numbers to `found`, and writes them as they come."""
    random.seed(0)
    # A compiler that runs in the first request shows here. The second has the same sizes.
    found["first_token_ms"] = [run(llm, 1, 32, 1) * 1e3 for _ in range(2)]
    print("first token after {:.1f} ms, then {:.1f} ms".format(*found["first_token_ms"]), flush=True)
    for batch in BATCHES:
        run(llm, batch, 32, 16)
        repeats = 5 if batch == 1 else 3
        seconds = [run(llm, batch, 32, 128) for _ in range(repeats)]
        # The difference of two lengths gives a step's time without the prefill.
        short = statistics.median(run(llm, batch, 32, 16) for _ in range(repeats))
        middle = statistics.median(seconds)
        step = (middle - short) / 112 * 1e3
        found["generate"][batch] = {"tokens_per_second": batch * 128 / middle, "step_ms": step, "seconds": seconds}
        print(f"batch {batch}: {batch * 128 / middle:.0f} tokens/s, a step {step:.3f} ms", flush=True)
        keep(arguments, found)
    for prompt in PREFILLS:
        run(llm, 1, prompt, 1)
        seconds = [run(llm, 1, prompt, 1) for _ in range(7)]
        found["prefill"][prompt] = {"ms": statistics.median(seconds) * 1e3, "seconds": seconds}
        print(f"prefill of {prompt}: {statistics.median(seconds) * 1e3:.2f} ms", flush=True)
        keep(arguments, found)


def wait_for_others(arguments):
    """Returns when no other process starts up, which would disturb the measuring."""
    if arguments.turn:
        with open(arguments.turn, "a") as file:
            file.write("ready\n")
        while len(arguments.turn.read_text().splitlines()) < arguments.processes:
            time.sleep(0.5)


def turn(arguments):
    """Returns a context manager; while it is open, no other process measures."""
    held = contextlib.ExitStack()
    if arguments.turn:
        file = held.enter_context(open(arguments.turn, "a"))
        fcntl.flock(file, fcntl.LOCK_EX)
    return held


def profile(call):
    """Returns each kernel's share of the GPU's time."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    times, launches = collections.Counter(), collections.Counter()
    for event in profiler.events():
        if str(event.device_type).endswith("CUDA"):
            times[event.name[:90]] += event.device_time
            launches[event.name[:90]] += 1
    whole = sum(times.values())
    top = [(name, round(time / whole * 100, 2), launches[name]) for name, time in times.most_common(16)]
    print(f"GPU {whole / 1e3:.2f} ms:", ", ".join(f"{name[:48]} {share} % ×{count}" for name, share, count in top[:10]), flush=True)
    return {"gpu_ms": whole / 1e3, "kernels": top}


def keep(arguments, found):
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
