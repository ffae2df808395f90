"""A small policy from nothing: what its tokenizer, its batches, its training and its judge do."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from paceline.rl.pretrain import PAD, batch, make_tokenizer, mean_reward, save, seeded, train
from paceline.rl.tasks.text_to_sql import TextToSql

EXAMPLES = Path(__file__).parents[2] / "examples"
POLICY = EXAMPLES / "policies" / "sql-1m"
ROWS = [("How many?", "<plan> x </plan>"), ("Who?", "<plan> a longer one </plan> <sql> SELECT 1 </sql>")]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer([text for row in ROWS for text in row], 300, 64)


def small_model(tokenizer):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **sizes, **heads, pad_token_id=PAD))


def test_only_the_answer_and_its_end_are_learned(tokenizer):
    ids_BT, mask_BT, labels_BT = batch(ROWS, tokenizer)
    for row, (question, answer) in enumerate(ROWS):
        learned = labels_BT[row][labels_BT[row] != -100]
        assert tokenizer.decode(learned) == f"{answer}<eos>"
        assert tokenizer.decode(ids_BT[row][mask_BT[row].bool()]) == f"<bos>{question}<sep>{answer}<eos>"


def test_a_language_model_learns_the_prompt_too(tokenizer):
    ids_BT, mask_BT, labels_BT = batch(ROWS, tokenizer, whole=True)
    assert torch.equal(labels_BT, ids_BT.masked_fill(mask_BT == 0, -100))


def test_a_row_longer_than_the_context_is_refused(tokenizer):
    with pytest.raises(ValueError, match="the context holds 64"):
        batch([("Who? " * 64, "x")], tokenizer)


def test_training_lowers_the_loss_and_tells_every_50th_step(tokenizer):
    model = small_model(tokenizer)
    ids_BT, mask_BT, labels_BT = batch(ROWS, tokenizer)

    def loss():
        with torch.no_grad():
            return model(input_ids=ids_BT, attention_mask=mask_BT, labels=labels_BT).loss.item()

    before, told = loss(), []
    train(model, tokenizer, lambda: ROWS, 100, progress=lambda step, value: told.append((step, value)))
    assert loss() < before - 2
    assert [step for step, _ in told] == [50, 100]
    assert told[1][1] < told[0][1]


def test_a_seed_decides_the_data_and_the_weights(tokenizer):
    def drawn(seed):
        rng = seeded(seed)
        return rng.random(), torch.rand(1).item()

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)
    assert isinstance(seeded(0), random.Random)


def test_a_saved_policy_is_the_one_that_goes_on(tokenizer, tmp_path):
    model = small_model(tokenizer)
    save(model, tokenizer, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, loaded.get_parameter(name))
    assert AutoTokenizer.from_pretrained(tmp_path)("Who?")["input_ids"] == tokenizer("Who?")["input_ids"]


def test_a_policy_is_judged_by_the_tasks_own_reward():
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    task = TextToSql(train_prompts=4, eval_prompts=0)
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    torch.manual_seed(0)
    assert 0.2 < mean_reward(model, tokenizer, task, task.prompts("train"), samples=4) <= 1.0
