"""CudaExecutable against a driver without a device: what a launch passes, and what happens when it goes wrong."""

import ctypes
import gc
import multiprocessing
import struct
import threading
import weakref

import pytest
import torch

from tests.runtime_cuda.fake_driver import destroy_graphs
from torch_mpk import _C
from torch_mpk.errors import LaunchError, MegakernelTimeout

INPUTS = [4096, 8200]
OUTPUTS = [12288]
STREAM = 0xABC0


class Launch:
    """The parameter block of the last launch."""

    def __init__(self, fake):
        data = bytes(fake.params)
        places = struct.unpack_from("<6Q", data)
        self.table, self.workspace, self.control, self.maps, self.host_abort, self.watchdog_ns = places
        self.jitter, self.rank, self.ranks, self.mailboxes = struct.unpack_from("<I2HQ", data, 48)
        self.scalars = struct.unpack_from("<16q", data, 64)
        self.pointers = struct.unpack_from("<3Q", data, 192)


def poke(address: int, *words: int) -> None:
    ctypes.memmove(address, struct.pack(f"<{len(words)}I", *words), 4 * len(words))


def abort(fake, stalls: dict[int, tuple[int, ...]]) -> Launch:
    """Do what a kernel does that gives up: records, the control block's flag, the host's flag."""
    launch = Launch(fake)
    for worker, record in stalls.items():
        poke(launch.control + 288 + 40 * worker, *record)
    poke(launch.control, 7, 0, 1)  # epoch, exited, aborted
    poke(launch.host_abort, 1)
    return launch


def test_launch_arguments_byte_for_byte(fake, make_executable):
    executable = make_executable(watchdog_ns=123)
    executable.jitter = 99
    executable.run(INPUTS, OUTPUTS, [-5], STREAM)
    launch = Launch(fake)
    assert launch.pointers == (*INPUTS, *OUTPUTS)
    assert launch.scalars == (-5, *[0] * 15)
    assert (launch.watchdog_ns, launch.jitter) == (123, 99)
    assert (launch.rank, launch.ranks, launch.mailboxes) == (0, 1, 0)
    assert ctypes.string_at(launch.table, 15) == b"read-only table"
    assert ctypes.string_at(launch.control, 512) == bytes(512)
    assert ctypes.string_at(launch.host_abort, 4) == bytes(4)
    assert launch.workspace == launch.control + 512
    assert (fake.grid[:], fake.block[:], fake.shared_bytes, fake.cooperative) == ([4, 1, 1], [288, 1, 1], 200_000, 1)
    assert fake.stream == STREAM
    assert fake.max_dynamic_shared == 200_000
    assert fake.kernel == b"mpk_kernel"
    assert fake.image == b"// ptx\n"


def test_tensors_and_parameters_give_their_addresses(fake, make_executable):
    x, y = torch.zeros(64), torch.nn.Parameter(torch.zeros(64))
    out = torch.zeros(64)
    make_executable().run((x, y), [out], (3,), STREAM)
    assert Launch(fake).pointers == (x.data_ptr(), y.data_ptr(), out.data_ptr())


@pytest.mark.parametrize(
    ("inputs", "outputs", "scalars", "error", "message"),
    [
        ([4096 + 8, 8200], OUTPUTS, [0], ValueError, r"input 0 .* multiple of 16 bytes, got one that is 8 bytes past"),
        ([4096, 8192 + 4], OUTPUTS, [0], ValueError, r"input 1 .* multiple of 8 bytes, got one that is 4 bytes past"),
        ([0, 8200], OUTPUTS, [0], ValueError, "input 0 .* null address"),
        (INPUTS, [0], [0], ValueError, "output 0 .* null address"),
        ([4096], OUTPUTS, [0], ValueError, "expects 2 inputs, got 1"),
        (INPUTS, [1, 2], [0], ValueError, "expects 1 outputs, got 2"),
        (INPUTS, OUTPUTS, [], ValueError, "expects 1 sizes, got 0"),
        ([4096, "x"], OUTPUTS, [0], TypeError, "input 1 .* expected a tensor or an address, got str"),
        ([4096, -1], OUTPUTS, [0], TypeError, "input 1 .* expected a tensor or an address, got int"),
        (None, OUTPUTS, [0], TypeError, "not iterable"),
    ],
)
def test_bad_arguments_are_refused_before_the_launch(fake, make_executable, inputs, outputs, scalars, error, message):
    executable = make_executable()
    with pytest.raises(error, match=message):
        executable.run(inputs, outputs, scalars, STREAM)
    assert fake.num_launches == 0


