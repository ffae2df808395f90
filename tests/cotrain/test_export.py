"""What is written for vLLM, SGLang and speculators says what they mean by it, and reads back bit for bit."""

import json
import multiprocessing
import shutil
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.config import HeadConfig
from paceline.cotrain.export import ExportError, join_mtp, stored_head, write_head
from paceline.drafters.heads import make_head
from paceline.drafters.heads.files import CONFIG, METADATA, WEIGHTS, read_head
from paceline.forward.pretrained import ModelError
from paceline.forward.runner import WeightsError
from tiny_models import VOCABULARY, tiny
from tiny_policies import save_tiny

KEY = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def policy():
    return tiny(layers=5)


def head_of(policy, kind="eagle3", **config):
    made = make_head(kind, HeadConfig(init="random", dtype="bfloat16", **config), policy, seed=3)
    with torch.no_grad():
        for tensor in made.checkpoint().values():
            if tensor.is_floating_point():
                tensor.add_(torch.rand_like(tensor))
    return made


def written(policy, folder, kind="eagle3", form="vllm", **config):
    made = head_of(policy, kind, **config)
    return made, write_head(stored_head(made, policy="some/policy", version=7), folder, form)


def edit(folder, **changes):
    """The directory as somebody else would have written it."""
    (folder / METADATA).unlink(missing_ok=True)
    config = json.loads((folder / CONFIG).read_text())
    for key, value in changes.items():
        config.pop(key, None)
        if value is not None:
            config[key] = value
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("kind", "form", "config"),
    [
        ("eagle3", "vllm", {}),
        ("eagle3", "vllm", {"layers": 2, "taps": (0, 4)}),
        ("eagle3", "sglang", {"vocabulary": 12}),
        ("eagle3", "speculators", {"vocabulary": 12}),
        ("block", "vllm", {"block": 5}),
        ("mtp", "vllm", {}),
    ],
)
def test_a_head_comes_back_bit_for_bit(policy, tmp_path, kind, form, config):
    made, folder = written(policy, tmp_path / "head", kind, form, **config)
    stored = read_head(folder)
    assert (stored.kind, stored.policy, stored.version, stored.policy_layers) == (kind, "some/policy", 7, 5)
    assert stored.taps == made.taps
    back = make_head(kind, HeadConfig(path=str(folder), dtype="bfloat16"), policy, seed=0)
    assert type(back) is type(made)
    assert back.taps == made.taps
    own, found = made.checkpoint(), back.checkpoint()
    assert own.keys() == found.keys()
    assert all(own[name].dtype == found[name].dtype and torch.equal(own[name], found[name]) for name in own)
    rope = ("rope_parameters", "max_position_embeddings", "rms_norm_eps", "head_dim", "num_key_value_heads")
    assert [getattr(back.config, name) for name in rope] == [getattr(made.config, name) for name in rope]
    assert getattr(back, "block", 0) == getattr(made, "block", 0)


def test_what_is_written_for_one_is_written_for_another_in_the_same_way(policy, tmp_path):
    written(policy, tmp_path / "a", taps=(0, 1, 3), vocabulary=12)
    write_head(read_head(tmp_path / "a"), tmp_path / "b", "speculators")
    assert {"layers.0.hidden_norm.weight", "d2t", "t2d"} < set(load_file(tmp_path / "b" / WEIGHTS))
    write_head(read_head(tmp_path / "b"), tmp_path / "c", "sglang")
    for name in (WEIGHTS, CONFIG):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "c" / name).read_bytes()


def test_taps_are_named_as_each_reader_counts_them_and_read_by_the_key_that_means_one_thing(policy, tmp_path):
    _, folder = written(policy, tmp_path / "head", taps=(0, 2, 3))
    config = json.loads((folder / CONFIG).read_text())
    assert config[KEY] == [1, 3, 4]  # vLLM: the layer that takes it in
    assert config["eagle_config"][KEY] == [0, 2, 3]  # SGLang: the layer that puts it out
    assert config["num_aux_hidden_states"] == 3
    assert read_head(edit(folder)).taps == (0, 2, 3)
    _, other = written(policy, tmp_path / "other", form="speculators", taps=(0, 2, 3))
    assert json.loads((other / CONFIG).read_text())[KEY] == [1, 3, 4]
    assert read_head(edit(other)).taps == (0, 2, 3)

    edit(folder, **{KEY: None})
    with pytest.raises(
        ModelError, match=r"SGLang takes the outputs and vLLM the inputs.*taps=\[0, 2, 3\] or \[-1, 1, 2"
    ):
        read_head(folder)
    assert read_head(folder, taps=(1, 2, 3)).taps == (1, 2, 3)
    edit(folder, eagle_config=None)
    assert read_head(folder).taps is None
    assert make_head("eagle3", HeadConfig(path=str(folder)), policy, seed=0).taps == (1, 2, 3)  # EAGLE-3's own choice
    with pytest.raises(ModelError, match="has the embeddings, which no tap reads"):
        read_head(edit(folder, **{KEY: [0, 2, 3]}))


