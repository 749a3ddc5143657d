"""Tests that need a GPU. pytest collects this folder where torch sees a CUDA device (tests/conftest.py).

Every test takes the device and the sizes as arguments, so that tests/test_gpu_code.py can run the same functions on the CPU,
with small sizes.
"""