def test_each_stream_has_its_own_memory(fake, make_executable):
    executable = make_executable()
    controls = []
    for stream in (STREAM, 0, STREAM, 64):
        executable.run(INPUTS, OUTPUTS, [0], stream)
        controls.append(Launch(fake).control)
        assert executable.control_address(stream) == controls[-1]
    assert controls[0] == controls[2]
    assert len(set(controls)) == 3


def test_the_number_of_streams_is_bounded(fake, make_executable):
    executable = make_executable()
    controls = set()
    for stream in range(1, 101):
        executable.run(INPUTS, OUTPUTS, [0], stream)
        controls.add(Launch(fake).control)
    assert len(controls) == 16


def test_a_capture_allocates_nothing_and_keeps_its_memory(fake, make_executable):
    executable = make_executable()
    executable.run(INPUTS, OUTPUTS, [0], STREAM)
    direct, num_allocations = Launch(fake).control, fake.num_allocations
    fake.capturing_stream, fake.capture_id = STREAM, 5
    executable.run(INPUTS, OUTPUTS, [0], STREAM)
    captured = Launch(fake).control
    executable.run(INPUTS, OUTPUTS, [0], STREAM)  # the next node of the same graph
    assert Launch(fake).control == captured != direct
    assert fake.num_allocations == num_allocations
    fake.capture_id = 6  # another graph, with no launch in between: allocates, in the relaxed mode
    executable.run(INPUTS, OUTPUTS, [0], STREAM)
    assert Launch(fake).control not in (captured, direct)
    fake.capturing_stream = 0
    executable.run(INPUTS, OUTPUTS, [0], STREAM)
    assert Launch(fake).control == direct


@pytest.mark.parametrize("released_by", ["a call", "synchronize"])
def test_graphs_keep_the_executable_that_they_launch(fake, fake_library, make_executable, released_by):
    executable, other = make_executable(maps=MATRICES), make_executable()
    num_captured = _C.synchronize_captured()
    for capture in (5, 6, 5):
        fake.capturing_stream, fake.capture_id = STREAM, capture
        executable.run(INPUTS, OUTPUTS, [0], STREAM)
    fake.capturing_stream = 0
    launch = Launch(fake)
    del executable
    gc.collect()
    destroy_graphs(fake_library, 6)
    assert _C.synchronize_captured() == num_captured + 1
    assert ctypes.string_at(launch.table, 15) == b"read-only table"
    assert map_fields(launch)[0][0] == INPUTS[1] + 32
    poke(launch.host_abort, 1)  # as a replay does that is aborted
    with pytest.raises(MegakernelTimeout, match="made no progress"):
        _C.synchronize_captured()
    num_live = fake.num_live
    destroy_graphs(fake_library, 5)
    assert fake.num_live == num_live, "the driver's own thread has freed memory"
    fake.capturing_stream, fake.capture_id = STREAM, 7
    other.run(INPUTS, OUTPUTS, [0], STREAM)
    assert fake.num_live == num_live, "memory was freed within a capture"
    fake.capturing_stream = 0
    if released_by == "a call":
        other.run(INPUTS, OUTPUTS, [0], STREAM)
        assert fake.num_live < num_live
    assert _C.synchronize_captured() == num_captured + 1
    del other
    destroy_graphs(fake_library)
    assert _C.synchronize_captured() == num_captured
    assert fake.num_live == 0


