"""The plugin's options and messages, and the version of vLLM."""

from nvfp4 import serving
from nvfp4.serving import Left, Refused
from vllm.logger import init_logger
from vllm.platforms import current_platform

__all__ = ["CARDS", "CHOICES", "TESTED", "Left", "Refused", "engine", "tokens"]

TESTED = ("0.24", "0.33")
"""The oldest and the newest version of vLLM with which the tests run."""

CHOICES = serving.Choices("vLLM", lambda: init_logger("vllm.nvfp4"))


def _capability():
    capability = current_platform.get_device_capability()
    return None if capability is None else (capability.major, capability.minor)


CARDS = serving.Cards(CHOICES, lambda: current_platform.get_device_name(), _capability)


def engine():
    """Returns the engine's name and version, and whether this package was tested with it."""
    try:
        import vllm

        minor = [int(part) for part in vllm.__version__.split(".")[:2]]
        oldest, newest = ([int(part) for part in version.split(".")] for version in TESTED)
        return f"vLLM {vllm.__version__}", oldest <= minor <= newest
    except Exception:  # not a version with two numbers
        return "this vLLM", False


def tokens(kind, config):
    """Returns the :class:`serving.Tokens` of a kind of layers, `experts` or `linear`.

    :raises Refused: if an option is unknown or contradicts another.
    """
    from vllm import envs

    additional = getattr(config, "additional_config", None)
    of_engine = additional.get("nvfp4", {}) if isinstance(additional, dict) else {}
    options = CHOICES.options('--additional-config, "nvfp4"', of_engine)
    if options and isinstance(additional, dict):
        # vLLM's cache of compiled models depends on this dictionary, and not on the environment.
        additional["nvfp4"] = options
    found = serving.Tokens(kind, options)
    if found.is_split and envs.VLLM_BATCH_INVARIANT:
        raise Refused(
            f"from_tokens = {found.from_tokens} lets a token's bits depend on the batch, and VLLM_BATCH_INVARIANT forbids that;"
            " omit one of them"
        )
    return found
