"""Sampling: check the arguments, plan, run the decode loop on every device, turn tokens into images.

    labels, indices ──> batches of one static shape ──> shard_map(decode) ──> latents ──> codec ──> images

Image j of a call is a function of (rng, indices[j], label) and the sampling options: neither the batch it is in nor
the number of devices matters, beyond float32 rounding.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import shard_map
from jax.sharding import Mesh, PartitionSpec

from marjax import codec, decode, diffusion, mar
from marjax.accel import Accel, resolve
from marjax.config import CFG_SCHEDULES, MARConfig
from marjax.schedule import Cost, Plan, Rows, Segment, make_plan
from marjax.types import DTYPES, Array, MARParams, PyTree, cast_matrices

DEFAULT_BATCH_SIZE = 64
DEFAULT_NUM_ITER = 64


@dataclasses.dataclass(frozen=True)
class _Static:
    """Everything of a sampling call that is fixed in the compiled program."""

    config: MARConfig
    segments: tuple[Segment, ...]
    accel: Accel
    guided: bool
    cfg_schedule: str
    num_sampling_steps: str
    dtype: str
    devices: tuple[jax.Device, ...]


@struct.dataclass
class _Images:
    """What determines each image, beside the options; arrays of length B, or None.

    Attributes:
        indices: [B] int32.
        labels: [B] int32, or None for unconditional images.
        order: [B, S] int32, or None for random orders.
        noise: [B, S, T + 1, D], or None for fresh noise.
    """

    indices: Array
    labels: Array | None
    order: Array | None
    noise: Array | None

    def take(self, select: np.ndarray) -> _Images:
        """Some of the images."""
        return jax.tree.map(lambda part: part[select], self)


def sample(params: MARParams, rng: Array, labels: Any, **options) -> Array:
    """Generates images.

    Args:
        params: the model.
        rng: a JAX PRNG key.
        labels: [B] class indices in [0, class_num), or None for unconditional images.
        **options: as for `sample_latents`.

    Returns:
        [B, H, W, C] float32 images in [0, 1].

    Raises:
        ValueError, TypeError: as `sample_latents`; also if a latent model comes without its autoencoder.
    """
    if params.config.vae is not None and params.vae is None:
        raise ValueError("This model generates latents and carries no autoencoder; use sample_latents.")
    latents = sample_latents(params, rng, labels, **options)
    images = codec.latents_to_images(params.config, params.vae, latents)
    _check_finite("images", images, "float32")
    return images


def sample_latents(
    params: MARParams,
    rng: Array,
    labels: Any,
    *,
    accel: str | Accel = "none",
    num_iter: int | None = None,
    cfg: float | Array | None = None,
    cfg_schedule: str | None = None,
    temperature: float | Array | None = None,
    num_sampling_steps: int | str | None = None,
    dtype: str | None = None,
    order: Any = "random",
    noise: Any = None,
    batch_size: int | None = None,
    indices: Any = None,
    progress: Callable[[int], None] | None = None,
) -> Array:
    """Generates latents (reference `MAR.sample_tokens`).

    A change of seed, labels, cfg (other than to or from 1.0) or temperature does not recompile. The function also
    works inside a user's own `jax.jit`, with traced labels; what depends on traced values is then not checked, and a
    label out of range gives NaN. The batch is split over the devices that hold the weights, or over all local devices
    where the weights were not put anywhere in particular.

    Args:
        params: the model.
        rng: a JAX PRNG key.
        labels: [B] class indices in [0, class_num), or None for unconditional images.
        accel: name of an acceleration, or an `Accel`.
        num_iter: decode steps, in [1, S]. None: 64, or S if that is less.
        cfg: guidance scale, finite and >= 0; 1.0 is no guidance and half the work. None: the model's default (1.0
            without labels).
        cfg_schedule: "linear" (from about 1 to `cfg` over the decode) or "constant". None: the model's default.
        temperature: scale of the noise added while sampling a token, finite and >= 0. None: the model's default.
        num_sampling_steps: diffusion steps per token: 100, "100", "a,b,c" or "ddimN". None: the model's default.
        dtype: compute dtype, "float32" or "bfloat16". None: bfloat16 on accelerators, float32 on CPU.
        order: "random", or [S] or [B, S] permutations: image positions (row-major) in the order of generation.
        noise: None, or a recorded [B, S, T + 1, D] array in generation order (initial noise first, then the draw of
            each diffusion step from the last to the first).
        batch_size: images computed at once (default: all, at most 64); rounded up to fill the devices. With
            `labels=None` and no `indices`, the number of images.
        indices: [B] non-negative integers that name the images: together with `rng` they determine orders and
            noise. Default 0..B-1.
        progress: called after each batch with the number of images done so far (inside a jit, while tracing).

    Returns:
        [B, h, w, c] float32 latents.

    Raises:
        ValueError: if an argument is out of range or shapes disagree, or if the weights give non-finite latents.
        TypeError: if labels or indices are not integers.
    """
    config = params.config
    images = _check_images(config, labels, indices, order, noise, batch_size)
    cfg, guided = _check_cfg(config, cfg, images.labels is not None)
    temperature = _check_scale("temperature", config.temperature if temperature is None else temperature)
    cfg_schedule = config.cfg_schedule if cfg_schedule is None else cfg_schedule
    if cfg_schedule not in CFG_SCHEDULES:
        raise ValueError(f"cfg_schedule={cfg_schedule!r} must be one of {', '.join(CFG_SCHEDULES)}.")
    steps = config.num_sampling_steps if num_sampling_steps is None else str(num_sampling_steps)
    num_steps = diffusion.noise_schedule(steps).num_steps
    expected = (len(images.indices), config.seq_len, num_steps + 1, config.token_dim)
    if images.noise is not None and images.noise.shape != expected:
        raise ValueError(f"noise has shape {images.noise.shape}, expected [B, S, T + 1, D] = {expected}.")

    plan = plan_for(config, default_num_iter(config) if num_iter is None else num_iter, num_steps)
    dtype, devices = _check_dtype(dtype), _devices(params)
    static = _Static(config, plan.segments, resolve(accel), guided, cfg_schedule, steps, dtype, devices)
    total = len(images.indices)
    at_once = DEFAULT_BATCH_SIZE if batch_size is None or (labels is None and indices is None) else batch_size
    size = math.ceil(min(total, at_once) / len(devices)) * len(devices)
    latents = []
    for start in range(0, total, size):
        # The last batch is filled up with copies of its last image, so that every batch has one shape.
        select = np.minimum(np.arange(start, start + size), total - 1)
        batch = _run(static, params.mar, rng, images.take(select), plan.rows, cfg, temperature)
        latents.append(batch[: total - start])
        _check_finite("latents", latents[-1], dtype)
        if progress is not None:
            progress(min(start + size, total))
    return jnp.concatenate(latents) if len(latents) > 1 else latents[0]


def plan_for(config: MARConfig, num_iter: int, num_steps: int) -> Plan:
    """The decode plan of a model with `num_steps` diffusion steps per token; its cost counts multiply-adds."""
    if not isinstance(num_iter, int | np.integer) or not 1 <= num_iter <= config.seq_len:
        raise ValueError(f"num_iter={num_iter!r} must be an integer in [1, {config.seq_len}], the sequence length.")
    return make_plan(config.seq_len, int(num_iter), step_cost(config, num_steps))


def step_cost(config: MARConfig, num_steps: int) -> Cost:
    """(K, P) -> multiply-adds per image of one exact decode step with that room."""

    def stack(tokens, dim: int, depth: int):
        tokens = np.asarray(tokens, np.float64)  # the products overflow int32
        return depth * tokens * ((4 + 2 * config.mlp_ratio) * dim**2 + 2 * tokens * dim)

    width = config.diffloss_w
    head = float(num_steps) * (config.diffloss_d * 5 * width**2 + 2 * width**2)
    decoder = stack(config.buffer_size + config.seq_len, config.decoder_embed_dim, config.decoder_depth)

    def cost(known: np.ndarray, predicted: np.ndarray) -> np.ndarray:
        encoder = stack(config.buffer_size + known, config.encoder_embed_dim, config.encoder_depth)
        return encoder + decoder + predicted * head

    return cost


@functools.partial(jax.jit, static_argnums=0)
def _run(
    static: _Static,
    params: PyTree,
    rng: Array,
    images: _Images,
    rows: tuple[Rows, ...],
    cfg: Array,
    temperature: Array,
) -> Array:
    """One batch of latents, split evenly over the devices."""
    generate = functools.partial(_generate, static)
    if len(static.devices) > 1:
        shared, split = PartitionSpec(), PartitionSpec("batch")
        generate = shard_map(
            generate,
            mesh=Mesh(np.array(static.devices), ("batch",)),
            in_specs=(shared, shared, split, shared, shared, shared),
            out_specs=split,
            check_vma=False,
        )
    return codec.unpatchify(generate(params, rng, images, rows, cfg, temperature), static.config.patch_size)


def _generate(
    static: _Static,
    params: PyTree,
    rng: Array,
    images: _Images,
    rows: tuple[Rows, ...],
    cfg: Array,
    temperature: Array,
) -> Array:
    """One device's share of a batch: [B, S, D] tokens in image order."""
    config = static.config
    params = cast_matrices(params, DTYPES[static.dtype])
    noise_schedule = diffusion.noise_schedule(static.num_sampling_steps)
    batch = images.indices.shape[0]
    keys = decode.image_keys(rng, images.indices)
    class_emb = mar.class_embedding(params, images.labels, batch)
    if static.guided:
        class_emb = jnp.concatenate([class_emb, mar.class_embedding(params, None, batch)])
    return decode.decode(
        params,
        config,
        static.segments,
        rows,
        accel=static.accel,
        order=decode.random_order(keys, config.seq_len) if images.order is None else images.order,
        class_emb=class_emb,
        noise=decode.random_noise(keys, noise_schedule.num_steps, config.token_dim)
        if images.noise is None
        else decode.recorded_noise(images.noise),
        guidance=(lambda step: step.guidance(cfg, static.cfg_schedule)) if static.guided else None,
        temperature=temperature,
        noise_schedule=noise_schedule,
    )


