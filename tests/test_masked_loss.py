"""The loss on a part of the image, and its tokens, against numbers written down by hand."""

import pytest
import torch
from networks import NETWORKS, B, N, cached_network, call, normal

from extras.attach import attach, latent_mask, mask_to_tokens, masked_mse
from routing_module import Route


def test_tokens_that_touch_the_mask_are_found_row_by_row():
    mask = torch.zeros(2, 4, 6)
    mask[0, 0, 3] = 0.1  # first row of patches, second column
    mask[0, 3, 5] = 1.0  # second row, third column
    mask[1, 1:3, 1:3] = 1.0  # touches four patches
    assert mask_to_tokens(mask, 2).tolist() == [
        [False, True, False, False, False, True],
        [True, True, False, True, True, False],
    ]
    assert mask_to_tokens(mask.bool(), (4, 3)).tolist() == [[False, True], [True, False]]
    video = torch.zeros(1, 2, 2, 2)
    video[0, 1, 0, 1] = 1
    assert mask_to_tokens(video, (1, 2, 2)).tolist() == [[False, True]]
    with pytest.raises(ValueError, match=r"patch_size=4 does not cut a mask of shape \(4, 6\) into patches"):
        mask_to_tokens(mask, 4)
    with pytest.raises(ValueError, match=r"patch_size=\(1, 2, 2\) does not cut"):
        mask_to_tokens(mask, (1, 2, 2))


def test_no_region_of_a_mask_of_pixels_is_lost_on_the_way_to_latents():
    pixels = torch.zeros(1, 16, 16, dtype=torch.bool)
    pixels[0, 0, 0] = True  # a single pixel
    pixels[0, 8:, 8:] = True
    assert latent_mask(pixels, 2, 2).tolist() == [[[1 / 64, 0.0], [0.0, 1.0]]]
    assert mask_to_tokens(latent_mask(pixels, 2, 2), 1).tolist() == [[True, False, False, True]]
    with pytest.raises(ValueError, match=r"mask has shape \(16, 16\); it needs \(batch, height, width\)"):
        latent_mask(pixels[0], 2, 2)


def test_the_masked_loss_is_the_mean_over_the_inside():
    prediction, target = torch.zeros(3, 2, 1, 2), torch.zeros(3, 2, 1, 2)
    target[0, :, 0, 0] = torch.tensor([1.0, 3.0])  # squared errors 1 and 9: 5 on average
    target[0, :, 0, 1] = 10.0
    target[1] = 2.0
    mask = torch.tensor([[[1.0, 0.0]], [[0.5, 0.5]], [[0.0, 0.0]]])
    assert masked_mse(prediction, target, mask).tolist() == [5.0, 4.0, 0.0]
    assert masked_mse(prediction, target, None).tolist() == [52.5, 4.0, 0.0]
    prediction.requires_grad_()
    masked_mse(prediction, target, mask).sum().backward()
    assert torch.isfinite(prediction.grad).all() and (prediction.grad[0, :, 0, 1] == 0).all()
    with pytest.raises(ValueError, match=r"mask has shape \(3, 2\); the latents need \(3, 1, 2\)"):
        masked_mse(prediction, target, mask[:, 0])
    for other in (target[:1], target[:, :1]):  # would broadcast
        with pytest.raises(ValueError, match=r"prediction has shape \(3, 2, 1, 2\), target .*they must be the same"):
            masked_mse(prediction, other, mask)


def test_tokens_of_the_loss_never_skip():
    network, inputs = cached_network("PixArt"), NETWORKS["PixArt"].inputs(False)
    mask = torch.zeros(B, 8, 8)
    mask[:, 2:6, 2:8] = 1  # 2 x 3 patches
    keep = mask_to_tokens(mask, 2)
    assert keep.sum(1).tolist() == [6] * B
    attachment = attach(network, [Route(0.75, 1, 4)])
    with attachment.force_keep(keep):
        prediction = call(network, inputs)
    masked_mse(prediction[:, :4], normal(B, 4, 8, 8), mask).mean().backward()
    stays = torch.zeros(B, N, dtype=torch.bool).scatter(1, attachment.ids_keep[0], True)
    assert torch.equal(stays, keep)  # 6 forced, where the ratio alone keeps 4
    attachment.detach()
    network.zero_grad(set_to_none=True)
