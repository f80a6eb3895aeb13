"""MAR's transformer: pure functions over depth-stacked parameters (reference `models/mar.py`).

Everything here works in generation order: known tokens are the prefix of the sequence, so the encoder's input is a
slice and the decoder needs no scatter (see `marjax/decode.py`). Position embeddings are gathered once by that order.

    embed           tokens, class embedding -> encoder input
    encode          blocks and norm over buffers + known tokens
    decoder_input   encoder output, mask tokens -> decoder input
    run_blocks      a range of layers of a stack; `train_blocks` in training, `run_layer` one layer
    condition       decoder output -> z, the conditioning of the diffusion head
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from marjax import diffusion_head
from marjax.config import MARConfig
from marjax.cpu import from_stack, map_rows
from marjax.layers import Block, Dense, LayerNorm, attention, dense, norm
from marjax.types import Array, PyTree


@struct.dataclass
class Positions:
    """Position embeddings in generation order.

    Attributes:
        encoder: [B, N, E], buffers first.
        decoder: [B, N, E], buffers first.
        diffusion: [B, S, E].
    """

    encoder: Array
    decoder: Array
    diffusion: Array


@dataclasses.dataclass(frozen=True)
class Dropout:
    """Dropout rates while training: on attention weights, and on the outputs of attention, GELU and MLP."""

    attn: float = 0.1
    proj: float = 0.1


def init(config: MARConfig, key: Array) -> PyTree:
    """Fresh float32 parameters with the reference's initialisation."""
    keys = iter(jax.random.split(key, 12))
    n, s = config.buffer_size + config.seq_len, config.seq_len
    e, d = config.encoder_embed_dim, config.decoder_embed_dim
    normal = nn.initializers.normal(0.02)

    def init_stack(width: int, heads: int, depth: int) -> PyTree:
        block = Block(width, heads, int(width * config.mlp_ratio))
        return jax.vmap(lambda k: block.init(k, jnp.zeros((1, 1, width)))["params"])(
            jax.random.split(next(keys), depth)
        )

    def init_norm(width: int) -> PyTree:
        return LayerNorm().init(key, jnp.zeros((1, width)))["params"]

    return {
        "class_emb": normal(next(keys), (config.class_num, e)),
        "fake_latent": normal(next(keys), (1, e)),
        "z_proj": Dense(e).init(next(keys), jnp.zeros((1, config.token_dim)))["params"],
        "z_proj_ln": init_norm(e),
        "encoder_pos_embed_learned": normal(next(keys), (n, e)),
        "encoder_blocks": init_stack(e, config.encoder_num_heads, config.encoder_depth),
        "encoder_norm": init_norm(e),
        "decoder_embed": Dense(d).init(next(keys), jnp.zeros((1, e)))["params"],
        "mask_token": normal(next(keys), (1, d)),
        "decoder_pos_embed_learned": normal(next(keys), (n, d)),
        "decoder_blocks": init_stack(d, config.decoder_num_heads, config.decoder_depth),
        "decoder_norm": init_norm(d),
        "diffusion_pos_embed_learned": normal(next(keys), (s, d)),
        "diffloss": diffusion_head.init(
            next(keys), token_dim=config.token_dim, cond_dim=d, depth=config.diffloss_d, width=config.diffloss_w
        ),
    }


def gather_positions(params: PyTree, config: MARConfig, order: Array) -> Positions:
    """Position embeddings in generation order.

    Args:
        params: `init`'s tree.
        config: the model's configuration.
        order: [B, S] int, the image position (row-major) of each token in generation order.
    """
    buffers = jnp.broadcast_to(jnp.arange(config.buffer_size), (order.shape[0], config.buffer_size))
    positions = jnp.concatenate([buffers, config.buffer_size + order], axis=1)
    return Positions(
        encoder=params["encoder_pos_embed_learned"][positions],
        decoder=params["decoder_pos_embed_learned"][positions],
        diffusion=params["diffusion_pos_embed_learned"][order],
    )


def class_embedding(params: PyTree, labels: Array | None, batch_size: int) -> Array:
    """[B, E]: embedding rows of the labels, or the unconditional embedding for `labels=None`.

    A label outside the table, possible only where labels are traced, gives NaN rather than some other class.
    """
    if labels is None:
        return jnp.broadcast_to(params["fake_latent"], (batch_size, params["fake_latent"].shape[-1]))
    rows = params["class_emb"].at[labels]
    return rows.get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


