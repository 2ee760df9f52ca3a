"""How a task of role "stream" works, as far as the stages behind its declaration need to know."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class StreamTraits:
    """Traits of a task's operands, by their names. What is left out is what takes the least for granted.

    Attributes:
        loaded: the loader reads these, ahead of their phase, once what makes them is done.
        staged: consumers bring the rows of these to shared memory, and may poll them.
        whole: those of ``staged`` that each worker stages all of.
        boxed: those of ``staged`` that the loader reads instead, in boxes of rows and columns, in kernels whose warps
            multiply as warpgroups, because some of their nodes have many rows.
        takes_rows: those of ``staged`` in front of which row tasks may be recomputed by every worker.
        joined_by: calls that have this operand in common may be one job, and pointwise tasks take over their results
            as they are made.
        tiled_by: an operand whose rows are the job's tiles, which workers may draw at run time.
        hands_over: results may be stored for readers to poll.
        any_strides: all other operands are copied where neighbours of a row lie apart; these are read in place. It is
            for lowering alone.
        cursor: which row of what it updates in place a call writes; an element outside writes nothing.
        paged_by: says where a cache has what came before each row of the result, of a sequence of its own: rows are
            tokens of a batch, in whatever shape a model has them.
    """

    loaded: tuple[str, ...]
    staged: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    boxed: tuple[str, ...] = ()
    takes_rows: tuple[str, ...] = ()
    joined_by: str = ""
    tiled_by: str = ""
    hands_over: bool = False
    any_strides: tuple[str, ...] = ()
    cursor: str = ""
    paged_by: str = ""

    def of_operands(self) -> dict[str, list[str]]:
        """The traits that each name several operands, but for what lowering alone knows."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "any_strides"}
        return {trait: list(names) for trait, names in values.items() if isinstance(names, tuple)}

    def operands(self) -> Iterator[str]:
        """Every operand that is named."""
        for names in self.of_operands().values():
            yield from names
        yield from self.any_strides
        yield from filter(None, (self.joined_by, self.tiled_by, self.cursor, self.paged_by))