@pytest.mark.parametrize("call", [b"cuUserObjectCreate", b"cuGraphRetainUserObject"])
def test_a_launch_that_its_graph_cannot_keep_is_refused(fake, make_executable, call):
    executable = make_executable()
    fake.capturing_stream, fake.capture_id = STREAM, 5
    fake.fail_call, fake.fail_result = call, 1
    with pytest.raises(LaunchError, match=f"{call.decode()} failed"):
        executable.run(INPUTS, OUTPUTS, [0], STREAM)
    assert fake.num_launches == 0
    fake.capturing_stream, fake.fail_call = 0, b""
    executable.run(INPUTS, OUTPUTS, [0], STREAM)
    del executable
    _C.synchronize_captured()
    assert fake.num_live == 0


MATRICES = [(1, 32, 500, 1024, 4096, 8, 512, 0), (0, 0, 16, 64, 128, 16, 256, 0), (0, 64, 90, 320, 640, 16, 80, 1)]


def map_fields(launch: Launch) -> list[tuple[int, ...]]:
    return [struct.unpack("<16Q", ctypes.string_at(launch.maps + 128 * i, 128))[:13] for i in range(len(MATRICES))]


def test_maps_say_where_matrices_are(fake, make_executable):
    executable = make_executable(maps=MATRICES)
    executable.run(INPUTS, OUTPUTS, [0], STREAM)
    assert map_fields(Launch(fake)) == [
        (INPUTS[1] + 32, 1, 3, 64, 500, 16, 4096, 128, 64, 8, 8, 0, 3),
        (INPUTS[0], 1, 3, 64, 16, 1, 128, 128, 64, 16, 4, 0, 3),
        (INPUTS[0] + 64, 1, 3, 320, 90, 1, 640, 640, 80, 16, 1, 0, 0),
    ]


def test_maps_are_made_again_only_where_a_matrix_has_moved(fake, make_executable):
    executable = make_executable(maps=MATRICES)
    moved = {}
    for turn in range(30):
        inputs = [4096, 8192 * (1 + turn % 3)]
        executable.run(inputs, OUTPUTS, [0], STREAM + turn % 2)
        assert map_fields(Launch(fake))[0][0] == inputs[1] + 32
        assert moved.setdefault(inputs[1], Launch(fake).maps) == Launch(fake).maps
    assert len(set(moved.values())) == 3
    places = set()
    for turn in range(30):
        executable.run([4096, 8192 * turn + 8192], OUTPUTS, [0], STREAM)
        assert map_fields(Launch(fake))[0][0] == 8192 * turn + 8192 + 32
        places.add(Launch(fake).maps)
    assert len(places) == 4


def test_a_captured_launch_keeps_its_maps(fake, make_executable):
    executable = make_executable(maps=MATRICES)
    executable.run(INPUTS, OUTPUTS, [0], STREAM)
    fake.capturing_stream, fake.capture_id = STREAM, 5
    captured = {}
    for turn in range(6):
        executable.run([4096, 8192 * turn + 8192], OUTPUTS, [0], STREAM)
        captured[turn] = Launch(fake)
    fake.capturing_stream = 0
    for turn in range(10, 20):
        executable.run([4096, 8192 * turn + 8192], OUTPUTS, [0], STREAM)
    for turn, launch in captured.items():
        assert map_fields(launch)[0][0] == 8192 * turn + 8192 + 32


def test_maps_that_cannot_be_made_are_an_error_of_this_call_alone(fake, make_executable):
    executable = make_executable(maps=MATRICES)
    fake.fail_call, fake.fail_result = b"cuTensorMapEncodeTiled", 1
    with pytest.raises(LaunchError, match="cuTensorMapEncodeTiled failed"):
        executable.run(INPUTS, OUTPUTS, [0], STREAM)
    fake.fail_call = b""
    executable.run(INPUTS, OUTPUTS, [0], STREAM)
    assert map_fields(Launch(fake))[0][0] == INPUTS[1] + 32


