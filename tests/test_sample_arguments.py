"""What the sampling functions say of bad input: one sentence; and labels given by name."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sample_helpers import CONFIG, KEY, LABELS, OPTIONS, PARAMS, sample

import marjax
from marjax import codec
from marjax.arguments import label_list
from marjax.config import VAEConfig, get_preset


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        ([0, 10], {}, r"labels holds 10; expected 0 to 9"),
        ([-1], {}, r"labels holds -1; expected 0 to 9"),
        ([0.5], {}, r"labels must be integers, got float64"),
        (["bag"], {}, r"labels must be integers, got <U3"),
        ([True], {}, r"labels must be integers, got bool"),
        ([[1], [2, 3]], {}, r"must be a list of integers"),
        ([], {}, r"labels must be a non-empty list"),
        ([[1, 2]], {}, r"non-empty list or 1-D array of integers, got shape \(1, 2\)"),
        (3, {}, r"got shape \(\)"),
        ([2**40], {}, r"labels holds 1099511627776; expected 0 to 9"),
        (None, {}, r"labels=None needs batch_size"),
        (None, {"batch_size": 2, "cfg": 3.0}, r"cfg=3.0 needs labels"),
        ([1], {"batch_size": 0}, r"batch_size=0 must be a positive integer"),
        ([1], {"indices": [0, 1]}, r"indices has 2 entries for 1 labels"),
        ([1], {"indices": [-2]}, r"indices holds -2; expected 0 to 2147483647"),
        ([1], {"num_iter": 0}, r"num_iter=0 must be an integer in \[1, 64\]"),
        ([1], {"num_iter": 65}, r"num_iter=65 must be an integer in \[1, 64\]"),
        ([1], {"num_iter": 2.0}, r"num_iter=2.0 must be an integer"),
        ([1], {"temperature": -0.1}, r"temperature=-0.1 must be finite and >= 0"),
        ([1], {"temperature": float("nan")}, r"temperature=nan must be finite"),
        ([1], {"temperature": "hot"}, r"temperature='hot' must be a number"),
        ([1], {"cfg": -1.0}, r"cfg=-1.0 must be finite and >= 0"),
        ([1], {"cfg": float("inf")}, r"cfg=inf must be finite"),
        ([1], {"cfg": 1e39}, r"cfg=1e\+39 must be finite"),
        ([1], {"cfg_schedule": "cosine"}, r"cfg_schedule='cosine' must be one of linear, constant"),
        ([1], {"num_sampling_steps": 1}, r"at least 2 steps"),
        ([1], {"num_sampling_steps": "many"}, r"num_sampling_steps='many'"),
        ([1], {"dtype": "float16"}, r"dtype='float16' must be None or one of float32, bfloat16"),
        ([1], {"accel": "warp"}, r"Unknown accel 'warp'; expected one of none"),
        ([1], {"accel": 3}, r"accel=3 must be a name or a marjax.Accel"),
        ([1], {"order": "spiral"}, r"order='spiral' must be 'random' or an array"),
        ([1], {"order": np.zeros(64, int)}, r"order row 0 is not a permutation of 0 to 63"),
        ([1], {"order": np.arange(63)}, r"expected integers, \[64\] or \[1, 64\]"),
        ([1], {"order": [[0, 1], [2]]}, r"order=\[\[0, 1\], \[2\]\] must be 'random' or an array"),
        ([1], {"noise": np.zeros((1, 64, 40, 16))}, r"expected \[B, S, T \+ 1, D\] = \(1, 64, 41, 16\)"),
        ([1], {"noise": [[0.0], [0.0, 1.0]]}, r"noise must be None or an array of numbers"),
        ([1], {"noise": np.zeros((1, 64, 41, 16), complex)}, r"noise must be floating point, got complex128"),
        ([1], {"cfg": [[1], [1, 2]]}, r"cfg=\[\[1\], \[1, 2\]\] must be a number"),
        ([1], {"cfg": "1.5"}, r"cfg='1.5' must be a number"),
        ([1], {"num_iter": True}, r"num_iter=True must be an integer"),
        ([1], {"batch_size": True}, r"batch_size=True must be a positive integer"),
        ([1], {"temperature": 1e38}, r"non-finite latents: .* or weights, cfg or temperature are too large"),
        ([1], {"noise": np.full((1, 64, 41, 16), np.nan)}, r"noise holds 41984 values that are NaN or infinite"),
        ([1], {"cfg": np.ones(2)}, r"cfg has shape \(2,\); expected one number"),
        (None, {"batch_size": 2, "cfg": "high"}, r"cfg='high' must be a number"),
    ],
)
def test_bad_input_gets_one_sentence(labels, options, message):
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        marjax.sample_latents(PARAMS, KEY, labels, **{**OPTIONS, **options} if labels is not None else options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rng", [0, np.uint32(3), np.zeros(3, np.uint32), jax.random.split(KEY, 2)])
def test_what_is_no_key(rng):
    with pytest.raises(TypeError, match=r"^rng is .*; expected one PRNG key, such as jax.random.key\(0\)\.$"):
        marjax.sample_latents(PARAMS, rng, LABELS, **OPTIONS)


@pytest.mark.parametrize("function", [marjax.sample, marjax.sample_latents])
def test_what_is_no_model(function):
    with pytest.raises(TypeError, match=r"params is a dict; expected a marjax.MARParams, as marjax.load returns\."):
        function(PARAMS.mar, KEY, LABELS, **OPTIONS)


def test_lists_with_traced_entries_are_refused():
    with pytest.raises(TypeError, match=r"labels is a list with traced entries; give one array \(jnp.stack\)"):
        jax.eval_shape(lambda label: marjax.sample_latents(PARAMS, KEY, [label, 1], **OPTIONS), 3)


def test_traced_noise_may_be_of_any_float_dtype():
    noise = jax.ShapeDtypeStruct((1, 64, 41, 16), jnp.bfloat16)
    shape = jax.eval_shape(lambda noise: marjax.sample_latents(PARAMS, KEY, [3], noise=noise, **OPTIONS), noise)
    assert (shape.shape, shape.dtype) == ((1, 8, 8, 16), jnp.float32)


@pytest.mark.parametrize("name", ["cfg", "temperature"])
def test_traced_scales_must_be_scalars(name):
    with pytest.raises(ValueError, match=rf"{name} has shape \(2,\); expected one number"):
        jax.eval_shape(lambda x: marjax.sample_latents(PARAMS, KEY, LABELS, **{**OPTIONS, name: x}), np.ones(2))


def test_images_that_are_not_finite_are_refused(monkeypatch):
    """The autoencoder's part: the latents are finite."""
    config = dataclasses.replace(CONFIG, vae=VAEConfig(ch_mult=(1, 1, 1, 1)))
    monkeypatch.setattr(sample, "sample_latents", lambda *arguments, **options: jnp.zeros((1, 8, 8, 16)))
    monkeypatch.setattr(codec, "latents_to_images", lambda *arguments: jnp.full((1, 64, 64, 3), jnp.nan))
    with pytest.raises(ValueError, match="The model generated non-finite images: its weights hold NaN"):
        marjax.sample(PARAMS.replace(config=config, vae={}), KEY, [0])


