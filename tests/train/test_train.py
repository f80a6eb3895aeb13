"""Training: exact resumption, independence of the device count, what a run leaves on disk, and what it refuses."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from train_helpers import (
    CONFIG,
    EASY,
    EASY_RECIPE,
    RECIPE,
    SOURCE,
    STEPS,
    assert_same_run,
    assert_same_weights,
    checkpoints,
    child_killed_in_step_five,
    child_with_four_devices,
    in_a_child,
    lines,
    random_model,
)

from marjax import objective
from marjax.checkpoint import describe, load
from marjax.config import get_preset
from marjax.data import ArraySource, batches
from marjax.objective import Objective
from marjax.optimizer import OptimizerConfig, learning_rate, make_optimizer
from marjax.train import NonFiniteLossError, TrainConfig, TrainState, init_state, make_step, train

# --- A run and its resumption ------------------------------------------------------------------------------------


def test_what_a_run_leaves(unbroken):
    out, model, reported = unbroken
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "ema", "metrics.jsonl", "raw", "state"]
    written = lines(out, leave_out=())
    assert written == reported
    assert [line["step"] for line in written] == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose([line["epoch"] for line in written], np.arange(1, 7) * 0.4)
    np.testing.assert_allclose([line["lr"] for line in written], [0, 1e-3, *[2e-3] * 4], rtol=1e-6)
    for line in written:
        assert line["loss"] == pytest.approx(line["mse"] + line["vb"], rel=1e-6)
        assert 0.1 < line["loss"] < 10 and line["grad_norm"] > 0 and line["images_per_s"] > 0
    assert written[-1]["eta_s"] == 0 < written[0]["eta_s"]

    ema, raw = load(out / "ema"), load(out / "raw")
    assert ema.config == raw.config == CONFIG
    assert_same_weights(ema, model)
    for one, other in zip(jax.tree.leaves(ema), jax.tree.leaves(raw), strict=True):
        assert one.dtype == other.dtype == jnp.float32
    assert not np.array_equal(ema.mar["z_proj"]["kernel"], raw.mar["z_proj"]["kernel"])
    for name in ("ema", "raw"):
        facts = describe(out / name).provenance
        assert (facts["weights"], facts["step"], facts["num_images"], facts["data"]) == (name, STEPS, 10, "noise")
        assert facts["train_config"] == json.loads(json.dumps(dataclasses.asdict(RECIPE)))


def test_a_run_ended_early_and_prolonged_is_the_unbroken_one(unbroken, tmp_path):
    out = tmp_path / "run"
    train(CONFIG, dataclasses.replace(RECIPE, epochs=1.2, save_every=2), SOURCE, out)
    assert lines(out) == lines(unbroken[0])[:3] and checkpoints(out) == [2, 3]
    model = train(CONFIG, RECIPE, SOURCE, out)
    assert checkpoints(out) == [3, 6]
    assert_same_run(out, model, unbroken)


def test_a_killed_run_resumes_as_the_unbroken_one(unbroken, tmp_path):
    out = tmp_path / "run"
    child = in_a_child(child_killed_in_step_five, out)
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert checkpoints(out) == [2, 4] and lines(out) == lines(unbroken[0])[:5]
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # another moment to be killed at

    reported = []
    model = train(CONFIG, dataclasses.replace(RECIPE, save_every=3), SOURCE, out, progress=reported.append)
    assert [line["step"] for line in reported] == [5, 6]
    assert_same_run(out, model, unbroken)


@pytest.mark.slow
def test_resumption_with_dropout_and_bfloat16(tmp_path):
    recipe = dataclasses.replace(RECIPE, dtype="bfloat16", objective=Objective())
    expected = train(CONFIG, recipe, SOURCE, tmp_path / "unbroken")
    train(CONFIG, dataclasses.replace(recipe, epochs=1.2), SOURCE, tmp_path / "resumed")
    model = train(CONFIG, recipe, SOURCE, tmp_path / "resumed")
    assert_same_run(tmp_path / "resumed", model, (tmp_path / "unbroken", expected, None))


def test_a_finished_run_is_left_as_it_is(unbroken):
    out, expected, _ = unbroken
    before = (out / "metrics.jsonl").read_text()
    assert_same_weights(train(CONFIG, dataclasses.replace(RECIPE, epochs=1), SOURCE, out), expected)
    assert (out / "metrics.jsonl").read_text() == before
    assert_same_run(out, expected, unbroken)


def test_the_whole_state_is_resumed(fake_step, tmp_path):
    recipe = dataclasses.replace(RECIPE, optimizer=OptimizerConfig(optimizer="muon"))
    states = []
    fake_step(lambda step: {}, after=states.append)
    train(CONFIG, dataclasses.replace(recipe, epochs=1), SOURCE, tmp_path / "run")
    assert [int(state.step) for state in states] == [1, 2]
    model = train(CONFIG, recipe, SOURCE, tmp_path / "run")
    assert [int(state.step) for state in states] == [1, 2, 3, 4, 5, 6]
    assert_same_weights(states[5], jax.tree.map(lambda leaf: np.asarray(leaf) + 4 * np.ones((), leaf.dtype), states[1]))
    assert_same_weights(model.mar, states[5].ema)


# --- Steps -------------------------------------------------------------------------------------------------------


def test_step_by_step(unbroken, programs):
    """The step alone gives what runs give: raw weights, and an EMA that follows its definition."""
    (step,) = (step for (_, recipe), step in programs.items() if recipe.dtype == "float32")
    tx = make_optimizer(RECIPE.optimizer, learning_rate(RECIPE.optimizer, 4, 2, STEPS))
    mesh = Mesh(np.array(jax.devices()[:1]), ("batch",))
    everywhere, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("batch",)))
    state = jax.device_put(init_state(CONFIG, RECIPE, tx), everywhere)
    assert state.step == 0
    ema = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(state.params)]
    assert_same_weights(state.ema, state.params)

    stream = batches(SOURCE, 4, RECIPE.seed, flip=True)
    for expected in lines(unbroken[0]):
        state, metrics = step(state, *jax.device_put(next(stream), split))
        assert {name: float(value) for name, value in metrics.items()}.items() <= expected.items()
        ema = [
            0.9 * old + 0.1 * np.asarray(new, np.float64)
            for old, new in zip(ema, jax.tree.leaves(state.params), strict=True)
        ]
    assert state.step == STEPS
    for leaf, expected in zip(jax.tree.leaves(state.ema), ema, strict=True):
        np.testing.assert_allclose(leaf, expected, rtol=1e-6, atol=1e-7)
    assert_same_weights(state.params, load(unbroken[0] / "raw").mar)
    assert_same_weights(state.ema, unbroken[1].mar)
    assert step._cache_size() == 1, "compiled once for all these steps and for every run before"


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matrices_alone_are_in_the_compute_dtype(dtype, optimizer, monkeypatch):
    """The loss sees kernels of the compute dtype; the state that comes out has the types of the one that went in."""
    seen = {}

    def loss(params, config, target, tokens, labels, draws, *, key):
        assert (key is None) == (dtype == "float32"), "a key exactly where there is dropout"
        flat = jax.tree_util.tree_leaves_with_path(params)
        seen.update((jax.tree_util.keystr(path, simple=True, separator="/"), leaf.dtype) for path, leaf in flat)
        value = sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(params))
        return value, {"mse": value, "vb": value}

    monkeypatch.setattr(objective, "loss", loss)
    target = RECIPE.objective if dtype == "float32" else Objective()
    recipe = dataclasses.replace(RECIPE, dtype=dtype, objective=target, optimizer=OptimizerConfig(optimizer=optimizer))
    schedule = learning_rate(recipe.optimizer, 4, 2, STEPS)
    tx = make_optimizer(recipe.optimizer, schedule)
    state = jax.eval_shape(functools.partial(init_state, CONFIG, recipe, tx))
    step = make_step(CONFIG, recipe, tx, schedule, Mesh(np.array(jax.devices()[:1]), ("batch",)))
    after, metrics = jax.eval_shape(step, state, *next(batches(SOURCE, 4, 0)))
    assert isinstance(after, TrainState)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), after) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), state
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(after)} == {jnp.dtype("int32"), jnp.dtype("float32")}
    assert set(metrics) == {"loss", "mse", "vb", "grad_norm", "lr"}
    kernels = {name for name in seen if name.endswith("/kernel")}
    assert {seen[name] for name in kernels} == {jnp.dtype(dtype)}
    assert {seen[name] for name in seen.keys() - kernels} == {jnp.dtype("float32")}


def test_an_easy_set_is_learnt_on_any_number_of_devices(tmp_path):
    train(CONFIG, EASY_RECIPE, EASY, tmp_path / "one")
    one = lines(tmp_path / "one")
    assert len(one) == 60
    # The other part of the loss has spikes: it weighs small timesteps by thousands.
    first, last = (np.mean([line["mse"] for line in part]) for part in (one[:3], one[-10:]))
    assert 0.9 < first < 1.1 and last < 0.4

    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    child = in_a_child(child_with_four_devices, tmp_path / "four", XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    assert child.stdout == "4\n", child.stderr
    on_four = [line["loss"] for line in lines(tmp_path / "four")]
    np.testing.assert_allclose(on_four, [line["loss"] for line in one[:4]], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("log_every", "seconds"), [(3, [1, 1]), (1, [100, 1, 1, 1, 1, 1])])
def test_speed_leaves_out_the_first_step_where_it_can(log_every, seconds, fake_step, tmp_path, monkeypatch):
    """The clock goes on by 100 s in the step that compiles, by 1 s in each of the others."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    fake_step(lambda step: {}, after=lambda state: now.append(now.pop() + (100 if int(state.step) == 1 else 1)))
    train(CONFIG, dataclasses.replace(RECIPE, log_every=log_every), SOURCE, tmp_path / "run")
    rates = [line["images_per_s"] for line in lines(tmp_path / "run", leave_out=())]
    assert rates == [RECIPE.batch_size / each for each in seconds]