def test_an_aborted_launch_is_reported_once_by_the_next_call(fake, make_executable):
    executable = make_executable(num_workers=5)
    executable.run(INPUTS, OUTPUTS, [0], STREAM)
    launch = abort(
        fake,
        {
            0: (1, 2, 0, 0, 1, 3, 4, 17),
            1: (1, 2, 0, 0, 1, 3, 4, 17),
            2: (1, 1, 1, 2, 6, 8, 9, 5),
            3: (1, 1, 0, 1, 6, 0, 0, 21, 18, 3),
        },
    )
    with pytest.raises(MegakernelTimeout, match="mpk_kernel on Fake GPU made no progress for 2 s") as info:
        executable.run(INPUTS, OUTPUTS, [0], STREAM)
    assert fake.num_launches == 1
    table = [" ".join(line.split()) for line in str(info.value).splitlines()[1:6]]
    assert table == [
        "workers in phase role waits for seen expected entry",
        "0-1 2 attention consumer event of phase 1 qkv 3 4 17",
        "2 1 qkv loader free ring slot 6 8 9 5",
        "3 1 qkv consumer full ring slot 6, for tile 3 of expert 17 0 0 21",
        "4 - - nothing: left when it saw the abort - - -",
    ]
    assert ctypes.string_at(launch.control, 512) == bytes(512)
    executable.check()
    executable.run(INPUTS, OUTPUTS, [0], STREAM)
    assert fake.num_launches == 2


def test_check_reports_an_abort_of_a_replayed_capture(fake, make_executable):
    executable = make_executable()
    fake.capturing_stream, fake.capture_id = STREAM, 5
    executable.run(INPUTS, OUTPUTS, [0], STREAM)
    fake.capturing_stream = 0
    abort(fake, {0: (1, 0, 1, 3, 0, 0, 0, 0)})
    with pytest.raises(MegakernelTimeout, match="the loader's progress"):
        executable.check()
    executable.check()


def test_a_capture_refuses_to_hide_an_abort(fake, make_executable):
    executable = make_executable()
    executable.run(INPUTS, OUTPUTS, [0], STREAM)
    abort(fake, {0: (1, 0, 1, 3, 0, 0, 0, 0)})
    fake.capturing_stream, fake.capture_id = STREAM, 5
    with pytest.raises(MegakernelTimeout, match="before the capture"):
        executable.run(INPUTS, OUTPUTS, [0], STREAM)
    fake.capturing_stream = 0
    with pytest.raises(MegakernelTimeout, match="the loader's progress"):
        executable.check()


def test_garbage_in_a_stall_record_is_printed_not_followed(fake, make_executable):
    executable = make_executable()
    executable.run(INPUTS, OUTPUTS, [0], STREAM)
    abort(fake, {0: (1, 1 << 31, 0, 0, 1 << 30, 0, 0, 0), 1: (1, 0, 0, 77, 0, 0, 0, 0)})
    with pytest.raises(MegakernelTimeout, match=r"2147483648 \(no such phase\)(.|\n)*unknown \(77\)"):
        executable.check()


def test_everything_is_freed(fake, make_executable):
    executable = make_executable()
    for stream in (1, 2, 3):
        executable.run(INPUTS, OUTPUTS, [0], stream)
    assert fake.num_live > 3
    del executable
    gc.collect()
    assert fake.num_live == 0


def test_a_failed_launch_is_an_error_of_this_call_alone(fake, make_executable):
    executable = make_executable()
    fake.fail_call, fake.fail_result = b"cuLaunchKernelEx", 701
    with pytest.raises(LaunchError, match="launching kernel mpk_kernel failed: CUDA_ERROR_FAKE: as the test asked for"):
        executable.run(INPUTS, OUTPUTS, [0], STREAM)
    fake.fail_call = b""
    executable.run(INPUTS, OUTPUTS, [0], STREAM)
    assert fake.num_launches == 1


def test_a_stream_with_fewer_multiprocessors_says_so(fake, make_executable):
    executable = make_executable()
    fake.fail_call, fake.fail_result = b"cuLaunchKernelEx", 720
    with pytest.raises(LaunchError, match="this stream may use fewer: launch outside of green contexts and MPS"):
        executable.run(INPUTS, OUTPUTS, [0], STREAM)


def test_the_default_stream_of_another_context_is_refused(fake, make_executable):
    executable = make_executable()
    fake.foreign_context = 1
    with pytest.raises(LaunchError, match="another context of the device is current, a green context perhaps"):
        executable.run(INPUTS, OUTPUTS, [0], 0)
    assert fake.num_launches == 0
    executable.run(INPUTS, OUTPUTS, [0], STREAM)  # which says itself whose it is
    fake.foreign_context = 0
    executable.run(INPUTS, OUTPUTS, [0], 0)
    assert fake.num_launches == 2


