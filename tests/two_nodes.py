"""What tests/test_two_nodes.py looks at: two processes, each in a folder of its own as if on nodes that share no files.

One launch makes all runs, since starting takes longer than most of them.
"""

import json
import os
from pathlib import Path
from unittest import mock

import torch
from conftest import TINY, checked, forget_accelerate

from common.errors import UserError
from sampling import processes

FID = ["num_samples=4", "batch_size=2", "num_steps=2", "cpu_threads=1", "reference=reference.npz"]
FEW = ["seeds=0-2", "num_steps=2", "cpu_threads=1"]
HERE, SHARED = "runs/one", "{shared}/runs/one"
# name: script, arguments
RUNS = {
    "resume": ("train", [*TINY, "name=one", "output_dir=runs", "train.num_steps=3"]),
    "resume_from": ("train", [*TINY, "name=two", "output_dir=runs", f"resume={HERE}"]),
    "damaged": ("train", [*TINY, "name=damaged", "output_dir=runs"]),
    "init_from": ("train", [*TINY, "name=two", "output_dir=runs", f"init_from={HERE}"]),
    "sample": ("sample", [*FEW, f"checkpoint={HERE}"]),
    "output": ("sample", [*FEW, f"checkpoint={SHARED}", "output=images"]),
    "autoguidance": (
        "sample", [*FEW, f"checkpoint={SHARED}", "output=images", "guidance=autoguidance", f"guidance.checkpoint={HERE}"]
    ),
    "fid": ("fid", [*FID, f"checkpoint={HERE}"]),
    "sweep": ("fid", [*FID, f"checkpoints={HERE}"]),
    "cached_by_one": ("fid", [*FID, f"checkpoint={SHARED}", "output=scores"]),
    "shared": ("sample", [*FEW, f"checkpoint={SHARED}", "output={shared}/images"]),
    "resumed": ("train", [*TINY, "name=one", "output_dir={shared}/runs", "train.num_steps=4"]),
}  # fmt: skip


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    os.chdir(folder / f"node{rank}")
    with mock.patch.object(processes, "leave", lambda: None):  # a second process group could not be opened
        for name, (script, arguments) in RUNS.items():
            forget_accelerate()
            arguments = [argument.format(shared=folder / "shared") for argument in arguments]
            error = None
            try:
                __import__(script).main(checked(arguments, {"train": "config"}.get(script, script)))
            except UserError as e:
                error = str(e)
            (folder / f"{name}_{rank}.json").write_text(json.dumps(error))
    torch.distributed.destroy_process_group()
