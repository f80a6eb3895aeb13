"""What a cache policy is, and the policy that caches nothing.

A policy is a frozen dataclass with two pure functions: `init` makes its cache (a pytree of arrays, carried through the
decode loop) and `apply` computes one step from it. `decode.py` knows policies by this protocol alone.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax.numpy as jnp
from flax import struct

from marjax import mar
from marjax.config import MARConfig
from marjax.schedule import Rows, Segment
from marjax.types import Array, PyTree


@struct.dataclass
class StepInput:
    """What a policy sees of one decode step. R rows: B images, or 2 B (conditional, then unconditional) if guided.

    Attributes:
        params: `mar.init`'s tree, kernels in the compute dtype.
        tokens: [B, >= S, D] in generation order; tokens from `rows.num_known` on are meaningless.
        class_emb: [R, E].
        positions: position embeddings in generation order.
        rows: this step's numbers.
        config: the model's configuration.
        segment: static sizes.
    """

    params: PyTree
    tokens: Array
    class_emb: Array
    positions: mar.Positions
    rows: Rows
    config: MARConfig = struct.field(pytree_node=False)
    segment: Segment = struct.field(pytree_node=False)

    def predicted(self, x: Array) -> Array:
        """Rows of the tokens predicted now: [.., S, E] in generation order -> [.., P, E].

        Rows beyond the tokens really predicted belong to later tokens, or repeat the last one.
        """
        index = self.rows.num_known + jnp.arange(self.segment.predicted)
        return jnp.take(x, index, axis=1, mode="clip")


class TokenPolicy(Protocol):
    """How encoder and decoder are computed at each step."""

    def init(self, config: MARConfig, num_rows: int, dtype: jnp.dtype) -> PyTree:
        """The cache before the first step; `num_rows` is R, `dtype` the compute dtype."""

    def apply(self, cache: PyTree, step: StepInput) -> tuple[PyTree, Array]:
        """The cache after a step, and the decoder's output [R, P, E] for the tokens predicted now (before its norm)."""


@dataclasses.dataclass(frozen=True)
class ExactTokens:
    """Encoder and decoder in full at every step, as the reference does."""

    def init(self, config: MARConfig, num_rows: int, dtype: jnp.dtype) -> None:
        """No cache."""
        del config, num_rows, dtype

    def apply(self, cache: None, step: StepInput) -> tuple[None, Array]:
        """The whole model on this step's known tokens."""
        config, params, num_known = step.config, step.params, step.rows.num_known
        room = step.segment.known
        positions = step.positions
        x = mar.embed(params, step.tokens[:, :room], step.class_emb, positions.encoder[:, : config.buffer_size + room])
        encoded = mar.encode(params, config, x, num_known)
        x = mar.decode(params, config, mar.decoder_input(params, config, encoded, num_known, positions.decoder))
        return cache, step.predicted(x[:, config.buffer_size :])


@dataclasses.dataclass(frozen=True)
class Accel:
    """An acceleration: one policy per part of the model. The default is exact.

    Attributes:
        tokens: how encoder and decoder are computed.
    """

    tokens: TokenPolicy = ExactTokens()
