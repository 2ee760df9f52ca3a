"""How an engine draws its tokens, and each request where ``per_request_processors`` is set: what ``add_request`` takes
beside the engine's own ``temperature``, ``top_k`` and ``top_p``."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from transformers.generation.continuous_batching import cb_logits_processors as engines
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState
from transformers.generation.logits_process import MinPLogitsWarper

# What a request may say of the random numbers of its steps: their seed, or that it takes the likeliest token always.
SEED, GREEDY = "seed", "greedy"
FIELDS: dict[str, type] = {SEED: int, GREEDY: bool}


class RequestMinP(engines.ContinuousBatchingLogitsProcessor):
    """``MinPLogitsWarper`` with a number of each request's own. transformers has none."""

    supported_kwargs: dict[str, type] = {"min_p": float}
    ignored_kwargs: tuple[str, ...] = ("filter_value", "min_tokens_to_keep")

    def __init__(self, processor: MinPLogitsWarper) -> None:
        self.min_p = processor.min_p

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.view(torch.float32).fill_(self.min_p)

    def prepare_tensor_args(self, requests_with_new_token: list[FutureRequestState]) -> torch.Tensor:
        numbers = [request.state.logit_processor_kwargs.get("min_p", self.min_p) for request in requests_with_new_token]
        return torch.tensor(numbers, dtype=torch.float32).view(torch.int32)  # the engine keeps all numbers as integers

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        min_p = tensor_arg[: scores.size(0)].view(torch.float32).unsqueeze(-1)
        probabilities = scores.softmax(-1)
        return scores.masked_fill(probabilities < min_p * probabilities.amax(-1, keepdim=True), -torch.inf)


def install() -> None:
    """Has engines with ``per_request_processors`` take a ``min_p`` of each request."""
    engines.CLASSIC_TO_CB_PROCESSORS_MAP[MinPLogitsWarper] = RequestMinP


class RequestDraws:
    """The random numbers of an engine's steps, in one place of memory, which a step and its CUDA graph read.

    A row of a request that says nothing is filled as ``torch.multinomial`` would; one with a seed by that seed and its
    token's position, whatever else is in the step; a greedy one with equal numbers, which favour no token.

    The generator is the engine's own, with PyTorch's seed. Dynamo sets PyTorch's own generators back behind each trace,
    which may be another thread's: numbers that steps had drawn meanwhile would come again.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self._times = torch.ones(rows, vocab_size, device=device)
        self._generator = torch.Generator(device).manual_seed(torch.initial_seed())
        self._seeded = torch.Generator(device)

    def renew(self, states: Sequence[RequestState], rows: int) -> torch.Tensor:
        """For a step that chooses a token for each of ``states``, and pads them to so many rows, for which nothing is
        drawn.

        Returns float32[rows, vocabulary]: times of ``torch_mpk.generation.sampling.first_to_ring``.
        """
        times = self._times[:rows]
        is_greedy = [state.logit_processor_kwargs.get(GREEDY, False) for state in states]
        if all(is_greedy):
            return times.fill_(1)
        times[: len(states)].exponential_(generator=self._generator)
        for row, state in enumerate(states):
            seed = state.logit_processor_kwargs.get(SEED)
            if is_greedy[row]:
                times[row].fill_(1)
            elif seed is not None:
                self._seeded.manual_seed(_mixed(seed, state.position_offset))
                times[row].exponential_(generator=self._seeded)
        return times


def _mixed(seed: int, position: int) -> int:
    """A seed of one position. Generators take few bits of it, and neighbours must not be alike in those."""
    digest = hashlib.blake2b(f"{seed} {position}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")
