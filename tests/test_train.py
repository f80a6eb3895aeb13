"""Training: exact resumption, independence of the device count, what a run leaves on disk, and what it refuses."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from marjax import mar, objective
from marjax.checkpoint import CheckpointError, describe, load, save
from marjax.config import MARConfig, get_preset
from marjax.data import ArraySource, batches
from marjax.objective import Objective
from marjax.optimizer import OptimizerConfig, learning_rate, make_optimizer
from marjax.train import NonFiniteLossError, TrainConfig, TrainState, init_state, make_step, train
from marjax.types import MARParams, cast_matrices

ROOT = Path(__file__).parent.parent
training = importlib.import_module("marjax.train")  # the package's attribute of that name is the function

CONFIG = MARConfig(
    **{"img_size": 8, "vae_stride": 1, "patch_size": 2, "vae_embed_dim": 1, "class_num": 3, "buffer_size": 2},
    **{"encoder_embed_dim": 32, "encoder_depth": 1, "encoder_num_heads": 2, "diffloss_d": 1, "diffloss_w": 32},
    **{"decoder_embed_dim": 32, "decoder_depth": 1, "decoder_num_heads": 2},
)
SOURCE = ArraySource(
    np.random.default_rng(0).integers(0, 256, (10, 8, 8, 1), dtype=np.uint8), np.arange(10) % 3, ("a", "b", "c")
)
STEPS = 6
# Batches straddle epochs, which have 2.5 steps. Dropout, and bfloat16, have a test of their own: they compile slowly.
RECIPE = TrainConfig(
    **{"epochs": 2.4, "batch_size": 4, "seed": 5, "ema_rate": 0.9, "flip": True, "log_every": 1, "save_every": STEPS},
    dtype="float32",
    objective=Objective(attn_dropout=0.0, proj_dropout=0.0),
    optimizer=OptimizerConfig(lr=2e-3, warmup_epochs=0.8),
)
# Black images of one class, white ones of another; 60 steps.
EASY = ArraySource(np.repeat(np.uint8([0, 255]), 4 * 64).reshape(8, 8, 8, 1), np.arange(8) // 4, ("black", "white"))
EASY_RECIPE = dataclasses.replace(RECIPE, epochs=30, save_every=60)
SPEEDS = {"images_per_s", "eta_s"}  # what differs between equal runs


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory):
    """Makes the step once per recipe, for all runs of this process (the dictionary); children find it compiled."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("cache")),
        "jax_persistent_cache_min_compile_time_secs": 0.5,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    steps, states = {}, {}

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


def lines(out, leave_out=SPEEDS):
    read = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in leave_out} for line in read]


def checkpoints(out):
    return sorted(int(path.name) for path in (out / "state").iterdir())


