"""The thread that builds in the background: few jobs, in order, and nothing left of it."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

from tests.thinned import thinned
from torch_mpk.builds import background, timing
from torch_mpk.jit.compiler import run


class Owner:
    pass


def test_jobs_run_one_after_the_other_in_the_modes_of_who_asks():
    owner, threads = Owner(), set()

    def make():
        threads.add(threading.current_thread())
        return torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    with torch.inference_mode():
        jobs = [background.submit(make, owner)]
    with torch.no_grad():
        jobs.append(background.submit(make, owner))
    jobs.append(background.submit(make, owner))
    assert background.wait(60)
    assert [job.result() for job in jobs] == [(True, False), (False, False), (False, True)]
    assert not any(thread.is_alive() for thread in threads) and threading.current_thread() not in threads


def test_what_a_job_raises_is_its_result_and_the_next_one_runs():
    def fail():
        raise RuntimeError("too odd")

    owner = Owner()
    jobs = [background.submit(fail, owner), background.submit(lambda: 1, owner)]
    assert background.wait(60)
    with pytest.raises(RuntimeError, match="too odd"):
        jobs[0].result()
    assert jobs[1].result() == 1


class Blocked:
    """A job that runs until it is told to end."""

    def __init__(self, owner):
        self.has_begun, self.go_on = threading.Event(), threading.Event()
        self.job = background.submit(self._run, owner)
        assert self.has_begun.wait(60)

    def _run(self):
        self.has_begun.set()
        assert self.go_on.wait(60)
        with timing.stage("next"):
            return "made"


def test_as_many_wait_as_may_and_what_they_hold_goes_with_them():
    owner, made = Owner(), []
    first = Blocked(owner)
    held = [torch.nn.Parameter(torch.empty(1)) for _ in range(background.MAX_WAITING)]
    jobs = [background.submit(lambda tensor=tensor: made.append(tensor.shape), owner) for tensor in held]
    assert background.submit(lambda: made.append("more"), owner) is None
    refs = [weakref.ref(tensor) for tensor in held]
    held.clear()
    first.go_on.set()
    assert background.wait(60)
    assert first.job.result() == "made"
    assert len(made) == len(jobs)
    assert not any(ref() for ref in refs)
    assert background.submit(lambda: 1, owner) is not None
    assert background.wait(60)


def test_jobs_whose_owner_is_gone_are_not_done():
    owner, other, made = Owner(), Owner(), []
    first = Blocked(owner)
    jobs = [background.submit(lambda i=i: made.append(i), each) for i, each in enumerate((owner, other))]
    del owner
    gc.collect()
    first.go_on.set()
    assert background.wait(60)
    assert made == [1]
    assert first.job.is_lost and jobs[0].is_lost and not jobs[1].is_lost


def test_dropped_jobs_are_lost_and_others_follow():
    owner = Owner()
    first = Blocked(owner)
    waiting = background.submit(lambda: 1, owner)
    background.drop()
    first.go_on.set()
    later = background.submit(lambda: 2, owner)
    assert background.wait(60)
    assert first.job.is_lost and waiting.is_lost
    assert later.result() == 2


def test_a_compiler_ends_with_the_job_that_is_dropped(tmp_path):
    owner = Owner()
    job = background.submit(lambda: run(["sh", "-c", "sleep 600 & echo $! > pid; wait"], tmp_path), owner)
    process = written(tmp_path / "pid")
    assert is_alive(process)
    background.drop()
    assert background.wait(60)
    assert job.is_lost
    assert has_ended(process)


def written(path: Path) -> int:
    for _ in range(6000):
        if path.exists() and path.read_text().endswith("\n"):
            return int(path.read_text())
        time.sleep(0.01)
    raise AssertionError(f"{path} was not written")


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")")[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def has_ended(process: int) -> bool:
    """Soon: who was killed may take a moment."""
    deadline = time.monotonic() + 30
    while is_alive(process) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_alive(process)


ENDING = """
import sys, threading
from pathlib import Path
from torch_mpk.builds import background
from torch_mpk.jit.compiler import run

