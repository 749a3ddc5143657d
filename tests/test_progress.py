"""What a user sees while something runs, in a terminal and in a log file."""

import io
import logging
import re
import sys
import time

import pytest
from conftest import TINY, finish, start

from common import progress
from common.progress import LogHandler, progress_bar, say_if_slow

log = logging.getLogger("test")


class Terminal(io.StringIO):
    """A stderr that is a terminal; `lines` are what stands on it at the end."""

    def isatty(self):
        return True

    @property
    def lines(self):
        rows, row, column = [""], 0, 0
        for part in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|\r|\n|[^\r\n\x1b]+", self.getvalue()):
            if part == "\r":
                column = 0
            elif part == "\n":
                row, column = row + 1, 0
                rows += [""] * (row + 1 - len(rows))
            elif part == "\x1b[A":
                row -= 1
            elif not part.startswith("\x1b"):
                rows[row] = rows[row][:column].ljust(column) + part + rows[row][column + len(part) :]
                column += len(part)
        return [text.rstrip() for text in rows]


@pytest.fixture
def logged(monkeypatch):
    """logged(stream): stderr is `stream`, and messages go there as our commands have it."""
    handlers = []

    def to(stream):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        handlers.append(LogHandler(stream))
        log.addHandler(handlers[0])
        log.setLevel(logging.INFO)
        return stream

    yield to
    for handler in handlers:
        log.removeHandler(handler)


def test_a_message_during_a_bar_stands_on_a_line_of_its_own_in_a_terminal(logged):
    terminal = logged(Terminal())
    with progress_bar(total=4, unit="step", mininterval=0) as bar:
        for step in range(4):
            bar.update()
            log.info("step %d is done", step)
    assert terminal.lines[:4] == [f"step {step} is done" for step in range(4)]
    assert len(terminal.lines) == 6 and terminal.lines[4].startswith("100%|") and terminal.lines[5] == ""


def test_a_bar_within_a_bar_leaves_no_remains_in_a_terminal(logged):
    terminal = logged(Terminal())
    with progress_bar(total=2, unit="step", mininterval=0) as bar:
        for step in range(2):
            for _ in progress_bar(range(3), desc="evaluation", leave=False, mininterval=0):
                pass
            log.info("step %d: fid 3", step)
            bar.update()
    assert "evaluation" in terminal.getvalue()
    lines = [line for line in terminal.lines if line]
    assert lines[:2] == ["step 0: fid 3", "step 1: fid 3"] and len(lines) == 3 and lines[2].startswith("100%|")


def test_a_log_file_gets_whole_lines_of_a_bar_now_and_then(logged, monkeypatch):
    monkeypatch.setattr(progress, "LOG_EVERY_SEC", 0.0)
    file = logged(io.StringIO())
    with progress_bar(total=3, unit="step") as bar:
        for step in range(3):
            bar.update()
            log.info("step %d is done", step)
            for _ in progress_bar(range(3), desc="evaluation", leave=False):
                pass
    text = file.getvalue()
    assert "\r" not in text and "\x1b" not in text and "\n\n" not in text
    assert "step 1 is done\n" in text and re.search(r"^ ?33%\|.* 1/3 ", text, re.MULTILINE)


def test_a_short_bar_that_goes_away_says_nothing_in_a_log_file(logged):
    file = logged(io.StringIO())
    for _ in progress_bar(range(3), desc="evaluation", leave=False):
        pass
    assert file.getvalue() == ""


def test_a_dumb_terminal_is_treated_like_a_log_file(logged, monkeypatch):
    terminal = logged(Terminal())
    monkeypatch.setenv("TERM", "dumb")
    for _ in progress_bar(range(3)):
        pass
    assert "\r" not in terminal.getvalue()


def test_a_bar_does_without_a_stderr_and_with_one_that_nobody_reads(monkeypatch):
    class Broken(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    for stream in (None, Broken()):
        monkeypatch.setattr(sys, "stderr", stream)
        assert list(progress_bar(range(3))) == [0, 1, 2]


def test_only_a_long_wait_is_announced(caplog, monkeypatch):
    with caplog.at_level(logging.INFO):
        with say_if_slow(log, "a short wait"):
            pass
        monkeypatch.setattr(progress, "SLOW_SEC", 0.05)
        with say_if_slow(log, "loading %s", "Inception"):
            time.sleep(0.5)
            assert caplog.messages == ["loading Inception"]
    assert caplog.messages == ["loading Inception"]


# ----------------------------------------------------------------------------------------------------------------------
# A run.


def test_the_log_of_a_run_holds_whole_lines(tmp_path):
    overrides = [*TINY, "eval.every=3", "eval.num_samples=8", "eval.num_steps=2", "name=x", f"output_dir={tmp_path}"]
    code, output = finish(start("train.py", "model=tread", *overrides))
    assert code == 0 and "\r" not in output and "\x1b" not in output
    assert re.search(r"^100%\|.* 6/6 .*loss=", output, re.MULTILINE)
