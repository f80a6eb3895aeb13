"""The training step: its constants, its state, and one jitted program.

    1. everything random in step k follows from (seed, k), drawn for the whole batch
    2. tokens: of the images themselves, or of latents drawn from their cached distribution
    3. loss and gradients of each device's share of the batch, in `accum_iter` parts one after the other
    4. their mean over parts and devices; optimizer; EMA

A batch is images of a pixel-space model, or moments of a latent one (see `marjax/latents.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import lax, shard_map
from jax.sharding import Mesh, PartitionSpec

from marjax import codec, mar, objective
from marjax.config import MARConfig
from marjax.objective import Draws, Objective
from marjax.optimizer import OptimizerConfig
from marjax.types import DTYPES, Array, PyTree, cast_matrices


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train; the defaults are the reference's published recipe.

    Attributes:
        epochs: passes over the data; fractions are allowed.
        batch_size: images per step over all devices.
        accum_iter: parts that each device computes its share of a step in, one after the other, to save memory; the
            step is the same (but for the dropout masks).
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
    accum_iter: int = 1
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
        for name in ("batch_size", "accum_iter", "log_every", "save_every", "seed"):
            value, low = getattr(self, name), int(name != "seed")
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ValueError(f"{name}={value!r} must be an integer of at least {low}.")
        if self.batch_size % self.accum_iter:
            raise ValueError(f"batch_size={self.batch_size} must be a multiple of accum_iter={self.accum_iter}.")
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

    A latent model takes moments [B, h, w, 2c] in place of images. The batch is split over the mesh's one axis,
    "batch". Draws are made for the whole batch first, so that the loss does not depend on the number of devices, nor
    on `accum_iter` (dropout masks do).
    """
    dtype, target, parts = DTYPES[train_config.dtype], train_config.objective, train_config.accum_iter
    dropout = max(target.attn_dropout, target.proj_dropout) > 0.0
    split, rows = PartitionSpec("batch"), PartitionSpec(None, "batch")
    draws_spec = Draws(order=split, num_known=PartitionSpec(), t=rows, noise=rows, drop_label=split)

    def gradients(params: PyTree, tokens: Array, labels: Array, draws: Draws, key: Array):
        key = jax.random.fold_in(key, lax.axis_index("batch")) if dropout else None

        def compute(params: PyTree, tokens: Array, labels: Array, draws: Draws, key: Array | None):
            cast = cast_matrices(params, dtype)
            value, terms = objective.loss(cast, config, target, tokens, labels, draws, key=key)
            return value, {"loss": value, **terms}

        differentiate = jax.grad(compute, has_aux=True)
        if parts == 1:
            grads, metrics = differentiate(params, tokens, labels, draws, key)
        else:
            grads, metrics = _accumulate(differentiate, parts, params, tokens, labels, draws, key)
        return lax.pmean((metrics, grads), "batch")

    sharded = shard_map(
        gradients,
        mesh=mesh,
        in_specs=(PartitionSpec(), split, split, draws_spec, PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, images: Array, labels: Array) -> tuple[TrainState, dict[str, Array]]:
        k_step = jax.random.fold_in(jax.random.key(train_config.seed), state.step)
        k_draw, k_dropout = jax.random.split(k_step)
        draws = objective.draw(target, config, k_draw, images.shape[0])
        if config.vae is None:
            tokens = codec.images_to_tokens(config, images)
        else:
            # 2 sets this key apart from the two above.
            noise = jax.random.normal(jax.random.fold_in(k_step, 2), (*images.shape[:3], config.vae_embed_dim))
            tokens = codec.moments_to_tokens(config, images, noise)
        metrics, grads = sharded(state.params, tokens, labels, draws, k_dropout)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        rate = train_config.ema_rate
        ema = jax.tree.map(lambda old, new: rate * old + (1.0 - rate) * new, state.ema, params)
        metrics |= {"grad_norm": optax.tree.norm(grads), "lr": schedule(state.step)}
        return TrainState(step=state.step + 1, params=params, ema=ema, opt_state=opt_state), metrics

    return step


def _accumulate(
    differentiate: Callable,
    parts: int,
    params: PyTree,
    tokens: Array,
    labels: Array,
    draws: Draws,
    key: Array | None,
) -> tuple[PyTree, PyTree]:
    """The mean of what `differentiate` gives for each part of the batch.

    Every part has as many masked tokens as the others, since the mask ratio is one draw per batch, so the mean of
    the parts' means over masked tokens is the mean over all of them.
    """

    def split(array: Array, axis: int = 0) -> Array:
        size = array.shape[axis] // parts
        return jnp.moveaxis(array.reshape(*array.shape[:axis], parts, size, *array.shape[axis + 1 :]), axis, 0)

    per_image = {"order": split(draws.order), "drop_label": split(draws.drop_label)}
    per_repetition = {"t": split(draws.t, axis=1), "noise": split(draws.noise, axis=1)}
    batches = (split(tokens), split(labels), {**per_image, **per_repetition})
    keys = None if key is None else jax.random.split(key, parts)

    def add(total: PyTree, part) -> tuple[PyTree, None]:
        (tokens, labels, own), key = part
        result = differentiate(params, tokens, labels, draws.replace(**own), key)
        return jax.tree.map(jnp.add, total, result), None

    zeros = (jax.tree.map(jnp.zeros_like, params), dict.fromkeys(("loss", "mse", "vb"), jnp.float32(0)))
    total, _ = lax.scan(add, zeros, (batches, keys))
    return jax.tree.map(lambda leaf: leaf / parts, total)
