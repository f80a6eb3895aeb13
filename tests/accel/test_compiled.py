"""What XLA makes of cached decoding: caches are updated in place, nothing leaves the device, nothing compiles twice."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sample_helpers import CONFIG, KEY, LABELS, OPTIONS, PARAMS, compiled_text, in_loops, sample

import marjax
from marjax.accel import resolve
from marjax.accel.plan import plan_for

# Both kinds of steps in every segment, and several deep layers, where whole-cache copies are likeliest.
MIXED = {"lazymar:warmup=0,refresh_every=3,prune_layer=1": 1, "marche": 2}


def cache_shapes(accel: str, dtype: str, num_iter: int) -> set[str]:
    """HLO names of the arrays that the token policy updates; not of LazyMAR's values, which every step replaces."""
    policy, guided_rows = resolve(accel), MIXED[accel] * len(LABELS)
    plan = plan_for(CONFIG, num_iter, OPTIONS["num_sampling_steps"], accel=policy)
    room = max(segment.previous for segment in plan.segments)
    init = functools.partial(policy.tokens.init, CONFIG, guided_rows, room, jnp.dtype(dtype))
    names, values_ndim = {"float32": "f32", "uint16": "u16"}, 4
    leaves = [leaf for leaf in jax.tree.leaves(jax.eval_shape(init)) if leaf.ndim != values_ndim]
    return {f"{names[leaf.dtype.name]}[{','.join(map(str, leaf.shape))}]" for leaf in leaves}


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("accel", MIXED)
def test_caches_are_updated_in_place(accel, dtype, monkeypatch):
    text = compiled_text(monkeypatch, PARAMS, dtype=dtype, accel=accel, num_iter=12)
    shapes = cache_shapes(accel, dtype, 12)
    assert not re.search(r"callback|outfeed|infeed|\bsend\b|\brecv\b|all-|collective", text)
    made = [re.match(r"(?:ROOT )?%?(\S+) = (\w+\[[\d,]*\])\S* ([\w-]+)\(", line) for line in in_loops(text)]
    made = [match.groups() for match in made if match and match[2] in shapes]
    assert {shape for _, shape, _ in made} == shapes
    passed_on = ("parameter", "get-tuple-element", "dynamic-update-slice")
    others = [(name, kind) for name, _, kind in made if kind not in passed_on]
    assert [name for name, kind in others if kind != "fusion" or "dynamic-update-slice" not in name] == []


def test_second_call_does_not_recompile():
    options = {**OPTIONS, "num_sampling_steps": 4, "accel": "marche:condition=on,head=on,head_period=2"}
    first = marjax.sample_latents(PARAMS, KEY, LABELS, **options)
    before = sample._run._cache_size()
    for change in ({"cfg": 2.5}, {"temperature": 0.5}, {"indices": np.arange(8) + 100}):
        other = marjax.sample_latents(PARAMS, jax.random.key(8), LABELS[::-1], **{**options, **change})
        assert np.abs(other - first).max() > 0.1
    assert sample._run._cache_size() == before
    marjax.sample_latents(PARAMS, KEY, LABELS, **{**options, "accel": "marche:condition=on,head=on,head_period=3"})
    assert sample._run._cache_size() == before + 1
