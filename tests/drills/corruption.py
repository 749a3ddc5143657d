"""Damaged checkpoints: wrong weights are never loaded; an earlier checkpoint is taken, or one line says what is wrong.

A trial copies a finished run with checkpoints of steps 2, 4 and 6, damages the newest, and then trains, samples or evaluates.
Whoever ends with 0 must have made what a run leaves whose newest checkpoint is that of step 4: training makes step 6 again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

import torch
from commands import contents, expect, expect_same, run, tool
from safetensors.torch import load_file, save_file

from common.files import hash_file

NEWEST, BEFORE, FIRST = "step_0000006", "step_0000004", "step_0000002"
FILES = ("model.safetensors", "ema.safetensors", "optimizer.pt", "state.json", "config.yaml", "manifest.json")
READ_BY_SAMPLE = ("ema.safetensors", "config.yaml")
NUM_FLIPS = 8  # per file
LIMIT_SEC, MAX_MIB = 30, 4096
Damage = Callable[[Path, Random], object]


# ----------------------------------------------------------------------------------------------------------------------
# Damage that the hashes show, to one file.


def flip_a_bit(file: Path, rng: Random) -> None:
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def replace_by(make: Callable[[Path], object]) -> Damage:
    def damage(file: Path, rng: Random) -> None:
        file.unlink()
        make(file)

    return damage


def truncate(file: Path, rng: Random) -> None:
    os.truncate(file, rng.randrange(1, file.stat().st_size))


OF_FILES: dict[str, Damage] = {
    **{f"a flipped bit {i}": flip_a_bit for i in range(NUM_FLIPS)},
    "truncated": truncate,
    "cut by a byte": lambda file, rng: os.truncate(file, file.stat().st_size - 1),
    "empty": lambda file, rng: os.truncate(file, 0),
    "with a byte more": lambda file, rng: file.write_bytes(file.read_bytes() + b"\0"),
    "zeros": lambda file, rng: file.write_bytes(bytes(file.stat().st_size)),
    "missing": lambda file, rng: file.unlink(),
    "a folder": replace_by(Path.mkdir),
    "a pipe that nobody writes to": replace_by(os.mkfifo),
    "a link to itself": replace_by(lambda file: file.symlink_to(file)),
    "a link to nothing": replace_by(lambda file: file.symlink_to("nothing")),
    # Permissions do not stop root. Reading this file fails with EIO for everybody.
    "unreadable": replace_by(lambda file: file.symlink_to("/proc/self/mem")),
    "of another step": lambda file, rng: shutil.copy(file.parents[1] / FIRST / file.name, file),
}


# ----------------------------------------------------------------------------------------------------------------------
# Damage to the folder; its own hashes may be whole.


def swap(first: str, second: str) -> Damage:
    def damage(folder: Path, rng: Random) -> None:
        (folder / first).rename(folder / "aside")
        (folder / second).rename(folder / first)
        (folder / "aside").rename(folder / second)

    return damage


def rename(folder: Path, name: str) -> None:
    folder.rename(folder.parent / name)


def pretend(source: str, name: str) -> Damage:
    """Another checkpoint takes the place of the newest one."""
    return lambda folder, rng: (shutil.rmtree(folder), shutil.copytree(folder.parent / source, folder.parent / name))


OF_FOLDERS: dict[str, Damage] = {
    "model and EMA swapped": swap("model.safetensors", "ema.safetensors"),
    "state and config swapped": swap("state.json", "config.yaml"),
    "weights and optimizer swapped": swap("model.safetensors", "optimizer.pt"),
    "an empty folder": lambda folder, rng: (shutil.rmtree(folder), folder.mkdir()),
    "a file": lambda folder, rng: (shutil.rmtree(folder), folder.write_text("")),
    "a link to itself": lambda folder, rng: (shutil.rmtree(folder), folder.symlink_to(folder)),
    "only a manifest": lambda folder, rng: [file.unlink() for file in folder.iterdir() if file.name != "manifest.json"],
    "step 4 under the name of step 6": pretend(BEFORE, NEWEST),
    "step 2 under the name of step 6": pretend(FIRST, NEWEST),
    "step 6 under the name of step 100": lambda folder, rng: rename(folder, "step_0000100"),
    "step 4 under the name of step 100": pretend(BEFORE, "step_0000100"),
    "step 6 under a name without zeros": lambda folder, rng: folder.rename(folder.with_name("step_6")),
    "step 6 under a name of ten million": lambda folder, rng: rename(folder, "step_10000000"),
}


# ----------------------------------------------------------------------------------------------------------------------
# Contents that are whole by their hashes, and wrong: a function of the content that returns what takes its place.


def write_manifest(folder: Path) -> None:
    files = [file for file in sorted(folder.iterdir()) if file.name != "manifest.json"]
    entries = {file.name: {"size": file.stat().st_size, "blake2b": hash_file(file)} for file in files}
    (folder / "manifest.json").write_text(json.dumps(entries))


def of_weights(change: Callable[[dict], object], *names: str) -> Damage:
    def damage(folder: Path, rng: Random) -> None:
        for name in names or ("model.safetensors", "ema.safetensors"):
            tensors = load_file(folder / name)
            changed = change(tensors)
            save_file(changed if isinstance(changed, dict) else tensors, folder / name)
        write_manifest(folder)

    return damage


def of_json(change: Callable[[dict], object]) -> Damage:
    def damage(folder: Path, rng: Random) -> None:
        state = json.loads((folder / "state.json").read_text())
        changed = change(state)
        (folder / "state.json").write_text(changed if isinstance(changed, str) else json.dumps(state))
        write_manifest(folder)

    return damage


def of_optimizer(change: Callable[[dict], object]) -> Damage:
    def damage(folder: Path, rng: Random) -> None:
        state = torch.load(folder / "optimizer.pt", weights_only=True)
        changed = change(state)
        torch.save(state if changed is None else changed, folder / "optimizer.pt")
        write_manifest(folder)

    return damage


def of_text(name: str, change: Callable[[str], str]) -> Damage:
    def damage(folder: Path, rng: Random) -> None:
        (folder / name).write_text(change((folder / name).read_text()), encoding="utf-8")
        write_manifest(folder)

    return damage


def of_bytes(content: bytes, *names: str) -> Damage:
    return lambda folder, rng: ([(folder / name).write_bytes(content) for name in names], write_manifest(folder))


def of_manifest(change: Callable[[dict], object]) -> Damage:
    def damage(folder: Path, rng: Random) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        changed = change(manifest)
        (folder / "manifest.json").write_text(changed if isinstance(changed, str) else json.dumps(manifest))

    return damage


def _first(tensors: dict) -> str:
    return sorted(tensors)[0]


def _set(key: str, value: object) -> Callable[[dict], None]:
    return lambda values: values.__setitem__(key, value)


DEEP = "[" * 100_000
_ALIASES = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))

WRONG_WEIGHTS: dict[str, Damage] = {  # wrong for every command
    "weights without a tensor": of_weights(lambda t: t.pop(_first(t))),
    "weights with one tensor more": of_weights(_set("more", torch.zeros(3))),
    "weights of another shape": of_weights(lambda t: t.__setitem__(_first(t), torch.zeros(3, 5))),
    "weights without tensors": of_weights(lambda t: t.clear()),
    "weights under other names": of_weights(lambda t: {f"module.{name}": x for name, x in t.items()}),
    "weights that are text": of_bytes(b"{}", *FILES[:2]),
    "weights with an absurd header": of_bytes(b"\xff" * 7 + b"\x7f" + b"{}", *FILES[:2]),
    "weights with a deep header": of_bytes(len(DEEP).to_bytes(8, "little") + DEEP.encode(), *FILES[:2]),
    "config.yaml that is empty": of_text("config.yaml", lambda text: ""),
    "config.yaml that is a list": of_text("config.yaml", lambda text: "- 1\n"),
    "config.yaml that is a word": of_text("config.yaml", lambda text: "word"),
    "config.yaml that is not YAML": of_text("config.yaml", lambda text: "a: [\n"),
    "config.yaml of half its lines": of_text("config.yaml", lambda text: text[: len(text) // 2]),
    "config.yaml that is binary": of_text("config.yaml", lambda text: "\0\1\2"),
    "config.yaml with a tag": of_text(
        "config.yaml", lambda text: text + "\nx: !!python/object/apply:os.system ['touch pwned']\n"),
    "config.yaml with aliases that multiply": of_text("config.yaml", lambda text: _ALIASES + text),
    "config.yaml that is deep": of_text("config.yaml", lambda text: f"x: {DEEP}\n{text}"),
    "config.yaml with an interpolation": of_text("config.yaml", lambda text: text.replace("seed: 0", "seed: ${oc.env:HOME}")),
    "config.yaml with an absurd backbone": of_text("config.yaml", lambda text: text.replace("DiT-XS/2", "DiT-XXXXL/0")),
    "config.yaml of another size": of_text("config.yaml", lambda text: text.replace("input_size: 8", "input_size: 16")),
    "config.yaml with an absurd size": of_text("config.yaml", lambda text: text.replace("input_size: 8", "input_size: 80000000")),
    "config.yaml with absurd classes": of_text(
        "config.yaml", lambda text: text.replace("num_classes: 10", "num_classes: 1000000000000")),
    "config.yaml with a scale that is not finite": of_text(
        "config.yaml", lambda text: text.replace("scale_factor: 0.66", "scale_factor: .nan #")),
    "state.json without the step": of_json(lambda state: state.pop("step")),
    "state.json whose step is a word": of_json(_set("step", "six")),
    "state.json whose step is another's": of_json(_set("step", 4)),
    "state.json whose step is absurd": of_json(_set("step", 10**30)),
    "state.json that is cut": of_json(lambda state: json.dumps(state)[:-20]),
    "state.json that is a list": of_json(lambda state: "[]"),
    "state.json that is deep": of_json(lambda state: DEEP),
    "manifest.json without the optimizer": of_manifest(lambda manifest: manifest.pop("optimizer.pt") and None),
    "manifest.json that is a list": of_manifest(lambda manifest: "[1]"),
    "manifest.json that is deep": of_manifest(lambda manifest: DEEP),
    "manifest.json with a long name": of_manifest(_set("x" * 300, {"size": 1, "blake2b": "0"})),
    "manifest.json with a name that ends early": of_manifest(_set("model\0", {"size": 1, "blake2b": "0"})),
    "manifest.json with a path out of the folder": of_manifest(_set("../../../../etc/passwd", {"size": 1, "blake2b": "0"})),
    "manifest.json with words for sizes": of_manifest(lambda manifest: manifest["state.json"].update(size="many")),
    "manifest.json with sizes that are not finite": of_manifest(
        lambda manifest: json.dumps(manifest).replace('"size": ', '"size": 1e999, "x": ')),
}  # fmt: skip
WRONG_FOR_TRAINING: dict[str, Damage] = {
    "AdamW without a state": of_optimizer(lambda state: state["state"].pop(0) and None),
    "AdamW without states": of_optimizer(lambda state: state["state"].clear()),
    "AdamW without a key": of_optimizer(lambda state: state["state"][0].pop("exp_avg_sq")),
    "AdamW of another shape": of_optimizer(lambda state: state["state"][0].update(exp_avg=torch.zeros(3))),
    "AdamW that is not finite": of_optimizer(lambda state: state["state"][0]["exp_avg"].fill_(float("inf"))),
    "AdamW that is a list": of_optimizer(lambda state: [1, 2]),
    "AdamW that is text": of_bytes(b"text", "optimizer.pt"),
    "state.json without the data": of_json(lambda state: state.pop("data_fingerprint") and None),
    "state.json without the sum of losses": of_json(lambda state: state.pop("loss_sum")),
    "state.json with words for numbers": of_json(_set("loss_count", "many")),
    "state.json with losses that are not finite": of_json(_set("loss_sum", float("nan"))),
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------


def trials(inputs: Path, shared: Path) -> Iterator[tuple]:
    for name in ("sample", "fid"):  # what they make of steps 4 and 6
        for step in (BEFORE, NEWEST):
            shutil.copytree(inputs / "run", shared / name / step / "run")
            if step == BEFORE:
                shutil.rmtree(shared / name / step / "run" / "checkpoints" / NEWEST)
            run(shared / name / step, command_of(name)).expect_whole()
    cases = {f"{file} {what}": of_file(file, damage) for file in FILES for what, damage in OF_FILES.items()}
    for number, (what, damage) in enumerate([*cases.items(), *OF_FOLDERS.items(), *WRONG_WEIGHTS.items()]):
        is_of_file = what in cases
        yield f"train, {what}", partial(attempt_on, "train", damage, inputs, shared)
        if not is_of_file or number % 2:
            yield f"sample, {what}", partial(attempt_on, "sample", damage, inputs, shared)
        if not is_of_file and number % 2:
            yield f"fid, {what}", partial(attempt_on, "fid", damage, inputs, shared)
    for what, damage in WRONG_FOR_TRAINING.items():
        yield f"train, {what}", partial(attempt_on, "train", damage, inputs, shared)


def of_file(name: str, damage: Damage) -> Damage:
    return lambda folder, rng: damage(folder / name, rng)


def command_of(name: str) -> list[str]:
    if name == "train":
        return tool("train", Path(), "checkpoint.keep_last=3", "train.lr=1e-2")
    return tool(name, Path(), "checkpoint=run", "output=out")


def attempt_on(name: str, damage: Damage, inputs: Path, shared: Path, folder: Path, rng: Random) -> None:
    out = folder / "out"
    steps = out / "run" / "checkpoints"
    shutil.copytree(inputs / "run", out / "run")
    damage(steps / NEWEST, rng)
    outcome = run(out, command_of(name), limit_sec=LIMIT_SEC)
    expect(not list(out.rglob("pwned")), "it executed what the file says")
    expect(outcome.peak_mib < MAX_MIB, f"it took {outcome.peak_mib:.0f} MiB")
    if outcome.code != 0:
        outcome.expect_one_line("step_")
    elif name == "train":
        outcome.expect_whole()
        for aside in steps.iterdir():
            if aside.name not in (FIRST, BEFORE, NEWEST):
                shutil.rmtree(aside) if aside.is_dir() and not aside.is_symlink() else aside.unlink()
        expect_same(out / "run", inputs / "run")
    else:
        outcome.expect_whole()
        made, allowed = contents(out / "out"), [contents(shared / name / step / "out") for step in (BEFORE, NEWEST)]
        # Step 6 may be sampled where its weights are unharmed, under whatever name.
        unharmed = contents(inputs / "run" / "checkpoints" / NEWEST)
        found = [contents(path) for path in steps.iterdir() if path.is_dir()]
        is_whole = any(all(content.get(name) == unharmed[name] for name in READ_BY_SAMPLE) for content in found)
        expect(made in allowed[: 1 + is_whole], "it is not made from the checkpoint of step 4")
