import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig

from paceline.cotrain.parallel.stages import EMBEDDINGS, PolicyStage, split, stage_of
from paceline.forward.pretrained import ModelError
from paceline.forward.taps import FINAL
from tiny_policies import VOCABULARY, tiny_config

SMALL = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
MIXTURES = {
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": (Qwen2MoeConfig, SMALL | {"shared_expert_intermediate_size": 8}),
    # Of the three layers the first is dense.
    "qwen3-moe": (Qwen3MoeConfig, SMALL | {"mlp_only_layers": [0], "decoder_sparse_step": 1}),
}


def policy_of(kind, **changes):
    if kind in MIXTURES:
        of_kind, own = MIXTURES[kind]
        like = tiny_config("llama")
        shape = ("vocab_size", "initializer_range", "hidden_size", "intermediate_size", "num_hidden_layers")
        shape += ("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")
        # Grouped kernels take no float64.
        config = of_kind(**{name: getattr(like, name) for name in shape}, **own, experts_implementation="eager")
    else:
        config = tiny_config(kind, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float64)


def kwargs_of(kind, length):
    """Positions that start anew, and a mask that hides some keys: those of packed documents."""
    if kind == "plain":
        return {}
    document_L = torch.arange(length) // 4
    seen_LL = (document_L[:, None] == document_L) & torch.ones(length, length, dtype=torch.bool).tril()
    return {"position_ids": (torch.arange(length) % 4).expand(2, -1), "attention_mask": seen_LL.expand(2, 1, -1, -1)}


def run(stages, tokens_BL, kwargs):
    states = tokens_BL
    for stage in stages:
        states = stage(states, **kwargs)
    return states


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen3", "mistral", *MIXTURES])
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("packing", ["plain", "packed"])
def test_stages_compute_the_whole_policys_logits_and_gradients_bit_for_bit(kind, stages, packing):
    policy = policy_of(kind)
    tokens_BL = torch.randint(VOCABULARY, (2, 10), generator=torch.Generator().manual_seed(1))
    kwargs = kwargs_of(packing, 10)
    whole_BLV = policy(input_ids=tokens_BL, use_cache=False, **kwargs).logits
    whole_BLV.logsumexp(-1).sum().backward()
    expected = {name: p.grad.clone() for name, p in policy.named_parameters()}
    policy.zero_grad()
    cut_BLV = run([PolicyStage(policy, layers) for layers in split(3, stages)], tokens_BL, kwargs)
    assert torch.equal(cut_BLV, whole_BLV)
    cut_BLV.logsumexp(-1).sum().backward()
    for name, parameter in policy.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name


def test_windows_follow_the_layer_and_not_its_place_in_the_stage():
    types = ["full_attention", "full_attention", "sliding_attention"]
    policy = policy_of("qwen3", sliding_window=3, use_sliding_window=True, layer_types=types)
    tokens_BL = torch.randint(VOCABULARY, (2, 10), generator=torch.Generator().manual_seed(1))
    whole_BLV = policy(input_ids=tokens_BL, use_cache=False).logits
    stages = [PolicyStage(policy, layers) for layers in split(3, 2)]
    assert torch.equal(run(stages, tokens_BL, {}), whole_BLV)
    stages[1].decoder.config.layer_types = types[:1]
    assert not torch.equal(run(stages, tokens_BL, {}), whole_BLV)


def test_every_parameter_is_the_policys_own_and_in_one_stage():
    policy = policy_of("llama")
    stages = [PolicyStage(policy, layers) for layers in split(3, 3)]
    held = [id(parameter) for stage in stages for parameter in stage.parameters()]
    assert sorted(held) == sorted(id(parameter) for parameter in policy.parameters())


def test_tap_points_are_the_states_of_the_whole_policy():
    policy = policy_of("llama")
    tokens_BL = torch.arange(10)[None]
    whole = policy(input_ids=tokens_BL, use_cache=False, output_hidden_states=True).hidden_states
    seen = {}
    cuts = split(3, 2)
    stages = [PolicyStage(policy, layers) for layers in cuts]
    for stage in stages:
        for layer, module in stage.tap_points().items():
            module.register_forward_hook(lambda _m, _a, output, layer=layer: seen.__setitem__(layer, output))
    run(stages, tokens_BL, {})
    # transformers names the input of every layer, and last the output of the norm.
    assert {layer: stage_of(layer, cuts) for layer in seen} == {EMBEDDINGS: 0, 0: 0, 1: 0, 2: 1, FINAL: 1}
    for layer, states in zip((EMBEDDINGS, 0, 1, FINAL), whole, strict=True):
        assert torch.equal(seen[layer], states)


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"), [(3, 2, [2, 1]), (36, 8, [5, 5, 5, 5, 4, 4, 4, 4]), (4, 1, [4])]
)
def test_layers_are_split_evenly_and_in_order(layers, stages, sizes):
    cuts = split(layers, stages)
    assert [len(cut) for cut in cuts] == sizes
    assert [layer for cut in cuts for layer in cut] == list(range(layers))


def test_what_cannot_be_cut_is_refused_in_one_line():
    with pytest.raises(ModelError, match="3 layers in 4 stages: every stage needs one; set fewer stages"):
        split(3, 4)
    with pytest.raises(ModelError, match="a policy of type gemma3_text: cannot be cut into stages; use llama"):
        PolicyStage(policy_of("gemma3"), range(3))
    with pytest.raises(ModelError, match="a tap on layer 7: the policy has 3 layers"):
        stage_of(7, split(3, 2))