def _devices(params: MARParams) -> tuple[jax.Device, ...]:
    """Where to compute: where the weights were put, or on all local devices."""
    leaf = jax.tree.leaves(params.mar)[0]
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.committed:
        return tuple(sorted(leaf.sharding.addressable_devices, key=lambda device: device.id))
    return tuple(jax.local_devices())


def _check_images(
    config: MARConfig, labels: Any, indices: Any, order: Any, noise: Any, batch_size: int | None
) -> _Images:
    if batch_size is not None and (not isinstance(batch_size, int | np.integer) or batch_size < 1):
        raise ValueError(f"batch_size={batch_size!r} must be a positive integer.")
    if labels is not None:
        labels = _check_range("labels", _integers("labels", labels), config.class_num)
    if indices is not None:
        indices = _check_range("indices", _integers("indices", indices), 2**31)
    if labels is None and indices is None and batch_size is None:
        raise ValueError("labels=None needs batch_size (how many images) or indices.")
    total = len(labels) if labels is not None else len(indices) if indices is not None else batch_size
    if indices is None:
        indices = np.arange(total, dtype=np.int32)
    if len(indices) != total:
        raise ValueError(f"indices has {len(indices)} entries for {total} labels; give one index per image.")
    return _Images(
        labels=labels,
        indices=indices,
        order=_check_order(order, total, config.seq_len),
        noise=None if noise is None else jnp.asarray(noise, jnp.float32),
    )


