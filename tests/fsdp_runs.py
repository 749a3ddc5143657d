"""The runs of several processes that tests/test_fsdp.py looks at.

One launch makes all those of two processes, since starting them takes longer than most of the runs; another those of four.
"""

import functools
import json
import os
import shutil
from pathlib import Path
from unittest import mock

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from conftest import run_train

from training import speed, trainer
from training.sharding import local_shard
from training.trainer import Trainer, TrainingDiverged

BATCH = ["train.batch_size=8"]
FSDP = [*BATCH, "train.parallel=fsdp"]
NODE = [*FSDP, "train.fsdp_shard=node"]
DENSE = ["model=dit", "train.num_steps=20", "train.grad_accum_steps=2", "train.grad_clip_norm=0.5"]
LOOKS = ["sample.every=20", "sample.num_samples=3", "diffusion.sampler.num_steps=2"]
LOOKS += ["eval.every=20", "eval.num_samples=5", "eval.num_steps=2", "eval.batch_size=2"]
TREAD = ["train.num_steps=20", "checkpoint.every=10", *LOOKS]
LIGHTNING = ["model=lightningdit_tread", "train.num_steps=5", "sample.every=5", *LOOKS[1:3]]


def copy_until_step_10(run: Path, copy: Path) -> None:
    """As if it had been killed soon after step 10."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / "step_0000020")
    shutil.rmtree(copy / "samples")


def held_bytes(trainer: Trainer) -> int:
    """Of weights, gradients, AdamW's states and averages in this process."""
    parameters = list(trainer.net.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    states = [state[key] for state in trainer.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    return sum(local_shard(t).nbytes for t in [*parameters, *gradients, *states, *trainer.ema.averages.values()])


def main(folder: Path) -> None:
    """In each process; `folder` holds the runs of one process."""
    records = {}
    make = make_runs if os.environ["WORLD_SIZE"] == "2" else make_runs_of_two_nodes
    # A second process group could not be opened in the same launch.
    with mock.patch.object(Accelerator, "end_training", lambda self: None):
        make(folder, records)
    name = "records" if make is make_runs else "records_node"
    (folder / f"{name}_{torch.distributed.get_rank()}.json").write_text(json.dumps(records))
    torch.distributed.destroy_process_group()


def make_runs(folder: Path, records: dict) -> None:
    run = functools.partial(run_train, folder)
    run("tread", *FSDP, *TREAD)
    run("dense", *FSDP, *DENSE)
    run("lightning", *FSDP, *LIGHTNING)
    run("cut", *FSDP, *TREAD)  # its folder holds step 10 of one process
    initial = [f"init_from={folder / 'one' / 'checkpoints' / 'step_0000010'}", "train.lr=1e-30"]
    run("branch", *FSDP, *initial[:1], "init_state=all", "train.num_steps=12")
    run("tuned", *FSDP, *initial, "train.num_steps=1")
    # The code that inductor would write is not the matter here.
    with mock.patch.object(speed.torch, "compile", functools.partial(torch.compile, backend="aot_eager")):
        settings = ["train.compile=blocks", "train.activation_checkpointing=blocks"]
        run("compiled", *FSDP, *DENSE, *settings, "train.num_steps=2")
    run("resharded", *FSDP, *DENSE, "train.num_steps=2", "train.fsdp_reshard=after_forward")
    for parallel in ("ddp", "fsdp"):
        with recorded_bytes(records, parallel):
            run(f"bf16_{parallel}", *BATCH, f"train.parallel={parallel}", "train.precision=bf16", "train.num_steps=3")
        bf16_gradients = [f"train.parallel={parallel}", "train.gradient_precision=bf16"]
        run(f"bf16_gradients_{parallel}", *BATCH, *bf16_gradients, "train.num_steps=1")
    run("fp32_gradients", *BATCH, "train.num_steps=1")
    with recorded_views(records, "views"):
        run("views", *BATCH, *DENSE, "train.num_steps=3")
    defaults = mock.patch.object(trainer, "ddp_settings", lambda *_: DistributedDataParallelKwargs())
    with defaults, recorded_views(records, "copies"):
        run("copies", *BATCH, *DENSE, "train.num_steps=3")
    for name, method, spoiled in (("weights", "train_step", spoil_weights), ("loss", "losses", spoil_loss)):
        with mock.patch.object(Trainer, method, functools.partialmethod(spoiled, getattr(Trainer, method))):
            try:
                run(f"spoiled_{name}", *FSDP, "checkpoint.every=1", "train.num_steps=3")
            except TrainingDiverged as e:
                records[name] = str(e)

    for every in (1, 100):  # found out by the next checkpoint, by a line of metrics or at the end
        with mock.patch.object(trainer.checkpoints, "save", fail_to_save):
            try:
                run(f"unwritten_{every}", *FSDP, f"checkpoint.every={every}", f"train.log_every={every}", "train.num_steps=3")
            except trainer.checkpoints.SaveError as e:
                records[f"unwritten_{every}"] = str(e)


def make_runs_of_two_nodes(folder: Path, records: dict) -> None:
    """Four processes, as if two were on each of two nodes; after `make_runs`, whose runs some go on from."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    run = functools.partial(run_train, folder)
    with recorded_bytes(records, "node"):
        run("node", *NODE, *TREAD)
    run("node_dense", *NODE, *DENSE, "train.grad_accum_steps=1", "train.num_steps=5")
    run("node_after_all", *NODE, *TREAD)  # each goes on from step 10 of a run of another kind
    for parallel in ("all", "ddp"):
        if torch.distributed.get_rank() == 0:
            copy_until_step_10(folder / "node", folder / f"{parallel}_after_node")
        torch.distributed.barrier()
    run("all_after_node", *FSDP, *TREAD)
    run("ddp_after_node", *BATCH, *TREAD)


def recorded_views(records: dict, name: str):
    """Whether the gradients of a step are parts of larger storages."""
    original = Trainer.train

    def train(trainer: Trainer) -> None:
        def record(*_):
            gradients = [p.grad for p in trainer.net.parameters() if p.grad is not None]
            records[name] = [gradient.untyped_storage().nbytes() > gradient.nbytes for gradient in gradients]

        trainer.optimizer.optimizer.register_step_post_hook(record)
        original(trainer)

    return mock.patch.object(Trainer, "train", train)


def recorded_bytes(records: dict, name: str):
    original = Trainer.train

    def train(trainer: Trainer) -> None:
        def record(*_):
            records[name] = held_bytes(trainer)

        trainer.optimizer.optimizer.register_step_post_hook(record)
        original(trainer)

    return mock.patch.object(Trainer, "train", train)


def spoil_weights(trainer: Trainer, original, micro_batches) -> None:
    """After step 2 the second process's part of a weight is not finite."""
    original(trainer, micro_batches)
    if trainer.step == 2 and not trainer.accelerator.is_main_process:
        local_shard(trainer.net.blocks[0].mlp.fc1.weight.detach()).fill_(torch.nan)


def spoil_loss(trainer: Trainer, original, *args) -> list[torch.Tensor]:
    """The second process's loss of step 2 is not finite."""
    losses = original(trainer, *args)
    is_spoiled = trainer.step == 1 and not trainer.accelerator.is_main_process
    return [loss * torch.inf for loss in losses] if is_spoiled else losses


def fail_to_save(root: Path, checkpoint, *keep) -> None:
    raise trainer.checkpoints.SaveError(f"no room for step {checkpoint.step}")
