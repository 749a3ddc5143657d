"""Files and settings that were made to execute, to escape, to exhaust or to confuse.

Each is refused in one line that names the file or the key, within seconds and without gigabytes; nothing it holds is executed,
and nothing is written elsewhere. What some programs would take, and what does no harm, may also be accepted (`HARMLESS`).
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import torch
from commands import contents, expect, run, tool
from conftest import make_shard
from corruption import DEEP, WRONG_WEIGHTS, write_manifest
from PIL import Image
from safetensors.torch import load_file, save_file
from test_webdataset import npy, sd_moments, write_tar

LIMIT_SEC, MAX_MIB = 30, 2048
HARMLESS = (0, 1)
Make = Callable[[Path], object]


class Payload:
    """Whoever unpickles it runs a command."""

    def __reduce__(self):
        return os.system, ("touch pwned",)


# ----------------------------------------------------------------------------------------------------------------------
# Tars of latents, for `convert` and for training.

CONVERT = tool("convert", Path(), "path=../in")
PICKLES_ALLOWED = [*CONVERT, "allow_pickle=true"]
_LATENT = sd_moments(1)[0]


def tar_of(*members: tuple[str, bytes]) -> Make:
    return lambda folder: write_tar(folder / "a.tar", [("0.cls", b"1"), *members])


def latent(payload: bytes, extension: str = "latent") -> Make:
    return tar_of((f"0.{extension}", payload))


def label(text: bytes) -> Make:
    return lambda folder: write_tar(folder / "a.tar", [("0.cls", text), ("0.latent.npy", npy(_LATENT))])


def header_of_npy(text: str, values: bytes = b"\0" * 64) -> bytes:
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(text)) + text.encode() + values


def described(shape: str, dtype: str = "'<f4'", order: str = "False") -> bytes:
    return header_of_npy(f"{{'descr': {dtype}, 'fortran_order': {order}, 'shape': {shape}, }}\n")


def member_of(**settings: object) -> Make:
    """A tar whose last member is as these attributes of TarInfo say."""

    def make(folder: Path) -> None:
        write_tar(folder / "a.tar", [("0.cls", b"1"), ("0.latent.npy", npy(_LATENT))])
        with tarfile.open(folder / "a.tar", "a") as tar:
            member = tarfile.TarInfo("1.latent.npy")
            for name, value in settings.items():
                setattr(member, name, value)
            tar.addfile(member, io.BytesIO(bytes(member.size)) if 0 < member.size < 2**20 else None)

    return make


def named(name: str) -> Make:
    return lambda folder: write_tar(folder / "a.tar", [(f"{name}.cls", b"1"), (f"{name}.latent.npy", npy(_LATENT))])


_OBJECTS = io.BytesIO()
np.save(_OBJECTS, np.array([Payload()], dtype=object), allow_pickle=True)
TARS: dict[str, tuple] = {
    **{f"a pickle of protocol {p} that calls os.system": (latent(pickle.dumps(Payload(), p)), PICKLES_ALLOWED) for p in range(6)},
    "the same, pickles not allowed": (latent(pickle.dumps(Payload())), CONVERT),
    "a payload beside an array": (latent(pickle.dumps([_LATENT, Payload()])), PICKLES_ALLOWED),
    "a payload behind an array": (latent(pickle.dumps(_LATENT) + pickle.dumps(Payload())), PICKLES_ALLOWED, HARMLESS),
    "a pickle that calls eval": (latent(b"cbuiltins\neval\n(S'open(\"pwned\",\"w\")'\ntR."), PICKLES_ALLOWED),
    "a pickle that calls numpy.load": (latent(b"cnumpy\nload\n(S'pwned'\ntR."), PICKLES_ALLOWED),
    "a pickle with an absurd memo": (latent(b"Nr\xff\xff\xff\x7f."), PICKLES_ALLOWED),
    "a pickle with an absurd length": (latent(b"\x8e" + struct.pack("<Q", 2**62) + b"."), PICKLES_ALLOWED),
    "a deep pickle": (latent(b"(" * 100_000 + b"t" * 100_000 + b"."), PICKLES_ALLOWED),
    "a deep pickle of lists": (latent(b"]" + b"]a" * 1 + b"(" * 10**6 + b"l" * 10**6 + b"."), PICKLES_ALLOWED),
    "a pickle with an absurd shape": (
        latent(pickle.dumps(_LATENT, 2).replace(b"K\x08K\x04K\x04", b"K\xffK\xffK\xff")), PICKLES_ALLOWED),
    "an .npy of objects": (latent(_OBJECTS.getvalue(), "latent.npy"), PICKLES_ALLOWED),
    "an .npy of a trillion values": (latent(described("(1000000, 1000, 1000)"), "latent.npy"), CONVERT),
    "an .npy with a negative shape": (latent(described("(-8, -4, 4)"), "latent.npy"), CONVERT),
    "an .npy whose shape overflows": (latent(described(f"({2**63}, {2**63}, 2)"), "latent.npy"), CONVERT),
    "an .npy whose header calls": (latent(header_of_npy("__import__('os').system('touch pwned')\n"), "latent.npy"), CONVERT),
    "an .npy with a deep header": (latent(header_of_npy("(" * 9000 + "\n"), "latent.npy"), CONVERT),
    "an .npy with an absurd header": (latent(b"\x93NUMPY\x02\x00\xff\xff\xff\xff", "latent.npy"), CONVERT),
    "an .npy of a dtype of dtypes": (latent(described("(1,)", str([("a", "<f4", (10**9, 10**9))])), "latent.npy"), CONVERT),
    "an .npy of version 9": (latent(b"\x93NUMPY\x09\x00" + b"\0" * 100, "latent.npy"), CONVERT),
    "an .npy of NaN": (latent(npy(_LATENT * np.float32("nan")), "latent.npy"), CONVERT),
    "an .npy of infinities": (latent(npy(_LATENT * np.float32("inf")), "latent.npy"), CONVERT),
    "an .npy without values": (latent(npy(np.zeros((0, 4, 4), np.float32)), "latent.npy"), CONVERT),
    **{
        f"the label {text[:12]!r}": (label(text), CONVERT)
        for text in (b"-1", b"1" * 60, b"1" * 10**6, "\u00b2".encode(), "\u0663".encode(), b"1\n2", b"", b"nan", b"1e3", b"\0")
    },
    **{
        f"a member {what}": (member_of(**settings), CONVERT)
        for what, settings in {
            "that links to /etc/passwd": dict(type=tarfile.SYMTYPE, linkname="/etc/passwd"),
            "that links to itself": dict(type=tarfile.LNKTYPE, linkname="1.latent.npy"),
            "that is a device": dict(type=tarfile.CHRTYPE, devmajor=1, devminor=5),
            "that is a pipe": dict(type=tarfile.FIFOTYPE),
            "of 8 EiB": dict(size=2**63 - 1),
            "of -1 bytes": dict(size=-1),
        }.items()
    },
    **{
        f"the name {name[:20]!r}": (named(name), CONVERT, HARMLESS)
        for name in ("../../escaped", "/tmp/escaped", "a\nerror: b", "\x1b[2J", "x" * 5000, "..", "%s%n")
    },
    "no tar at all": (lambda folder: (folder / "a.tar").write_bytes(os.urandom(5000)), CONVERT),
    "a tar that is compressed": (lambda folder: (folder / "a.tar").write_bytes(b"\x1f\x8b" + bytes(5000)), CONVERT),
    "a tar that is empty": (lambda folder: (folder / "a.tar").write_bytes(b""), CONVERT),
    "a tar that is a pipe": (lambda folder: os.mkfifo(folder / "a.tar"), CONVERT),
    "a tar that links to itself": (lambda folder: (folder / "a.tar").symlink_to("a.tar"), CONVERT),
    "a pickle, for training": (
        latent(pickle.dumps(Payload())),
        tool("train", Path(), "data=custom", "data.path=../in", "data.format=webdataset", "data.allow_pickle=true")),
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# .npz, for fid.py.

JUDGE = ["fid.py", "images=../in/a.npz", "reference={inputs}/digits_reference.npz", "evaluation.detector=digits", "cpu_threads=1"]
COMPARE = [
    "fid.py",
    "images={inputs}/digits_reference.npz",
    "reference=../in/a.npz",
    "evaluation.detector=digits",
    "cpu_threads=1",
]
_IMAGES = np.random.default_rng(0).integers(0, 256, (20, 8, 8, 3), dtype=np.uint8)


def npz_of(entries: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> Make:
    def make(folder: Path) -> None:
        with zipfile.ZipFile(folder / "a.npz", "w", compression) as archive:
            for name, content in entries.items():
                archive.writestr(name, content)

    return make


def with_images(**arrays: np.ndarray) -> Make:
    return npz_of({"arr_0.npy": npy(_IMAGES)} | {f"{name}.npy": npy(array) for name, array in arrays.items()})


def bomb(folder: Path, name: str = "labels.npy", num_bytes: int = 3 << 30) -> None:
    """Gigabytes of zeros in megabytes."""
    with zipfile.ZipFile(folder / "a.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("arr_0.npy", npy(_IMAGES))
        with archive.open(name, "w", force_zip64=True) as f:
            f.write(described(f"({num_bytes // 8},)", "'<i8'")[:-64])
            for _ in range(num_bytes >> 24):
                f.write(bytes(1 << 24))


NPZS: dict[str, tuple] = {
    "objects as images": (npz_of({"arr_0.npy": _OBJECTS.getvalue()}), JUDGE),
    "objects as labels": (npz_of({"arr_0.npy": npy(_IMAGES), "labels.npy": _OBJECTS.getvalue()}), JUDGE),
    "objects as a reference": (npz_of({"mu.npy": _OBJECTS.getvalue(), "sigma.npy": _OBJECTS.getvalue()}), COMPARE),
    "a trillion images": (npz_of({"arr_0.npy": described("(1000000000000, 8, 8, 3)", "'|u1'")}), JUDGE),
    "a trillion labels": (npz_of({"arr_0.npy": npy(_IMAGES), "labels.npy": described(f"({10**12},)", "'<i8'")}), JUDGE),
    "a zip bomb of labels": (bomb, JUDGE),
    "a zip bomb of statistics": (partial(bomb, name="mu.npy"), COMPARE),
    "names without .npy": (npz_of({"arr_0": npy(_IMAGES), "mu": b""}), JUDGE),
    "a header that calls": (npz_of({"arr_0.npy": header_of_npy("__import__('os').system('touch pwned')\n")}), JUDGE),
    "a name out of the folder": (
        npz_of({"../../escaped.npy": npy(_IMAGES), "arr_0.npy": npy(_IMAGES)}), [*JUDGE, "num_samples=20"], HARMLESS),
    "statistics that are not finite": (with_images(mu=np.full(64, np.nan), sigma=np.full((64, 64), np.inf)), COMPARE, HARMLESS),
    "statistics of another shape": (with_images(mu=np.zeros(3), sigma=np.zeros((4, 5))), COMPARE),
    "labels of another length": (with_images(labels=np.zeros(3, np.int64)), JUDGE),
    "no zip": (lambda folder: (folder / "a.npz").write_bytes(b"PK" + bytes(500)), JUDGE),
    "a pickle under its name": (lambda folder: (folder / "a.npz").write_bytes(pickle.dumps(Payload())), JUDGE),
    "images that end early": (npz_of({"arr_0.npy": npy(_IMAGES)[:-100]}), JUDGE),
    "a folder": (lambda folder: (folder / "a.npz").mkdir(), JUDGE),
    "a pipe": (lambda folder: os.mkfifo(folder / "a.npz"), JUDGE),
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# Shards, for training.

TRAIN = tool("train", Path(), "data=custom", "data.path=../in", "model.backbone=DiT-XS/2")


def shard_of(**info: object) -> Make:
    def make(folder: Path) -> None:
        make_shard(folder / "a.safetensors")
        file = folder / "a.safetensors"
        metadata = {"kind": "sample", "scale_factor": "0.5", "autoencoder": "identity", "resolution": "4", "num_classes": "3"}
        save_file(load_file(file), file, metadata={**metadata, **{name: str(value) for name, value in info.items()}})

    return make


def values_of(name: str, value: float) -> Make:
    def make(folder: Path) -> None:
        shard_of()(folder)
        tensors = load_file(folder / "a.safetensors")
        tensors[name].fill_(value)
        metadata = {"kind": "sample", "scale_factor": "0.5", "autoencoder": "identity", "resolution": "4", "num_classes": "3"}
        save_file(tensors, folder / "a.safetensors", metadata=metadata)

    return make


def header_of_shard(header: bytes | dict, length: int | None = None) -> Make:
    blob = header if isinstance(header, bytes) else json.dumps(header).encode()
    return lambda folder: (folder / "a.safetensors").write_bytes(
        struct.pack("<Q", len(blob) if length is None else length) + blob + bytes(1000)
    )


def with_manifest(text: str) -> Make:
    return lambda folder: (shard_of()(folder), (folder / "manifest.json").write_text(text))


def _listing(file: str, num_bytes: object = 1) -> str:
    return json.dumps({"shards": [{"file": file, "bytes": num_bytes, "hash": "0", "num_items": 1}], "fingerprint": "0"})


def tensor(shape: list, offsets: list, dtype: str = "F32") -> dict:
    return {"latents": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


SHARDS: dict[str, tuple] = {
    **{
        f"{key}={value}": (shard_of(**{key: value}), TRAIN)
        for key, value in [
            ("num_classes", 10**12), ("num_classes", 10**30), ("num_classes", "9" * 5000), ("num_classes", "nan"),
            ("num_classes", -3), ("num_classes", 1), ("scale_factor", "nan"), ("scale_factor", "inf"), ("scale_factor", "1e999"),
            ("scale_factor", -1), ("scale_factor", "zero"), ("resolution", 0), ("kind", "\nerror: x"), ("kind", "moment"),
        ]
    },
    **{
        f"{key}={str(value)[:20]}": (shard_of(**{key: value}), TRAIN, HARMLESS)
        for key, value in [("resolution", 10**18), ("autoencoder", "../../x"),
                           ("scale_factor", "1e-300")]
    },
    "negative labels": (values_of("labels", -1), TRAIN),
    "absurd labels": (values_of("labels", 2**62), TRAIN),
    "latents that are NaN": (values_of("latents", float("nan")), TRAIN),
    "latents that are infinite": (values_of("latents", float("inf")), TRAIN),
    "a header of 8 EiB": (header_of_shard(b"{}", 2**63 - 1), TRAIN),
    "a deep header": (header_of_shard(DEEP.encode()), TRAIN),
    "a header that is a list": (header_of_shard(b"[]"), TRAIN),
    "offsets out of the file": (header_of_shard(tensor([10**6, 4], [0, 16 * 10**6])), TRAIN),
    "offsets that overlap": (
        header_of_shard(tensor([2, 4], [0, 32]) | {"labels": tensor([4], [0, 32], "I64")["latents"]}), TRAIN),
    "a shape that overflows": (header_of_shard(tensor([2**62, 2**62], [0, 16])), TRAIN),
    "a negative shape": (header_of_shard(tensor([-1, 4], [0, 16])), TRAIN),
    "no tensors": (header_of_shard(b"{}"), TRAIN),
    "a pickle": (lambda folder: (folder / "a.safetensors").write_bytes(pickle.dumps(Payload())), TRAIN),
    "a pipe": (lambda folder: os.mkfifo(folder / "a.safetensors"), TRAIN),
    "a link to a device": (lambda folder: (folder / "a.safetensors").symlink_to("/dev/zero"), TRAIN),
    "a manifest that is deep": (with_manifest(DEEP), TRAIN),
    "a manifest that is a list": (with_manifest("[]"), TRAIN),
    "a manifest that is binary": (with_manifest("\x00\udc80".encode("utf-8", "surrogateescape").decode("latin1")), TRAIN),
    "a manifest that leaves the folder": (with_manifest(_listing("../../../../etc/passwd")), TRAIN),
    "a manifest with a name of two lines": (with_manifest(_listing("a\nerror: b")), TRAIN),
    "a manifest with a long name": (with_manifest(_listing("x" * 300)), TRAIN),
    "a manifest with a name that ends early": (with_manifest(_listing("a\0b")), TRAIN),
    "a manifest with words for sizes": (with_manifest(_listing("a.safetensors", "many")), TRAIN),
    "a manifest with names that are lists": (with_manifest(_listing(["a"])), TRAIN),
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# Images, for `encode`.

ENCODE = tool("encode", Path(), "images=../in")


def image_of(name: str, content: bytes) -> Make:
    def make(folder: Path) -> None:
        for kind in ("ant", "bee"):
            (folder / kind).mkdir()
            Image.fromarray(_IMAGES[0].repeat(4, 0).repeat(4, 1)).save(folder / kind / "good.png")
        (folder / "ant" / name).write_bytes(content)

    return make


def labelled(name: str, text: str) -> Make:
    return lambda folder: (image_of("b.png", png())(folder), (folder / name).write_text(text))


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int = 16, height: int = 16, *more: bytes) -> bytes:
    """A PNG whose pixels are zeros, as many as the compressed text of a few kilobytes gives."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    values = zlib.compress(bytes(min((3 * width + 1) * height, 1 << 24)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(more) + chunk(b"IDAT", values) + chunk(b"IEND", b"")


