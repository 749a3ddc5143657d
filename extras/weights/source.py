"""The project's own code as files that diffusers loads: a module and all that it imports of the project, in one file.

One file, because diffusers copies the files that a pipeline's file imports, but not the files that those import, and because it
downloads of a component nothing but the file that model_index.json names. The files' names hold a hash of their content, because
diffusers copies all code to one folder and imports it by name: other code under the same name would change a pipeline that is
loaded.
"""

from __future__ import annotations

import ast
from pathlib import Path

from common.files import REPOSITORY, hash_bytes

# The constructors by name of several networks. The classes that diffusers loads call the networks themselves.
NAMED_NETWORKS = {"build", "BACKBONES"}
HEADER = '''"""{title}

Unchanged but for the imports between them: {files}.

{license}"""

from __future__ import annotations
'''


def join_source(module: str, title: str) -> tuple[str, str]:
    """(name, text) of one Python file that holds `module` and all that it imports of the project.

    Raises:
        AssertionError: two of the files give one name to different things, or import a module as a whole.
    """
    files: list[str] = []
    defined: dict[str, str] = {}
    parts = []
    for name in _in_order(module, []):
        source = _file_of(name).read_text(encoding="utf-8")
        left_out: set[int] = set()
        for node in ast.parse(source).body:
            if _project_import(node) or (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
                left_out |= {*range(node.lineno, node.end_lineno + 1)}
                continue
            for key, meaning in _meanings(node).items():
                is_new = key in NAMED_NETWORKS or defined.setdefault(key, meaning) == meaning
                assert is_new, f"{name} gives {key} another meaning than the files before it; exports join them in one file"
        files.append(_file_of(name).relative_to(REPOSITORY).as_posix())
        kept = [line for number, line in enumerate(source.splitlines(), start=1) if number not in left_out]
        parts.append(f"\n\n# {'-' * 116}\n# {files[-1]}\n\n" + "\n".join(kept).strip() + "\n")
    license = (REPOSITORY / "LICENSE").read_text(encoding="utf-8")
    text = HEADER.format(title=title, files=", ".join(files), license=license) + "".join(parts)
    return f"{module.rpartition('.')[2]}_{hash_bytes(text.encode())[:8]}", text


def _file_of(module: str) -> Path | None:
    """The file of a module of the project; None for a library's."""
    path = REPOSITORY / module.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


def _project_import(node: ast.stmt) -> str | None:
    """The module of the project that a statement imports from."""
    whole = [alias.name for alias in node.names if _file_of(alias.name)] if isinstance(node, ast.Import) else []
    assert not whole, f"line {node.lineno} imports {whole[0]} as a whole; exports need `from {whole[0]} import ...`"
    return node.module if isinstance(node, ast.ImportFrom) and _file_of(node.module) else None


def _in_order(module: str, before: list[str]) -> list[str]:
    """`before`, then what a module imports of the project and is not among it, then the module."""
    for node in ast.parse(_file_of(module).read_text(encoding="utf-8")).body:
        needed = _project_import(node)
        if needed and needed not in before:
            before = _in_order(needed, before)
    return [*before, module]


def _meanings(node: ast.stmt) -> dict[str, str]:
    """What a statement at top level gives names to."""
    if isinstance(node, ast.Import):
        return {alias.asname or alias.name.partition(".")[0]: alias.asname and alias.name or "" for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    names += [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
    return {name: ast.unparse(node) for name in names}
