#!/usr/bin/env python3
"""Compares a model on two GPUs with the same model on one, in each layout of two GPUs, with this library's and Marlin's kernels.

    logits.py write FOLDER                     writes the model, `FOLDER/shared`
    parallel.py run FOLDER CONTENDER LAYOUT    writes logits of a prompt of 1280 tokens, and 64 greedy tokens after each of 16 prompts
    parallel.py compare FOLDER                 prints the differences between one GPU and two, of the runs that were made

CONTENDER is `nvfp4` or `marlin`. Each run is a separate process, and several can run at once. LAYOUT is one of:

    one         one GPU
    tensor      tensor parallelism
    expert      tensor parallelism in attention, whole experts on each GPU
    balanced    as `expert`; vLLM also moves experts between the GPUs while tokens are generated
    data        each GPU has its own prompts in attention, and whole experts: tokens go through vLLM's all-to-all. Start it with
                `torchrun --nproc-per-node 2`

Two GPUs add halves of sums in a different order than one GPU, so logits differ. Where the likeliest token leads by more than the logits
differ, the token must stay the same. The differences should be no larger than with Marlin.
"""

import json
import os
import pathlib
import sys

from logits import TOKENS, prompt, start
from model import keep_logits, kept_logits

EXPERT = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
LAYOUTS = {
    "one": {},
    "tensor": {"tensor_parallel_size": 2},
    "expert": EXPERT,
    "balanced": EXPERT | {"enable_eplb": True, "eplb_config": {"window_size": 8, "step_interval": 16}},
    "data": {"data_parallel_size": 2, "enable_expert_parallel": True, "distributed_executor_backend": "external_launcher"},
}
PROMPTS, GENERATED = 16, 64


def run(folder, contender, layout):
    import torch
    from vllm import SamplingParams

    llm = start(folder, "shared", contender, **LAYOUTS[layout])
    # torchrun sets these. Each rank has other prompts, so a token that comes back to the wrong rank is found.
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    llm.apply_model(keep_logits)
    parameters = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1, detokenize=False)
    llm.generate([prompt(TOKENS, 1 + PROMPTS * rank)], parameters, use_tqdm=False)
    logits = llm.apply_model(kept_logits)[0]
    assert len(logits) >= 1000, logits.shape
    parameters = SamplingParams(max_tokens=GENERATED, temperature=0, logprobs=2, ignore_eos=True, detokenize=False)
    prompts = [prompt(20 + 11 * index, index + 2) for index in range(PROMPTS)]
    outputs = llm.generate(prompts[rank::ranks], parameters, use_tqdm=False)
    greedy = [[(token, margin(of)) for token, of in zip(output.outputs[0].token_ids, output.outputs[0].logprobs)] for output in outputs]
    if ranks > 1:
        of_ranks = [None] * ranks
        torch.distributed.all_gather_object(of_ranks, greedy)
        greedy = [of_ranks[index % ranks][index // ranks] for index in range(PROMPTS)]
    if rank == 0:
        torch.save({"logits": logits, "greedy": greedy}, folder / f"{layout}-{contender}.pt")
        print(f"{contender} {layout}: logits of {len(logits)} tokens, standard deviation {logits.std():.3f}", flush=True)


def margin(logprobs):
    """Returns the lead of the likeliest token."""
    first, second = sorted((value.logprob for value in logprobs.values()), reverse=True)[:2]
    return first - second


def compare(folder):
    import torch

    rows = {}
    for contender in ("nvfp4", "marlin"):
        one = torch.load(folder / f"one-{contender}.pt")
        for layout in LAYOUTS:
            file = folder / f"{layout}-{contender}.pt"
            if layout == "one" or not file.exists():
                continue
            two = torch.load(file)
            want, got = one["logits"].double(), two["logits"].double()
            largest = (got - want).abs().amax(-1)
            first, second = want.topk(2).values.unbind(-1)
            # Two logits may each move by the largest difference, toward each other.
            clear = first - second > 2 * largest
            agree = got.argmax(-1) == want.argmax(-1)
            row = {
                "tokens": len(want), "relative": ((got - want).norm() / want.norm()).item(), "largest": largest.max().item(),
                "clear": int(clear.sum()), "clear_and_other": int((clear & ~agree).sum()), "same_first": agree.double().mean().item(),
            }  # fmt: skip
            rows[f"{contender} {layout}"] = row | followed(one["greedy"], two["greedy"], 2 * row["largest"])
            print(f"{contender:6} {layout:8}: {rows[f'{contender} {layout}']}", flush=True)
    (folder / "parallel.json").write_text(json.dumps(rows, indent=1) + "\n")


def followed(one, two, difference):
    """Counts the greedy tokens before the first difference of each prompt, and the differences at tokens with a lead above `difference`."""
    same, parted, against = 0, 0, 0
    for before, after in zip(one, two):
        for (token, lead), (other, _) in zip(before, after):
            if token != other:
                parted += 1
                against += lead > difference
                break
            same += 1
    return {"greedy_same": same, "greedy_parted": parted, "greedy_parted_in_spite_of_a_lead": against}


def main():
    command, folder, *rest = sys.argv[1:]
    {"run": run, "compare": compare}[command](pathlib.Path(folder), *rest)


if __name__ == "__main__":
    main()