def test_a_mapping_of_the_vocabulary_is_written_only_where_there_is_one(policy, tmp_path):
    _, folder = written(policy, tmp_path / "whole")
    assert not {"d2t", "t2d"} & set(load_file(folder / WEIGHTS))
    assert json.loads((folder / CONFIG).read_text())["draft_vocab_size"] == VOCABULARY
    tensors = load_file(folder / WEIGHTS)
    identity = {"d2t": torch.zeros(VOCABULARY, dtype=torch.int64), "t2d": torch.ones(VOCABULARY, dtype=torch.bool)}
    save_file(tensors | identity, edit(folder) / WEIGHTS)
    assert set(read_head(folder).tensors) == set(tensors)
    made, part = written(policy, tmp_path / "part", vocabulary=12)
    held = load_file(part / WEIGHTS)
    drafted = torch.arange(12) + held["d2t"]
    assert torch.equal(drafted, made.policy_ids())
    assert held["t2d"].nonzero()[:, 0].tolist() == drafted.tolist()
    assert json.loads((part / CONFIG).read_text())["draft_vocab_size"] == 12


def test_what_does_not_fit_is_refused_by_name(policy, tmp_path):  # field G6, I2
    made, folder = written(policy, tmp_path / "head")
    tensors, config = load_file(edit(folder) / WEIGHTS), HeadConfig(path=str(folder))
    lacking = {name: tensor for name, tensor in tensors.items() if name != "midlayer.self_attn.k_proj.weight"}
    for broken, said in (
        (lacking, r"lacks midlayer\.self_attn\.k_proj\.weight"),
        (tensors | {"fc.weight": tensors["fc.weight"][:, 1:].contiguous()}, r"fc\.weight has shape \(32, 95\)"),
        (tensors | {"fc.bias": torch.ones(32)}, r"has fc\.bias, which the head does not have"),
    ):
        save_file(broken, folder / WEIGHTS)
        with pytest.raises(WeightsError, match=said):
            make_head("eagle3", config, policy, seed=0)
    own = policy.get_input_embeddings().weight.detach()
    save_file(tensors | {"embed_tokens.weight": own.clone()}, folder / WEIGHTS)
    back = make_head("eagle3", config, policy, seed=0)
    assert torch.equal(back.lm_head.weight, made.lm_head.weight.float())
    save_file(tensors | {"embed_tokens.weight": own + 1}, folder / WEIGHTS)
    with pytest.raises(ModelError, match="has embeddings of its own"):
        make_head("eagle3", config, policy, seed=0)
    save_file(tensors, folder / WEIGHTS)
    for changes, said in (
        ({"vocab_size": 41}, "made for a policy of 41 tokens, and this one has 40"),
        ({"vocab_size": 40, "hidden_size": 64}, "made for a policy of 64 dimensions, and this one has 32"),
        ({"hidden_size": 32, KEY: [1, 2, 7]}, "taps layer 6, and the policy has 5, from 0"),
        ({KEY: [1, 2, 3], "norm_before_residual": True}, "norm_before_residual=True, and paceline's head has False"),
        ({"norm_before_residual": False, "model_type": "qwen3"}, "layers of qwen3"),
        ({"model_type": "llama", "architectures": ["MedusaModel"]}, "medusamodel is no head that paceline knows"),
    ):
        edit(folder, **changes)
        with pytest.raises(ModelError, match=said):
            make_head("eagle3", config, policy, seed=0)
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="is a pickle, which is never loaded"):
        read_head(edit(folder, architectures=["LlamaForCausalLMEagle3"]))
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_head(tmp_path)
    block = written(policy, tmp_path / "block", "block")[1]
    with pytest.raises(ModelError, match="a head of kind block, and eagle3 is asked for"):
        make_head("eagle3", HeadConfig(path=str(block)), policy, seed=0)
    held = load_file(block / WEIGHTS)
    del held["mask_embedding"]
    save_file(held, edit(block) / WEIGHTS)
    with pytest.raises(ModelError, match="a pickle, and none is ever loaded"):
        read_head(block)


def test_a_head_of_fewer_positions_than_the_policy_is_warned_about(policy, tmp_path, caplog):  # field K7
    _, folder = written(policy, tmp_path / "head")
    make_head("eagle3", HeadConfig(path=str(folder)), policy, seed=0)
    assert not caplog.records
    make_head("eagle3", HeadConfig(path=str(edit(folder, max_position_embeddings=64))), policy, seed=0)
    assert "made for 64 positions, the policy has 128" in caplog.text


def test_a_head_that_sglang_cannot_run_is_not_written_for_it(policy, tmp_path):
    for config, said in (
        ({"taps": (0, 2)}, "a head of 2 taps: SGLang reads three"),
        ({"taps": (0, 2, 4)}, "a tap on layer 4, the last"),
        ({"layers": 2}, "a head of 2 layers"),
    ):
        with pytest.raises(ExportError, match=said):
            written(policy, tmp_path / "head", form="sglang", **config)
    with pytest.raises(ExportError, match="takes heads of kind eagle3, and this one is block"):
        written(policy, tmp_path / "head", "block", "speculators")
    assert list(tmp_path.iterdir()) == []


