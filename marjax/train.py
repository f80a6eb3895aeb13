"""Training: the loop with exact resume, around the step of `marjax/train_step.py`.

    1. batch k is a function of (seed, k) alone, and so is everything drawn in step k
    2. a step is one jitted program from state and batch to state
    3. the state is checkpointed by step number, so a killed and resumed run repeats the unbroken one
    4. a non-finite loss or gradient stops the run before it can reach a checkpoint

What a run leaves on disk is the business of `marjax/run_dir.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from marjax import checkpoint, data, mar, optimizer, run_dir
from marjax.config import MARConfig
from marjax.latents import LatentSource
from marjax.run_dir import Run
from marjax.train_step import TrainConfig, TrainState, init_state, make_step
from marjax.types import Array, MARParams, PyTree


class NonFiniteLossError(RuntimeError):
    """The loss or its gradient became NaN or infinite; checkpoints of earlier steps are still good."""


def train(
    config: MARConfig,
    train_config: TrainConfig,
    source: data.Source,
    out: str | Path,
    *,
    init_from: MARParams | None = None,
    vae: PyTree | None = None,
    provenance: dict[str, Any] | None = None,
    progress: Callable[[dict[str, float]], None] | None = None,
) -> MARParams:
    """Trains a model, or goes on with the run in `out`.

    Args:
        config: the model.
        train_config: the recipe. On resuming, everything but `epochs`, `log_every` and `save_every` must be as before.
            (A cosine schedule spans `epochs`, so there a change of it changes the learning rates.) So must the data
            and `init_from`.
        source: images and labels, see `marjax.data`; for a latent model a `LatentSource`.
        out: run directory; made if missing.
        init_from: weights to start a fresh run from (parameters and EMA), instead of a random initialisation.
        vae: the autoencoder that the latents come from, to be stored with the models, which then give images.
        provenance: facts to store with the models (command, data licence, ...).
        progress: called with the metrics of every logged interval.

    Returns:
        The EMA model.

    Raises:
        ValueError: if data, model and `init_from` do not fit, the batch does not divide over the local devices, or
            `out` holds a run of another model or recipe, or something else.
        NonFiniteLossError: when the loss or its gradient stops being finite; the last checkpoint is kept.
    """
    _check_source(config, source, vae)
    if init_from is not None:
        _check_weights(config, init_from)
    devices = jax.local_devices()
    parts = train_config.accum_iter
    if train_config.batch_size % (parts * len(devices)):
        raise ValueError(
            f"batch_size={train_config.batch_size} must be a multiple of the {len(devices)} local devices"
            + (f" times accum_iter={parts}." if parts > 1 else ".")
        )
    mesh = Mesh(np.array(devices), ("batch",))
    total = train_config.steps(train_config.epochs, len(source))
    warmup_epochs = train_config.optimizer.warmup_epochs
    warmup = train_config.steps(warmup_epochs, len(source)) if warmup_epochs else 0
    schedule = optimizer.learning_rate(train_config.optimizer, train_config.batch_size, warmup, total)
    tx = optimizer.make_optimizer(train_config.optimizer, schedule)

    out = Path(out)
    document = _document(config, train_config, source, init_from, vae)
    # What runs of versions that did not record a value had.
    run_dir.check(out, document, _document(MARConfig(), TrainConfig(), source, None, None))
    state = init_state(config, train_config, tx)
    if init_from is not None:
        state = state.replace(params=_masters(init_from), ema=_masters(init_from))
    facts = {**(provenance or {}), "train_config": dataclasses.asdict(train_config), "num_images": len(source)}
    with run_dir.open_run(out, document) as run:
        export = functools.partial(_export, run, config, vae, facts)
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
                model = export(state)
        if start >= total:
            model = export(state)
    return model


def _export(run: Run, config: MARConfig, vae: PyTree | None, facts: dict[str, Any], state: TrainState) -> MARParams:
    models = {}
    for name, tree in zip(checkpoint.RUN_MODELS, (state.ema, state.params), strict=True):
        # Copies: the state's own buffers are donated to the next step.
        model = MARParams(mar=jax.tree.map(jnp.copy, tree), vae=vae, config=config)
        run.export(name, model, {**facts, "weights": name, "step": int(state.step)})
        models[name] = model
    return models["ema"]


def _document(
    config: MARConfig,
    train_config: TrainConfig,
    source: data.Source,
    init_from: MARParams | None,
    vae: PyTree | None,
) -> dict[str, Any]:
    """What must not change while a run goes on, as it reads from `config.json`."""
    free = ("epochs", "log_every", "save_every")
    recipe = {k: v for k, v in dataclasses.asdict(train_config).items() if k not in free}
    facts = {"num_images": len(source), "class_names": source.class_names}
    if isinstance(source, LatentSource):
        facts["latents"] = source.fingerprint
    start = {
        "init_from": None if init_from is None else checkpoint.fingerprint(init_from),
        "vae": None if vae is None else checkpoint.tree_fingerprint(vae),
    }
    return json.loads(json.dumps({"model": config.to_dict(), "train": recipe, "data": facts, "start": start}))


def _masters(params: MARParams) -> PyTree:
    """A float32 copy of a model's weights."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32, copy=True), params.mar)


def _check_weights(config: MARConfig, params: MARParams) -> None:
    template = jax.eval_shape(functools.partial(mar.init, config), jax.random.key(0))
    if jax.tree.map(jnp.shape, params.mar) != jax.tree.map(jnp.shape, template):
        raise ValueError(f"init_from is another model ({params.config}), expected the shapes of {config}.")


def _check_source(config: MARConfig, source: data.Source, vae: PyTree | None) -> None:
    is_latent = isinstance(source, LatentSource)
    if config.vae is not None and not is_latent:
        raise ValueError(
            "Training a latent model needs cached latents, which `marjax encode` writes; only pixel-space models train "
            "on images."
        )
    if is_latent and config.vae != source.vae:
        raise ValueError(
            f"The latents were made by the autoencoder {source.vae}, the model's is {config.vae}; give the model that "
            "of its data."
        )
    if vae is not None and not is_latent:
        raise ValueError("An autoencoder is stored with latent models only; leave it out.")
    if vae is not None and checkpoint.tree_fingerprint(vae) != source.header.encoding.vae_fingerprint:
        raise ValueError("The autoencoder to store is not the one that the latents come from; give that one.")
    if source.num_classes > config.class_num:
        raise ValueError(f"The data has {source.num_classes} classes, the model class_num={config.class_num}.")
    images, _ = source.get(np.arange(1))
    # Moments hold mean and log variance of each latent.
    expected = (config.latent_size, config.latent_size, config.vae_embed_dim * (2 if is_latent else 1))
    if images.shape[1:] != expected:
        what = "moments" if is_latent else "images"
        raise ValueError(f"The data's {what} are {images.shape[1:]}, the model expects {expected}.")


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
