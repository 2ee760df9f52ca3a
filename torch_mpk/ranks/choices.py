"""Greedy choices among columns that ranks have shared out: of its own each rank gives the best and where that stands,
instead of all."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

_EXACT_IN_FLOAT = 2**24  # numbers up to here
# What is done to each element by itself, as logits are scaled and capped.
_ELEMENTWISE = {operator.mul, operator.truediv, torch.mul, torch.div, torch.tanh, "float", "mul", "div", "tanh"}


class Gathered(NamedTuple):
    """A call of ``all_gather``, what it makes, and where this rank's columns begin."""

    node: fx.Node
    shape: Sequence[int]
    dtype: torch.dtype
    begin: int


def choose_before_gathering(gathered: Gathered) -> None:
    """Where nothing is read of what is gathered but where the largest of each row stands, ranks exchange that alone.

    Of equal ones the first is taken, as ``argmax`` takes it: ranks have their columns in order.
    """
    chain, last = _steps_to_choice(gathered)
    if last is None or gathered.dtype == torch.float64 or gathered.shape[-1] > _EXACT_IN_FLOAT:
        return
    graph, exchange = gathered.node.graph, gathered.node

    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        made = graph.call_function(function, args, kwargs)
        made.meta = {key: value for key, value in last.meta.items() if key != "example_value"}
        return made

    own = {exchange: exchange.args[0]}
    with graph.inserting_before(last):
        for step in chain:
            own[step] = graph.node_copy(step, own.__getitem__)
            own[step].meta.pop("example_value", None)
        logits = own[chain[-1] if chain else exchange]
        at = call(torch.argmax, logits, -1, True)
        best = call(torch.gather, logits, -1, at)
        numbers = call(operator.add, at, gathered.begin)
        pair = call(torch.cat, [call(torch.Tensor.to, each, torch.float32) for each in (best, numbers)], -1)
        pairs = call(exchange.target, pair, **exchange.kwargs)
        values, columns = (call(operator.getitem, pairs, (..., slice(i, None, 2))) for i in range(2))
        first = call(torch.gather, columns, -1, call(torch.argmax, values, -1, True))
        choice = call(torch.Tensor.to, first, torch.int64)
        choice = choice if _keeps_dimension(last) else call(torch.squeeze, choice, -1)
    last.replace_all_uses_with(choice)
    for step in (last, *reversed(chain), exchange):
        graph.erase_node(step)


def _steps_to_choice(gathered: Gathered) -> tuple[list[fx.Node], fx.Node | None]:
    """What is done to gathered rows before their ``argmax``, and that; None where anything else becomes of them."""
    chain: list[fx.Node] = []
    node, dims = gathered.node, len(gathered.shape)
    while len(node.users) == 1:
        [user] = node.users
        if user.target in ("argmax", torch.argmax) and _dimension(user) in (-1, dims - 1):
            return chain, user
        if user.all_input_nodes != [node]:
            return chain, None
        if user.target is operator.getitem and _leaves_rows(user.args[1], dims):
            dims -= sum(isinstance(each, int) for each in user.args[1])
        elif user.target not in _ELEMENTWISE:
            return chain, None
        chain.append(user)
        node = user
    return chain, None


def _leaves_rows(index: Any, dims: int) -> bool:
    """Whether rows are chosen, and each is taken whole."""
    return isinstance(index, tuple) and len(index) < dims and all(isinstance(each, (int, slice)) for each in index)


def _dimension(argmax: fx.Node) -> Any:
    return argmax.args[1] if len(argmax.args) > 1 else argmax.kwargs.get("dim")


def _keeps_dimension(argmax: fx.Node) -> bool:
    return bool(argmax.args[2] if len(argmax.args) > 2 else argmax.kwargs.get("keepdim", False))
