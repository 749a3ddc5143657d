"""Checkpoints whose contents do not fit, although their hashes do: every command names folder and file in one line."""

import json
import shutil

import pytest
import torch
from conftest import TINY, composed, forget_accelerate, renew_manifest, run_train
from safetensors.torch import load_file, save_file

from common.files import REPOSITORY
from training import checkpoint as checkpoints


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
        torch.save(change(content) or content, folder / "optimizer.pt")

    return corrupt


def state(**values):
    def corrupt(folder):
        content = json.loads((folder / "state.json").read_text()) | values
        content = {key: value for key, value in content.items() if value is not None}
        (folder / "state.json").write_text(json.dumps(content))

    return corrupt


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


def replace(name, old, new):
    def corrupt(folder):
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return corrupt


def drop_config(key):
    def corrupt(folder):
        lines = (folder / "config.yaml").read_text().splitlines(keepends=True)
        (folder / "config.yaml").write_text("".join(line for line in lines if not line.strip().startswith(f"{key}:")))

    return corrupt


WEIGHT = "blocks.0.attn.qkv.weight"
MULTIPLYING = "a: &a [0, 0, 0, 0, 0, 0, 0, 0, 0]\n" + "".join(
    f"{name}: &{name} [{', '.join(9 * [f'*{before}'])}]\n" for before, name in zip("abcdefghijk", "bcdefghijkl")
)
# what is done to the checkpoint, what every message says of it, what reads it
ALL, TRAIN = ("train", "init_from", "sample", "fid"), ("train", "init_from")
CASES = {
    "a missing tensor": (weights(lambda t: t.pop(WEIGHT)), rf"{WEIGHT} is no tensor there and \[288, 96\] torch.float32", ALL),
    "another tensor": (weights(lambda t: t.update(more=torch.ones(1))), r"more is \[1\] .* there and no tensor in this", ALL),
    "another shape": (weights(lambda t: t.update({WEIGHT: torch.ones(96, 288)})), rf"{WEIGHT} is \[96, 288\] ", ALL),
    "another type": (weights(lambda t: t.update({WEIGHT: t[WEIGHT].half()})), rf"{WEIGHT} is \[288, 96\] torch.float16", ALL),
    "an average without a tensor": (
        weights(lambda t: t.pop(WEIGHT), "ema.safetensors"), rf"ema.safetensors: {WEIGHT} is no tensor", ALL
    ),
    "weights that are no safetensors": (
        lambda folder: [(folder / name).write_bytes(b"\xff" * 64) for name in checkpoints.WEIGHTS.values()],
        r"\.safetensors is not readable: SafetensorError", ALL,
    ),
    "an empty configuration": (write("config.yaml", ""), r"config.yaml is not readable: .*another version", ALL),
    "a list as configuration": (write("config.yaml", "[1, 2]"), "config.yaml is not readable: ", ALL),
    "nested YAML": (write("config.yaml", "[" * 10**6), "config.yaml holds an alias or more than 50 levels", ALL),
    "a YAML tag": (write("config.yaml", "a: !!python/object/apply:os.abort []"), "config.yaml is not readable: Constructor", ALL),
    "aliases that multiply": (write("config.yaml", MULTIPLYING), "config.yaml holds an alias or more", ALL),
    "a key of another version": (
        replace("config.yaml", "\nseed:", "\nnew: 1\nseed:"), "config.yaml is not readable: .*another version: new is no", ALL
    ),
    "a missing key": (drop_config("backbone"), "config.yaml is not readable: .*another version: model.backbone is missing", ALL),
    "bytes that are no text": (lambda folder: (folder / "config.yaml").write_bytes(b"\xff\xfe\xff"), "config.yaml is not r", ALL),
    "a broken state": (write("state.json", "{"), "state.json is not readable: JSONDecodeError", ALL),
    "a list as state": (write("state.json", "[]"), "state.json has no step", ALL),
    "a step that is no number": (state(step="2"), "state.json has no step", ALL),
    "no fingerprint": (state(data_fingerprint=None), "state.json: data_fingerprint is None instead of a str", ("train",)),
    "no sum of losses": (state(loss_sum=None), "state.json: loss_sum is None instead of a float", ("train",)),
    "an infinite sum": (state(loss_sum=float("inf")), "state.json: loss_sum is inf instead of a float", ("train",)),
    "a count that is no count": (state(loss_count=[1]), r"state.json: loss_count is \[1\] instead of a int", ("train",)),
    "updates that are no count": (state(ema_num_updates="2"), "state.json: ema_num_updates is '2' instead of a int", TRAIN),
    "no AdamW state": (optimizer(lambda o: o["state"].clear()), "optimizer.pt: step of .* is no tensor there", TRAIN),
    "AdamW without one parameter": (
        optimizer(lambda o: o["state"].popitem() and None), "optimizer.pt: step of .* is no tensor there", TRAIN
    ),
    "AdamW without a moment": (
        optimizer(lambda o: o["state"][3].pop("exp_avg_sq") is None), "optimizer.pt: exp_avg_sq of .* is no tensor there", TRAIN
    ),
    "a moment of another shape": (
        optimizer(lambda o: o["state"][3].update(exp_avg=torch.ones(2))), r"optimizer.pt: exp_avg of .* is \[2\] ", TRAIN
    ),
    "a moment without values": (
        optimizer(lambda o: o["state"][3].update(exp_avg=torch.ones(2, device="meta"))), "exp_avg of .* is no tensor", TRAIN
    ),
    "AdamW for one parameter more": (
        optimizer(lambda o: o["state"].update({999: {"step": torch.ones(())}})), "optimizer.pt: step of 999 is", TRAIN
    ),
    "a list as optimizer": (optimizer(lambda o: [o]), "optimizer.pt is not readable: TypeError", TRAIN),
    "no pickle": (write("optimizer.pt", "hello"), "optimizer.pt is not readable: ", TRAIN),
}  # fmt: skip


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
        "train": ("train", [*TINY, f"output_dir={tmp_path}", "name=run"]),
        "init_from": ("train", [*TINY, f"output_dir={tmp_path}", "name=new", f"init_from={folder}", "init_state=all"]),
        "sample": ("sample", [*few, "seeds=0-1"]),
        "fid": ("fid", [*few, "num_samples=2", "reference=evaluations/digits_reference.npz"]),
    }
    for name in readers:
        script, arguments = commands[name]
        forget_accelerate()
        with pytest.raises(checkpoints.CheckpointError, match=message) as raised:
            __import__(script).main(composed(arguments, "config" if script == "train" else script))
        assert str(folder) in str(raised.value) and "\n" not in str(raised.value)
        if name == "train" and (aside := folder.with_name(f"bad_{folder.name}")).exists():
            aside.rename(folder)
