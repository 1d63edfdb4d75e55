"""A layer as one node of autograd's graph, whose backward pass computes the layer again, but for
what is kept of the forward pass.

Gradient checkpointing does the same by autograd, with three times as many calls by the host, for
which the GPU waits where micro-batches have some ten thousand tokens. Here products with a common
input are one product, and so are those that make the gradients of their weights, which are added
to `weight.grad` at once. What is kept is what would be computed again, so it changes no bit of a
gradient.

Names such as by_gated are gradients of the loss by that tensor. Axes: T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pgtoolkit.model.architectures import Layer
from pgtoolkit.model.attention import Documents, by_document
from pgtoolkit.model.kept_attention import KeptAttention
from pgtoolkit.model.rowwise import Rowwise, gate, rms_norm, turned_heads, type_of_products

_QUERY_KEY_VALUE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_AND_UP = ("mlp.gate_proj", "mlp.up_proj")
_KEPT_PRODUCTS = (_QUERY_KEY_VALUE, ("self_attn.o_proj",), _GATE_AND_UP)
"""The products whose results the backward pass needs."""
_PRODUCTS = (*_KEPT_PRODUCTS, ("mlp.down_proj",))


def can_recompute(layer: Layer, hidden: Tensor, options: dict) -> bool:
    """Return whether `layer` below can take the place of a layer that `fits` for these inputs.

    Its attention must be by document.
    """
    documents = options.get("documents")
    if documents is None or documents.group is not None or not layer.training:
        return False
    if hidden.shape[0] != 1 or hidden.shape[1] == 1 or not fits(layer):
        return False
    return hidden.requires_grad or not torch.is_grad_enabled()


def fits(layer: Layer) -> bool:
    """Return whether a layer of a known type is whole on this rank, without adapters or hooks of
    modules or weights, and all of its weights are trained."""
    if any(map(_has_hooks, layer.modules())):
        return False
    modules = [layer.get_submodule(name) for group in _PRODUCTS for name in group]
    if not all(
        type(module) is nn.Linear and type(module.weight) is nn.Parameter for module in modules
    ):
        return False
    return all(
        parameter.requires_grad
        and not parameter._backward_hooks
        and not parameter._post_accumulate_grad_hooks
        for parameter in layer.parameters()
    )


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
    )


def keep(layer: Layer, attention: bool, products: bool) -> None:
    """Choose what a layer keeps of its forward pass.

    attention: attention's output. products: the results of the matrix products, which a layer that
        keeps them keeps with attention's output.
    """
    layer.gradient_checkpointing = not products
    layer.keeps_attention = attention


class BytesOfToken(NamedTuple):
    """Bytes that a token takes in a layer: always, for its hidden states; where attention's output
    is kept; and where the results of matrix products are kept, for these."""

    hidden: int
    attention: int
    products: int

    def larger(self, other: BytesOfToken) -> BytesOfToken:
        return BytesOfToken(*map(max, self, other))


def bytes_of_token(layer: Layer, dtype: torch.dtype) -> BytesOfToken:
    """Return what a token takes in a layer whose products are of this type."""
    modules = [layer.get_submodule(name) for group in _KEPT_PRODUCTS for name in group]
    query = modules[0]
    # The logarithm of the sum of each head's softmax is in float32.
    heads = 4 * layer.self_attn.config.num_attention_heads
    return BytesOfToken(
        hidden=query.in_features * layer.input_layernorm.weight.itemsize,
        attention=query.out_features * dtype.itemsize + heads,
        products=sum(module.out_features for module in modules) * dtype.itemsize,
    )


def layer(module: Layer, hidden: Tensor, **options) -> Tensor:
    """Return the layer's hidden states (1, T, H), given those before it.

    options: `position_embeddings` and `documents`, as transformers' layer gets them.
    """
    cosine, sine = (x[0] for x in options["position_embeddings"])
    dtype = type_of_products(hidden, module.input_layernorm.weight)
    return _Recomputed.apply(hidden, _Inputs(module, dtype, cosine, sine, options["documents"]))


class _Product(NamedTuple):
    """Linear modules with a common input as one product.

    weight, bias: those of the modules side by side, in the type of the product.
    """

    modules: list[nn.Linear]
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)

    def backward(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient by x, (n, in), given that by the product, (n, out).

        The gradients of weights and biases are added to `grad`.
        """
        self.add_gradients(x, gradient)
        return self.by_input(gradient)

    def by_input(self, gradient: Tensor) -> Tensor:
        """Return the gradient by x, (n, in), given that by the product, (n, out)."""
        return gradient @ self.weight

    def add_gradients(self, x: Tensor, gradient: Tensor) -> None:
        """Add the gradients of weights and biases to `grad`."""
        rows = [module.out_features for module in self.modules]
        # The product is rounded before it is added, as by autograd. Only then does cuBLAS divide
        # the many tokens of a product with few results among all processors.
        _add([module.weight for module in self.modules], (gradient.T @ x).split(rows))
        if self.bias is not None:
            total = gradient.sum(0, dtype=self.modules[0].bias.dtype)
            _add([module.bias for module in self.modules], total.split(rows))