class Owner: pass

owner, folder = Owner(), Path(sys.argv[1])
background.submit(lambda: run(["sh", "-c", "sleep 600 & echo $! > pid; wait"], folder), owner)
background.submit(lambda: print("never"), owner)
while not ((folder / "pid").exists() and (folder / "pid").read_text().endswith("\\n")): threading.Event().wait(0.01)
{end}
"""


@pytest.mark.parametrize("end", thinned(["sys.exit(3)", "raise KeyboardInterrupt"], 0))
def test_a_process_that_ends_leaves_neither_compiler_nor_thread(tmp_path, end):
    script = ENDING.format(end=end)
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, timeout=200)
    assert done.returncode == (3 if "exit" in end else -signal.SIGINT), done.stderr
    assert "never" not in done.stdout
    assert "Fatal" not in done.stderr
    assert has_ended(written(tmp_path / "pid"))


KILLED = """
import os, signal, sys, threading, time
from pathlib import Path
from torch_mpk.jit.compiler import run

folder = Path(sys.argv[1])
threading.Thread(target=run, args=(["sh", "-c", "sleep 600 & echo $$ $! > pids; wait"], folder)).start()
while not ((folder / "pids").exists() and (folder / "pids").read_text().endswith("\\n")): time.sleep(0.01)
if (child := os.fork()) == 0: time.sleep(600)
(folder / "child").write_text(str(child))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_leaves_no_compiler(tmp_path):
    """Nor what that has started, also where a forked child lives on with copies of what the process had open."""
    assert subprocess.run([sys.executable, "-c", KILLED, tmp_path], timeout=200).returncode == -signal.SIGKILL
    child = int((tmp_path / "child").read_text())
    assert is_alive(child)
    try:
        assert all(has_ended(int(each)) for each in (tmp_path / "pids").read_text().split())
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_compiler_goes_on_when_other_threads_and_children_end(tmp_path):
    script = "echo begun; touch begun; while [ ! -e go_on ]; do sleep 0.01; done; echo ended"
    done = []
    slow = threading.Thread(target=lambda: done.append(run(["sh", "-c", script], tmp_path)))
    slow.start()
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    quick = threading.Thread(target=lambda: done.append(run(["sh", "-c", "echo fails; exit 3"], tmp_path)))
    quick.start()
    quick.join()
    if (child := os.fork()) == 0:
        os._exit(0 if run(["true"], tmp_path).ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    slow.join(0.5)
    assert slow.is_alive()
    (tmp_path / "go_on").touch()
    slow.join()
    assert [(each.ok, each.log) for each in done] == [(False, "fails\n"), (True, "begun\nended\n")]


def test_a_forked_child_asks_anew_and_the_parent_goes_on():
    owner = Owner()
    first = Blocked(owner)
    waiting = background.submit(lambda: "parent", owner)
    receive, send = multiprocessing.Pipe(duplex=False)

    def child():
        is_lost = first.job.is_lost, waiting.is_lost
        job = background.submit(lambda: "child", owner)
        send.send((*is_lost, background.wait(60) and job.result()))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    assert receive.poll(60), "the child hangs"
    assert receive.recv() == (True, True, "child")
    process.join(30)
    first.go_on.set()
    assert background.wait(60)
    assert (first.job.result(), waiting.result()) == ("made", "parent")


def test_nothing_is_traced_while_a_process_forks():
    """A child would have half of what PyTorch traces with, and take all it does for a part of that."""
    owner, is_traced = Owner(), threading.Event()

    def trace():
        with torch._dynamo.convert_frame.compile_lock:
            started.set()
            time.sleep(0.3)
            is_traced.set()

    started = threading.Event()
    background.submit(trace, owner)
    assert started.wait(60)
    if (child := os.fork()) == 0:
        is_free = torch._dynamo.convert_frame.compile_lock.acquire(timeout=10)
        os._exit(0 if is_traced.is_set() and is_free else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert background.wait(60)
