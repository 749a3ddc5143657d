"""Implement `prepare_latents.py fetch`, which downloads weights to the local caches."""

from __future__ import annotations

import logging

import torch

from common.types import AutoencoderSpec, Text
from evaluations.inception import fetch_weights
from evaluations.vit import fetch_encoder_weights
from latents import autoencoders

log = logging.getLogger(__name__)


def fetch(autoencoder: AutoencoderSpec = autoencoders.SD_VAE, encoder: Text | None = None) -> None:
    """Download the autoencoder, Inception, and timm's vision transformer `encoder` unless the weights are already cached."""
    log.info("%s is complete: %s", autoencoder, autoencoders.find_weights(autoencoder))
    autoencoders.build(autoencoder, torch.device("cpu"))  # raises UserError if the weights cannot be loaded
    log.info("Inception is complete: %s", fetch_weights())
    if encoder is not None:
        log.info("%s is complete: %s", encoder, fetch_encoder_weights(encoder))