@dataclass(frozen=True)
class _Inputs:
    """The inputs of a layer beside hidden states.

    dtype: of its products. cosine, sine: (T, width).
    """

    module: Layer
    dtype: torch.dtype
    cosine: Tensor
    sine: Tensor
    documents: Documents

    def products(self) -> list[_Product]:
        """Return the products of query, key and value; of attention's output; of gate and up; of
        the MLP's output."""
        groups = [[self.module.get_submodule(name) for name in group] for group in _PRODUCTS]
        parameters = [
            getattr(module, kind)
            for group in groups
            for kind in ("weight", "bias")
            for module in group
        ]
        parameters = [parameter for parameter in parameters if parameter is not None]
        sizes = [parameter.numel() for parameter in parameters]
        memory = torch.empty(sum(sizes), dtype=self.dtype, device=parameters[0].device)
        parts = [x.view_as(p) for x, p in zip(memory.split(sizes), parameters, strict=True)]
        torch._foreach_copy_(parts, parameters)  # pyright: ignore[reportPrivateImportUsage]
        start = 0
        products = []
        for group in groups:
            columns = group[0].in_features
            rows = sum(module.out_features for module in group)
            weight = memory[start : start + rows * columns].view(rows, columns)
            start += rows * columns
            bias = None
            if group[0].bias is not None:
                bias = memory[start : start + rows]
                start += rows
            products.append(_Product(group, weight, bias))
        return products


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, inputs: _Inputs) -> Tensor:
        module = inputs.module
        keeps_products = hidden.requires_grad and not module.gradient_checkpointing
        keeps_attention = hidden.requires_grad and getattr(module, "keeps_attention", False)
        ctx.inputs = inputs
        ctx.save_for_backward(hidden)
        ctx.attention = KeptAttention() if keeps_attention or keeps_products else None
        ctx.results = []
        with torch.autocast(hidden.device.type, enabled=False):
            run = _Run(inputs, hidden[0].detach(), ctx.attention)
            run.attend(False)
            run.to_gate()
            (gated,) = run.gate().values(run.both)
            out = (run.hidden + run.down(gated)).view_as(hidden)
        if ctx.attention is not None:
            ctx.attention.fill()
        if keeps_products:
            ctx.results = [run.projected, run.added, run.both]
        return out

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        (hidden,) = ctx.saved_tensors
        run = _Run(ctx.inputs, hidden[0].detach(), ctx.attention, ctx.results)
        # Whoever holds the loss holds this node, which must not hold what is used now.
        ctx.attention = None
        ctx.results = []
        run.attend(True)
        run.to_gate()
        return run.backward(gradient[0])[None], None


