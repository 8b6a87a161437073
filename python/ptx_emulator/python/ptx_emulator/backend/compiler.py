"""The compiler that Triton expects of a backend. It never offers itself."""

from triton.backends import compiler as _base


class NoCompiler(_base.BaseBackend):
    """Kernels are compiled by the NVIDIA backend."""

    binary_ext = "ptx"

    @staticmethod
    def supports_target(target):
        return False

    def hash(self):
        return "ptx-emulator"

    def parse_options(self, options):
        raise NotImplementedError

    def add_stages(self, stages, options, language=None):
        raise NotImplementedError

    def load_dialects(self, context):
        pass

    def get_module_map(self):
        return {}

    def get_codegen_implementation(self, options=None):
        return {}

    def pack_metadata(self, metadata):
        return ()
