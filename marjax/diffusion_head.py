"""The diffusion head: a small MLP with adaLN that predicts noise and variance of one token (reference `diffloss.py`).

    h = input_proj(x);  y = time_embedding(t) + cond_embed(z)
    per block:  shift, scale, gate = adaLN(silu(y));  h += gate * mlp(norm(h) * (1 + scale) + shift)
    final:      shift, scale = adaLN(silu(y));        out = linear(norm(h) * (1 + scale) + shift)

`out` holds D noise predictions and D variance interpolations. Blocks are depth-stacked in the checkpoint; `unstack`
takes them apart once, outside the sampling loop, which is bound by reading these weights.
"""

from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from marjax.layers import Dense, LayerNorm, dense, layer_norm
from marjax.types import Array, PyTree

FREQUENCY_SIZE = 256  # width of the sinusoidal timestep features
MAX_PERIOD = 10_000.0

_ZEROS = nn.initializers.zeros


class ResBlock(nn.Module):
    """Residual MLP block modulated by the conditioning.

    Attributes:
        width: width W.
    """

    width: int

    def setup(self):
        self.in_ln = LayerNorm()
        self.mlp_0 = Dense(self.width)
        self.mlp_2 = Dense(self.width)
        self.adaLN = Dense(3 * self.width, kernel_init=_ZEROS)

    def mlp(self, h: Array, modulation: Array) -> tuple[Array, Array]:
        """The MLP of the modulated norm of h [R, W], and its gate [R, W]; `modulation` [R, 3 W] is `adaLN`'s."""
        shift, scale, gate = jnp.split(modulation, 3, axis=-1)
        u = self.in_ln(h) * (1 + scale) + shift
        return self.mlp_2(nn.silu(self.mlp_0(u))), gate

    def __call__(self, h: Array, silu_y: Array) -> Array:
        """[R, W] hidden rows and [R, W] activated conditioning -> [R, W]."""
        out, gate = self.mlp(h, self.adaLN(silu_y))
        return h + gate * out


class FinalLayer(nn.Module):
    """Modulated norm (without affine parameters) and the output projection.

    Attributes:
        out_dim: 2 D.
        width: width W.
    """

    out_dim: int
    width: int

    def setup(self):
        self.linear = Dense(self.out_dim, kernel_init=_ZEROS)
        self.adaLN = Dense(2 * self.width, kernel_init=_ZEROS)

    def output(self, h: Array, modulation: Array) -> Array:
        """[R, W] hidden rows and [R, 2 W] modulation -> [R, 2 D]."""
        shift, scale = jnp.split(modulation, 2, axis=-1)
        return self.linear(layer_norm(h) * (1 + scale) + shift)

    def __call__(self, h: Array, silu_y: Array) -> Array:
        """[R, W] hidden rows and [R, W] activated conditioning -> [R, 2 D]."""
        return self.output(h, self.adaLN(silu_y))


def init(key: Array, *, token_dim: int, cond_dim: int, depth: int, width: int) -> PyTree:
    """Fresh head parameters: Xavier-uniform products, normal(0.02) time MLP, zero adaLN and output layers.

    Args:
        key: PRNG key.
        token_dim: D.
        cond_dim: width of the conditioning z.
        depth: number of blocks.
        width: W.
    """
    k_time0, k_time2, k_cond, k_in, k_blocks, k_final = jax.random.split(key, 6)
    h, time_init = jnp.zeros((1, width)), nn.initializers.normal(0.02)
    return {
        "time_embed": {
            "mlp_0": Dense(width, kernel_init=time_init).init(k_time0, jnp.zeros((1, FREQUENCY_SIZE)))["params"],
            "mlp_2": Dense(width, kernel_init=time_init).init(k_time2, h)["params"],
        },
        "cond_embed": Dense(width).init(k_cond, jnp.zeros((1, cond_dim)))["params"],
        "input_proj": Dense(width).init(k_in, jnp.zeros((1, token_dim)))["params"],
        "res_blocks": jax.vmap(lambda k: ResBlock(width).init(k, h, h)["params"])(jax.random.split(k_blocks, depth)),
        "final_layer": FinalLayer(2 * token_dim, width).init(k_final, h, h)["params"],
    }