class _Run:
    """One computation of a layer, with the tensors that its backward pass needs.

    before: (T, H) hidden states that come in. hidden: the same with attention's output added.
    kept_attention: what a forward pass keeps, or a backward pass has, of attention.
    results: those of products, in order, that the forward pass has kept.
    """

    def __init__(
        self,
        inputs: _Inputs,
        before: Tensor,
        kept_attention: KeptAttention | None,
        results: Sequence[Tensor] = (),
    ):
        self.inputs = inputs
        self.before = before
        self.kept_attention = kept_attention
        self._results = [*results]
        self.module = inputs.module
        self.attention = inputs.module.self_attn
        self.query_key_value, self.out, self.gate_and_up, self.down = inputs.products()

    def attend(self, with_graph: bool) -> None:
        """Compute the layer up to attention; with_graph: let autograd record attention itself."""
        inputs = self.inputs
        config = self.attention.config
        self.attention_input = self._norm(self.module.input_layernorm, self.before)[0]
        self.heads = (config.num_attention_heads, config.num_key_value_heads)
        projected = self._result(self.query_key_value, self.attention_input)
        self.projected = projected.view(len(projected), -1, self.attention.head_dim)
        self.turns = (inputs.cosine, inputs.sine, *self._head_weights())
        parts = self._turned_heads().values(self.projected, *self.turns)
        self.parts = [part.requires_grad_(with_graph) for part in parts]
        # The modules of these types hand the window to transformers' attention in this way.
        is_mistral = config.model_type == "mistral"
        window = (
            config.sliding_window if is_mistral else getattr(self.attention, "sliding_window", None)
        )
        with torch.set_grad_enabled(with_graph):
            query, key, value = self.parts
            self.attended = by_document(
                query,
                key,
                value,
                inputs.documents,
                self.attention.scaling,
                window,
                self.kept_attention,
            )

    def to_gate(self) -> None:
        """Compute the layer from attention's output to the input of the gate."""
        self.flat = self.attended.detach().flatten(start_dim=1)
        self.added = self._result(self.out, self.flat)
        self.mlp_input, self.hidden = self._norm(
            self.module.post_attention_layernorm, self.before, self.added
        )
        self.both = self._result(self.gate_and_up, self.mlp_input)

    def backward(self, gradient: Tensor) -> Tensor:
        """Return the gradient by the hidden states that came in, given that by those that go out.

        Tensors are freed as soon as they have been used.
        """
        del self.added
        by_both = self._to_gate_backward(gradient.to(self.inputs.dtype))
        by_mlp_input = self.gate_and_up.backward(self.mlp_input, by_both)
        del self.mlp_input, by_both
        norm = self.module.post_attention_layernorm
        by_before, by_added = self._norm_backward(
            norm, self.hidden, by_mlp_input, gradient, self.inputs.dtype
        )
        del self.hidden, by_mlp_input
        by_attended = self.out.backward(self.flat, by_added).view_as(self.attended)
        by_parts = torch.autograd.grad(self.attended, self.parts, by_attended)
        del self.attended, self.flat, by_added, by_attended
        by_projected, *by_head_weights = self._turned_heads().derivative(
            [self.projected, *self.turns],
            by_parts,
            (True, False, False, *[True] * (len(self.turns) - 2)),
        )
        for head_norm, rows in zip(self._head_norms(), by_head_weights, strict=True):
            _add([head_norm.weight], [rows.sum(0)])
        by_input = self.query_key_value.backward(
            self.attention_input, by_projected.flatten(start_dim=1)
        )
        by_before, _ = self._norm_backward(
            self.module.input_layernorm, self.before, by_input, by_before, by_before.dtype
        )
        return by_before

    def _result(self, product: _Product, x: Tensor) -> Tensor:
        """Return the product's result for x, as it was kept or made anew."""
        return self._results.pop(0) if self._results else product(x)

    def _norm(self, norm: Layer, *added: Tensor) -> tuple[Tensor, ...]:
        function = rms_norm(norm.variance_epsilon, self.inputs.dtype, len(added) > 1, False)
        return function.values(*added, norm.weight.detach().expand_as(added[0]))

    def _to_gate_backward(self, gradient: Tensor) -> Tensor:
        """Return the gradient by gate and up, given that by the MLP's output."""
        if self.module.mlp.config.hidden_act == "silu" and _has_kernels(gradient):
            from pgtoolkit.kernels.triton_layer import gate_backward

            # Whoever computes the derivative has the numbers for the gate, too.
            by_both, gated = gate_backward(self.both, self.down.by_input(gradient))
            self.down.add_gradients(gated, gradient)
        else:
            (gated,) = self.gate().values(self.both)
            by_gated = self.down.backward(gated, gradient)
            del gated
            (by_both,) = self.gate().derivative([self.both], [by_gated], (True,))
        del self.both
        return by_both

    def _norm_backward(
        self, norm: Layer, x: Tensor, by_normed: Tensor, by_x: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient by the norm's input x, in its type and in dtype.

        by_x: another gradient by x, which is added.
        """
        weight = norm.weight.detach()
        epsilon = norm.variance_epsilon
        if _has_kernels(x):
            from pgtoolkit.kernels.triton_layer import rms_norm_backward

            total, rounded, by_weight = rms_norm_backward(
                x, weight, epsilon, by_normed, by_x, dtype
            )
        else:
            # The function returns its input as a second result, so that both gradients of the
            # input are added in one kernel.
            function = rms_norm(epsilon, self.inputs.dtype, True, False)
            total, rows = function.derivative(
                [x, weight.expand_as(x)], [by_normed, by_x], (True, True)
            )
            rounded = total.to(dtype)
            by_weight = rows.sum(0)
        _add([norm.weight], [by_weight])
        return total, rounded

    def gate(self) -> Rowwise:
        return gate(self.module.mlp.config.hidden_act)

    def _head_norms(self) -> list[Layer]:
        attention = self.attention
        return [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []

    def _head_weights(self) -> list[Tensor]:
        rows = len(self.before)
        return [norm.weight.detach().expand(rows, -1) for norm in self._head_norms()]

    def _turned_heads(self) -> Rowwise:
        norms = self._head_norms()
        epsilon = norms[0].variance_epsilon if norms else None
        return turned_heads(*self.heads, epsilon, self.inputs.dtype)


def _add(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Add to the parameters' gradients, in the parameters' type."""
    totals = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if totals:
        torch._foreach_add_(totals, list(gradients))  # pyright: ignore[reportPrivateImportUsage]
    else:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.to(parameter.dtype, copy=True)


def _has_kernels(x: Tensor) -> bool:
    """Return whether the kernels of `triton_layer`, which compute in float32, serve for x."""
    return x.is_cuda and x.dtype != torch.float64
