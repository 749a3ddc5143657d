"""Checkpoints are complete or absent, whatever interrupts a save or damages a file."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import Malicious, checked, evaluated, file_size_limit, renew_manifest
from omegaconf import OmegaConf

from checkpoints import store
from checkpoints.checkpoint import find_all, find_newest, read_checkpoint, read_config, resolve_checkpoint
from checkpoints.run import RunFolder
from common.errors import UserError
from common.files import append_line
from training.start import choose_checkpoint_to_resume, find_initial_checkpoint

CONFIG = checked([])


def make(step, **state):
    """Return the step, the tensors, the state and the configuration of a checkpoint, as `store.save` takes them."""
    weights = {"w": torch.full((50, 40), float(step)), "turned": torch.arange(6.0).view(2, 3).T}
    tensors = {
        "model": weights,
        "ema": {name: value * 2 for name, value in weights.items()},
        "optimizer": {"state": {0: {"exp_avg": torch.ones(3), "step": torch.tensor(4.0)}}, "param_groups": [{"lr": 0.1}]},
    }
    return step, tensors, {"loss_count": 8 * step, **state}, CONFIG.model_dump()


def save(root, *steps, keep_last=10, keep_every=0):
    for step in steps:
        folder = store.save(root, *make(step), keep_last, keep_every)
    return folder


def path_to_resume(run):
    return choose_checkpoint_to_resume(run, CONFIG)[0].path


def path_to_start(run, folder, init_state):
    return find_initial_checkpoint(run, checked([f"init_from={folder}", f"init_state={init_state}"])).path


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_loading_returns_what_was_saved(tmp_path):
    folder, (step, expected, state, config) = save(tmp_path, 400), make(400)
    assert folder.name == "step_0000400" and names(folder) == sorted([*store.FILES, "manifest.json"])
    checkpoint, loaded = read_checkpoint(folder), store.load(folder)
    assert (checkpoint.step, checkpoint.state, checkpoint.config) == (step, {"step": step} | state, CONFIG)
    assert OmegaConf.load(folder / "config.yaml") == {"format": 1} | config
    for side in ("model", "ema"):
        assert all(torch.equal(loaded[side][name], value) for name, value in expected[side].items())
    assert torch.equal(loaded["optimizer"]["state"][0]["exp_avg"], torch.ones(3)) and loaded.keys() == expected.keys()
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1  # all files have the same permissions


def test_the_newest_checkpoints_and_every_mth_step_are_kept(tmp_path):
    save(tmp_path, *range(10, 80, 10), keep_last=2, keep_every=30)
    assert names(tmp_path) == [f"step_00000{step}" for step in (30, 60, 70)]


def test_a_checkpoint_that_was_kept_stays_when_keep_every_changes_or_cannot_be_read(tmp_path, monkeypatch):
    def save_with(keep_every, *steps):
        for step in steps:
            *contents, config = make(step)
            config["checkpoint"]["keep_every"] = keep_every
            store.save(tmp_path, *contents, config, 1, keep_every)

    save_with(20, 10, 20, 30)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", lambda *args, **settings: raise_os_error())  # the file may be intact
        save_with(50, 40)
    assert [*store.list_steps(tmp_path)] == [20, 30, 40]
    save_with(50, 50, 60)
    (tmp_path / "step_0000020" / "config.yaml").write_text("damaged")
    assert [*store.list_steps(tmp_path)] == [20, 50, 60]
    save_with(0, 70)
    assert [*store.list_steps(tmp_path)] == [50, 70]


def test_a_lower_keep_last_frees_space_before_the_next_checkpoint_is_written(tmp_path, monkeypatch):
    save(tmp_path, 10, 20, 30, 40, keep_every=20)
    write, before = store._write_files, []
    monkeypatch.setattr(store, "_write_files", lambda *args: before.extend(store.list_steps(tmp_path)) or write(*args))
    save(tmp_path, 50, keep_last=1, keep_every=20)
    assert before == [20, 40] and [*store.list_steps(tmp_path)] == [20, 40, 50]


def test_a_checkpoint_that_cannot_be_deleted_stays_until_a_later_save(tmp_path, monkeypatch):
    save(tmp_path, 10)
    with monkeypatch.context() as windows:  # Windows cannot delete a file that another process reads
        windows.setattr(store.shutil, "rmtree", lambda *args, **settings: raise_os_error())
        save(tmp_path, 20, keep_last=1)
    assert list(store.list_steps(tmp_path)) == [20]
    save(tmp_path, 30, keep_last=1)
    assert names(tmp_path) == ["step_0000030"]


def raise_os_error():
    raise PermissionError(13, "Permission denied")


# ----------------------------------------------------------------------------------------------------------------------
# Damage.


def edit(name, change):
    def damage(folder):
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return damage


def put_another_step_in_its_place(folder):
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("step_0000010"), folder)


DAMAGES = {
    "truncated": (edit("model.safetensors", lambda content: content[:-7]), "model.safetensors is truncated or altered"),
    "a flipped bit": (
        edit("ema.safetensors", lambda content: content[:-1] + bytes([content[-1] ^ 1])), "ema.safetensors is truncated or a"
    ),
    "a missing file": (lambda folder: (folder / "optimizer.pt").unlink(), "optimizer.pt is missing"),
    "a missing manifest": (lambda folder: (folder / "manifest.json").unlink(), "it has no manifest.json"),
    "half a manifest": (edit("manifest.json", lambda content: content[:99]), "manifest.json cannot be read: JSONDecodeError"),
    "an empty manifest": (edit("manifest.json", lambda content: b"{}"), "model.safetensors is missing"),
    "another manifest": (edit("manifest.json", lambda content: b'{"shards": []}'), "manifest.json cannot be read: TypeError"),
    "another step": (put_another_step_in_its_place, "step_0000020 holds step 10: it was renamed"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_can_be_renamed_and_the_previous_one_is_used(tmp_path, damage):
    run = RunFolder(tmp_path, "run")
    save(run.checkpoints, 10, 20)
    bad = run.checkpoints / "step_0000020"
    change, message = DAMAGES[damage]
    change(bad)
    with pytest.raises(store.Damaged, match=message):
        store.verify(bad)
    newest, damaged = choose_checkpoint_to_resume(run, CONFIG)
    assert newest.path == run.checkpoints / "step_0000010" and [*damaged] == [bad]
    store.rename_damaged(bad)
    assert path_to_resume(run) == newest.path
    assert [name[:16] for name in names(run.checkpoints)] == ["bad_step_0000020", "step_0000010"]


def test_training_does_not_start_over_when_only_bad_checkpoints_remain(tmp_path):
    run = RunFolder(tmp_path, "run")
    DAMAGES["truncated"][0](save(run.checkpoints, 10))
    with pytest.raises(UserError, match="does not silently start over.*name="):
        choose_checkpoint_to_resume(run, CONFIG)
    assert names(run.checkpoints) == ["step_0000010"]


def test_a_start_fails_if_checkpoints_cannot_be_listed(tmp_path, monkeypatch):
    run = RunFolder(tmp_path, "run")
    save(run.checkpoints, 10)
    monkeypatch.setattr(Path, "iterdir", lambda path: raise_os_error())
    with pytest.raises(UserError, match=f"{run.checkpoints} cannot be read: .*Permission denied"):
        choose_checkpoint_to_resume(run, CONFIG)


def test_loading_runs_no_code_from_the_file(tmp_path):
    folder = save(tmp_path, 10)
    torch.save({"state": Malicious(os.mkdir, str(tmp_path / "pwned"))}, folder / "optimizer.pt")
    renew_manifest(folder)
    with pytest.raises(UserError, match="optimizer.pt cannot be read: it is damaged, or holds objects other"):
        store.load(folder)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda given: given.pop("b"), r"b is missing in the file and \[3\] torch.float32 in this network"),
        (lambda given: given.update(c=torch.ones(1)), r"c is \[1\] torch.float32 in the file and missing in"),
        (lambda given: given.update(a=torch.ones(3, 2)), r"a is \[3, 2\] torch.float32 in the file and \[2, 3\]"),
        (lambda given: given.update(a=torch.ones(2, 3).half()), r"a is \[2, 3\] torch.float16 in the file and"),
    ],
)
def test_weights_of_another_network_are_refused_and_the_first_wrong_tensor_is_named(change, message):
    like = {"a": torch.ones(2, 3), "b": torch.ones(3)}
    given = dict(like)
    store.check_tensors(Path("x"), given, like)
    change(given)
    with pytest.raises(UserError, match=f"^x: {message}"):
        store.check_tensors(Path("x"), given, like)


# ----------------------------------------------------------------------------------------------------------------------
# Choosing a checkpoint.


def test_init_from_accepts_only_the_folder_of_a_run_or_of_a_checkpoint(tmp_path):
    run = tmp_path / "run"
    save(run / "checkpoints", 10, 20)
    newest = run / "checkpoints" / "step_0000020"
    assert resolve_checkpoint(run, "init_from") == resolve_checkpoint(newest, "init_from") == read_checkpoint(newest)
    assert read_checkpoint(newest).run_folder == run
    for wrong in (run / "checkpoints", newest / "ema.safetensors", run / "metrics.jsonl", tmp_path / "rnu", tmp_path):
        with pytest.raises(UserError, match=f"^init_from: {wrong} is not the folder of a run or of a complete c"):
            resolve_checkpoint(wrong, "init_from")
    DAMAGES["truncated"][0](newest)
    assert resolve_checkpoint(run, "init_from").path.name == "step_0000010"
    with pytest.raises(UserError, match="step_0000020/model.safetensors is truncated"):
        resolve_checkpoint(newest, "init_from")
    DAMAGES["truncated"][0](run / "checkpoints" / "step_0000010")
    with pytest.raises(UserError, match=f"^init_from={run} is a run without an intact checkpoint: .*; .*truncated"):
        resolve_checkpoint(run, "init_from")


def test_other_tensor_files_in_the_folder_of_a_run_or_checkpoint_are_not_taken_for_latents(tmp_path):
    newest = save(tmp_path / "run" / "checkpoints", 10)
    for folder in (tmp_path, tmp_path / "run", newest):
        (folder / "best.safetensors").touch()
    assert resolve_checkpoint(tmp_path / "run", "checkpoint") == resolve_checkpoint(newest, "checkpoint")
    with pytest.raises(UserError, match=f"^checkpoint: {tmp_path} is not the folder of a run or of a complete checkpoint"):
        resolve_checkpoint(tmp_path, "checkpoint")


def test_a_shared_checkpoint_needs_only_the_files_that_a_command_reads(tmp_path, caplog):
    folder = save(tmp_path / "run" / "checkpoints", 10)
    ema, raw = store.files_for_sampling(["ema"]), store.files_for_sampling(["raw"])
    assert (ema, raw) == (["ema.safetensors"], ["model.safetensors"])
    content = store.hash_checkpoint(folder)
    for name in ("optimizer.pt", "model.safetensors"):
        (folder / name).unlink()
    found = resolve_checkpoint(tmp_path / "run", "checkpoint", ema)
    assert (found.path, found.hash) == (folder, content)
    with pytest.raises(UserError, match="model.safetensors is missing"):
        resolve_checkpoint(folder, "checkpoint", raw)
    with pytest.raises(UserError, match="no checkpoint .* is intact.*(optimizer.pt|model.safetensors) is missing"):
        choose_checkpoint_to_resume(RunFolder(tmp_path, "run"), CONFIG)
    run = RunFolder(tmp_path, "new")
    assert path_to_start(run, folder, "weights") == folder
    assert "the raw weights also start from the EMA" in caplog.text
    loaded = store.load_weights_and_ema(folder)
    assert loaded.keys() == {"model", "ema"}
    assert all(torch.equal(loaded["model"][name], value) for name, value in make(10)[1]["ema"].items())
    with pytest.raises(UserError, match="is missing"):
        path_to_start(run, folder, "all")
    edit("ema.safetensors", lambda content: content[:-1] + bytes([content[-1] ^ 1]))(folder)
    with pytest.raises(UserError, match="ema.safetensors is truncated or altered"):
        path_to_start(run, folder, "weights")


def test_init_from_checks_raw_weights_that_are_there(tmp_path):
    folder = save(tmp_path, 10)
    DAMAGES["truncated"][0](folder)
    with pytest.raises(UserError, match="model.safetensors is truncated or altered"):
        path_to_start(RunFolder(tmp_path, "new"), folder, "weights")


def test_a_newer_checkpoint_that_was_renamed_is_named(tmp_path, caplog):
    run = RunFolder(tmp_path, "run")
    save(run.checkpoints, 10, 20, 30)
    (run.checkpoints / "step_0000030").rename(run.checkpoints / "step_30_best")
    (run.checkpoints / "step_0000010").rename(run.checkpoints / "first")  # older, so it does not matter
    assert resolve_checkpoint(run.path, "checkpoint").path.name == path_to_resume(run).name == "step_0000020"
    lines = [record.message for record in caplog.records]
    words = f"{run.checkpoints / 'step_30_best'} holds the later step 30 and is not used, because its name is not step_0000030"
    assert lines == [words, words]


def test_loading_opens_no_file_that_the_manifest_does_not_list(tmp_path):
    folder = save(tmp_path, 10)
    os.mkfifo(folder / "tracked_ema.safetensors")
    assert "tracked_ema" not in store.load(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"../../other": {"size": 1, "blake2b": "0"}}))
    with pytest.raises(UserError, match="manifest.json cannot be read: '../../other' is not the name of a file in the c"):
        store.verify(folder)


def test_a_configuration_with_unknown_and_missing_keys_names_them_all_in_one_line(tmp_path):
    step, tensors, state, _ = make(10)
    store.save(tmp_path, step, tensors, state, {"seed": 3, "train": {"lr": 1e-5, "betas": [0.9, 0.99]}}, 1, 0)
    with pytest.raises(UserError, match=r"config.yaml cannot be read: missing keys: name, .*, train.num_steps, .*wandb") as error:
        read_config(tmp_path / "step_0000010")
    assert "\n" not in str(error.value)


def test_resume_takes_the_newest_checkpoint_and_refuses_imported_weights(tmp_path):
    run = RunFolder(tmp_path, "mine")
    assert choose_checkpoint_to_resume(run, CONFIG) == choose_checkpoint_to_resume(run, checked(["resume=never"])) == (None, {})
    save(run.checkpoints, 10, 20)
    assert path_to_resume(run) == run.checkpoints / "step_0000020"
    with pytest.raises(UserError, match="resume=never, but .*mine/checkpoints holds checkpoints"):
        choose_checkpoint_to_resume(run, checked(["resume=never"]))
    store.save(run.checkpoints, *make(30, imported_from="DiT-XL-2-256x256.pt"), 1, 0)
    with pytest.raises(UserError, match=f"imported from DiT-XL-2-256x256.pt: it has no optimizer .*init_from={run.path}"):
        choose_checkpoint_to_resume(run, CONFIG)


# ----------------------------------------------------------------------------------------------------------------------
# Interrupted saves. tests/test_drills.py kills commands while they save.


def test_nothing_is_renamed_before_it_is_on_the_disk(tmp_path, monkeypatch):
    done, rename = [], Path.rename
    monkeypatch.setattr(os, "fsync", lambda file: done.append(Path(f"/proc/self/fd/{file}").resolve().name))
    monkeypatch.setattr(Path, "rename", lambda path, target: done.append("rename") or rename(path, target))
    save(tmp_path, 10)
    *before, renamed, last = done
    assert {*store.FILES, "manifest.json", ".tmp_step_0000010"} == set(before)
    assert (renamed, last) == ("rename", tmp_path.name)


@pytest.mark.parametrize(("num_values", "max_bytes"), [(50_000, 9000), (3, 100), (3, 4000)])
def test_a_full_disk_leaves_the_previous_checkpoint_and_no_debris(tmp_path, num_values, max_bytes):
    """The three limits stop three different writers: torch.save (a RuntimeError), Python's file and safetensors."""
    save(tmp_path, 10)
    contents = make(20)
    contents[1]["optimizer"]["state"][0]["exp_avg"] = torch.ones(num_values)
    with file_size_limit(max_bytes), pytest.raises(UserError) as error:
        store.save(tmp_path, *contents, 10, 0)
    free = f"File too large.*; [0-9.]+ MB are needed, and [0-9]+ MB are free on the disk of {tmp_path}"
    assert error.match(f"^cannot write the checkpoint .*step_0000020: .*{free}; intact before it: step_0000010$")
    assert names(tmp_path) == ["step_0000010"]
    store.verify(tmp_path / "step_0000010")