# --- Losses that are not finite ----------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_stops_the_run(unbroken, tmp_path):
    """One image of the third batch has a label that is not in the table, which makes the loss NaN."""
    image = np.random.default_rng([RECIPE.seed, 0]).permutation(10)[9]
    mislabelled = ArraySource(SOURCE.images, SOURCE.labels, SOURCE.class_names)
    mislabelled.labels[image] = 7
    out, recipe = tmp_path / "run", dataclasses.replace(RECIPE, save_every=2, log_every=10)
    with pytest.raises(NonFiniteLossError, match=r"^The loss became nan at step 3; checkpoints of earlier .* are good"):
        train(CONFIG, recipe, mislabelled, out)
    assert checkpoints(out) == [2] and [line["step"] for line in lines(out)] == [2]
    for name in ("ema", "raw"):
        assert load(out / name).config == CONFIG and describe(out / name).provenance["step"] == 2
    # From there the run goes on with the right label, as if nothing had happened.
    assert_same_weights(train(CONFIG, recipe, SOURCE, out), unbroken[1])
    one_by_one = lines(unbroken[0])
    for line, before, at in zip(lines(out), one_by_one[::2], one_by_one[1::2], strict=True):
        assert (line["step"], line["epoch"], line["lr"]) == (at["step"], at["epoch"], at["lr"])
        for name in ("loss", "mse", "vb", "grad_norm"):  # means since the line before
            assert line[name] == pytest.approx((before[name] + at[name]) / 2, rel=1e-6)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"loss": -np.inf, "grad_norm": np.nan}, "The loss became -inf at step 5"),
        ({"grad_norm": np.nan}, "The gradient norm became nan at step 5"),
    ],
)
def test_no_checkpoint_after_values_that_are_not_finite(metrics, message, fake_step, tmp_path):
    fake_step(lambda step: metrics if step >= 5 else {})
    with pytest.raises(NonFiniteLossError, match=message):
        train(CONFIG, dataclasses.replace(RECIPE, log_every=3, save_every=3), SOURCE, tmp_path / "run")
    assert checkpoints(tmp_path / "run") == [3] and [line["step"] for line in lines(tmp_path / "run")] == [3]
    assert describe(tmp_path / "run" / "ema").provenance["step"] == 3


