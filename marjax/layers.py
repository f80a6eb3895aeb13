"""The leaves of the transformer: dense layer, layer norm, attention, and the pre-norm block in parts.

A block is offered in parts (`project_qkv`, `add_attention`, `add_mlp`) so that a caching policy can keep keys and
values, or run a part on a subset of positions. Matrix products run in the dtype of their kernel and accumulate in
float32; norms, softmax and the residual stream are float32.
"""

from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from marjax.products import matmul, transposed
from marjax.types import Array, PyTree

NORM_EPS = 1e-6  # every LayerNorm of the reference


class Dense(nn.Module):
    """`y = x @ kernel + bias`: operands in the kernel's dtype, float32 accumulation.

    Attributes:
        features: width of the result.
        kernel_init: initialiser of the kernel; the bias starts at zero.
        narrow: return the kernel's dtype instead of float32, for results that are operands of further products.
    """

    features: int
    kernel_init: nn.initializers.Initializer = nn.initializers.xavier_uniform()
    narrow: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        y = matmul(x.astype(kernel.dtype), kernel)
        y = y + bias
        return y.astype(kernel.dtype) if self.narrow else y


def layer_norm(x: Array) -> Array:
    """LayerNorm over the last axis without affine parameters, in float32."""
    x = x.astype(jnp.float32)
    mean = jnp.mean(x, axis=-1, keepdims=True)
    centred = x - mean
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    return centred * lax.rsqrt(variance + NORM_EPS)


class LayerNorm(nn.Module):
    """LayerNorm with scale and bias, in float32."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        return layer_norm(x) * scale + bias


def gelu(x: Array) -> Array:
    """Exact GELU, as torch computes it: by erf, which takes XLA on CPU half the time of `jax.nn.gelu`'s erfc."""
    return 0.5 * x * (1.0 + lax.erf(x * math.sqrt(0.5)))


def dense(params: PyTree, x: Array) -> Array:
    """Applies a `Dense` layer's parameters."""
    return Dense(params["bias"].shape[-1]).apply({"params": params}, x)


def norm(params: PyTree, x: Array) -> Array:
    """Applies a `LayerNorm` layer's parameters."""
    return LayerNorm().apply({"params": params}, x)


def dropout(x: Array, rate: float, key: Array | None) -> Array:
    """Zeroes each value with probability `rate` and rescales the rest; the identity without a key."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0.0)


def attention(
    q: Array, k: Array, v: Array, key_mask: Array | None = None, *, drop: float = 0.0, key: Array | None = None
) -> Array:
    """Scaled dot-product attention with a float32 softmax.

    Args:
        q: [B, M, H, Dh] queries, already scaled by Dh^-0.5.
        k: [B, N, H, Dh] keys.
        v: [B, N, H, Dh] values.
        key_mask: broadcastable to [B, N]; True where a key may be attended. None attends everywhere.
        drop: dropout rate on the attention weights.
        key: PRNG key of that dropout; None switches it off.

    Returns:
        [B, M, H * Dh] float32.
    """
    out = _attention(q, k, v, key_mask) if key is None else _attention_in_training(q, k, v, key_mask, drop, key)
    return out.reshape(*out.shape[:2], -1)


@jax.custom_vjp
def _attention(q: Array, k: Array, v: Array, key_mask: Array | None) -> Array:
    _, total, out = softmax_part(q, k, v, key_mask)
    return jnp.swapaxes(out / total, 1, 2)


def softmax_part(q: Array, k: Array, v: Array, mask: Array | None) -> tuple[Array, Array, Array]:
    """The maximum score [B, H, M, 1], the sum of exponentials [B, H, M, 1], and weighted values [B, H, M, Dh].

    Their quotient is attention. Arguments as for `attention`; where nothing may be attended the maximum is -inf and the
    others are 0.
    """
    scores = lax.dot_general(q, k, (((3,), (3,)), ((0, 2), (0, 2))), preferred_element_type=jnp.float32)
    if mask is not None:
        scores = jnp.where(mask[..., None, None, :], scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    # The comparison also keeps XLA on CPU from fusing products and softmax into one slow operation.
    weights = jnp.where(scores > -jnp.inf, jnp.exp(scores - top), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = lax.dot_general(
        weights.astype(v.dtype), v, (((3,), (1,)), ((0, 1), (0, 2))), preferred_element_type=jnp.float32
    )
    return top, total, out


def _attention_in_training(
    q: Array, k: Array, v: Array, key_mask: Array | None, drop: float = 0.0, key: Array | None = None
) -> Array:
    """The same, of products whose backward pass is fast."""
    q, k, v = (jnp.swapaxes(part, 1, 2) for part in (q, k, v))  # [B, H, M or N, Dh]
    scores = matmul(q, transposed(k))
    if key_mask is not None:
        scores = jnp.where(key_mask[..., None, None, :], scores, -jnp.inf)
    weights = dropout(jax.nn.softmax(scores, axis=-1), drop, key)
    return jnp.swapaxes(matmul(weights.astype(v.dtype), v), 1, 2)


_attention.defvjp(
    lambda q, k, v, key_mask: jax.vjp(_attention_in_training, q, k, v, key_mask), lambda pullback, g: pullback(g)
)


class Block(nn.Module):
    """Pre-norm transformer block (timm's `Block` as the reference uses it): exact GELU, qkv bias.

    Attributes:
        dim: width E.
        num_heads: heads H.
        hidden: hidden width of the MLP.
    """

    dim: int
    num_heads: int
    hidden: int

    def setup(self):
        self.norm1 = LayerNorm()
        self.qkv = Dense(3 * self.dim, narrow=True)
        self.proj = Dense(self.dim)
        self.norm2 = LayerNorm()
        self.fc1 = Dense(self.hidden)
        self.fc2 = Dense(self.dim)

    def project_qkv(self, x: Array) -> tuple[Array, Array, Array]:
        """[B, M, E] -> q (scaled), k, v, each [B, M, H, Dh] in the kernel's dtype."""
        head_dim = self.dim // self.num_heads
        qkv = self.qkv(self.norm1(x)).reshape(*x.shape[:-1], 3, self.num_heads, head_dim)
        q, k, v = (qkv[..., i, :, :] for i in range(3))
        return q * head_dim**-0.5, k, v

    def add_attention(self, x: Array, attended: Array, *, drop: float = 0.0, key: Array | None = None) -> Array:
        """Projects attention output [B, M, E] and adds it to the residual stream."""
        return x + dropout(self.proj(attended), drop, key)

    def add_mlp(self, x: Array, *, drop: float = 0.0, key: Array | None = None) -> Array:
        """Adds the MLP of the normed stream; dropout after GELU and on the output."""
        key_hidden, key_out = (None, None) if key is None else jax.random.split(key)
        hidden = dropout(gelu(self.fc1(self.norm2(x))), drop, key_hidden)
        return x + dropout(self.fc2(hidden), drop, key_out)

    def __call__(self, x: Array) -> Array:
        """The whole block without mask or dropout; also what initialises the parameters."""
        q, k, v = self.project_qkv(x)
        return self.add_mlp(self.add_attention(x, attention(q, k, v)))
