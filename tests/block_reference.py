"""A block head written down densely from its equations, for one block at a time, in float64."""

import torch
from torch.nn.functional import silu


def norm(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x_THD, positions, theta):
    size = x_THD.shape[-1]
    frequencies = (1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)).double()
    angles = (torch.tensor(positions, dtype=torch.float32)[:, None] * frequencies.float()).double()
    # transformers takes angles and their cosines in float32.
    cos, sin = (f(angles.float()).double()[:, None] for f in (torch.cos, torch.sin))
    left, right = x_THD.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def block_rows(weights, config, states_PS, anchor_embedding, anchor, block):
    """What the output matrix reads at the masks of the block behind ``anchor``, (block, H)."""
    eps, theta = config.rms_norm_eps, config.rope_parameters["rope_theta"]
    fused = norm(states_PS[:anchor] @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    rows = torch.stack([anchor_embedding, *[weights["mask_embedding"]] * block])
    before, own = list(range(anchor)), list(range(anchor, anchor + 1 + block))
    groups = config.num_attention_heads // config.num_key_value_heads
    for layer in range(config.num_hidden_layers):
        w = {name.removeprefix(f"layers.{layer}."): t for name, t in weights.items() if f"layers.{layer}." in name}
        normed = norm(rows, w["input_layernorm.weight"], eps)
        both = torch.cat([fused, normed])
        q, k, v = (
            (x @ w[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, config.head_dim))
            for name, x in (("q", normed), ("k", both), ("v", both))
        )
        q = rotate(norm(q, w["self_attn.q_norm.weight"], eps), own, theta)
        k = rotate(norm(k, w["self_attn.k_norm.weight"], eps), before + own, theta)
        heads = []
        for head in range(config.num_attention_heads):
            scores = q[:, head] @ k[:, head // groups].T / config.head_dim**0.5
            heads.append(scores.softmax(-1) @ v[:, head // groups])
        rows = rows + torch.cat(heads, dim=-1) @ w["self_attn.o_proj.weight"].T
        normed = norm(rows, w["post_attention_layernorm.weight"], eps)
        gate, up = (normed @ w[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        rows = rows + (silu(gate) * up) @ w["mlp.down_proj.weight"].T
    return norm(rows, weights["norm.weight"], eps)[1:]
