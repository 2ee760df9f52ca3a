"""An engine for a server: it is built beside the server, and answers prompts with pieces of text."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import logging
import threading
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, TypeAlias

from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import GenerationOutput

from torch_mpk.batching.engine import Processor
from torch_mpk.serve.errors import Refusal
from torch_mpk.serve.fields import Sampling
from torch_mpk.serve.metrics import Metrics
from torch_mpk.serve.text import Piece, TextOfTokens

logger = logging.getLogger(__name__)

USUAL_MAX_TOKENS = 1024  # of a reply, where nobody says how many, as transformers' server has it
STOPPING = "the server is stopping"
# What requests say themselves, always. Numbers that change nothing would have the engine leave a processor out.
BY_REQUEST = {"temperature": 0.5, "top_k": 1, "top_p": 0.5, "min_p": 0.5}


@dataclasses.dataclass(frozen=True)
class Choosing:
    """How a reply's tokens are chosen, and when it ends."""

    draws: dict[str, Any]  # as the engine takes them
    seed: int | None
    max_tokens: int
    stops: tuple[str, ...]

    def of_choice(self, number: int) -> dict[str, Any]:
        """Choices of one request differ, also with a seed."""
        return self.draws if self.seed is None else self.draws | {"seed": self.seed + number}


Pieces: TypeAlias = "asyncio.Queue[tuple[int, Piece | Refusal]]"


@dataclasses.dataclass
class _Choice:
    """One of a request's replies, while it is made: a request of the engine's own."""

    number: int
    name: str
    text: TextOfTokens
    queue: Pieces


