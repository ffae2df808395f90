import sys
from importlib.metadata import EntryPoint

import pytest

from paceline.config import ConfigError, TaskConfig
from paceline.rl.tasks import make_task, registry
from paceline.rl.tasks.base import Prompt

MODULE = """
from paceline.rl.tasks.base import Prompt

class Echo:
    def __init__(self, *, seed, train_prompts, eval_prompts, word: str = "hi", times: int = 1):
        if times < 0:
            raise ValueError("times: -1 must be >= 0")
        if times > 9:
            {}["many"]
        self.built = (seed, train_prompts, eval_prompts, word, times)

    def prompts(self, split):
        return [Prompt(prompt_id=0, text=self.built[3])]

    def reward(self, prompt, response):
        return float(response == prompt.text)

    def answer(self, prompt):
        return prompt.text

class Picky(Echo):
    def __init__(self, *, seed, train_prompts, eval_prompts, path):
        pass

class Open(Echo):
    def __init__(self, **options):
        self.built = options

class Mute:
    def __init__(self, **options):
        pass
    def prompts(self, split):
        return []

NUMBER = 3
"""


@pytest.fixture
def my_tasks(tmp_path, monkeypatch):
    """A module of a user, in the working directory."""
    (tmp_path / "my_tasks.py").write_text(MODULE)
    (tmp_path / "broken_tasks.py").write_text("import nothing_of_this_name")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("my_tasks", None)


def make(kind, **options):
    return make_task("mine", TaskConfig(kind=kind, train_prompts=5, eval_prompts=2, options=options), seed=7)


def test_a_users_class_in_the_working_directory_is_built_with_its_options(my_tasks):
    task = make("my_tasks:Echo", word="ho", times=2)
    assert task.built == (7, 5, 2, "ho", 2)
    assert task.reward(task.prompts("train")[0], "ho") == 1.0


def test_a_class_that_takes_any_option_gets_all_of_them(my_tasks):
    assert make("my_tasks:Open", a=1).built == {"seed": 7, "train_prompts": 5, "eval_prompts": 2, "a": 1}


def test_a_task_without_a_kind_is_found_by_its_own_name():
    config = TaskConfig(train_prompts=2, eval_prompts=1, options={"instructions": True})
    task = make_task("function_call", config, seed=0)
    assert len(task.prompts("train")) == 2


def test_a_task_registered_by_a_package_is_found(my_tasks, monkeypatch):
    point = EntryPoint(name="echo", value="my_tasks:Echo", group=registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == registry.ENTRY_POINTS else [])
    assert make("echo").built == (7, 5, 2, "hi", 1)
    with pytest.raises(ConfigError, match="did you mean echo"):
        make("ecko")


@pytest.mark.parametrize("kind", registry.BUILT_IN)
def test_every_built_in_task_gives_prompts_rewards_and_answers(kind):
    options = {"dataset": "leg_counting"} if kind == "reasoning_gym" else {}
    task = make(kind, **options)
    assert [len(task.prompts(split)) for split in ("train", "eval")] == [5, 2]
    for prompt in task.prompts("eval"):
        assert isinstance(prompt, Prompt)
        assert task.reward(prompt, task.answer(prompt)) == 1.0
        assert 0.0 <= task.reward(prompt, "nonsense") < 1.0


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("text_to_sq", {}, "no task kind 'text_to_sq'; did you mean text_to_sql?; a class of your own is module:Class"),
        ("text_to_sql", {"shema": True}, "unknown option 'shema'; did you mean schema?"),
        ("text_to_sql", {"schema": "yes"}, "option schema: Expected bool, got str, got 'yes'"),
        ("text_to_sql", {"seed": 1}, "options.seed is set by the run itself; remove it"),
        ("reasoning_gym", {}, "the option 'dataset' is missing; write it under options"),
        ("reasoning_gym", {"dataset": "chess"}, "no dataset 'chess' in reasoning-gym"),
        ("my_tasks:Ecko", {}, "module my_tasks has no class 'Ecko'; did you mean Echo?"),
        ("my_tasks:NUMBER", {}, "module my_tasks has no class 'NUMBER'"),
        ("my_tasks:Echo", {"wrod": "x"}, "unknown option 'wrod'; did you mean word?"),
        ("my_tasks:Echo", {"times": "two"}, "option times: Expected int, got str, got 'two'"),
        ("my_tasks:Echo", {"times": -1}, "times: -1 must be >= 0"),
        ("my_tasks:Echo", {"times": 10}, "KeyError: 'many'"),
        ("my_tasks:Picky", {}, "the option 'path' is missing"),
        ("my_tasks:Mute", {}, "my_tasks:Mute has no method reward, answer; a task has prompts, reward, answer"),
        ("your_tasks:Echo", {}, "cannot import your_tasks: ModuleNotFoundError"),
        ("broken_tasks:Echo", {}, "cannot import broken_tasks: ModuleNotFoundError: No module named 'nothing_of"),
    ],
)
def test_every_failure_is_one_line_that_names_the_task(my_tasks, kind, options, message):
    with pytest.raises(ConfigError) as error:
        make(kind, **options)
    assert str(error.value).startswith(f"task mine: {message}")
    assert "\n" not in str(error.value)


def test_too_many_prompts_name_the_task():
    config = TaskConfig(kind="function_call", train_prompts=10_000)
    with pytest.raises(ConfigError, match=r"task calls: 10000 train_prompts asked for, the data has \d+"):
        make_task("calls", config, seed=0)
