"""Every error and warning of torch_mpk. docs/errors.md lists them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar


def first_line(error: BaseException) -> str:
    """Somebody else's error in a line: PyTorch's go on with how to debug them."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


class MpkError(RuntimeError):
    """Base class of every error torch_mpk raises on purpose.

    A message is the class's ``template`` with the fields that it is raised with; ``remedy`` is what to do about it.
    """

    template: ClassVar[str] = "{what}"
    remedy: ClassVar[str] = ""

    def __init__(self, what: str = "", **fields: Any) -> None:
        super().__init__(self.template.format(what=what, remedy=self.remedy, **fields))

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, self.__dict__)


def _restored(cls: type[MpkError], args: tuple[Any, ...], state: dict[str, Any]) -> MpkError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class OptionError(MpkError, ValueError):
    """An option of the backend or a ``TORCH_MPK_*`` variable has a value that cannot be used."""

    template = "{name}: expected {expected}, got {value!r}{hint}"
    remedy = "Options and variables are described, each once, in docs/options.md."

    def __init__(self, **fields: Any) -> None:
        super().__init__(**{"hint": ""} | fields)


class UnknownOptionError(OptionError):
    """An option of the backend has an unknown name."""

    template = "unknown option {name!r}{hint}: the options are {known}"


class ArgumentError(MpkError, ValueError):
    """An argument of ``torch_mpk.generate``, ``torch_mpk.profile``, a compiler's function of ``torch_mpk.jit`` or the
    command line has a wrong shape, type or range."""

    template = "{name}: expected {expected}, got {value}"
    remedy = "The function's docstring says what each argument takes, and --help what a command does."


class CheckpointError(MpkError, ValueError):
    """A checkpoint lacks what its configuration says, or is loaded in a way that its format does not have here."""

    template = "{what}. {remedy}"
    remedy = "docs/weights.md says how each format is loaded, and what of."


class UnsupportedError(MpkError):
    """A compile stage cannot take a node of the user's graph, or the graph.

    Attributes:
        reason: why, in words that follow "because".
        node: the node's name in the captured graph, or None when the whole graph is meant.
        source: the user's source line it comes from, ``file.py:line in function``, or None.
    """

    template = "{place}{what}"
    remedy = (
        "Nothing need be done: options['fallback'] says what runs it instead, and only 'error' raises. "
        "torch_mpk.explain lists all that falls back; rewriting the named line brings it into the kernel."
    )

    def __init__(self, reason: str = "", node: str | None = None, source: str | None = None, **fields: Any) -> None:
        place = f"{node}{f' from {source}' if source else ''}: " if node else ""
        super().__init__(reason, place=place, **fields)
        self.reason, self.node, self.source = reason or str(self), node, source


class GradModeError(UnsupportedError):
    """Gradients would be recorded, and a megakernel has no backward."""

    template = "grad mode is on and an input requires grad: {remedy}"
    remedy = "wrap the call in torch.inference_mode() or torch.no_grad()"


class PartsDeclined(UnsupportedError):
    """A graph that could be ours in part, but is estimated to be faster without us."""

    template = "{count} of its parts could be ours, but it is {estimate} ({first}): {remedy}"
    remedy = "options={'min_segment_nodes': 1} keeps the parts regardless, and torch_mpk.explain shows them"


class AutocastError(UnsupportedError):
    """Autocast chooses dtypes that the captured graph does not show."""

    template = "autocast is enabled for {device}: {remedy}"
    remedy = "load the model in the dtype it should run in instead"


class SeveralDevicesError(UnsupportedError):
    """A megakernel runs on one device."""

    template = "the inputs are on several devices ({devices}): {remedy}"
    remedy = (
        "put model and inputs on one, as with device_map='cuda:0'; a StaticCache that a compiled call is the first to "
        "fill needs its early_initialization before"
    )


class DeclinedError(MpkError):
    """A graph that no build could take, whatever the values of its numbers."""


class PrefillDeclined(DeclinedError):
    """A step over more positions than the option ``max_positions`` says, or than the device takes. It runs eagerly,
    with a line in the log, and with a warning where prompts of several lengths were compiled."""

    template = "a step over {length} positions (prefill), where {why}: {remedy}"
    remedy = (
        "raise max_positions if that is the bound, or cut the prompt into chunks that are ours, as "
        "torch_mpk.generate(prefill_chunk_size=...) does; the model itself, without torch.compile, compiles nothing"
    )


class GrowingCacheError(DeclinedError):
    """A key/value cache that is a new, longer tensor after each call."""

    template = "{source} grows with every call, at {line}: {remedy}"
    remedy = (
        "pass a transformers.StaticCache as past_key_values (or cache_implementation='static' to generate), or "
        "use_cache=False where nothing follows"
    )


class SharedMemoryError(DeclinedError):
    """An input that is written in place overlaps another one, so that the order of reads and writes would count."""

    template = "{first} and {second} share memory, and one of them is written in place: {remedy}"
    remedy = "clone one of them to have the graph compiled"


