"""KL autoencoder between images and latents, channels last (reference `models/vae.py`, the KL-16 of the MAR paper).

    encode              images -> mean and log variance of the latents
    sample_posterior    mean, log variance, noise -> latents
    decode              latents -> images
    estimate_scale      images -> 1 / the standard deviation of their latents

Latents here have the autoencoder's own scale. MAR models see them multiplied by `VAEConfig.scale`: the caller
multiplies what `encode` gives, and divides what `decode` takes.

The tree of parameters has the reference's names, with digits for the entries of its lists:
`encoder/down/0/block/1/conv1/kernel`. Level 0 is the full resolution, also in `decoder/up`. Convolutions run in the
dtype of their kernel and accumulate in float32; norms, softmax and the residual stream are float32.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from marjax.config import VAEConfig
from marjax.layers import attention
from marjax.types import Array, PyTree

NORM_GROUPS = 32
NORM_EPS = 1e-6
LOGVAR_RANGE = (-30.0, 20.0)  # the log variance is clamped to this
IMAGE_CHANNELS = 3


class Conv(nn.Module):
    """Square convolution with bias: operands in the kernel's dtype, float32 accumulation.

    Zero padding keeps the size (over `stride`, which must divide it). With stride 2 the padding is on the right and
    at the bottom only, as in the reference. Kernels start as PyTorch's, uniform in +-1/sqrt(fan_in); biases at zero.

    Attributes:
        features: channels of the result.
        size: side of the kernel, 1 or 3.
        stride: 1 or 2.
    """

    features: int
    size: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: Array) -> Array:
        kernel_init = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        kernel = self.param("kernel", kernel_init, (self.size, self.size, x.shape[-1], self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        y = lax.conv_general_dilated(
            x.astype(kernel.dtype),
            kernel,
            window_strides=(self.stride, self.stride),
            padding="SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            preferred_element_type=jnp.float32,
        )
        return y + bias


class GroupNorm(nn.Module):
    """GroupNorm over positions and the channels of each of 32 groups, with scale and bias, in float32."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        grouped = x.astype(jnp.float32).reshape(x.shape[0], -1, NORM_GROUPS, x.shape[-1] // NORM_GROUPS)
        centred = grouped - jnp.mean(grouped, axis=(1, 3), keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=(1, 3), keepdims=True)
        return (centred * lax.rsqrt(variance + NORM_EPS)).reshape(x.shape) * scale + bias


def init(config: VAEConfig, key: Array) -> PyTree:
    """Fresh float32 parameters.

    Args:
        config: the autoencoder's configuration.
        key: PRNG key.

    Raises:
        ValueError: if the widths cannot be normalised in groups.
    """
    if config.ch % NORM_GROUPS:
        raise ValueError(f"ch={config.ch} must be a multiple of {NORM_GROUPS}, the groups of the norms.")
    keys = (jax.random.fold_in(key, index) for index in itertools.count())

    def new_conv(width_in: int, width: int, size: int = 3) -> PyTree:
        return Conv(width, size).init(next(keys), jnp.zeros((1, size, size, width_in)))["params"]

    def new_norm(width: int) -> PyTree:
        return GroupNorm().init(key, jnp.zeros((1, 1, 1, width)))["params"]

    def new_block(width_in: int, width: int) -> PyTree:
        block = {
            "norm1": new_norm(width_in),
            "conv1": new_conv(width_in, width),
            "norm2": new_norm(width),
            "conv2": new_conv(width, width),
        }
        return block if width_in == width else {**block, "nin_shortcut": new_conv(width_in, width, size=1)}

    def new_blocks(width_in: int, width: int, count: int) -> PyTree:
        return {str(i): new_block(width if i else width_in, width) for i in range(count)}

    def new_attention(width: int) -> PyTree:
        products = {name: new_conv(width, width, size=1) for name in ("q", "k", "v", "proj_out")}
        return {"norm": new_norm(width), **products}

    def new_middle(width: int) -> PyTree:
        return {"block_1": new_block(width, width), "attn_1": new_attention(width), "block_2": new_block(width, width)}

    blocks, latent = config.num_res_blocks, config.embed_dim
    widths = [config.ch * multiplier for multiplier in config.ch_mult]
    lowest, deepest = len(widths) - 1, widths[-1]

    down, up = {}, {}
    for level, width in enumerate(widths):
        down[str(level)] = {"block": new_blocks(widths[level - 1] if level else config.ch, width, blocks)}
        up[str(level)] = {"block": new_blocks(widths[min(level + 1, lowest)], width, blocks + 1)}
        if level < lowest:
            down[str(level)]["downsample"] = {"conv": new_conv(width, width)}
        else:
            down[str(level)]["attn"] = {str(i): new_attention(width) for i in range(blocks)}
        if level > 0:
            up[str(level)]["upsample"] = {"conv": new_conv(width, width)}

    return {
        "encoder": {
            "conv_in": new_conv(IMAGE_CHANNELS, config.ch),
            "down": down,
            "mid": new_middle(deepest),
            "norm_out": new_norm(deepest),
            "conv_out": new_conv(deepest, 2 * latent),
        },
        "quant_conv": new_conv(2 * latent, 2 * latent, size=1),
        "post_quant_conv": new_conv(latent, latent, size=1),
        "decoder": {
            "conv_in": new_conv(latent, deepest),
            "mid": new_middle(deepest),
            "up": up,
            "norm_out": new_norm(widths[0]),
            "conv_out": new_conv(widths[0], IMAGE_CHANNELS),
        },
    }


