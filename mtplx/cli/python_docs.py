"""The Python reference in ``docs/python-reference.md``, from the docstrings.

Only the source is read: nothing is imported, and what is shown of a signature is what
stands there. To bring the page up to date:

    python -m mtplx.cli.python_docs docs/python-reference.md
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import mtplx

PUBLIC: dict[str, tuple[str, ...] | None] = {
    "mtplx.generation": None,
    "mtplx.models": None,
    "mtplx.models.cache": ("PromptCache",),
    "mtplx.session": None,
    "mtplx.metrics": ("PrefillMetrics", "StreamMetrics", "Divergence"),
    "mtplx.prefill_bench": None,
    "mtplx.errors": (),
}
"""What is told of which module; None for all that its ``__all__`` names."""

HEAD = """\
# Python reference

Made from the docstrings by `python -m mtplx.cli.python_docs docs/python-reference.md`.
[The README](../README.md#in-python) has an example. What computes runs on one thread, the
one that loaded the model.
"""

_ROOT = Path(mtplx.__file__).parent
_LINE_CHARS = 80
_LISTS = ("Args", "Attributes", "Raises")
_TEXTS = ("Returns", "Yields")
_ENTRY = re.compile(r"    (\S.*?): (.*)")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def reference() -> str:
    """Return the page."""
    lines = [HEAD]
    for module, names in PUBLIC.items():
        tree = _parse(module)
        lines += [f"## `{module}`", "", markdown(_docstring(tree)), ""]
        for name in _all_of(tree) if names is None else names:
            lines += _about(name, _find(module, name))
    return "\n".join(lines).rstrip() + "\n"


def markdown(docstring: str) -> str:
    """Return a docstring with its lists of arguments as Markdown has them."""
    lines, section = [], ""
    for line in docstring.replace("``", "`").splitlines():
        head = line.removesuffix(":")
        if line.endswith(":") and head in (*_LISTS, *_TEXTS):
            section = head
            lines += [f"**{head}**", ""]
        elif line and not line.startswith(" "):
            section = ""
            lines.append(line)
        elif section in _LISTS and (entry := _ENTRY.fullmatch(line)):
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        elif section in _LISTS and line:
            lines.append(f"  {line.strip()}")
        else:
            lines.append(line.strip() if section else line)
    return "\n".join(lines).strip()


def _about(name: str, node: ast.stmt) -> Iterator[str]:
    yield f"### `{name}`"
    yield ""
    if isinstance(node, ast.ClassDef):
        yield from _code(f"class {name}", _fields(node), "")
        yield markdown(_docstring(node))
        yield ""
        yield from _members(name, node)
    elif isinstance(node, Function):
        yield from _of_function(f"def {name}", node)
    else:
        yield from ["```python", ast.unparse(node), "```", ""]


def _members(name: str, node: ast.ClassDef) -> Iterator[str]:
    methods = [each for each in node.body if isinstance(each, Function)]
    shown = [each for each in methods if not each.name.startswith("_")]
    # Of a property, what sets it says nothing new.
    shown = [each for each in shown if "setter" not in _decorators(each)]
    properties = [e for e in shown if {"property", "cached_property"} & _decorators(e)]
    for each in properties:
        text = " ".join(_docstring(each).replace("``", "`").split())
        yield f"- `{name}.{each.name}`" + (f": {text}" if text else "")
    if properties:
        yield ""
    for each in shown:
        if each not in properties:
            yield f"#### `{name}.{each.name}`"
            yield ""
            yield from _of_function(f"def {each.name}", each, method=True)


def _of_function(head: str, node: Function, *, method: bool = False) -> Iterator[str]:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    yield from _code(head, _arguments(node.args, method=method), returns)
    if text := markdown(_docstring(node)):
        yield text
        yield ""


def _code(head: str, arguments: list[str], returns: str) -> Iterator[str]:
    yield "```python"
    line = f"{head}({', '.join(arguments)}){returns}"
    if len(line) <= _LINE_CHARS:
        yield line
    else:
        yield f"{head}("
        yield from (f"    {each}," for each in arguments)
        yield f"){returns}"
    yield "```"
    yield ""


def _fields(node: ast.ClassDef) -> list[str]:
    """Return what makes one: the arguments of its ``__init__``, or its fields."""
    for each in node.body:
        if isinstance(each, Function) and each.name == "__init__":
            return _arguments(each.args, method=True)
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    return [ast.unparse(each) for each in fields]


def _arguments(args: ast.arguments, *, method: bool) -> list[str]:
    plain = [*args.posonlyargs, *args.args]
    missing: list[ast.expr | None] = [None] * (len(plain) - len(args.defaults))
    told = [
        _argument(argument, default)
        for argument, default in zip(plain, [*missing, *args.defaults], strict=True)
    ]
    told = told[1:] if method else told
    if args.vararg or args.kwonlyargs:
        told.append("*" + (_argument(args.vararg, None) if args.vararg else ""))
    told += map(_argument, args.kwonlyargs, args.kw_defaults)
    return told + ([f"**{_argument(args.kwarg, None)}"] if args.kwarg else [])


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(argument) + (f" = {ast.unparse(default)}" if default else "")


def _find(module: str, name: str) -> ast.stmt:
    """Return the definition of a name, which the module may import from another one."""
    for node in _parse(module).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            if any(alias.name == name for alias in node.names):
                return _find(node.module, name)
        elif isinstance(node, ast.ClassDef | Function):
            if node.name == name:
                return node
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return node
    raise ValueError(f"{module} has no {name}.")


def _all_of(tree: ast.Module) -> list[str]:
    [found] = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    names: list[str] = ast.literal_eval(found)
    return names


@cache
def _parse(module: str) -> ast.Module:
    path = _ROOT.parent.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text("utf-8"))


def _docstring(node: ast.Module | ast.ClassDef | Function) -> str:
    return ast.get_docstring(node) or ""


def _decorators(node: Function) -> set[str]:
    return {ast.unparse(each).rpartition(".")[2] for each in node.decorator_list}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference(), "utf-8")
