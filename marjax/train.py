"""Training: the step, its state, and the loop with exact resume.

    1. batch k is a function of (seed, k) alone, and so is everything drawn in step k
    2. a step is one jitted program: draws, loss and gradients on each device's share of the batch, their mean over
       devices, optimizer, EMA
    3. the state is checkpointed by step number, so a killed and resumed run repeats the unbroken one
    4. a non-finite loss or gradient stops the run before it can reach a checkpoint

What a run leaves on disk is the business of `marjax/run_dir.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import numbers
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax import shard_map
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from marjax import checkpoint, codec, data, mar, objective, optimizer, run_dir
from marjax.config import MARConfig
from marjax.objective import Draws, Objective
from marjax.optimizer import OptimizerConfig
from marjax.run_dir import Run
from marjax.types import DTYPES, Array, MARParams, PyTree, cast_matrices


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train; the defaults are the reference's published recipe.

    Attributes:
        epochs: passes over the data; fractions are allowed.
        batch_size: images per step over all devices.
        seed: seeds initialisation, data order and every draw.
        ema_rate: decay of the exponential moving average of the weights, in [0, 1).
        dtype: compute dtype of matrix products, "float32" or "bfloat16"; master weights are float32.
        flip: mirror half of the images.
        log_every: steps between lines of `metrics.jsonl`.
        save_every: steps between checkpoints.
        objective: constants of the loss.
        optimizer: constants of the optimizer.
    """

    epochs: float = 400.0
    batch_size: int = 2048
    seed: int = 0
    ema_rate: float = 0.9999
    dtype: str = "bfloat16"
    flip: bool = True
    log_every: int = 50
    save_every: int = 1000
    objective: Objective = Objective()
    optimizer: OptimizerConfig = OptimizerConfig()

    def __post_init__(self):
        if not (isinstance(self.epochs, numbers.Real) and math.isfinite(self.epochs) and self.epochs > 0):
            raise ValueError(f"epochs={self.epochs!r} must be a positive finite number.")
        for name, low in (("batch_size", 1), ("log_every", 1), ("save_every", 1), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ValueError(f"{name}={value!r} must be an integer of at least {low}.")
        if not isinstance(self.flip, bool):
            raise ValueError(f"flip={self.flip!r} must be True or False.")
        for name, kind in (("objective", Objective), ("optimizer", OptimizerConfig)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name}={getattr(self, name)!r} must be of type {kind.__name__}.")
        if not 0.0 <= self.ema_rate < 1.0:
            raise ValueError(f"ema_rate={self.ema_rate} must lie in [0, 1).")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} must be one of {', '.join(DTYPES)}.")

    def steps(self, epochs: float, num_images: int) -> int:
        """Steps in so many passes over the data."""
        return max(1, round(epochs * num_images / self.batch_size))


@struct.dataclass
class TrainState:
    """Everything a run needs to go on.

    Attributes:
        step: steps taken, int32 scalar.
        params: `mar.init`'s tree, float32.
        ema: its exponential moving average.
        opt_state: the optimizer's state.
    """

    step: Array
    params: PyTree
    ema: PyTree
    opt_state: PyTree


class NonFiniteLossError(RuntimeError):
    """The loss or its gradient became NaN or infinite; checkpoints of earlier steps are still good."""


def init_state(config: MARConfig, train_config: TrainConfig, tx: optax.GradientTransformation) -> TrainState:
    """A fresh state."""
    params = jax.jit(functools.partial(mar.init, config))(jax.random.key(train_config.seed))
    # The EMA has buffers of its own: the step donates its state.
    return TrainState(
        step=jnp.int32(0), params=params, ema=jax.tree.map(jnp.copy, params), opt_state=jax.jit(tx.init)(params)
    )


