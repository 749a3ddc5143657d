"""The code of tests/gpu on the CPU, with small sizes: what a CPU can run of it is not itself untested."""

import pytest
import torch
from gpu.runs import FULL, SMALL, config_for
from gpu.test_numerics import *  # noqa: F403
from gpu.test_runs import *  # noqa: F403
from gpu.test_steps import *  # noqa: F403


@pytest.fixture
def device():
    return torch.device("cpu")


@pytest.fixture
def size():
    return SMALL


@pytest.mark.parametrize("kind", KINDS)  # noqa: F405
def test_the_settings_for_a_gpu_exist(tmp_path, kind):
    config_for(FULL, tmp_path, *(key.format(backbone=FULL.backbone) for key in KINDS[kind]))  # noqa: F405
