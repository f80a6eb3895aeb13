"""The key table between the reference's PyTorch state dict and our parameter tree, complete in both directions.

Our leaf `a/b/c` corresponds to the reference key(s) that a table gives it, through one named transform:

    linear   torch Linear weight [out, in] <-> kernel [in, out]
    row      a leading axis of 1 in torch (position embeddings [1, N, E]) that we drop
    same     unchanged

Depth-stacked leaves [L, ...] take one reference key per layer. The table of the transformer is here, that of the
autoencoder in `marjax/convert_vae.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from marjax import mar
from marjax.config import MARConfig
from marjax.types import DTYPES, MARParams, PyTree


@dataclasses.dataclass(frozen=True)
class Transform:
    """A reversible change of layout between one torch tensor and one (layer of a) leaf."""

    from_torch: Callable[[np.ndarray], np.ndarray]
    to_torch: Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a leaf lives in the reference's state dict.

    Attributes:
        keys: its reference key; for a stacked leaf one per layer.
        transform: from the tensor of one key to the leaf, or to one layer of it.
        stacked: whether the leaf has a leading layer axis.
    """

    keys: tuple[str, ...]
    transform: Transform
    stacked: bool = False


Table = Callable[[str, tuple[int, ...]], Source]  # path and shape of a leaf -> its source

LINEAR = Transform(np.transpose, np.transpose)
ROW = Transform(lambda array: array[0], lambda array: array[None])
SAME = Transform(lambda array: array, lambda array: array)

# Our path -> reference key, for leaves outside the stacks.
_PLAIN = {
    "fake_latent": ("fake_latent", SAME),
    "class_emb": ("class_emb.weight", SAME),
    "mask_token": ("mask_token", ROW),
    "encoder_pos_embed_learned": ("encoder_pos_embed_learned", ROW),
    "decoder_pos_embed_learned": ("decoder_pos_embed_learned", ROW),
    "diffusion_pos_embed_learned": ("diffusion_pos_embed_learned", ROW),
}
# Our module -> reference module; its `kernel`/`scale` is the reference `weight`, its `bias` the `bias`.
_MODULES = {
    "z_proj": "z_proj",
    "z_proj_ln": "z_proj_ln",
    "encoder_norm": "encoder_norm",
    "decoder_embed": "decoder_embed",
    "decoder_norm": "decoder_norm",
    "diffloss/time_embed/mlp_0": "diffloss.net.time_embed.mlp.0",
    "diffloss/time_embed/mlp_2": "diffloss.net.time_embed.mlp.2",
    "diffloss/cond_embed": "diffloss.net.cond_embed",
    "diffloss/input_proj": "diffloss.net.input_proj",
    "diffloss/final_layer/linear": "diffloss.net.final_layer.linear",
    "diffloss/final_layer/adaLN": "diffloss.net.final_layer.adaLN_modulation.1",
}
_BLOCK_MODULES = {
    **{"norm1": "norm1", "norm2": "norm2", "qkv": "attn.qkv", "proj": "attn.proj"},
    **{"fc1": "mlp.fc1", "fc2": "mlp.fc2"},
}
_STACKS = {
    "encoder_blocks": ("encoder_blocks", _BLOCK_MODULES),
    "decoder_blocks": ("decoder_blocks", _BLOCK_MODULES),
    "diffloss/res_blocks": (
        "diffloss.net.res_blocks",
        {"in_ln": "in_ln", "mlp_0": "mlp.0", "mlp_2": "mlp.2", "adaLN": "adaLN_modulation.1"},
    ),
}
_LEAVES = {"kernel": ("weight", LINEAR), "scale": ("weight", SAME), "bias": ("bias", SAME)}


def mar_source(path: str, shape: tuple[int, ...]) -> Source:
    """The table of the `mar` tree.

    Args:
        path: slash-separated path of a leaf.
        shape: its shape; [L, ...] in a stack.
    """
    if path in _PLAIN:
        key, transform = _PLAIN[path]
        return Source((key,), transform)
    module, leaf = path.rsplit("/", 1)
    name, transform = _LEAVES[leaf]
    if module in _MODULES:
        return Source((f"{_MODULES[module]}.{name}",), transform)
    stack, inner = module.rsplit("/", 1)
    prefix, modules = _STACKS[stack]
    keys = tuple(f"{prefix}.{i}.{modules[inner]}.{name}" for i in range(shape[0]))
    return Source(keys, transform, stacked=True)