def timestep_features(t: Array) -> Array:
    """[R] original timesteps (0..999) -> [R, 256] sinusoidal features, cosines first."""
    half = FREQUENCY_SIZE // 2
    frequencies = jnp.exp(-math.log(MAX_PERIOD) * jnp.arange(half, dtype=jnp.float32) / half)
    angles = t.astype(jnp.float32)[:, None] * frequencies
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def time_embedding(params: PyTree, t: Array) -> Array:
    """[R] original timesteps (0..999) -> [R, W]."""
    mlp = params["time_embed"]
    return dense(mlp["mlp_2"], nn.silu(dense(mlp["mlp_0"], timestep_features(t))))


def unstack(params: PyTree) -> PyTree:
    """The same head with `res_blocks` as a tuple of single blocks, so that a loop over the head slices nothing."""
    stack = params["res_blocks"]
    depth = jax.tree.leaves(stack)[0].shape[0]
    return {**params, "res_blocks": tuple(jax.tree.map(lambda leaf, i=i: leaf[i], stack) for i in range(depth))}


@struct.dataclass
class Modulations:
    """What the conditioning does to a head: shifts, scales and gates. They do not depend on the noisy token.

    Attributes:
        blocks: per block, [..., 3 W]; None for a block that is not wanted.
        final: [..., 2 W].
    """

    blocks: tuple[Array | None, ...]
    final: Array


def modulations(params: PyTree, time: Array, cond: Array, wanted: tuple[bool, ...] | None = None) -> Modulations:
    """Modulations of every wanted block (None: all), for [..., W] `time_embedding` and `cond_embed` of z."""
    silu_y = nn.silu(time + cond)
    wanted = wanted or (True,) * len(params["res_blocks"])
    return Modulations(
        blocks=tuple(
            dense(block["adaLN"], silu_y) if want else None
            for block, want in zip(params["res_blocks"], wanted, strict=True)
        ),
        final=dense(params["final_layer"]["adaLN"], silu_y),
    )


def apply(params: PyTree, x: Array, time: Array, cond: Array) -> Array:
    """Noise and variance predictions for rows of noisy tokens.

    Args:
        params: head parameters, unstacked.
        x: [r, D] noisy tokens. R may be a multiple of r: rows of guided halves share their x.
        time: `time_embedding`, broadcastable to [R, W].
        cond: [R, W] `cond_embed` of the conditioning z.

    Returns:
        [R, 2 D] float32: D noise predictions, then D variance interpolations.
    """
    return modulated(params, x, modulations(params, time, cond))


def modulated(params: PyTree, x: Array, modulations: Modulations) -> Array:
    """What `apply` does once the modulations [R, ...] are known."""
    h = first(params, x, modulations.final.shape[0])
    for block, modulation in zip(params["res_blocks"], modulations.blocks, strict=True):
        out, gate = bound(block).mlp(h, modulation)
        h = h + gate * out
    return output(params, h, modulations.final)


def first(params: PyTree, x: Array, rows: int) -> Array:
    """[r, D] noisy tokens -> [R, W], the blocks' input; R, a multiple of r, is `rows`."""
    return jnp.tile(dense(params["input_proj"], x), (rows // x.shape[0], 1))


def bound(block: PyTree) -> ResBlock:
    """A `ResBlock` with its parameters, whose parts can be called."""
    return ResBlock(block["mlp_0"]["bias"].shape[-1]).bind({"params": block})


def output(params: PyTree, h: Array, modulation: Array) -> Array:
    """[R, W] rows after the blocks, and the last modulation [R, 2 W] -> [R, 2 D] float32."""
    final = params["final_layer"]
    layer = FinalLayer(final["linear"]["bias"].shape[-1], h.shape[-1])
    return layer.apply({"params": final}, h, modulation, method="output")
