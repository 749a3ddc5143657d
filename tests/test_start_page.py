"""docs/start.md: its commands run, in its order, and print what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY
from stand_ins import cache_untrained_autoencoder, untrained_inception

PAGE = REPOSITORY / "docs" / "start.md"
# `fetch` needs a network, and tests/test_prepare_latents.py covers it. Everything else runs as it stands, only shorter.
NOT_RUN = ("make env\nsource .venv/bin/activate", "python prepare_latents.py fetch")
SHORTER = {
    "train.num_steps=300": "train.num_steps=4",
    "train.num_steps=100": "train.num_steps=2",
}
# What the page does not show: progress bars, lines about long waits, this test's stand-in for Inception, and torchao, which
# users need not have.
LEFT_OUT = re.compile(r"%\||it/s|s/it|^loading |^reading |^waiting |not the published Inception|torchao|_pytree.py")


def blocks_of(page: str) -> list[tuple[str, str]]:
    """(command, what it prints) in the page's order; a script prints nothing."""
    blocks = []
    for kind, text in re.findall(r"^```(sh|console)\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL):
        if kind == "sh":
            blocks.append((text, ""))
            continue
        for command_and_output in text.removeprefix("$ ").split("\n$ "):
            command, _, output = command_and_output.replace("\\\n", "").partition("\n")
            blocks.append((command, output))
    return blocks


def without_figures(output: str) -> list[str]:
    """The lines of an output without progress bars, with # for every number; widths of tables do not count."""
    lines = [line for line in output.replace("\r", "\n").splitlines() if line.strip() and not LEFT_OUT.search(line)]
    lines = [re.sub(r"\S*/latents/digits", ".../latents/digits", line) for line in lines]
    lines = [re.sub(r"_[0-9a-f]{6,8}\b", "_#", line) for line in lines]  # hashes in names
    return [re.sub(r"[ -]{2,}", " ", re.sub(r"(?<![A-Za-z])[+-]?\d[\d,.]*(e[+-]?\d+)?", "#", line)).strip() for line in lines]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working folder that looks like the repository; what commands write stays in it."""
    folder = tmp_path_factory.mktemp("start")
    for path in REPOSITORY.iterdir():
        if path.name not in ("runs", "latents") and not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    (folder / "latents").mkdir()
    cache_untrained_autoencoder(folder / "hub")
    untrained_inception(folder / "inception.pth")
    return folder


def test_the_commands_of_the_page_print_what_it_says(folder):
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HF_HUB_CACHE": str(folder / "hub"),
    }
    environment |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    for command, expected in blocks_of(PAGE.read_text()):
        if command.strip() in NOT_RUN:
            continue
        for long, short in SHORTER.items():
            command = command.replace(long, short)
        if command.startswith("python fid.py") and "reference=" in command:
            command += f" evaluation.weights={folder / 'inception.pth'}"
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        output = done.stdout.replace(f"{folder}/", "")
        assert without_figures(output) == without_figures(expected), f"{command}\n{output}"