def encode(params: PyTree, config: VAEConfig, images: Array) -> tuple[Array, Array]:
    """Distribution of the latents of images.

    Args:
        params: `init`'s tree.
        config: the autoencoder's configuration.
        images: [B, H, W, 3] floating point in [-1, 1]; H and W multiples of 2^(levels - 1), levels = len(ch_mult).

    Returns:
        mean [B, h, w, c] and log variance [B, h, w, c] in [-30, 20], both float32.

    Raises:
        ValueError: if the images do not have that shape or dtype.
    """
    stride = config.stride
    if images.ndim != 4 or images.shape[-1] != IMAGE_CHANNELS or images.shape[1] % stride or images.shape[2] % stride:
        raise ValueError(f"images have shape {images.shape}, expected [B, H, W, 3], H and W multiples of {stride}.")
    if not jnp.issubdtype(images.dtype, jnp.floating):
        raise ValueError(f"images have dtype {images.dtype}, expected floating point in [-1, 1]; rescale them first.")
    encoder = params["encoder"]
    x = conv(encoder["conv_in"], images)
    for level in range(len(config.ch_mult)):
        stage = encoder["down"][str(level)]
        for i in range(config.num_res_blocks):
            x = residual_block(stage["block"][str(i)], x)
            if "attn" in stage:
                x = attention_block(stage["attn"][str(i)], x)
        if "downsample" in stage:
            x = conv(stage["downsample"]["conv"], x, stride=2)
    x = _out(encoder, _middle(encoder["mid"], x))
    mean, logvar = jnp.split(conv(params["quant_conv"], x), 2, axis=-1)
    return mean, jnp.clip(logvar, *LOGVAR_RANGE)


def sample_posterior(mean: Array, logvar: Array, noise: Array) -> Array:
    """Latents drawn from `encode`'s distribution by standard normal noise; all four [B, h, w, c] float32."""
    return mean + jnp.exp(0.5 * logvar) * noise


def decode(params: PyTree, config: VAEConfig, latents: Array, chunk: int | None = None) -> Array:
    """Images of latents.

    Args:
        params: `init`'s tree.
        config: the autoencoder's configuration.
        latents: [B, h, w, c] float32 in the autoencoder's own scale: what MAR generates, divided by `config.scale`.
        chunk: decode this many images at a time, one group after the other, to bound memory; None decodes all at once.

    Returns:
        [B, H, W, 3] float32, nominally in [-1, 1] but not clipped; H = 2^(levels - 1) h.

    Raises:
        ValueError: if the latents do not have that shape, or `chunk` is not positive.
    """
    if latents.ndim != 4 or latents.shape[-1] != config.embed_dim:
        raise ValueError(f"latents have shape {latents.shape}, expected [B, h, w, {config.embed_dim}].")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk={chunk} must be a positive number of images, or None.")

    def decode_some(latents: Array) -> Array:
        decoder = params["decoder"]
        x = conv(decoder["conv_in"], conv(params["post_quant_conv"], latents))
        x = _middle(decoder["mid"], x)
        for level in reversed(range(len(config.ch_mult))):
            stage = decoder["up"][str(level)]
            for i in range(config.num_res_blocks + 1):
                x = residual_block(stage["block"][str(i)], x)
            if "upsample" in stage:
                x = conv(stage["upsample"]["conv"], _nearest(x))
        return _out(decoder, x)

    return _map_chunks(decode_some, latents, chunk)