def test_memory_for_another_stream_runs_out(fake, make_executable):
    executable = make_executable()
    executable.run(INPUTS, OUTPUTS, [0], STREAM)
    num_live = fake.num_live
    fake.fail_call, fake.fail_result = b"cuMemAlloc", 2
    with pytest.raises(LaunchError, match="allocating .* bytes of workspace failed: CUDA_ERROR_OUT_OF_MEMORY"):
        executable.run(INPUTS, OUTPUTS, [0], 64)
    executable.run(INPUTS, OUTPUTS, [0], STREAM)  # has its own
    assert fake.num_live == num_live
    fake.fail_call = b""
    executable.run(INPUTS, OUTPUTS, [0], 64)
    assert fake.num_launches == 3


def test_the_child_of_a_fork_is_told_to_spawn(fake, make_executable):
    executables = [make_executable()]
    executables[0].run(INPUTS, OUTPUTS, [0], STREAM)
    receive, send = multiprocessing.Pipe(duplex=False)

    def child():
        for call in (lambda: executables[0].run(INPUTS, OUTPUTS, [0], STREAM), lambda: executables[0].check()):
            try:
                call()
            except LaunchError as error:
                send.send(str(error))
        num_live = fake.num_live
        executables.clear()  # what the parent has is not the child's to free
        send.send((fake.num_launches, fake.num_live - num_live))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    messages = []
    while len(messages) < 3 and receive.poll(30):
        messages.append(receive.recv())
    process.join(30)
    of_run, of_check, counts = messages
    assert "CUDA does not survive fork(): start processes with the spawn method" in of_run
    assert of_check == of_run
    assert counts == (1, 0)
    executables[0].run(INPUTS, OUTPUTS, [0], STREAM)
    assert fake.num_launches == 2


