"""What only a GPU can show. pytest collects this folder where torch sees a CUDA device (tests/conftest.py).

Every test takes the device and the sizes as arguments: tests/test_gpu_code.py runs the same functions on the CPU, with small
ones.
"""