@jax.named_scope("encoder")
def embed(params: PyTree, tokens: Array, class_emb: Array, positions: Array) -> Array:
    """Encoder input (reference `forward_mae_encoder`, before the blocks).

    Args:
        params: `init`'s tree.
        tokens: [B, K, D]; [R, ...] below may be a multiple of B (guided halves share their tokens).
        class_emb: [R, E], the value of every buffer position.
        positions: [B, buffer + K, E].

    Returns:
        [R, buffer + K, E].
    """
    batch, num_tokens, _ = tokens.shape
    copies, buffers = class_emb.shape[0] // batch, positions.shape[1] - num_tokens
    x_tokens = _repeat(dense(params["z_proj"], tokens), copies)
    x_buffers = jnp.broadcast_to(class_emb[:, None], (class_emb.shape[0], buffers, class_emb.shape[1]))
    x = jnp.concatenate([x_buffers, x_tokens], axis=1) + _repeat(positions, copies)
    return norm(params["z_proj_ln"], x)


@jax.named_scope("encoder")
def encode(
    params: PyTree, config: MARConfig, x: Array, num_known: int | Array, *, run: Callable[..., Array] | None = None
) -> Array:
    """Encoder over buffers and a prefix of known tokens.

    Args:
        params: `init`'s tree.
        config: the model's configuration.
        x: [R, buffer + K, E] from `embed`.
        num_known: how many of the K tokens are known (<= K); the others are padding that nothing attends to.
        run: None for `run_blocks`; or `train_blocks`, its options bound.

    Returns:
        [R, buffer + K, E]; rows of padding are meaningless.
    """
    padded = x.shape[1] - config.buffer_size
    key_mask = None if _equal(num_known, padded) else jnp.arange(x.shape[1])[None] < config.buffer_size + num_known
    run = run_blocks if run is None else run
    x = run(params["encoder_blocks"], x, num_heads=config.encoder_num_heads, key_mask=key_mask)
    return norm(params["encoder_norm"], x)


