"""MACs and FLOPs of transformers' GPT-2, Llama, ViT and Mixtral, written down from their structure.

T: tokens of a batch, S of a sequence, H: hidden size, L: layers, V: vocabulary. A bias, a residual and every
element-wise operation counts one FLOP an element, a sum or softmax one for each element that it reads, a
LayerNorm 5. Attention is torch's fused one, without dropout; a causal mask does not lower its count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Work:
    """macs, flops: of a forward with the loss. backward_macs: of its backward."""

    macs: int
    flops: int
    backward_macs: int


def _work(linear: int, attention: int, elements: int, *, without_input_grad: int = 0) -> Work:
    """Backward: two products for each of forward; fused attention has five for two.

    without_input_grad: MACs of layers that read the data, which has no gradient.
    """
    macs = linear + attention
    backward = 2 * linear - without_input_grad + 5 * attention // 2
    return Work(macs, 2 * macs + elements, backward)


def gpt2(config: Any, batch: int, length: int) -> Work:
    """A forward with labels; the loss reads all tokens."""
    T, S, H, L, V = batch * length, length, config.n_embd, config.n_layer, config.vocab_size
    linear = L * T * 12 * H * H + T * H * V
    attention = L * T * S * 2 * H
    norms, biases, residuals = 2 * 5 * H, 9 * H, 2 * H
    gelu = 8 * 4 * H  # the tanh form, operation by operation
    embeddings, last_norm, loss = H, 5 * H, V + 1
    return _work(
        linear,
        attention,
        T * (L * (norms + biases + residuals + gelu) + embeddings + last_norm + loss),
    )


def _llama_attention(config: Any, T: int, S: int) -> tuple[int, int, int]:
    """MACs of linear layers, of attention, and elements, of a layer: with norms, RoPE and residuals."""
    H, width = config.hidden_size, config.hidden_size // config.num_attention_heads
    queries, keys = width * config.num_attention_heads, width * config.num_key_value_heads
    linear = T * (2 * H * queries + 2 * H * keys)
    rope = 7 * T * (queries + keys) // 2  # x cos + (x, one half negated) sin
    norms, residuals = 2 * (4 * H + 2), 2 * H
    return linear, T * S * 2 * queries, rope + T * (norms + residuals)


def _llama_rest(config: Any, T: int, S: int) -> tuple[int, int]:
    """MACs of the head, and elements of the angles, the last norm and the loss."""
    H, V = config.hidden_size, config.vocab_size
    width = H // config.num_attention_heads
    angles = S * (
        width // 2 + 4 * width
    )  # products with frequencies, cos, sin, and a scale of each
    return T * H * V, angles + T * (4 * H + 2 + V + 1)


def llama(config: Any, batch: int, length: int) -> Work:
    """A forward with labels; grouped keys and SwiGLU."""
    T, L, F = batch * length, config.num_hidden_layers, config.intermediate_size
    linear, attention, elements = _llama_attention(config, T, length)
    head, rest = _llama_rest(config, T, length)
    mlp = T * 3 * config.hidden_size * F
    return _work(L * (linear + mlp) + head, L * attention, L * (elements + T * 2 * F) + rest)


def mixtral(config: Any, batch: int, length: int) -> Work:
    """A forward with labels; each token goes through `num_experts_per_tok` experts."""
    T, L, H = batch * length, config.num_hidden_layers, config.hidden_size
    F, E, K = config.intermediate_size, config.num_local_experts, config.num_experts_per_tok
    linear, attention, elements = _llama_attention(config, T, length)
    head, rest = _llama_rest(config, T, length)
    experts = T * H * E + T * K * 3 * H * F
    routing = E + 2 * K  # softmax, the sum of the chosen ones, a division
    sums = K * (2 * F + 2 * H)  # SiLU and gate; weights and sum of the experts
    return _work(
        L * (linear + experts) + head, L * attention, L * (elements + T * (routing + sums)) + rest
    )


def vit(config: Any, batch: int, labels: int) -> Work:
    """A forward of images with labels."""
    H, L, F = config.hidden_size, config.num_hidden_layers, config.intermediate_size
    patches = (config.image_size // config.patch_size) ** 2
    S = patches + 1  # and the class token
    T = batch * S
    cut = batch * patches * H * config.num_channels * config.patch_size**2
    classifier = batch * H * labels
    linear = cut + L * T * (4 * H * H + 2 * H * F) + classifier
    norms, biases, residuals, gelu = 2 * 5 * H, 5 * H + F, 2 * H, F
    elements = batch * patches * H + T * H + L * T * (norms + biases + residuals + gelu)
    elements += T * 5 * H + batch * (labels + labels + 1)
    return _work(linear, L * T * S * 2 * H, elements, without_input_grad=cut)