# --- Starting from a model ---------------------------------------------------------------------------------------


def test_init_from_narrow_weights(tmp_path):
    """Master weights are float32 copies, which the first step (its learning rate is 0) leaves as they are."""
    given = random_model(CONFIG, jnp.bfloat16)
    before = jax.tree.map(np.array, given.mar)
    model = train(CONFIG, dataclasses.replace(RECIPE, epochs=0.4), SOURCE, tmp_path / "run", init_from=given)
    expected = jax.tree.map(np.float32, before)
    assert_same_weights(load(tmp_path / "run" / "raw").mar, expected)
    for leaf, other in zip(jax.tree.leaves(model.mar), jax.tree.leaves(expected), strict=True):
        assert leaf.dtype == np.float32
        np.testing.assert_allclose(leaf, other, rtol=1e-6)
    assert_same_weights(given.mar, before)


# --- Refusals: before anything is written ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"img_size": 16}, r"The data's images are \(8, 8, 1\), the model expects \(16, 16, 1\)"),
        ({"vae_embed_dim": 3}, r"The data's images are \(8, 8, 1\), the model expects \(8, 8, 3\)"),
        ({"class_num": 2}, "The data has 3 classes, the model class_num=2"),
    ],
)
def test_data_that_do_not_fit_are_refused(config, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train(dataclasses.replace(CONFIG, **config), RECIPE, SOURCE, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_latent_models_are_refused(tmp_path):
    with pytest.raises(ValueError, match="Training a latent model needs cached latents"):
        train(get_preset("mar_base"), RECIPE, SOURCE, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_batch_must_divide_over_the_devices(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: 3 * jax.devices()[:1])
    with pytest.raises(ValueError, match="batch_size=4 must be a multiple of the 3 local devices"):
        train(CONFIG, RECIPE, SOURCE, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("change", [{"buffer_size": 3}, {"encoder_depth": 2}, {"diffloss_w": 16}])
def test_init_from_another_model_is_refused(change, tmp_path):
    ((name, value),) = change.items()
    other = random_model(dataclasses.replace(CONFIG, **change))
    with pytest.raises(ValueError, match=rf"init_from is another model \(MARConfig.*{name}={value}.*{name}="):
        train(CONFIG, RECIPE, SOURCE, tmp_path / "run", init_from=other)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epochs": 0.0}, "epochs=0.0 must be a positive finite number"),
        ({"epochs": float("inf")}, "epochs=inf must be a positive finite number"),
        ({"epochs": "3"}, "epochs='3' must be a positive finite number"),
        ({"batch_size": 0}, "batch_size=0 must be an integer of at least 1"),
        ({"batch_size": 32.0}, "batch_size=32.0 must be an integer of at least 1"),
        ({"log_every": 0}, "log_every=0 must be an integer of at least 1"),
        ({"save_every": -1}, "save_every=-1 must be an integer of at least 1"),
        ({"seed": -1}, "seed=-1 must be an integer of at least 0"),
        ({"flip": "no"}, "flip='no' must be True or False"),
        ({"objective": None}, "objective=None must be of type Objective"),
        ({"ema_rate": 1.0}, r"ema_rate=1.0 must lie in \[0, 1\)"),
        ({"ema_rate": float("nan")}, r"ema_rate=nan must lie in \[0, 1\)"),
        ({"dtype": "float16"}, "dtype='float16' must be one of float32, bfloat16"),
    ],
)
def test_bad_recipes(values, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**values)


def test_steps_of_epochs():
    recipe = TrainConfig(batch_size=64)
    assert [recipe.steps(epochs, 1000) for epochs in (1, 2, 0.5, 0.001)] == [16, 31, 8, 1]