class Engine:
    """The manager of transformers' continuous batching for one model, which is built and runs in threads of its own.

    Attributes:
        manager: transformers' own, or None until it is built.
        error: why there is none, or None.
    """

    def __init__(self, model: Any, tokenizer: Any, settings: ContinuousBatchingConfig, warmup: bool) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.error: BaseException | None = None
        self.metrics = Metrics(self.num_running, self.num_waiting)
        self._settings = dataclasses.replace(settings, per_request_processors=True, return_logprobs=True)
        self._warmup = warmup
        self.manager: ContinuousBatchingManager | None = None
        self._built = threading.Event()
        self._open: dict[str, Pieces] = {}
        self._is_stopping = False
        ends = model.generation_config.eos_token_id
        self._ends = set() if ends is None else {ends} if isinstance(ends, int) else set(ends)

    # -- begin and end

    def start(self) -> None:
        """Builds in a daemon, which threads that it starts are as well: none of them keeps the process alive."""
        threading.Thread(target=self._build, name="torch_mpk engine", daemon=True).start()

    def _build(self) -> None:
        try:
            sampling = copy.deepcopy(self.model.generation_config)
            sampling.update(do_sample=True, num_return_sequences=1, **BY_REQUEST)
            manager = self.model.init_continuous_batching(
                generation_config=sampling, continuous_batching_config=self._settings
            )
            if self._warmup:
                manager.warmup()
            else:
                manager.batch_processor = manager._create_batch_processor()
            manager.batch_processor.on_step = self.metrics.step_seconds.observe
            manager.start()
            self.manager = manager
        except Exception as error:  # of any kind: clients are told, and the log
            logger.exception("the engine was not built")
            self.error = error
        finally:
            self._built.set()

    def stop(self, seconds: float) -> None:
        """Has it end in the middle of its requests, and waits for so long at most."""
        if self.manager is None:
            return
        status = self.manager.background_thread_status
        status.request_stop(status.HARD_STOP, self.manager.distributed_helper.global_rank)
        self.manager._wake_up_loop.set()
        thread = self.manager._generation_thread
        if thread is not None:
            thread.join(seconds)

    def close(self) -> None:
        """Ends all replies with an error, and refuses new ones."""
        self._is_stopping = True
        for queue in self._open.values():
            queue.put_nowait((0, Refusal(STOPPING, status=503)))

    # -- what it is at

    @property
    def state(self) -> str:
        """``building``, ``ready`` or ``failed``."""
        if not self._built.is_set():
            return "building"
        return "ready" if self.failure() is None else "failed"

    def failure(self) -> BaseException | None:
        """Why it takes no requests any more."""
        if self.error is not None or self.manager is None:
            return self.error
        error: BaseException | None = self.manager.background_thread_status.fatal_error
        return error

    async def _running(self) -> ContinuousBatchingManager:
        """Waits until it is built."""
        while not self._built.is_set() and not self._is_stopping:
            await asyncio.sleep(0.05)
        if self._is_stopping:
            raise Refusal(STOPPING, status=503)
        error = self.failure()
        if error is not None or self.manager is None:
            raise Refusal(f"the engine has ended: {error}", status=503)
        return self.manager

    def _processor(self) -> Processor | None:
        return None if self.manager is None else self.manager.batch_processor

    def num_running(self) -> int:
        """Choices that have pages of the cache."""
        processor = self._processor()
        return 0 if processor is None else len(processor.scheduler.active_requests)

    def num_waiting(self) -> int:
        """Choices that have none yet, or none any more."""
        processor = self._processor()
        if processor is None:
            return 0
        return len(processor.scheduler.waiting_requests) + self.manager.input_queue.qsize()  # type: ignore[union-attr]

    # -- requests

    async def choosing(self, request: Sampling, prompts: Sequence[Sequence[int]]) -> Choosing:
        """How it answers a request. Raises Refusal where a prompt, or what was asked for, does not fit."""
        await self._running()
        processor = self._processor()
        assert processor is not None
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        most = min(processor.most_tokens, positions or processor.most_tokens)
        vocab_size = self.model.config.get_text_config().vocab_size
        for prompt in prompts:
            if not prompt:
                raise Refusal("the prompt has no tokens")
            outside = next((token for token in prompt if not 0 <= token < vocab_size), None)
            if outside is not None:
                raise Refusal(f"prompt: token id {outside} is not in [0, {vocab_size})", param="prompt")
        longest = max(map(len, prompts))
        name, asked = request.most_tokens()
        if longest + (asked or 1) > most:
            wanted = f"{longest} tokens" + (f", and {asked} that {name} asks for," if asked is not None else "")
            raise Refusal(
                f"the prompt's {wanted} are more than the {most} that a request may have, with its reply: "
                f"{processor.most_tokens} fit into the cache (--cb-num-blocks), and the model has "
                f"{positions or 'any number of'} positions",
                param=name if longest < most else None,
                code="context_length_exceeded",
            )
        usual = max(USUAL_MAX_TOKENS, self.model.generation_config.max_new_tokens or 0)
        seed = request.seed
        return Choosing(self._draws(request, vocab_size), seed, asked or min(usual, most - longest), request.stops())

    def _draws(self, request: Sampling, vocab_size: int) -> dict[str, Any]:
        """A request draws where it says anything about that, or the model's generation_config says so. What it leaves
        open is as there."""
        defaults: GenerationConfig = self.model.generation_config
        fields = ("temperature", "top_k", "top_p", "min_p")
        said = {name: getattr(request, name) for name in fields if getattr(request, name) is not None}
        is_drawn = bool(defaults.do_sample or said or request.seed is not None)
        if not is_drawn or said.get("temperature") == 0:
            return {"temperature": 1.0, "top_k": vocab_size, "top_p": 1.0, "min_p": 0.0, "greedy": True}
        usual = {name: getattr(defaults, name, None) if defaults.do_sample else None for name in fields}
        chosen = usual | said
        top_k = chosen["top_k"] or 0
        return {
            "temperature": float(chosen["temperature"] or 1),
            "top_k": min(top_k, vocab_size) if top_k > 0 else vocab_size,
            "top_p": float(chosen["top_p"] or 1),
            "min_p": float(chosen["min_p"] or 0),
        }

    async def choices(
        self,
        prompts: Sequence[Sequence[int]],
        count: int,
        choosing: Choosing,
        is_stream: bool,
        parsers: Sequence[Callable[[], Any]],
    ) -> AsyncGenerator[tuple[int, Piece], None]:
        """Answers each prompt ``count`` times, and says which choice a piece is of: prompt ``i``'s are those from
        ``i * count`` on. ``parsers``: of each prompt's replies, ``ResponseParser`` or None, as functions that make one.

        Where nobody takes more of them, the rest is cancelled.
        """
        manager = await self._running()
        queue: Pieces = asyncio.Queue()
        name = uuid.uuid4().hex
        running: dict[int, _Choice] = {}
        self._open[name] = queue
        try:
            for number in range(len(prompts) * count):
                prompt, parser = prompts[number // count], parsers[number // count]
                text = TextOfTokens(self.tokenizer, choosing.stops, self._ends, choosing.max_tokens, parser())
                running[number] = _Choice(number, f"{name}-{number}", text, queue)
                self._send(manager, running[number], prompt, choosing, is_stream or bool(choosing.stops))
            self.metrics.prompt_tokens.inc(sum(map(len, prompts)) * count)
            while running:
                number, piece = await queue.get()
                if isinstance(piece, Refusal):
                    raise piece
                if piece.finish_reason is not None:
                    del running[number]
                yield number, piece
        finally:
            del self._open[name]
            for choice in running.values():
                self._cancel(manager, choice)

    def _send(
        self,
        manager: ContinuousBatchingManager,
        choice: _Choice,
        prompt: Sequence[int],
        choosing: Choosing,
        is_stream: bool,
    ) -> None:
        manager.register_result_handler(choice.name, functools.partial(self._take, manager, choice))
        taken = manager.add_request(
            prompt,
            request_id=choice.name,
            max_new_tokens=choosing.max_tokens,
            streaming=is_stream,
            eos_token_id=sorted(self._ends) or -1,
            **choosing.of_choice(choice.number),
        )
        if taken is None:
            raise Refusal(f"the engine is ending: {self.failure() or 'its log says why'}", status=503)

    def _take(self, manager: ContinuousBatchingManager, choice: _Choice, output: GenerationOutput) -> None:
        """In the event loop: what the engine has made of a choice by now."""
        if choice.text.is_finished:
            return
        piece: Piece | Refusal
        if output.error is not None:
            piece = Refusal(output.error, status=503 if self.failure() is not None else 500)
        else:
            try:
                piece = choice.text.add(output.generated_tokens, output.logprobs, output.is_finished())
                self.metrics.generated_tokens.inc(piece.num_tokens)
            except Exception as error:  # which nobody would see here, and the client would wait
                logger.exception("tokens did not become text")
                piece = Refusal(f"the server failed: {type(error).__name__}: {error}", status=500)
        if choice.text.is_finished and not output.is_finished():  # at a stop string
            self._cancel(manager, choice)
        choice.queue.put_nowait((choice.number, piece))

    @staticmethod
    def _cancel(manager: ContinuousBatchingManager, choice: _Choice) -> None:
        manager.cancel_request(choice.name)
        # The router keeps a handler until its request's end, and none comes.
        manager.output_router.result_handlers.pop(choice.name, None)