def test_a_resume_removes_metrics_grids_and_snapshots_after_its_step(tmp_path):
    run = RunFolder(tmp_path, "run")
    run.open()
    speed = {"steps_per_sec": 1.0}
    lines = [{"step": 1, "loss": 0.5} | speed, {"step": 2, "loss": 0.25} | speed, {"step": 3}]
    for line in lines:
        append_line(run.metrics, line)
    with open(run.metrics, "a") as file:
        file.write('{"step": 2, "lo')
    evaluations = [{"settings": {"cfg_scale": 1.0}, "metrics": {"fid": 1.0}} | {"step": step} for step in (2, 3)]
    evaluations.append(evaluations[1] | {"checkpoint": "hash"})  # fid.py's
    run.results.folder.mkdir()
    for line in evaluations:
        append_line(run.results.file, line)
    for name in ("step_0000002.png", "step_0000003.png", "step_best.png"):  # the last file belongs to the user
        (run.samples / name).touch()
    run.snapshots.mkdir()
    kept, stale, other = (f"step_000000{step}_{digit * 32}.safetensors" for step, digit in ((2, "0"), (3, "0"), (3, "1")))
    for name in (kept, stale, other, theirs := "step_0000003 (copy).safetensors"):
        (run.snapshots / name).touch()
    run.delete_results_after(2)
    assert [json.loads(line) for line in run.metrics.read_text().splitlines()] == lines[:2]
    assert evaluated(run.path) == [evaluations[0], evaluations[2]]
    assert names(run.samples) == ["step_0000002.png", "step_best.png"]
    assert names(run.snapshots) == sorted([kept, theirs])


