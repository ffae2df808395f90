"""The shipped 1 M-parameter policy and the script that makes it."""

import importlib.util
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.config import load_config
from paceline.rl.tasks import make_task
from paceline.rl.tasks.chinook import database
from paceline.rl.tasks.chinook_questions import questions
from paceline.rl.tasks.text_to_sql import phrase

EXAMPLES = Path(__file__).parents[3] / "examples"
POLICY = EXAMPLES / "policies" / "sql-1m"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("pretrain_text_to_sql", EXAMPLES / "pretrain_text_to_sql.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(POLICY)


@pytest.fixture(scope="module")
def known():
    return questions(database())


def test_a_prompt_is_bos_its_text_sep_and_every_text_survives_the_tokenizer(tokenizer, known):
    rng = random.Random(0)
    for question in known[::9]:
        ids = tokenizer(question.text)["input_ids"]
        assert (ids[0], ids[-1], tokenizer.eos_token_id) == (1, 2, 3)
        assert tokenizer.decode(ids, skip_special_tokens=True) == question.text
        answer = phrase(question, rng)
        assert tokenizer.decode(tokenizer(answer, add_special_tokens=False)["input_ids"]) == answer


def test_a_name_is_the_same_tokens_in_a_question_and_in_a_query(tokenizer, known):
    for question in known[::9]:
        if f"'{question.values[0]}'" in question.text:
            name = tokenizer(f" '{question.values[0]}'", add_special_tokens=False)["input_ids"]
            for text in (question.text, f"WHERE artist.name = '{question.values[0]}' </sql>"):
                ids = tokenizer(text, add_special_tokens=False)["input_ids"]
                assert any(ids[start : start + len(name)] == name for start in range(len(ids)))


def test_answers_fit_into_the_configured_length(tokenizer, known):
    config = load_config(EXAMPLES / "text_to_sql.yaml")
    rng = random.Random(1)
    lengths = [len(tokenizer(phrase(q, rng), add_special_tokens=False)["input_ids"]) + 1 for q in known[::3]]
    assert sum(length > config.sampling.max_tokens for length in lengths) < 0.05 * len(lengths)


def test_the_shipped_policy_answers_most_of_its_training_questions(tokenizer):
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    assert model.num_parameters() == 984_192
    config = load_config(EXAMPLES / "text_to_sql.yaml")
    task = make_task("text_to_sql", config.tasks["text_to_sql"], config.seed)
    rewards = []
    for prompt in task.prompts("train")[:16]:
        ids_BT = torch.tensor([tokenizer(prompt.text)["input_ids"]])
        out_BT = model.generate(ids_BT, do_sample=False, max_new_tokens=96)
        assert out_BT[0, -1] == model.generation_config.eos_token_id
        rewards.append(task.reward(prompt, tokenizer.decode(out_BT[0, ids_BT.shape[1] :], skip_special_tokens=True)))
    assert 0.6 < sum(rewards) / len(rewards) < 1.0


def test_a_made_up_name_replaces_the_real_one_in_the_question_and_in_the_answer(script, known):
    question = next(q for q in known if q.kind == "albums_of_artist")
    rng, made_up = random.Random(0), 0
    for _ in range(100):
        text, answer = script.example(question, ["zig", "zag"], rng)
        name = text.split("'")[1]
        assert answer.count(f"'{name}'") == 2
        made_up += name != question.values[0]
    assert 10 < made_up < 45