def test_nan_weights_are_never_a_silent_picture():
    tree = {**PARAMS.mar, "z_proj": {**PARAMS.mar["z_proj"], "bias": jnp.full(48, jnp.nan)}}
    with pytest.raises(ValueError, match="non-finite latents: its weights hold NaN"):
        marjax.sample_latents(PARAMS.replace(mar=tree), KEY, LABELS, **OPTIONS)


def test_labels_by_name():
    names = ("t-shirt", "Bag", "ankle boot")
    assert label_list(names, 3, "bag, ankle boot,0") == [1, 2, 0]
    assert label_list(names, 3, "all") == [0, 1, 2]
    assert label_list((), 5, "4,4") == [4, 4]
    for text in ("hat", "3", "", "-1"):
        with pytest.raises(ValueError, match=r"Unknown label .*expected a number from 0 to 2 or one of t-shirt, Bag"):
            label_list(names, 3, text)


def test_labels_of_many_classes():
    names = get_preset("mar_base").class_names
    assert label_list(names, 1000, "golden retriever, 3,crane (bird)") == [207, 3, 134]
    for text, close in (("golden retriver", ", such as Golden Retriever.*"), ("zzzzzzzz", "")):
        pattern = rf"Unknown label '{text}'; expected a number from 0 to 999 or a class name{close}\.$"
        with pytest.raises(ValueError, match=pattern) as refused:
            label_list(names, 1000, text)
        assert len(str(refused.value)) < 250