def test_lines_of_metrics_without_a_step_are_kept(tmp_path):
    run = RunFolder(str(tmp_path), "run")
    run.path.mkdir()
    theirs = [{"step": "three"}, {"step": None}, {"step": {"a": 1}}, {"text": [1]}]
    for line in ({"step": 2}, *theirs, {"step": 4}):
        append_line(run.metrics, line)
    run.delete_results_after(3)
    assert [json.loads(line) for line in run.metrics.read_text().splitlines()] == [{"step": 2}, *theirs]


def test_checkpoints_that_training_removes_during_the_search_are_passed_over(tmp_path, monkeypatch, caplog):
    root, hash_file = tmp_path / "checkpoints", store.hash_file
    save(root, 1, 2, 3)
    newest = root / store.folder_name(3)

    def train_on(file):
        if file.parent.name == newest.name:
            shutil.rmtree(newest, ignore_errors=True)
            save(root, 4)
        return hash_file(file)

    monkeypatch.setattr(store, "hash_file", train_on)
    assert resolve_checkpoint(tmp_path, "checkpoint").path.name == store.folder_name(4)
    assert f"{newest} was removed while it was read" in caplog.text and "looking for the next newest" in caplog.text
    for read in (store.hash_checkpoint, lambda folder: store.load_weights(folder, "ema")):
        with pytest.raises(UserError, match="step_0000003 was removed while it was read; run the same command again"):
            read(newest)
    caplog.clear()
    save(root, 3)
    assert [found.path.name for found in find_all(root)] == [store.folder_name(step) for step in (1, 2, 4)]
    assert f"{newest} was removed while it was read" in caplog.text and "it is left out" in caplog.text
    save(root, 3)
    with pytest.raises(UserError, match="step_0000003 was removed while it was read; run the same command again"):
        resolve_checkpoint(newest, "checkpoint")


