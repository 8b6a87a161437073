"""Decisions about layers: what the user configures, and the reasons for which layers are left to the engine."""

import json
import os

FORMATS = ("16-bit", "fp8", "nvfp4")
"""The token formats of `nvfp4`."""


class Refused(ValueError):
    """A configuration that cannot be served, or that may not be left to the engine. Loading ends with its message."""


class Left(Exception):
    """A layer that the engine computes with its own kernels. The message is the reason."""


class Choices:
    """A plugin's options and messages.

    :param engine: the engine's name, `vLLM`. The environment variables start with `NVFP4_VLLM_`, and the plugin is `nvfp4_vllm`.
    :param logger: returns the logger; it is called when the first message is written.
    """

    def __init__(self, engine, logger):
        self.engine, self._logger, self._said = engine, logger, set()
        self.failure = None
        """The error that nothing expects, after which the engine computes all layers; `None` if there was none."""
        self.selftest = None
        """How the self-test before the engine's start ended (:mod:`selftest`); `None` if it was not asked for."""
        self.plugin, self._prefix = f"nvfp4_{engine.lower()}", f"NVFP4_{engine.upper()}_"

    def variable(self, name):
        """Returns the name and the value of an environment variable of the plugin; an empty value if it is not set."""
        return self._prefix + name, os.environ.get(self._prefix + name, "")

    def is_set(self, name):
        """Whether an environment variable of the plugin switches something on."""
        return self.variable(name)[1] not in ("", "0")

    @property
    def is_required(self):
        """Whether a layer that is left to the engine is an error."""
        return self.is_set("REQUIRE")

    def refuse_all(self, error, name, tested, layers="all NVFP4 layers"):
        """Logs once that the engine serves all layers, because the plugin cannot be used.

        :param name: the engine's name and version.
        :param tested: whether the plugin was tested with this version.
        :param layers: the layers that the engine serves from now on.
        :raises Refused: with `REQUIRE`.
        """
        untested = "" if tested else ", with which this plugin was not tested"
        message = (
            f"{self.plugin} is not used: {type(error).__name__}: {error} ({name}{untested}). {self.engine}'s own kernels serve {layers};"
            " install a tested version (see the plugin's README) to use nvfp4"
        )
        if self.is_required:
            raise Refused(message) from error
        self.note(message)

    def leave(self, name, reason):
        """Logs once that the engine computes a layer.

        :raises Refused: with `REQUIRE`.
        """
        message = f"left to {self.engine}'s own kernels: {name}: {reason}"
        if self.is_required:
            raise Refused(f"{message} ({self._prefix}REQUIRE=1 makes this an error)")
        self._once(message)

    def serve(self, kind, name, tokens):
        """Logs for the first layer of a kind that `nvfp4` computes such layers, and how."""
        self._once(f"computed by nvfp4, {tokens}: {kind}", f"{name} and later ones")

    def note(self, message):
        """Logs a warning."""
        self._logger().warning("%s", message)

    def _once(self, message, more=""):
        # A process can build the same model twice.
        if message not in self._said:
            self._said.add(message)
            self._logger().info("%s", f"{message} ({more})" if more else message)

    def options(self, place="", additional=None):
        """Returns the options, from the environment variable `OPTIONS`, then from the engine's own configuration. Both have the same keys.

        :param place: the name of the engine's configuration, for messages.
        :param additional: its options.
        :raises Refused: if a key or a value is unknown.
        """
        name, text = self.variable("OPTIONS")
        try:
            options = json.loads(text) if text else {}
        except ValueError as error:
            raise Refused(f"{name}: not JSON: {error}") from error
        additional = {} if additional is None else additional
        for source, found in ((name, options), (place, additional)):
            _check(source, found)
        return options | additional


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


class Tokens:
    """The format in which a kind of layers (`experts` or `linear`) multiplies tokens.

    `name` is one of :data:`FORMATS`. Calls with fewer than `from_tokens` tokens use `16-bit`.
    """

    def __init__(self, kind, options):
        self.name, self.from_tokens = options.get(kind, "16-bit"), options.get("from_tokens", 0)
        if self.name == "16-bit":
            self.from_tokens = 0

    @property
    def is_split(self):
        """Whether the layer needs weights in two layouts."""
        return self.from_tokens > 1

    @property
    def formats(self):
        """The formats that the layer's calls use."""
        return {self.name, "16-bit"} if self.is_split else {self.name}

    def __str__(self):
        return f"{self.name} tokens" + (f" from {self.from_tokens} tokens on, else 16-bit" if self.is_split else "")
