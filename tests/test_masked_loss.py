"""The loss on a part of the image, and its tokens, against numbers written down by hand."""

import pytest
import torch

from extras.attach import latent_mask, mask_to_tokens, masked_mse


def test_tokens_that_touch_the_mask_are_found_row_by_row():
    mask = torch.zeros(2, 4, 6)
    mask[0, 0, 3] = 0.1  # first row of patches, second column
    mask[0, 3, 5] = 1.0  # second row, third column
    mask[1, 1:3, 1:3] = 1.0  # touches four patches
    assert mask_to_tokens(mask, 2).int().tolist() == [[0, 1, 0, 0, 0, 1], [1, 1, 0, 1, 1, 0]]
    assert mask_to_tokens(mask.bool(), (4, 3)).tolist() == [[False, True], [True, False]]
    video = torch.zeros(1, 2, 2, 2)
    video[0, 1, 0, 1] = 1
    assert mask_to_tokens(video, (1, 2, 2)).tolist() == [[False, True]]
    pixels = torch.zeros(1, 16, 16, dtype=torch.bool)
    pixels[0, 0, 0] = True  # a single pixel
    pixels[0, 8:, 8:] = True
    assert latent_mask(pixels, 2, 2).tolist() == [[[1 / 64, 0.0], [0.0, 1.0]]]


def test_the_masked_loss_is_the_mean_over_the_inside():
    prediction, target = torch.zeros(3, 2, 1, 2, requires_grad=True), torch.zeros(3, 2, 1, 2)
    target[0, :, 0, 0] = torch.tensor([1.0, 3.0])  # squared errors 1 and 9: 5 on average
    target[0, :, 0, 1] = 10.0
    target[1] = 2.0
    mask = torch.tensor([[[1.0, 0.0]], [[0.5, 0.5]], [[0.0, 0.0]]])
    assert masked_mse(prediction, target, mask).tolist() == [5.0, 4.0, 0.0]
    assert masked_mse(prediction, target, None).tolist() == [52.5, 4.0, 0.0]
    masked_mse(prediction, target, mask).sum().backward()
    assert torch.isfinite(prediction.grad).all() and (prediction.grad[0, :, 0, 1] == 0).all()
    for wrong in ((target, mask[:, 0]), (target[:1], mask), (target[:, :1], mask)):  # some would broadcast
        with pytest.raises(ValueError, match=r"shapes \[\(3, 2, 1, 2\)"):
            masked_mse(prediction, *wrong)
