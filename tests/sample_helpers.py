"""What the tests of sampling share: a model, options that go with it, and the text of the compiled program."""

from __future__ import annotations

import importlib
import re

import jax
import numpy as np
from helpers import golden_params

import marjax

sample = importlib.import_module("marjax.sample")  # the attribute of that name is the function
KEY = jax.random.key(7)
PARAMS = golden_params("tiny")
CONFIG = PARAMS.config
# 40 diffusion steps: with fewer, the first step multiplies rounding by thousands.
OPTIONS = {"num_iter": 3, "num_sampling_steps": 40, "cfg": 3.0, "temperature": 0.9, "dtype": "float32"}
LABELS = np.array([3, 1, 4, 1, 5, 9, 2, 6])


def compiled_text(monkeypatch, params, labels=LABELS, **options) -> str:
    """The optimised HLO of the program that a sampling call runs."""
    calls, run = [], sample._run

    def capture(*arguments):
        calls.append(arguments)
        return run(*arguments)

    monkeypatch.setattr(sample, "_run", capture)
    marjax.sample_latents(params, KEY, labels, **{**OPTIONS, **options})
    (arguments,) = calls
    return run.lower(*arguments).compile().as_text()


def in_loops(text: str) -> list[str]:
    """The instructions of an HLO module that run inside a loop: those of while bodies and of what they call."""
    computations, reached = {}, set()
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?%?(\S+) .*\{$", line):
            lines = computations.setdefault(head[1], [])
        elif line.startswith("  "):
            lines.append(line.strip())
    todo = re.findall(r"\bbody=%?([\w.-]+)", text)
    while todo:
        if (name := todo.pop()) not in reached:
            reached.add(name)
            todo += re.findall(r"\b(?:calls|to_apply|body|condition)=%?([\w.-]+)", "\n".join(computations[name]))
    return [line for name in reached for line in computations[name]]
