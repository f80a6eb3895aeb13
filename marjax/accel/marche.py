"""MARché's active set (arXiv 2506.12035, ECCV 2026; no code is public, so what the paper leaves open is an option).

At a cached step the decoder's first layers run on all tokens. In the last of them, the decision layer, the active set
is chosen: the tokens predicted now (generating), those predicted in the step before (caching), and of the others those
that receive most attention from the generating ones (refreshing). Later layers run on the active set only: its queries
attend to its fresh keys and values and to the cached ones of everything else (two-path attention), and the fresh ones
enter the cache.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from marjax import mar
from marjax.accel import blocks, encoder, fields
from marjax.accel.base import Refresh, StepInput
from marjax.accel.blocks import Active, KeysValues, choose
from marjax.accel.cost import layer_cost
from marjax.accel.encoder import EncoderCache
from marjax.config import MARConfig
from marjax.cpu import from_stack
from marjax.types import Array

PUBLISHED_BUDGET, PUBLISHED_POSITIONS = 64, 320
CHOICES = {
    "select": ("attention", "least_attention", "random"),
    "encoder": ("incremental", "full"),
    "encoder_buffers": ("cached", "recomputed"),
    "buffers": ("scored", "always", "never"),
}


@struct.dataclass
class ActiveCache:
    """What the cached rows keep.

    Attributes:
        encoder: of the incremental encoder; None with a full one.
        deep: keys and values of the decoder layers behind the decision layer.
    """

    encoder: EncoderCache | None
    deep: KeysValues


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActiveTokens:
    """MARché's token cache.

    Memory, for each row (an image; two with guidance and no condition cache), in numbers of the compute dtype: keys and
    values of every decoder layer behind the decision layer, 2 N E; with the incremental encoder also those of every
    encoder layer, 2 (N + Q) E, and (N + Q) E float32 decoder inputs. N positions, E wide, Q tokens predicted at most in
    a step. MAR-B in bfloat16: 23 MB.

    Attributes:
        budget: positions recomputed at a cached step; more where generating and caching tokens are more. None: 64 of
            320, as published, scaled to the model.
        refresh: which steps compute everything.
        decision_layer: the decoder layer, counted from 1, that chooses; at least one must follow.
        select: how refreshing tokens are chosen: "attention" they receive, "least_attention", or "random".
        include_generating: whether the tokens predicted now are active (without, the model collapses).
        include_caching: whether those predicted in the step before are.
        encoder: "incremental" encodes caching tokens only, "full" everything.
        encoder_buffers: "cached", or "recomputed" together with the caching tokens.
        buffers: "scored" lets buffers compete like tokens, "always" and "never" decide beforehand.
        skip_mlp: whether inactive tokens skip the MLPs; False runs them on their last residual stream.
    """

    budget: int | None = None
    refresh: Refresh = Refresh(warmup=0, period=3)
    decision_layer: int = 2
    select: str = "attention"
    include_generating: bool = True
    include_caching: bool = True
    encoder: str = "incremental"
    encoder_buffers: str = "cached"
    buffers: str = "scored"
    skip_mlp: bool = True

    def __post_init__(self):
        fields.instance(self, "refresh", Refresh)
        fields.integer(self, "budget", at_least=1, optional=True)
        fields.integer(self, "decision_layer", at_least=1)
        for name in ("include_generating", "include_caching", "skip_mlp"):
            fields.switch(self, name)
        for name, choices in CHOICES.items():
            fields.choice(self, name, choices)
        if self.encoder == "full" and self.encoder_buffers == "recomputed":
            raise ValueError("encoder_buffers='recomputed' has no meaning with encoder='full', which recomputes all.")

    def check(self, config: MARConfig) -> None:
        """Refuses a model that is too shallow.

        Raises:
            ValueError: if no layer follows the decision layer.
        """
        if self.decision_layer >= config.decoder_depth:
            raise ValueError(
                f"decision_layer={self.decision_layer} must leave a layer behind it, but the decoder has "
                f"{config.decoder_depth} layers."
            )

    def active_counts(self, config: MARConfig, num_predicted: np.ndarray, num_previous: np.ndarray) -> np.ndarray:
        """[steps] active positions at each step, if it is a cached one."""
        total = config.buffer_size + config.seq_len
        budget = self.budget
        if budget is None:
            budget = round(total * PUBLISHED_BUDGET / PUBLISHED_POSITIONS)
        forced = num_predicted * self.include_generating + num_previous * self.include_caching
        if self.buffers == "always":
            forced = forced + config.buffer_size
        most = config.seq_len if self.buffers == "never" else total
        return np.minimum(most, np.maximum(budget, forced))

    def cached_cost(self, config: MARConfig, known, predicted, previous, active):
        """Multiply-adds of a cached step of one row, with that room."""
        total, reach = config.buffer_size + config.seq_len, config.buffer_size + known
        dim, ratio = config.decoder_embed_dim, config.mlp_ratio
        rows = reach if self.encoder == "full" else previous
        if self.encoder == "incremental" and self.encoder_buffers == "recomputed":
            rows = rows + config.buffer_size
        encoded = layer_cost(rows, reach, config.encoder_embed_dim, config.encoder_depth, ratio)
        early = layer_cost(total, total, dim, self.decision_layer, ratio)
        deep = layer_cost(
            active,
            total + active,
            dim,
            config.decoder_depth - self.decision_layer,
            ratio,
            mlp_rows=active if self.skip_mlp else total,
        )
        return encoded + early + deep

    def init(self, config: MARConfig, rows: int, room: int, dtype: jnp.dtype) -> ActiveCache:
        """Zeros, which the first step replaces."""
        total = config.buffer_size + config.seq_len
        layers, heads = config.decoder_depth - self.decision_layer, config.decoder_num_heads
        return ActiveCache(
            encoder=encoder.init(config, rows, room, dtype) if self.encoder == "incremental" else None,
            deep=KeysValues.empty(layers, rows, total, heads, config.decoder_embed_dim, dtype),
        )

    def full(self, cache: ActiveCache, step: StepInput) -> tuple[ActiveCache, Array]:
        """A refresh: the exact model on all rows; the first ones, as many as the cache has, are kept."""
        config = step.config
        enc, x = self._encode(cache, step, encoder.refresh)
        x = mar.decode(step.params, config, x, start=0, stop=self.decision_layer)
        x, deep = blocks.run(
            step.params["decoder_blocks"],
            x,
            cache.deep,
            num_heads=config.decoder_num_heads,
            start=self.decision_layer,
            outputs=step.outputs,
        )
        return ActiveCache(encoder=enc, deep=deep), x

    def _encode(self, cache: ActiveCache, step: StepInput, encode: Callable) -> tuple[EncoderCache | None, Array]:
        """The encoder's cache and the decoder's input; `encode` is for an encoder that has one."""
        return (None, step.decoder_input()) if cache.encoder is None else encode(cache.encoder, step)

    def cached(self, cache: ActiveCache, step: StepInput) -> tuple[ActiveCache, Array, Array | None]:
        """A cached step."""
        config, stack, heads = step.config, step.params["decoder_blocks"], step.config.decoder_num_heads
        advance = functools.partial(encoder.advance, buffers=self.encoder_buffers == "recomputed")
        enc, x = self._encode(cache, step, advance)
        x = mar.decode(step.params, config, x, start=0, stop=self.decision_layer - 1)
        x, (q, k, _) = mar.run_layer(from_stack(stack, self.decision_layer - 1), x, num_heads=heads)
        active = self._choose(received(q, k, step), step)
        options = {"num_heads": heads, "start": self.decision_layer, "two_path": True}
        if self.skip_mlp:
            rows, deep = blocks.run_active(stack, active.gather(x), active, cache.deep, **options)
            x = active.put(x, rows)
        else:
            x, deep = blocks.run_active(stack, x, active, cache.deep, every_mlp=True, **options)
        cache = ActiveCache(encoder=enc, deep=deep)
        return cache, step.predicted(x[:, config.buffer_size :]), active.chosen

    def _choose(self, score: Array, step: StepInput) -> Active:
        if self.select == "least_attention":
            score = -score
        elif self.select == "random":
            score = step.random(score.shape[1])
        is_buffer = jnp.arange(score.shape[1]) < step.config.buffer_size
        if self.buffers != "scored":
            score = jnp.where(is_buffer, jnp.inf if self.buffers == "always" else -jnp.inf, score)
        return choose(score, step, generating=self.include_generating, caching=self.include_caching)


def received(q: Array, k: Array, step: StepInput) -> Array:
    """[R, N] attention that each position receives from the tokens predicted now: mean over heads and those tokens.

    Args:
        q: [R, N, H, Dh] scaled queries of the decision layer.
        k: [R, N, H, Dh] its keys.
        step: the decode step.
    """
    queries = step.predicted(q[:, step.config.buffer_size :])
    scores = lax.dot_general(queries, k, (((3,), (3,)), ((0, 2), (0, 2))), preferred_element_type=jnp.float32)
    weights = jnp.mean(jax.nn.softmax(scores, axis=-1), axis=1)  # [R, P, N]
    real = (jnp.arange(weights.shape[1]) < step.rows.num_predicted)[None, :, None]
    return jnp.sum(jnp.where(real, weights, 0.0), axis=1) / jnp.maximum(step.rows.num_predicted, 1)
