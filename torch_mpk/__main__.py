"""The command ``torch-mpk``, also ``python -m torch_mpk``."""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import math
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from torch_mpk import _C, __version__, graph_view, registry
from torch_mpk.config import DEVICE_ARCHS, closest, env
from torch_mpk.errors import ArgumentError, MpkError, first_line
from torch_mpk.explain import explain
from torch_mpk.jit import ByDevice, Cache, Kernel, find_compiler, include_dir
from torch_mpk.jit.cache import NUM_KEY_DIGITS
from torch_mpk.jit.host import HostCompiler, host_tier
from torch_mpk.profile import WARMUP, profile
from torch_mpk.tools import new_kernel, new_task

if TYPE_CHECKING:
    from torch_mpk.testing.bench import Timed
    from torch_mpk.testing.checker import Findings


def environment() -> Iterator[tuple[str, str]]:
    """What a report about a problem should say of the machine, as (name, value)."""
    yield "torch_mpk", __version__
    yield "torch", f"{torch.__version__} (CUDA {torch.version.cuda})"
    yield "transformers", _version("transformers")
    yield "python", f"{platform.python_version()} on {platform.platform()}, {os.cpu_count()} CPUs"
    yield "headers", str(include_dir())
    yield "nvcc", _or_error(lambda: find_compiler("nvcc").identity)
    yield "nvrtc", _or_error(lambda: find_compiler("nvrtc").identity)
    yield "host compiler", _or_error(lambda: HostCompiler.find().version)
    yield "SIMD tier", _or_error(lambda: f"{host_tier()} of {', '.join(_C.cpu_isas())}")
    for ordinal in range(_C.num_devices()):
        info = _C.device_info(ordinal)
        driver = f"driver for CUDA {info.driver_version // 1000}.{info.driver_version % 1000 // 10}"
        memory = f"{info.smem_optin_bytes} bytes of shared memory"
        yield f"cuda:{ordinal}", f"{info.name}, sm_{info.arch}, {info.num_sms} multiprocessors, {memory}, {driver}"
    yield "cache", _or_error(lambda: f"{env.cache_dir}, limit {env.cache_bytes / 2**30:g} GiB")
    errors, unknown = env.errors(), env.unknown()
    for name in sorted(os.environ):
        if name in errors:
            yield name, str(errors[name]).removeprefix(f"{name}: ")
        elif name in unknown:
            yield name, f"{os.environ[name]}, of a variable that is not known{unknown[name]}"
        elif name.startswith("TORCH_MPK_"):
            yield name, os.environ[name]


def _or_error(describe: Callable[[], str]) -> str:
    try:
        return describe()
    except MpkError as error:
        return str(error)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def show_environment(_: argparse.Namespace) -> None:
    for name, value in environment():
        print(f"{name}: {value}")


def _cache() -> Cache:
    return Cache(env.cache_dir, env.cache_bytes)


def show_cache(_: argparse.Namespace) -> None:
    cache = _cache()
    entries = cache.entries()
    for entry in entries:
        size = sum(map(len, entry.files.values()))
        used = datetime.fromtimestamp(entry.path.stat().st_mtime).strftime("%Y-%m-%d %H:%M")
        report = entry.report
        what = f"{report.get('target', 'an earlier version')}, {report['compiler']}, {report['seconds']} s"
        names = ", ".join(report.get("names", ())) or "-"
        print(f"{entry.key[:NUM_KEY_DIGITS]}  {used}  {size / 1024:7.0f} KiB  {names}  {what}")
    total = sum(len(data) for entry in entries for data in entry.files.values())
    print(f"{len(entries)} kernels, {total / 2**20:.1f} MiB in {cache.root}")


def clear_cache(arguments: argparse.Namespace) -> None:
    cache = _cache()
    if arguments.name is not None:
        num_deleted = cache.clear_named(arguments.name)
        if not num_deleted:
            known = sorted({name for entry in cache.entries() for name in entry.report.get("names", ())})
            expected = f"a key of `cache show`, or one of {', '.join(known) or 'none'}"
            raise ArgumentError(name="NAME", expected=expected, value=arguments.name)
        print(f"deleted {num_deleted} kernels {arguments.name} from {cache.root}")
        return
    print(f"deleted {cache.clear()} kernels from {cache.root}")