IMAGES: dict[str, tuple] = {
    "a PNG of 60,000 x 60,000 pixels": (image_of("b.png", png(60_000, 60_000)), ENCODE),
    "a PNG of 2 billion pixels in a line": (image_of("b.png", png(2**31 - 1, 1)), ENCODE),
    "a PNG of no pixels": (image_of("b.png", png(0, 0)), ENCODE),
    "a PNG with a bomb of text": (
        image_of("b.png", png(16, 16, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 28))))), ENCODE, HARMLESS),
    "a PNG with damaged EXIF": (image_of("b.png", png(16, 16, chunk(b"eXIf", b"II*\0" + b"\xff" * 40))), ENCODE, HARMLESS),
    "half a PNG": (image_of("b.png", png()[:48]), ENCODE),
    "a pickle": (image_of("b.png", pickle.dumps(Payload())), ENCODE),
    "PostScript": (image_of("b.png", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(pwned) (w) file\n"), ENCODE),
    "a name of two lines": (image_of("a\nerror: b.png", b"no image"), ENCODE),
    "labels out of the folder": (labelled("labels.csv", "file_name,label\n../../inputs/images/ant/0.png,1\n"), ENCODE, HARMLESS),
    "labels of an absurd number": (labelled("labels.csv", f"file_name,label\nant/b.png,{10**30}\n"), ENCODE),
    "labels of too many digits": (labelled("labels.csv", f"file_name,label\nant/b.png,{'9' * 5000}\n"), ENCODE),
    "labels that are NaN": (labelled("labels.json", '{"ant/b.png": NaN}'), ENCODE),
    "labels that are deep": (labelled("labels.json", DEEP), ENCODE),
    "labels that are lists": (labelled("labels.json", '{"ant/b.png": [[]]}'), ENCODE),
    "labels for a name that ends early": (labelled("labels.csv", "file_name,label\nant/\0b.png,1\n"), ENCODE),
    "labels for a long name": (labelled("labels.csv", f"file_name,label\n{'x' * 300}.png,1\n"), ENCODE),
    "a link to the folder itself": (
        lambda folder: (image_of("b.png", png())(folder), (folder / "ant" / "more").symlink_to(folder)), ENCODE),
    "a link to nothing": (
        lambda folder: (image_of("b.png", png())(folder), (folder / "ant" / "c.png").symlink_to("nothing")), ENCODE),
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints, and what else lies in a run's folder. `in` is a copy of a run.


def in_run(change: Make) -> Make:
    return lambda folder: (shutil.copytree(folder.parents[1] / "inputs" / "run", folder, dirs_exist_ok=True), change(folder))


def in_checkpoint(name: str, write: Make) -> Make:
    """Every checkpoint of the run holds this file, and a manifest that agrees."""

    def change(folder: Path) -> None:
        for checkpoint in (folder / "checkpoints").iterdir():
            write(checkpoint / name)
            write_manifest(checkpoint)

    return in_run(change)


def wrong(what: str) -> Make:
    return in_run(
        lambda folder: [WRONG_WEIGHTS[what](checkpoint, Random(0)) for checkpoint in (folder / "checkpoints").iterdir()]
    )


def _pickle_bomb(file: Path) -> None:
    torch.save({"state": torch.zeros(1)}, file)
    with (
        zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("optimizer/data/9", "w", force_zip64=True) as f,
    ):
        for _ in range(3 << 6):
            f.write(bytes(1 << 24))


RESUME = tool("train", Path(), "name=in", "output_dir=..", "checkpoint.keep_last=3", "train.lr=1e-2", "train.num_steps=8")
START = tool("train", Path(), "init_from=../in")
RESUME_ALL = [*START, "init_state=all"]
SAMPLE = tool("sample", Path(), "checkpoint=../in")
SCORE = tool("fid", Path(), "checkpoint=../in")
GUIDE = tool("sample", Path(), "checkpoint={inputs}/run", "guidance=autoguidance", "guidance.checkpoint=../in")

RUNS: dict[str, tuple] = {
    "a payload as AdamW's state": (in_checkpoint("optimizer.pt", lambda file: torch.save(Payload(), file)), RESUME_ALL),
    "a payload in AdamW's state": (
        in_checkpoint("optimizer.pt", lambda file: torch.save({"state": [Payload()]}, file)), RESUME_ALL),
    "a plain pickle as AdamW's state": (
        in_checkpoint("optimizer.pt", lambda file: file.write_bytes(pickle.dumps(Payload()))), RESUME_ALL),
    "a zip bomb as AdamW's state": (in_checkpoint("optimizer.pt", _pickle_bomb), RESUME_ALL),
    **{
        f"a payload as weights, {command[0]}": (
            in_checkpoint("ema.safetensors", lambda file: torch.save(Payload(), file)), command)
        for command in (START, SAMPLE, SCORE)
    },
    "a payload as weights, autoguidance": (in_checkpoint("ema.safetensors", lambda file: torch.save(Payload(), file)), GUIDE),
    **{
        f"{what}, {command[0]}": (wrong(what), command)
        for what in ("config.yaml with a tag", "config.yaml with aliases that multiply", "config.yaml that is deep",
                     "config.yaml with an interpolation", "config.yaml with absurd classes")
        for command in (START, SAMPLE, SCORE)
    },
    **{
        f"metrics.jsonl: {what}": (
            in_run(lambda folder, text=text: (folder / "metrics.jsonl").write_bytes(text)), RESUME, HARMLESS)
        for what, text in {
            "binary": bytes(range(256)), "deep": DEEP.encode(), "a step of NaN": b'{"step": NaN}\n', "no newline": b'{"step": 1}',
            "an absurd step": b'{"step": 1e999}\n{"step": ' + b"9" * 5000 + b"}\n", "lists": b"[1]\n[2]\n",
        }.items()
    },
    **{
        f"{name} is a {kind}": (
            in_run(lambda folder, name=name, make=make: ((folder / name).unlink(missing_ok=True), make(folder / name))), RESUME)
        for name in ("metrics.jsonl", ".lock")
        for kind, make in {"folder": Path.mkdir, "link to itself": lambda file: file.symlink_to(file)}.items()
    },
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# Settings.

_PLAIN = {name: tool(name, Path()) for name in ("train", "encode", "convert")}
_SETTINGS = {
    "train": [
        "train.batch_size=1000000000000", "train.batch_size=0", "train.num_steps=1e30", "train.num_steps=-1", "train.lr=nan",
        "train.lr=inf", "train.lr=-1", "train.betas=[0.9,nan]", "train.betas=[1,1]", "train.ema_decay=2",
        "train.grad_clip_norm=nan", "train.grad_accum_steps=1000000000000", "train.cpu_threads=1000000000",
        "train.log_every=0", "seed=-1", "seed=100000000000000000000000000", "data.num_workers=1000000000",
        "sample.num_samples=1000000000000", "sample.batch_size=-4", "data.num_classes=1000000000000",
        "data.input_size=80000000", "data.in_channels=1000000000000", "model.backbone=DiT-XS/0", "model.backbone=../../x",
        "model.class_dropout=nan", "model.width=1000000000", "diffusion.sigma_data=nan",
        "diffusion.sampler.num_steps=1000000000000", "diffusion.sampler.sigma_max=inf", "name=../../escaped", "'name=a\nb'",
        "name=" + "x" * 300, "name=${oc.env:HOME}", "name=${repository:x}", "output_dir=/proc/x", "data.path=/dev/zero",
        "data.path=a\0b", "resume=/etc/passwd", "init_from=/etc", "train.lr=!!python/object/apply:os.system", "train=[1,2]",
        "+a.b.c=1", "guidance.cfg_scale=nan", "eval.cfg_scales=[nan]", "checkpoint.every=0",
        "checkpoint.keep_last=0",
    ],
    "encode": [
        "shard_size=0", "resolution=1000000000000", "batch_size=1000000000000", "num_classes=1000000000000", "dtype=float4",
    ],
    "convert": [
        "shard_size=1000000000000000000000", "stored_scale=nan", "scale_factor=inf", "num_classes=1000000000000",
    ],
    "sample": [
        "seeds=0-1000000000000000", "seeds=-5", "seeds=1e99", "classes=0-99999999999", "num_steps=1000000000000",
        "num_steps=0", "cfg_scale=nan", "batch_size=0", "S_churn=inf", "checkpoint=/dev/zero", "output=/proc/x",
    ],
    "fid": [
        "num_samples=1000000000000", "num_samples=0", "batch_size=0", "cfg_scale=[nan]", "num_steps=[2,1000000000000]",
        "reference=/dev/zero", "images=/dev/zero",
    ],
}  # fmt: skip
# A command may begin to work on these, as long as it takes.
_MAY_RUN = ("shard_size=1", "batch_size=1", "train.num_steps=1e30", "data.num_workers=", "train.cpu_threads=")


def trials(inputs: Path, shared: Path) -> Iterator[tuple]:
    shutil.copy(Path(__file__).parents[2] / "evaluations" / "digits_reference.npz", inputs)
    groups = {"tar": TARS, "npz": NPZS, "shard": SHARDS, "images": IMAGES, "run": RUNS}
    for group, table in groups.items():
        for what, (make, arguments, *codes) in table.items():
            arguments = [argument.replace("{inputs}", str(inputs)) for argument in arguments]
            yield f"{group}: {what}", partial(meet, make, arguments, codes[0] if codes else (1,), ())
    for name, settings in _SETTINGS.items():
        for setting in settings:
            codes = HARMLESS if setting.startswith(_MAY_RUN) else (1,)
            key = setting.strip("'+").partition("=")[0]
            yield f"{name} {setting[:60]!r}", partial(meet, Path.exists, tool(name, inputs, setting), codes, (key.split(".")[0],))


def meet(make: Make, arguments: list[str], codes: tuple[int, ...], words: tuple[str, ...], folder: Path, rng: Random) -> None:
    (folder / "in").mkdir()
    make(folder / "in")
    beside = set(folder.parent.glob("escaped*"))
    outcome = run(folder / "out", arguments, limit_sec=LIMIT_SEC)
    expect(not list(folder.rglob("pwned")), "it executed what the file says")
    expect({path.name for path in folder.iterdir()} <= {"in", "out"}, "it wrote elsewhere")
    expect(set(folder.parent.glob("escaped*")) == beside, "it wrote elsewhere")
    expect(outcome.peak_mib < MAX_MIB, f"it took {outcome.peak_mib:.0f} MiB")
    outcome.expect_no_traceback()
    expect(outcome.code in codes, f"ended with {outcome.code} instead of {' or '.join(map(str, codes))}")
    if outcome.code != 0:
        outcome.expect_one_line(*words)
    expect(all(name.isprintable() for name in contents(folder / "out")), "names of files that cannot be printed")
