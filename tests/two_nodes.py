"""Runs for tests/test_two_nodes.py: two processes, each in its own folder, like nodes that share no files.

One launch makes all runs, because starting takes longer than most of them.
"""

import contextlib
import json
import os
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import torch
from conftest import TINY, checked, forget_accelerate

from common.errors import UserError
from evaluations.images import NpzImages
from latents import autoencoders
from latents.prepare.labelled_images import LabelledImages
from runtime import processes

FID = [
    "evaluation.num_samples=5",
    "sampling.batch_size=2",
    "sampler.num_steps=2",
    "machine.cpu_threads=1",
    "evaluation.reference=reference.npz",
    "guidance=none",
]
FEW = ["seeds=0-4", "classes=0-9", "sampler.num_steps=2", "machine.cpu_threads=1"]
ENCODE = ["encode", "images={shared}/pictures", "autoencoder=identity", "kind=sample", "resolution=8", "shard_size=4"]
ENCODE += ["batch_size=3", "num_workers=0", "cpu_threads=1"]
HERE, SHARED = "runs/one", "{shared}/runs/one"
# name: script, arguments
RUNS = {
    "resume": ("train", [*TINY, "name=one", "output_dir=runs", "train.num_steps=3", "train.lr=1e-2"]),
    "damaged": ("train", [*TINY, "name=damaged", "output_dir=runs"]),
    "init_from": ("train", [*TINY, "name=two", "output_dir=runs", f"init_from={HERE}"]),
    "raw": ("train", [*TINY, "name=three", "output_dir=runs", "init_from=copy"]),
    "new": ("train", [*TINY, "name=new", "output_dir=runs", "train.num_steps=1"]),
    "new_shared": ("train", [*TINY, "name=new", "output_dir={shared}/runs", "train.num_steps=1"]),
    "sample": ("sample", [*FEW, f"checkpoint={HERE}"]),
    "output": ("sample", [*FEW, f"checkpoint={SHARED}", "output=images"]),
    "autoguidance": (
        "sample", [*FEW, f"checkpoint={SHARED}", "output=images", "guidance=autoguidance", f"guidance.checkpoint={HERE}"]
    ),
    "fid": ("fid", [*FID, f"checkpoint={HERE}"]),
    "sweep": ("fid", [*FID, f"checkpoints={HERE}"]),
    "data": ("train", [*TINY, "name=other", "output_dir=runs", "data.path=data"]),
    "reference": ("fid", [*FID, f"checkpoint={SHARED}", "output=judged", "evaluation.reference=other.npz"]),
    "detector": (
        "fid",
        [*FID, f"checkpoint={SHARED}", "output=judged", "evaluation.detector=small-x", "evaluation.detector_weights=vae"],
    ),
    "cached_by_one": ("fid", [*FID, f"checkpoint={SHARED}", "output=scores"]),
    "shared": ("sample", [*FEW, f"checkpoint={SHARED}", "output={shared}/images"]),
    "latents": ("prepare_latents", [*ENCODE, "output=latents"]),
    "weights": ("prepare_latents", [*ENCODE, "output={shared}/weights", "autoencoder=sd-vae:vae"]),
    "encoded": ("prepare_latents", [*ENCODE, "output={shared}/latents"]),
    "resumed": ("train", [*TINY, "name=one", "output_dir={shared}/runs", "train.num_steps=4", "train.lr=1e-2"]),
}  # fmt: skip


def run(name: str, folder: Path, *more: str) -> None:
    forget_accelerate()
    script, arguments = RUNS[name]
    arguments = [argument.format(shared=folder / "shared") for argument in [*arguments, *more]]
    main = __import__(script).main
    main(arguments if script == "prepare_latents" else checked(arguments, {"train": "config"}.get(script, script)))


class FromFile(autoencoders.Identity):
    """A stand-in for an autoencoder with weights in the file `vae`, because importing diffusers takes long."""

    def hash(self):
        return Path("vae").read_text()


def build(spec, *args, build=autoencoders.build, **settings):
    return FromFile() if spec == "sd-vae:vae" else build(spec, *args, **settings)


def counted(function, calls: Counter, name: str):
    def call(*args):
        calls[name] += 1
        return function(*args)

    return call


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    os.chdir(folder / f"node{rank}")
    calls = Counter()
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            mock.patch.object(processes, "destroy_process_groups", lambda: None)
        )  # a process cannot open a second process group
        stack.enter_context(mock.patch.object(processes, "NEW_FILE_SEC", 1.0))
        stack.enter_context(mock.patch.object(autoencoders, "build", build))
        for owner, what in ((LabelledImages, "size"), (NpzImages, "local_hash")):
            stack.enter_context(mock.patch.object(owner, what, counted(getattr(owner, what), calls, what)))
        for name in RUNS:
            error = None
            try:
                run(name, folder)
            except UserError as e:
                error = str(e)
            (folder / f"{name}_{rank}.json").write_text(json.dumps(error))
    (folder / f"calls_{rank}.json").write_text(json.dumps(calls))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
