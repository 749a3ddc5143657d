"""The layout of the project: which room imports which, and no code that only tests use."""

import ast
import re
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path

from conftest import REPOSITORY
from omegaconf import OmegaConf

from cli.compose import compose_overrides
from configs.settings import flatten

# Floors, from the top down. A room imports only from lower floors. A file that is named here is a room.
# So nothing imports evidence/. The exception for extras/ is a test below.
FLOORS = [
    ["evidence", "extras"],
    ["train", "sample", "fid", "prepare_latents"],
    ["cli"],
    ["training", "latents.prepare"],
    ["sampling"],
    ["checkpoints"],
    ["runtime"],
    ["latents"],
    ["evaluations"],
    ["configs"],
    ["dit", "guidance", "edm", "sit"],
    ["common"],
    ["routing_module"],
]
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


@cache
def sources() -> dict[str, ast.Module]:
    """Return {"training.ema": syntax tree, ...} for every module outside tests/."""
    found = {}
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=REPOSITORY, capture_output=True, text=True).stdout.splitlines()
    for file in sorted(REPOSITORY / name for name in tracked) or sorted(REPOSITORY.rglob("*.py")):  # without git, all files
        path = file.relative_to(REPOSITORY)
        if not any(part in ("tests", "runs", "outputs") or part.startswith(".") for part in path.parts):
            name = path.with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
            found[name] = ast.parse(file.read_text())
    return found


def room_of(module: str) -> str | None:
    """Return the innermost room of a module of the project; None for a library."""
    parts = module.split(".")
    rooms = [".".join(parts[:i]) for i in range(len(parts), 0, -1)]
    return next((room for room in rooms if room in FLOOR_OF), None)


def imports_of(module: str) -> set[str]:
    """Return the modules of the project that a module imports, at the top or inside functions."""
    names = set()
    for node in ast.walk(sources()[module]):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: write the whole name of what is imported"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
            names.add(node.module)
    return {name for name in names if name in sources() and name != module}


def test_every_module_belongs_to_a_room():
    assert {module for module in sources() if room_of(module) is None} == set()


def test_imports_run_downwards():
    for module in sources():
        own, imported = room_of(module), [name for name in imports_of(module) if room_of(name) != "extras"]
        up = [name for name in imported if room_of(name) != own and FLOOR_OF[room_of(name)] <= FLOOR_OF[own]]
        assert up == [], f"{module} imports {', '.join(up)}, on its own floor or above"


def test_the_core_imports_an_extra_only_for_the_key_that_selects_it():
    """The import is inside a function, and its line names the key. For model= and diffusion=, the schema names the modules."""
    composed = [compose_overrides([], name) for name in ("config", "sample", "fid")]
    keys = {key for cfg in composed for key in [*flatten(OmegaConf.to_container(cfg)), *cfg]}
    for module in (module for module in sources() if room_of(module) != "extras"):
        path = REPOSITORY / module.replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        found = [line for line in file.read_text().splitlines() if re.match(r" *(from|import) extras\b", line)]
        for line in found:
            reason = re.search(r"^ +.*  # imported only for ([\w.]+)", line)
            assert reason and reason[1] in keys, f"{module}: {line.strip()}: state the key: '# imported only for <key>'"


def test_no_helper_is_defined_twice():
    seen: dict[str, str] = {}
    for module, tree in sources().items():
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name not in ("main", "build"):
                assert node.name not in seen, f"{node.name} in {seen[node.name]} and {module}"
                seen[node.name] = module


def test_imports_have_no_cycles():
    def circle_from(module: str, path: tuple[str, ...]) -> tuple[str, ...] | None:
        if module in path:
            return (*path[path.index(module) :], module)
        if module in done:
            return None
        found = next((c for name in imports_of(module) if (c := circle_from(name, (*path, module)))), None)
        done.add(module)
        return found

    done: set[str] = set()
    # A package's __init__ and its modules count as one: the parts that it exports may use each other.
    assert [c for module in sources() if (c := circle_from(module, ()))] == []


def names_used(tree: ast.AST) -> Counter:
    """Count the uses of each name in a piece of code: as a name, as an attribute and in imports."""
    used = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            used[node.id] += 1
        elif isinstance(node, ast.Attribute):
            used[node.attr] += 1
        elif isinstance(node, ast.ImportFrom):
            used.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.rpartition(":")[2]  # the name in "module:name"
            used[name] += name.isidentifier()  # annotations in quotes, getattr
    return used


def defined_in(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def test_every_definition_is_used_outside_of_tests():
    everywhere = sum((names_used(tree) for tree in sources().values()), Counter())
    # Definitions that no code calls by name: entry points, and the public interface of a package.
    offered = {"main", "__all__", "script"}
    for tree in sources().values():
        for node in tree.body:
            if isinstance(node, ast.Assign) and defined_in(node) == ["__all__"]:
                offered |= {*ast.literal_eval(node.value)}
    unused = [
        f"{module}.{name}"
        for module, tree in sources().items()
        for node in tree.body
        for name in defined_in(node)
        if name not in offered and everywhere[name] <= names_used(node)[name]
    ]
    assert unused == []


def test_text_files_are_utf_8_everywhere():
    """Without `encoding`, Python uses the system's encoding, which differs on Windows."""
    calls = ((module, node) for module, tree in sources().items() for node in ast.walk(tree) if isinstance(node, ast.Call))
    texts = [(module, node) for module, node in calls if getattr(node.func, "attr", "") in ("read_text", "write_text")]
    found = [(module, node.lineno) for module, node in texts if "encoding" not in {keyword.arg for keyword in node.keywords}]
    assert found == [] and texts


def test_files_and_folders_that_users_know_keep_their_names():
    files = ["train.py", "fid.py", "sample.py", "dit.py", "routing_module.py", "requirements.txt"]
    folders = ["configs", "edm", "evaluations", "tests"]
    assert all((REPOSITORY / name).is_file() for name in files) and all((REPOSITORY / name).is_dir() for name in folders)
    assert not Path(REPOSITORY / "routing_module").exists()