def make_step(
    config: MARConfig, train_config: TrainConfig, tx: optax.GradientTransformation, schedule: optax.Schedule, mesh: Mesh
) -> Callable[[TrainState, Array, Array], tuple[TrainState, dict[str, Array]]]:
    """The jitted training step: (state, images uint8 [B, H, W, C], labels [B]) -> (state, metrics).

    The batch is split over the mesh's one axis, "batch". Draws are made for the whole batch first, so that the loss
    does not depend on the number of devices (dropout masks do).
    """
    dtype, target = DTYPES[train_config.dtype], train_config.objective
    dropout = max(target.attn_dropout, target.proj_dropout) > 0.0
    split, rows = PartitionSpec("batch"), PartitionSpec(None, "batch")
    draws_spec = Draws(order=split, num_known=PartitionSpec(), t=rows, noise=rows, drop_label=split)

    def gradients(params: PyTree, tokens: Array, labels: Array, draws: Draws, key: Array):
        key = jax.random.fold_in(key, jax.lax.axis_index("batch")) if dropout else None

        def compute(params: PyTree):
            cast = cast_matrices(params, dtype)
            return objective.loss(cast, config, target, tokens, labels, draws, key=key)

        (value, parts), grads = jax.value_and_grad(compute, has_aux=True)(params)
        return jax.lax.pmean(({"loss": value, **parts}, grads), "batch")

    sharded = shard_map(
        gradients,
        mesh=mesh,
        in_specs=(PartitionSpec(), split, split, draws_spec, PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, images: Array, labels: Array) -> tuple[TrainState, dict[str, Array]]:
        k_draw, k_dropout = jax.random.split(jax.random.fold_in(jax.random.key(train_config.seed), state.step))
        draws = objective.draw(target, config, k_draw, images.shape[0])
        tokens = codec.images_to_tokens(config, images)
        metrics, grads = sharded(state.params, tokens, labels, draws, k_dropout)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        rate = train_config.ema_rate
        ema = jax.tree.map(lambda old, new: rate * old + (1.0 - rate) * new, state.ema, params)
        metrics |= {"grad_norm": optax.tree.norm(grads), "lr": schedule(state.step)}
        return TrainState(step=state.step + 1, params=params, ema=ema, opt_state=opt_state), metrics

    return step


def train(
    config: MARConfig,
    train_config: TrainConfig,
    source: data.ImageSource,
    out: str | Path,
    *,
    init_from: MARParams | None = None,
    provenance: dict[str, Any] | None = None,
    progress: Callable[[dict[str, float]], None] | None = None,
) -> MARParams:
    """Trains a model, or goes on with the run in `out`.

    Args:
        config: the model.
        train_config: the recipe. On resuming, everything but `epochs`, `log_every` and `save_every` must be as before.
            (A cosine schedule spans `epochs`, so there a change of it changes the learning rates.) So must the data
            and `init_from`.
        source: images and labels, see `marjax.data`.
        out: run directory; made if missing.
        init_from: weights to start a fresh run from (parameters and EMA), instead of a random initialisation.
        provenance: facts to store with the models (command, data licence, ...).
        progress: called with the metrics of every logged interval.

    Returns:
        The EMA model.

    Raises:
        ValueError: if data, model and `init_from` do not fit, the batch does not divide over the local devices, or
            `out` holds a run of another model or recipe, or something else.
        NonFiniteLossError: when the loss or its gradient stops being finite; the last checkpoint is kept.
    """
    _check_source(config, source)
    if init_from is not None:
        _check_weights(config, init_from)
    devices = jax.local_devices()
    if train_config.batch_size % len(devices):
        raise ValueError(
            f"batch_size={train_config.batch_size} must be a multiple of the {len(devices)} local devices."
        )
    mesh = Mesh(np.array(devices), ("batch",))
    total = train_config.steps(train_config.epochs, len(source))
    warmup_epochs = train_config.optimizer.warmup_epochs
    warmup = train_config.steps(warmup_epochs, len(source)) if warmup_epochs else 0
    schedule = optimizer.learning_rate(train_config.optimizer, train_config.batch_size, warmup, total)
    tx = optimizer.make_optimizer(train_config.optimizer, schedule)

    out = Path(out)
    document = _document(config, train_config, source, init_from)
    # What runs of versions that did not record a value had.
    run_dir.check(out, document, _document(MARConfig(), TrainConfig(), source, None))
    state = init_state(config, train_config, tx)
    if init_from is not None:
        state = state.replace(params=_masters(init_from), ema=_masters(init_from))
    facts = {**(provenance or {}), "train_config": dataclasses.asdict(train_config), "num_images": len(source)}
    with run_dir.open_run(out, document) as run:
        state = jax.device_put(run.restore(state), NamedSharding(mesh, PartitionSpec()))
        step_fn = make_step(config, train_config, tx, schedule, mesh)
        batch_sharding = NamedSharding(mesh, PartitionSpec("batch"))
        start = int(state.step)
        stream = data.batches(source, train_config.batch_size, train_config.seed, start, flip=train_config.flip)
        log = _Log(run, start, train_config, len(source), total, progress)
        for index in range(start, total):
            images, labels = (jax.device_put(part, batch_sharding) for part in next(stream))
            state, metrics = step_fn(state, images, labels)
            last = index + 1 == total
            log.add(index + 1, metrics, flush=last or (index + 1) % train_config.save_every == 0)
            if last or (index + 1) % train_config.save_every == 0:
                run.save(index + 1, state)
                model = _export(run, config, state, facts)
        if start >= total:
            model = _export(run, config, state, facts)
    return model


def _export(run: Run, config: MARConfig, state: TrainState, facts: dict[str, Any]) -> MARParams:
    models = {}
    for name, tree in zip(checkpoint.RUN_MODELS, (state.ema, state.params), strict=True):
        # Copies: the state's own buffers are donated to the next step.
        model = MARParams(mar=jax.tree.map(jnp.copy, tree), vae=None, config=config)
        run.export(name, model, {**facts, "weights": name, "step": int(state.step)})
        models[name] = model
    return models["ema"]


def _document(
    config: MARConfig, train_config: TrainConfig, source: data.ImageSource, init_from: MARParams | None
) -> dict[str, Any]:
    """What must not change while a run goes on, as it reads from `config.json`."""
    free = ("epochs", "log_every", "save_every")
    recipe = {k: v for k, v in dataclasses.asdict(train_config).items() if k not in free}
    facts = {"num_images": len(source), "class_names": source.class_names}
    start = {"init_from": None if init_from is None else checkpoint.fingerprint(init_from)}
    return json.loads(json.dumps({"model": config.to_dict(), "train": recipe, "data": facts, "start": start}))


def _masters(params: MARParams) -> PyTree:
    """A float32 copy of a model's weights."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32, copy=True), params.mar)


def _check_weights(config: MARConfig, params: MARParams) -> None:
    template = jax.eval_shape(functools.partial(mar.init, config), jax.random.key(0))
    if jax.tree.map(jnp.shape, params.mar) != jax.tree.map(jnp.shape, template):
        raise ValueError(f"init_from is another model ({params.config}), expected the shapes of {config}.")


def _check_source(config: MARConfig, source: data.ImageSource) -> None:
    if config.vae is not None:
        raise ValueError("Training a latent model needs cached latents; only pixel-space models train on images.")
    if source.num_classes > config.class_num:
        raise ValueError(f"The data has {source.num_classes} classes, the model class_num={config.class_num}.")
    images, _ = source.get(np.arange(1))
    expected = (config.img_size, config.img_size, config.vae_embed_dim)
    if images.shape[1:] != expected:
        raise ValueError(f"The data's images are {images.shape[1:]}, the model expects {expected}.")


class _Log:
    """Collects metrics between log lines; stops the run when the loss or its gradient is not finite."""

    def __init__(
        self,
        run: Run,
        start: int,
        config: TrainConfig,
        num_images: int,
        total: int,
        progress: Callable[[dict[str, float]], None] | None,
    ):
        self.run, self.config, self.num_images, self.total = run, config, num_images, total
        self.progress = progress
        self.pending: list[dict[str, Array]] = []
        self.timed, self.since = 0, time.monotonic()  # steps since then
        self.compiles = True
        run.drop_metrics_after(start)

    def add(self, step: int, metrics: dict[str, Array], *, flush: bool) -> None:
        self.pending.append(metrics)
        self.timed += 1
        due = flush or step % self.config.log_every == 0
        if self.compiles and not due:  # the first step, without which its interval is timed
            jax.block_until_ready(metrics)
            self.timed, self.since = 0, time.monotonic()
        self.compiles = False
        if not due:
            return
        fetched = jax.device_get(self.pending)
        seconds, now = time.monotonic() - self.since, time.monotonic()
        for at, values in enumerate(fetched, start=step - len(fetched) + 1):
            # A gradient that is not finite ruins the weights, also where the loss still is.
            for name, what in (("loss", "loss"), ("grad_norm", "gradient norm")):
                if not math.isfinite(values[name]):
                    raise NonFiniteLossError(
                        f"The {what} became {values[name]} at step {at}; checkpoints of earlier steps in "
                        f"{self.run.path} are good. Lower the learning rate or use dtype float32, in a new run."
                    )
        means = {name: float(np.mean([m[name] for m in fetched])) for name in fetched[0]}
        images = step * self.config.batch_size
        rate = self.timed * self.config.batch_size / seconds
        line = {
            **{"step": step, "epoch": images / self.num_images, **means, "lr": float(fetched[-1]["lr"])},
            **{"images_per_s": rate, "eta_s": (self.total - step) * self.config.batch_size / rate},
        }
        self.run.write_metrics(line)
        if self.progress is not None:
            self.progress(line)
        self.pending, self.timed, self.since = [], 0, now
