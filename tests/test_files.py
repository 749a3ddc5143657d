"""Files are written whole or not at all; a lock says who holds it; what is cut off while it is read is named."""

import errno
import json
import os
import re
import resource
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import composed, finish, make_shard, run_train, start
from PIL import Image
from test_webdataset import npy_members, write_tar

import fid as fid_script
import sample as sample_script
from common import files
from common.errors import UserError
from configs import schema
from evaluations.npz import write_npz
from latents.prepare.write import ShardWriter
from latents.shards import LatentDataset, ShardInfo, write_shard
from latents.webdataset import TarIndex
from training.run import RunFolder

IMAGE = np.zeros((64, 64, 3), np.uint8)
INFO = ShardInfo("sample", 0.5, "identity", 4, 3)


# ----------------------------------------------------------------------------------------------------------------------
# Writing.


def run_folder(folder):
    run = RunFolder(str(folder.parent), folder.name)
    run.open()
    return run


def write_sample_grid(folder):
    Image.fromarray(IMAGE).save(folder / "seed.png")
    sample_script.write_grid_and_npz(folder, SimpleNamespace(seeds=3, npz=False), {3: folder / "seed.png"}, {3: 1})


def write_training_grid(folder):
    run_train(folder.parent, folder.name, "train.num_steps=1", "sample.every=1", "sample.num_samples=1")


# {what: (what writes it below a folder, the file that the message names)}.
WRITERS = {
    "text": (lambda folder: files.write_file(folder / "a", "text"), "a"),
    "metrics": (lambda folder: run_folder(folder).log_metrics({"step": 1}), "metrics.jsonl"),
    "starts": (lambda folder: run_folder(folder).log_start({"step": 1}), "starts.jsonl"),
    "config.yaml": (lambda folder: run_folder(folder).write_config({"a": 1}), "config.yaml"),
    "grid of training": (write_training_grid, "samples/step_0000001.png"),
    "image": (
        lambda folder: sample_script.make_images(lambda *_: IMAGE[None], {3: 1}, {3: folder / "a.png"}, 1, False),
        "a.png",
    ),
    "grid of sample.py": (write_sample_grid, "grid_3.png"),
    "npz": (lambda folder: write_npz(folder / "a.npz", [IMAGE], (1, 64, 64, 3)), "a.npz"),
    "point of fid.py": (
        lambda folder: fid_script.Results(folder, {}, "i").add({"images": "a"}, {"fid": 1.0}, {}),
        "results.jsonl",
    ),
    "shard": (
        lambda folder: write_shard(folder / "a.safetensors", torch.zeros(1, 1, 4, 4), torch.zeros(1, dtype=torch.int64), INFO),
        "a.safetensors",
    ),
    "settings of a folder of shards": (
        lambda folder: ShardWriter(folder / "new", {}, lambda *_: "", 1, 1).open(),
        "new/.unfinished/settings.json",
    ),
}