def test_a_checkpoint_that_training_removes_after_its_verification_is_passed_over(tmp_path, monkeypatch, caplog):
    save(tmp_path, 1, 2)
    verify, newest = store.verify, tmp_path / store.folder_name(2)

    def train_on(folder, files=None):
        verify(folder, files)
        shutil.rmtree(newest, ignore_errors=True)

    monkeypatch.setattr(store, "verify", train_on)
    assert find_newest(tmp_path)[0].step == 1 and "looking for the next newest" in caplog.text
    save(tmp_path, 2)
    monkeypatch.setattr(store, "verify", lambda folder, files=None: folder == newest and train_on(folder, files))
    assert [found.step for found in find_all(tmp_path)] == [1] and f"{newest} was removed while it was read; it is" in caplog.text
    monkeypatch.undo()
    (tmp_path / store.folder_name(1) / "config.yaml").write_text("format: 2\n")
    renew_manifest(tmp_path / store.folder_name(1))
    for find in (find_newest, find_all):  # an intact checkpoint of another version is not a damaged one
        with pytest.raises(UserError, match="has format 2, but this version reads format 1"):
            find(tmp_path)


def test_a_damaged_checkpoint_of_another_version_is_a_damaged_one(tmp_path):
    first, newest = save(tmp_path, 1), save(tmp_path, 2)
    (newest / "config.yaml").write_text("format: 2\n")
    renew_manifest(newest)
    (newest / "ema.safetensors").write_bytes(b"")
    found, damaged = find_newest(tmp_path)
    assert found.path == first and [*damaged] == [newest]
    assert [found.path for found in find_all(tmp_path)] == [first]