class IndexRangeError(MpkError, IndexError):
    """A token id, cache position or page of a call lies outside its tensor. Nothing was written. On the CPU only, and
    in ``PersistentKernel.run_test_mode``."""

    remedy = "Make the StaticCache longer (max_cache_len), or check the token ids, pages and lengths that are given."


class TaskError(MpkError, ValueError):
    """A task was declared or called with operands that its signature does not allow."""

    remedy = "The message quotes the signature: make the named operand's shape or dtype fit it."


class TaskAttributeError(MpkError, TypeError):
    """A task was called with an attribute it does not have, or without one that it needs."""

    remedy = "The message lists the attributes."


class NoDerivativeError(MpkError):
    """An operator ``torch.ops.mpk.*`` was called where autograd would record it, and tasks have no derivatives."""

    template = "{op} has no derivative, grad mode is on and an operand requires grad: {remedy}"
    remedy = "wrap the call in torch.inference_mode() or torch.no_grad(), or detach the operands"


class UnknownTaskError(MpkError, KeyError):
    """No task has that name."""

    template = "no task is named {name!r}; declared are: {known}"
    remedy = "Import the module that declares it."

    __str__ = Exception.__str__  # KeyError would show its repr


class LayerError(MpkError, ValueError):
    """A layer of a ``PersistentKernel`` cannot be made from what it was given."""

    template = "{layer}: {what}"
    remedy = "The message says what would fit; help(PersistentKernel.<layer>) lists the operands."


class GridError(LayerError):
    """``grid_dim``, ``block_dim`` or a partition does not fit a layer's tensors or the device."""

    template = "{layer}: {what}, expected {expected}: {advice}"
    remedy = (
        "The message says what would fit. Where a layer takes a grid_dim or block_dim, it may be left out: it is "
        "inferred. A TBGraph needs its grid_dim."
    )


class KernelStateError(MpkError):
    """A ``PersistentKernel`` was asked for something out of order, as a run before it was compiled."""

    template = "{what}: {remedy}"
    remedy = "the order is attach_input, layers, compile, then runs, and finalize at the end"


class GraphFileError(MpkError, ValueError):
    """``python -m torch_mpk graph`` cannot read a file, or cannot show what it was asked for."""

    template = "{path}: {what}"
    remedy = (
        "It reads 4.graph.json and 5.schedule.json, or the folder they are in, as TORCH_MPK_DUMP and "
        "PersistentKernel.compile(output_dir) leave them."
    )


class MissingPackageError(MpkError, ImportError):
    """A part of torch_mpk needs a package that is not installed, or a newer version of it."""

    template = "{name} needs {package} {version} or newer, found {found}: {remedy}"
    remedy = "install it with pip install -e '.[serving]' in a clone of torch_mpk"


class MissingTorchaoError(MissingPackageError):
    """``torch_mpk.quantize`` is called where torchao is not installed."""

    remedy = "install it with pip install torchao"


class EngineError(MpkError, ValueError):
    """Attention of ``torch_mpk.continuous_batching`` was called as it cannot be."""

    template = "attention 'torch_mpk/flash': {what}: {remedy}"
    remedy = "load the model with attn_implementation='sdpa', or call model.set_attn_implementation('sdpa')"


class OtherAttentionError(MpkError, ValueError):
    """``torch_mpk.continuous_batching.config()`` was given to a model with another attention than this module's."""

    template = (
        "config() of torch_mpk.continuous_batching: expected attention 'torch_mpk/flash', got {found!r}: {remedy}"
    )
    remedy = (
        "load the model with attn_implementation=torch_mpk.continuous_batching.ATTENTION. A model that keeps another "
        "has an attention of its own, which the engine's cache does not reach"
    )


class RequestError(MpkError, ValueError):
    """The engine of ``torch_mpk.continuous_batching`` cannot serve a request. It is the request's ``error``, and the
    others go on."""

    template = "request {name}: {what}. {remedy}"
    remedy = (
        "Check its token ids against the model's vocab_size, and its length against the cache, which "
        "torch_mpk.continuous_batching.config(num_blocks=...) makes larger"
    )


class InternalError(MpkError):
    """A stage failed in a way it should not, as on a schedule that its own validation rejects."""

    template = "{what}. {remedy}"
    remedy = "This is a bug of torch_mpk: please report it with the files that TORCH_MPK_DUMP=<folder> leaves"


class VerificationError(MpkError):
    """With ``options={"verify": ...}`` a call differed from eager. Its inputs are as they were before it."""

    template = "{difference}. The first to differ: {culprit}. {remedy}"
    remedy = "This is a bug of torch_mpk: please report it; until then TORCH_MPK_DISABLE=1 runs the model eagerly"


class TaskVerificationError(VerificationError):
    """What differed from eager is a user's task: its code computes something else than its reference."""

    remedy = (
        "Its code or its reference is wrong, not torch_mpk: python -m torch_mpk check-task compares them on its "
        "samples; until then TORCH_MPK_DISABLE=1 runs the model eagerly"
    )


