"""What the processes of tests/forked.py have before they start: every command imported, one thread, a narrow network."""

import hydra._internal.hydra  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import scipy.linalg  # noqa: F401
import timm.layers  # noqa: F401
import torch
import torch._dynamo
import torch.distributed.nn.functional

import dit
import fid  # noqa: F401
import prepare_latents  # noqa: F401
import sample  # noqa: F401
import train  # noqa: F401
from evaluations import digits_detector  # noqa: F401

torch.set_num_threads(1)  # threads do not survive a fork
dit.BACKBONES["DiT-XS/2"] = (12, 24, 3, 2)  # checkpoints of 1 MB
