"""What autograd keeps of a policy's layer: closed forms of what transformers' layers save, to the byte."""

from paceline.sizes.shapes import Shape


def layer_saved_bytes(shape: Shape, layer: int, tokens: int, width: int) -> int:
    """Bytes that a layer keeps for its backward pass over ``tokens`` tokens, in ``width`` bytes a number.

    Weights and the rotary tables, which all layers share, are left out. Exact for Llama, Qwen3, Qwen3-MoE and the full
    attention of Qwen3.5, with flash attention and grouped experts, in 16 and in 32 bits. A gated delta net is an
    estimate: that of a fused kernel which keeps its inputs and computes its states again.
    """
    b = width
    token = 2 * norm_saved_bytes(shape, b) + (_linear if shape.linear[layer] else _attention)(shape, b)
    # Norms that are centred at zero keep the weight that they multiply by.
    fixed = 8 * shape.hidden + (0 if shape.linear[layer] else 8 * shape.head_dim) if shape.gated else 0
    if not shape.sparse[layer]:
        return tokens * (token + 4 * b * shape.ffn) + fixed
    own = shape.experts
    assert own is not None
    # A router's float32 law and its choice; who goes where, there and back; and of each choice a pass of its expert.
    router = 4 * own.count + 32 * own.active + (4 + 4 * own.active if own.normalised else 0)
    chosen = own.active * b * (2 * shape.hidden + 4 * own.ffn + 1)
    shared = b * (4 * own.shared + shape.hidden + 1) if own.shared else 0
    return tokens * (token + router + chosen + shared) + fixed + 4 * own.count


def layer_gradient_bytes(shape: Shape, layer: int, tokens: int, width: int) -> int:
    """Bytes of gradients that a backward in two parts keeps between them: one before every weight's own product.

    Exact as ``layer_saved_bytes``, to which they come on top: torch frees nothing of a layer before the second part.
    """
    b, norm = width, _normed(shape, width)
    token = 2 * norm * shape.hidden + b * shape.hidden
    own = shape.linear_attention
    if shape.linear[layer]:
        assert own is not None
        token += b * (2 * (2 * own.key + own.value) + 2 * own.value + 4 * own.value_heads)
    else:
        token += b * (shape.q * (2 if shape.gated else 1) + 2 * shape.kv)
        token += norm * (shape.q + shape.kv) if shape.qk_norm else 0
    if not shape.sparse[layer]:
        return tokens * (token + b * (2 * shape.ffn + shape.hidden))
    mixed = shape.experts
    assert mixed is not None
    shared = 2 * mixed.shared + shape.hidden + 1 if mixed.shared else 0
    return tokens * (token + b * (mixed.count + mixed.active * (2 * mixed.ffn + shape.hidden) + shared))


def norm_saved_bytes(shape: Shape, width: int) -> int:
    """Of a token: the state in float32, its inverse norm, and what was made of it before and behind the weight."""
    return (4 + _normed(shape, width) + width) * shape.hidden + 4


def _normed(shape: Shape, b: int) -> int:
    """Bytes of a number that a norm multiplies by its weight: float32 where that is centred at zero."""
    return 4 if shape.gated else b


def _attention(shape: Shape, b: int) -> int:
    """Queries, keys, values, output and log-sum-exp of a token; before them norms, behind them the queries' gate."""
    saved = 2 * b * (shape.q + shape.kv) + 4 * shape.heads
    if shape.qk_norm:
        saved += (4 + _normed(shape, b)) * (shape.q + shape.kv) + 4 * (shape.heads + shape.kv_heads)
    # In float32 the norm reads the queries where they lie, beside their gates.
    gate = (4 if b == 4 else 3) * b * shape.q
    return saved + (gate if shape.gated else 0)


def _linear(shape: Shape, b: int) -> int:
    """Inputs of the convolution and of the kernel, gates, and the gated norm behind it."""
    own = shape.linear_attention
    assert own is not None
    mixed = 2 * own.key + own.value
    gates = 2 * (b + 4) * own.value_heads
    return 2 * b * mixed + gates + (4 + 4 * b) * own.value
