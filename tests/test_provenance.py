"""Every start of a run leaves a line: the command, the commit, the machine."""

import json

from common.files import REPOSITORY
from training import provenance


def starts(run):
    return [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]


def test_a_resumed_run_lists_its_starts_and_a_complete_one_adds_none(train):
    run = train("run", "train.num_steps=2")
    train("run", "train.num_steps=4")
    train("run", "train.num_steps=4")
    assert [start["step"] for start in starts(run)] == [0, 2]
    first = starts(run)[0]
    assert first["num_processes"] == 1 and first["device"] and first["torch"] and first["time"].endswith("+00:00")
    assert first["command"].startswith(("python ", "accelerate "))


def test_without_a_repository_of_its_own_no_commit_is_claimed(monkeypatch, tmp_path):
    monkeypatch.setattr(provenance, "REPOSITORY", tmp_path)
    assert provenance.git_commit() == (None, None)
    (tmp_path / ".git").mkdir()  # no repository either
    assert provenance.git_commit() == (None, None)
    assert (REPOSITORY / "training" / "provenance.py").exists()
