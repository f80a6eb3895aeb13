"""The incremental encoder: at cached steps only tokens predicted in the step before, and maybe buffers, are encoded.

They attend to the cached keys and values of everything known; what the other tokens gave the decoder stays. In
generation order these tokens are a slice that ends where the known prefix does (`marjax/decode.py`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from marjax import mar
from marjax.accel import blocks
from marjax.accel.base import StepInput
from marjax.accel.blocks import KeysValues
from marjax.config import MARConfig
from marjax.layers import attention, dense, norm
from marjax.types import Array


@struct.dataclass
class EncoderCache:
    """What the encoder keeps; R rows, M = N + room for a slice that begins before the end of the sequence.

    Attributes:
        layers: [L, R, M, H, Dh] of every encoder layer.
        output: [R, M, E] the decoder's input, float32: embedded where known, the mask token elsewhere, plus positions.
    """

    layers: KeysValues
    output: Array


def init(config: MARConfig, rows: int, room: int, dtype: jnp.dtype) -> EncoderCache:
    """Zeros, which the first step replaces; `room` is the most tokens that a cached step encodes."""
    positions = config.buffer_size + config.seq_len + room
    heads, dim = config.encoder_num_heads, config.encoder_embed_dim
    return EncoderCache(
        layers=KeysValues.empty(config.encoder_depth, rows, positions, heads, dim, dtype),
        output=jnp.zeros((rows, positions, config.decoder_embed_dim), jnp.float32),
    )


@jax.named_scope("encoder")
def refresh(cache: EncoderCache, step: StepInput) -> tuple[EncoderCache, Array]:
    """Encodes everything.

    Returns:
        The cache, of as many rows as it has, and the decoder's input [R, N, E] of all rows.
    """
    config, params, kept = step.config, step.params, cache.output.shape[0]
    x = step.encoder_input()
    mask = jnp.arange(x.shape[1])[None] < config.buffer_size + step.rows.num_known
    x, layers = blocks.run(
        params["encoder_blocks"], x, cache.layers, num_heads=config.encoder_num_heads, start=0, key_mask=mask
    )
    x = norm(params["encoder_norm"], x)
    x = mar.decoder_input(params, config, x, step.rows.num_known, step.positions.decoder)
    return EncoderCache(layers=layers, output=blocks.write(cache.output, x[:kept], ())), x


@jax.named_scope("encoder")
def advance(cache: EncoderCache, step: StepInput, *, buffers: bool) -> tuple[EncoderCache, Array]:
    """Encodes the tokens of the step before, and the buffers if asked to.

    Returns:
        The cache, and the decoder's input [R, N, E].
    """
    config, params, size = step.config, step.params, step.segment.previous
    first = step.rows.num_known - step.rows.num_previous  # the slice's, among tokens
    index = first + jnp.arange(size)
    known = (index < step.rows.num_known)[None, :, None]
    tokens = jnp.take(step.tokens, index, axis=1, mode="clip")
    lead = config.buffer_size if buffers else 0
    places = jnp.concatenate([jnp.arange(lead), config.buffer_size + index])  # positions of the rows
    x = mar.embed(params, tokens, step.class_emb, jnp.take(step.positions.encoder, places, axis=1, mode="clip"))
    # Rows of padding, behind the known tokens, write what nothing reads before it is written again.
    reach = config.buffer_size + step.segment.known
    usable = jnp.arange(reach)[None] < config.buffer_size + step.rows.num_known
    stack, heads = params["encoder_blocks"], config.encoder_num_heads

    def one(carry: tuple[Array, KeysValues], number: Array) -> tuple[tuple[Array, KeysValues], None]:
        x, layers = carry
        layer = blocks.block(stack, heads, number)
        q, k, v = layer.project_qkv(x)
        if lead:
            layers = layers.write(number, k[:, :lead], v[:, :lead])
        layers = layers.write(number, k[:, lead:], v[:, lead:], config.buffer_size + first)
        all_k, all_v = layers.layer(number)
        x = layer.add_mlp(layer.add_attention(x, attention(q, all_k[:, :reach], all_v[:, :reach], usable)))
        return (x, layers), None

    (x, layers), _ = jax.lax.scan(one, (x, cache.layers), jnp.arange(config.encoder_depth))
    x = dense(params["decoder_embed"], norm(params["encoder_norm"], x))
    positions = jnp.take(step.positions.decoder, places, axis=1, mode="clip")
    positions = jnp.tile(positions, (x.shape[0] // positions.shape[0], 1, 1))
    fresh = jnp.where(known, x[:, lead:], params["mask_token"]) + positions[:, lead:]
    output = blocks.write(cache.output, fresh, (0, config.buffer_size + first))
    if lead:
        output = blocks.write(output, x[:, :lead] + positions[:, :lead], ())
    length = config.buffer_size + config.seq_len
    return EncoderCache(layers=layers, output=output), output[:, :length]
