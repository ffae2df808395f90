"""Answers that are programs, bombs or noise, to the puzzles whose library would evaluate them, through the judge."""

import random
import sys

import pytest

from paceline.config import ConfigError, TaskConfig
from paceline.rl import rewards
from paceline.rl.rewards import Judge
from paceline.rl.sandbox import NOTHING, isolation
from paceline.rl.tasks import make_task, puzzle_scores, registry
from paceline.rl.tasks.reasoning_gym import ReasoningGym
from paceline.rl.tasks.registry import check_task

pytestmark = pytest.mark.attacks
gym = pytest.importorskip("reasoning_gym.factory")

EVALUATED = (
    *("binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24"),
    *("simple_integration", "spiral_matrix", "string_insertion"),
)
SYMBOLIC = ("intermediate_integration", "polynomial_multiplication", "simple_integration")
# {made} is a file that must never be there; {parent} is the process of the run.
PAYLOADS = (
    "__import__('os').mkdir({made!r})",
    "open({made!r}, 'w').write('x')",
    "[__import__('os').mkdir({made!r})]",
    "(lambda: __import__('os').mkdir({made!r}))()",
    "[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'Popen'][0](['touch', {made!r}])",
    "__import__('subprocess').run(['touch', {made!r}])",
    "__import__('socket').create_connection(('127.0.0.1', 9), 1)",
    "__import__('os').fork()",
    "__import__('os').kill({parent}, 15)",
    "__import__('os')._exit(0)",
    "__import__('os').execv('/bin/touch', ['touch', {made!r}])",
    "open('/proc/{parent}/environ').read()",
    "[open({made!r}, 'w') for _ in [0]]",
    "exec('import os; os.mkdir({made!r})')",
    "x if __import__('os').mkdir({made!r}) else x",
    "f'{{__import__(\"os\").mkdir({made!r})}}'",
    "sympify('__import__(\"os\").mkdir({made!r})')",
    "lambdify((), 1)",
    "S('__import__(\"os\").mkdir({made!r})')",
    "preview(x, viewer='file', filename={made!r})",
    "(yield)", "await x", "x := 1", "*x", "x.__class__", "'%s' * 9", "__builtins__", "print", "1 if 1 else 2",
    "9**9**9**9", "(9**199)**199", "((2*x)**190)**190", "1e999999999", "10**(10**10)", "factorial(10**9)", "10**9!",
    "[[0]*10**9]", "'a'*10**10", "range(10**12)", "[1]" * 5_000, "(" * 5_000, "[" * 5_000, "-" * 5_000 + "1",
    "1" * 19_000, "+".join("x" * 300), "1" + "+1" * 300, "{{" * 100, "x" * 5_000, "\x00", "\ud800", "1_000", "0x18",
    "", " ", "\u0661+\u0662", "\u221e", "nan", "oo", "zoo", "I**I", "E", "gamma(x)", "1/0", "x/0", "0**-1",
)  # fmt: skip


def payloads(made):
    import os

    return [payload.format(made=str(made), parent=os.getpid()) for payload in PAYLOADS]


def task_of(dataset):
    return ReasoningGym(seed=1, train_prompts=2, eval_prompts=0, dataset=dataset)


@pytest.mark.parametrize("dataset", EVALUATED)
@pytest.mark.parametrize("confined", [True, False])
def test_no_answer_is_evaluated_with_or_without_a_sandbox(dataset, confined, tmp_path):
    if confined and not isolation().holds:
        pytest.skip("this machine has no sandbox")
    made, task = tmp_path / "made", task_of(dataset)
    prompt = task.prompts("train")[0]
    least = 0.05 if dataset == "countdown" else 0.01 if dataset == "puzzle24" else 0.0
    with Judge(task, name=dataset, seconds=20.0, unsafe=not confined) as judge:
        judge.score(prompt, "0")
        worker = judge._worker
        for payload in payloads(made):
            found = judge.score(prompt, f"Answer: {payload}")
            assert found.reward <= least, payload
            assert found.error is None, (payload, found.error)
            assert judge._worker is worker, payload
            assert list(tmp_path.iterdir()) == [], payload
        assert judge.score(prompt, task.answer(prompt) if prompt.data["answer"] else "24").reward >= least