def test_a_sweep_over_checkpoints_leaves_out_damaged_ones(tmp_path, caplog):
    save(tmp_path, 1, 2, 3)
    for step in (1, 2):
        (tmp_path / store.folder_name(step) / "ema.safetensors").write_bytes(b"")
    assert [found.path.name for found in find_all(tmp_path)] == [store.folder_name(3)]
    assert caplog.text.count("it is left out") == 2 and "step_0000001" in caplog.text
    (tmp_path / store.folder_name(3) / "ema.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="step_0000001.*ema.safetensors"):
        find_all(tmp_path)


def test_a_disk_read_error_does_not_mark_a_checkpoint_as_damaged(tmp_path, monkeypatch):
    save(tmp_path, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(store, "hash_file", lambda path: raise_os_error())
        with pytest.raises(UserError, match="step_0000002/.* cannot be read: PermissionError: "):
            find_newest(tmp_path)
    assert find_newest(tmp_path)[0].path.name == "step_0000002"


def test_the_error_names_a_file_whose_content_has_the_wrong_type(tmp_path):
    for name, write, words in (
        ("state.json", lambda file: file.write_text("[1]"), "it holds no whole number as step"),
        ("config.yaml", lambda file: file.write_text("[1]"), "it holds no configuration"),
        ("optimizer.pt", lambda file: torch.save([1], file), "it holds no state of an optimizer"),
    ):
        folder = save(tmp_path / name, 1)
        write(folder / name)
        with pytest.raises(UserError, match=f"{name} cannot be read: {words}"):
            store.load(read_checkpoint(folder).path)
