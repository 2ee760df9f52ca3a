"""Inputs that lie apart in the call that a graph is built for, and overlap in a later one."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends import registry

from torch_mpk import _C
from torch_mpk.dispatch.specialize import MAX_FAILURES
from torch_mpk.errors import MpkWarning, SharedMemoryError
from torch_mpk.runtime.overlaps import Memory, check_apart, memory_of

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


def take_turns(a: int, turns_a: tuple[int, int], b: int, turns_b: tuple[int, int]) -> bool:
    """Whether no place within a turn is both blocks'."""
    turn = turns_a[0]
    if turn == 0 or turn != turns_b[0]:
        return False
    one, other = ({(a + byte) % turn for byte in range(block)} for a, (_, block) in ((a, turns_a), (b, turns_b)))
    return one.isdisjoint(other)


def test_random_calls_are_told_apart():
    """Each call's verdict is that of comparing all pairs, whatever calls came before it."""
    draw = random.Random(0)
    num_meeting = 0
    for _ in range(100):
        sizes = [draw.choice([0, 4, 8, 16]) for _ in range(6)]
        written = [draw.random() < 0.3 for _ in sizes]
        turns = [(draw.choice([0, 0, 24, 40]), size) for size in sizes]
        sizes = [size + 2 * turn if size else 0 for turn, size in turns]
        memory = [Memory(str(i), size, w, *turn) for i, (size, w, turn) in enumerate(zip(sizes, written, turns))]
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
                and not take_turns(places[i], turns[i], places[j], turns[j])
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
    arguments = _C.Arguments([0, 1], [], memory=[Memory("x", -1, False, 0, 0), Memory("y", -1, True, 0, 0)])
    arguments.check((buffer[:8], buffer[8:16]))
    arguments.check((buffer[:0], buffer[:4]))
    arguments.check((buffer[16:], buffer[:16]))
    for x, y in [(buffer[:9], buffer[8:16]), (buffer[::8], buffer[1:2]), (buffer.view(8, 8).t()[:, :2], buffer[8:9])]:
        with pytest.raises(SharedMemoryError):
            arguments.check((x, y))
    with pytest.raises(ValueError, match="must be said of each input or of none"):
        _C.Arguments([0, 1], [], memory=[Memory("x", 8, True, 0, 0)])


def test_pages_that_take_turns_do_not_meet() -> None:
    """Keys and values of a page side by side, as some engines have them."""
    pages = torch.zeros(6, 2, 4, 8)
    k, v = pages[:, 0], pages[:, 1]
    check_apart([k, v], memory_of(["k", "v"], [k, v], [0, 1]))
    check_apart([k, v[1:]], memory_of(["k", "v"], [k, v[1:]], [0, 1]))
    for other in (pages[1:, 0], pages[:, 0, 3:], pages[:, 1, :, :4].transpose(1, 2), pages.view(12, 4, 8)[1::2]):
        with pytest.raises(SharedMemoryError):
            check_apart([pages[:, :2], other], memory_of(["k", "v"], [pages, other], [0]))
    last = pages.flatten()[32:-32].view(5, 64)[:, 8:48]
    with pytest.raises(SharedMemoryError):  # blocks that meet the next turn's
        check_apart([k, last], memory_of(["k", "v"], [k, last], [0]))
