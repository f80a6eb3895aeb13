"""The arguments of a sampling call: their defaults, and one clear error for each that cannot be used.

Values that are traced (under a user's own jit) cannot be checked and pass. All others become numpy arrays, which,
unlike arrays on a device, go wherever the weights are.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from marjax.config import MARConfig
from marjax.types import DTYPES, Array, MARParams

DEFAULT_BATCH_SIZE = 64
DEFAULT_NUM_ITER = 64
LISTED_NAMES = 20  # an error message lists no more class names


@struct.dataclass
class Known:
    """Tokens that are given, for inpainting.

    Attributes:
        tokens: [B, S, D] float32 in image order; where `unknown`, they do not matter.
        unknown: [B, S] bool, True: to generate.
    """

    tokens: Array
    unknown: Array


@struct.dataclass
class Images:
    """What determines each image, beside key and options; arrays of length B, or None.

    Attributes:
        indices: [B] int32.
        labels: [B] int32, or None for unconditional images.
        order: [B, S] int32, or None for random orders.
        noise: [B, S, T + 1, D], or None for fresh noise.
        known: tokens to keep, or None.
    """

    indices: Array
    labels: Array | None
    order: Array | None
    noise: Array | None
    known: Known | None

    def take(self, select: np.ndarray) -> Images:
        """Some of the images."""
        return jax.tree.map(lambda part: part[select], self)


def check_params(params: Any) -> MARParams:
    """Refuses what is not a model."""
    if not isinstance(params, MARParams):
        raise TypeError(f"params is a {type(params).__name__}; expected a marjax.MARParams, as marjax.load returns.")
    if params.mar is None:
        raise ValueError("params holds an autoencoder only, which generates nothing; load the model it belongs to.")
    return params


def check_key(rng: Any) -> Array | np.ndarray:
    """The words of a PRNG key, typed or raw: uint32 [2] or [4]."""
    if isinstance(rng, jax.Array | np.ndarray):
        typed = jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
        if (typed and rng.ndim == 0) or (rng.dtype == np.uint32 and rng.shape in ((2,), (4,))):
            # jax checks the width of raw words against its default kind of key, which may be another.
            words = jax.random.key_data(rng) if typed else rng
            return words if _is_traced(words) else np.asarray(words)
    got = f"{rng.dtype}{list(rng.shape)}" if hasattr(rng, "dtype") else repr(rng)
    raise TypeError(f"rng is {got}; expected one PRNG key, such as jax.random.key(0).")


def check_images(
    config: MARConfig, labels: Any, indices: Any, order: Any, noise: Any, known: Known | None, batch_size: int | None
) -> Images:
    """What determines each image; arguments as those of `marjax.sample_latents`."""
    if batch_size is not None and (not _is_integer(batch_size) or batch_size < 1):
        raise ValueError(f"batch_size={batch_size!r} must be a positive integer.")
    if labels is not None:
        labels = _check_range("labels", _integers("labels", labels), config.class_num)
    if indices is not None:
        indices = _check_range("indices", _integers("indices", indices), 2**31)
    named = next((array for array in (labels, indices, known and known.tokens) if array is not None), None)
    if named is None and batch_size is None:
        raise ValueError("labels=None needs batch_size (how many images) or indices.")
    total = batch_size if named is None else len(named)
    if indices is None:
        indices = np.arange(total, dtype=np.int32)
    if len(indices) != total:
        raise ValueError(f"indices has {len(indices)} entries for {total} labels; give one index per image.")
    return Images(
        labels=labels,
        indices=indices,
        order=_check_order(order, total, config.seq_len),
        noise=_check_noise(noise),
        known=known and _check_known(config, known, total),
    )


def _is_traced(value: Any) -> bool:
    return isinstance(value, jax.core.Tracer)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _integers(name: str, values: Any) -> Array | np.ndarray:
    """A non-empty 1-D array of integers; numpy unless traced, so that it can be checked under a user's jit too."""
    try:
        array = values if _is_traced(values) else np.asarray(values)
    except jax.errors.TracerArrayConversionError as error:
        raise TypeError(f"{name} is a list with traced entries; give one array (jnp.stack).") from error
    except ValueError as error:
        raise TypeError(f"{name}={values!r} must be a list of integers.") from error
    if array.ndim != 1 or array.shape[0] == 0:
        raise ValueError(f"{name} must be a non-empty list or 1-D array of integers, got shape {array.shape}.")
    if not jnp.issubdtype(array.dtype, jnp.integer):
        names = "; a name's label is its position in params.config.class_names" if array.dtype.kind == "U" else ""
        raise TypeError(f"{name} must be integers, got {array.dtype}{names}.")
    return array


