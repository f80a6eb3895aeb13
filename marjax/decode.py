"""The decode loop, in generation order: one `lax.scan` per segment of the plan, no data-dependent shape.

    1. each image's sequence is permuted once into the order in which its tokens are generated; position embeddings
       follow by one gather
    2. then, for every image at once, tokens known at a step are the prefix [0, n) and tokens predicted at it are
       [n, n + p), with n and p from the plan
    3. a step: the token policy computes the decoder's output for the predicted tokens, the diffusion head samples
       them, and they are written behind the prefix
    4. steps of a segment share static sizes; rows of padding are computed and overwritten by the steps that follow
    5. the inverse permutation is applied once, at the end
    6. inpainting is the same loop: known tokens come first in the order, and the plan starts behind them

The token buffer is S + max P long, because a slice update that would run over the end is moved, not cut.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from marjax import diffusion, diffusion_head, mar
from marjax.accel import transformer
from marjax.accel.base import Accel, StepInput
from marjax.accel.head import HeadInput, steps_at_once
from marjax.accel.trace import Trace
from marjax.accel.trace import to_image_order as trace_in_image_order
from marjax.config import MARConfig
from marjax.layers import dense
from marjax.noise_schedule import NoiseSchedule
from marjax.schedule import Rows, Segment
from marjax.types import Array, PyTree

Noise = Callable[[Array, int], Array]


@struct.dataclass
class DecodeState:
    """What the loop carries.

    Attributes:
        tokens: [B, S + max P, D] float32, in generation order.
        caches: those of encoder and decoder.
    """

    tokens: Array
    caches: transformer.Caches


def decode(
    params: PyTree,
    config: MARConfig,
    segments: tuple[Segment, ...],
    rows: tuple[Rows, ...],
    *,
    accel: Accel,
    keys: Array,
    order: Array,
    known: Array | None = None,
    class_emb: Array,
    noise: Noise,
    guidance: Callable[[Rows], Array] | None,
    temperature: float | Array,
    noise_schedule: NoiseSchedule,
    return_trace: bool = False,
) -> tuple[Array, Trace | None]:
    """Generates the tokens of a batch.

    Args:
        params: `mar.init`'s tree, kernels in the compute dtype.
        config: the model's configuration.
        segments: the plan's static sizes.
        rows: the plan's per-step numbers, one entry per segment.
        accel: the cache policies.
        keys: [B] keys of the images, for policies that draw.
        order: [B, S] int32, image position of each token in generation order.
        known: None, or [B, S, D] float32 tokens in image order, of which those that come first in `order` are given;
            the others must be finite.
        class_emb: [B, E]; guided, [2 B, E]: conditional rows, then unconditional ones.
        noise: (first generation index, count P) -> [T + 1, B * P, D] standard normal for those tokens.
        guidance: per-step rows -> guidance scale; None without guidance.
        temperature: see `diffusion.sample`.
        noise_schedule: the diffusion steps of the head.
        return_trace: also tell what was computed at each step.

    Returns:
        [B, S, D] float32 tokens in image order, and the trace or None.
    """
    batch, seq_len = order.shape
    positions = mar.gather_positions(params, config, order)
    head = diffusion_head.unstack(params["diffloss"])
    time = diffusion_head.time_embedding(head, jnp.asarray(noise_schedule.timestep_map))  # [T, W]

    @jax.named_scope("head")
    def sample_tokens(z: Array, step: Rows, num_predicted: int) -> Array:
        """Z [R, P, E] -> tokens [B, P, D]."""
        cond = dense(head["cond_embed"], z.reshape(-1, z.shape[-1]))
        num_steps = noise_schedule.num_steps

        def denoise(cache: PyTree, x: Array, row: Array, prepared: PyTree) -> tuple[PyTree, Array, Array]:
            evaluation = HeadInput(head, x, time[row], cond, row, prepared, num_steps)
            cache, eps_c, eps_u, v = accel.head.apply(cache, evaluation)
            # Only the conditional half's variance is ever used: both halves go on from its sample.
            return cache, eps_c if eps_u is None else eps_u + guidance(step) * (eps_c - eps_u), v

        tokens = diffusion.sample(
            denoise,
            noise(step.num_known, num_predicted),
            noise_schedule,
            temperature=temperature,
            clip_denoised=config.clip_denoised,
            cache=accel.head.init(head, batch * num_predicted, guided=guidance is not None),
            prepare=lambda rows: accel.head.prepare(head, time[rows], cond, batch * num_predicted),
            at_once=steps_at_once(num_steps, cond.shape[0]),
        )
        return tokens.reshape(batch, num_predicted, -1)

    def make_step(segment: Segment):
        def step(state: DecodeState, step_rows: Rows) -> tuple[DecodeState, Array | None]:
            view = StepInput(
                params=params,
                tokens=state.tokens,
                class_emb=class_emb,
                positions=positions,
                rows=step_rows,
                keys=keys,
                config=config,
                segment=segment,
            )
            caches, output = transformer.compute(accel, state.caches, view, trace=return_trace)
            z = mar.condition(params, output.x, view.predicted(positions.diffusion))
            new = sample_tokens(z, step_rows, segment.predicted)
            tokens = lax.dynamic_update_slice_in_dim(state.tokens, new, step_rows.num_known, axis=1)
            return DecodeState(tokens=tokens, caches=caches), output.codes

        return step

    tokens = jnp.zeros((batch, seq_len + max(segment.predicted for segment in segments), config.token_dim), jnp.float32)
    if known is not None:
        tokens = tokens.at[:, :seq_len].set(jnp.take_along_axis(known, order[..., None], axis=1))
    dtype = params["z_proj"]["kernel"].dtype
    caches = transformer.init(accel, config, segments, batch, guided=guidance is not None, dtype=dtype)
    state, codes = DecodeState(tokens=tokens, caches=caches), []
    for segment, segment_rows in zip(segments, rows, strict=True):
        state, segment_codes = lax.scan(make_step(segment), state, segment_rows)
        codes.append(segment_codes)
    trace = None
    if return_trace:
        steps = jax.tree.map(lambda *parts: jnp.concatenate(parts), *rows)
        trace = Trace(
            refresh=steps.refresh,
            num_known=steps.num_known,
            num_predicted=steps.num_predicted,
            positions=trace_in_image_order(jnp.concatenate(codes), order, config.buffer_size),
        )
    return to_image_order(state.tokens[:, :seq_len], order), trace


def known_first(order: Array, unknown: Array) -> Array:
    """[B, S] orders, with the known positions first and otherwise as they were; unknown [B, S], True: to generate."""
    ranks = jnp.argsort(jnp.take_along_axis(unknown, order, axis=1), axis=1, stable=True)
    return jnp.take_along_axis(order, ranks, axis=1)


def to_image_order(tokens: Array, order: Array) -> Array:
    """[B, S, D] tokens in generation order -> image order."""
    return jnp.take_along_axis(tokens, jnp.argsort(order, axis=1)[..., None], axis=1)


def image_keys(words: Array, indices: Array) -> Array:
    """[B] keys, one per image: they depend on the words of a key (uint32, at least 2) and the index alone."""
    # Threefry whatever the key's own implementation: another's draws depend on what else a vmap holds.
    key = jax.random.wrap_key_data(words[:2], impl="threefry2x32")
    return jax.vmap(lambda index: jax.random.fold_in(key, index))(indices)


def random_order(keys: Array, seq_len: int) -> Array:
    """[B] image keys -> [B, S] int32 random generation orders."""
    positions = jnp.arange(seq_len, dtype=jnp.int32)
    return jax.vmap(lambda key: jax.random.permutation(jax.random.fold_in(key, 0), positions))(keys)


def random_noise(keys: Array, num_sampling_steps: int, token_dim: int) -> Noise:
    """Noise that depends on (image key, generation index) alone.

    Args:
        keys: [B] image keys.
        num_sampling_steps: T.
        token_dim: D.
    """

    def token_noise(key: Array, index: Array) -> Array:
        token_key = jax.random.fold_in(jax.random.fold_in(key, 1), index)
        return jax.random.normal(token_key, (num_sampling_steps + 1, token_dim), jnp.float32)

    def noise(start: Array, count: int) -> Array:
        per_image = jax.vmap(jax.vmap(token_noise, (None, 0)), (0, None))
        return _time_major(per_image(keys, start + jnp.arange(count)))

    return noise


def recorded_noise(array: Array) -> Noise:
    """Noise from an array [B, S, T + 1, D] in generation order, to replay another run."""

    def noise(start: Array, count: int) -> Array:
        return _time_major(jnp.take(array, start + jnp.arange(count), axis=1, mode="clip"))

    return noise


def _time_major(noise_bptd: Array) -> Array:
    b, p, t, d = noise_bptd.shape
    return noise_bptd.transpose(2, 0, 1, 3).reshape(t, b * p, d)
