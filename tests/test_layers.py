"""Imports only go down, and what is pure stays pure."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mtplx

ROOT = Path(mtplx.__file__).parent

LAYERS = (
    ("cli",),
    ("server", "prefill_bench", "simulator", "verify"),
    ("engine",),
    ("generation",),
    ("session",),
    ("scheduler",),
    ("text",),
    ("models",),
    ("config",),
    ("types",),
    ("metrics",),
    ("backend",),
    ("errors",),
    ("__init__",),
)
"""From the top down; a module imports from lower lines only, or from its own package."""

RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
PURE = ("scheduler", "session", "text", "server", "simulator", "config", "types", "metrics")
"""Their modules must not bring MLX with them."""


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        yield path, path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path):
    """Return the names of the parts of mtplx that a file imports, wherever it does."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names = [node.module]
            if node.module == "mtplx":
                names = [f"mtplx.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "mtplx" and len(parts) > 1 and not parts[1].startswith("__"):
                yield parts[1]


def test_every_part_has_a_layer():
    assert {part for _, part in modules()} == set(RANK)


@pytest.mark.parametrize(
    ("path", "part"),
    [pytest.param(p, part, id=str(p.relative_to(ROOT))) for p, part in modules()],
)
def test_imports_only_go_down(path, part):
    if part == "__init__":
        return  # Loads the backend before anyone can load MLX, and nothing else.
    upward = {name for name in imported(path) if name != part and RANK[name] <= RANK[part]}
    assert not upward


def test_pure_parts_do_not_load_mlx():
    pure = [
        ".".join(["mtplx", *path.relative_to(ROOT).with_suffix("").parts])
        for path, part in modules()
        if part in PURE
    ]
    imports = "\n".join(f"import {name.removesuffix('.__init__')}" for name in pure)
    code = f"{imports}\nimport sys\nprint([m for m in sys.modules if m == 'mlx.core'])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
