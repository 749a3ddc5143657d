"""Shared helpers: they make small data and run the commands in this process or in a new process."""

import contextlib
import gc
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields
from functools import partial
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from safetensors.torch import load_file

from cli.compose import compose_overrides, parse_config
from common.files import REPOSITORY, hash_file
from configs import schema
from configs.sampling_schema import FidConfig, SampleConfig
from evaluations.images import write_npz
from evaluations.record import PlannedEvaluation
from evaluations.result_settings import RESULT_SETTINGS
from latents.shards import ShardInfo, write_shard
from runtime import machine

# The CPU tests see no GPU. `pytest tests/gpu` runs the tests that need one.
if "pytest" in sys.argv[0] and not any("gpu" in Path(argument.partition("::")[0]).parts[-2:] for argument in sys.argv[1:]):
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
# Collect tests/gpu only if there is a CUDA device. tests/test_gpu_code.py runs the same code on a CPU.
collect_ignore = [] if torch.cuda.is_available() else ["gpu"]
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:  # with pytest -n, each worker gets its share of the cores
    torch.set_num_threads(max(1, machine.visible_cores() // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])))
# Variables of the user, of a launcher or of Slurm that change what the tests do.
FOREIGN = ["HYDRA_FULL_ERROR", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
FOREIGN += ["SLURM_CPUS_PER_TASK", "SLURM_JOB_ID", "SLURM_STEP_NUM_TASKS", "SUBMITIT_EXECUTOR", "TORCHELASTIC_RUN_ID"]
# Arguments of `python` that launch one or two processes. `--cpu --num_processes 2` would start only one process. Backend: gloo.
LAUNCH_1 = ["-m", "accelerate.commands.launch", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
LAUNCH_1 += ["--num_processes=1"]
LAUNCH_2 = [*LAUNCH_1[:-1], "--multi_gpu", "--num_processes=2", "--main_process_port=0"]
# The slowest files. pytest -n runs them first, so that all workers finish at about the same time.
SLOWEST = ["test_step_graph", "test_sweeps", "test_drills", "test_command_line", "test_train", "test_fid", "test_ddp"]
SLOWEST += [
    "test_guided_time",
    "test_time_256",
    "test_gpu_code",
    "test_start_page",
    "test_benchmarks",
    "test_stop",
    "test_two_nodes",
]
SLOWEST += ["test_weights_in", "test_prepare_latents", "test_small_pictures", "test_processes", "test_attach_company"]
SLOWEST += ["test_speed"]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    return machine.visible_cores()


def pytest_configure(config):
    for name in FOREIGN:
        os.environ.pop(name, None)
    config.option.loadscopereorder = False  # xdist must not sort files by their number of tests


def pytest_collection_modifyitems(items):
    order = {name: place for place, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


def pytest_runtest_setup(item):
    """Exempt what tests have imported from garbage collection. Each run collects twice, and torch alone takes 0.3 s each time."""
    global num_frozen_modules
    if len(sys.modules) > num_frozen_modules + 100:
        gc.collect()
        gc.freeze()
        num_frozen_modules = len(sys.modules)


num_frozen_modules = 0


def pytest_sessionfinish():
    gc.unfreeze()  # otherwise nanobind reports leaks when the process exits


def forget_accelerate():
    """Reset the state that accelerate keeps in singletons, before the next run."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def make_shard(path, num_items=24, channels=2, size=4, kind="sample", num_classes=3, seed=0, flips=False, **info):
    """Write a small random shard and return its latents and labels."""
    g = torch.Generator().manual_seed(seed)
    stored_channels = 2 * channels if kind == "moments" else channels
    latents = torch.randn(num_items, stored_channels, size, size, generator=g)
    labels = torch.randint(0, num_classes, (num_items,), generator=g)
    settings = dict(kind=kind, scale_factor=0.5, autoencoder="identity", resolution=size, num_classes=num_classes) | info
    write_shard(path, latents, labels, ShardInfo(**settings), latents_flip=latents.flip(-1) if flips else None)
    return latents, labels


# train.py arguments that make runs of the Fashion-MNIST rows fast
FASTER_FASHION = ["machine.compile=none", "model.backbone=DiT-XS/8", "train.batch_size=4", "data.num_workers=0"]


@pytest.fixture
def fashion_folder(tmp_path, monkeypatch):
    """Fixture: a working folder with small random data in place of Fashion-MNIST, and its detector."""
    monkeypatch.chdir(tmp_path)
    for name in ("fashion", "fashion_validation"):
        (tmp_path / "data" / name).mkdir(parents=True)
        make_shard(tmp_path / "data" / name / "shard.safetensors", num_items=20, channels=1, size=32, num_classes=10)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 32, 32, 3), dtype=np.uint8)
    (tmp_path / "references").mkdir()
    write_npz(tmp_path / "references" / "fashion.npz", pixels, pixels.shape, np.arange(40) % 10)
    (tmp_path / "evaluations").mkdir()
    shutil.copy(REPOSITORY / "evaluations" / "fashion_detector.safetensors", tmp_path / "evaluations")
    return tmp_path


def checked(overrides=(), config_name="config"):
    """Return the checked configuration of a command."""
    settings = {"config": schema.TrainConfig, "sample": SampleConfig, "fid": FidConfig}[config_name]
    return parse_config(compose_overrides(overrides, config_name), settings)


# Settings of a small run: a step takes about 30 ms.
TINY = [
    "train.batch_size=4",
    "train.num_steps=6",
    "train.log_every=1",
    "machine.cpu_threads=1",
    "sample_grid.every=0",
    "evaluation.every=0",
    "checkpoint.every=100",
]


def run_train(folder, name, *overrides):
    """Run train.py in this process and return the run's folder."""
    import train as script

    forget_accelerate()
    script.main(checked([*TINY, f"name={name}", f"output_dir={folder}", *overrides]))
    return folder / name


def run_script(name, *overrides):
    """Run sample.py or fid.py in this process."""
    forget_accelerate()
    importlib.import_module(name).main(checked(overrides, name))


run_sample, run_fid = partial(run_script, "sample"), partial(run_script, "fid")


def encode(images, output, autoencoder="identity", *settings):
    """Run `prepare_latents.py encode` in this process and return `output`. Identity stores samples, as pixels have no moments."""
    import prepare_latents

    forget_accelerate()
    arguments = dict(images=images, output=output, autoencoder=autoencoder, num_workers=0, cpu_threads=1)
    arguments |= dict(resolution=32, shard_size=8, batch_size=3) | (dict(kind="sample") if autoencoder == "identity" else {})
    arguments |= dict(setting.split("=", 1) for setting in settings)
    prepare_latents.main(["encode", *(f"{key}={value}" for key, value in arguments.items())])
    return output


@pytest.fixture
def train(tmp_path):
    """Fixture: train(name, *overrides) runs train.py in this process and returns the run's folder."""
    return partial(run_train, tmp_path)


@pytest.fixture(scope="session")
def inception_weights(tmp_path_factory):
    """Fixture: the weights file of an untrained Inception (95 MB), written once per session."""
    from stand_ins import untrained_inception

    file = tmp_path_factory.mktemp("inception") / "inception.pth"
    untrained_inception(file)
    return file


@pytest.fixture(scope="session")
def tiny_encoder(tmp_path_factory):
    """Fixture: a weights file of timm's test_vit with random weights."""
    from stand_ins import untrained_encoder

    return untrained_encoder(tmp_path_factory.mktemp("encoder") / "tiny.safetensors")


@pytest.fixture(scope="session")
def vae(tmp_path_factory):
    """Fixture: the folder of a small AutoencoderKL, 3x32x32 -> 4x16x16. Its weights are random, but its images are not grey."""
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8), latent_channels=4, norm_num_groups=4, layers_per_block=1,
    ).save_pretrained(folder := tmp_path_factory.mktemp("vae"))  # fmt: skip
    return folder


def run_python(*arguments):
    """Run `python <arguments>` on the CPU in a new process, started in the repository. Return (exit code, output)."""
    how = dict(cwd=REPOSITORY, env=os.environ | {"ACCELERATE_USE_CPU": "true"}, text=True, timeout=180)
    done = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **how)
    return done.returncode, done.stdout


def wait_for(condition, timeout_sec=120):
    deadline = time.monotonic() + timeout_sec
    while not condition():
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.05)


def renew_manifest(folder):
    """Rewrite the manifest of a checkpoint whose files have changed."""
    files = [file for file in folder.iterdir() if file.name != "manifest.json"]
    manifest = {file.name: {"size": file.stat().st_size, "blake2b": hash_file(file)} for file in files}
    (folder / "manifest.json").write_text(json.dumps(manifest))


class Malicious:
    """An object whose pickle calls a function when it is loaded."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@contextlib.contextmanager
def file_size_limit(num_bytes):
    """Inside the context, no library can write a file beyond this size: the write fails, as on a full disk."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def evaluated(run):
    """Return the evaluations of a run, in the order in which they were stored."""
    return results(run / "evaluations")


def results(folder):
    """Return the lines of a folder's results.jsonl. Each of their settings must have a line in the table that compares them."""
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    samplers = (resolve_name(diffusion).Sampler for diffusion in schema.DIFFUSIONS.values())
    keys = {*RESULT_SETTINGS, *(field.name for sampler in samplers for field in fields(sampler))}
    for line in lines:
        evaluation = PlannedEvaluation(settings=line["settings"])
        assert evaluation.settings.keys() - evaluation.guidance.keys() - keys == set()
    return lines


def weights(run, step, file="model"):
    return load_file(run / "checkpoints" / f"step_{step:07d}" / f"{file}.safetensors")


def losses(run):
    return {record["step"]: record["loss"] for record in metrics(run) if "loss" in record}
