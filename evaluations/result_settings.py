"""The settings of an evaluation, as its record stores them. One table says how they are compared, ranked and shown.

The keys of sampler and guidance are settings, too. Records hold only those that differ from their default values.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from common.interfaces import Sampler
from configs.schema import GuidanceSettings


class ResultSetting(NamedTuple):
    """What a setting means for the figures of an evaluation.

    Attributes:
        kind: Evaluations with other values are other evaluations, except for a `path`: a hash identifies its files, which may be
            moved. Tables show a `hash` only where lines would look the same.
        separates_ranking: Tables rank only evaluations that agree in this setting.
        value_if_missing: What records without the setting mean. A new setting needs the value that older records meant.
    """

    kind: Literal["value", "path", "hash"]
    separates_ranking: bool = False
    value_if_missing: object = None


RESULT_SETTINGS = {
    "weights": ResultSetting("value"),
    "ema_length": ResultSetting("value"),
    "network_precision": ResultSetting("value"),
    "labels": ResultSetting("value", separates_ranking=True, value_if_missing="random"),
    "rounding": ResultSetting("value", separates_ranking=True, value_if_missing="round"),
    "autoencoder": ResultSetting("value", separates_ranking=True),
    "num_samples": ResultSetting("value", separates_ranking=True),
    "first_seed": ResultSetting("value", separates_ranking=True, value_if_missing=0),
    "detector": ResultSetting("value", separates_ranking=True),
    "latents": ResultSetting("value"),  # the hash of held-out latents, which have no other name
    "images": ResultSetting("path"),
    "reference": ResultSetting("path"),
    "guidance.checkpoint": ResultSetting("path"),
    "images_hash": ResultSetting("hash"),
    "class_names_hash": ResultSetting("hash"),  # of images on disk, on which class_agreement depends
    "reference_hash": ResultSetting("hash", separates_ranking=True),
    "autoencoder_hash": ResultSetting("hash", separates_ranking=True),
    "detector_weights": ResultSetting("hash", separates_ranking=True),
    "dinov2_weights": ResultSetting("hash", separates_ranking=True),
    "ema_hash": ResultSetting("hash"),
    "guidance.checkpoint_hash": ResultSetting("hash"),
}
HASHES = [name for name, setting in RESULT_SETTINGS.items() if setting.kind == "hash"]


def sampler_for_results(sampler: Sampler) -> dict[str, object]:
    """Return num_steps and all sampler settings that differ from their default values."""
    default = vars(type(sampler)())
    return {key: x for key, x in vars(sampler).items() if key == "num_steps" or x != default[key]}


def guidance_for_results(settings: GuidanceSettings) -> dict[str, object]:
    """Return only cfg_scale for plain cfg, or for no guidance (1.0). Otherwise, add the guidance method and its settings."""
    if settings.name == "none" or getattr(settings, "cfg_scale", None) == 1:
        return {"cfg_scale": 1.0}
    given = settings.model_dump(exclude={"name"}, exclude_defaults=True)
    if given.keys() == {"cfg_scale"}:
        return given
    scale = {"cfg_scale": given.pop("cfg_scale")} if "cfg_scale" in given else {}
    return {"guidance": settings.name, **scale, **{f"guidance.{key}": value for key, value in given.items()}}
