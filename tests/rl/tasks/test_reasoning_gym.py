import builtins
from pathlib import Path

import pytest

from paceline.config import load_config
from paceline.rl.tasks import make_task
from paceline.rl.tasks.reasoning_gym import ReasoningGym


@pytest.fixture(scope="module")
def task():
    return ReasoningGym(seed=1, train_prompts=12, eval_prompts=6, dataset="leg_counting", max_animals=4)


def test_the_generators_own_answer_earns_one_with_and_without_the_marker(task):
    for prompt in (*task.prompts("train"), *task.prompts("eval")):
        assert task.reward(prompt, task.answer(prompt)) == 1.0
        assert task.reward(prompt, f"Legs: 4 + 4.\nAnswer: 3\nNo.\nAnswer: {task.answer(prompt)}\n") == 1.0
        assert task.reward(prompt, "Answer: many") < 0.5


def test_the_splits_have_the_sizes_asked_for_share_no_puzzle_and_are_reproducible(task):
    again = ReasoningGym(seed=1, train_prompts=12, eval_prompts=6, dataset="leg_counting", max_animals=4)
    texts = {split: [prompt.text for prompt in task.prompts(split)] for split in ("train", "eval")}
    assert texts == {split: [prompt.text for prompt in again.prompts(split)] for split in ("train", "eval")}
    assert [len(set(texts[split])) for split in ("train", "eval")] == [12, 6]
    assert not set(texts["train"]) & set(texts["eval"])
    assert len({prompt.prompt_id for split in ("train", "eval") for prompt in task.prompts(split)}) == 18


def test_neighbouring_seeds_give_other_puzzles(task):
    other = ReasoningGym(seed=2, train_prompts=12, eval_prompts=6, dataset="leg_counting", max_animals=4)
    assert not {prompt.text for prompt in task.prompts("train")} & {prompt.text for prompt in other.prompts("train")}


def test_the_generators_settings_are_used(task):
    assert all(prompt.data["metadata"]["num_animals"] <= 4 for prompt in task.prompts("train"))


def test_instructions_ask_for_the_marker_and_the_answer_has_it():
    task = ReasoningGym(train_prompts=1, eval_prompts=0, dataset="leg_counting", instructions=True)
    (prompt,) = task.prompts("train")
    assert prompt.text.endswith("\nEnd with one line: Answer: ...")
    assert task.answer(prompt).startswith("Answer: ")
    assert task.reward(prompt, task.answer(prompt)) == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "leg_counter"}, "no dataset 'leg_counter' in reasoning-gym; did you mean leg_counting"),
        ({"dataset": "leg_counting", "max_animal": 4}, "has no option 'max_animal'; did you mean max_animals"),
        ({"dataset": "leg_counting", "size": 4}, "has no option 'size'"),
        ({"dataset": "leg_counting", "min_animals": 9, "max_animals": 2}, "leg_counting refuses its options"),
        ({"dataset": "leg_counting", "max_animals": "four"}, "leg_counting refuses its options"),
        (
            {"dataset": "leg_counting", "train_prompts": 30, "max_animals": 1, "min_animals": 1, "max_instances": 1},
            "too few",
        ),
    ],
)
def test_what_cannot_be_honoured_is_one_line(options, message):
    with pytest.raises(ValueError, match=message) as error:
        ReasoningGym(**{"train_prompts": 2, "eval_prompts": 2, **options})
    assert "\n" not in str(error.value)


def test_a_missing_package_is_named(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("reasoning_gym"):
            raise ImportError("No module named 'reasoning_gym'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match="pip install reasoning-gym"):
        ReasoningGym(dataset="leg_counting")


def test_the_examples_configuration_builds_its_task():
    config = load_config(Path(__file__).parents[3] / "examples" / "reasoning_gym.yaml")
    task = make_task("words", config.tasks["words"], config.seed)
    assert len(task.prompts("train")) == config.tasks["words"].train_prompts
    prompt = task.prompts("eval")[0]
    assert task.reward(prompt, task.answer(prompt)) == 1.0
