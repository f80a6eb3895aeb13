"""Sampling: check the arguments, plan, run the decode loop on every device, turn tokens into images.

    labels, indices ──> batches of one static shape ──> shard_map(decode) ──> latents ──> codec ──> images

Image j of a call is a function of (rng, indices[j], label) and the sampling options: neither the batch it is in nor
the number of devices matters, beyond float32 rounding.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import shard_map
from jax.sharding import Mesh, PartitionSpec

from marjax import arguments, codec, decode, mar
from marjax.accel import Accel, resolve
from marjax.accel.plan import plan_for
from marjax.accel.trace import Trace
from marjax.arguments import Images, Known
from marjax.config import CFG_SCHEDULES, MARConfig
from marjax.noise_schedule import noise_schedule
from marjax.schedule import Rows, Segment
from marjax.types import DTYPES, Array, MARParams, PyTree, cast_matrices


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
    return_trace: bool


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
    check_codec(params, "sample_latents")
    latents, *trace = as_tuple(sample_latents(params, rng, labels, **options))
    images = to_images(params, latents, options.get("dtype"))
    return (images, *trace) if trace else images


def as_tuple(result: Array | tuple[Array, Trace]) -> tuple[Array] | tuple[Array, Trace]:
    """What `sample_latents` returned, without or with a trace, as a tuple."""
    return result if isinstance(result, tuple) else (result,)


def check_codec(params: MARParams, instead: str) -> None:
    """Refuses a model that lacks what turns its latents into images, and names the function to use `instead`."""
    if arguments.check_params(params).config.vae is not None and params.vae is None:
        raise ValueError(f"This model generates latents and carries no autoencoder; use {instead}.")


def to_images(params: MARParams, latents: Array, dtype: str | None) -> Array:
    """[B, h, w, c] latents -> [B, H, W, C] float32 images in [0, 1], decoded in the compute dtype."""
    vae_params = cast_matrices(params.vae, DTYPES[_compute_dtype(dtype, _devices(params.mar, latents))])
    images = codec.latents_to_images(params.config, vae_params, latents)
    arguments.check_finite("images", images, "float32")
    return images


def _compute_dtype(dtype: str | None, devices: tuple[jax.Device, ...]) -> str:
    return arguments.check_dtype(dtype, devices[0].platform if devices else None)


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
    known: Known | None = None,
    progress: Callable[[int], None] | None = None,
    return_trace: bool = False,
) -> Array | tuple[Array, Trace]:
    """Generates latents (reference `MAR.sample_tokens`).

    A change of seed, labels, cfg (other than to or from 1.0) or temperature does not recompile. The function also
    works inside a user's own `jax.jit`, with traced labels; what depends on traced values is then not checked, and a
    label out of range gives NaN.

    The batch is split over the devices that hold the weights, or over all local devices where the weights were not put
    anywhere in particular. Inside a jit or under a mesh of the caller's (`jax.set_mesh`, `jax.shard_map`) placement is
    the caller's; arguments must not be split along Explicit axes of such a mesh.

    Args:
        params: the model.
        rng: a JAX PRNG key.
        labels: [B] class indices in [0, class_num), or None for unconditional images.
        accel: caches that save work between decode steps, and change the result: "none", "lazymar", "marche", a name
            with options ("marche:budget=32,condition=on"; `marjax/accel/options.py` says which), or an `Accel`. Those
            for tokens or guidance cannot be differentiated in reverse mode.
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
            `labels=None` and no `indices` (nor `known`), the number of images.
        indices: [B] non-negative integers that name the images: together with `rng` they determine orders and
            noise. Default 0..B-1.
        known: tokens to keep, from which the others are decoded (see `marjax.inpaint_latents`); not traced.
        progress: called after each batch with the number of images done so far (inside a jit, while tracing).
        return_trace: also return which positions were computed at each step (see `marjax.Trace`); not with images
            that have different numbers of known tokens.

    Returns:
        [B, h, w, c] float32 latents; with `return_trace`, a pair of these and the trace.

    Raises:
        ValueError: if an argument is out of range or shapes disagree, or if the weights give non-finite latents.
        TypeError: if labels or indices are not integers, `rng` is not a key, or `params` is not a model.
    """
    config = arguments.check_params(params).config
    rng = arguments.check_key(rng)
    images = arguments.check_images(config, labels, indices, order, noise, known, batch_size)
    cfg, guided = arguments.check_cfg(config, cfg, images.labels is not None)
    temperature = arguments.check_scale("temperature", config.temperature if temperature is None else temperature)
    cfg_schedule = config.cfg_schedule if cfg_schedule is None else cfg_schedule
    if cfg_schedule not in CFG_SCHEDULES:
        raise ValueError(f"cfg_schedule={cfg_schedule!r} must be one of {', '.join(CFG_SCHEDULES)}.")
    steps = config.num_sampling_steps if num_sampling_steps is None else str(num_sampling_steps)
    num_steps = noise_schedule(steps).num_steps
    expected = (len(images.indices), config.seq_len, num_steps + 1, config.token_dim)
    if images.noise is not None and images.noise.shape != expected:
        raise ValueError(f"noise has shape {images.noise.shape}, expected [B, S, T + 1, D] = {expected}.")

    if not isinstance(return_trace, bool):
        raise TypeError(f"return_trace={return_trace!r} must be True or False.")
    num_iter, accel = arguments.check_num_iter(config, num_iter), resolve(accel)
    devices = _devices(params.mar, (rng, images, cfg, temperature))
    dtype = _compute_dtype(dtype, devices)
    shares = max(1, len(devices))
    # Where nothing else tells how many images there are to be, batch_size does.
    counted = labels is None and indices is None and known is None
    at_once = arguments.DEFAULT_BATCH_SIZE if batch_size is None or counted else batch_size
    groups = _groups(images.known, len(images.indices))
    if return_trace and (len(groups) > 1 or groups[0][0] == config.seq_len):
        raise ValueError("return_trace needs images with equally many known tokens, and something to generate.")
    latents, traces, done = [], [], 0
    for num_known, members in groups:
        if num_known == config.seq_len:
            latents.append(codec.unpatchify(images.known.tokens[members], config.patch_size))
            done += len(members)
            if progress is not None:
                progress(done)
            continue
        plan = plan_for(config, num_iter, num_steps, num_known, accel=accel, guided=guided)
        static = _Static(config, plan.segments, accel, guided, cfg_schedule, steps, dtype, devices, return_trace)
        # Several groups are filled up to powers of two, for the sake of few shapes.
        wanted = len(members) if len(groups) == 1 else 2 ** math.ceil(math.log2(len(members)))
        size = math.ceil(min(wanted, at_once) / shares) * shares
        for start in range(0, len(members), size):
            # The last batch is filled up with copies of its last image, so that every batch has one shape.
            select = members[np.minimum(np.arange(start, start + size), len(members) - 1)]
            batch, trace = _run(static, params.mar, rng, images.take(select), plan.rows, cfg, temperature)
            latents.append(batch[: len(members) - start])
            traces.append(trace)
            arguments.check_finite("latents", latents[-1], dtype)
            done += len(latents[-1])
            if progress is not None:
                progress(done)
    made = latents[0]
    if len(latents) > 1:
        made = jnp.concatenate(latents)[np.argsort(np.concatenate([members for _, members in groups]))]
    if not return_trace:
        return made
    positions = jnp.concatenate([trace.positions for trace in traces], axis=2)[:, :, : len(made)]
    return made, traces[0].replace(positions=positions)


def _groups(known: Known | None, total: int) -> list[tuple[int, np.ndarray]]:
    """Images with equally many known tokens: that number, and their positions in the call."""
    counts = np.zeros(total, int) if known is None else np.sum(~np.asarray(known.unknown), axis=1)
    return [(int(count), np.flatnonzero(counts == count)) for count in np.unique(counts)]


# How a trace lies on the devices: its positions are split over the images.
_TRACE_SPECS = Trace(PartitionSpec(), PartitionSpec(), PartitionSpec(), PartitionSpec(None, None, "batch"))


@functools.partial(jax.jit, static_argnums=0)
def _run(
    static: _Static,
    params: PyTree,
    rng: Array,
    images: Images,
    rows: tuple[Rows, ...],
    cfg: Array,
    temperature: Array,
) -> tuple[Array, Trace | None]:
    """One batch of latents, split evenly over the devices, and its trace if asked for."""
    generate = functools.partial(_generate, static)
    if len(static.devices) > 1:
        shared, split = PartitionSpec(), PartitionSpec("batch")
        generate = shard_map(
            generate,
            mesh=Mesh(np.array(static.devices), ("batch",)),
            in_specs=(shared, shared, split, shared, shared, shared),
            out_specs=(split, _TRACE_SPECS if static.return_trace else None),
            check_vma=False,
        )
    tokens, trace = generate(params, rng, images, rows, cfg, temperature)
    return codec.unpatchify(tokens, static.config.patch_size), trace


def _generate(
    static: _Static,
    params: PyTree,
    rng: Array,
    images: Images,
    rows: tuple[Rows, ...],
    cfg: Array,
    temperature: Array,
) -> tuple[Array, Trace | None]:
    """One device's share of a batch: [B, S, D] tokens in image order, and its trace."""
    config = static.config
    params = cast_matrices(params, DTYPES[static.dtype])
    schedule = noise_schedule(static.num_sampling_steps)
    batch = images.indices.shape[0]
    keys = decode.image_keys(rng, images.indices)
    class_emb = mar.class_embedding(params, images.labels, batch)
    if static.guided:
        class_emb = jnp.concatenate([class_emb, mar.class_embedding(params, None, batch)])
    order = decode.random_order(keys, config.seq_len) if images.order is None else images.order
    if images.known is not None:
        order = decode.known_first(order, images.known.unknown)
    return decode.decode(
        params,
        config,
        static.segments,
        rows,
        accel=static.accel,
        keys=keys,
        order=order,
        known=None if images.known is None else images.known.tokens,
        class_emb=class_emb,
        noise=decode.random_noise(keys, schedule.num_steps, config.token_dim)
        if images.noise is None
        else decode.recorded_noise(images.noise),
        guidance=(lambda step: step.guidance(cfg, static.cfg_schedule)) if static.guided else None,
        temperature=temperature,
        noise_schedule=schedule,
        return_trace=static.return_trace,
    )


def _devices(params: PyTree, others: PyTree) -> tuple[jax.Device, ...]:
    """Over which devices to split a batch: those that hold the weights, or all local ones; none where the caller does.

    Inside a jit the caller does: what it will run on is not known here. So does a mesh in scope.
    """
    leaves = jax.tree.leaves((params, others))
    if any(part is not None for leaf in leaves for part in jax.typeof(leaf).sharding.spec):
        raise ValueError(
            "Arguments are split along Explicit axes of the mesh in scope; make the mesh with Auto axes, or sample "
            "inside jax.shard_map."
        )
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves) or not jax.sharding.get_abstract_mesh().empty:
        return ()
    leaf = leaves[0]
    if isinstance(leaf, jax.Array) and leaf.committed:
        return tuple(sorted(leaf.sharding.addressable_devices, key=lambda device: device.id))
    return tuple(jax.local_devices())
