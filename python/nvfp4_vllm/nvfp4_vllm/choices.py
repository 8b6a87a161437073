"""Decisions about layers: what the user configures, and the reasons for which layers are left to vLLM."""

import json
import os

TESTED = ("0.24", "0.33")
"""The oldest and the newest version of vLLM with which the tests run."""

FORMATS = ("16-bit", "fp8", "nvfp4")
"""The token formats of `nvfp4`."""


class Refused(ValueError):
    """A configuration that cannot be served, or that may not be left to vLLM. Loading ends with its message."""


class Left(Exception):
    """A layer that vLLM computes with its own kernels. The message is the reason."""


def engine():
    """Returns the engine's name and version, and whether this package was tested with it."""
    try:
        import vllm

        minor = [int(part) for part in vllm.__version__.split(".")[:2]]
        oldest, newest = ([int(part) for part in version.split(".")] for version in TESTED)
        return f"vLLM {vllm.__version__}", oldest <= minor <= newest
    except Exception:  # not a version with two numbers
        return "this vLLM", False


def refuse_all(error, engine):
    """Logs once that vLLM serves all layers, because the plugin cannot be used.

    :param engine: the engine's name and version, and whether the plugin was tested with it.
    :raises Refused: with `NVFP4_VLLM_REQUIRE=1`.
    """
    name, tested = engine
    untested = "" if tested else ", with which this plugin was not tested"
    message = (
        f"nvfp4_vllm is not used: {type(error).__name__}: {error} ({name}{untested}). vLLM's own kernels serve all NVFP4 layers;"
        " install a tested version (see the plugin's README) to use nvfp4"
    )
    if is_required():
        raise Refused(message) from error
    note(message)


def leave(name, reason):
    """Logs once that vLLM computes a layer.

    :raises Refused: with `NVFP4_VLLM_REQUIRE=1`.
    """
    message = f"left to vLLM's own kernels: {name}: {reason}"
    if is_required():
        raise Refused(f"{message} (NVFP4_VLLM_REQUIRE=1 makes this an error)")
    _once(message)


def serve(kind, name, tokens):
    """Logs for the first layer of a kind that `nvfp4` computes such layers, and how."""
    _once(f"computed by nvfp4, {tokens}: {kind}", f"{name} and later ones")


def note(message):
    """Logs a warning."""
    _logger().warning("%s", message)


_said = set()


def _once(message, more=""):
    # A process can build the same model twice.
    if message not in _said:
        _said.add(message)
        _logger().info("%s", f"{message} ({more})" if more else message)


def _logger():
    from vllm.logger import init_logger

    return init_logger("vllm.nvfp4")


def is_required():
    """Whether a layer that is left to vLLM is an error."""
    return os.environ.get("NVFP4_VLLM_REQUIRE", "0") not in ("", "0")


class Tokens:
    """The format in which a kind of layers (`experts` or `linear`) multiplies tokens.

    `name` is one of :data:`FORMATS`. Calls with fewer than `from_tokens` tokens use `16-bit`.
    """

    def __init__(self, kind, config):
        """Reads `NVFP4_VLLM_OPTIONS`, then the key `nvfp4` of `--additional-config`; both are JSON with the same keys.

        :raises Refused: if a key or a value is unknown, or contradicts another option.
        """
        from vllm import envs

        options = _options(config)
        self.name, self.from_tokens = options.get(kind, "16-bit"), options.get("from_tokens", 0)
        if self.name == "16-bit":
            self.from_tokens = 0
        if self.is_split and envs.VLLM_BATCH_INVARIANT:
            raise Refused(
                f"from_tokens = {self.from_tokens} lets a token's bits depend on the batch, and VLLM_BATCH_INVARIANT forbids that;"
                " omit one of them"
            )

    @property
    def is_split(self):
        """Whether the layer needs weights in two layouts."""
        return self.from_tokens > 1

    def __str__(self):
        return f"{self.name} tokens" + (f" from {self.from_tokens} tokens on, else 16-bit" if self.is_split else "")


def _options(config):
    text = os.environ.get("NVFP4_VLLM_OPTIONS", "")
    try:
        options = json.loads(text) if text else {}
    except ValueError as error:
        raise Refused(f"NVFP4_VLLM_OPTIONS: not JSON: {error}") from error
    additional = getattr(config, "additional_config", None)
    of_engine = additional.get("nvfp4", {}) if isinstance(additional, dict) else {}
    for place, found in (("NVFP4_VLLM_OPTIONS", options), ('--additional-config, "nvfp4"', of_engine)):
        _check(place, found)
    options |= of_engine
    if options and isinstance(additional, dict):
        # vLLM's cache of compiled models depends on this dictionary, and not on the environment.
        additional["nvfp4"] = options
    return options


def _check(place, options):
    if not isinstance(options, dict):
        raise Refused(f"{place}: expected an object, got {options!r}")
    for key, value in options.items():
        if key in ("experts", "linear"):
            if value not in FORMATS:
                raise Refused(f"{place}: {key}: unknown token format {value!r}; known are {', '.join(FORMATS)}")
        elif key == "from_tokens":
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise Refused(f"{place}: from_tokens: expected a number of tokens, got {value!r}")
        else:
            raise Refused(f"{place}: unknown key {key!r}; known are experts, linear and from_tokens")
