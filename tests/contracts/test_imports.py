"""Imports point one way, and the inner parts do without transformers."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "heedful"
ORDER = (  # from the inside out: a part may import what stands before it, and its own line
    ("files", "about", "measuring", "progress", "rules"),
    ("plan",),
    ("mask", "state"),
    ("ops",),
    ("attention", "statistic"),
    ("lesson",),
    ("finite", "mechanisms", "exact"),
    ("statistics",),
    ("verdicts", "spec"),
    ("huggingface", "findings", "texts"),
    ("shortening", "cutting"),
    ("checkpoint", "saving"),
    ("inputs", "tokens", "looking"),
    ("scan",),
    ("doctor", "demo", "capturing", "compare", "growing"),
    ("explaining",),
    ("explanations", "explain"),
    ("learning", "widening", "preserving"),
    ("resize",),
    ("enlarging",),
    ("benching",),
    ("bench",),
    ("report", "training"),
    ("cli",),
)
RANK = {part: rank for rank, line in enumerate(ORDER) for part in line}
FILES = sorted(SOURCE.rglob("*.py"))


def part_of(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(file: Path) -> set[tuple[str, bool]]:
    """The parts of heedful, and the outside packages, that a file imports; True for heedful's."""
    depth = len(file.relative_to(SOURCE).parts)
    found = set()
    for node in _nodes(file):
        if isinstance(node, ast.Import):
            found |= {(alias.name.split(".")[0], False) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(((node.module or "").split(".")[0], False))
        elif isinstance(node, ast.ImportFrom) and node.level == depth:
            found |= {((node.module or alias.name).split(".")[0], True) for alias in node.names}
    return found


def _nodes(file: Path) -> list[ast.AST]:
    """All but what only type checkers read."""
    tree = ast.parse(file.read_text())
    guards = (n for n in ast.walk(tree) if isinstance(n, ast.If) and getattr(n.test, "id", "") == "TYPE_CHECKING")
    hidden = {id(inner) for guard in guards for inner in ast.walk(guard)}
    return [node for node in ast.walk(tree) if id(node) not in hidden]


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_imports_point_inwards(file):
    part = part_of(file)
    if part == "__init__":
        return
    assert part in RANK, f"{part} has no place in ORDER yet; give it one"
    for name, ours in imported(file):
        if ours and name in RANK:
            assert RANK[name] <= RANK[part], f"{file.name} imports {name}, which stands outside of it"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_only_the_outer_parts_know_transformers_and_only_kernels_know_triton(file):
    outside = {name for name, ours in imported(file) if not ours}
    assert "transformers" not in outside or part_of(file) in ("huggingface", "checkpoint", "training")
    assert "triton" not in outside or part_of(file) == "kernels"


@pytest.mark.parametrize("name", ["heedful", "heedful.exact", "heedful.mechanisms", "heedful.ops", "heedful.statistics"])
def test_the_inner_parts_need_torch_alone(name):
    forbidden = ["transformers", "rich", "typer", "pyarrow", "safetensors", "jaxtyping"]
    code = f"import sys; sys.modules.update(dict.fromkeys({forbidden})); import {name}; print('ok')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "ok", done.stderr


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_files_tell_one_story_of_at_most_300_lines(file):
    text = file.read_text()
    assert len(text.splitlines()) <= 300
    assert ast.get_docstring(ast.parse(text)), "the first line says which story"


def test_every_public_name_is_there():
    import heedful

    for name in heedful.__all__:
        assert getattr(heedful, name) is not None
    assert set(heedful._HOME) | set(heedful._MODULES) == set(heedful.__all__)
