"""What an acceleration is: one policy per part of the model, and the policies that cache nothing.

A token policy is a frozen dataclass. `init` makes its cache, a pytree of arrays that the decode loop carries; `full`
computes everything and renews the cache; `cached` computes what it must. Which steps are which is known before tracing
(`refresh`), and so is how many positions a cached step recomputes (`active_counts`). `decode.py` knows policies by this
protocol alone.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from marjax import mar
from marjax.accel import fields
from marjax.accel.cost import decoder_cost, encoder_cost
from marjax.accel.head import ExactHead, HeadPolicy
from marjax.config import MARConfig
from marjax.schedule import Rows, Segment
from marjax.types import Array, PyTree


@struct.dataclass
class StepInput:
    """What a policy sees of one decode step. R rows: B images, or 2 B (conditional, then unconditional) if guided.

    Attributes:
        params: `mar.init`'s tree, kernels in the compute dtype.
        tokens: [B, >= S + Q, D] in generation order; tokens from `rows.num_known` on are meaningless.
        class_emb: [R, E].
        positions: position embeddings in generation order.
        rows: this step's numbers.
        keys: [B] keys of the images, for policies that draw.
        config: the model's configuration.
        segment: static sizes.
        every_token: whether the decoder's output is wanted for all tokens, not only for those predicted now.
    """

    params: PyTree
    tokens: Array
    class_emb: Array
    positions: mar.Positions
    rows: Rows
    keys: Array
    config: MARConfig = struct.field(pytree_node=False)
    segment: Segment = struct.field(pytree_node=False)
    every_token: bool = struct.field(pytree_node=False, default=False)

    def predicted(self, x: Array) -> Array:
        """Rows of the tokens predicted now: [.., S, E] in generation order -> [.., P, E].

        Rows beyond the tokens really predicted belong to later tokens, or repeat the last one.
        """
        return jnp.take(x, self._predicted, axis=1)

    @property
    def _predicted(self) -> Array:
        index = self.rows.num_known + jnp.arange(self.segment.predicted)
        return jnp.minimum(index, self.config.seq_len - 1)

    @property
    def outputs(self) -> Array:
        """[m] positions of the decoder whose output is wanted."""
        tokens = jnp.arange(self.config.seq_len) if self.every_token else self._predicted
        return self.config.buffer_size + tokens

    def encoder_input(self) -> Array:
        """[R, buffers + K, E] of everything known, and padding."""
        room = self.segment.known
        positions = self.positions.encoder[:, : self.config.buffer_size + room]
        return mar.embed(self.params, self.tokens[:, :room], self.class_emb, positions)

    def decoder_input(self) -> Array:
        """[R, N, E] from an encoder run over everything known."""
        num_known = self.rows.num_known
        encoded = mar.encode(self.params, self.config, self.encoder_input(), num_known)
        return mar.decoder_input(self.params, self.config, encoded, num_known, self.positions.decoder)

    def random(self, count: int) -> Array:
        """[R, count] uniform numbers that depend on the image and the step; halves of a guided batch share them."""

        def draw(key: Array) -> Array:
            key = jax.random.fold_in(jax.random.fold_in(key, 2), self.rows.num_known)
            return jax.random.uniform(key, (count,))

        return jnp.tile(jax.vmap(draw)(self.keys), (self.class_emb.shape[0] // self.keys.shape[0], 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refresh:
    """Which decode steps refresh: the first ones, and then every so many.

    Attributes:
        warmup: steps 0 to `warmup` - 1; step 0 always does.
        period: from step `warmup` on every `period`-th; None: none. 1 is exact.
    """

    warmup: int = 0
    period: int | None = None

    def __post_init__(self):
        fields.integer(self, "warmup", at_least=0)
        fields.integer(self, "period", at_least=1, optional=True)

    def steps(self, num_iter: int) -> np.ndarray:
        """[num_iter] bool."""
        step = np.arange(num_iter)
        later = np.zeros(num_iter, bool) if self.period is None else (step - self.warmup) % self.period == 0
        return (step < max(self.warmup, 1)) | (later & (step >= self.warmup))


PUBLISHED_REFRESH = Refresh(warmup=5, period=9)  # of LazyMAR


@runtime_checkable
class TokenPolicy(Protocol):
    """How encoder and decoder are computed at each step.

    Attributes:
        refresh: which steps compute everything; None, for a policy without caches: all.
    """

    refresh: Refresh | None

    def check(self, config: MARConfig) -> None:
        """Raises a ValueError for a model that the policy does not fit."""

    def active_counts(self, config: MARConfig, num_predicted: np.ndarray, num_previous: np.ndarray) -> np.ndarray:
        """[steps] positions that each step recomputes in its deep layers, if it is a cached one."""

    def cached_cost(self, config: MARConfig, known, predicted, previous, active):
        """Multiply-adds of encoder and decoder in a cached step of one row, elementwise over rooms (see `Segment`)."""

    def init(self, config: MARConfig, rows: int, room: int, dtype: jnp.dtype) -> PyTree:
        """The cache before the first step.

        Args:
            config: the model's configuration.
            rows: cached rows: R, or B if the condition cache drops the unconditional ones.
            room: the most tokens that a cached step encodes.
            dtype: the compute dtype.
        """

    def full(self, cache: PyTree, step: StepInput) -> tuple[PyTree, Array]:
        """The cache after a refresh, and the decoder's output [R, m, E] (before its norm) at `step.outputs`."""

    def cached(self, cache: PyTree, step: StepInput) -> tuple[PyTree, Array, Array | None]:
        """A cached step.

        Returns:
            The cache after it; the decoder's output [R, P, E] for the tokens predicted now; and [R, N] bool, True at
            the positions that were computed in the deep layers (None: everywhere).
        """


