"""How attention's key-value tiles are cut into pieces, by the header that kernels use, compiled for the host."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

SOURCE = """
#include "torch_mpk/abi/partition.h"
using namespace mpk;
// Writes the pieces, and returns their number.
template <class LengthOf>
int list(const uint32_t* tiles, uint32_t rows, uint32_t groups, LengthOf length_of, KvPiece* pieces, int room) {
  int number = 0;
  for (uint32_t row = 0; row < rows; row++) {
    const uint32_t length = length_of(tiles[row]), begin = number;
    for (uint32_t n = 0; n < kv_count(tiles[row], length) * groups; n++) {
      if (number == room) return -1;
      pieces[number++] = kv_row_piece(row, tiles[row], groups, length, begin, n);
    }
  }
  return number;
}
// Of a row that is alone.
extern "C" int cut_alone(uint32_t tiles, uint32_t groups, uint32_t least, uint32_t workers, KvPiece* pieces, int room) {
  const uint32_t length = kv_row_length(tiles, groups, least, workers);
  return list(&tiles, 1, groups, [&](uint32_t) { return length; }, pieces, room);
}
// Of several rows, on whose others none's pieces depend.
extern "C" int cut(const uint32_t* tiles, uint32_t rows, uint32_t groups, uint32_t few, uint32_t most,
                   KvPiece* pieces, int room) {
  return list(tiles, rows, groups, [&](uint32_t tiles) { return kv_own_length(tiles, few, most); }, pieces, room);
}
extern "C" uint32_t own_count(uint32_t tiles, uint32_t few, uint32_t most) { return kv_own_count(tiles, few, most); }
"""


class Piece(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("row", "group", "first_tile", "num_tiles", "index", "first")] + [
        ("is_last", ctypes.c_bool)
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "pieces.cpp").write_text(SOURCE)
    include = Path(__file__).parents[2] / "include"
    command = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-I", str(include)]
    subprocess.run([*command, str(folder / "pieces.cpp"), "-o", str(folder / "pieces.so")], check=True)
    return ctypes.CDLL(str(folder / "pieces.so"))


def cut_alone(library: ctypes.CDLL, tiles: int, groups: int, least: int, workers: int) -> list[Piece]:
    room = -(-groups // workers) * workers
    pieces = (Piece * room)()
    count = library.cut_alone(tiles, groups, least, workers, pieces, room)
    assert count >= 0, "more pieces than partial results have room for"
    return pieces[:count]


def cut(library: ctypes.CDLL, tiles: list[int], groups: int, few: int, most: int) -> list[Piece]:
    room = groups * sum(library.own_count(length, few, most) for length in tiles)
    pieces = (Piece * room)()
    count = library.cut((ctypes.c_uint32 * len(tiles))(*tiles), len(tiles), groups, few, most, pieces, room)
    assert count >= 0, "more pieces than partial results have room for"
    return pieces[:count]


def check(pieces: list[Piece], tiles: list[int], groups: int) -> None:
    found: dict[tuple[int, int], list[tuple[int, Piece]]] = {}
    for number, piece in enumerate(pieces):
        found.setdefault((piece.row, piece.group), []).append((number, piece))
    assert len(found) == len(tiles) * groups
    for (row, _), of_group in found.items():
        end = 0
        for index, (number, piece) in enumerate(of_group):  # so the last has the highest number
            assert (piece.first_tile, piece.index) == (end, index)
            assert number - piece.first == index * groups, "partial results stand elsewhere"
            assert piece.is_last == (index == len(of_group) - 1)
            end += piece.num_tiles
        assert end == tiles[row]


@given(st.integers(1, 3000), st.integers(1, 600), st.integers(1, 16), st.integers(1, 140))
@settings(max_examples=300, deadline=None)
def test_every_tile_of_a_row_is_in_one_piece(
    library: ctypes.CDLL, tiles: int, groups: int, least: int, workers: int
) -> None:
    check(cut_alone(library, tiles, groups, least, workers), [tiles], groups)


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=16), st.integers(1, 40), st.integers(1, 16), st.integers(8, 64)
)
@settings(max_examples=300, deadline=None)
def test_rows_are_cut_as_if_they_were_alone(
    library: ctypes.CDLL, tiles: list[int], groups: int, few: int, most: int
) -> None:
    pieces = cut(library, tiles, groups, few, most)
    check(pieces, tiles, groups)
    assert max(piece.num_tiles for piece in pieces) <= most
    # A longer row has room for at least as many.
    assert all(library.own_count(length, few, most) <= library.own_count(length + 1, few, most) for length in tiles)


@pytest.mark.parametrize(
    ("tiles", "lengths"), [(7, [7]), (9, [5, 4]), (37, [19, 18]), (64, [32, 32]), (80, [27, 27, 26])]
)
def test_rows_have_equal_pieces_for_all_workers(library: ctypes.CDLL, tiles: int, lengths: list[int]) -> None:
    """Of 132 workers, of which eight rows of eight groups leave each of these two."""
    assert [piece.num_tiles for piece in cut(library, [tiles], 1, 2, 32)] == lengths


@pytest.mark.parametrize(("tiles", "longest"), [(1, 1), (11, 11), (33, 11), (176, 11), (177, 12), (2048, 128)])
def test_pieces_have_a_tile_for_each_warp_while_there_are_workers(
    library: ctypes.CDLL, tiles: int, longest: int
) -> None:
    assert max(piece.num_tiles for piece in cut_alone(library, tiles, 8, 11, 132)) == longest
