"""Progress bars and messages, in a terminal and in a log file."""

import io
import logging
import re
import subprocess
import sys
import time

import pytest
from conftest import REPOSITORY

from common import progress
from common.progress import LogHandler, log_if_slow, progress_bar

log = logging.getLogger("test")


class Terminal(io.StringIO):
    """A stderr that is a terminal. `lines` is the text on the screen at the end."""

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
    """Fixture: logged(stream) replaces stderr by `stream`, and logs to it as commands do."""
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


def test_bars_and_messages_do_not_mix_in_a_terminal(logged):
    terminal = logged(Terminal())
    with progress_bar(total=2, unit="step", mininterval=0) as bar:
        for step in range(2):
            for _ in progress_bar(range(3), desc="evaluation", leave=False, mininterval=0):
                log.info("step %d", step)
            bar.update()
    assert "evaluation" in terminal.getvalue()
    lines = [line for line in terminal.lines if line]
    assert lines[:6] == ["step 0"] * 3 + ["step 1"] * 3 and len(lines) == 7 and lines[6].startswith("100%|")


@pytest.mark.parametrize("is_dumb", [False, True])
def test_a_log_file_gets_whole_lines_of_a_bar_now_and_then(logged, monkeypatch, is_dumb):
    monkeypatch.setattr(progress, "LOG_EVERY_SEC", 0.0)
    file = logged(Terminal() if is_dumb else io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    with progress_bar(total=3, unit="step") as bar:
        for step in range(3):
            bar.update()
            log.info("step %d is done", step)
            for _ in progress_bar(range(3), desc="evaluation", leave=False):
                pass
    text = file.getvalue()
    assert "\r" not in text and "\x1b" not in text and "\n\n" not in text
    assert "step 1 is done\n" in text and re.search(r"^ ?33%\|.* 1/3 ", text, re.MULTILINE)


def test_a_short_temporary_bar_writes_nothing_to_a_log_file(logged):
    file = logged(io.StringIO())
    assert list(progress_bar(range(3), desc="evaluation", leave=False)) == [0, 1, 2]
    assert file.getvalue() == ""


def test_a_bar_survives_a_closed_stderr(monkeypatch):
    class Broken(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Broken())
    assert list(progress_bar(range(3))) == [0, 1, 2]


def test_only_a_long_wait_is_logged(caplog, monkeypatch):
    with caplog.at_level(logging.INFO):
        with log_if_slow(log, "a short wait"):
            pass
        monkeypatch.setattr(progress, "SLOW_SEC", 0.05)
        with log_if_slow(log, "loading %s", "Inception"):
            time.sleep(0.5)
    assert caplog.messages == ["loading Inception"]


def test_torch_logs_no_statistics_if_its_import_is_interrupted():
    code = "import logging; from common import progress; progress.log_to_stderr()"
    code += "; logging.getLogger('torch._subclasses.fake_tensor').info('statistics')"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