@pytest.mark.parametrize("what", WRITERS)
def test_a_full_disk_is_named_with_the_file_and_the_free_space_and_leaves_nothing_behind(what, tmp_path, monkeypatch):
    write, name = WRITERS[what]
    folder = tmp_path / "folder"
    folder.mkdir()
    full = []

    def open_on_a_full_disk(path, mode):
        if mode == "rb" or Path(path).name in ("lock", ".lock") or not str(path).endswith(name.rpartition("/")[2]):
            return open(path, mode)
        open(path, mode).close()
        full.append(path)
        return open("/dev/full", mode)

    monkeypatch.setattr(files, "open", open_on_a_full_disk, raising=False)
    expected = (
        f"^cannot write {re.escape(str(folder / name))}: No space left on device; [0-9]+ MB are free on the disk of {tmp_path}"
    )
    with pytest.raises(UserError, match=expected):
        write(folder)
    assert full and not list(tmp_path.rglob(".tmp_*"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_an_earlier_file_is_untouched_where_a_new_one_cannot_be_written(number, tmp_path):
    files.write_file(tmp_path / "a", "earlier")
    words = f"^cannot write {tmp_path / 'a'}: {os.strerror(number)}; .* MB are free"
    with pytest.raises(UserError, match=words), files.whole_file(tmp_path / "a") as f:
        f.write(b"half")
        raise OSError(number, os.strerror(number))
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a", "earlier")]


def test_a_folder_without_permission_is_named_without_the_free_space(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"^cannot write {tmp_path}/file/a: File exists$"):
        files.write_file(tmp_path / "file" / "a", "text")


def test_what_a_library_says_of_a_full_disk_gets_the_free_space():
    why = files.why_not_written(Path("/nowhere/at/all"), RuntimeError("enforce fail\nat inline_container.cc"))
    assert re.fullmatch(r"enforce fail; [0-9]+ MB are free on the disk of /", why)


def test_a_torn_line_is_not_joined_to_the_next_one(tmp_path):
    run = run_folder(tmp_path / "run")
    run.starts.write_text(json.dumps({"step": 0}) + '\n{"step": 1, "ti')
    run.log_start({"step": 2})
    assert [line for _, line in files.read_lines(run.starts)] == [{"step": 0}, None, {"step": 2}]


def test_a_run_removes_what_an_interrupted_save_left_also_when_it_is_complete(train):
    run = train("run", "train.num_steps=1")
    left = [run / "checkpoints" / ".tmp_step_0000002", run / "checkpoints" / ".del_step_0000001", run / "samples" / ".tmp_a.png"]
    for path in left:
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"half")
    train("run", "train.num_steps=1")
    assert not any(path.exists() for path in left)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_0000001"]


# ----------------------------------------------------------------------------------------------------------------------
# Locks.


def hold(folder):
    """Another process that holds the lock of a folder."""
    folder.mkdir(exist_ok=True)
    code = f"from pathlib import Path; from files import lock_file; lock = lock_file(Path({str(folder / '.lock')!r}), '', '')"
    process = start("-c", code + "\nprint('held', flush=True)\nimport time; time.sleep(60)")
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize(
    ("lock", "doing"),
    [(lambda f: sample_script.open_output(f, {}), "sampling"), (lambda f: files.lock_output(f, "evaluating into"), "evaluating")],
)
def test_a_second_sample_or_fid_on_a_folder_says_who_is_there(lock, doing, tmp_path):
    process = hold(tmp_path)
    words = rf"^another process is {doing} into {tmp_path} .process {process.pid} on .*, since 20.*: -c.; wait for it, or choose"
    with pytest.raises(UserError, match=words):
        lock(tmp_path)
    process.kill()
    finish(process)
    lock(tmp_path).close()
    assert str(os.getpid()) in (tmp_path / ".lock").read_text() and str(process.pid) not in (tmp_path / ".lock").read_text()


def test_of_two_commands_at_once_one_works_and_the_other_names_it(train, tmp_path):
    run = train("run", "train.num_steps=1", "train.lr=1e-2")
    for command in (
        ["sample.py", f"checkpoint={run}", f"output={tmp_path / 'images'}", "seeds=0-3", "num_steps=200", "batch_size=1"],
        [
            "fid.py",
            f"checkpoint={run}",
            f"output={tmp_path / 'fid'}",
            "num_samples=64",
            "evaluation.detector=digits",
            "num_steps=20",
        ],
    ):
        both = [finish(process) for process in [start(*command, "cpu_threads=1") for _ in range(2)]]
        codes = sorted(code for code, _ in both)
        refused = [output for code, output in both if code == 1]
        # On a busy machine one may end before the other begins: then both find everything done.
        assert codes in ([0, 1], [0, 0]), both
        assert all(
            re.search(r"error: another process is (sampling|evaluating) into .* \(process \d+ on ", out) for out in refused
        ), both
    assert len(list((tmp_path / "images").glob("seed_*.png"))) == 4
    assert len(list(files.read_lines(tmp_path / "fid" / "results.jsonl"))) == 1


# ----------------------------------------------------------------------------------------------------------------------
# Reading what changes meanwhile.


@pytest.mark.parametrize("kept", [0, 0.5, 0.999])
def test_a_shard_that_is_cut_off_while_it_is_used_is_named(kept, tmp_path):
    for k in range(2):
        make_shard(tmp_path / f"{k}.safetensors", num_items=24, channels=4, size=16, seed=k)
    dataset, file = LatentDataset(tmp_path), tmp_path / "1.safetensors"
    os.truncate(file, int(kept * file.stat().st_size))
    dataset.fetch(np.arange(24), np.zeros(24, dtype=bool))
    with pytest.raises(UserError, match=f"^{file} is truncated: it ends at byte {file.stat().st_size}, and .*restore it and run"):
        dataset.fetch(np.arange(48), np.zeros(48, dtype=bool))


def test_a_tar_that_is_cut_off_while_it_is_used_is_named(tmp_path):
    write_tar(
        tmp_path / "a.tar", npy_members(np.random.default_rng(0).standard_normal((9, 4, 8, 8)).astype(np.float32), range(9))
    )
    index = TarIndex.open(tmp_path)
    os.truncate(tmp_path / "a.tar", 3000)
    with pytest.raises(UserError, match="a.tar is truncated: it ends at byte 3000"):
        index.read(np.arange(9))


def test_training_on_a_shard_that_is_cut_off_ends_with_its_name(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    make_shard(data / "a.safetensors", num_items=4000, channels=4, size=16)
    settings = ["train.num_steps=100000", "train.batch_size=8", "sample.every=0", "eval.every=0", "train.cpu_threads=1"]
    process = start(
        "train.py", "data=custom", f"data.path={data}", f"output_dir={tmp_path}", "name=run", "train.log_every=1", *settings
    )
    while not (metrics := tmp_path / "run" / "metrics.jsonl").exists() or not metrics.stat().st_size:
        assert process.poll() is None, finish(process)
    os.truncate(data / "a.safetensors", 9000)
    code, output = finish(process)
    assert code == 1 and f"error: {data / 'a.safetensors'} is truncated: it ends at byte 9000" in output
    assert "Traceback" not in output


# ----------------------------------------------------------------------------------------------------------------------
# Absurd numbers.


ABSURD_KEYS = """
data.num_classes data.resolution data.input_size data.in_channels data.num_workers train.batch_size train.cpu_threads
sample.num_samples sample.batch_size eval.num_samples eval.final_num_samples eval.num_steps eval.batch_size
diffusion.sampler.num_steps seed
"""


@pytest.mark.parametrize(
    "key",
    ABSURD_KEYS.split(),
)
@pytest.mark.parametrize("value", ["1000000000000", "1e12"])
def test_an_absurd_number_is_refused_with_what_is_accepted(key, value):
    with pytest.raises(
        UserError, match=rf"^{key}=1000000000000(.0)? is not accepted; use a whole number from [01] to [0-9]+(, or null)?$"
    ):
        schema.check(composed([f"{key}={value}"]), schema.TrainConfig)


@pytest.mark.parametrize("key", ["seeds", "classes"])
@pytest.mark.parametrize("value", ["0-999999999999", "99999999999999999999", "[1,0-999999999999]"])
def test_absurd_ranges_of_seeds_are_refused_before_they_are_listed(key, value):
    with pytest.raises(UserError, match=f"^{key}=.* is not accepted; .*at most 10000000 in all"):
        schema.check(composed(["checkpoint=x", f"{key}={value}"], "sample"), schema.SampleConfig)


@pytest.mark.parametrize(("key", "largest"), [("num_classes", 10**6), ("resolution", 65536)])
def test_an_absurd_number_in_a_header_is_refused_by_name(key, largest, tmp_path):
    make_shard(tmp_path / "a.safetensors")
    blob = (tmp_path / "a.safetensors").read_bytes()
    size = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + size])
    header["__metadata__"][key] = "1000000000000"
    text = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + blob[8 + size :])
    with pytest.raises(
        UserError, match=f"a.safetensors is not a latent shard: {key}=1000000000000 must be a whole number from 1 to {largest}"
    ):
        LatentDataset(tmp_path)


def test_an_npz_of_an_absurd_shape_is_refused_by_name(tmp_path):
    import zipfile

    from evaluations.npz import NpzImages

    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive, archive.open("mu.npy", "w") as f:
        np.lib.format.write_array_header_1_0(f, {"descr": "<f8", "fortran_order": False, "shape": (10**15,)})
    with pytest.raises(UserError, match="a.npz is damaged or not an .npz file"):
        NpzImages(tmp_path / "a.npz")


def test_a_line_that_does_not_fit_leaves_the_file_as_it_was(tmp_path):
    file = tmp_path / "metrics.jsonl"
    files.append_line(file, {"step": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
        with pytest.raises(UserError, match="metrics.jsonl: File too large"):
            files.append_line(file, {"step": 2, "loss": 1.25})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert file.read_text() == '{"step": 1}\n'


def test_an_error_about_a_name_with_line_breaks_is_one_line():
    assert str(UserError("a\nerror: b\x1b[2J does not exist", "- more")) == "a\\nerror: b\\x1b[2J does not exist\n- more"
