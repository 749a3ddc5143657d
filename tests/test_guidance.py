import torch

import guidance

NUM_CLASSES = 7


class Recorder:
    """A denoise function that is linear in the label, and remembers its calls."""

    def __init__(self):
        self.calls = []

    def __call__(self, x, sigma, y):
        self.calls.append((x, sigma, y))
        return x * sigma.reshape(-1, 1, 1, 1) + y.reshape(-1, 1, 1, 1)


def arguments():
    return torch.randn(2, 1, 2, 2), torch.tensor([0.5, 2.0]), torch.tensor([1, 4])


def test_no_guidance_is_the_conditional_estimate():
    denoise, (x, sigma, y) = Recorder(), arguments()
    assert torch.equal(guidance.none(denoise, NUM_CLASSES)(x, sigma, y), denoise(x, sigma, y))


def test_cfg_extrapolates_from_the_null_class_in_one_batched_call():
    denoise, (x, sigma, y) = Recorder(), arguments()
    D = guidance.cfg(denoise, NUM_CLASSES, cfg_scale=1.5)(x, sigma, y)
    assert len(denoise.calls) == 1
    assert denoise.calls[0][2].tolist() == [1, 4, NUM_CLASSES, NUM_CLASSES]
    null, label = Recorder()(x, sigma, torch.full((2,), NUM_CLASSES)), Recorder()(x, sigma, y)
    assert torch.allclose(D, null + 1.5 * (label - null))


def test_cfg_scale_1_equals_no_guidance_and_0_is_unconditional():
    x, sigma, y = arguments()
    off = Recorder()
    assert torch.equal(guidance.cfg(off, NUM_CLASSES, cfg_scale=1.0)(x, sigma, y), Recorder()(x, sigma, y))
    assert len(off.calls[0][0]) == 2  # no second branch is paid for
    unconditional = Recorder()(x, sigma, torch.full((2,), NUM_CLASSES))
    assert torch.allclose(guidance.cfg(Recorder(), NUM_CLASSES, cfg_scale=0.0)(x, sigma, y), unconditional)
