"""Triton kernels on PyTorch's tensors: right ones compute, wrong ones fault with names, and later launches work."""

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import ptx_emulator  # noqa: E402
import triton.language as tl  # noqa: E402
from ptx_emulator import Fault, _libcuda, _process  # noqa: E402
from ptx_emulator._install import state  # noqa: E402

NOT_REGISTERED = 713  # CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
DEVICE = triton.runtime.driver.active.get_active_torch_device()


@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=mask) + tl.load(y_ptr + at, mask=mask), mask=mask)


@triton.jit
def scale_one_too_many(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n, other=0) * 2, mask=at <= n)


@triton.jit
def sum_without_atomics(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr, tl.load(out_ptr) + tl.sum(tl.load(x_ptr + at)))


@triton.jit
def softmax(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    at = tl.program_id(0) * columns + tl.arange(0, BLOCK)
    mask = tl.arange(0, BLOCK) < columns
    row = tl.load(x_ptr + at, mask=mask, other=float("-inf"))
    row = tl.exp(row - tl.max(row))
    tl.store(out_ptr + at, row / tl.sum(row), mask=mask)


@triton.jit
def matmul(a_ptr, b_ptr, c_ptr, K, M: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr):
    rows, columns, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, STEP)
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, K, STEP):
        a = tl.load(a_ptr + rows[:, None] * K + start + k[None, :])
        b = tl.load(b_ptr + (start + k)[:, None] * N + columns[None, :])
        total = tl.dot(a, b, total)
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], total)


