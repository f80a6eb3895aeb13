"""LazyMAR's token cache (arXiv 2503.12450, ICCV 2025; its decode is specified by the released code).

At a cached step

    1. the encoder runs on the buffers and on the tokens predicted in the step before, which attend to cached keys and
       values of everything known; the decoder input of all other tokens stays
    2. the decoder's first layers run on all tokens; in the prune layer the tokens whose value vectors turned most since
       the last step are chosen, and with them those predicted now and in the step before
    3. the prune layer's MLP and all later layers run on the chosen tokens only, which attend to cached keys and values
       of the others

The published numbers are for 64 steps, 256 tokens and 64 buffers; `kept` is read at the same share of the decode.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import struct

from marjax import mar
from marjax.accel import blocks, encoder, fields
from marjax.accel.base import PUBLISHED_REFRESH, Refresh, StepInput
from marjax.accel.blocks import KeysValues, choose
from marjax.accel.cost import layer_cost
from marjax.accel.encoder import EncoderCache
from marjax.config import MARConfig
from marjax.cpu import from_stack
from marjax.types import Array

PUBLISHED_STEPS = 64
# Share of all positions that is kept, by step of 64: (first step, share).
PUBLISHED_SHARES = ((0, 1.0), (20, 0.6), (21, 0.5), (25, 0.4), (30, 0.15), (35, 0.12), (40, 0.05))


@struct.dataclass
class LazyCache:
    """What the cached rows keep.

    Attributes:
        encoder: of the incremental encoder.
        deep: keys and values of the decoder layers behind the prune layer.
        values: [R, N, H, Dh] of the prune layer, in the step before.
    """

    encoder: EncoderCache
    deep: KeysValues
    values: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class LazyTokens:
    """LazyMAR's token cache.

    Memory, for each row (an image; two with guidance and no condition cache), in numbers of the compute dtype: keys and
    values of every encoder layer, 2 (N + Q) E, and of every decoder layer behind the prune layer, 2 N E; values of the
    prune layer, N E; and (N + Q) E float32 decoder inputs. N positions, E wide, Q tokens predicted at most in a step.
    MAR-B in bfloat16: 21 MB.

    Attributes:
        refresh: which steps compute everything.
        prune_layer: the decoder layer, counted from 0, in which tokens are chosen; at least one must follow.
        shares: (first step of 64, share of all positions that is kept from there on), ascending.
        slack: tokens kept at least, beyond those predicted now and in the step before.
    """

    refresh: Refresh = PUBLISHED_REFRESH
    prune_layer: int = 3
    shares: tuple[tuple[int, float], ...] = PUBLISHED_SHARES
    slack: int = 15

    def __post_init__(self):
        fields.instance(self, "refresh", Refresh)
        fields.integer(self, "prune_layer", at_least=0)
        fields.steps(self, "shares", last=PUBLISHED_STEPS - 1)
        fields.integer(self, "slack", at_least=0)

    def check(self, config: MARConfig) -> None:
        """Refuses a model that is too shallow.

        Raises:
            ValueError: if no layer follows the prune layer.
        """
        if self.prune_layer >= config.decoder_depth - 1:
            raise ValueError(
                f"prune_layer={self.prune_layer} must leave a layer behind it, but the decoder has "
                f"{config.decoder_depth} layers."
            )

    def active_counts(self, config: MARConfig, num_predicted: np.ndarray, num_previous: np.ndarray) -> np.ndarray:
        """[steps] tokens kept at each step, if it is a cached one."""
        total, steps = config.buffer_size + config.seq_len, np.arange(len(num_predicted))
        # Steps of inpainting that predict nothing do not count.
        published = np.minimum(steps * PUBLISHED_STEPS // np.count_nonzero(num_predicted), PUBLISHED_STEPS - 1)
        starts, shares = zip(*self.shares, strict=True)
        share = np.array(shares)[np.searchsorted(starts, published, side="right") - 1]
        return np.minimum(total, np.maximum(num_predicted + num_previous + self.slack, (total * share).astype(int)))

    def cached_cost(self, config: MARConfig, known, predicted, previous, active):
        """Multiply-adds of a cached step of one row, with that room."""
        total, reach = config.buffer_size + config.seq_len, config.buffer_size + known
        dim, ratio = config.decoder_embed_dim, config.mlp_ratio
        rows = config.buffer_size + previous
        encoded = layer_cost(rows, reach, config.encoder_embed_dim, config.encoder_depth, ratio)
        early = layer_cost(total, total, dim, self.prune_layer, ratio)
        pruning = layer_cost(total, total, dim, 1, ratio, mlp_rows=active)
        deep = layer_cost(active, total, dim, config.decoder_depth - 1 - self.prune_layer, ratio)
        return encoded + early + pruning + deep

    def init(self, config: MARConfig, rows: int, room: int, dtype: jnp.dtype) -> LazyCache:
        """Zeros, which the first step replaces."""
        total, heads, dim = config.buffer_size + config.seq_len, config.decoder_num_heads, config.decoder_embed_dim
        deep = KeysValues.empty(config.decoder_depth - 1 - self.prune_layer, rows, total, heads, dim, dtype)
        return LazyCache(
            encoder=encoder.init(config, rows, room, dtype),
            deep=deep,
            values=jnp.zeros((rows, total, heads, dim // heads), dtype),
        )

    def full(self, cache: LazyCache, step: StepInput) -> tuple[LazyCache, Array]:
        """A refresh: the exact model on all rows; the first ones, as many as the cache has, are kept."""
        config, stack, kept = step.config, step.params["decoder_blocks"], cache.values.shape[0]
        enc, x = encoder.refresh(cache.encoder, step)
        heads, prune = config.decoder_num_heads, self.prune_layer
        x = mar.decode(step.params, config, x, start=0, stop=prune)
        x, (_, _, v) = mar.run_layer(from_stack(stack, prune), x, num_heads=heads)
        x, deep = blocks.run(stack, x, cache.deep, num_heads=heads, start=prune + 1, outputs=step.outputs)
        return LazyCache(encoder=enc, deep=deep, values=v[:kept]), x

    def cached(self, cache: LazyCache, step: StepInput) -> tuple[LazyCache, Array, Array | None]:
        """A cached step."""
        config, stack, prune = step.config, step.params["decoder_blocks"], self.prune_layer
        enc, x = encoder.advance(cache.encoder, step, buffers=True)
        x = mar.decode(step.params, config, x, start=0, stop=prune)
        heads = config.decoder_num_heads
        x, (_, _, v) = mar.run_layer(from_stack(stack, prune), x, num_heads=heads, mlp=False)
        active = choose(-cosine(v, cache.values), step)
        x = blocks.block(stack, heads, prune).add_mlp(active.gather(x))
        x, deep = blocks.run_active(stack, x, active, cache.deep, num_heads=heads, start=prune + 1, two_path=False)
        everywhere = jnp.zeros((x.shape[0], config.buffer_size + config.seq_len, x.shape[2]), jnp.float32)
        out = active.put(everywhere, x)[:, config.buffer_size :]
        return LazyCache(encoder=enc, deep=deep, values=v), step.predicted(out), active.chosen


def cosine(a: Array, b: Array) -> Array:
    """[R, N] mean over heads of the cosine of [R, N, H, Dh] vectors, in float32."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    norms = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)
    return jnp.mean(jnp.sum(a * b, axis=-1) / jnp.maximum(norms, 1e-8), axis=-1)
