"""The inputs of an engine's decode steps, prepared on the host without several operations of PyTorch for each request.

Those take the host longer, for 32 requests, than a small model takes the device for the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingAsyncIOs, ContinuousBatchingIOs
from transformers.generation.continuous_batching.requests import TMP_TOKEN_ID, FutureRequestState


class HostInputs(ContinuousBatchingIOs):
    """Assigns what a step of one token of each request is made of, a tensor at a time."""

    def prepare_batch_tensors(
        self,
        requests_in_batch: list[FutureRequestState],
        logits_processors: Any,
        use_decode_fast_path: bool,
        num_q_tokens: int,
        max_kv_read: int,
        use_padding: bool,
    ) -> None:
        """What the engine's own does, where each request has one token and a row of the block table."""
        is_ours = use_decode_fast_path and self.block_table.numel() > 0 and self.attention_mask is None
        if not is_ours or not requests_in_batch:
            super().prepare_batch_tensors(
                requests_in_batch, logits_processors, use_decode_fast_path, num_q_tokens, max_kv_read, use_padding
            )
            return
        allocators = self.cache.cache_allocators
        count = len(requests_in_batch)
        self.use_block_table, self.num_q_tokens, self.max_kv_read = True, num_q_tokens, 0
        self.num_request_in_batch = self.total_seqlen_q = count
        self._reset_static_tensors()
        self.max_length_q = 1
        self.true_read_sizes, self.true_write_sizes = [0] * len(allocators), [0] * len(allocators)
        self.requests_in_batch = list(requests_in_batch)
        self.req_id_to_new_token_position = {}
        input_ids, position_ids, logits_indices = [], [], []
        for row, future in enumerate(requests_in_batch):
            state = future.state
            input_ids.append(state.tokens_to_process[0])
            position_ids.append(state.position_offset)
            state.position_offset += 1
            if future.has_new_token:
                logits_indices.append(row)
                state.tokens_to_process = [TMP_TOKEN_ID]
                self.req_id_to_new_token_position[state.request_id] = row
        self._fill(self.input_ids, input_ids)
        self._fill(self.position_ids, position_ids)
        self._fill(self.logits_indices, logits_indices)
        logits_processors.prepare_tensor_args(
            requests_in_batch=requests_in_batch, arg_storage=self._bulk_input_tensor[self.static_inputs :]
        )
        rows = self._get_num_sequences(use_padding=use_padding)
        padding = [count] * (rows - count)
        self._fill(self.cumulative_seqlens_q, [*range(count + 1), *padding])
        table = self.block_table.numpy()  # the same memory
        for allocator in allocators.values():
            lengths = [allocator.get_seqlen_k(past, 1) for past in position_ids]
            ends = list(itertools.accumulate(lengths, initial=0))
            kind = allocator.layer_type
            self.max_length_k[kind], self.total_seqlen_k[kind] = max(lengths), ends[-1]
            self._fill(self.cumulative_seqlens_k[kind], ends + ends[-1:] * len(padding))
            stride = allocator.block_physical_stride // allocator.tokens_per_page
            for row, future in enumerate(requests_in_batch):
                blocks = allocator.block_table[future.state.request_id]
                table[allocator.index, row, : len(blocks)] = [block * stride for block in blocks]

    @staticmethod
    def _fill(tensor: torch.Tensor, values: Sequence[int]) -> None:
        tensor.numpy()[: len(values)] = values


class AsynchronousInputs(ContinuousBatchingAsyncIOs):
    """Says in one tensor, not through a list as long as a step's most tokens, where those of the step before go.

    Its tensors on the device are filled on the current stream, for which none of its own waits: where the device is
    behind, zeros would come after the first step's inputs. So the host waits until they are filled.
    """

    def await_filling(self) -> None:
        device = self.io_pairs[0].device_io.device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def reset(self) -> None:
        super().reset()
        self.await_filling()

    def infer_carry_over_ids(self) -> torch.Tensor:
        places = self.io_pairs[self.current_pair].host_io.req_id_to_new_token_position
        ids = torch.full((self.max_batch_tokens,), -1, dtype=torch.int32)
        by_place = ids.numpy()  # the same memory
        for number, name in enumerate(self.io_pairs[1 - self.current_pair].host_io.req_id_to_new_token_position):
            if name in places:
                by_place[places[name]] = number
        return ids


def prepare_faster(inputs: ContinuousBatchingIOs | ContinuousBatchingAsyncIOs) -> None:
    """Has what prepares steps on the host be ours; on a device, without asynchronous steps, the engine's own does."""
    if isinstance(inputs, ContinuousBatchingAsyncIOs):
        inputs.__class__ = AsynchronousInputs
        for pair in inputs.io_pairs:
            pair.host_io.__class__ = HostInputs
        inputs.await_filling()
    elif inputs.device.type == "cpu":
        inputs.__class__ = HostInputs
