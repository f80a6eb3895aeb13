"""Functions that run `marjax convert`, in a folder of its own."""

from __future__ import annotations

import pytest

from marjax import cli


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "_use_cache", lambda: None)  # nothing is compiled here


@pytest.fixture
def converted(marjax):
    """Function that converts, which must succeed, and gives the report."""

    def run(*words):
        code, out, err = marjax("convert", *words)
        assert (code, err) == (0, "")
        return out

    return run


@pytest.fixture
def refused(marjax, tmp_path):
    """Function that converts, which must fail with one sentence and leave nothing behind, and gives the sentence."""

    def run(*words):
        before = sorted(tmp_path.rglob("*"))
        code, out, err = marjax("convert", *words)
        assert code == 2 and not out
        assert err.startswith("marjax: ") and err.endswith(".\n") and err.count("\n") == 1
        assert sorted(tmp_path.rglob("*")) == before
        return err

    return run
