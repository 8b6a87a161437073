"""Quantization configurations, from which an engine gets the method of each layer."""

from .choices import Left, Refused


class Serving:
    """Gives layers to `nvfp4`; the next base class is the engine's configuration, and serves the others.

    A plugin's subclass sets `choices` and `engine`, and defines `ours(layer, prefix)`. That method returns the method that computes an NVFP4
    layer by `nvfp4`, or `None` if the layer is not NVFP4. It raises :class:`Left` if the layer is NVFP4, but `nvfp4` does not compute it.
    """

    choices = None
    """The plugin's :class:`Choices`."""

    engine = None
    """A function that returns the engine's name and version, and whether the plugin was tested with it."""

    def get_quant_method(self, layer, prefix):
        """Returns the method of a layer. The engine calls it."""
        method = None
        try:
            if self.choices.failure is None:
                method = self.ours(layer, prefix)
        except Left as reason:
            self.choices.leave(prefix, reason)
        except Refused:
            raise
        except Exception as error:
            # Either the engine differs in a way that the plugin's checks do not see, or the engine raises the error again below.
            self.choices.failure = error
            self.choices.refuse_all(error, *self.engine(), f"{prefix} and all later NVFP4 layers")
        return super().get_quant_method(layer, prefix) if method is None else method
