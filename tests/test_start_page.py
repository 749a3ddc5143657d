"""docs/start.md: its commands run, in its order, in a folder that holds nothing else."""

import re
import shlex
from importlib import import_module

import huggingface_hub
from conftest import REPOSITORY, checked, forget_accelerate
from stand_ins import cache_untrained_autoencoder, untrained_inception

NOT_RUN = ("make env", "source .venv/bin/activate", "python prepare_latents.py fetch")  # `fetch` needs a network
SHORTER = {
    "train.num_steps=300": "train.num_steps=2 train.batch_size=4 sample.num_samples=2 diffusion.sampler.num_steps=2",
    "sample.every=300": "sample.every=2",
    "num_steps=100": "num_steps=2 sample.num_samples=2 diffusion.sampler.num_steps=2",
    "num_steps=10 ": "num_steps=2 ",
    "range(128)": "range(8)",
    "num_samples=128": "num_samples=8 num_steps=2",
    "num_samples=200": "num_samples=8 num_steps=2",
}


def run_line(line):
    """A line `python <script> <arguments>`, in this process."""
    _, script, *arguments = shlex.split(line)
    module = import_module(script.removesuffix(".py"))
    forget_accelerate()
    if script == "prepare_latents.py":
        module.main(arguments)
    else:
        module.main(checked(arguments, {"train.py": "config"}.get(script, script.removesuffix(".py"))))


def test_the_commands_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    cache_untrained_autoencoder(tmp_path / "hub")
    untrained_inception(tmp_path / "inception.pth")
    blocks = re.findall(r"^```sh\n(.*?)^```", (REPOSITORY / "docs" / "start.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    for block in blocks:
        for long, short in SHORTER.items():
            block = block.replace(long, short)
        if block.startswith("python - <<'END'\n"):
            exec(block.removeprefix("python - <<'END'\n").removesuffix("END\n"), {})
            continue
        for line in block.replace("\\\n", "").splitlines():
            if line not in NOT_RUN:
                run_line(line + (f" evaluation.weights={tmp_path / 'inception.pth'}" if "reference=" in line else ""))
    assert (tmp_path / "runs/first/samples/step_0000002.png").exists()
    assert {path.parent.parent.name for path in tmp_path.glob("runs/*/evaluations/results.jsonl")} == {"first", "shapes"}