def _decode_step(arguments: argparse.Namespace, position: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model of random weights, and the arguments of a step of it at a position of its cache."""
    from torch_mpk.testing.decode import prefill

    model = _random_model(arguments.model, arguments.device, getattr(torch, arguments.dtype))
    prompt = torch.zeros(arguments.batch, position, dtype=torch.int64, device=arguments.device)
    cache, _ = prefill(model, prompt, arguments.length)
    return model, {"input_ids": prompt[:, :1].contiguous(), "past_key_values": cache}


def _random_model(name: str, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    from transformers import AutoConfig

    from torch_mpk.testing.models import CONFIGS, random_model

    try:
        config = CONFIGS[name]() if name in CONFIGS else AutoConfig.from_pretrained(name)
        return random_model(config, device, dtype)
    except (OSError, ValueError) as error:
        known = ", ".join(CONFIGS)
        expected = f"{known}, or the path or hub id of a causal language model's config{closest(name, [*CONFIGS])}"
        raise ArgumentError(name="MODEL", expected=expected, value=f"{name!r}: {first_line(error)}") from None


def explain_model(arguments: argparse.Namespace) -> None:
    if arguments.cuda is not None and arguments.arch is None:
        raise ArgumentError(name="--cuda", expected="--arch beside it", value=arguments.cuda)
    model, inputs = _decode_step(arguments, position=1)
    report = explain(model, arch=arguments.arch, **inputs)
    print(report)
    if arguments.cuda is not None:
        sources = [part.elsewhere.source for part in report.parts if part.elsewhere is not None]
        _write("--cuda", arguments.cuda, max(sources, key=len, default=""))


def profile_model(arguments: argparse.Namespace) -> None:
    needed = arguments.position + arguments.steps + WARMUP
    if arguments.length < needed:
        expected = f"at least {needed}, for --position {arguments.position} and the steps after it"
        raise ArgumentError(name="--length", expected=expected, value=arguments.length)
    model, inputs = _decode_step(arguments, arguments.position)
    step = torch.compile(model, backend="mpk", options={"profile": True})
    with torch.inference_mode():
        print(profile(lambda: step(**inputs), arguments.out, steps=arguments.steps))


def show_graph(arguments: argparse.Namespace) -> None:
    file = graph_view.read(arguments.file)
    texts = []
    for option, what in (("task", graph_view.task), ("event", graph_view.event)):
        if (value := getattr(arguments, option)) is not None:
            texts.append(what(file, value))
    if arguments.critical_path:
        texts.append(graph_view.critical_path(file))
    if arguments.dot:
        texts.append(graph_view.to_dot(file).rstrip("\n"))
    drawings = {"svg": graph_view.to_svg, "html": graph_view.to_html}
    asked = {option: out for option in drawings if (out := getattr(arguments, option)) is not None}
    if not texts and not asked:
        texts.append(graph_view.summary(file))
    for text in texts:
        print(text)
    for option, out in asked.items():
        _write(f"--{option}", out, drawings[option](file))


def _write(option: str, path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        expected = "a file in a folder that can be written to"
        raise ArgumentError(name=option, expected=expected, value=f"{path} ({error.strerror})") from None


def write_task(arguments: argparse.Namespace) -> None:
    _say_written("check-task", new_task.write(arguments.name, arguments.dir))


def write_kernel(arguments: argparse.Namespace) -> None:
    _say_written("check-kernel", new_kernel.write(arguments.name, arguments.dir))


def _say_written(command: str, paths: Sequence[Path]) -> None:
    *others, last = map(str, paths)
    print(f"wrote {', '.join(others)} and {last}; check them with: python -m torch_mpk {command} {paths[0]}")


def _imported(file: Path, what: str) -> ModuleType:
    """A file as a module. Raises ArgumentError for what is none: ``what`` it should declare."""
    path = file.resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ArgumentError(name="FILE", expected=f"a Python file that declares {what}", value=file)
    sys.path.insert(0, str(path.parent))  # as if it were run
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _declared_in(file: Path) -> list[registry.Task]:
    """The tasks that a file declares. Exits where there is none, and raises ArgumentError for what is no such file."""
    before = registry.tasks()
    _imported(file, "tasks")
    declared = [task for task in registry.tasks() if task not in before]
    if not declared:
        sys.exit(f"{file.resolve()}: it declares no tasks, expected functions with @torch_mpk.task")
    return declared


def _kernels_in(file: Path) -> list[Kernel | ByDevice]:
    """The same of kernels, which are the module's by name. One that another chooses by device is not by itself."""
    module = _imported(file, "kernels")
    declared = {id(each): each for each in vars(module).values() if isinstance(each, (Kernel, ByDevice))}
    chosen = [part for each in declared.values() if isinstance(each, ByDevice) for part in (each.cpu, each.cuda)]
    kernels = [
        each
        for each in declared.values()
        if each.reference.__code__.co_filename == module.__file__ and not any(each is part for part in chosen)
    ]
    if not kernels:
        sys.exit(f"{file.resolve()}: it declares no kernels, expected functions with @torch_mpk.jit.kernel")
    return kernels


def check_tasks_of_file(arguments: argparse.Namespace) -> None:
    from torch_mpk.testing.check import DTYPES, check_tasks

    declared = _declared_in(arguments.file)
    findings = check_tasks(declared, _dtypes(arguments) or DTYPES, _print_now, arguments.time_limit)
    _tell(findings, f"{len(declared)} tasks pass")


def check_kernels_of_file(arguments: argparse.Namespace) -> None:
    from torch_mpk.testing.check import ARCHS
    from torch_mpk.testing.check_kernel import check_kernels

    kernels = _kernels_in(arguments.file)
    archs = arguments.arch or ARCHS
    findings = check_kernels(kernels, _dtypes(arguments), _print_now, arguments.time_limit, archs)
    _tell(findings, f"{len(kernels)} kernels pass")


_print_now = functools.partial(print, flush=True)


def _dtypes(arguments: argparse.Namespace) -> list[torch.dtype]:
    return [getattr(torch, name) for name in arguments.dtype]


def _tell(findings: Findings, passed: str) -> None:
    if findings.not_run:
        print("not run:", *findings.not_run, sep="\n  ")
    if findings.failures:
        sys.exit("\n".join(["failed:", *findings.failures]))
    print(passed)


def bench_tasks_of_file(arguments: argparse.Namespace) -> None:
    from torch_mpk.testing import bench

    [dtype] = _dtypes(arguments) or [torch.bfloat16]
    rest = arguments.device, arguments.rounds, arguments.gpu_ms
    name = str(dtype).removeprefix("torch.")
    timed = [(f"{task.file}: task ", bench.bench_task(task, dtype, *rest)) for task in _declared_in(arguments.file)]
    _print_times(f"{name} on {arguments.device}", timed)


def bench_kernels_of_file(arguments: argparse.Namespace) -> None:
    from torch_mpk.testing import bench

    rest = _dtypes(arguments), arguments.device, arguments.rounds, arguments.gpu_ms
    kernels = _kernels_in(arguments.file)
    timed = [(f"{arguments.file}: kernel ", bench.bench_kernel(kernel, *rest)) for kernel in kernels]
    _print_times(f"on {arguments.device}", timed)


def _print_times(how: str, benches: Sequence[tuple[str, Iterator[Timed]]]) -> None:
    """Each with what a failure begins with. Exits where there is one."""
    from torch_mpk.testing import bench

    failures = []
    print(f"{how}: medians in milliseconds, and as multiples of ours", bench.header(), sep="\n")
    with torch.inference_mode():
        for owner, times in benches:
            for timed in times:
                print(timed, flush=True)
                if timed.failure:
                    failures.append(f"{owner}{timed.what}: {timed.failure}")
    if failures:
        sys.exit("\n".join(["failed:", *failures]))


def serve(arguments: argparse.Namespace) -> None:
    from torch_mpk.serve import run

    run(arguments.rest)


def arguments_parser() -> argparse.ArgumentParser:
    prog = "torch-mpk" if Path(sys.argv[0]).stem == "torch-mpk" else "python -m torch_mpk"
    text = "Reports, compiled kernels, what becomes of a model, and tasks and kernels of your own."
    parser = argparse.ArgumentParser(prog=prog, description=text)
    parser.add_argument("--version", action="version", version=f"torch_mpk {__version__}")
    commands = _add_group(parser)

    def add(
        parent: argparse._SubParsersAction, name: str, run: Callable[[argparse.Namespace], None], text: str
    ) -> argparse.ArgumentParser:
        command = parent.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        return command

    add(commands, "env", show_environment, "print versions, compilers, devices and settings")
    cache = _add_group(commands.add_parser("cache", help="the compiled kernels"))
    add(cache, "show", show_cache, "list the compiled kernels, least recently used first")
    command = add(cache, "clear", clear_cache, "delete the compiled kernels")
    command.add_argument("name", metavar="NAME", nargs="?", help="of the kernel or task, or its key (default: all)")
    command = add(
        commands, "graph", show_graph, "show a task graph that a build left: its summary, or what is asked for"
    )
    command.add_argument("file", type=Path, help="4.graph.json, 5.schedule.json, or the folder they are in")
    command.add_argument("--task", metavar="NAME", help="nodes of a task, or whose label has this in it, in full")
    command.add_argument("--event", type=int, metavar="N", help="who signals event N, and who waits for it")
    command.add_argument("--critical-path", action="store_true", help="the dependent nodes that move the most bytes")
    command.add_argument("--dot", action="store_true", help="print a Graphviz source")
    command.add_argument("--svg", type=Path, metavar="OUT", help="draw an SVG, where Graphviz is installed")
    command.add_argument("--html", type=Path, metavar="OUT", help="write a page to pan, zoom, search and click in")
    text = "`transformers serve` with continuous batching, its decode steps on backend mpk (docs/serving.md)"
    command = commands.add_parser("serve", help=text, add_help=False, prefix_chars="\0")  # options are for the other
    command.set_defaults(run=serve)
    command.add_argument("rest", nargs="*")
    _add_commands_of_models(functools.partial(add, commands))
    _add_commands_of_tasks(functools.partial(add, commands))
    _add_commands_of_kernels(functools.partial(add, commands))
    return parser


def _add_group(parser: argparse.ArgumentParser) -> argparse._SubParsersAction:
    """Room for commands; without one of them the parser says what there is."""
    parser.set_defaults(run=lambda _: parser.print_help())
    return parser.add_subparsers(title="commands", metavar="COMMAND")


def _add_commands_of_models(add: Callable[..., argparse.ArgumentParser]) -> None:
    of_what = "a decode step of a causal language model, with random weights"
    explaining = add("explain", explain_model, f"show what becomes of {of_what}")
    profiling = add("profile", profile_model, f"write a timeline of {of_what}, and print where its time goes")
    for command in (explaining, profiling):
        command.add_argument(
            "model", metavar="MODEL", help="qwen3-0.6b, llama-1b and others, or the path or hub id of a config"
        )
        command.add_argument("--batch", type=_int_from(1), default=1, help="sequences (default: 1)")
        text = "positions of the cache (default: 1024)"
        command.add_argument("--length", type=_int_from(2), default=1024, help=text)
        command.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
        _add_device(command)
    text = "also what it would be there: sm_80, sm_90a, sm_100a or sm_120a, which need not be here"
    explaining.add_argument("--arch", metavar="ARCH", help=text)
    explaining.add_argument("--cuda", type=Path, metavar="OUT", help="write the CUDA source of its largest part there")
    profiling.add_argument("--out", type=Path, default=Path("trace.json.gz"), help="(default: trace.json.gz)")
    profiling.add_argument("--position", type=_int_from(1), default=512, help="tokens in the cache (default: 512)")
    profiling.add_argument("--steps", type=_int_from(1), default=3, help="to record (default: 3)")


def _add_commands_of_tasks(add: Callable[..., argparse.ArgumentParser]) -> None:
    command = add("new-task", write_task, "write the two files of a task, a working example to start from")
    command.add_argument("name", metavar="NAME", help="of the task, as in torch.ops.mpk.NAME")
    _add_dir(command)
    command = add("check-task", check_tasks_of_file, "run the samples of a file's tasks in every way they can run")
    _add_check(command, "default: each but float64, which a task declares")
    text = "time the samples of a file's tasks, each in a kernel of its own, beside eager and Inductor"
    _add_bench(add("bench-task", bench_tasks_of_file, text), "default: bfloat16")


def _add_commands_of_kernels(add: Callable[..., argparse.ArgumentParser]) -> None:
    text = "write the files of a kernel for CPUs and GPUs and of its test, a working example to start from"
    command = add("new-kernel", write_kernel, text)
    command.add_argument("name", metavar="NAME", help="of the kernel and its files")
    _add_dir(command)
    text = "run the samples of a file's kernels against their references, and compile those for GPUs"
    command = add("check-kernel", check_kernels_of_file, text)
    _add_check(command, "default: each of the signature")
    text = "compute capability to compile CUDA kernels for, as 90 (default: 80 and 90, and the GPU's)"
    command.add_argument(
        "--arch", type=int, choices=DEVICE_ARCHS, action="append", default=[], metavar="ARCH", help=text
    )
    text = "time the samples of a file's kernels beside their references in eager mode and Inductor"
    _add_bench(add("bench-kernel", bench_kernels_of_file, text), "default: each of the signature")


_FILE = "the Python file that declares them"


def _add_dir(command: argparse.ArgumentParser) -> None:
    command.add_argument("--dir", type=Path, default=Path(), help="where to write them (default: here)")


def _add_check(command: argparse.ArgumentParser, default: str) -> None:
    command.add_argument("file", metavar="FILE", type=Path, help=_FILE)
    _add_dtype(command, default, action="append")
    text = "that a sample may take in a way (default: 60)"
    command.add_argument("--time-limit", type=_seconds, default=60, metavar="SECONDS", help=text)


def _add_bench(command: argparse.ArgumentParser, default: str) -> None:
    command.add_argument("file", metavar="FILE", type=Path, help=_FILE)
    _add_dtype(command, default, nargs=1)
    _add_device(command)
    text = "of calls that are timed on the CPU (default: 30)"
    command.add_argument("--rounds", type=_int_from(1), default=30, help=text)
    text = "that calls are repeated for on a GPU (default: 100)"
    command.add_argument("--gpu-ms", type=_int_from(1), default=100, metavar="MS", help=text)


def _add_dtype(command: argparse.ArgumentParser, default: str, **options: Any) -> None:
    dtypes = ("float32", "bfloat16", "float16", "float64")
    command.add_argument("--dtype", choices=dtypes, default=[], help=f"of tensors ({default})", **options)


def _add_device(command: argparse.ArgumentParser) -> None:
    default = "cuda" if torch.cuda.is_available() else "cpu"
    command.add_argument("--device", type=_device, default=default, help=f"cpu, cuda or cuda:N (default: {default})")


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"expected cpu, cuda or cuda:N, got {text!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(f"torch sees {torch.cuda.device_count()} CUDA devices here, got {text!r}")
    return device


def _int_from(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"expected an int of at least {least}, got {text!r}")
        return value

    return parse


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")
    return value


def main(arguments: list[str] | None = None) -> None:
    parsed = arguments_parser().parse_args(arguments)
    try:
        parsed.run(parsed)
        sys.stdout.flush()
    except MpkError as error:  # it says what to do: no traceback
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
        sys.exit(128 + signal.SIGPIPE)


if __name__ == "__main__":
    main()
