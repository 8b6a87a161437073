"""What plugins for inference engines share: the self-test at the start, and the decision about a GPU. Cards and verdicts are pretended."""

import json
import stat
import time

import nvfp4
import pytest
import torch
from nvfp4 import serving
from nvfp4.serving import cards, selftest

CARDS = {
    "NVIDIA A100-SXM4-80GB": (8, 0),
    "NVIDIA GeForce RTX 3090": (8, 6),
    "NVIDIA GeForce RTX 4090": (8, 9),
    "NVIDIA H200": (9, 0),
    "NVIDIA B200": (10, 0),
    "NVIDIA B300": (10, 3),
    "NVIDIA GeForce RTX 5090": (12, 0),
    "NVIDIA GB10": (12, 1),
}
OTHERS = [name for name, capability in CARDS.items() if capability != (9, 0)]


class Machine:
    """A machine with a pretended GPU, and a plugin on it."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.monkeypatch, self.messages = folder, monkeypatch, []
        self.verdict = folder / "cache" / "nvfp4" / "verdict"
        self.runs = folder / "runs"
        for name in ("bin", "cache"):
            (folder / name).mkdir()
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        monkeypatch.setenv("NVFP4_VLLM_SELFTEST", "1")
        self.of_library = "code"

    def script(self, name, text):
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def command(self, text, code="code"):
        """Installs a command `nvfp4`. Before `text` it writes its verdict for `code`."""
        self.script("nvfp4", f'test "$1" = selftest || exit 9\necho run >> {self.runs}\necho {code} > {self.verdict}\n{text}')

    def card(self, name, driver="580.65"):
        self.name = name
        major, minor = CARDS[name]
        self.script("nvidia-smi", f"echo '{name}, {major}.{minor}, {driver}'")

    def start(self):
        """Starts an engine. Returns whether `nvfp4` computes experts and linear layers, and the reasons if it does not."""
        machine, self.messages = self, []
        cards._tried.cache_clear()

        class Logger:
            info = warning = lambda _, text, message: machine.messages.append(message)

        choices = serving.Choices("vLLM", Logger)
        checks = serving.Cards(choices, lambda: self.name, lambda: CARDS[self.name])
        real = nvfp4.Moe, nvfp4.Linear
        with self.monkeypatch.context() as patched:
            patched.setattr(nvfp4, "Moe", self._asks_for_verdict(real[0]))
            patched.setattr(nvfp4, "Linear", self._asks_for_verdict(real[1]))
            selftest.run_if_asked(choices)
            reasons = []
            for check, kind in (
                (checks.check_moe, (torch.bfloat16, "silu", False, "16-bit")),
                (checks.check_linear, (torch.bfloat16, "16-bit")),
            ):
                try:
                    check(*kind)
                except serving.Left as left:
                    reasons.append(str(left))
        assert len(reasons) in (0, 2)
        return reasons

    def _asks_for_verdict(self, layer):
        """Returns a layer that does what the library does on the pretended GPU."""

        def make(*arguments, **named):
            if CARDS[self.name] != (9, 0):
                verdict = self.verdict.read_text().split() if self.verdict.exists() else []
                if verdict[:1] != [self.of_library]:
                    raise nvfp4.Error(f"it was not tested on {self.name}; run `nvfp4 selftest` once")
                if "failed" in verdict:
                    raise nvfp4.Error(f"it has failed its self-test on {self.name}")
            return layer(*arguments, **named)

        return make

    def count(self):
        return len(self.runs.read_text().split()) if self.runs.exists() else 0


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


def only(messages, text):
    """Asserts that exactly one message has a text."""
    assert len([message for message in messages if text in message]) == 1, messages


@pytest.mark.parametrize("name", OTHERS)
def test_cards_without_a_verdict_are_left(machine, monkeypatch, name):
    monkeypatch.delenv("NVFP4_VLLM_SELFTEST")
    machine.card(name)
    machine.command("exit 0")
    for reason in machine.start():
        assert name in reason and "was not tested" in reason and "NVFP4_VLLM_SELFTEST=1 runs it once when vLLM starts" in reason
    assert machine.count() == 0 and not machine.messages


@pytest.mark.parametrize("name", OTHERS)
def test_cards_serve_after_a_passed_test(machine, name):
    machine.card(name)
    machine.command("exit 0")
    assert machine.start() == []
    only(machine.messages, "`nvfp4 selftest` on this machine's GPU: passed")
    major, minor = CARDS[name]
    only(machine.messages, f"emulated only: nvfp4's kernels for experts on {name} (compute capability {major}.{minor})")
    only(machine.messages, "emulated only: nvfp4's kernels for linear layers")
    assert machine.start() == [] and machine.count() == 1


def test_hopper_serves_without_a_test(machine, monkeypatch):
    monkeypatch.delenv("NVFP4_VLLM_SELFTEST")
    machine.card("NVIDIA H200")
    assert machine.start() == [] and machine.messages == []


@pytest.mark.parametrize("name", OTHERS)
def test_cards_are_left_after_a_failed_test(machine, name):
    machine.card(name)
    machine.command(f"echo failed >> {machine.verdict}; exit 1")
    for start in range(2):
        for reason in machine.start():
            assert "has failed its self-test" in reason and "`nvfp4 selftest --again` repeats it" in reason
        only(machine.messages, "`nvfp4 selftest` is not run again: failed before" if start else "failed kernels are not used")
    assert machine.count() == 1


@pytest.mark.parametrize("name", ["NVIDIA A100-SXM4-80GB", "NVIDIA B200"])
def test_a_test_that_hangs_is_ended_once(machine, monkeypatch, name):
    monkeypatch.setattr(selftest, "SECONDS", 1)
    machine.card(name)
    late = machine.folder / "late"
    # The child's child must end too.
    machine.command(f"rm {machine.verdict}; (sleep 3; touch {late}) & wait")
    begin = time.monotonic()
    for start in range(2):
        for reason in machine.start():
            assert "was not tested" in reason and "run it by hand, without the time limit" in reason
        only(machine.messages, "is not run again: timed out before; delete " if start else "timed out after 1 s")
    assert machine.count() == 1 and time.monotonic() - begin < 3
    time.sleep(3)
    assert not late.exists()


@pytest.mark.parametrize("name", OTHERS)
def test_verdicts_for_other_code_are_explained(machine, name):
    machine.card(name)
    machine.command("exit 0", code="older")
    for reason in machine.start():
        assert "install the command and the package from one checkout" in reason


def test_errors_of_the_command_are_logged(machine):
    machine.card("NVIDIA B200")
    machine.command(f"rm {machine.verdict}; echo no such device >&2; exit 3")
    for reason in machine.start():
        assert "run it by hand to see its messages" in reason
    only(machine.messages, "untested (exit status 3):\nno such device")


def test_a_missing_command_is_explained(machine):
    machine.card("NVIDIA B200")
    for reason in machine.start():
        assert "was not tested" in reason
    only(machine.messages, "NVFP4_VLLM_SELFTEST: no command `nvfp4` on PATH")


@pytest.mark.parametrize("change", ["card", "driver", "command", "damaged"])
def test_another_machine_is_tested_again(machine, change):
    machine.card("NVIDIA B200")
    machine.command("exit 0")
    machine.start()
    if change == "card":
        machine.card("NVIDIA B300")
    elif change == "driver":
        machine.card("NVIDIA B200", driver="590.1")
    elif change == "command":
        machine.command("exit 0 # newer")
    else:
        (kept,) = (machine.folder / "cache" / "nvfp4").glob("engine-selftest-*.json")
        kept.write_text(json.dumps({"key": 1}))
    machine.start()
    assert machine.count() == 2
