"""Set-up of the training tests: steps that are made once, the run that others are compared with, a quick step."""

from __future__ import annotations

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from train_helpers import CONFIG, RECIPE, SOURCE

from marjax.train import init_state, make_step, train

training = importlib.import_module("marjax.train")  # the package's attribute of that name is the function


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """What all test files of this folder share: a directory for compiled programs, the steps, the first states."""
    return tmp_path_factory.mktemp("cache"), {}, {}


@pytest.fixture(scope="module", autouse=True)
def programs(made):
    """Makes the step once per recipe, for all runs of this process (the dictionary); children find it compiled."""
    cache, steps, states = made
    settings = {
        "jax_compilation_cache_dir": str(cache),
        "jax_persistent_cache_min_compile_time_secs": 0.5,
    }
    before = {name: getattr(jax.config, name) for name in settings}

    def make_once(config, recipe, *rest):
        # Without these: the learning rate is constant after two steps in all runs here.
        key = config, dataclasses.replace(recipe, epochs=1, log_every=1, save_every=1)
        if key not in steps:
            steps[key] = make_step(config, recipe, *rest)
        return steps[key]

    def init_once(config, recipe, tx):
        key = config, recipe.seed, recipe.optimizer
        if key not in states:
            states[key] = jax.device_get(init_state(config, recipe, tx))
        return jax.tree.map(jnp.array, states[key])  # copies, which the step may consume

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "make_step", make_once)
        patch.setattr(training, "init_state", init_once)
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # jax reads these settings once, when it first compiles
        yield steps
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The directory of a run of six steps without interruption, and what was reported while it ran."""
    out, reported = tmp_path_factory.mktemp("runs") / "unbroken", []
    model = train(CONFIG, RECIPE, SOURCE, out, provenance={"data": "noise"}, progress=reported.append)
    return out, model, reported


@pytest.fixture
def fake_step(monkeypatch):
    """Replaces the step by one that adds 1 to every number of the state; metrics come from a function of the step."""

    def install(metrics, after=lambda state: None):
        def step(state, images, labels):
            state = jax.device_put(jax.tree.map(lambda leaf: np.asarray(leaf) + np.ones((), leaf.dtype), state))
            after(state)
            values = {"loss": 1.0, "mse": 0.5, "vb": 0.5, "grad_norm": 1.0, "lr": 0.1} | metrics(int(state.step))
            return state, {name: np.float32(value) for name, value in values.items()}

        monkeypatch.setattr(training, "make_step", lambda *arguments: step)

    return install