class InductorVerificationError(VerificationError):
    """What differed from eager is a part that torch_mpk does not take and Inductor compiled."""

    remedy = (
        "options={'fallback': 'eager'} runs such parts eagerly; if Inductor differs without torch_mpk, tell PyTorch"
    )


class StrayWriteError(VerificationError):
    """With ``options={"verify": ...}`` code of a user's task wrote outside of its outputs. The call was not made."""

    template = "task {task} ({place}): its {way} writes outside of {what}. {remedy}"
    remedy = (
        "A tile may write its slice of each output and no more: look at the bounds of its loops, which for the last "
        "tile of a dimension are smaller"
    )


class KernelSignatureError(MpkError, ValueError):
    """A kernel of ``torch_mpk.jit`` was declared in a way that does not fit, or called with arguments that do not."""

    remedy = "The message names the argument and the dimension, what was expected and what came, and the signature."


class ProfileError(MpkError):
    """``torch_mpk.profile`` has nothing to record."""

    template = "nothing was recorded: {what}. {remedy}"
    remedy = (
        "On CUDA, compile the model with torch.compile(model, backend='mpk', options={'profile': True}), and let step "
        "call it; torch_mpk.explain says what of it is a megakernel."
    )


class CompileError(MpkError):
    """A device compiler cannot be used."""


class NoCompilerError(CompileError):
    """There is no device compiler."""

    template = "no CUDA compiler found ({reasons}). {remedy}"
    remedy = (
        "Install the CUDA toolkit 12.8 or newer and set CUDA_HOME, or pip install nvidia-cuda-nvrtc and "
        "nvidia-cuda-runtime in the versions of your torch"
    )


class NoHostCompilerError(CompileError):
    """There is no C++ compiler for code that runs on the CPU."""

    template = "no C++ compiler found: {reason}. {remedy}"
    remedy = "Install g++ 10, clang++ 12 or newer (apt install g++), or name one in CXX"


class KernelCompileError(CompileError):
    """A compiler rejected a kernel."""

    template = "a kernel does not compile:\n{errors}\ncommand: {command}\nsource: {source}\n{remedy}"
    remedy = "log.txt beside it has all messages. If the source is not yours, please report this with both files"

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.errors: str = fields["errors"]
        self._fields = fields

    def explained(self, why: str) -> KernelCompileError:
        """The same with a reason in place of all of the compiler's errors but the first."""
        return type(self)(**self._fields | {"errors": "\n".join([why, *self.errors.splitlines()[:1]])})


class CompileForbiddenError(CompileError):
    """A kernel is not in the cache, and compiling is forbidden."""

    template = (
        "kernel {names}{key} is not in {cache} and TORCH_MPK_FORBID_COMPILE is set: call {ahead} once without it, with "
        "the same compiler, torch_mpk and TORCH_MPK_CACHE_DIR"
    )
    remedy = (
        "The message names the call that compiles it: torch_mpk.precompile for a model, and for a kernel of "
        "torch_mpk.jit its compile. Make it where compiling is allowed"
    )

    def __init__(self, *, names: str, **fields: Any) -> None:
        super().__init__(names=f"{names} " if names else "", **fields)


class InstallationError(CompileError):
    """The headers that generated kernels include are missing."""

    template = "torch_mpk/abi/launch.h not found in {places}: {remedy}"
    remedy = "the installation is incomplete, reinstall torch_mpk"


class CacheError(MpkError):
    """The directory of compiled kernels cannot be used."""

    template = "{what}. {remedy}"
    remedy = "Set TORCH_MPK_CACHE_DIR to a directory of yours that has room"


class TemporaryFolderError(MpkError):
    """A source cannot be written to the folder of temporary files, where compilers are asked what they read for it."""

    template = "cannot write {num_bytes} bytes to a new folder in {folder}: {why}. {remedy}"
    remedy = "Set TMPDIR to a directory of yours that has room"


class LaunchError(MpkError):
    """The driver could not load or launch a kernel, or a launch was aborted and its outputs are not valid."""

    remedy = "The message has the driver's reason. python -m torch_mpk env prints versions and devices."


class MegakernelTimeout(LaunchError):
    """The watchdog aborted a launch that made no progress for ``watchdog_seconds``, or a task's reference."""

    remedy = (
        "The next call runs normally. Under a debugger or a profiler raise watchdog_seconds; else please report the "
        "table with the files that TORCH_MPK_DUMP=<folder> leaves."
    )


class RankLostError(MegakernelTimeout):
    """A launch of a sharded model waited for another rank in vain, or the ranks cannot agree on what to launch."""

    remedy = (
        "Every rank must make the same calls. Where all ranks are still there, the next call brings them together "
        "again and runs normally; otherwise start them anew. Where a rank is only late, raise watchdog_seconds."
    )


class MpkWarning(UserWarning):
    """The backend runs something the way it would have run without torch_mpk."""


def errors(base: type[MpkError] = MpkError) -> Iterator[type[MpkError]]:
    """Every error class below ``base``, each before those derived from it."""
    for cls in base.__subclasses__():
        if cls.__module__ == __name__:
            yield cls
            yield from errors(cls)
