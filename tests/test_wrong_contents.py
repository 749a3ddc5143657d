"""Checkpoints whose contents do not fit, although their hashes do: every command names folder and file in one line."""

import json
import shutil

import pytest
import torch
from conftest import TINY, composed, forget_accelerate, renew_manifest, run_train
from safetensors.torch import load_file, save_file

from common.files import REPOSITORY
from training import checkpoint as checkpoints

WEIGHT = "blocks.0.attn.qkv.weight"


def weights(change, *names):
    def corrupt(folder):
        for name in names or checkpoints.WEIGHTS.values():
            tensors = load_file(folder / name)
            change(tensors)
            save_file(tensors, folder / name)

    return corrupt


def optimizer(change):
    def corrupt(folder):
        content = torch.load(folder / "optimizer.pt", weights_only=True)
        change(content)
        torch.save(content, folder / "optimizer.pt")

    return corrupt


def state(**values):
    def corrupt(folder):
        content = json.loads((folder / "state.json").read_text()) | values
        (folder / "state.json").write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    return corrupt


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


# what is done to the checkpoint, what every message says of it, what reads it
ALL, TRAIN = ("train", "sample", "fid"), ("train",)
CASES = {
    "a missing tensor": (weights(lambda t: t.pop(WEIGHT)), WEIGHT, ALL),
    "another tensor": (weights(lambda t: t.update(more=torch.ones(1))), "more", TRAIN),
    "another shape": (weights(lambda t: t.update({WEIGHT: torch.ones(96, 288)})), WEIGHT, TRAIN),
    "an average without a tensor": (weights(lambda t: t.pop(WEIGHT), "ema.safetensors"), rf"ema.safetensors.*{WEIGHT}", TRAIN),
    "weights that are no safetensors": (write("model.safetensors", "x" * 64), r"model.safetensors", TRAIN),
    "an empty configuration": (write("config.yaml", ""), r"config.yaml", ALL),
    "nested YAML": (write("config.yaml", "[" * 10**6), "config.yaml", TRAIN),
    "a YAML tag": (write("config.yaml", "a: !!python/object/apply:os.abort []"), "config.yaml", TRAIN),
    "a broken state": (write("state.json", "{"), "state.json", ALL),
    "a step that is no number": (state(step="2"), "state.json", TRAIN),
    "no fingerprint": (state(data_fingerprint=None), "state.json", TRAIN),
    "no AdamW state": (optimizer(lambda o: o["state"].clear()), "optimizer.pt", TRAIN),
    "no pickle": (write("optimizer.pt", "hello"), "optimizer.pt", TRAIN),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return run_train(tmp_path_factory.mktemp("original"), "run", "train.num_steps=2")


@pytest.mark.parametrize("case", CASES)
def test_contents_that_do_not_fit_are_named_by_every_command_that_reads_them(original, tmp_path, monkeypatch, case):
    corrupt, message, readers = CASES[case]
    run = shutil.copytree(original, tmp_path / "run")
    folder = run / "checkpoints" / "step_0000002"
    corrupt(folder)
    renew_manifest(folder)
    monkeypatch.chdir(REPOSITORY)
    few = [f"checkpoint={folder}", "num_steps=2", "cpu_threads=1"]
    commands = {
        "sample": ("sample", [*few, "seeds=0-1"]),
        "fid": ("fid", [*few, "num_samples=2", "reference=evaluations/digits_reference.npz"]),
        "train": ("train", [*TINY, f"output_dir={tmp_path}", "name=run"]),  # last: it may set the folder aside
    }
    for name in (name for name in commands if name in readers):
        script, arguments = commands[name]
        forget_accelerate()
        with pytest.raises(checkpoints.CheckpointError, match=message) as raised:
            __import__(script).main(composed(arguments, "config" if script == "train" else script))
        assert str(folder) in str(raised.value) and "\n" not in str(raised.value)
