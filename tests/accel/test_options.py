"""Accelerations by name: what every option does, and what an unusable one says."""

from __future__ import annotations

import pytest
from sample_helpers import KEY, LABELS, OPTIONS, PARAMS

import marjax
from marjax import Accel, ActiveTokens, ConditionCache, HeadCache, LazyTokens, Refresh
from marjax.accel import NAMES, resolve


def test_names():
    assert resolve("none") == Accel()
    assert resolve("lazymar") == Accel(tokens=LazyTokens(), condition=ConditionCache(), head=HeadCache())
    assert resolve("marche") == Accel(tokens=ActiveTokens())
    assert all(resolve(accel) is accel for accel in NAMES.values())


def test_options():
    got = resolve("marche:budget=32,refresh_every=4,skip_mlp=off,encoder=full,condition=on,head=on")
    refresh = Refresh(warmup=0, period=4)
    tokens = ActiveTokens(budget=32, refresh=refresh, skip_mlp=False, encoder="full")
    assert got == Accel(tokens=tokens, condition=ConditionCache(refresh=refresh), head=HeadCache())
    assert got == resolve("marche:head=on,encoder=full,condition=on,skip_mlp=off,refresh_every=4,budget=32")
    assert resolve("lazymar:tokens=off,head=off") == Accel(condition=ConditionCache())
    never = resolve("lazymar:refresh_every=never,warmup=2")
    assert never.tokens.refresh == never.condition.refresh == Refresh(warmup=2, period=None)
    assert resolve("none:condition=on,warmup=1").condition == ConditionCache(refresh=Refresh(warmup=1, period=9))
    tokens = resolve("lazymar:shares=0:1+30:0.25,prune_layer=1,slack=3").tokens
    assert tokens == LazyTokens(shares=((0, 1.0), (30, 0.25)), prune_layer=1, slack=3)
    head = resolve("none:head=on,head_period=5,head_warmup=0.5,head_skipped=1+3").head
    assert head == HeadCache(period=5, warmup=0.5, skipped=(1, 3))
    assert resolve("lazymar:head_skipped=none").head == HeadCache(skipped=())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fast", "Unknown accel 'fast'; expected one of none, lazymar, marche"),
        ("marche:speed=9", "unknown option 'speed'; expected one of budget, buffers, condition, decision_layer"),
        ("marche:budget=many", "budget='many' must be a non-negative integer"),
        ("marche:budget=0", "budget=0 must be a positive integer or None"),
        ("marche:budget", "budget='' must be a non-negative integer"),
        ("marche:budget=3,budget=4", "budget is given twice"),
        ("marche:select=best", "select='best' must be one of attention, least_attention, random"),
        ("marche:skip_mlp=maybe", "skip_mlp='maybe' must be on or off"),
        ("marche:refresh_every=0", "period=0 must be a positive integer or None"),
        ("marche:decision_layer=9", "decision_layer=9 must be at least 1 and leave a layer behind it"),
        ("marche:encoder=full,encoder_buffers=recomputed", "has no meaning with encoder='full'"),
        ("marche:head_period=3", "unknown option 'head_period'"),
        ("lazymar:prune_layer=4", "prune_layer=4 must be at least 0 and leave a layer behind it"),
        ("lazymar:shares=5:0.5", "must begin at step 0 and ascend"),
        ("lazymar:shares=0:2", "every share must lie in"),
        ("lazymar:shares=0:much", "shares='much' must be a number"),
        ("lazymar:head_period=0", "period=0 must be None or an integer of at least 1"),
        ("lazymar:head_warmup=7", "warmup=7.0 must lie in"),
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
    ("make", "message"),
    [
        (lambda: Accel(tokens="lazymar"), "tokens='lazymar' must be an instance of a TokenPolicy"),
        (lambda: Accel(tokens=LazyTokens), "must be an instance of a TokenPolicy"),
        (lambda: Accel(condition=True), "condition=True must be an instance of a"),
        (lambda: Accel(head=None), "head=None must be an instance of a HeadPolicy"),
        (lambda: resolve(3), "accel=3 must be a name or a marjax.Accel, not int"),
    ],
)
def test_parts_of_the_wrong_kind(make, message):
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize("period", [0, -1, 2.0, True])
def test_refresh_counts_steps(period):
    with pytest.raises(ValueError, match="period="):
        Refresh(period=period)
    if period != 0:
        with pytest.raises(ValueError, match="warmup="):
            Refresh(warmup=period)
