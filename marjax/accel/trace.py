"""What a policy did at each step, for people who want to look: `sample(..., return_trace=True)`."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct

from marjax.accel.base import StepInput
from marjax.types import Array

# What happened to a position in the deep decoder layers of a step.
REUSED = 0  # nothing: it lent its cached keys and values
FULL = 1  # computed, as every position at a refresh
GENERATING = 2  # computed: predicted at this step
CACHING = 3  # computed: predicted at the step before
REFRESHING = 4  # computed: chosen by its score


@struct.dataclass
class Trace:
    """Arrays over the steps of a decode.

    Attributes:
        refresh: [steps] bool, True where every cache was refreshed.
        num_known: [steps] int32, tokens known before the step.
        num_predicted: [steps] int32, tokens predicted in it; none in steps that fill up a program of inpainting.
        positions: [steps, halves, B, buffers + S] uint8, buffers first, then tokens in image order (row-major): what a
            step did to the position in the deep decoder layers, by constants of `marjax.accel.trace`: 0 REUSED, 1 FULL
            (a refresh), 2 GENERATING, 3 CACHING (predicted at the step before), 4 REFRESHING (chosen by its score).
            Guided batches without a condition cache have two halves, conditional and unconditional; others one.
    """

    refresh: Array
    num_known: Array
    num_predicted: Array
    positions: Array


def codes(chosen: Array | None, step: StepInput, rows: int) -> Array:
    """[rows, N] uint8 codes of a step in generation order, from the positions that were chosen (None: all)."""
    config = step.config
    total = config.buffer_size + config.seq_len
    if chosen is None:
        return jnp.full((rows, total), FULL, jnp.uint8)
    token = jnp.arange(total) - config.buffer_size
    known, predicted, previous = step.rows.num_known, step.rows.num_predicted, step.rows.num_previous
    code = jnp.full(total, REFRESHING, jnp.uint8)
    code = jnp.where((token >= jnp.maximum(known - previous, 0)) & (token < known), CACHING, code)
    code = jnp.where((token >= known) & (token < known + predicted), GENERATING, code)
    return jnp.where(chosen, code, REUSED).astype(jnp.uint8)


def to_image_order(codes: Array, order: Array, buffers: int) -> Array:
    """[steps, halves x B, buffers + S] in generation order -> [steps, halves, B, buffers + S]; order [B, S]."""
    codes = codes.reshape(codes.shape[0], -1, order.shape[0], codes.shape[-1])
    ranks = jnp.argsort(order, axis=1)[None, None]
    ranks = jnp.broadcast_to(ranks, (*codes.shape[:-1], order.shape[1]))
    tokens = jnp.take_along_axis(codes[..., buffers:], ranks, axis=-1)
    return jnp.concatenate([codes[..., :buffers], tokens], axis=-1)