def decoder_input(params: PyTree, config: MARConfig, encoded: Array, num_known: int | Array, positions: Array) -> Array:
    """Decoder input: embedded encoder output where known, the mask token elsewhere, plus positions.

    Args:
        params: `init`'s tree.
        config: the model's configuration.
        encoded: [R, buffer + K, E] from `encode`.
        num_known: how many of the K tokens are known.
        positions: [B, N, E], R a multiple of B.

    Returns:
        [R, N, E].
    """
    x = dense(params["decoder_embed"], encoded)
    known = (jnp.arange(x.shape[1]) < config.buffer_size + num_known)[None, :, None]
    x = jnp.where(known, x, params["mask_token"])
    rest = positions.shape[1] - x.shape[1]
    x_masked = jnp.broadcast_to(params["mask_token"], (x.shape[0], rest, x.shape[2]))
    return jnp.concatenate([x, x_masked], axis=1) + _repeat(positions, x.shape[0] // positions.shape[0])


def decode(
    params: PyTree, config: MARConfig, x: Array, *, run: Callable[..., Array] | None = None, **which: int | Array
) -> Array:
    """Decoder blocks over [R, N, E] from `decoder_input`, before the final norm.

    Args:
        params: `init`'s tree.
        config: the model's configuration.
        x: [R, N, E].
        run: as for `encode`.
        **which: `start`, `stop` and `outputs` of `run_blocks`.
    """
    run = run_blocks if run is None else run
    return run(params["decoder_blocks"], x, num_heads=config.decoder_num_heads, **which)


def condition(params: PyTree, x: Array, positions: Array) -> Array:
    """z: the final norm plus diffusion positions.

    Args:
        params: `init`'s tree.
        x: [R, P, E] decoder output of some image tokens.
        positions: [B, P, E] their diffusion position embeddings, R a multiple of B.

    Returns:
        [R, P, E].
    """
    return norm(params["decoder_norm"], x) + _repeat(positions, x.shape[0] // positions.shape[0])


def run_blocks(
    stack: PyTree,
    x: Array,
    *,
    num_heads: int,
    key_mask: Array | None = None,
    start: int = 0,
    stop: int | None = None,
    outputs: Array | None = None,
) -> Array:
    """Runs layers [start, stop) of a depth-stacked tree over x [R, M, E].

    Args:
        stack: block parameters, each leaf [L, ...].
        x: [R, M, E].
        num_heads: attention heads.
        key_mask: broadcastable to [R, M]; True where a position may be attended. None attends everywhere.
        start: first layer.
        stop: one past the last layer; None means L.
        outputs: positions [m] whose output is wanted; None: all. The last layer's MLP, and its queries, are for these.

    Returns:
        [R, M or m, E].
    """
    stop = jax.tree.leaves(stack)[0].shape[0] if stop is None else stop
    layer = functools.partial(run_layer, num_heads=num_heads, key_mask=key_mask)

    def step(x: Array, index: Array) -> tuple[Array, None]:
        return layer(from_stack(stack, index), x)[0], None

    if outputs is None:
        return lax.scan(step, x, jnp.arange(start, stop))[0]
    x, _ = lax.scan(step, x, jnp.arange(start, stop - 1))
    return layer(from_stack(stack, stop - 1), x, outputs=outputs)[0]


def run_layer(
    params: PyTree,
    x: Array,
    *,
    num_heads: int,
    key_mask: Array | None = None,
    outputs: Array | None = None,
    mlp: bool = True,
) -> tuple[Array, tuple[Array, Array, Array]]:
    """One layer over x [R, M, E].

    Args:
        params: its parameters.
        x: its input.
        num_heads: attention heads.
        key_mask: as in `run_blocks`.
        outputs: positions [m] whose output is wanted; None: all.
        mlp: False leaves the MLP out.

    Returns:
        [R, M or m, E], and scaled queries, keys and values, each [R, M, H, Dh].
    """
    rows, positions, dim = x.shape
    hidden = params["fc1"]["kernel"].shape[1]
    if key_mask is not None:
        key_mask = jnp.broadcast_to(key_mask, (rows, positions))

    def some(x: Array, key_mask: Array | None) -> tuple[Array, tuple[Array, Array, Array]]:
        block = Block(dim, num_heads, hidden).bind({"params": params})
        q, k, v = block.project_qkv(x)
        asking = q if outputs is None else jnp.take(q, outputs, axis=1)
        x = x if outputs is None else jnp.take(x, outputs, axis=1)
        x = block.add_attention(x, attention(asking, k, v, key_mask))
        return block.add_mlp(x) if mlp else x, (q, k, v)

    return map_rows(some, x, key_mask, row_bytes=4 * positions * max(hidden, num_heads * positions))


def train_blocks(
    stack: PyTree,
    x: Array,
    *,
    num_heads: int,
    key_mask: Array | None = None,
    dropout: Dropout | None = None,
    key: Array | None = None,
    unroll: int = 1,
    remat: bool = False,
) -> Array:
    """What `run_blocks` does for all layers, as training wants it: with dropout, and with few arrays kept.

    Args:
        stack: as `run_blocks`.
        x: the same.
        num_heads: the same.
        key_mask: the same.
        dropout: its rates; None: no dropout.
        key: PRNG key of the dropout; needed exactly when `dropout` is given.
        unroll: layers per iteration of the scan.
        remat: recompute each block in the backward pass instead of keeping its activations.
    """
    depth, dim, hidden = stack["fc1"]["kernel"].shape
    block = Block(dim, num_heads, hidden)
    rates = dropout or Dropout(0.0, 0.0)

    def step(x: Array, layer: tuple[PyTree, Array | None]) -> tuple[Array, None]:
        params, key = layer
        k_attn, k_proj, k_mlp = (None,) * 3 if key is None else jax.random.split(key, 3)
        bound = block.bind({"params": params})
        attended = attention(*bound.project_qkv(x), key_mask, drop=rates.attn, key=k_attn)
        x = bound.add_attention(x, attended, drop=rates.proj, key=k_proj)
        return bound.add_mlp(x, drop=rates.proj, key=k_mlp), None

    keys = None if dropout is None else jax.random.split(key, depth)
    return lax.scan(jax.checkpoint(step) if remat else step, x, (stack, keys), unroll=unroll)[0]


def _repeat(x: Array, copies: int) -> Array:
    """[B, ...] -> [copies * B, ...], whole batches one after the other."""
    return x if copies == 1 else jnp.tile(x, (copies,) + (1,) * (x.ndim - 1))


def _equal(value: int | Array, expected: int) -> bool:
    """Whether a size is known at trace time and equal to `expected`."""
    return isinstance(value, int) and value == expected
