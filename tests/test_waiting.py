"""All processes make the same collective calls in the same order, in every command: none waits where another does not."""

import itertools
import os
import sys
from datetime import timedelta
from pathlib import Path
from unittest import mock

import numpy as np
import torch.distributed as dist
from conftest import encode, make_shard, run_fid, run_sample, run_train
from ddp_runs import TREAD
from forked import REPOSITORY, launch
from PIL import Image

from runtime import processes

COLLECTIVES = "broadcast_object_list all_gather_object gather_object gather all_gather all_reduce reduce broadcast barrier"
COLLECTIVES += " monitored_barrier new_group"
TIMEOUT = timedelta(seconds=20)  # a process that waits alone fails soon
FEW = ["sampler.num_steps=2", "machine.cpu_threads=1", "sampling.batch_size=2"]


def callers():
    """Name the lines of our code that lead to a call, the innermost first."""
    frame, lines = sys._getframe(2), []
    while frame is not None and len(lines) < 4:
        file = Path(frame.f_code.co_filename)
        if REPOSITORY in file.parents and ".venv" not in file.parts and "tests" not in file.parts:
            lines.append(f"{file.relative_to(REPOSITORY)}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(lines)


def recorded(name, function, record):
    def call(*args, **kwargs):
        if where := callers():
            record.write(f"{name} from {where}\n")
            record.flush()  # a killed process leaves its calls
        if name == "monitored_barrier":
            args, kwargs = args[:1], {**kwargs, "timeout": TIMEOUT}
        elif name in ("new_group", "init_process_group"):
            kwargs["timeout"] = TIMEOUT
        return function(*args, **kwargs)

    return call


def main(folder):
    record = (folder / f"calls_{os.environ['RANK']}.txt").open("w")
    for name in [*COLLECTIVES.split(), "init_process_group"]:
        mock.patch.object(dist, name, recorded(name, getattr(dist, name), record)).start()
    mock.patch.object(processes, "destroy_process_groups", lambda: None).start()  # a process cannot open a second process group
    validation = f"evaluation.validation={folder / 'validation'}"
    run = run_train(folder, "run", *TREAD, validation)
    run_train(folder, "run", *TREAD, validation, "train.num_steps=5")
    run_train(folder, "started", *TREAD, "train.num_steps=1", f"init_from={run}")
    run_sample(f"checkpoint={run}", f"output={folder / 'images'}", "seeds=0-6", "classes=0-9", *FEW)
    reference = f"evaluation.reference={REPOSITORY / 'evaluations' / 'digits_reference.npz'}"
    points = ["evaluation.num_samples=5", "guidance=cfg", "guidance.cfg_scale=[1.5,2.0]"]
    run_fid(f"checkpoint={run}", f"output={folder / 'points'}", reference, *points, *FEW)
    run_fid(f"images={folder / 'images'}", reference, "evaluation.detector=digits", "machine.cpu_threads=1")
    encode(folder / "pictures", folder / "latents", "identity", "resolution=8", "shard_size=4")
    record.write("end\n")
    record.close()
    dist.destroy_process_group()


def test_every_process_makes_the_same_collective_calls(tmp_path):
    make_shard(tmp_path / "validation" / "a.safetensors", num_items=7, channels=1, size=8, num_classes=10)
    for i, image in enumerate(np.random.default_rng(0).integers(0, 256, (11, 12, 12, 3), dtype=np.uint8)):
        (file := tmp_path / "pictures" / "ab"[i % 2] / f"{i}.png").parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(file)
    outcomes = launch(tmp_path, ["tests/test_waiting.py", str(tmp_path)], 2, limit_sec=120, small=False)
    records = [(tmp_path / f"calls_{rank}.txt").read_text().splitlines() for rank in (0, 1)]
    for i, (first, second) in enumerate(itertools.zip_longest(*records, fillvalue="nothing")):
        assert first == second, f"call {i}: process 0 makes {first}, process 1 makes {second}"
    for outcome in outcomes:
        outcome.expect_code(0)
    assert len(records[0]) > 50 and records[0][-1] == "end"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
