"""`torch.export` and AOTInductor."""

import shutil

import pytest
import torch

import nvfp4

E, I, H, T, TOP_K = 4, 32, 64, 6, 2


class Block(torch.nn.Module):
    """A router, experts and a linear layer."""

    def __init__(self, device):
        super().__init__()

        def experts(rows, columns):
            tensors = [nvfp4.quantize(torch.randn(rows, columns, device=device) / columns**0.5) for _ in range(E)]
            return nvfp4.Quantized(*(torch.stack(parts) for parts in zip(*tensors)))

        self.router = torch.nn.Linear(H, E, dtype=torch.bfloat16, device=device)
        self.moe = nvfp4.Moe(experts(I, H), experts(I, H), experts(H, I))
        self.linear = nvfp4.Linear(nvfp4.quantize(torch.randn(H, H, device=device) / H**0.5), torch.randn(H))

    def forward(self, x):
        weights, ids = nvfp4.route(self.router(x), TOP_K)
        return self.linear(self.moe(x, ids, weights))


@pytest.fixture
def exported(device):
    """Returns a block, and the program that was exported for any number of tokens."""
    block = Block(device).eval()
    with torch.no_grad():
        x = torch.randn(T, H, device=device).bfloat16()
        return block, torch.export.export(block, (x,), dynamic_shapes={"x": {0: torch.export.Dim("tokens", max=1024)}})


def test_exported_program_computes_the_same(exported, device, tmp_path):
    block, program = exported
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {"nvfp4.moe.default", "nvfp4.linear.default", "nvfp4.route.default"} <= names
    torch.export.save(program, tmp_path / "block.pt2")
    loaded = torch.export.load(tmp_path / "block.pt2").module()
    for tokens in (T, 1, 17):
        x = torch.randn(tokens, H, device=device).bfloat16()
        with torch.no_grad():
            assert torch.equal(loaded(x), block(x))


@pytest.mark.slow  # it compiles C++ for a minute
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("c++") is None, reason="no C++ compiler")
def test_ahead_of_time_compiled_program_computes_the_same(exported, device, tmp_path):
    if device == "cuda" and torch.__version__ < "2.13":
        pytest.skip("PyTorch 2.11 crashes on a GPU as it loads the package")
    block, program = exported
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "block.pt2"))
    loaded = torch._inductor.aoti_load_package(package)
    for tokens in (T, 17):
        x = torch.randn(tokens, H, device=device).bfloat16()
        with torch.no_grad():
            # The compiler may round between other operations of the router, which has a bias.
            torch.testing.assert_close(loaded(x), block(x), rtol=0.05, atol=0.05)