def assert_same_weights(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for leaf, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(leaf, other, strict=True)


def assert_same_run(out, model, unbroken):
    """Bit for bit the unbroken run: every line of its metrics, once, and the weights."""
    expected_out, expected_model, _ = unbroken
    assert lines(out) == lines(expected_out)
    assert_same_weights(model, expected_model)
    assert_same_weights(load(out / "ema"), expected_model)
    assert_same_weights(load(out / "raw"), load(expected_out / "raw"))


def in_a_child(function, *arguments, **env):
    """Runs a function of this file in a Python of its own."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
        **env,
    }
    code = f"import sys, test_train; test_train.{function.__name__}(*sys.argv[1:])"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def child_killed_in_step_five(out):
    def kill(line):
        if line["step"] == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    train(CONFIG, dataclasses.replace(RECIPE, save_every=2), SOURCE, out, progress=kill)


def child_with_four_devices(out):
    train(CONFIG, dataclasses.replace(EASY_RECIPE, epochs=2), EASY, out)
    print(jax.device_count())


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


def random_model(config, dtype=jnp.float32):
    shapes, rng = jax.eval_shape(functools.partial(mar.init, config), jax.random.key(0)), np.random.default_rng(1)
    tree = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.1, leaf.shape), jnp.float32), shapes)
    return MARParams(mar=cast_matrices(tree, dtype), vae=None, config=config)


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
    ("config", "recipe", "changed"),
    [
        ({}, {"ema_rate": 0.99}, "train.ema_rate"),
        ({}, {"dtype": "bfloat16", "seed": 6}, "train.seed, train.dtype"),
        ({}, {"optimizer": OptimizerConfig(lr=1e-3, warmup_epochs=0.8)}, "train.optimizer.lr"),
        (
            {},
            {"objective": dataclasses.replace(RECIPE.objective, label_drop_prob=0.2)},
            "train.objective.label_drop_prob",
        ),
        ({"buffer_size": 3}, {}, "model.buffer_size"),
        ({"cfg": 2.0}, {"flip": False}, "model.cfg, train.flip"),
    ],
)
def test_another_recipe_is_refused(config, recipe, changed, unbroken):
    out = unbroken[0]
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    with pytest.raises(ValueError, match=rf"another configuration \(different: {changed}\); give the same options"):
        train(dataclasses.replace(CONFIG, **config), dataclasses.replace(RECIPE, **recipe), SOURCE, out)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_a_run_of_another_version_is_refused_by_field(tmp_path, unbroken):
    document = json.loads((unbroken[0] / "config.json").read_text())
    document["train"]["momentum"] = document["train"].pop("seed")
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"\(different: train.seed, train.momentum\)"):
        train(CONFIG, RECIPE, SOURCE, tmp_path)


def test_a_run_of_an_earlier_version_goes_on(tmp_path, fake_step):
    """What it did not record had the effect of the defaults."""
    fake_step(lambda step: {})
    train(CONFIG, RECIPE, SOURCE, tmp_path / "run")
    file = tmp_path / "run" / "config.json"
    document = json.loads(file.read_text())
    del document["start"], document["train"]["optimizer"]["eps"], document["train"]["objective"]["mask_ratio_std"]
    file.write_text(json.dumps(document))
    train(CONFIG, RECIPE, SOURCE, tmp_path / "run")
    other = dataclasses.replace(RECIPE, optimizer=dataclasses.replace(RECIPE.optimizer, eps=1e-6))
    with pytest.raises(ValueError, match=r"\(different: train.optimizer.eps\)"):
        train(CONFIG, other, SOURCE, tmp_path / "run")


def test_a_directory_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("all of it")
    save(random_model(CONFIG), tmp_path / "model")  # has a config.json too
    for out, content in ((tmp_path, {"thesis.txt", "model"}), (tmp_path / "model", {"config.json", "params"})):
        with pytest.raises(ValueError, match=f"{out} is not empty and holds no training run; give another output"):
            train(CONFIG, RECIPE, SOURCE, out)
        assert {path.name for path in out.iterdir()} == content


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


@pytest.mark.parametrize("given", [None, 1])
def test_another_start_is_refused(given, tmp_path, fake_step):
    fake_step(lambda step: {})
    run, first = functools.partial(train, CONFIG, RECIPE, SOURCE, tmp_path / "run"), random_model(CONFIG)
    run(init_from=first)
    changed = jax.tree.map(lambda leaf: leaf.at[(0,) * leaf.ndim].add(given or 0), first.mar)
    with pytest.raises(ValueError, match=r"\(different: start.init_from\); give the same options"):
        run(init_from=given and first.replace(mar=changed))
    run(init_from=first)


@pytest.mark.parametrize("change", [{"num_images": 11}, {"class_names": ("a", "b", "d")}])
def test_other_data_are_refused(change, unbroken):
    images, names = change.get("num_images", 10), change.get("class_names", SOURCE.class_names)
    other = ArraySource(np.zeros((images, 8, 8, 1), np.uint8), np.arange(images) % 3, names)
    with pytest.raises(ValueError, match=rf"\(different: data.{next(iter(change))}\); give the same options"):
        train(CONFIG, RECIPE, other, unbroken[0])


def test_what_a_kill_left_in_the_run_is_removed(tmp_path, fake_step):
    fake_step(lambda step: {})
    train(CONFIG, RECIPE, SOURCE, tmp_path / "run")
    kept = {path.name for path in (tmp_path / "run").iterdir()}
    (tmp_path / "run" / ".tmp-0123456789ab" / "params").mkdir(parents=True)
    (tmp_path / "run" / ".tmp-0123456789ac.jsonl").write_text("{}")
    train(CONFIG, RECIPE, SOURCE, tmp_path / "run")
    assert {path.name for path in (tmp_path / "run").iterdir()} == kept


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", b'{"model": ', r"config.json is damaged \(.*\); restore it, or give another output directory"),
        ("config.json", b"\xff\x00", r"config.json is damaged \(.*\); restore it"),
        ("config.json", b"[]", "holds no training run"),
        ("metrics.jsonl", b"\n", r"metrics.jsonl is damaged \(.*\); move it away to go on without it"),
        ("metrics.jsonl", b'{"a": 1}\n', r"metrics.jsonl is damaged \(KeyError\('step'\)\); move it away"),
        ("state/6/default/_METADATA", b"", r"state/6 is damaged \(.*\); remove it to go on from the checkpoint before"),
    ],
)
def test_damaged_runs_are_refused(file, content, message, tmp_path, fake_step):
    fake_step(lambda step: {})
    train(CONFIG, RECIPE, SOURCE, tmp_path / "run")
    (tmp_path / "run" / file).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        train(CONFIG, RECIPE, SOURCE, tmp_path / "run")
    assert "\n" not in str(caught.value)


def test_a_file_in_place_of_the_run(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ValueError, match="run is not a directory; give another output directory"):
        train(CONFIG, RECIPE, SOURCE, tmp_path / "run")


def test_a_run_belongs_to_one_process(tmp_path, fake_step):
    def second(state):
        with pytest.raises(ValueError, match="run is in use by another process; let it end"):
            train(CONFIG, RECIPE, SOURCE, tmp_path / "run")

    fake_step(lambda step: {}, after=second)
    train(CONFIG, dataclasses.replace(RECIPE, epochs=0.4), SOURCE, tmp_path / "run")


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path, fake_step, monkeypatch):
    fake_step(lambda step: {})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: argparse.Namespace(free=1000))
    with pytest.raises(OSError, match=r"Cannot write .*state: the disk is full; free some space and run the same"):
        train(CONFIG, RECIPE, SOURCE, tmp_path / "run")
    assert checkpoints(tmp_path / "run") == []


def test_load_of_a_run_without_a_model(tmp_path):
    (tmp_path / "state").mkdir()
    with pytest.raises(CheckpointError, match=r"a training run without a model yet; wait for its first checkpoint\.$"):
        load(tmp_path)


def test_load_of_a_run_says_what_to_load(unbroken):
    with pytest.raises(CheckpointError, match=r"it is the directory of a training run; give .*unbroken/ema\.$"):
        load(unbroken[0])


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
