"""The backend that Triton finds by its entry point `triton.backends`. Triton imports it with `import triton`.

Kernels are compiled by Triton's NVIDIA backend. This one supplies the driver, on a machine without a GPU or where
`PTX_EMULATOR=1` asks for it.
"""
