"""The runs of several processes that tests/test_fsdp.py looks at.

One launch makes all runs of two processes, since starting takes longer than most of the runs; another makes those of four
processes, as if two were on each of two nodes.
"""

import contextlib
import functools
import json
import os
import shutil
import sys
from pathlib import Path
from unittest import mock

import torch
from conftest import run_train

import dit
from checkpoints import store
from common.errors import UserError
from extras import lightningdit, sprint
from runtime import compilation, processes
from training.sharding import local_shard
from training.trainer import Trainer

BATCH = ["train.batch_size=8", "train.num_steps=4"]
FSDP = [*BATCH, "train.parallel=fsdp"]
DENSE = ["model=dit", "train.grad_accum_steps=2", "train.grad_clip_norm=0.5"]
LOOKS = ["sample.every=4", "sample.num_samples=3", "diffusion.sampler.num_steps=2"]
LOOKS += ["eval.every=4", "eval.num_samples=3", "eval.num_steps=2", "eval.batch_size=2"]
TREAD = ["checkpoint.every=2", *LOOKS, "sample.batch_size=1", "train.ema_lengths=[0.1,0.25]", "train.ema_snapshot_every=2"]
NO_LOOKS = ["sample.every=0", "eval.every=0"]
LIGHTNING = ["model=lightningdit_sprint", "sample.every=4", *LOOKS[1:3]]


@contextlib.contextmanager
def half_of_the_blocks():
    """Inside, DiT-XS and LightningDiT-XS have 6 blocks instead of 12: sharded processes exchange the weights of each block."""
    with contextlib.ExitStack() as stack:
        for backbones in (dit.BACKBONES, lightningdit.BACKBONES, sprint.BACKBONES):
            shallow = {name: (6, *sizes[1:]) for name, sizes in backbones.items() if "-XS/" in name}
            stack.enter_context(mock.patch.dict(backbones, shallow))
        yield


def copy_until_step_2(run: Path, copy: Path) -> None:
    """Copy a run as if it had been killed soon after step 2."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / "step_0000004")
    shutil.rmtree(copy / "samples")


def main(folder: Path) -> None:
    """Every process calls this. `folder` holds the runs of one process."""
    records = {}
    make, name = (make_runs, "two") if os.environ["WORLD_SIZE"] == "2" else (make_runs_of_two_nodes, "four")
    # One launch cannot open a second process group.
    with mock.patch.object(processes, "leave", lambda: None), half_of_the_blocks():
        make(folder, records)
    (folder / f"records_{name}_{torch.distributed.get_rank()}.json").write_text(json.dumps(records))
    torch.distributed.destroy_process_group()


def make_runs(folder: Path, records: dict) -> None:
    run = functools.partial(run_train, folder)
    with recorded_bytes(records, "fsdp"):
        run("tread", *FSDP, *TREAD, f"eval.validation={folder / 'validation'}")
    run("dense", *FSDP, *DENSE)
    run("lightning", *FSDP, *LIGHTNING)
    run("aligned", *FSDP, "train.grad_accum_steps=2", *json.loads((folder / "repa.json").read_text()))
    run("cut", *FSDP, *TREAD, *NO_LOOKS)  # its folder holds step 2 of one process
    run("branch", *FSDP, f"init_from={folder / 'one' / 'checkpoints' / 'step_0000002'}", "init_state=all", *TREAD[-2:])
    # Dynamo captures the graphs, which run as they are: inductor's code is not what is tested.
    with mock.patch.object(compilation.torch, "compile", functools.partial(torch.compile, backend="eager")):
        run("compiled", *FSDP, *DENSE, "train.compile=blocks", "train.activation_checkpointing=blocks", "train.num_steps=2")
    for parallel in ("ddp", "fsdp"):
        run(f"bf16_{parallel}", *BATCH, f"train.parallel={parallel}", "train.precision=bf16", "train.num_steps=3")
    with recorded_bytes(records, "ddp"):
        run("ddp", *BATCH, *DENSE)
    if torch.distributed.get_rank() == 0:
        copy_until_step_2(folder / "tread", folder / "ddp_after_tread")
    torch.distributed.barrier()
    run("ddp_after_tread", *BATCH, *TREAD, f"eval.validation={folder / 'validation'}")
    spoiled = functools.partialmethod(spoil_weights, Trainer.train_step)
    with mock.patch.object(Trainer, "train_step", spoiled):
        try:
            run("spoiled", *FSDP, "checkpoint.every=1", "train.num_steps=3")
        except UserError as e:
            records["spoiled"] = str(e)
    with mock.patch.object(store, "save", fail_to_save):
        try:
            run("unwritten", *FSDP, "checkpoint.every=1", "train.log_every=100", "train.num_steps=3")
        except UserError as e:
            records["unwritten"] = str(e)


def make_runs_of_two_nodes(folder: Path, records: dict) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    run = functools.partial(run_train, folder)
    with recorded_bytes(records, "node"):
        run("node", *FSDP, *TREAD)
    groups, cpu = torch.distributed.distributed_c10d._world.pg_map, torch.device("cpu")
    records["timeouts"] = sorted((g.size(), g._get_backend(cpu).options._timeout.total_seconds()) for g in groups)
    run("node_dense", *FSDP, *DENSE, "train.grad_accum_steps=1")


def recorded_bytes(records: dict, name: str):
    """Record how many bytes weights, gradients, AdamW's states and averages take in this process."""
    original = Trainer.train

    def train(trainer: Trainer) -> bool:
        def record(*_) -> None:
            parameters = list(trainer.net.parameters())
            gradients = [p.grad for p in parameters if p.grad is not None]
            states = [state[key] for state in trainer.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
            held = [*parameters, *gradients, *states, *trainer.ema.averages.values()]
            records[name] = sum(local_shard(tensor).nbytes for tensor in held)

        trainer.optimizer.optimizer.register_step_post_hook(record)
        return original(trainer)

    return mock.patch.object(Trainer, "train", train)


def spoil_weights(trainer: Trainer, original, micro_batches) -> None:
    """Make a weight NaN after step 2 in the second process's shard."""
    original(trainer, micro_batches)
    if trainer.step == 2 and not trainer.accelerator.is_main_process:
        local_shard(trainer.net.blocks[0].mlp.fc1.weight.detach()).fill_(torch.nan)


def fail_to_save(root: Path, checkpoint, *keep) -> None:
    raise UserError(f"no room for step {checkpoint.step}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
