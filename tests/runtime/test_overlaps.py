"""Inputs that lie apart in the call that a graph is built for, and overlap in a later one."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends import registry

from torch_mpk import _C
from torch_mpk.errors import MpkWarning, SharedMemoryError
from torch_mpk.specialize import MAX_FAILURES

WEIGHT = torch.randn(8, 8)
APART, MEETING = (slice(0, 4), slice(4, 8)), (slice(0, 4), slice(2, 6))


def whole(a, b):
    y = F.linear(a, WEIGHT)
    b.add_(y)
    return a * 2


def in_parts(a, b):
    y = F.linear(a, WEIGHT)
    order = y.sort(stable=True)[1]  # not ours
    b.add_(y)
    return a * 2 + order.float() @ WEIGHT


def normalised(a, b):
    """Built for each size."""
    y = F.layer_norm(F.linear(a, WEIGHT), (8,))
    b.add_(y)
    return a * 2


def both(function, compiled, rows):
    """Results of eager and compiled, with what the memory then holds."""
    ours, eager = (torch.arange(64.0).view(8, 8).clone() for _ in range(2))
    expected = function(*(eager[part] for part in rows)), eager
    actual = compiled(*(ours[part] for part in rows)), ours
    return actual, expected


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("options", [{}, {"freeze": True}], ids=str)
@pytest.mark.parametrize("function", [whole, in_parts, normalised])
def test_a_later_overlap_is_announced_and_as_eager(function, options, dynamic):
    options = {"min_segment_nodes": 1, "fallback": "eager"} | options
    compiled = torch.compile(function, backend="mpk", options=options, dynamic=dynamic)
    with torch.no_grad(), pytest.warns(MpkWarning) as told:
        for rows in (APART, APART, MEETING, MEETING, APART):
            torch.testing.assert_close(*both(function, compiled, rows))
    assert any("share memory, and one of them is written in place" in str(warning.message) for warning in told)


def test_a_later_overlap_is_an_error_where_nothing_may_fall_back():
    compiled = torch.compile(whole, backend="mpk", options={"fallback": "error"})
    with torch.no_grad():
        both(whole, compiled, APART)
        with pytest.raises(SharedMemoryError, match=r"L\['a'\] and L\['b'\] share memory|L\['b'\] and L\['a'\] share"):
            both(whole, compiled, MEETING)
        torch.testing.assert_close(*both(whole, compiled, APART))


def test_what_is_left_to_others_for_any_size_is_checked_for_the_size_it_is_called_with(monkeypatch):
    sizes = []

    def inductor(gm, _):
        def run(*args):
            sizes.append(len(next(arg for arg in args if isinstance(arg, torch.Tensor))))
            return gm.forward(*args)

        return run

    def function(a, b):
        order = a.sort(dim=0, stable=True)[1]
        b.add_(order)
        return a * 2

    monkeypatch.setitem(registry._COMPILER_FNS, "inductor", inductor)
    compiled = torch.compile(function, backend="mpk", options={"fallback": "inductor"}, dynamic=True)
    with torch.no_grad(), pytest.warns(MpkWarning, match="share memory, and one of them is written in place"):
        for n in range(3, 5 + MAX_FAILURES):  # those after MAX_FAILURES have no build of their own
            for first in (2 * n + 5, n - 1):
                buffers = [torch.arange(4.0 * n + 5) for _ in range(2)]
                results = [f(buffer[:n], buffer[first : first + n]) for f, buffer in zip((compiled, function), buffers)]
                torch.testing.assert_close(*results)
                torch.testing.assert_close(*buffers)
    assert sizes == [*range(3, 5 + MAX_FAILURES)]


class Placed:
    def __init__(self, address):
        self.address = address

    def data_ptr(self):
        return self.address


def test_random_calls_are_told_apart():
    """Each call's verdict is that of comparing all pairs, whatever calls came before it."""
    draw = random.Random(0)
    num_meeting = 0
    for _ in range(100):
        sizes = [draw.choice([0, 4, 8, 16]) for _ in range(6)]
        written = [draw.random() < 0.3 for _ in sizes]
        memory = list(zip(map(str, range(len(sizes))), sizes, written, strict=True))
        arguments = _C.Arguments(list(range(len(sizes))), [], memory=memory)
        places = [64 * i for i in range(1, len(sizes) + 1)]
        for _ in range(30):
            for i in draw.sample(range(len(sizes)), draw.randint(0, 2)):
                places[i] = 4 * draw.randint(1, 100)
            meeting = {
                str(i)
                for i in range(len(sizes))
                for j in range(len(sizes))
                if i != j
                and (written[i] or written[j])
                and places[i] < places[j] + sizes[j]
                and places[j] < places[i] + sizes[i]
                and sizes[i]
                and sizes[j]
            }
            try:
                arguments.check(tuple(map(Placed, places)))
                named = set()
            except SharedMemoryError as error:
                named = {word for word in str(error).split(" share")[0].split() if word.isdigit()}
            assert bool(named) == bool(meeting)
            assert named <= meeting
            num_meeting += bool(meeting)
    assert 100 < num_meeting < 2900


def test_extents_that_are_not_known_are_asked_for():
    buffer = torch.zeros(64)
    arguments = _C.Arguments([0, 1], [], memory=[("x", -1, False), ("y", -1, True)])
    arguments.check((buffer[:8], buffer[8:16]))
    arguments.check((buffer[:0], buffer[:4]))
    arguments.check((buffer[16:], buffer[:16]))
    for x, y in [(buffer[:9], buffer[8:16]), (buffer[::8], buffer[1:2]), (buffer.view(8, 8).t()[:, :2], buffer[8:9])]:
        with pytest.raises(SharedMemoryError):
            arguments.check((x, y))
    with pytest.raises(ValueError, match="must be said of each input or of none"):
        _C.Arguments([0, 1], [], memory=[("x", 8, True)])
