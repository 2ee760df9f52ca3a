"""Tests of many cases: plain ``pytest`` runs a few of them, ``pytest -m slow`` the others."""

from collections.abc import Iterable

import pytest


def thinned(cases: Iterable, *quick: int) -> list:
    """The cases of ``pytest.mark.parametrize``, all marked slow but those with the numbers ``quick``."""
    return [case if i in quick else _slow(case) for i, case in enumerate(cases)]


def _slow(case):
    if not isinstance(case, type(pytest.param())):
        case = pytest.param(*(case if isinstance(case, tuple) else (case,)))
    return pytest.param(*case.values, marks=[*case.marks, pytest.mark.slow], id=case.id)