@triton.jit
def sum_of_tensors(list_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(list_ptr + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    tl.atomic_add(out_ptr, tl.sum(tl.load(x + at)))


@pytest.fixture(autouse=True)
def default_options():
    yield
    ptx_emulator.install(level="default", schedule="fair", schedules=1, allow="", timed="")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_tensors_of_both_kinds_are_memory(device):
    x, y = torch.rand(1000, device=device), torch.rand(1000, device=device)
    out = torch.empty_like(x)
    add[(triton.cdiv(1000, 256),)](x, y, out, 1000, BLOCK=256)
    torch.testing.assert_close(out, x + y)
    assert out.device.type == device and out.is_cuda == (device == "cuda")


def test_reductions_and_products_are_right():
    x = torch.randn(5, 100, device=DEVICE)
    out = torch.empty_like(x)
    softmax[(5,)](x, out, 100, BLOCK=128)
    torch.testing.assert_close(out, torch.softmax(x, 1))
    a, b = (torch.randn(shape, device=DEVICE, dtype=torch.float16) for shape in ((64, 128), (128, 32)))
    c = torch.empty(64, 32, device=DEVICE)
    matmul[(1,)](a, b, c, 128, M=64, N=32, STEP=64)
    torch.testing.assert_close(c, a.float() @ b.float(), atol=1e-2, rtol=1e-3)


def test_an_overrun_names_argument_and_line_and_later_launches_work():
    x = torch.rand(1000, device=DEVICE)
    out = torch.empty_like(x)
    for _ in range(2):
        with pytest.raises(Fault) as caught:
            scale_one_too_many[(1,)](x, out, 1000, BLOCK=1024)
        fault = caught.value
        assert fault.kind == "out-of-bounds" and fault.entry == "scale_one_too_many"
        assert "byte 4000 of out_ptr of 4000 bytes" in fault.message
        assert fault.file.endswith("test_triton.py")
        line = open(fault.file).read().splitlines()[fault.line - 1]
        assert "tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n" in line
        y = torch.rand(1000, device=DEVICE)
        add[(4,)](x, y, out, 1000, BLOCK=256)
        torch.testing.assert_close(out, x + y)


def test_a_race_between_programs_names_both_parties():
    x, out = torch.rand(512, device=DEVICE), torch.zeros(1, device=DEVICE)
    with pytest.raises(Fault) as caught:
        sum_without_atomics[(2,)](x, out, BLOCK=256)
    fault = caught.value
    assert fault.kind == "data-race" and fault.line == fault.others[0].place.source_line
    assert "out_ptr" in fault.message
    ptx_emulator.install(allow="data-race")
    sum_without_atomics[(2,)](x, out, BLOCK=256)


def test_empty_memory_is_undefined_until_it_is_written():
    x = torch.ones(256, device=DEVICE)
    total = torch.empty(1, device=DEVICE)
    with pytest.raises(Fault) as caught:
        sum_without_atomics[(1,)](x, total, BLOCK=256)
    assert caught.value.kind == "uninitialised-global"
    total = torch.empty(1, device=DEVICE).zero_()
    sum_without_atomics[(1,)](x, total, BLOCK=256)
    assert total.item() == 256


def test_pointers_inside_tensors_are_followed():
    parts = [torch.full((64,), float(n), device=DEVICE) for n in (1, 2)]
    table = torch.tensor([part.data_ptr() for part in parts], device=DEVICE)
    out = torch.zeros(1, device=DEVICE)
    sum_of_tensors[(2,)](table, out, BLOCK=64)
    assert out.item() == 192
    with pytest.raises(Fault, match=r"of the target of list_ptr\[0\] of 256 bytes"):
        sum_of_tensors[(2,)](table, out, BLOCK=128)


def test_every_schedule_starts_from_the_same_memory():
    x, out = torch.ones(256, device=DEVICE), torch.zeros(1, device=DEVICE)
    ptx_emulator.install(schedules=4)
    sum_without_atomics[(1,)](x, out, BLOCK=256)
    assert out.item() == 256


def test_fresh_memory_is_aligned_as_on_a_gpu():
    for tensor in (
        torch.empty(3, device=DEVICE),
        torch.rand(7, device="cuda"),
        torch.ones(5).cuda(),
        torch.ones(9).to("cuda") * 2,
    ):
        assert tensor.data_ptr() % 512 == 0 and tensor.untyped_storage().nbytes() == 4 * tensor.numel()


def test_autotuning_takes_a_configuration():
    tuned = triton.autotune(configs=[triton.Config({"BLOCK": block}) for block in (128, 256)], key=["n"])(add)
    x, y = torch.rand(300, device=DEVICE), torch.rand(300, device=DEVICE)
    out = torch.empty_like(x)
    tuned[lambda meta: (triton.cdiv(300, meta["BLOCK"]),)](x, y, out, 300)
    torch.testing.assert_close(out, x + y)


def test_predicted_times_advance_events():
    ptx_emulator.install(timed=True)
    x, y = torch.rand(4096, device=DEVICE), torch.rand(4096, device=DEVICE)
    out = torch.empty_like(x)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    add[(16,)](x, y, out, 4096, BLOCK=256)
    end.record()
    torch.cuda.synchronize()
    assert 0 < begin.elapsed_time(end) < 1
    torch.testing.assert_close(out, x + y)


def test_the_stand_in_answers_what_scripts_ask():
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1
    assert torch.cuda.get_device_capability() == (9, 0) and "H200" in torch.cuda.get_device_name()
    assert torch.cuda.get_device_properties(0).multi_processor_count == 132
    x = torch.rand(4, device="cuda")
    assert x.device == torch.device("cuda", 0) and x.cpu().device.type == "cpu" and (x + 1).is_cuda
    assert torch.nn.Linear(4, 4).cuda().weight.is_cuda
    assert torch.max(x.view(2, 2), dim=1).values.is_cuda
    with torch.cuda.device(x.device), torch.device("cuda"):
        assert torch.zeros(2).is_cuda
    with pytest.raises(TypeError, match="Tensor.cpu"):
        x.numpy()
    weight = torch.rand(3, device="cuda", requires_grad=True)
    (weight * 2).sum().backward()
    assert weight.grad.is_cuda and weight.grad.tolist() == [2, 2, 2]


@triton.jit
def square(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(out_ptr + at, x * x, mask=at < n)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        out = torch.empty_like(x)
        square[(1,)](x, out, x.numel(), BLOCK=128)
        return out

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        assert x.is_cuda and gradient.is_cuda
        out = torch.empty_like(x)
        assert out.is_cuda
        add[(1,)](x * gradient, x * gradient, out, x.numel(), BLOCK=128)
        return out


def test_kernels_in_backward_functions_run():
    layer = torch.nn.Linear(8, 8, device="cuda")
    optimizer = torch.optim.AdamW(layer.parameters())
    x = torch.randn(4, 8, device="cuda", requires_grad=True)
    Square.apply(layer(x)).sum().backward()
    expected = 2 * layer(x.detach()) @ layer.weight
    torch.testing.assert_close(x.grad, expected.detach())
    optimizer.step()
    assert x.grad.is_cuda and layer.weight.grad.is_cuda


def test_seeds_of_pytorch_and_of_the_gpu_are_one():
    torch.manual_seed(3)
    x = torch.rand(4, device="cuda")
    torch.cuda.manual_seed_all(3)
    assert torch.equal(x, torch.rand(4, device="cuda")) and torch.cuda.initial_seed() == 3
    generator = torch.cuda.default_generators[0]
    state = generator.get_state()
    state.view(torch.int64)[1] += 8
    generator.set_state(state)
    assert (generator.initial_seed(), generator.get_offset()) == (3, 8)


@triton.jit
def check_positive(x_ptr):
    tl.device_assert(tl.load(x_ptr) > 0, "not positive")


def test_failed_assertions_have_the_words_of_cuda(capfd):
    check_positive.run(torch.ones(1, device="cuda"), grid=(1,), warmup=False, debug=True)
    with pytest.raises(RuntimeError, match="device-side assert triggered"):
        check_positive.run(torch.zeros(1, device="cuda"), grid=(1,), warmup=False, debug=True)
    assert "not positive" in capfd.readouterr().err


class Pointer:
    """What some projects pass in place of a tensor."""

    def __init__(self, tensor, offset):
        self.dtype, self.address = tensor.dtype, tensor.data_ptr() + offset * tensor.element_size()

    def data_ptr(self):
        return self.address

    def untyped_storage(self):
        return self


def test_pointers_into_tensors_are_memory():
    x, out = torch.rand(100, device="cuda"), torch.zeros(100, device="cuda")
    add[(1,)](x, Pointer(x, 50), Pointer(out, 50), 50, BLOCK=64)
    torch.testing.assert_close(out[50:], x[:50] + x[50:])
    with pytest.raises(Fault, match="out-of-bounds"):
        add[(1,)](x, Pointer(x, 50), Pointer(out, 51), 50, BLOCK=64)


def twice(x):
    out = torch.empty_like(x)
    add[(1,)](x, x, out, x.numel(), BLOCK=128)
    return out


def test_kernels_that_are_registered_for_cuda_run():
    launches = state.launches
    library = torch.library.Library("aten", "IMPL")
    library.impl("abs", twice, "CUDA")
    x = torch.tensor([1.0, 2.0], device="cuda", requires_grad=True)
    out = torch.abs(x)
    assert out.is_cuda and out.tolist() == [2, 4] and state.launches == launches + 1
    out.sum().backward()
    assert x.grad.tolist() == [1, 1]
    assert torch.abs(torch.tensor([-1.0])).item() == 1
    library._destroy()
    assert torch.abs(-x).tolist() == [1, 2]


def test_custom_operators_for_cuda_run():
    operator = torch.library.custom_op("ptx_emulator_test::twice", twice, mutates_args=(), device_types="cuda",
                                       schema="(Tensor x) -> Tensor")  # fmt: skip
    out = operator(torch.ones(3, device="cuda"))
    assert out.is_cuda and out.tolist() == [2, 2, 2]


def test_compiled_functions_run_uncompiled():
    function = torch.compile(twice, fullgraph=True)
    assert function(torch.ones(2, device="cuda")).tolist() == [2, 2]


def test_cublas_is_replaced():
    from triton._C.libtriton import nvidia

    a, b = torch.randn(4, 8, device="cuda"), torch.randn(5, 8, device="cuda")
    c, d = torch.ones(4, 5, device="cuda"), torch.empty(4, 5, device="cuda")
    handle = nvidia.cublas.CublasLt(torch.empty(1, device="cuda"))
    handle.gemm(a, b, c, d, 2.0, 3.0)
    torch.testing.assert_close(d, 2 * a @ b.T + 3)
    handle.matmul(a, b, c)
    torch.testing.assert_close(c, a @ b.T)


def test_an_interrupted_wait_leaves_no_memory_mapped(monkeypatch):
    """As a test's time limit may do, an exception comes between a faulty launch and the reset of the context."""
    x = torch.rand(1000, device="cuda")

    def interrupted():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_libcuda, "reports", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scale_one_too_many[(1,)](x, torch.empty_like(x), 1000, BLOCK=1024)
    assert _libcuda.library().cuMemHostUnregister(x.untyped_storage().data_ptr()) == NOT_REGISTERED
    _process.recover()
    assert twice(torch.ones(2, device="cuda")).tolist() == [2, 2]
