"""Mirage's layers under Mirage's names, each one in terms of tasks. What it hard-codes is an argument here."""

from __future__ import annotations

import torch

from torch_mpk.errors import LayerError
from torch_mpk.persistent_kernel.builder import aten
from torch_mpk.persistent_kernel.grid import check_grid
from torch_mpk.persistent_kernel.paged import META_TENSORS, attend
from torch_mpk.persistent_kernel.task_layers import TaskLayers
from torch_mpk.persistent_kernel.tensor import Dim3, GlobalTensor
from torch_mpk.tasks.linear import linear


class Layers(TaskLayers):
    """The layers whose names are not those of tasks.

    R rows, H hidden size, K and N the sides of a weight. Each returns its output, a new intermediate tensor where that
    is left out, and raises LayerError, TaskError or GridError where its arguments do not fit.
    """

    def rmsnorm_layer(
        self,
        input: GlobalTensor,
        weight: GlobalTensor | None,
        output: GlobalTensor | None = None,
        grid_dim: Dim3 = None,
        block_dim: Dim3 = None,
        *,
        eps: float = 1e-6,
        style: str = "llama",
    ) -> GlobalTensor:
        """``output[R, H] = rms_norm(input[R, H]) * weight[H]``; ``style``: see the task ``rms_norm``."""
        with self._within("rmsnorm_layer", output, input=input):
            return self.rms_norm_layer(
                x=input, weight=weight, y=output, eps=eps, style=style, grid_dim=grid_dim, block_dim=block_dim
            )

    def embed_layer(
        self,
        input: GlobalTensor,
        weight: GlobalTensor,
        output: GlobalTensor | None = None,
        grid_dim: Dim3 = None,
        block_dim: Dim3 = None,
        input_source: int = 1,
    ) -> GlobalTensor:
        """``output[..., H] = weight[input[...]]`` for token ids, int64; of ids ``[R, 1]`` also ``output[R, H]``.

        ``input_source`` is for programs that give it: ids are always those of ``input``.
        """
        with self._within("embed_layer", output, input=input, weight=weight) as builder:
            is_column = output is not None and (*output.shape[:-1], 1) == input.shape
            ids = builder.reshaped("input", input, input.shape[:-1]) if is_column else input
            return self.embedding_layer(ids=ids, weight=weight, y=output, grid_dim=grid_dim, block_dim=block_dim)

    def splitk_linear_layer(
        self,
        input: GlobalTensor,
        weight: GlobalTensor,
        output: GlobalTensor | None = None,
        grid_dim: Dim3 = None,
        block_dim: Dim3 = None,
        accumulate: bool = False,
    ) -> GlobalTensor:
        """``linear_layer``, of which a grid may split K too: how products are split is the scheduler's choice.

        With ``accumulate`` the product is added to what ``output`` holds, as Mirage's kernel always does.
        """
        with self._within("splitk_linear_layer", output, input=input, weight=weight) as builder:
            sizes = builder.sizes(linear, {"x": input, "weight": weight, "y": output})
            check_grid(builder.layer, grid_dim, sizes, list(sizes))
            if not accumulate:
                return self.linear_layer(x=input, weight=weight, y=output, block_dim=block_dim)
            if output is None:
                what = "accumulate=True adds to output: give one that holds a value"
                raise LayerError(layer=builder.layer, what=what)
            return self.linear_with_residual_layer(input, weight, output, output, block_dim=block_dim)

    def linear_with_residual_layer(
        self,
        input: GlobalTensor,
        weight: GlobalTensor,
        residual: GlobalTensor,
        output: GlobalTensor | None = None,
        grid_dim: Dim3 = None,
        block_dim: Dim3 = None,
    ) -> GlobalTensor:
        """``output[R, N] = residual[R, N] + input[R, K] @ weight[N, K].T``, the product rounded before it is added."""
        with self._within("linear_with_residual_layer", output, input=input, weight=weight, residual=residual):
            product = self.linear_layer(x=input, weight=weight, grid_dim=grid_dim, block_dim=block_dim)
            return self.elementwise_add_layer(residual, product, output)

    def rmsnorm_linear_layer(
        self,
        input: GlobalTensor,
        weight_norm: GlobalTensor,
        weight_linear: GlobalTensor,
        output: GlobalTensor | None = None,
        grid_dim: Dim3 = None,
        block_dim: Dim3 = None,
        *,
        eps: float = 1e-6,
        style: str = "llama",
    ) -> GlobalTensor:
        """``output[R, N] = rms_norm(input[R, K]) * weight_norm[K] @ weight_linear[N, K].T``."""
        with self._within(
            "rmsnorm_linear_layer", output, input=input, weight_norm=weight_norm, weight_linear=weight_linear
        ):
            normed = self.rmsnorm_layer(input, weight_norm, eps=eps, style=style)
            return self.linear_layer(x=normed, weight=weight_linear, y=output, grid_dim=grid_dim, block_dim=block_dim)

    def silu_mul_linear_with_residual_layer(
        self,
        input: GlobalTensor,
        weight: GlobalTensor,
        residual: GlobalTensor,
        output: GlobalTensor | None = None,
        grid_dim: Dim3 = None,
        block_dim: Dim3 = None,
    ) -> GlobalTensor:
        """``silu_mul_layer`` of ``input[R, 2K]``, then ``linear_with_residual_layer``, whose grid is given."""
        with self._within("silu_mul_linear_with_residual_layer", output, input=input, weight=weight, residual=residual):
            activated = self.silu_mul_layer(input=input)
            return self.linear_with_residual_layer(activated, weight, residual, output, grid_dim, block_dim)

    def elementwise_add_layer(
        self,
        input_a: GlobalTensor,
        input_b: GlobalTensor,
        output: GlobalTensor | None = None,
        grid_dim: Dim3 = None,
        block_dim: Dim3 = None,
    ) -> GlobalTensor:
        """``output = input_a + input_b``, broadcast and promoted as PyTorch's ``+``."""
        builder = self._begin("elementwise_add_layer", output, block_dim)
        nodes = builder.read("input_a", input_a), builder.read("input_b", input_b)
        try:
            torch.broadcast_shapes(input_a.shape, input_b.shape)
        except RuntimeError:
            what = f"input_a={input_a.name} has shape {[*input_a.shape]} and input_b={input_b.name} {[*input_b.shape]}"
            what += ", expected one shape, or shapes that broadcast to one"
            raise LayerError(layer=builder.layer, what=what) from None
        total = builder.call(aten.add.Tensor, *nodes)
        return builder.store(output, total, grid_dim)

    def identity_layer(
        self,
        input: GlobalTensor,
        output: GlobalTensor | None = None,
        grid_dim: Dim3 = None,
        block_dim: Dim3 = None,
        dependent_tensor: GlobalTensor | None = None,
    ) -> GlobalTensor:
        """``output = input``. ``dependent_tensor`` is for programs that give it: layers run in program order."""
        builder = self._begin("identity_layer", output, block_dim)
        return builder.store(output, builder.call(aten.clone.default, builder.read("input", input)), grid_dim)

    def paged_attention_layer(
        self,
        input: GlobalTensor,
        k_cache: GlobalTensor,
        v_cache: GlobalTensor,
        q_norm: GlobalTensor | None,
        k_norm: GlobalTensor | None,
        cos_pos_embed: GlobalTensor,
        sin_pos_embed: GlobalTensor,
        output: GlobalTensor | None = None,
        grid_dim: Dim3 = None,
        block_dim: Dim3 = None,
        *,
        eps: float = 1e-6,
        style: str = "llama",
        scale: float | None = None,
    ) -> GlobalTensor:
        """Attention of the tokens of several requests, which it first writes to the pages of their caches.

        The requests are what the meta tensors say at each run, all int32: tokens ``qo_indptr_buffer[r : r + 2]``, pages
        ``paged_kv_indices_buffer[paged_kv_indptr_buffer[r] : paged_kv_indptr_buffer[r + 1]]``, and
        ``paged_kv_last_page_len_buffer[r]`` positions in the last page, the new tokens among them.

        Args:
            input: [tokens, (heads + 2 * cache heads) * D], as a linear layer of fused q, k and v weights wrote it, or
                in as many groups of q, k and v as there are cache heads.
            k_cache, v_cache: [pages, page size, cache heads, D].
            q_norm, k_norm: [D], of a normalisation before the rotation, with ``eps`` and ``style``; None for none.
            cos_pos_embed, sin_pos_embed: [positions, D], as many positions as requests may reach.
            scale: None means D ** -0.5.

        Returns:
            [tokens, heads * D]. Rows of tokens that no request has are zeros.

        A run on the CPU, and ``run_test_mode`` everywhere, raises IndexRangeError where a page, a length or an order is
        not what the caches can hold. Other runs on CUDA do not look: such tokens get zeros, and nothing is written.
        """
        builder = self._begin("paged_attention_layer", output, block_dim)
        tensors = {
            "input": input, "k_cache": k_cache, "v_cache": v_cache, "q_norm": q_norm, "k_norm": k_norm,
            "cos_pos_embed": cos_pos_embed, "sin_pos_embed": sin_pos_embed,
        }  # fmt: skip
        meta = {name: self._meta_tensor(name) for name in META_TENSORS}
        return attend(builder, tensors, meta, output, grid_dim, eps, style, scale)
