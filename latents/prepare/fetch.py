"""Weights into their caches, where there is a network: the command `prepare_latents.py fetch`."""

from __future__ import annotations

import logging

import torch

from common.types import AutoencoderSpec, Text
from evaluations.inception import fetch_weights
from evaluations.vit import find_encoder_weights
from latents import autoencoders

log = logging.getLogger(__name__)


def fetch(autoencoder: AutoencoderSpec = autoencoders.SD_VAE, encoder: Text | None = None) -> None:
    """Download autoencoder, Inception and timm's vision transformer `encoder` into their caches; what is there is checked."""
    log.info("%s is complete: %s", autoencoder, autoencoders.find(autoencoder))
    autoencoders.build(autoencoder, torch.device("cpu"))  # reads it whole
    log.info("Inception is complete: %s", fetch_weights())
    if encoder is not None:
        log.info("%s is complete: %s", encoder, find_encoder_weights(encoder))
