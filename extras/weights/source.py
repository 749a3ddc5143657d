"""The project's own code as files that diffusers loads: a module and all that it imports of the project, in one file.

One file, because diffusers copies the files that a pipeline's file imports, but not the files that those import, and downloads of
a component only the file that model_index.json names. Its name holds a hash of its content, because diffusers copies all code to
one folder and imports it by name: other code under the same name would change a pipeline that is loaded.
"""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

from common.files import REPOSITORY

HEADER = '''"""{module} of a trainer for token-routed diffusion transformers, and all that it imports of that project.

{license}"""

from __future__ import annotations
'''


def join_source(module: str) -> tuple[str, str]:
    """(name, text) of one Python file that holds `module` and all that it imports of the project by `from ... import`.

    All files share one namespace: tests/test_weights_out.py checks that no two define the same name.
    """
    text = HEADER.format(module=module, license=(REPOSITORY / "LICENSE").read_text(encoding="utf-8"))
    for name in _in_order(module, []):
        source = _file_of(name).read_text(encoding="utf-8")
        lines = source.splitlines()
        for node in ast.parse(source).body:
            if isinstance(node, ast.ImportFrom) and (node.module == "__future__" or _file_of(node.module)):
                lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
        text += f"\n\n# {'-' * 116}\n# {name}\n\n" + "\n".join(lines).strip() + "\n"
    return f"{module.rpartition('.')[2]}_{hashlib.sha256(text.encode()).hexdigest()[:8]}", text


def _file_of(module: str) -> Path | None:
    """The file of a module of the project; None for a library's."""
    path = REPOSITORY / module.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


def _in_order(module: str, before: list[str]) -> list[str]:
    """`before`, then what a module imports of the project and is not among it, then the module."""
    for node in ast.parse(_file_of(module).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and _file_of(node.module) and node.module not in before:
            before = _in_order(node.module, before)
    return [*before, module]
