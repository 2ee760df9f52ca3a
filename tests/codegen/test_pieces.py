"""How attention's key-value tiles are cut into pieces, by the header that kernels use, compiled for the host."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

SOURCE = """
#include "torch_mpk/abi/partition.h"
using namespace mpk;
// Writes the pieces, and returns their number.
extern "C" int cut(const uint32_t* tiles, uint32_t rows, uint32_t groups, uint32_t least, uint32_t workers,
                   bool one_row, KvPiece* pieces, int room) {
  const auto count = [&](uint32_t length) {
    uint32_t count = 0;
    for (uint32_t row = 0; row < rows; row++) count += kv_count(tiles[row], length) * groups;
    return count;
  };
  const uint32_t length = one_row ? kv_row_length(tiles[0], groups, least, workers)
                                  : kv_length(count, rows, groups, least, workers);
  int number = 0;
  for (uint32_t row = 0; row < rows; row++)
    for (uint32_t n = 0, begin = number; n < kv_count(tiles[row], length) * groups; n++) {
      if (number == room) return -1;
      pieces[number++] = kv_row_piece(row, tiles[row], groups, length, begin, n);
    }
  return number;
}
"""


class Piece(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("row", "group", "first_tile", "num_tiles", "index", "first")] + [
        ("is_last", ctypes.c_bool)
    ]


Cut = Callable[[list[int], int, int, int, bool], list[Piece]]


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Cut:
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "pieces.cpp").write_text(SOURCE)
    include = Path(__file__).parents[2] / "include"
    command = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-I", str(include)]
    subprocess.run([*command, str(folder / "pieces.cpp"), "-o", str(folder / "pieces.so")], check=True)
    library = ctypes.CDLL(str(folder / "pieces.so"))

    def run(tiles: list[int], groups: int, least: int, workers: int, one_row: bool) -> list[Piece]:
        room = len(tiles) * groups + workers + 1
        pieces = (Piece * room)()
        count = library.cut(
            (ctypes.c_uint32 * len(tiles))(*tiles), len(tiles), groups, least, workers, one_row, pieces, room
        )
        assert count >= 0, "more pieces than partial results have room for"
        return pieces[:count]

    return run


def check(pieces: list[Piece], tiles: list[int], groups: int, workers: int) -> None:
    units = len(tiles) * groups
    assert len(pieces) <= -(-units // workers) * workers
    found: dict[tuple[int, int], list[tuple[int, Piece]]] = {}
    for number, piece in enumerate(pieces):
        found.setdefault((piece.row, piece.group), []).append((number, piece))
    assert len(found) == units
    for (row, _), of_group in found.items():
        end = 0
        for index, (number, piece) in enumerate(of_group):  # so the last has the highest number
            assert (piece.first_tile, piece.index) == (end, index)
            assert number - piece.first == index * groups, "partial results stand elsewhere"
            assert piece.is_last == (index == len(of_group) - 1)
            end += piece.num_tiles
        assert end == tiles[row]


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=16), st.integers(1, 40), st.integers(1, 16), st.integers(1, 140)
)
@settings(max_examples=300, deadline=None)
def test_every_tile_is_in_one_piece(cut: Cut, tiles: list[int], groups: int, least: int, workers: int) -> None:
    check(cut(tiles, groups, least, workers, False), tiles, groups, workers)
    check(cut(tiles[:1], groups, least, workers, True), tiles[:1], groups, workers)


@pytest.mark.parametrize(("tiles", "longest"), [(1, 1), (11, 11), (33, 11), (176, 11), (177, 12), (2048, 128)])
def test_pieces_have_a_tile_for_each_warp_while_there_are_workers(cut: Cut, tiles: int, longest: int) -> None:
    assert max(piece.num_tiles for piece in cut([tiles], 8, 11, 132, True)) == longest