@dataclasses.dataclass(frozen=True)
class ExactTokens:
    """Encoder and decoder in full at every step, as the reference does."""

    refresh: None = None

    def check(self, config: MARConfig) -> None:
        """Fits every model."""
        del config

    def active_counts(self, config: MARConfig, num_predicted: np.ndarray, num_previous: np.ndarray) -> np.ndarray:
        """Everything."""
        del num_previous
        return np.full(len(num_predicted), config.buffer_size + config.seq_len)

    def cached_cost(self, config: MARConfig, known, predicted, previous, active):
        """That of any step."""
        del previous, active
        return encoder_cost(config, known) + decoder_cost(config, predicted)

    def init(self, config: MARConfig, rows: int, room: int, dtype: jnp.dtype) -> None:
        """No cache."""
        del config, rows, room, dtype

    def full(self, cache: None, step: StepInput) -> tuple[None, Array]:
        """The whole model on this step's known tokens."""
        return cache, mar.decode(step.params, step.config, step.decoder_input(), outputs=step.outputs)

    def cached(self, cache: None, step: StepInput) -> tuple[None, Array, None]:
        """The same."""
        return *self.full(cache, step), None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConditionCache:
    """The condition cache of LazyMAR: at cached steps only the conditional half of a guided batch runs.

    The unconditional output is the conditional one plus their difference at the last refresh. Without guidance there is
    no such half, and the policy does nothing. Memory: S E float32 numbers for each image.

    Attributes:
        refresh: which steps run both halves. None: those at which the token cache refreshes, and without a token cache
            the published ones, the first 5 and then every ninth. With a token cache no others are possible.
    """

    refresh: Refresh | None = None

    def __post_init__(self):
        fields.instance(self, "refresh", Refresh, optional=True)


@dataclasses.dataclass(frozen=True)
class Accel:
    """An acceleration: one policy per part of the model. The default is exact.

    Attributes:
        tokens: how encoder and decoder are computed.
        condition: how the unconditional half of a guided batch is; None: like the conditional one.
        head: how the diffusion head is.
    """

    tokens: TokenPolicy = ExactTokens()
    condition: ConditionCache | None = None
    head: HeadPolicy = ExactHead()

    def __post_init__(self):
        fields.instance(self, "tokens", TokenPolicy)
        fields.instance(self, "condition", ConditionCache, optional=True)
        fields.instance(self, "head", HeadPolicy)
        both = self.tokens.refresh, self.condition and self.condition.refresh
        if None not in both and both[0] != both[1]:
            raise ValueError(
                f"Token and condition cache refresh together, but have refresh={both[0]!r} and {both[1]!r}; leave the "
                "condition cache's out."
            )

    def check(self, config: MARConfig) -> None:
        """Raises a ValueError for a model that a part does not fit."""
        self.tokens.check(config)
        self.head.check(config.diffloss_d)

    def refresh_steps(self, num_iter: int, *, guided: bool) -> np.ndarray:
        """[num_iter] bool: the steps that compute everything."""
        refresh = self.tokens.refresh
        if refresh is None and self.condition is not None and guided:
            refresh = self.condition.refresh or PUBLISHED_REFRESH
        return np.ones(num_iter, bool) if refresh is None else refresh.steps(num_iter)
