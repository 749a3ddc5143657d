"""The code of tests/gpu on the CPU, with small sizes: what a CPU can run of it is not itself untested."""

import pytest
import torch
from gpu.runs import SMALL
from gpu.test_numerics import *  # noqa: F403
from gpu.test_runs import *  # noqa: F403
from gpu.test_steps import *  # noqa: F403


@pytest.fixture
def device():
    return torch.device("cpu")


@pytest.fixture
def size():
    return SMALL
