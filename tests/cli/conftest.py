"""Set-up of the command-line tests: settings of their own, a tiny model, functions that run commands."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cli_helpers import TINY, random_model
from helpers import write_idx
from jax.experimental.compilation_cache import compilation_cache

from marjax import cli_sample
from marjax.checkpoint import save


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """These programs take longer to compile than to run; other tests get their own, optimised ones."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    """A working directory and a compilation cache of its own; jax's settings as before afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MARJAX_CACHE_DIR", str(tmp_path / "cache"))
    settings = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in settings}
    compilation_cache.reset_cache()  # jax reads its settings once, when it first compiles
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    save(random_model(TINY), path, provenance={"data": "none"})
    return str(path)


@pytest.fixture
def refused(marjax):
    """Function that runs a command which must be refused with exit code 2, and gives its one sentence."""

    def run(*words):
        code, out, err = marjax(*words)
        assert code == 2 and not out
        assert err.startswith("marjax: ") and err.endswith(".\n") and err.count("\n") == 1
        return err

    return run


@pytest.fixture
def calls(monkeypatch):
    """Replaces sampling by black images, and lists the arguments it was called with."""
    recorded = []

    def fake(params, rng, labels, **options):
        recorded.append({"seed": jax.random.key_data(rng).tolist(), "labels": labels, **options})
        config = params.config
        return jnp.zeros((len(options["indices"]), config.img_size, config.img_size, config.vae_embed_dim))

    monkeypatch.setattr(cli_sample, "sample", fake)
    return recorded


@pytest.fixture
def data(tmp_path):
    rng = np.random.default_rng(0)
    return write_idx(tmp_path / "data", "train", rng.integers(0, 256, (12, 8, 8)), np.arange(12) % 3)
