"""Training-time test of an EAGLE-3 or MTP head written down row by row: full softmax, no kernel, no packing.

An independent definition of right for the trained objectives; it shares no code with them or with the heads.
"""

import torch


def eagle3_pass(weights, config, embeds_NH, carried_NH, position_N, keys):
    """One pass of a one-layer EAGLE-3 head over the rows of a document."""
    eps = config.rms_norm_eps
    own = {name.removeprefix("midlayer."): w for name, w in weights.items() if name.startswith("midlayer.")}
    normed = torch.cat(
        [
            norm(embeds_NH, own["input_layernorm.weight"], eps),
            norm(carried_NH, own["hidden_norm.weight"], eps),
        ],
        dim=-1,
    )
    carried_NH = decoder(own, config, normed, carried_NH, position_N, keys)
    return norm(carried_NH, weights["norm.weight"], eps), carried_NH


def mtp_pass(weights, config, embeds_NH, carried_NH, position_N, keys):
    """One pass of an MTP head that reads its state before the embedding, and none at position 0, as MiMo's does."""
    eps = config.rms_norm_eps
    own = {name.removeprefix("layer."): w for name, w in weights.items() if name.startswith("layer.")}
    embeds_NH = torch.where(position_N[:, None] == 0, 0, embeds_NH)
    both = [norm(carried_NH, weights["state_norm.weight"], eps), norm(embeds_NH, weights["embedding_norm.weight"], eps)]
    hidden_NH = torch.cat(both, dim=-1) @ weights["project.weight"].T
    hidden_NH = decoder(own, config, norm(hidden_NH, own["input_layernorm.weight"], eps), hidden_NH, position_N, keys)
    read_NH = norm(hidden_NH, weights["norm.weight"], eps)
    return read_NH, read_NH


def decoder(own, config, normed_NX, hidden_NH, position_N, keys):
    """A Llama layer: row n attends to what ``keys.seen`` gives of the pass's keys and values (N, K, D)."""
    heads, size = config.num_attention_heads, config.head_dim
    query, key, value = (
        (normed_NX @ own[f"self_attn.{side}_proj.weight"].T).unflatten(-1, (-1, size)) for side in "qkv"
    )
    query, key = rope(query, position_N, config), rope(key, position_N, config)
    keys.add(key, value)
    rows = []
    for n in range(len(normed_NX)):
        key_MKD, value_MKD = keys.seen(n)
        outs = []
        for head in range(heads):
            shared = head * key_MKD.shape[1] // heads
            weight_M = ((key_MKD[:, shared] @ query[n, head]) * size**-0.5).softmax(0)
            outs.append(weight_M @ value_MKD[:, shared])
        rows.append(torch.cat(outs))
    hidden_NH = hidden_NH + torch.stack(rows) @ own["self_attn.o_proj.weight"].T
    x = norm(hidden_NH, own["post_attention_layernorm.weight"], config.rms_norm_eps)
    gate = torch.nn.functional.silu(x @ own["mlp.gate_proj.weight"].T)
    return hidden_NH + (gate * (x @ own["mlp.up_proj.weight"].T)) @ own["mlp.down_proj.weight"].T


def norm(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rope(x_NAD, position_N, config):
    """Rotary positions, whose angles are float32 by definition."""
    size = x_NAD.shape[-1]
    theta = config.rope_parameters["rope_theta"]
    angle = position_N[:, None].float() * (1.0 / theta ** (torch.arange(0, size, 2).float() / size))
    cos, sin = angle.cos().to(x_NAD)[:, None], angle.sin().to(x_NAD)[:, None]
    left, right = x_NAD[..., : size // 2], x_NAD[..., size // 2 :]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Keys:
    """The keys and values of a document's passes: the first is the trunk, each row has its own of the others."""

    def __init__(self):
        self.passes = []

    def add(self, key, value):
        self.passes.append((key, value))

    def seen(self, n):
        (trunk_key, trunk_value), *own = self.passes
        keys = [trunk_key[: n + 1], *(key[n : n + 1] for key, _ in own)]
        values = [trunk_value[: n + 1], *(value[n : n + 1] for _, value in own)]
        return torch.cat(keys), torch.cat(values)


def training_time_test(one_pass, weights, config, fuse, policy, output, ids, documents, temperature, passes, decay):
    """The mean loss, differentiable in ``weights``, and the sums of each pass's rows, losses and overlaps.

    ``ids`` are the policy's tokens that the head drafts, ``output`` the matrix (Vd, H) that it drafts with.
    """
    table = policy.get_input_embeddings().weight.detach()
    matrix = policy.get_output_embeddings().weight.detach()
    total, count = 0.0, 0.0
    sums = {f"{name}_{d}": 0.0 for name in ("loss", "rows", "overlap") for d in range(1, passes + 1)}
    for document in documents:
        tokens = torch.from_numpy(document.tokens).long()
        length, prompt = len(tokens), document.prompt_length
        rows = torch.arange(length - 2)
        carried, keys = fuse(weights, document)[: length - 2], Keys()
        for d in range(1, passes + 1):
            rows = rows[rows + d <= length - 2]
            carried = carried[: len(rows)]
            if len(rows) == 0:
                break
            read, carried = one_pass(weights, config, table[tokens[rows + d]], carried, rows + d - 1, keys)
            for n in range(prompt - 1, len(rows)):
                law = (matrix @ document.final_PH[n + d] / temperature).softmax(-1)[ids]
                log_q = (output(weights) @ read[n] / temperature).log_softmax(-1)
                loss = -(law * log_q).sum()
                total = total + decay ** (d - 1) * loss
                count += decay ** (d - 1)
                sums[f"loss_{d}"] += loss.item()
                sums[f"rows_{d}"] += 1
                sums[f"overlap_{d}"] += torch.minimum(law, log_q.exp()).sum().item()
    return total / count, count, sums
