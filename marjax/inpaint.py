"""Inpainting: parts of given images are generated anew, the rest is kept bit for bit.

    image, mask ──> latents, mask of whole tokens ──> decode from the known tokens ──> images ──> known pixels put back

Known tokens come first in the order of generation, so the loop is that of plain sampling, started behind them. With
nothing known it gives the images of `marjax.sample`, from the same orders and noise.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from marjax import arguments, codec
from marjax.arguments import Known
from marjax.sample import as_tuple, check_codec, sample_latents, to_images
from marjax.types import Array, MARParams


def inpaint(params: MARParams, rng: Array, labels: Any, *, image: Any, mask: Any, **options) -> Array:
    """Generates the masked parts of images.

    Args:
        params: the model.
        rng: a JAX PRNG key.
        labels: [B] class indices of what to generate, or None for no class.
        image: [B, H, W, C], or [H, W, C] for all: uint8, or floating point in [0, 1]. Where `mask` is True its values
            do not matter.
        mask: [B, H, W], or [H, W] for all: bool, True: generate this pixel. The model generates whole tokens, those
            with any masked pixel; of these the pixels that are not masked are thrown away.
        **options: as for `marjax.sample_latents`.

    Returns:
        [B, H, W, C] float32 images in [0, 1]. Pixels that are not masked are those of `image`.

    Raises:
        ValueError: if shapes or ranges do not fit; as `marjax.sample_latents`; or if a latent model comes without its
            autoencoder.
        TypeError: if the mask is not of booleans or traced; as `marjax.sample_latents`.
    """
    check_codec(params, "inpaint_latents")
    config = params.config
    channels = 3 if config.vae else config.vae_embed_dim
    shape = (config.img_size, config.img_size, channels)
    image, mask = _check_pair("image", image, mask, shape, labels, options.get("indices"))
    image = _unit_range(image, mask)
    latents = codec.images_to_latents(config, params.vae, image)
    stride = config.img_size // config.latent_size
    made = inpaint_latents(params, rng, labels, latents=latents, mask=_any_in_patches(mask, stride), **options)
    latents, *trace = as_tuple(made)
    generated = to_images(params, latents, options.get("dtype"))
    images = jnp.where(mask[..., None], generated, image)
    return (images, *trace) if trace else images


def inpaint_latents(params: MARParams, rng: Array, labels: Any, *, latents: Any, mask: Any, **options) -> Array:
    """Generates the masked parts of latents.

    Args:
        params: the model.
        rng: a JAX PRNG key.
        labels: [B] class indices of what to generate, or None for no class.
        latents: [B, h, w, c], or [h, w, c] for all, floating point, in the model's scale.
        mask: [B, h, w], or [h, w] for all: bool, True: generate. Tokens with any masked position are generated whole.
        **options: as for `marjax.sample_latents`.

    Returns:
        [B, h, w, c] float32 latents. Tokens without a masked position are those of `latents`, bit for bit.

    Raises:
        ValueError: if shapes do not fit; as `marjax.sample_latents`.
        TypeError: if the mask is not of booleans or traced; as `marjax.sample_latents`.
    """
    config = arguments.check_params(params).config
    side = config.latent_size
    shape = (side, side, config.vae_embed_dim)
    latents, mask = _check_pair("latents", latents, mask, shape, labels, options.get("indices"))
    if not jnp.issubdtype(latents.dtype, jnp.floating):
        raise ValueError(f"latents are {latents.dtype}; expected floating point, in the model's scale.")
    unknown = _any_in_patches(mask, config.patch_size).reshape(len(mask), config.seq_len)
    known = Known(tokens=codec.patchify(latents, config.patch_size), unknown=unknown)
    return sample_latents(params, rng, labels, known=known, **options)


def _check_pair(
    name: str, values: Any, mask: Any, shape: tuple[int, int, int], labels: Any, indices: Any
) -> tuple[Array | np.ndarray, np.ndarray]:
    """Values [B, *shape] and mask [B, *shape[:2]], both given for all images or for each."""
    if isinstance(mask, jax.core.Tracer):
        raise TypeError("mask must not be traced: the number of tokens to generate decides which program runs.")
    try:
        # On no device, so that they go wherever the weights are.
        mask, values = np.asarray(mask), values if isinstance(values, jax.core.Tracer) else np.asarray(values)
    except jax.errors.TracerArrayConversionError as error:
        raise TypeError(f"mask or {name} is a list with traced entries; give one array (jnp.stack).") from error
    except ValueError as error:
        raise ValueError(f"mask and {name} must be arrays, or lists of equal shapes ({error}).") from error
    if mask.dtype != np.bool_:
        raise TypeError(f"mask is {mask.dtype}; expected bool, True where to generate.")
    if values.shape[-3:] != shape or values.ndim > 4 or mask.shape[-2:] != shape[:2] or mask.ndim > 3:
        raise ValueError(
            f"{name} has shape {values.shape} and mask {mask.shape}; expected {shape} and {shape[:2]}, for all images "
            "or with a leading axis of images."
        )
    counts = {len(values)} if values.ndim == 4 else set()
    counts |= {len(mask)} if mask.ndim == 3 else set()
    for named in (labels, indices):
        if named is not None and not isinstance(named, str):
            counts |= {len(named)} if hasattr(named, "__len__") and np.ndim(named) else {1}
    if len(counts) > 1:
        raise ValueError(
            f"{name} {values.shape}, mask {mask.shape}, labels and indices disagree on the number of images: "
            f"{sorted(counts)}."
        )
    total = counts.pop() if counts else 1
    if not total:
        raise ValueError(f"{name} {values.shape} and mask {mask.shape} hold no image; expected at least one.")
    xp = jnp if isinstance(values, jax.Array) else np
    return xp.broadcast_to(values, (total, *shape)), np.broadcast_to(mask, (total, *shape[:2]))


def _unit_range(image: Array | np.ndarray, mask: np.ndarray) -> Array:
    """Float32 pixels in [0, 1]; what is masked becomes 0.5, whatever it was."""
    if image.dtype == np.uint8:
        image = image.astype(np.float32) / np.float32(255.0)
    elif not jnp.issubdtype(image.dtype, jnp.floating):
        raise ValueError(f"image is {image.dtype}; expected uint8, or floating point in [0, 1].")
    elif not isinstance(image, jax.core.Tracer):
        kept = np.asarray(image, np.float32)[~mask]
        if kept.size and not (kept.min() >= 0.0 and kept.max() <= 1.0):  # also refuses NaN
            raise ValueError(f"image holds values from {kept.min()} to {kept.max()} outside the mask; expected [0, 1].")
    return jnp.where(mask[..., None], jnp.float32(0.5), jnp.asarray(image, jnp.float32))


def _any_in_patches(mask: np.ndarray, side: int) -> np.ndarray:
    """[B, H, W] bool -> [B, H / side, W / side]: True where any position of the square is."""
    b, h, w = mask.shape
    return mask.reshape(b, h // side, side, w // side, side).any(axis=(2, 4))
