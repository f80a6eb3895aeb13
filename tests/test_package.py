"""What holds for the package as a whole: a light import, one direction of imports, small files, one version."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import marjax
from marjax.version import __version__

PACKAGE = Path(marjax.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"

# A module may import those to its left; those in a subpackage count as the subpackage.
ORDER = (
    *("version", "files", "noise_schedule", "config", "types", "header", "growing", "latents"),
    *("cpu", "products", "layers", "diffusion_head", "vae", "codec", "mar", "diffusion"),
    *("schedule", "kernels", "accel", "decode", "arguments", "sample", "inpaint"),
    *("checkpoint", "convert", "convert_vae", "torch_files", "detection", "conversion"),
    *("idx", "data", "encode", "images", "image_array"),
    *("objective", "optimizer", "metrics", "run_dir", "train_step", "train"),
    *("compilation", "cli_options", "cli_sample", "cli_inpaint", "cli_eval", "cli_encode", "cli_train", "cli_convert"),
    *("cli", "__init__", "__main__"),
)
MAX_LINES = 400
TORCH_READER = "torch_files"  # the one module that may import torch, and inside a function only


def unit(path: Path) -> str:
    """The name in ORDER that a source file belongs to."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(node: ast.AST) -> list[str]:
    """Full names of the modules, or members of modules, that an import statement names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def imports(path: Path) -> list[str]:
    """All imports of a file, those inside functions too."""
    return [name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) for name in imported(node)]


def is_torch(name: str) -> bool:
    return name.split(".")[0] == "torch"


def test_import_is_light():
    script = """
import json, sys, time
import jax
before, start = set(sys.modules), time.perf_counter()
import marjax
seconds = time.perf_counter() - start
print(json.dumps([seconds, sorted({name.split(".")[0] for name in set(sys.modules) - before})]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seconds, packages = json.loads(done.stdout)
    print(f"import marjax takes {seconds:.2f} s after jax")
    assert not {"torch", "matplotlib", "orbax", "tensorstore", "scipy", "PIL", "pandas"} & set(packages)


def test_version():
    assert tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["version"] == __version__


def test_package_data():
    assert (PACKAGE / "py.typed").is_file()


def test_sources_are_found():
    assert {"config", "mar", "checkpoint"} <= {unit(path) for path in SOURCES}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_source_file(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES
    names, own = imports(path), unit(path)
    assert "marjax" not in names
    assert own == TORCH_READER or not [name for name in names if is_torch(name)]
    inner = {name.split(".")[1] for name in names if name.startswith("marjax.")} - {own}
    assert not {own, *inner} - set(ORDER), "give every module its place in ORDER"
    wrong = {name for name in inner if ORDER.index(name) >= ORDER.index(own)}
    assert not wrong, f"{own} must not import {', '.join(sorted(wrong))}, to its right in ORDER"


def test_torch_is_imported_when_a_pth_is_read():
    tree = ast.parse((PACKAGE / f"{TORCH_READER}.py").read_text(encoding="utf-8"))
    inside = [node for part in tree.body if isinstance(part, ast.FunctionDef) for node in ast.walk(part)]
    everywhere = [node for node in ast.walk(tree) if any(map(is_torch, imported(node)))]
    assert everywhere and all(node in inside for node in everywhere)


def test_no_relative_imports():
    for path in SOURCES:
        levels = [node.level for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        assert not any(levels), f"{path.name} imports relatively, which the check of directions would not see"