def _integers(name: str, values: Any) -> Array | np.ndarray:
    """A non-empty 1-D array of integers; numpy unless traced, so that it can be checked under a user's jit too."""
    try:
        array = values if isinstance(values, jax.core.Tracer) else np.asarray(values)
    except ValueError as error:
        raise TypeError(f"{name}={values!r} must be a list of integers.") from error
    if array.ndim != 1 or array.shape[0] == 0:
        raise ValueError(f"{name} must be a non-empty list or 1-D array of integers, got shape {array.shape}.")
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {array.dtype}.")
    return array


def _check_range(name: str, array: Array | np.ndarray, stop: int) -> Array | np.ndarray:
    """The array as int32, checked to lie in [0, stop) unless traced."""
    if not isinstance(array, jax.core.Tracer):
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= stop:
            raise ValueError(f"{name} holds {low if low < 0 else high}; expected 0 to {stop - 1}.")
    return array.astype(np.int32)


def _check_order(order: Any, total: int, seq_len: int) -> Array | None:
    if isinstance(order, str):
        if order != "random":
            raise ValueError(f"order={order!r} must be 'random' or an array of permutations.")
        return None
    order = order if isinstance(order, jax.Array) else np.asarray(order)
    if order.shape not in ((seq_len,), (total, seq_len)) or not jnp.issubdtype(order.dtype, jnp.integer):
        raise ValueError(
            f"order is {order.dtype}{list(order.shape)}; expected integers, [{seq_len}] or [{total}, {seq_len}]."
        )
    if not isinstance(order, jax.core.Tracer):
        wrong = np.flatnonzero((np.sort(np.atleast_2d(order), axis=1) != np.arange(seq_len)).any(axis=1))
        if wrong.size:
            raise ValueError(f"order row {wrong[0]} is not a permutation of 0 to {seq_len - 1}.")
    return jnp.broadcast_to(jnp.asarray(order, jnp.int32), (total, seq_len))


