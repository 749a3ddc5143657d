"""Every start of a run leaves a line: the command, the commit, the machine."""

import json
from pathlib import Path

import pytest

from training import provenance


def test_a_resumed_run_lists_its_starts_and_a_complete_one_adds_none(train):
    for num_steps in (2, 4, 4):
        run = train("run", f"train.num_steps={num_steps}")
    first, second = map(json.loads, (run / "starts.jsonl").read_text().splitlines())
    assert (first["step"], second["step"]) == (0, 2)
    assert first["num_processes"] == 1 and first["device"] and first["torch"] and first["time"].endswith("+00:00")


def test_without_a_repository_of_its_own_no_commit_is_claimed(monkeypatch, tmp_path):
    monkeypatch.setattr(provenance, "REPOSITORY", tmp_path)
    assert provenance.git_commit() == (None, None)
    (tmp_path / ".git").mkdir()  # no repository either
    assert provenance.git_commit() == (None, None)


@pytest.mark.parametrize(
    ("parent", "command"),
    [
        ("python /x/bin/accelerate launch --num_processes 2 train.py a=1", "accelerate launch --num_processes 2 train.py a=1"),
        ("python -m accelerate.commands.launch train.py", "accelerate launch train.py"),
        ("bash", "python train.py model=tread 'name=a b'"),
    ],
)
def test_the_command_is_the_launchers_where_there_is_one(monkeypatch, parent, command):
    monkeypatch.setattr(Path, "read_bytes", lambda path: parent.replace(" ", "\0").encode() + b"\0")
    monkeypatch.setattr("sys.argv", ["train.py", "model=tread", "name=a b"])
    assert provenance.launch_command() == command
