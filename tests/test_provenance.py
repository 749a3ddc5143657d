"""Every start of a run leaves a line: the command, the commit, the machine."""

import json

from checkpoints import provenance


def test_a_resumed_run_lists_its_starts_and_a_complete_one_adds_none(train):
    for num_steps in (2, 4, 4):
        run = train("run", f"train.num_steps={num_steps}")
    first, second = map(json.loads, (run / "starts.jsonl").read_text().splitlines())
    assert (first["step"], second["step"]) == (0, 2)
    assert (
        first["command"].startswith("python ")
        and first["num_processes"] == 1
        and first["device"]
        and first["torch"]
        and first["time"].endswith("+00:00")
    )


def test_without_a_repository_of_its_own_no_commit_is_claimed(monkeypatch, tmp_path):
    monkeypatch.setattr(provenance, "REPOSITORY", tmp_path)
    assert provenance.git_commit() == (None, None)
    (tmp_path / ".git").mkdir()  # no repository either
    assert provenance.git_commit() == (None, None)