def test_taps_that_an_engine_would_sort_or_count_otherwise_are_not_written(policy, tmp_path):
    _, folder = written(policy, tmp_path / "head", taps=(0, 2, 3))
    for taps, said in (((2, 0, 3), "in rising order, each once"), ((0, 2), "fc.weight reads 3 of them")):
        with pytest.raises(ExportError, match=said):
            write_head(read_head(folder, taps=taps), tmp_path / "other")


def test_a_head_replaces_a_head_and_nothing_else(policy, tmp_path):
    _, folder = written(policy, tmp_path / "head")
    made, _ = written(policy, folder, vocabulary=12)
    assert torch.equal(read_head(folder).tensors["lm_head.weight"], made.lm_head.weight)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(ExportError, match="holds something else"):
        written(policy, tmp_path / "mine")
    with pytest.raises(ExportError, match="this is a file"):
        written(policy, tmp_path / "mine" / "thesis.txt")
    (folder / CONFIG).write_text("{}")
    with pytest.raises(ModelError, match=r"config\.json: not the file that paceline\.json was written for"):
        read_head(folder)


def writing_for_ever(policy, folder, started):
    stored = stored_head(head_of(policy), policy="", version=0)
    for tensor in stored.tensors.values():
        tensor.zero_()
    for _ in range(10_000):
        for tensor in stored.tensors.values():
            tensor.add_(1)
        write_head(stored, folder)
        started.set()


def test_a_process_killed_while_it_writes_leaves_a_whole_head(policy, tmp_path):  # field K5
    folder, context = tmp_path / "head", multiprocessing.get_context("fork")
    for round_ in range(4):
        started = context.Event()
        process = context.Process(target=writing_for_ever, args=(policy, folder, started))
        process.start()
        assert started.wait(60)
        time.sleep(0.003 * round_)
        process.kill()
        process.join()
        tensors = read_head(folder).tensors
        assert len({float(value) for tensor in tensors.values() for value in (tensor.min(), tensor.max())}) == 1
    # Between the two renames the head is aside, where it is found; whoever was killed there has left it so.
    written(policy, folder)
    folder.rename(tmp_path / "head.old")
    assert read_head(folder).tensors.keys() == tensors.keys()
    written(policy, folder)
    shutil.rmtree(tmp_path / "head.old", ignore_errors=True)
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_a_multi_token_head_joins_a_policy_of_a_family_that_brings_one(tmp_path):
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "qwen2")
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "qwen2")
    head = make_head("mtp", HeadConfig(init="random"), policy, seed=3)
    join_mtp(head, tmp_path / "qwen2")
    told = json.loads((tmp_path / "qwen2" / CONFIG).read_text())
    assert (told["architectures"], told["num_nextn_predict_layers"]) == (["MiMoForCausalLM"], 1)
    # The policy is what it was, and its own head is the one that joined it.
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "qwen2")
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in policy.state_dict().items())
    native = make_head("mtp", HeadConfig(), again, seed=0)
    own, found = head.checkpoint(), native.checkpoint()
    assert own.keys() == found.keys()
    assert all(torch.equal(own[name], found[name]) for name in own)
    llama = save_tiny(tmp_path / "llama")
    with pytest.raises(ExportError, match=r"of a policy of kind llama; set drafter\.kind=eagle3"):
        join_mtp(head, llama)
    assert not (llama / "mtp.safetensors").exists()


def test_a_policys_numbers_that_are_not_finite_stay_and_its_configuration_is_strict_json(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=2, limit=[0.0, float("inf")])  # fmt: skip
    policy = AutoModelForCausalLM.from_config(config)
    policy.save_pretrained(tmp_path)
    stated = json.loads((tmp_path / CONFIG).read_text()) | {"limit": [0.0, float("inf")]}
    for text in (json.dumps(stated), (tmp_path / CONFIG).read_text()):  # as older and newer transformers write it
        (tmp_path / CONFIG).write_text(text)
        join_mtp(make_head("mtp", HeadConfig(init="random"), policy, seed=3), tmp_path)
        json.loads((tmp_path / CONFIG).read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
        assert AutoConfig.from_pretrained(tmp_path).limit == [0.0, float("inf")]
    (tmp_path / CONFIG).write_text("{")
    with pytest.raises(ExportError, match="not JSON"):
        join_mtp(make_head("mtp", HeadConfig(init="random"), policy, seed=3), tmp_path)


def test_what_another_process_is_writing_stays_and_what_a_killed_one_left_goes(policy, tmp_path):
    import os

    alive, dead = tmp_path / f".head-writing-{os.getppid()}-x", tmp_path / ".head-writing-999999999-x"
    for folder in (alive, dead):
        folder.mkdir()
    written(policy, tmp_path / "head")
    assert alive.is_dir()
    assert not dead.exists()
