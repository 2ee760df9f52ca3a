"""How attention's key-value tiles are cut into splits, by the header that kernels use, compiled for the host."""

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
// Writes the splits, and returns their number.
template <class LengthOf>
int list(const uint32_t* tiles, uint32_t rows, uint32_t groups, LengthOf length_of, KvSplit* splits, int room) {
  int number = 0;
  for (uint32_t row = 0; row < rows; row++) {
    const uint32_t length = length_of(tiles[row]), begin = number;
    for (uint32_t n = 0; n < kv_count(tiles[row], length) * groups; n++) {
      if (number == room) return -1;
      splits[number++] = kv_row_split(row, tiles[row], groups, length, begin, n);
    }
  }
  return number;
}
// Of a row that is alone.
extern "C" int cut_alone(uint32_t tiles, uint32_t groups, uint32_t least, uint32_t workers, KvSplit* splits, int room) {
  const uint32_t length = kv_row_length(tiles, groups, least, workers);
  return list(&tiles, 1, groups, [&](uint32_t) { return length; }, splits, room);
}
// Of several rows, on whose others none's splits depend.
extern "C" int cut(const uint32_t* tiles, uint32_t rows, uint32_t groups, uint32_t few, uint32_t most,
                   KvSplit* splits, int room) {
  return list(tiles, rows, groups, [&](uint32_t tiles) { return kv_own_length(tiles, few, most); }, splits, room);
}
extern "C" uint32_t own_count(uint32_t tiles, uint32_t few, uint32_t most) { return kv_own_count(tiles, few, most); }
"""


class Split(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("row", "group", "first_tile", "num_tiles", "index", "first")] + [
        ("is_last", ctypes.c_bool)
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("splits")
    (folder / "splits.cpp").write_text(SOURCE)
    include = Path(__file__).parents[2] / "include"
    command = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-I", str(include)]
    subprocess.run([*command, str(folder / "splits.cpp"), "-o", str(folder / "splits.so")], check=True)
    return ctypes.CDLL(str(folder / "splits.so"))


def cut_alone(library: ctypes.CDLL, tiles: int, groups: int, least: int, workers: int) -> list[Split]:
    room = -(-groups // workers) * workers
    splits = (Split * room)()
    count = library.cut_alone(tiles, groups, least, workers, splits, room)
    assert count >= 0, "more splits than partial results have room for"
    return splits[:count]


def cut(library: ctypes.CDLL, tiles: list[int], groups: int, few: int, most: int) -> list[Split]:
    room = groups * sum(library.own_count(length, few, most) for length in tiles)
    splits = (Split * room)()
    count = library.cut((ctypes.c_uint32 * len(tiles))(*tiles), len(tiles), groups, few, most, splits, room)
    assert count >= 0, "more splits than partial results have room for"
    return splits[:count]


def check(splits: list[Split], tiles: list[int], groups: int) -> None:
    found: dict[tuple[int, int], list[tuple[int, Split]]] = {}
    for number, split in enumerate(splits):
        found.setdefault((split.row, split.group), []).append((number, split))
    assert len(found) == len(tiles) * groups
    for (row, _), of_group in found.items():
        end = 0
        for index, (number, split) in enumerate(of_group):  # so the last has the highest number
            assert (split.first_tile, split.index) == (end, index)
            assert number - split.first == index * groups, "partial results stand elsewhere"
            assert split.is_last == (index == len(of_group) - 1)
            end += split.num_tiles
        assert end == tiles[row]


@given(st.integers(1, 3000), st.integers(1, 600), st.integers(1, 16), st.integers(1, 140))
@settings(max_examples=300, deadline=None)
def test_every_tile_of_a_row_is_in_one_split(
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
    splits = cut(library, tiles, groups, few, most)
    check(splits, tiles, groups)
    assert max(split.num_tiles for split in splits) <= most
    # A longer row has room for at least as many.
    assert all(library.own_count(length, few, most) <= library.own_count(length + 1, few, most) for length in tiles)


@pytest.mark.parametrize(
    ("tiles", "lengths"), [(7, [7]), (9, [5, 4]), (37, [19, 18]), (64, [32, 32]), (80, [27, 27, 26])]
)
def test_rows_have_equal_splits_for_all_workers(library: ctypes.CDLL, tiles: int, lengths: list[int]) -> None:
    """Of 132 workers, of which eight rows of eight groups leave each of these two."""
    assert [split.num_tiles for split in cut(library, [tiles], 1, 2, 32)] == lengths


@pytest.mark.parametrize(("tiles", "longest"), [(1, 1), (11, 11), (33, 11), (176, 11), (177, 12), (2048, 128)])
def test_splits_have_a_tile_for_each_warp_while_there_are_workers(
    library: ctypes.CDLL, tiles: int, longest: int
) -> None:
    assert max(split.num_tiles for split in cut_alone(library, tiles, 8, 11, 132)) == longest
