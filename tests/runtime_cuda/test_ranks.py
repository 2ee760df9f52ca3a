"""CudaExecutable of several ranks against a driver without a device."""

import ctypes
import weakref

import pytest

from tests.runtime_cuda.fake_driver import destroy_graphs
from tests.runtime_cuda.test_launch import INPUTS, OUTPUTS, STREAM, Launch, abort
from torch_mpk import _C
from torch_mpk.errors import LaunchError, MegakernelTimeout

MAILBOXES = [1 << 32, 2 << 32, 3 << 32]
WAITS_FOR_RANK_2 = (1, 1, 0, 6, 2, 0, 0, 0)
OTHER_STREAM = STREAM + 16


@pytest.fixture
def executable(make_executable):
    found = make_executable(ranks=3, group="0", mailbox_bytes=4096)
    with pytest.raises(ValueError, match="exchanges with 2 other ranks: call join first"):
        found.run(INPUTS, OUTPUTS, [0], STREAM)
    found.join(1, MAILBOXES)
    return found


def test_a_launch_has_the_rank_and_where_mailboxes_are(fake, executable):
    executable.run(INPUTS, OUTPUTS, [0], STREAM)
    launch = Launch(fake)
    assert (launch.rank, launch.ranks) == (1, 3)
    assert list((ctypes.c_uint64 * 3).from_address(launch.mailboxes)) == MAILBOXES


def test_graphs_keep_the_mailboxes(fake, fake_library, make_executable):
    class Owner:
        pass

    executable, first, owner = make_executable(ranks=3, group="0", mailbox_bytes=4096), Owner(), Owner()
    kept = weakref.ref(first), weakref.ref(owner)
    executable.join(1, MAILBOXES, first)
    del first
    assert kept[0]() is not None
    executable.join(1, MAILBOXES, owner)
    assert kept[0]() is None
    executable.run(INPUTS, OUTPUTS, [0], STREAM)
    fake.capturing_stream, fake.capture_id = STREAM, 5
    executable.run(INPUTS, OUTPUTS, [0], STREAM)
    fake.capturing_stream = 0
    del executable, owner
    _C.synchronize_captured()
    assert kept[1]() is not None
    destroy_graphs(fake_library, 5)
    _C.synchronize_captured()
    assert kept[1]() is None
    assert fake.num_live == 0


def test_all_streams_and_graphs_share_one_count(fake, executable):
    fake.capturing_stream, fake.capture_id = STREAM, 5
    with pytest.raises(LaunchError, match="first launch of kernel mpk_kernel of several ranks is in a graph capture"):
        executable.run(INPUTS, OUTPUTS, [0], STREAM)
    controls = set()
    for stream, capturing in [(STREAM, 0), (STREAM, STREAM), (OTHER_STREAM, 0)]:
        fake.capturing_stream = capturing
        executable.run(INPUTS, OUTPUTS, [0], stream)
        controls.add(Launch(fake).control)
    assert len(controls) == 1


def test_graphs_do_nothing_from_an_abort_until_ranks_join(fake, executable):
    """Were launches counted from 0 before other ranks do so, too, they might take old words of those."""
    executable.run(INPUTS, OUTPUTS, [0], STREAM)
    control = abort(fake, {0: WAITS_FOR_RANK_2}).control
    with pytest.raises(MegakernelTimeout, match=r"waits for(.|\n)* rank 2 (.|\n)*waits for all ranks to come"):
        executable.check()
    executable.check()
    flags = (ctypes.c_uint32 * 3).from_address(control)
    assert flags[2] == 1, "a graph's launch would run"
    abort(fake, {})  # as a graph's launch leaves that does nothing
    with pytest.raises(MegakernelTimeout, match="has not begun anew since a launch was aborted"):
        executable.check()
    executable.join(1, MAILBOXES)
    assert list(flags) == [0, 0, 0]
    executable.run(INPUTS, OUTPUTS, [0], STREAM)
    executable.check()
    abort(fake, {0: WAITS_FOR_RANK_2})
    with pytest.raises(MegakernelTimeout, match="no progress for 2 s, or was told"):
        executable.check()
