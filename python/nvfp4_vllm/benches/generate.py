#!/usr/bin/env python3
"""Measures tokens per second of Qwen3-30B-A3B's full shape in vLLM with CUDA graphs, for this library's kernels or Marlin.

    generate.py nvfp4 | marlin [--layers 48] [--json FILE] [--turn FILE]

Weights are random and valid. It measures batches of 1, 16 and 128 prompts of 32 tokens with 128 generated tokens each, and a prefill of
2048 tokens. Each number is the median of several runs after a warm-up run. A profile at the end shows how the GPU's time is divided among
kernels. Each contender runs in its own process. With --turn, several processes can start up at once and measure one after the other.
"""

import argparse
import collections
import contextlib
import fcntl
import json
import pathlib
import random
import statistics
import tempfile
import time

from model import engine, write_config


def fill(model, *_):
    """Fills a model with random valid weights. vLLM's dummy weights may have negative block scales."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(0)
    for name, tensor in model.state_dict().items():
        if tensor.dtype == torch.uint8:
            tensor.random_(0, 256, generator=generator)
        elif tensor.dtype == torch.float8_e4m3fn:
            codes = torch.randint(0x30, 0x40, tensor.shape, dtype=torch.uint8, device=tensor.device, generator=generator)
            tensor.view(torch.uint8).copy_(codes)
        elif name.endswith("scale_2"):
            tensor.fill_(0.007)  # e2m1 codes are about 3, block scales about 1
        elif tensor.dim() == 1:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0, 0.02, generator=generator)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=["nvfp4", "marlin"])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--turn", type=pathlib.Path, help="lock file; one process measures at a time")
    arguments = parser.parse_args()
    from vllm.model_executor.model_loader import dummy_loader

    dummy_loader.initialize_dummy_weights = fill
    found = {"contender": arguments.contender, "layers": arguments.layers, "generate": {}, "prefill": {}, "profile": {}}
    with tempfile.TemporaryDirectory() as folder:
        write_config(folder, arguments.layers, 151936, True)
        begin = time.time()
        llm = engine(
            folder, arguments.contender, load_format="dummy", max_model_len=4096, gpu_memory_utilization=0.2,
            kv_cache_memory_bytes=4 << 30, enable_prefix_caching=False, compilation_config={"cudagraph_capture_sizes": [1, 16, 128]},
        )  # fmt: skip
    print(f"{arguments.contender}: ready after {time.time() - begin:.1f} s", flush=True)
    from vllm import SamplingParams

    random.seed(0)

    def run(batch, prompt, generated):
        """Returns the seconds of one call."""
        prompts = [{"prompt_token_ids": [random.randrange(1000, 100000) for _ in range(prompt)]} for _ in range(batch)]
        # Tokens are sampled: the likeliest tokens of a random model repeat and are the same for all prompts, so few experts are hit.
        parameters = SamplingParams(max_tokens=generated, min_tokens=generated, temperature=1, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        llm.generate(prompts, parameters, use_tqdm=False)
        return time.perf_counter() - start

    with turn(arguments):
        for batch, repeats in ((1, 5), (16, 3), (128, 3)):
            run(batch, 32, 16)
            seconds = [run(batch, 32, 128) for _ in range(repeats)]
            # The difference of two lengths gives a step's time without the prefill.
            short = statistics.median(run(batch, 32, 16) for _ in range(repeats))
            middle = statistics.median(seconds)
            step = (middle - short) / 112 * 1e3
            found["generate"][batch] = {"tokens_per_second": batch * 128 / middle, "step_ms": step, "seconds": seconds}
            print(f"batch {batch}: {batch * 128 / middle:.0f} tokens/s, a step {step:.3f} ms", flush=True)
            write(arguments, found)
        run(1, 2048, 1)
        seconds = [run(1, 2048, 1) for _ in range(9)]
        found["prefill"][2048] = {"ms": statistics.median(seconds) * 1e3, "seconds": seconds}
        print(f"prefill of 2048: {statistics.median(seconds) * 1e3:.2f} ms", flush=True)
        write(arguments, found)
    with turn(arguments):
        for batch, prompt, generated in ((1, 32, 16), (16, 32, 16), (128, 32, 16), (1, 2048, 1)):
            found["profile"][f"{batch}x{prompt}"] = profile(lambda: run(batch, prompt, generated))
            write(arguments, found)


def turn(arguments):
    """Returns a context manager; while it is open, no other process measures."""
    held = contextlib.ExitStack()
    if arguments.turn:
        file = held.enter_context(open(arguments.turn, "w"))
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


def write(arguments, found):
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
