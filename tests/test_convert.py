"""The key table between the reference's state dict and our tree: complete, exact, and strict."""

from __future__ import annotations

import dataclasses
import re

import jax
import ml_dtypes
import numpy as np
import pytest
from helpers import GOLDEN, golden_config, golden_params, golden_state

from marjax import convert, mar
from marjax.config import get_preset

NAMES = ("tiny", "tiny_p2")


def template(config):
    """The tree of a model with shapes for leaves, made without any array."""
    return jax.eval_shape(lambda key: mar.init(config, key), jax.random.key(0))


def problems(state, config):
    """What the one error about a state dict lists."""
    with pytest.raises(ValueError, match=r"^The state dict does not fit this configuration: .*\.$") as error:
        convert.from_state_dict(state, config)
    return str(error.value).split(": ", 1)[1].removesuffix(".").split("; ")


# --- The key table -----------------------------------------------------------------------------------------------


def test_keys_and_shapes_of_mar_base():
    """Our leaves map to exactly the keys and shapes of the published mar_base checkpoint."""
    lines = (GOLDEN / "keys_mar_base.txt").read_text(encoding="utf-8").splitlines()
    expected = {}
    for line in lines:
        key, shape = line.split(" ", 1)
        expected[key] = tuple(int(number) for number in re.findall(r"\d+", shape))

    assert convert.torch_shapes(template(get_preset("mar_base")), convert.mar_source) == expected
    assert len(expected) == 364


def test_a_key_belongs_to_one_leaf():
    leaves = jax.tree_util.tree_leaves_with_path(template(golden_config("tiny")))
    sources = [convert.mar_source("/".join(part.key for part in path), leaf.shape) for path, leaf in leaves]
    keys = [key for source in sources for key in source.keys]
    assert len(keys) == len(set(keys)) == len(golden_state("tiny"))


@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name):
    state, config = golden_state(name), golden_config(name)
    params = convert.from_state_dict(state, config)
    assert params.config == config and params.vae is None
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    assert jax.tree.map(np.shape, params.mar) == jax.tree.map(lambda leaf: leaf.shape, template(config))

    back = convert.to_state_dict(params)
    assert set(back) == set(state)
    for key, array in back.items():
        assert array.dtype == np.float32 and array.flags.c_contiguous
        np.testing.assert_array_equal(array, state[key], err_msg=key, strict=True)


def test_where_weights_go():
    """A few leaves by hand: a Linear weight is transposed, layers are stacked, leading ones are dropped."""
    state, tree = golden_state("tiny"), golden_params("tiny").mar
    np.testing.assert_array_equal(tree["z_proj"]["kernel"], state["z_proj.weight"].T)
    np.testing.assert_array_equal(
        tree["encoder_blocks"]["qkv"]["kernel"][3], state["encoder_blocks.3.attn.qkv.weight"].T
    )
    np.testing.assert_array_equal(tree["decoder_blocks"]["norm2"]["scale"][1], state["decoder_blocks.1.norm2.weight"])
    np.testing.assert_array_equal(tree["mask_token"], state["mask_token"][0])
    head, prefix = tree["diffloss"]["res_blocks"], "diffloss.net.res_blocks.2."
    np.testing.assert_array_equal(head["adaLN"]["bias"][2], state[f"{prefix}adaLN_modulation.1.bias"])
    for ours, theirs in (("mlp_0", "mlp.0"), ("mlp_2", "mlp.2")):
        np.testing.assert_array_equal(head[ours]["kernel"][2], state[f"{prefix}{theirs}.weight"].T)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_narrow_weights_become_float32(dtype):
    state = {key: array.astype(dtype) for key, array in golden_state("tiny_p2").items()}
    back = convert.to_state_dict(convert.from_state_dict(state, golden_config("tiny_p2")))
    for key, array in back.items():
        np.testing.assert_array_equal(array, state[key].astype(np.float32), strict=True)


# --- State dicts that do not fit ---------------------------------------------------------------------------------


def test_every_missing_key_is_listed():
    state, config = golden_state("tiny_p2"), golden_config("tiny_p2")
    listed = problems({}, config)
    assert sorted(listed) == sorted(f"missing key {key}" for key in state)


def test_all_problems_come_in_one_error():
    state, config = dict(golden_state("tiny_p2")), golden_config("tiny_p2")
    del state["fake_latent"], state["decoder_blocks.2.mlp.fc1.weight"]
    state["z_proj.weight"] = state["z_proj.weight"].T
    state["encoder_blocks.1.norm1.bias"] = np.zeros((31,), np.float32)
    state["encoder_blocks.3.norm1.bias"] = np.zeros((), np.float32)
    state["vae.extra"] = state["encoder_blocks.4.norm1.bias"] = np.zeros((2, 2), np.float32)
    assert sorted(problems(state, config)) == [
        "key encoder_blocks.1.norm1.bias has shape (31,), expected (32,)",
        "key encoder_blocks.3.norm1.bias has shape (), expected (32,)",
        "key z_proj.weight has shape (64, 32), expected (32, 64)",
        "missing key decoder_blocks.2.mlp.fc1.weight",
        "missing key fake_latent",
        "unused key encoder_blocks.4.norm1.bias",
        "unused key vae.extra",
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda array: np.concatenate([array, array]),
        lambda array: array[:0],
        lambda array: array[None],
        lambda array: array[0],
        lambda array: array[..., :-1],
        lambda array: np.float32(0),
    ],
    ids=["doubled", "empty", "axis added", "axis dropped", "cut", "scalar"],
)
def test_every_shape_is_checked(change):
    state = {key: change(array) for key, array in golden_state("tiny_p2").items()}
    listed = problems(state, golden_config("tiny_p2"))
    expected = (
        f"key {key} has shape {np.shape(state[key])}, expected {array.shape}"
        for key, array in golden_state("tiny_p2").items()
    )
    assert sorted(listed) == sorted(expected)


def test_other_configuration_is_refused():
    state, config = golden_state("tiny_p2"), golden_config("tiny_p2")
    shallow = dataclasses.replace(config, encoder_depth=3, diffloss_d=4)
    listed = problems(state, shallow)
    assert len([problem for problem in listed if problem.startswith("unused key encoder_blocks.3.")]) == 12
    assert len([problem for problem in listed if problem.startswith("missing key diffloss.net.res_blocks.3.")]) == 8
    assert len(listed) == 20
    listed = problems(state, dataclasses.replace(config, class_num=11))
    assert listed == ["key class_emb.weight has shape (10, 32), expected (11, 32)"]
