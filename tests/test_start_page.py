"""Commands of the documentation: those of docs/start.md run in an empty folder, the others are accepted.

The Python examples of docs/extending.md run on a small run.
"""

import functools
import re
import shlex
from importlib import import_module

import huggingface_hub.constants
import numpy as np
from conftest import REPOSITORY, checked, forget_accelerate, run_sample, run_train
from PIL import Image
from stand_ins import cache_untrained_autoencoder

import prepare_latents
from cli.arguments import run_command
from evidence import __main__ as evidence
from extras.benchmarks import __main__ as benchmarks
from extras.weights import __main__ as weights
from routing_module import Route

NOT_RUN = ("make env", "source .venv/bin/activate", "python prepare_latents.py fetch")  # `fetch` needs a network
SHORTER = {
    "train.num_steps=300": "train.num_steps=2 train.batch_size=4 sample_grid.num_samples=2 sampler.num_steps=2",
    "sample_grid.every=300": "sample_grid.every=2",
    "sampler.num_steps=100": "sampler.num_steps=2 sample_grid.num_samples=2 sampler.num_steps=2",
    "sampler.num_steps=10 ": "sampler.num_steps=2 ",
    "range(128)": "range(8)",
    "num_samples=128": "num_samples=8 sampler.num_steps=2",
    "num_samples=200": "num_samples=8 sampler.num_steps=2",
}


def blocks_of(page):
    return re.findall(r"^```sh\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def commands_of(page):
    """Yield (script, arguments) for each line of a page that starts one of our commands. For a sweep, yield the first run."""
    for block in blocks_of(page):
        for line in re.sub(r"\\\n", "", block).splitlines():
            words = shlex.split(line, comments=True)
            if (scripts := [i for i, word in enumerate(words) if word in SETTINGS]) and "$" not in line:
                arguments = [word for word in words[scripts[0] + 1 :] if not word.startswith("-")]
                if "-m" in words[scripts[0] :]:
                    arguments = [re.sub(r"interval\((.*),.*\)", r"\1", word) for word in arguments]
                    arguments = [word if "[" in word else word.partition(",")[0] for word in arguments]
                yield words[scripts[0]], arguments


SETTINGS = {"train.py": "config", "sample.py": "sample", "fid.py": "fid"}
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md")), REPOSITORY / "evidence" / "README.md"]


def test_every_command_of_a_page_is_accepted():
    commands = [command for page in PAGES for command in commands_of(page)]
    assert len(commands) > 30
    for script, arguments in commands:
        checked(arguments, SETTINGS[script])


def test_every_other_command_of_a_page_has_keys_and_values_that_the_command_accepts(monkeypatch):
    called = []

    def record(target):
        """Replace a command's function by one with the same signature that only records its call."""
        module, _, name = target.partition(":")
        function = getattr(import_module(module), name)
        recorder = functools.wraps(function)(lambda *args, **values: called.append(name))
        monkeypatch.setattr(import_module(module), name, recorder)

    programs = {"prepare_latents.py": prepare_latents, "extras.weights": weights}
    programs |= {"extras.benchmarks": benchmarks, "evidence": evidence}
    for target in {target for program in programs.values() for target in program.COMMANDS.values()}:
        record(target)
    commands = []
    for page in PAGES:
        for line in "\n".join(blocks_of(page)).replace("\\\n", "").splitlines():
            words = shlex.split(line, comments=True)
            commands += [(words[i], words[i + 1 :]) for i, word in enumerate(words) if word in programs and "$" not in line]
    for program, arguments in commands:
        if main := getattr(programs[program], "main", None):
            main(arguments)
        else:
            run_command(programs[program].COMMANDS, "", arguments)
    assert len(called) == len(commands) > 15
    assert {"encode", "convert", "inspect", "reference", "detector", "fetch", "import_weights", "step"} <= {*called}
    assert {"show_all", "guided", "collect"} <= {*called}


def run_line(line):
    """Run a line `python <script> <arguments>` in this process."""
    _, script, *arguments = shlex.split(line)
    forget_accelerate()
    if script == "prepare_latents.py":
        prepare_latents.main(arguments)
    else:
        import_module(script.removesuffix(".py")).main(checked(arguments, SETTINGS[script]))


def test_the_commands_of_the_page_run(inception_weights, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    cache_untrained_autoencoder(tmp_path / "hub")
    for block in blocks_of(REPOSITORY / "docs" / "start.md"):
        for long, short in SHORTER.items():
            block = block.replace(long, short)
        if block.startswith("python - <<'END'\n"):
            exec(block.removeprefix("python - <<'END'\n").removesuffix("END\n"), {})
            continue
        for line in block.replace("\\\n", "").splitlines():
            if line not in NOT_RUN:
                run_line(line + (f" evaluation.detector_weights={inception_weights}" if "reference=" in line else ""))
    assert (tmp_path / "runs/first/samples/step_0000002.png").exists()
    assert {path.parent.parent.name for path in tmp_path.glob("runs/*/evaluations/results.jsonl")} == {"first", "shapes"}


def test_the_examples_of_the_page_about_the_code_draw_the_picture_of_sample_py_and_route_tokens(tmp_path, monkeypatch):
    page = (REPOSITORY / "docs" / "extending.md").read_text()
    picture, route = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    run = run_train(tmp_path / "runs", "first", "train.num_steps=8", "train.lr=1e-2", "sampler.num_steps=5")
    monkeypatch.chdir(tmp_path)
    exec(picture, {})
    (command,) = re.findall(r"`sample.py (checkpoint=\S+ [^`]+)`", page)
    run_sample(*command.split())
    (grid,) = run.glob("generated/*/grid_0-19.png")
    ours, theirs = (np.asarray(Image.open(file), dtype=int) for file in ("picture.png", grid))
    assert ours.shape == theirs.shape and abs(ours - theirs).max() <= 1 and theirs.std() > 20
    exec(route.replace("384", "24"), names := {})
    assert names["route"] == Route(0.5, 2, 8)
    assert (names["x"].shape, names["ids_keep"].shape) == ((8, 256, 24), (8, 128))