def _check_range(name: str, array: Array | np.ndarray, stop: int) -> Array | np.ndarray:
    """The array as int32, checked to lie in [0, stop) unless traced."""
    if not _is_traced(array):
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= stop:
            raise ValueError(f"{name} holds {low if low < 0 else high}; expected 0 to {stop - 1}.")
    return array.astype(np.int32)


def _check_order(order: Any, total: int, seq_len: int) -> Array | np.ndarray | None:
    if isinstance(order, str):
        if order != "random":
            raise ValueError(f"order={order!r} must be 'random' or an array of permutations.")
        return None
    try:
        order = order if _is_traced(order) else np.asarray(order)
    except ValueError as error:
        raise ValueError(f"order={order!r} must be 'random' or an array of permutations.") from error
    if order.shape not in ((seq_len,), (total, seq_len)) or not jnp.issubdtype(order.dtype, jnp.integer):
        raise ValueError(
            f"order is {order.dtype}{list(order.shape)}; expected integers, [{seq_len}] or [{total}, {seq_len}]."
        )
    if _is_traced(order):
        return jnp.broadcast_to(order.astype(jnp.int32), (total, seq_len))
    wrong = np.flatnonzero((np.sort(np.atleast_2d(order), axis=1) != np.arange(seq_len)).any(axis=1))
    if wrong.size:
        raise ValueError(f"order row {wrong[0]} is not a permutation of 0 to {seq_len - 1}.")
    return np.broadcast_to(order.astype(np.int32), (total, seq_len))


def _check_noise(noise: Any) -> Array | np.ndarray | None:
    if noise is None:
        return None
    try:
        array = noise if _is_traced(noise) else np.asarray(noise)
    except ValueError as error:
        raise ValueError(f"noise must be None or an array of numbers ({error}).") from error
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"noise must be floating point, got {array.dtype}.")
    array = array.astype(np.float32)
    if not _is_traced(array) and not np.isfinite(array).all():
        raise ValueError(f"noise holds {np.sum(~np.isfinite(array))} values that are NaN or infinite.")
    return array


def _check_known(config: MARConfig, known: Known, total: int) -> Known:
    tokens, unknown = known.tokens, known.unknown
    if _is_traced(unknown):
        raise TypeError("What is known must not be traced: the number of known tokens decides which program runs.")
    unknown, tokens = np.asarray(unknown), tokens if _is_traced(tokens) else np.asarray(tokens, np.float32)
    shape = (total, config.seq_len)
    if unknown.shape != shape or unknown.dtype != np.bool_ or tokens.shape != (*shape, config.token_dim):
        raise ValueError(
            f"known has tokens {list(tokens.shape)} and unknown {unknown.dtype}{list(unknown.shape)}; expected "
            f"{[*shape, config.token_dim]} and bool{list(shape)}."
        )
    if not _is_traced(tokens) and not np.isfinite(tokens[~unknown]).all():
        raise ValueError("known holds NaN or infinite values in tokens that are to be kept.")
    # What is not known may be anything, NaN too, and must not reach the model.
    return Known(tokens=jnp.where(unknown[..., None], 0.0, tokens), unknown=unknown)


