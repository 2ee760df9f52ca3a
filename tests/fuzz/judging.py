"""One program of a long run: a module of its own, which the processes of the run can import."""

import random
from typing import NamedTuple

from tests.fuzz.checking import AnyProgram, Wrong, by_codegen, by_dynamo, by_emulator, by_reference_vm, by_stages, check
from tests.fuzz.random_experts import ExpertProgram
from tests.fuzz.random_formats import FormatProgram
from tests.fuzz.random_integers import IntegerProgram
from tests.fuzz.random_programs import Program

KINDS: dict[str, type[AnyProgram]] = {
    "models": Program,
    "integers": IntegerProgram,
    "experts": ExpertProgram,
    "formats": FormatProgram,
}


class Verdict(NamedTuple):
    way: str
    num_segments: int
    error: str  # empty: the program is right
    is_wrong: bool = False  # else it could not be built or run


def judge(seed: int, device: str, kind: str = "models") -> Verdict:
    way, rarely = by_stages, 10 if kind == "integers" else 1  # these are quick where they are not compiled
    if seed % (20 * rarely) == 0:
        way = by_dynamo
    elif seed % 4 == 1 and device == "cpu":
        way = by_reference_vm
    elif seed % 8 == 2 and device == "cpu":
        way = by_codegen
    elif seed % (40 * rarely) == 7 and device == "cpu":  # takes seconds to compile
        way = by_emulator
    program = KINDS[kind].draw(random.Random(seed))
    if isinstance(program, (ExpertProgram, FormatProgram)) and way is by_emulator:
        program = type(program).draw(random.Random(seed), is_small=True)
    error = failure(program, way, device, seed)
    if not isinstance(error, Exception):
        return Verdict(way.__name__, error, "")
    same = type(error)
    short = program.shortened(lambda p: isinstance(failure(p, way, device, seed), same))
    error = failure(short, way, device, seed)
    return Verdict(way.__name__, 0, f"{type(error).__name__}: {error}\n{short}", isinstance(error, Wrong))


def failure(program: AnyProgram, way, device: str, seed: int) -> int | Exception:
    """The number of segments, or what went wrong."""
    try:
        return check(program, way, device, seed)
    except Exception as error:
        return error
