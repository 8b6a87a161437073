"""Runs the Python programs of the repository's README and of the book. `docs/book/tools/pages.py` finds them.

A program without a second word after `python` runs, behind the earlier programs of its page. `signature` and `doctest` mark the reference,
which is made from documentation that `test_doctests.py` runs.
"""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "docs/book/tools"))
pages = pytest.importorskip("pages", reason="needs the repository's docs/book")

PROGRAMS = {
    page: text
    for page in (ROOT / "README.md", *pages.book_pages())
    if (text := "\n".join(block.text for block in pages.blocks(page) if block.language == "python" and not block.marks))
}


def make_model(folder):
    """Writes a small random model with a tokenizer, and quantizes it to `model-nvfp4`."""
    transformers = pytest.importorskip("transformers", minversion="5", reason="needs Transformers 5")
    tokenizers = pytest.importorskip("tokenizers")
    command = os.environ.get("NVFP4_COMMAND") or shutil.which("nvfp4")
    if command is None:
        pytest.skip("no command `nvfp4`: set NVFP4_COMMAND")
    config = transformers.Qwen3MoeConfig(
        vocab_size=128, hidden_size=64, head_dim=16, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
        moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, max_position_embeddings=128,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "model")
    words = tokenizers.models.WordLevel({"[UNK]": 0, **{f"word{i}": i for i in range(1, 128)}}, unk_token="[UNK]")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), unk_token="[UNK]")
    tokenizer.save_pretrained(folder / "model")
    subprocess.run([command, "quantize", folder / "model", folder / "model-nvfp4", "--quiet"], check=True)


def test_programs_are_found():
    assert {page.name for page in PROGRAMS} >= {"README.md", "pytorch.md"}


@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: str(page.relative_to(ROOT)))
def test_programs_of_a_page_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if "model-nvfp4" in PROGRAMS[page]:
        make_model(tmp_path)
    exec(compile(PROGRAMS[page], str(page), "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    expected = {"README.md": ["torch.Size([8, 4096])"], "pytorch.md": ["torch.Size([5, 128])", "torch.Size([5, 192])"]}.get(page.name, [])
    assert printed[: len(expected)] == expected
