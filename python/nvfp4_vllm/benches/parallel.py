#!/usr/bin/env python3
"""A model on two cards beside the same on one: tensor parallel and expert parallel, this library's kernels and Marlin's.

    logits.py write FOLDER                     the model, `FOLDER/shared`
    parallel.py run FOLDER CONTENDER LAYOUT    logits of a prompt of 1280 tokens, and 64 greedy tokens after each of 16 prompts
    parallel.py compare FOLDER                 what differs between one card and two

CONTENDER is `nvfp4` or `marlin`; LAYOUT is `one`, `tensor` or `expert`. Each run is a process of its own, and several may run at a time.

Two cards add up halves of sums, which one card adds in another order, so logits differ. Where the likeliest token leads by more than they
differ, it has to stay the same; and they should differ no more than with Marlin.
"""

import json
import pathlib
import sys

from logits import TOKENS, prompt, start
from model import keep_logits, kept_logits

LAYOUTS = {
    "one": {},
    "tensor": {"tensor_parallel_size": 2},
    "expert": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}
PROMPTS, GENERATED = 16, 64


def run(folder, contender, layout):
    import torch
    from vllm import SamplingParams

    llm = start(folder, "shared", contender, **LAYOUTS[layout])
    llm.apply_model(keep_logits)
    parameters = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1, detokenize=False)
    llm.generate([prompt(TOKENS)], parameters, use_tqdm=False)
    logits = llm.apply_model(kept_logits)[0]
    assert len(logits) >= 1000, logits.shape
    parameters = SamplingParams(max_tokens=GENERATED, temperature=0, logprobs=2, ignore_eos=True, detokenize=False)
    outputs = llm.generate([prompt(20 + 11 * index, index + 2) for index in range(PROMPTS)], parameters, use_tqdm=False)
    greedy = [[(token, margin(of)) for token, of in zip(output.outputs[0].token_ids, output.outputs[0].logprobs)] for output in outputs]
    torch.save({"logits": logits, "greedy": greedy}, folder / f"{layout}-{contender}.pt")
    print(f"{contender} {layout}: logits of {len(logits)} tokens, standard deviation {logits.std():.3f}", flush=True)


def margin(logprobs):
    """By how much the likeliest token leads."""
    first, second = sorted((value.logprob for value in logprobs.values()), reverse=True)[:2]
    return first - second


def compare(folder):
    import torch

    rows = {}
    for contender in ("nvfp4", "marlin"):
        one = torch.load(folder / f"one-{contender}.pt")
        for layout in ("tensor", "expert"):
            two = torch.load(folder / f"{layout}-{contender}.pt")
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
            print(f"{contender:6} {layout:6}: {rows[f'{contender} {layout}']}", flush=True)
    (folder / "parallel.json").write_text(json.dumps(rows, indent=1) + "\n")


def followed(one, two, difference):
    """Greedy tokens up to the first that is another in each prompt, and whether any of these had a lead above `difference`."""
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