@pytest.mark.skipif(not isolation().holds, reason="this machine has no sandbox")
@pytest.mark.parametrize("dataset", EVALUATED)
def test_the_librarys_own_scorer_can_do_no_harm_either(dataset, tmp_path, monkeypatch):
    """What the parsers keep out is let in again here, so that the sandbox alone stands between."""
    monkeypatch.setattr(puzzle_scores, "SCORES", {})
    made, task = tmp_path / "made", task_of(dataset)
    prompt = task.prompts("train")[0]
    with Judge(task, name=dataset, seconds=2.0) as judge:
        for payload in payloads(made)[:16]:
            assert judge.score(prompt, f"Answer: {payload}").reward <= 0.05
            assert list(tmp_path.iterdir()) == [], payload
        assert judge.score(prompt, "0").error is None


@pytest.mark.parametrize("dataset", EVALUATED)
def test_where_no_sandbox_holds_what_sympy_works_on_is_refused_unless_unsafe(dataset, monkeypatch):
    monkeypatch.setattr(registry, "isolation", lambda: NOTHING)
    monkeypatch.setattr(rewards, "isolation", lambda: NOTHING)
    options = {"dataset": dataset}
    config = TaskConfig(kind="reasoning_gym", train_prompts=1, eval_prompts=0, options=options)
    unsafe = TaskConfig(kind="reasoning_gym", train_prompts=1, eval_prompts=0, options=options, unsafe=True)
    check_task("puzzle", unsafe)
    task = make_task("puzzle", unsafe, 0)
    if dataset not in SYMBOLIC:
        check_task("puzzle", config)
        return
    for attempt in (lambda: check_task("puzzle", config), lambda: make_task("puzzle", config, 0)):
        with pytest.raises(ConfigError, match=rf"{dataset}.*no sandbox.*tasks\.puzzle\.unsafe=true") as error:
            attempt()
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="no sandbox"):
        Judge(task, name="puzzle")


def test_every_dataset_that_evaluates_is_known():
    """A release of the library that evaluates in another dataset is refused without a sandbox, and fails here."""
    suspects = {name for name, (cls, _) in gym.DATASETS.items() if puzzle_scores._evaluates(cls)}
    assert suspects - puzzle_scores._REVIEWED == set(EVALUATED) == set(puzzle_scores.SCORES)


class Evaluating:
    """A dataset that nobody has looked at yet."""

    def score_answer(self, answer, _entry):
        return eval(answer)  # noqa: S307  looked for, never called


def test_a_dataset_of_another_release_that_evaluates_needs_a_sandbox():
    assert "may evaluate" in puzzle_scores.why_confined("new_one", Evaluating)
    assert puzzle_scores.why_confined("leg_counting", gym.DATASETS["leg_counting"][0]) is None


@pytest.mark.parametrize("dataset", EVALUATED)
def test_scores_are_the_librarys_for_honest_answers(dataset):
    theirs, rng = gym.create_dataset(dataset, seed=5, size=6), random.Random(5)
    for place in range(3 if dataset in SYMBOLIC else 6):
        entry = theirs[place]
        right = entry["answer"] or "(6/(1-3/4))"
        digits = [place for place, char in enumerate(right) if char.isdigit()] or [0]
        at = rng.choice(digits)
        near = [right[:at] + rng.choice("0123456789") + right[at + 1 :], f"({right})", f"{right} ", "", "[1, 2]", "1+2"]
        lists = [repr(right.split()), repr([row.split() for row in right.splitlines()]), repr(list(right))]
        for answer in (right, *near, *lists):
            ours = puzzle_scores.SCORES[dataset](answer.strip(), entry, theirs.config)
            assert ours == pytest.approx(theirs.score_answer(answer.strip(), entry)), answer


def test_a_mixture_is_judged_by_its_parts_without_evaluation(tmp_path):
    from reasoning_gym.composite import DatasetSpec

    specs = [DatasetSpec(name=name, weight=1, config={}) for name in ("countdown", "simple_integration")]
    task = ReasoningGym(seed=1, train_prompts=8, eval_prompts=0, dataset="composite", datasets=specs)
    assert "SymPy" in task.needs_sandbox
    for prompt in task.prompts("train"):
        assert task.reward(prompt, task.answer(prompt)) == 1.0
        assert task.reward(prompt, f"Answer: __import__('os').mkdir({str(tmp_path / 'made')!r})") <= 0.01
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux")
def test_noise_costs_its_reward_alone():
    rng = random.Random(0)
    pieces = ["x", "**", "(", ")", "1", "[", "]", ",", "'", "/", "-", "9", " ", "C", "sin", "\n", "e", ".", "_", "é"]
    for dataset in EVALUATED:
        task = task_of(dataset)
        prompt = task.prompts("train")[0]
        for _ in range(40):
            text = "".join(rng.choices(pieces, k=rng.randrange(1, 12)))
            assert 0.0 <= task.reward(prompt, text) <= 1.0