def check_cfg(config: MARConfig, cfg: float | Array | None, conditional: bool) -> tuple[Array, bool]:
    """The guidance scale, and whether there is any guidance."""
    if not conditional:
        if cfg is not None and (_is_traced(cfg) or check_scale("cfg", cfg) != 1.0):
            raise ValueError(f"cfg={cfg} needs labels: unconditional images have nothing to be guided by.")
        return np.float32(1.0), False
    cfg = check_scale("cfg", config.cfg if cfg is None else cfg)
    return cfg, _is_traced(cfg) or float(cfg) != 1.0


def check_scale(name: str, value: float | Array) -> Array | np.float32:
    """A finite float32 scalar >= 0."""
    if hasattr(value, "shape") and value.shape != ():
        raise ValueError(f"{name} has shape {value.shape}; expected one number.")
    if _is_traced(value):
        return value.astype(jnp.float32)
    try:
        number = float(None if isinstance(value, str) else value)
    except TypeError as error:
        raise ValueError(f"{name}={value!r} must be a number.") from error
    # What is finite in float64 may not be in float32.
    if not 0 <= number <= float(np.finfo(np.float32).max):
        raise ValueError(f"{name}={value} must be finite and >= 0.")
    return np.float32(number)


def check_finite(what: str, values: Array, dtype: str) -> None:
    """Refuses NaN and infinite values, unless traced: a picture of them would look like a black one."""
    if not _is_traced(values) and not bool(jnp.isfinite(values).all()):
        raise ValueError(
            f"The model generated non-finite {what}: its weights hold NaN or infinite values, or weights, cfg or "
            f"temperature are too large for dtype {dtype}; check these, or use dtype='float32'."
        )


def check_num_iter(config: MARConfig, num_iter: int | None) -> int:
    """The number of decode steps."""
    if num_iter is None:
        return default_num_iter(config)
    if not _is_integer(num_iter) or not 1 <= num_iter <= config.seq_len:
        raise ValueError(f"num_iter={num_iter!r} must be an integer in [1, {config.seq_len}], the sequence length.")
    return int(num_iter)


def default_num_iter(config: MARConfig) -> int:
    """The decode steps where none are asked for: 64, or one per token if there are fewer."""
    return min(DEFAULT_NUM_ITER, config.seq_len)


def default_dtype(platform: str | None = None) -> str:
    """The compute dtype where none is asked for: bfloat16 on accelerators, float32 on CPU.

    Args:
        platform: where the model runs, as `jax.Device.platform`; jax's default backend if None.
    """
    return "float32" if (platform or jax.default_backend()) == "cpu" else "bfloat16"


def check_dtype(dtype: str | None, platform: str | None) -> str:
    """Name of the compute dtype; `platform` as for `default_dtype`."""
    if dtype is None:
        return default_dtype(platform)
    name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    if name not in DTYPES:
        raise ValueError(f"dtype={dtype!r} must be None or one of {', '.join(DTYPES)}.")
    return name


def label_list(class_names: Sequence[str], class_num: int, text: str) -> list[int]:
    """Labels from a comma-separated list of class names and numbers, or "all".

    Raises:
        ValueError: if an entry is neither; the message lists the names, or of many those that are most like it.
    """
    if text.strip() == "all":
        return list(range(class_num))
    lookup = {name.lower(): index for index, name in enumerate(class_names)}
    labels = []
    for entry in (part.strip() for part in text.split(",")):
        label = lookup.get(entry.lower(), int(entry) if entry.isdecimal() else -1)
        if not 0 <= label < class_num:
            names = _names_like(entry, class_names)
            raise ValueError(f"Unknown label {entry!r}; expected a number from 0 to {class_num - 1}{names}.")
        labels.append(label)
    return labels


def _names_like(entry: str, class_names: Sequence[str]) -> str:
    if len(class_names) <= LISTED_NAMES:
        return f" or one of {', '.join(class_names)}" if class_names else ""
    by_lower = {name.lower(): name for name in class_names}
    close = difflib.get_close_matches(entry.lower(), by_lower, n=5, cutoff=0.5)
    return f" or a class name{', such as ' if close else ''}{', '.join(by_lower[name] for name in close)}"