def _check_cfg(config: MARConfig, cfg: float | Array | None, conditional: bool) -> tuple[Array, bool]:
    """The guidance scale, and whether there is any guidance."""
    if not conditional:
        if cfg is not None and (isinstance(cfg, jax.core.Tracer) or float(cfg) != 1.0):
            raise ValueError(f"cfg={cfg} needs labels: unconditional images have nothing to be guided by.")
        return np.float32(1.0), False
    cfg = _check_scale("cfg", config.cfg if cfg is None else cfg)
    return cfg, isinstance(cfg, jax.core.Tracer) or float(cfg) != 1.0


def _check_scale(name: str, value: float | Array) -> Array:
    """A finite float32 scalar >= 0."""
    if not isinstance(value, jax.core.Tracer):
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}={value!r} must be a number.") from error
        # What is finite in float64 may not be in float32.
        if not 0 <= number <= float(np.finfo(np.float32).max):
            raise ValueError(f"{name}={value} must be finite and >= 0.")
    return value if isinstance(value, jax.core.Tracer) else np.float32(number)


def _check_finite(what: str, values: Array, dtype: str) -> None:
    """Refuses NaN and infinite values, unless traced: a picture of them would look like a black one."""
    if not isinstance(values, jax.core.Tracer) and not bool(jnp.isfinite(values).all()):
        raise ValueError(
            f"The model generated non-finite {what}; its weights hold NaN or infinite values, or are too large for "
            f"dtype {dtype}. Check the checkpoint, or use dtype='float32'."
        )


def default_num_iter(config: MARConfig) -> int:
    """The decode steps where none are asked for: 64, or one per token if there are fewer."""
    return min(DEFAULT_NUM_ITER, config.seq_len)


def default_dtype() -> str:
    """The compute dtype where none is asked for: bfloat16 on accelerators, float32 on CPU."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def _check_dtype(dtype: str | None) -> str:
    if dtype is None:
        return default_dtype()
    name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    if name not in DTYPES:
        raise ValueError(f"dtype={dtype!r} must be None or one of {', '.join(DTYPES)}.")
    return name


def label_list(class_names: Sequence[str], class_num: int, text: str) -> list[int]:
    """Labels from a comma-separated list of class names and numbers, or "all".

    Raises:
        ValueError: if an entry is neither; the message lists the names.
    """
    if text.strip() == "all":
        return list(range(class_num))
    lookup = {name.lower(): index for index, name in enumerate(class_names)}
    labels = []
    for entry in (part.strip() for part in text.split(",")):
        label = lookup.get(entry.lower(), int(entry) if entry.isdecimal() else -1)
        if not 0 <= label < class_num:
            names = f" or one of {', '.join(class_names)}" if class_names else ""
            raise ValueError(f"Unknown label {entry!r}; expected a number from 0 to {class_num - 1}{names}.")
        labels.append(label)
    return labels
