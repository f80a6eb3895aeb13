"""Shared set-up: the CPU, exact float32 products, reproducible hypothesis, golden arrays."""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path

# Before jax is imported. An explicit choice of platform is respected, for runs on an accelerator.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of the suite's time is compilation. LLVM's optimisations are two thirds of it and change no test's outcome.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import hypothesis
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

GOLDEN = Path(__file__).parent / "golden"

# So that its assertions show values, as those of test files do.
pytest.register_assert_rewrite("train_helpers")

jax.config.update("jax_default_matmul_precision", "highest")

# Machines are shared, so no deadline; the same examples in every run, so no database.
hypothesis.settings.register_profile("marjax", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("marjax")


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("torch") is None:
        for item in items:
            if "torch" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs PyTorch: pip install torch"))


@pytest.fixture(autouse=True)
def _room_for_programs():
    """Forgets compiled programs before they are too many: each takes memory maps, without which XLA crashes."""
    yield
    maps = Path("/proc/self/maps")  # Linux allows a process 65,530
    if maps.exists() and len(maps.read_bytes().splitlines()) > 25_000:
        jax.clear_caches()


@functools.cache
def _load_golden(name: str) -> dict[str, np.ndarray]:
    path = GOLDEN / name
    if path.suffix == ".safetensors":
        return load_file(path)
    with np.load(path) as arrays:
        return dict(arrays)


@pytest.fixture(scope="session")
def golden():
    """Function from a file name in tests/golden (npz or safetensors) to its arrays; do not write to them."""
    return _load_golden


@pytest.fixture
def marjax(capsys):
    """Function that runs a command: (exit code, stdout, stderr)."""

    from marjax import cli

    def run(*words):
        code = cli.main([str(word) for word in words])
        return code, *capsys.readouterr()

    return run