def test_threads_share_an_executable(fake, make_executable):
    executable = make_executable()

    def launch(stream: int) -> None:
        for _ in range(200):
            executable.run(INPUTS, OUTPUTS, [0], stream)

    threads = [threading.Thread(target=launch, args=(stream,)) for stream in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fake.num_launches == 1600


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 11080}, "driver is too old: it serves CUDA 11.8.*Update"),
        ({"num_devices": 0}, "CUDA device 0: cuDeviceGet failed"),
        ({"occupancy": 0}, "does not fit on a multiprocessor of Fake GPU: 288 threads of 168 registers, 200016 bytes"),
        ({"num_sms": 3}, "has 4 workers, one for each multiprocessor, but Fake GPU has 3"),
        ({"smem_optin": 101376}, r"needs 200000 \+ 16 bytes of shared memory, Fake GPU has 101376"),
        ({"fail_call": b"cuMemAlloc", "fail_result": 2}, "OUT_OF_MEMORY.*empty_cache"),
        ({"fail_call": b"cuModuleLoadDataEx", "fail_result": 218}, r"compute capability 9.0\) \[ptxas says no\]"),
        ({"fail_call": b"cuModuleLoadDataEx", "fail_result": 222}, "serves CUDA 13.0: update it"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(
    fake, make_executable, tmp_path, monkeypatch, fake_library, change, message
):
    if "version" in change:  # a driver is asked for its version once
        copy = tmp_path / "libold.so"
        copy.write_bytes(fake_library.read_bytes())
        monkeypatch.setenv("TORCH_MPK_LIBCUDA", str(copy))
        fake = type(fake).in_dll(ctypes.CDLL(str(copy)), "fake")
    for name, value in change.items():
        setattr(fake, name, value)
    with pytest.raises(LaunchError, match=message):
        make_executable()
    assert fake.num_live == 0


def test_a_kernel_of_other_parameters_is_refused(fake, make_program):
    fake.set_parameters(160)
    with pytest.raises(ValueError, match="takes 160 bytes of parameters, a launch has 216"):
        _C.CudaExecutable(make_program(), b"", 0, 0)


def test_no_driver_says_what_to_do(monkeypatch, make_program):
    monkeypatch.setenv("TORCH_MPK_LIBCUDA", "/nonexistent/libcuda.so")
    with pytest.raises(LaunchError, match=r"no CUDA driver: .*Install NVIDIA's driver"):
        _C.CudaExecutable(make_program(), b"", 0, 0)
    assert _C.num_devices() == 0


def test_device_info(fake):
    info = _C.device_info(0)
    assert (info.name, info.arch, info.num_sms, info.smem_optin_bytes, info.driver_version) == (
        "Fake GPU",
        90,
        132,
        232448,
        13000,
    )
    assert _C.num_devices() == 1


def test_a_launch_of_many_tensors(fake, make_executable):
    tensors = [torch.zeros(16) for _ in range(400)]
    executable = make_executable(num_inputs=400, input_alignment=[16] * 400)
    executable.run(tensors, OUTPUTS, [0], STREAM)
    pointers = struct.unpack_from("<401Q", bytes(fake.params), 192)
    assert pointers == (*(t.data_ptr() for t in tensors), *OUTPUTS)


def test_more_tensors_than_a_launch_can_carry(make_executable):
    with pytest.raises(ValueError, match="at most 4071 tensors"):
        make_executable(num_inputs=5000, input_alignment=[16] * 5000)


def test_a_call_takes_inputs_and_sizes_out_of_its_arguments(fake, make_executable):
    x, y = torch.zeros(64), torch.nn.Parameter(torch.zeros(64))
    out = torch.zeros(64)
    arguments = _C.Arguments(inputs=[3, 0], sizes=[2, 1])  # the kernel reads one size
    make_executable().call(arguments, (y, "unused", 7, x), [out], STREAM)
    assert Launch(fake).pointers == (x.data_ptr(), y.data_ptr(), out.data_ptr())
    assert Launch(fake).scalars[0] == 7


def test_frozen_arguments_are_read_again_only_where_the_object_is_another(fake, make_executable):
    class Moving:
        address = 4096

        def data_ptr(self):
            self.address += 16
            return self.address

    executable, frozen, exact = make_executable(), _C.Arguments([0, 1], [2], True), _C.Arguments([0, 1], [2])
    x, y = Moving(), Moving()

    def pointers(arguments, *args):
        executable.call(arguments, args, OUTPUTS, STREAM)
        return Launch(fake).pointers[:2]

    assert [pointers(exact, x, y, 0) for _ in range(2)] == [(4112, 4112), (4128, 4128)]
    assert [pointers(frozen, x, y, 0) for _ in range(2)] == [(4144, 4144), (4144, 4144)]
    assert pointers(frozen, x, Moving(), 0) == (4144, 4112)
    assert pointers(frozen, x, y, 0) == (4144, 4160)
    kept = weakref.ref(x)
    del x
    gc.collect()
    assert kept() is not None  # else another object could get its place in memory, and be taken for it
    pointers(frozen, y, y, 0)
    gc.collect()
    assert kept() is None


def test_a_failed_call_freezes_nothing(fake, make_executable):
    executable, arguments = make_executable(), _C.Arguments([0, 1], [2], True)
    x = torch.zeros(64)
    for args, error in (((x, "x", 0), TypeError), ((x, x), ValueError), ((x, x, 1.5), TypeError)):
        with pytest.raises(error):
            executable.call(arguments, args, OUTPUTS, STREAM)
    executable.call(arguments, (x, x, 0), OUTPUTS, STREAM)
    assert Launch(fake).pointers[:2] == (x.data_ptr(), x.data_ptr())
    assert fake.num_launches == 1


@pytest.mark.parametrize(
    ("inputs", "sizes", "message"), [([0], [1], "2 inputs, got 1"), ([0, 1], [], "1 sizes, got 0"), ([-1], [], "is -1")]
)
def test_arguments_of_another_executable_are_refused(fake, make_executable, inputs, sizes, message):
    with pytest.raises(ValueError, match=message):
        make_executable().call(_C.Arguments(inputs, sizes), (4096, 4096), OUTPUTS, STREAM)
