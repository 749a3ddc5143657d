import pytest
import torch

from gpu.runs import FULL


@pytest.fixture
def device():
    return torch.device("cuda")


@pytest.fixture
def size():
    return FULL