def from_state_dict(state: Mapping[str, np.ndarray], config: MARConfig, dtype: str = "float32") -> MARParams:
    """Builds parameters from a reference MAR state dict.

    Args:
        state: torch key -> array (float32, float16 or bfloat16).
        config: the configuration the weights belong to.
        dtype: of the kernels, "float32" or "bfloat16"; every other leaf is float32.

    Returns:
        Parameters, `vae` None.

    Raises:
        ValueError: if a key is unused, a leaf unfilled, or a shape wrong; all of them in one message.
    """
    tree = fill(mar_template(config), state, mar_source, dtype)
    return MARParams(mar=jax.tree.map(jnp.asarray, tree), vae=None, config=config)


def to_state_dict(params: MARParams) -> dict[str, np.ndarray]:
    """The reference's state dict of these parameters: torch key -> float32 array."""
    return spread(params.mar, mar_source)


@functools.lru_cache(maxsize=16)
def mar_template(config: MARConfig) -> PyTree:
    """The `mar` tree of a configuration, with `jax.ShapeDtypeStruct` for leaves."""
    return jax.eval_shape(lambda key: mar.init(config, key), jax.random.key(0))


def misfits(template: PyTree, shapes: Mapping[str, tuple[int, ...]], table: Table) -> list[str]:
    """What keeps a state dict from filling a tree: a clause for each missing key, unused key and wrong shape.

    Args:
        template: tree of arrays or `jax.ShapeDtypeStruct`.
        shapes: torch key -> shape of its tensor.
        table: the source of each leaf.
    """
    expected = torch_shapes(template, table)
    problems = [f"missing key {key}" for key in expected if key not in shapes]
    problems += [f"unused key {key}" for key in sorted(set(shapes) - set(expected))]
    for key in (key for key in expected if key in shapes):
        if shapes[key] != expected[key]:
            problems.append(f"key {key} has shape {shapes[key]}, expected {expected[key]}")
    return problems


def fill(template: PyTree, state: Mapping[str, np.ndarray], table: Table, dtype: str = "float32") -> PyTree:
    """A tree of numpy arrays like `template`, with the values of a state dict, of which it reads one tensor at a time.

    Args:
        template: tree of arrays or `jax.ShapeDtypeStruct`.
        state: torch key -> array, or anything with a shape that `np.asarray` reads.
        table: the source of each leaf.
        dtype: of leaves named `kernel`, "float32" or "bfloat16"; every other leaf is float32.

    Raises:
        ValueError: if a key is unused, a leaf unfilled, or a shape wrong; all of them in one message.
    """
    if problems := misfits(template, {key: np.shape(tensor) for key, tensor in state.items()}, table):
        raise ValueError(f"The state dict does not fit this configuration: {'; '.join(problems)}.")

    def filled(path: tuple, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        name = _name(path)
        source = table(name, leaf.shape)
        array = np.empty(leaf.shape, DTYPES[dtype] if name.endswith("/kernel") else np.float32)
        for layer, key in zip(array if source.stacked else array[None], source.keys, strict=True):
            layer[...] = source.transform.from_torch(np.asarray(state[key]))
        return array

    return jax.tree_util.tree_map_with_path(filled, template)


def spread(tree: PyTree, table: Table) -> dict[str, np.ndarray]:
    """Inverts `fill`: torch key -> float32 array."""
    arrays = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), tree)
    # Copies: a view of an array's buffer would be read-only, which torch.from_numpy warns about.
    return {key: np.array(tensor, order="C") for key, tensor in tensors(arrays, table)}


def torch_shapes(tree: PyTree, table: Table) -> dict[str, tuple[int, ...]]:
    """Torch key -> shape of its tensor; `tree` holds arrays or `jax.ShapeDtypeStruct`."""
    # A broadcast scalar has a shape without taking memory.
    arrays = jax.tree.map(lambda leaf: np.broadcast_to(np.float32(0), leaf.shape), tree)
    return {key: tensor.shape for key, tensor in tensors(arrays, table)}


def tensors(tree: PyTree, table: Table) -> Iterator[tuple[str, np.ndarray]]:
    """Torch key and tensor, a view, for a tree of numpy arrays."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        source = table(_name(path), leaf.shape)
        for key, layer in zip(source.keys, leaf if source.stacked else leaf[None], strict=True):
            yield key, source.transform.to_torch(layer)


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
