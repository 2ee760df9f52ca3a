# python docs/reference.py writes this file
from collections.abc import Iterable
from typing import Any, overload

from torch_mpk.persistent_kernel.tensor import Dim3, GlobalTensor
from torch_mpk.registry import Task

def stub(tasks: Iterable[Task]) -> str: ...
def is_packable(task: Task) -> bool: ...

class TaskLayers:
    def _meta_tensor(self, name: str) -> GlobalTensor: ...
    def _begin(self, layer: str, output: GlobalTensor | None = ..., block_dim: Dim3 = ...) -> Any: ...
    def _within(self, layer: str, output: GlobalTensor | None = ..., **operands: Any) -> Any: ...
    @overload
    def all_gather_layer(
        self,
        *,
        x: GlobalTensor,
        y: GlobalTensor | None = ...,
        ranks: int,
        group: str,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> GlobalTensor: ...
    @overload
    def all_gather_layer(
        self,
        input: GlobalTensor,
        output: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
        *,
        ranks: int,
        group: str,
    ) -> GlobalTensor: ...
    @overload
    def all_reduce_layer(
        self,
        *,
        x: GlobalTensor,
        y: GlobalTensor | None = ...,
        ranks: int,
        group: str,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> GlobalTensor: ...
    @overload
    def all_reduce_layer(
        self,
        input: GlobalTensor,
        output: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
        *,
        ranks: int,
        group: str,
    ) -> GlobalTensor: ...
    @overload
    def argmax_layer(
        self,
        *,
        x: GlobalTensor,
        y: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> GlobalTensor: ...
    @overload
    def argmax_layer(
        self,
        input: GlobalTensor,
        output: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> GlobalTensor: ...
    @overload
    def attention_layer(
        self,
        *,
        q: GlobalTensor,
        k_new: GlobalTensor | None = ...,
        v_new: GlobalTensor | None = ...,
        slot: GlobalTensor | None = ...,
        k_cache: GlobalTensor,
        v_cache: GlobalTensor,
        mask: GlobalTensor | None = ...,
        limit: GlobalTensor | None = ...,
        sinks: GlobalTensor | None = ...,
        y: GlobalTensor | None = ...,
        scale: float,
        style: str = ...,
        softcap: float = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> GlobalTensor: ...
    @overload
    def attention_layer(
        self,
        input: GlobalTensor,
        k_cache: GlobalTensor,
        v_cache: GlobalTensor,
        output: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
        *,
        k_new: GlobalTensor | None = ...,
        v_new: GlobalTensor | None = ...,
        slot: GlobalTensor | None = ...,
        mask: GlobalTensor | None = ...,
        limit: GlobalTensor | None = ...,
        sinks: GlobalTensor | None = ...,
        scale: float,
        style: str = ...,
        softcap: float = ...,
    ) -> GlobalTensor: ...
    @overload
    def dequantise_layer(
        self,
        *,
        weight: GlobalTensor,
        weight_scale: GlobalTensor,
        zero: GlobalTensor | None = ...,
        column_groups: GlobalTensor | None = ...,
        codebook: GlobalTensor | None = ...,
        scale_code: GlobalTensor | None = ...,
        scale_scale: GlobalTensor | None = ...,
        scale_offset: GlobalTensor | None = ...,
        matrix: GlobalTensor | None = ...,
        block_rows: int,
        block_columns: int,
        columns: int,
        dtype: str,
        scale_block: int = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> GlobalTensor: ...
    @overload
    def dequantise_layer(
        self,
        input: GlobalTensor,
        weight_scale: GlobalTensor,
        output: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
        *,
        zero: GlobalTensor | None = ...,
        column_groups: GlobalTensor | None = ...,
        codebook: GlobalTensor | None = ...,
        scale_code: GlobalTensor | None = ...,
        scale_scale: GlobalTensor | None = ...,
        scale_offset: GlobalTensor | None = ...,
        block_rows: int,
        block_columns: int,
        columns: int,
        dtype: str,
        scale_block: int = ...,
    ) -> GlobalTensor: ...
    @overload
    def e4m3_linear_layer(
        self,
        *,
        x: GlobalTensor,
        x_scales: GlobalTensor,
        weight: GlobalTensor,
        weight_scale: GlobalTensor,
        bias: GlobalTensor | None = ...,
        y: GlobalTensor | None = ...,
        block_rows: int,
        block_columns: int,
        x_columns: int,
        dtype: str,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> GlobalTensor: ...
    @overload
    def e4m3_linear_layer(
        self,
        input: GlobalTensor,
        x_scales: GlobalTensor,
        weight: GlobalTensor,
        weight_scale: GlobalTensor,
        output: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
        *,
        bias: GlobalTensor | None = ...,
        block_rows: int,
        block_columns: int,
        x_columns: int,
        dtype: str,
    ) -> GlobalTensor: ...
    @overload
    def embedding_layer(
        self,
        *,
        ids: GlobalTensor,
        weight: GlobalTensor,
        y: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> GlobalTensor: ...
    @overload
    def embedding_layer(
        self,
        input: GlobalTensor,
        weight: GlobalTensor,
        output: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> GlobalTensor: ...
    @overload
    def expert_linear_layer(
        self,
        *,
        x: GlobalTensor,
        ids: GlobalTensor,
        weight: GlobalTensor | None = ...,
        transposed: GlobalTensor | None = ...,
        y: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> GlobalTensor: ...
    @overload
    def expert_linear_layer(
        self,
        input: GlobalTensor,
        ids: GlobalTensor,
        output: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
        *,
        weight: GlobalTensor | None = ...,
        transposed: GlobalTensor | None = ...,
    ) -> GlobalTensor: ...
    @overload
    def gelu_mul_layer(
        self,
        *,
        gate: GlobalTensor,
        up: GlobalTensor,
        y: GlobalTensor | None = ...,
        approximate: str,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> GlobalTensor: ...
    @overload
    def gelu_mul_layer(
        self,
        input: GlobalTensor,
        output: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
        *,
        approximate: str,
    ) -> GlobalTensor: ...
    @overload
    def kv_write_layer(
        self,
        *,
        cache: GlobalTensor,
        new: GlobalTensor,
        slot: GlobalTensor,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> None: ...
    @overload
    def kv_write_layer(
        self,
        input: GlobalTensor,
        new: GlobalTensor,
        slot: GlobalTensor,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> None: ...
    @overload
    def latent_attention_layer(
        self,
        *,
        q: GlobalTensor,
        q_rope: GlobalTensor,
        latent: GlobalTensor,
        rope: GlobalTensor,
        mask: GlobalTensor | None = ...,
        limit: GlobalTensor | None = ...,
        y: GlobalTensor | None = ...,
        scale: float,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> GlobalTensor: ...
    @overload
    def latent_attention_layer(
        self,
        input: GlobalTensor,
        q_rope: GlobalTensor,
        latent: GlobalTensor,
        rope: GlobalTensor,
        output: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
        *,
        mask: GlobalTensor | None = ...,
        limit: GlobalTensor | None = ...,
        scale: float,
    ) -> GlobalTensor: ...
    @overload
    def linear_layer(
        self,
        *,
        x: GlobalTensor,
        weight: GlobalTensor,
        bias: GlobalTensor | None = ...,
        y: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> GlobalTensor: ...
    @overload
    def linear_layer(
        self,
        input: GlobalTensor,
        weight: GlobalTensor,
        output: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
        *,
        bias: GlobalTensor | None = ...,
    ) -> GlobalTensor: ...
    @overload
    def nth_largest_layer(
        self,
        *,
        x: GlobalTensor,
        n: GlobalTensor,
        peaks: GlobalTensor | None = ...,
        y: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> GlobalTensor: ...
    @overload
    def nth_largest_layer(
        self,
        input: GlobalTensor,
        n: GlobalTensor,
        output: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
        *,
        peaks: GlobalTensor | None = ...,
    ) -> GlobalTensor: ...
    @overload
    def nucleus_layer(
        self,
        *,
        x: GlobalTensor,
        rest: GlobalTensor,
        peaks: GlobalTensor | None = ...,
        sums: GlobalTensor | None = ...,
        least: GlobalTensor | None = ...,
        first: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> tuple[GlobalTensor, ...]: ...
    @overload
    def nucleus_layer(
        self,
        input: GlobalTensor,
        rest: GlobalTensor,
        least: GlobalTensor | None = ...,
        first: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
        *,
        peaks: GlobalTensor | None = ...,
        sums: GlobalTensor | None = ...,
    ) -> tuple[GlobalTensor, ...]: ...
    @overload
    def order_columns_layer(
        self,
        *,
        x: GlobalTensor,
        ordered: GlobalTensor | None = ...,
        sums: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> tuple[GlobalTensor, ...]: ...
    @overload
    def order_columns_layer(
        self,
        input: GlobalTensor,
        ordered: GlobalTensor | None = ...,
        sums: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> tuple[GlobalTensor, ...]: ...
    @overload
    def ordered_linear_layer(
        self,
        *,
        x: GlobalTensor,
        x_sums: GlobalTensor,
        weight: GlobalTensor,
        weight_scale: GlobalTensor,
        bias: GlobalTensor | None = ...,
        zero: GlobalTensor | None = ...,
        y: GlobalTensor | None = ...,
        block_rows: int,
        block_columns: int,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> GlobalTensor: ...
    @overload
    def ordered_linear_layer(
        self,
        input: GlobalTensor,
        x_sums: GlobalTensor,
        weight: GlobalTensor,
        weight_scale: GlobalTensor,
        output: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
        *,
        bias: GlobalTensor | None = ...,
        zero: GlobalTensor | None = ...,
        block_rows: int,
        block_columns: int,
    ) -> GlobalTensor: ...
    @overload
    def paged_decode_layer(
        self,
        *,
        q: GlobalTensor,
        k_cache: GlobalTensor,
        v_cache: GlobalTensor,
        pages: GlobalTensor,
        first: GlobalTensor,
        limit: GlobalTensor,
        y: GlobalTensor | None = ...,
        scale: float,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> GlobalTensor: ...
    @overload
    def paged_decode_layer(
        self,
        input: GlobalTensor,
        k_cache: GlobalTensor,
        v_cache: GlobalTensor,
        pages: GlobalTensor,
        first: GlobalTensor,
        limit: GlobalTensor,
        output: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
        *,
        scale: float,
    ) -> GlobalTensor: ...
    @overload
    def paged_kv_write_layer(
        self,
        *,
        cache: GlobalTensor,
        new: GlobalTensor,
        slot: GlobalTensor,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> None: ...
    @overload
    def paged_kv_write_layer(
        self,
        input: GlobalTensor,
        new: GlobalTensor,
        slot: GlobalTensor,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> None: ...
    @overload
    def prefill_attention_layer(
        self,
        *,
        q: GlobalTensor,
        k: GlobalTensor,
        v: GlobalTensor,
        mask: GlobalTensor | None = ...,
        limit: GlobalTensor | None = ...,
        sinks: GlobalTensor | None = ...,
        y: GlobalTensor | None = ...,
        scale: float,
        style: str = ...,
        softcap: float = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> GlobalTensor: ...
    @overload
    def prefill_attention_layer(
        self,
        input: GlobalTensor,
        k: GlobalTensor,
        v: GlobalTensor,
        output: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
        *,
        mask: GlobalTensor | None = ...,
        limit: GlobalTensor | None = ...,
        sinks: GlobalTensor | None = ...,
        scale: float,
        style: str = ...,
        softcap: float = ...,
    ) -> GlobalTensor: ...
    @overload
    def quantise_rows_layer(
        self,
        *,
        x: GlobalTensor,
        scale: GlobalTensor | None = ...,
        numbers: GlobalTensor | None = ...,
        scales: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> tuple[GlobalTensor, ...]: ...
    @overload
    def quantise_rows_layer(
        self,
        input: GlobalTensor,
        numbers: GlobalTensor | None = ...,
        scales: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
        *,
        scale: GlobalTensor | None = ...,
    ) -> tuple[GlobalTensor, ...]: ...
    @overload
    def quantized_expert_linear_layer(
        self,
        *,
        x: GlobalTensor,
        ids: GlobalTensor,
        weight: GlobalTensor,
        weight_scale: GlobalTensor,
        zero: GlobalTensor | None = ...,
        y: GlobalTensor | None = ...,
        block_rows: int,
        block_columns: int,
        x_columns: int = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> GlobalTensor: ...
    @overload
    def quantized_expert_linear_layer(
        self,
        input: GlobalTensor,
        ids: GlobalTensor,
        weight: GlobalTensor,
        weight_scale: GlobalTensor,
        output: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
        *,
        zero: GlobalTensor | None = ...,
        block_rows: int,
        block_columns: int,
        x_columns: int = ...,
    ) -> GlobalTensor: ...
    @overload
    def quantized_linear_layer(
        self,
        *,
        x: GlobalTensor,
        weight: GlobalTensor,
        weight_scale: GlobalTensor,
        bias: GlobalTensor | None = ...,
        x_scale: GlobalTensor | None = ...,
        zero: GlobalTensor | None = ...,
        column_groups: GlobalTensor | None = ...,
        codebook: GlobalTensor | None = ...,
        scale_code: GlobalTensor | None = ...,
        scale_scale: GlobalTensor | None = ...,
        scale_offset: GlobalTensor | None = ...,
        y: GlobalTensor | None = ...,
        block_rows: int,
        block_columns: int,
        x_columns: int = ...,
        scale_block: int = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> GlobalTensor: ...
    @overload
    def quantized_linear_layer(
        self,
        input: GlobalTensor,
        weight: GlobalTensor,
        weight_scale: GlobalTensor,
        output: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
        *,
        bias: GlobalTensor | None = ...,
        x_scale: GlobalTensor | None = ...,
        zero: GlobalTensor | None = ...,
        column_groups: GlobalTensor | None = ...,
        codebook: GlobalTensor | None = ...,
        scale_code: GlobalTensor | None = ...,
        scale_scale: GlobalTensor | None = ...,
        scale_offset: GlobalTensor | None = ...,
        block_rows: int,
        block_columns: int,
        x_columns: int = ...,
        scale_block: int = ...,
    ) -> GlobalTensor: ...
    @overload
    def rms_norm_layer(
        self,
        *,
        x: GlobalTensor,
        weight: GlobalTensor | None = ...,
        y: GlobalTensor | None = ...,
        eps: float,
        style: str,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> GlobalTensor: ...
    @overload
    def rms_norm_layer(
        self,
        input: GlobalTensor,
        output: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
        *,
        weight: GlobalTensor | None = ...,
        eps: float,
        style: str,
    ) -> GlobalTensor: ...
    @overload
    def rope_layer(
        self,
        *,
        x: GlobalTensor,
        cos: GlobalTensor,
        sin: GlobalTensor,
        y: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> GlobalTensor: ...
    @overload
    def rope_layer(
        self,
        input: GlobalTensor,
        cos: GlobalTensor,
        sin: GlobalTensor,
        output: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> GlobalTensor: ...
    @overload
    def silu_mul_layer(
        self,
        *,
        gate: GlobalTensor,
        up: GlobalTensor,
        y: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> GlobalTensor: ...
    @overload
    def silu_mul_layer(
        self,
        input: GlobalTensor,
        output: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> GlobalTensor: ...
    @overload
    def softmax_layer(
        self,
        *,
        x: GlobalTensor,
        y: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> GlobalTensor: ...
    @overload
    def softmax_layer(
        self,
        input: GlobalTensor,
        output: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> GlobalTensor: ...
    @overload
    def topk_layer(
        self,
        *,
        x: GlobalTensor,
        values: GlobalTensor | None = ...,
        ids: GlobalTensor | None = ...,
        num: int,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> tuple[GlobalTensor, ...]: ...
    @overload
    def topk_layer(
        self,
        input: GlobalTensor,
        values: GlobalTensor | None = ...,
        ids: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
        *,
        num: int,
    ) -> tuple[GlobalTensor, ...]: ...
    @overload
    def varlen_attention_layer(
        self,
        *,
        q: GlobalTensor,
        k_new: GlobalTensor,
        v_new: GlobalTensor,
        k_cache: GlobalTensor,
        v_cache: GlobalTensor,
        read_index: GlobalTensor,
        cu_seq_lens_q: GlobalTensor,
        cu_seq_lens_k: GlobalTensor,
        sinks: GlobalTensor | None = ...,
        y: GlobalTensor | None = ...,
        scale: float,
        window: int = ...,
        softcap: float = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
    ) -> GlobalTensor: ...
    @overload
    def varlen_attention_layer(
        self,
        input: GlobalTensor,
        k_new: GlobalTensor,
        v_new: GlobalTensor,
        k_cache: GlobalTensor,
        v_cache: GlobalTensor,
        read_index: GlobalTensor,
        cu_seq_lens_q: GlobalTensor,
        cu_seq_lens_k: GlobalTensor,
        output: GlobalTensor | None = ...,
        grid_dim: Dim3 = ...,
        block_dim: Dim3 = ...,
        *,
        sinks: GlobalTensor | None = ...,
        scale: float,
        window: int = ...,
        softcap: float = ...,
    ) -> GlobalTensor: ...
    def __getattr__(self, name: str) -> Any: ...  # layers of other packages' tasks