@dataclasses.dataclass(frozen=True)
class LatentStatistics:
    """Sums over latents drawn from `encode`'s distributions, over every position and channel; an immutable accumulator.

    Attributes:
        count: latent values.
        total: sum of their expected values.
        squares: sum of their expected squares.
    """

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, mean: np.ndarray, logvar: np.ndarray) -> LatentStatistics:
        """The statistics with more latents in them, of any shape."""
        mean, logvar = np.asarray(mean, np.float64), np.asarray(logvar, np.float64)
        squares = float(np.sum(np.square(mean) + np.exp(logvar)))
        return LatentStatistics(self.count + mean.size, self.total + float(np.sum(mean)), self.squares + squares)

    @property
    def std(self) -> float:
        """Standard deviation of the latents.

        Raises:
            ValueError: if there are none, or they do not vary.
        """
        if not self.count:
            raise ValueError("No latents have no standard deviation; give at least one image.")
        variance = self.squares / self.count - (self.total / self.count) ** 2
        if not variance > 0:
            raise ValueError(f"The latents have variance {variance}, expected a positive one; check the autoencoder.")
        return math.sqrt(variance)


def estimate_scale(params: PyTree, config: VAEConfig, images: Iterable[Array]) -> float:
    """What `VAEConfig.scale` should be for this autoencoder and such images: 1 / the standard deviation of the latents.

    The expectation over `sample_posterior`'s noise is exact. The mean is not shifted to 0, as in the reference.

    Args:
        params: `init`'s tree.
        config: the autoencoder's configuration; its `scale` plays no part.
        images: batches as for `encode`.
    """
    statistics, encode_batch = LatentStatistics(), jax.jit(encode, static_argnums=1)
    for batch in images:
        statistics = statistics.add(*encode_batch(params, config, batch))
    return 1.0 / statistics.std


def conv(params: PyTree, x: Array, stride: int = 1) -> Array:
    """Applies a `Conv` layer's parameters."""
    size, _, _, features = params["kernel"].shape
    return Conv(features, size, stride).apply({"params": params}, x)


def norm(params: PyTree, x: Array) -> Array:
    """Applies a `GroupNorm` layer's parameters."""
    return GroupNorm().apply({"params": params}, x)


def residual_block(params: PyTree, x: Array) -> Array:
    """[B, h, w, C] -> [B, h, w, C']: two convolutions, each after norm and swish, plus x (projected if C' != C)."""
    h = conv(params["conv1"], nn.swish(norm(params["norm1"], x)))
    h = conv(params["conv2"], nn.swish(norm(params["norm2"], h)))
    return h + (conv(params["nin_shortcut"], x) if "nin_shortcut" in params else x)


def attention_block(params: PyTree, x: Array) -> Array:
    """[B, h, w, C] -> same: single-head attention over all positions of the normed input, plus x."""
    b, h, w, c = x.shape
    normed = norm(params["norm"], x)
    q, k, v = (conv(params[name], normed).reshape(b, h * w, 1, c) for name in ("q", "k", "v"))
    operands = (part.astype(params["v"]["kernel"].dtype) for part in (q * c**-0.5, k, v))
    return x + conv(params["proj_out"], attention(*operands).reshape(x.shape))


def _middle(params: PyTree, x: Array) -> Array:
    x = attention_block(params["attn_1"], residual_block(params["block_1"], x))
    return residual_block(params["block_2"], x)


def _out(params: PyTree, x: Array) -> Array:
    return conv(params["conv_out"], nn.swish(norm(params["norm_out"], x)))


def _nearest(x: Array) -> Array:
    """Doubles both sides by repeating every position."""
    return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)


def _map_chunks(function: Callable[[Array], Array], x: Array, chunk: int | None) -> Array:
    """`function` over the leading axis in groups of `chunk` rows, then over what is left."""
    if chunk is None or chunk >= x.shape[0]:
        return function(x)
    whole = x.shape[0] - x.shape[0] % chunk
    y = lax.map(function, x[:whole].reshape(-1, chunk, *x.shape[1:]))
    y = y.reshape(whole, *y.shape[2:])
    return y if whole == x.shape[0] else jnp.concatenate([y, function(x[whole:])])
