"""Runs of two processes, which tests/test_ddp.py checks. One launch makes all of them, because starting takes longest."""

import functools
import json
import sys
from pathlib import Path
from unittest import mock

import torch
from conftest import run_train

from checkpoints import store
from common.errors import UserError
from runtime import compilation, processes

BATCH = ["train.batch_size=8", "train.num_steps=4"]
DENSE = [*BATCH, "model=dit", "train.grad_accum_steps=2", "train.grad_clip_norm=0.5"]
LOOKS = ["sample_grid.every=4", "sample_grid.num_samples=3", "sampler.num_steps=2"]
LOOKS += ["evaluation.every=4", "evaluation.num_samples=3", "sampler.num_steps=2", "sampling.batch_size=2"]
TREAD = [*BATCH, "checkpoint.every=2", *LOOKS, "sampling.batch_size=1"]
TREAD += ["train.ema_lengths=[0.1,0.25]", "train.ema_snapshot_every=2"]
MUON = [*BATCH, "train.optimizer=muon", "train.grad_clip_norm=0.5", "train.warmup_steps=2", "checkpoint.every=2"]
LEVELS = [*BATCH, "checkpoint.every=2", "train.log_every=4"]
SPRINT = [*BATCH, "model=lightningdit_sprint", "model.path_drop=0.5", *LOOKS[:3]]


def main(folder: Path) -> None:
    """Make all runs; both processes call this. `folder` holds the runs of a single process."""
    run, records = functools.partial(run_train, folder), {}
    # A process cannot open a second process group.
    with mock.patch.object(processes, "destroy_process_groups", lambda: None):
        with mock.patch.object(torch.distributed, "new_group", wraps=torch.distributed.new_group) as new_group:
            run("tread", *TREAD, f"evaluation.validation={folder / 'validation'}")
        records["new_groups_sec"] = [call.kwargs["timeout"].total_seconds() for call in new_group.call_args_list]
        groups, cpu = torch.distributed.distributed_c10d._world.pg_map, torch.device("cpu")
        records["timeouts_sec"] = sorted(group._get_backend(cpu).options._timeout.total_seconds() for group in groups)
        run("dense", *DENSE)
        run("sprint", *SPRINT)
        run("aligned", *BATCH, "train.grad_accum_steps=2", *json.loads((folder / "repa.json").read_text()))
        run("muon", *MUON)
        run("levels", *LEVELS)
        run("cut", *TREAD, f"evaluation.validation={folder / 'validation'}")  # resumes step 2 of a single process
        # Dynamo captures the graphs, but inductor compiles nothing: its code is not under test.
        with mock.patch.object(compilation.torch, "compile", functools.partial(torch.compile, backend="eager")):
            run("compiled", *DENSE, "machine.compile=blocks", "train.activation_checkpointing=blocks", "train.num_steps=2")
        with mock.patch.object(store, "save", fail_to_save):
            try:
                run("unwritten", *BATCH, "checkpoint.every=1", "train.log_every=100")
            except UserError as e:
                records["unwritten"] = str(e)
    (folder / f"records_{torch.distributed.get_rank()}.json").write_text(json.dumps(records))
    torch.distributed.destroy_process_group()


def fail_to_save(root: Path, step: int, *contents) -> None:
    raise UserError(f"no room for step {step}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
