"""The driver that Triton finds. It is active where the emulator may take the GPU's place."""

from triton.backends import driver as _base

from ptx_emulator import _import


class EmulatedDriver(_base.DriverBase):
    """Stands for the driver of `_triton.py`, which needs the whole of Triton and is made on first use."""

    def __new__(cls):
        from ptx_emulator import _triton

        return _triton.active()

    @staticmethod
    def is_active():
        return _import.wanted()

    @classmethod
    def map_python_to_cpp_type(cls, ty):
        raise NotImplementedError

    def get_current_target(self):
        raise NotImplementedError

    def get_active_torch_device(self):
        raise NotImplementedError

    def get_benchmarker(self):
        raise NotImplementedError


_import.with_triton()
