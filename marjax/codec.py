"""Between images, latents and tokens: patchify, and the codec of a model (identity for pixel-space models).

Images are float32 [B, H, W, C] in [0, 1] (or uint8), latents [B, h, w, c], tokens [B, S, D] in image order (row-major).
Values inside a token are ordered (channel, patch row, patch column), as in the reference.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from marjax import vae
from marjax.config import MARConfig
from marjax.types import Array, PyTree

VAE_CHUNK = 8  # images decoded at once, which bounds the memory of large batches


def patchify(latents: Array, patch_size: int) -> Array:
    """[B, h, w, c] latents -> [B, S, D] tokens in image order."""
    b, h, w, c = latents.shape
    p = patch_size
    x = latents.reshape(b, h // p, p, w // p, p, c)
    return x.transpose(0, 1, 3, 5, 2, 4).reshape(b, (h // p) * (w // p), c * p * p)


def unpatchify(tokens: Array, patch_size: int) -> Array:
    """[B, S, D] tokens of a square image, in image order -> [B, h, w, c] latents."""
    b, s, d = tokens.shape
    p = patch_size
    side, c = round(s**0.5), d // p**2
    x = tokens.reshape(b, side, side, c, p, p)
    return x.transpose(0, 1, 4, 2, 5, 3).reshape(b, side * p, side * p, c)


def encode_pixels(images: Array) -> Array:
    """Images in [0, 1], or uint8, -> latents of a pixel-space model, in [-1, 1]."""
    scale = 255.0 if images.dtype == jnp.uint8 else 1.0
    return images.astype(jnp.float32) * (2.0 / scale) - 1.0


def decode_pixels(latents: Array) -> Array:
    """Latents of a pixel-space model, or decoded values in [-1, 1], -> images in [0, 1]."""
    return jnp.clip((latents + 1.0) / 2.0, 0.0, 1.0)


@functools.partial(jax.jit, static_argnums=0)
@jax.named_scope("autoencoder")
def latents_to_images(config: MARConfig, vae_params: PyTree, latents: Array) -> Array:
    """Latents of any model -> images.

    Args:
        config: the model's configuration.
        vae_params: the autoencoder's parameters; None for a pixel-space model.
        latents: [B, h, w, c] float32.

    Returns:
        [B, H, W, C] float32 in [0, 1].
    """
    if config.vae is None:
        return decode_pixels(latents)
    return decode_pixels(vae.decode(vae_params, config.vae, latents / config.vae.scale, chunk=VAE_CHUNK))


@functools.partial(jax.jit, static_argnums=0)
def images_to_latents(config: MARConfig, vae_params: PyTree, images: Array) -> Array:
    """Images -> latents of any model; of an autoencoder, the means.

    Args:
        config: the model's configuration.
        vae_params: the autoencoder's parameters; None for a pixel-space model.
        images: [B, H, W, C] in [0, 1], or uint8.

    Returns:
        [B, h, w, c] float32.
    """
    pixels = encode_pixels(images)
    if config.vae is None:
        return pixels

    def mean(image: Array) -> Array:
        return vae.encode(vae_params, config.vae, image[None])[0][0]

    return jax.lax.map(mean, pixels, batch_size=VAE_CHUNK) * config.vae.scale


def images_to_tokens(config: MARConfig, images: Array) -> Array:
    """Images of a pixel-space model -> [B, S, D] tokens in image order."""
    return patchify(encode_pixels(images), config.patch_size)


def moments_to_tokens(config: MARConfig, moments: Array, noise: Array) -> Array:
    """Latents drawn from their distribution -> tokens.

    Args:
        config: the configuration of a latent model.
        moments: [B, h, w, 2c] mean and log variance from `vae.encode`, in the halves of the last axis.
        noise: [B, h, w, c] standard normal.

    Returns:
        [B, S, D] float32 tokens in image order, in the model's scale.
    """
    mean, logvar = jnp.split(moments.astype(jnp.float32), 2, axis=-1)
    return patchify(vae.sample_posterior(mean, logvar, noise) * config.vae.scale, config.patch_size)
