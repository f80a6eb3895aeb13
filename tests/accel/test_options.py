"""Accelerations by name: what every option does, and what an unusable one says."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from sample_helpers import KEY, LABELS, OPTIONS, PARAMS

import marjax
from marjax import Accel, ActiveTokens, ConditionCache, HeadCache, LazyTokens, Refresh
from marjax.accel import NAMES, resolve
from marjax.accel.options import _PARSERS


def test_names():
    assert resolve("none") == Accel()
    assert resolve("lazymar") == Accel(tokens=LazyTokens(), condition=ConditionCache(), head=HeadCache())
    assert resolve("marche") == Accel(tokens=ActiveTokens())
    assert all(resolve(accel) is accel for accel in NAMES.values())


def test_options():
    got = resolve("marche:budget=32,refresh_every=4,skip_mlp=off,encoder=full,condition=on,head=on")
    tokens = ActiveTokens(budget=32, refresh=Refresh(warmup=0, period=4), skip_mlp=False, encoder="full")
    assert got == Accel(tokens=tokens, condition=ConditionCache(), head=HeadCache())
    assert got == resolve("marche: head=on,encoder=full, condition=on,skip_mlp=off,refresh_every=4, budget = 32")
    assert resolve("lazymar:tokens=off,head=off") == Accel(condition=ConditionCache())
    assert resolve("lazymar:refresh_every=never,warmup=2").tokens.refresh == Refresh(warmup=2, period=None)
    assert resolve("none:condition=on,warmup=1").condition == ConditionCache(refresh=Refresh(warmup=1, period=9))
    tokens = resolve("lazymar:shares=0:1+30:0.25,prune_layer=1,slack=3").tokens
    assert tokens == LazyTokens(shares=((0, 1.0), (30, 0.25)), prune_layer=1, slack=3)
    head = resolve("none:head=on,head_period=5,head_warmup=0.5,head_skipped=1+3").head
    assert head == HeadCache(period=5, warmup=0.5, skipped=(1, 3))
    assert resolve("lazymar:head_skipped=none").head == HeadCache(skipped=())


@pytest.mark.parametrize(
    "policy", [LazyTokens(), ActiveTokens(), HeadCache()], ids=lambda policy: type(policy).__name__
)
def test_every_field_can_be_given_as_text(policy):
    kinds = {field.type for field in dataclasses.fields(policy) if field.name != "refresh"}
    assert kinds <= set(_PARSERS)


def test_token_and_condition_cache_refresh_together():
    published = Refresh(warmup=5, period=9)
    for accel, expected in (
        (Accel(tokens=ActiveTokens(), condition=ConditionCache()), Refresh(period=3)),
        (Accel(tokens=LazyTokens(), condition=ConditionCache(refresh=published)), published),
        (Accel(condition=ConditionCache()), published),
        (Accel(condition=ConditionCache(refresh=Refresh(warmup=2))), Refresh(warmup=2)),
    ):
        np.testing.assert_array_equal(accel.refresh_steps(20, guided=True), expected.steps(20))
    assert Accel(condition=ConditionCache()).refresh_steps(20, guided=False).all()
    assert np.flatnonzero(published.steps(20)).tolist() == [0, 1, 2, 3, 4, 5, 14]
    with pytest.raises(ValueError, match="refresh together, but have refresh=Refresh"):
        Accel(tokens=ActiveTokens(), condition=ConditionCache(refresh=published))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fast", "Unknown accel 'fast'; expected one of none, lazymar, marche"),
        ("marche:", "'' is no option; expected NAME=VALUE"),
        ("marche:budget", "'budget' is no option; expected NAME=VALUE"),
        ("marche:speed=9", "unknown option 'speed'; expected one of budget, buffers, condition, decision_layer"),
        ("marche:budget=many", "budget='many' must be a non-negative integer"),
        ("marche:budget=0", "budget=0 must be None or an integer from 1 to 2"),
        ("marche:budget=99999999999", "budget=99999999999 must be None or an integer from 1 to 2"),
        ("marche:budget=3,budget=4", "budget is given twice"),
        ("marche:select=best", "select='best' must be one of attention, least_attention, random"),
        ("marche:skip_mlp=maybe", "skip_mlp='maybe' must be on or off"),
        ("marche:refresh_every=0", 'refresh_every=0 must be a positive integer or "never"'),
        ("marche:decision_layer=9", "decision_layer=9 must leave a layer behind it, but the decoder has 5 layers"),
        ("marche:encoder=full,encoder_buffers=recomputed", "has no meaning with encoder='full'"),
        ("marche:head_period=3", "head_period needs head=on"),
        ("lazymar:prune_layer=4", "prune_layer=4 must leave a layer behind it, but the decoder has 5 layers"),
        ("lazymar:shares=5:0.5", "the steps must begin at 0 and ascend to at most 63"),
        ("lazymar:shares=0:1+100:0.5", "the steps must begin at 0 and ascend to at most 63"),
        ("lazymar:shares=0:2", "shares=2.0: a number in"),
        ("lazymar:shares=0:much", "shares='much' must be a number"),
        ("lazymar:shares=0", "shares='0' must be pairs STEP:SHARE"),
        ("lazymar:head_period=0", "head_period: period=0 must be None or an integer from 1"),
        ("lazymar:head_warmup=7", "head_warmup: warmup=7.0: a number in"),
        ("lazymar:head_skipped=1", "heads of fewer than 6 blocks are left exact unless a period is given"),
        ("lazymar:head_period=3,head_skipped=1+5", "names a block that the head, which has 3, lacks"),
        ("none:budget=3", "unknown option 'budget'"),
        ("none:tokens=on", "no token cache of that name to switch on"),
        ("none:refresh_every=3", "refresh_every has no meaning without a token or condition cache"),
        ("lazymar:tokens=off,condition=off,warmup=3", "warmup has no meaning"),
        ("lazymar:tokens=off,slack=3", "unknown option 'slack'"),
    ],
)
def test_unusable_text_gets_one_sentence(text, message):
    with pytest.raises(ValueError, match=message) as refused:
        marjax.sample_latents(PARAMS, KEY, LABELS[:1], accel=text, **OPTIONS)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Accel(tokens="lazymar"), TypeError, "tokens='lazymar' must be an instance of a TokenPolicy"),
        (lambda: Accel(tokens=LazyTokens), TypeError, "must be an instance of a TokenPolicy"),
        (lambda: Accel(condition=True), TypeError, "condition=True must be None or an instance of a ConditionCache"),
        (lambda: Accel(head=None), TypeError, "head=None must be an instance of a HeadPolicy"),
        (lambda: resolve(3), TypeError, "accel=3 must be a name or a marjax.Accel, not int"),
        (lambda: ActiveTokens(refresh=None), TypeError, "refresh=None must be an instance of a Refresh"),
        (lambda: ConditionCache(refresh=3), TypeError, "refresh=3 must be None or an instance of a Refresh"),
        (lambda: ActiveTokens(decision_layer=2.0), ValueError, "decision_layer=2.0 must be an integer from 1"),
        (lambda: ActiveTokens(budget=True), ValueError, "budget=True must be None or an integer from 1"),
        (lambda: ActiveTokens(skip_mlp="off"), ValueError, "skip_mlp='off' must be True or False"),
        (lambda: ActiveTokens(include_generating=2), ValueError, "include_generating=2 must be True or False"),
        (lambda: LazyTokens(prune_layer=None), ValueError, "prune_layer=None must be an integer from 0"),
        (lambda: LazyTokens(slack=-1), ValueError, "slack=-1 must be an integer from 0"),
        (lambda: LazyTokens(shares=(0, 1.0)), ValueError, "must be pairs of a step and a share"),
        (lambda: LazyTokens(shares=((0, 1.0, 2),)), ValueError, "must be pairs of a step and a share"),
        (lambda: LazyTokens(shares=()), ValueError, "must be pairs of a step and a share"),
        (lambda: HeadCache(skipped=1), ValueError, "skipped=1 must be None or a sequence of integers"),
        (lambda: HeadCache(skipped=(True,)), ValueError, "must be None or a sequence of integers"),
        (lambda: HeadCache(warmup="a"), ValueError, "warmup='a': a number in"),
        (lambda: HeadCache(warmup=float("nan")), ValueError, "warmup=nan: a number in"),
        (lambda: Refresh(period=2.0), ValueError, "period=2.0 must be None or an integer from 1"),
        (lambda: Refresh(warmup=-1), ValueError, "warmup=-1 must be an integer from 0"),
    ],
)
def test_parts_and_values_of_the_wrong_kind(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_values_are_put_into_one_form():
    """Numpy's numbers and lists do, and every policy can be a static argument."""
    assert ActiveTokens(budget=np.int64(20)) == ActiveTokens(budget=20)
    assert LazyTokens(shares=[[0, 1], [np.int32(9), np.float32(0.5)]]) == LazyTokens(shares=((0, 1.0), (9, 0.5)))
    assert HeadCache(skipped=np.array([1, 2])) == HeadCache(skipped=(1, 2))
    assert len({hash(resolve(name)) for name in NAMES}) == 3
    with pytest.raises(TypeError, match="return_trace='no' must be True or False"):
        marjax.sample_latents(PARAMS, KEY, LABELS[:1], return_trace="no", **OPTIONS)
