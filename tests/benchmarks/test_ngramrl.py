"""The experiment of benchmarks/ngramrl: its cells are complete, its table adds up, its limit is the policy's law."""

import heapq
import importlib
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.config import BudgetConfig
from paceline.engines.hf import HFEngine
from paceline.rl.tasks import make_task
from paceline.rl.tasks.function_call import Call, grade_call
from paceline.schema import Outcome, RolloutRequest, SamplingParams, as_tokens
from paceline.simulate.drafters import drafter_by_name
from tiny_models import VOCABULARY, tiny

FOLDER = Path(__file__).parents[2] / "benchmarks" / "ngramrl"
SCRIPTS = ("cells", "run", "limit", "speed", "pretrain_qwen3")


@pytest.fixture(scope="module")
def scripts():
    """Its scripts as modules; they import each other as the ones beside them."""
    sys.path.insert(0, str(FOLDER))
    try:
        return {name: importlib.import_module(name) for name in SCRIPTS}
    finally:
        sys.path.remove(str(FOLDER))
        for name in SCRIPTS:  # other experiments have scripts of the same names
            sys.modules.pop(name, None)


def test_every_workload_meets_every_family_in_one_configuration(scripts):
    cells = scripts["cells"].CELLS
    assert {path.stem for path in (FOLDER / "configs").iterdir()} == {cell.name for cell in cells}
    assert len(cells) == 6
    assert len({cell.config().out for cell in cells}) == 6
    for cell in cells:
        assert list(cell.config().tasks) == [cell.workload]


def test_runs_of_a_cell_are_plain_and_repeat_bit_for_bit(scripts):
    for cell in scripts["cells"].CELLS:
        config = cell.config()
        assert config.drafter.kind == "none"
        assert config.policy.dtype == "float32"
        assert config.rl.epochs >= 8


def test_every_drafter_of_the_table_exists(scripts):
    for name in scripts["cells"].DRAFTERS:
        if not name.startswith("arctic"):  # the peer's own package
            drafter_by_name(name)


def test_cells_are_chosen_by_name_and_an_unknown_one_is_named(scripts):
    cells = scripts["cells"]
    assert [cell.name for cell in cells.choose("text_to_sql-qwen3")] == ["text_to_sql-qwen3"]
    assert cells.choose("") == list(cells.CELLS)
    with pytest.raises(cells.PacelineError, match=r"no cell 'sudoku'; known: function_call-qwen3"):
        cells.choose("sudoku")


def test_the_puzzles_of_a_run_are_judged_by_their_generator(scripts):
    (cell,) = scripts["cells"].choose("n_queens-qwen3")
    config = cell.config()
    task = make_task(cell.workload, config.tasks[cell.workload], config.seed)
    prompt = task.prompts("train")[0]
    assert task.reward(prompt, task.answer(prompt)) == 1.0
    assert task.reward(prompt, "[]") == 0.0


def test_a_call_is_phrased_in_many_ways_and_all_of_them_are_right(scripts):
    call = Call("f", {"a": [1, 2], "b": ["x", ""], "c": [True]})
    rng = scripts["pretrain_qwen3"].seeded(0)
    texts = {scripts["pretrain_qwen3"].phrase_call(call, rng) for _ in range(50)}
    assert len(texts) > 10
    assert {grade_call(call, text) for text in texts} == {1.0}


def made_up(**last30):
    drafters = {
        name: {"tokens_per_forward_last30": value, "tokens_per_forward_first_epoch": 1.5, "prefetch_coverage": None}
        for name, value in last30.items()
    }
    drafters["history:prefetch=16"] = drafters["history"] | {
        "prefetch_coverage": 0.97,
        "by_epoch": {str(epoch): {"prefetch_coverage": epoch / 100} for epoch in range(12)},
    }
    return {
        "drafters": drafters,
        "overlap_previous_epoch": 0.8125,
        "mean_run": 9.04,
        "oracle_tokens_per_forward_last30": 10.0,
        "response_tokens_mean": 40.4,
        "reward_first_epoch": 0.25,
        "reward_last_epoch": 0.5,
    }


def test_the_table_divides_what_it_says_it_divides(scripts):
    result = made_up(history=6.0, ngramrl=4.0, suffix_tree=2.0, suffix_tree_tuned=5.0, prompt_lookup=1.5)
    lines = dict(
        [part.strip() for part in line.strip("|").split("|")]
        for line in scripts["run"].table({"a": result}).split("\n")
    )
    assert lines["last 30 %, budget 16"] == "a"
    assert lines["history"] == "6.00"
    assert lines["history / ngramrl"] == "1.50"
    assert lines["history / best suffix tree"] == "1.20"
    assert lines["history / best prompt lookup"] == "4.00"
    assert lines["overlap with the previous epoch"] == "81.2 %"
    assert lines["mean run, tokens"] == "9.0"
    assert lines["history: coverage at 16 candidates"] == "97.0 %"
    assert lines["history: the same, last epoch"] == "11.0 %"
    assert lines["ngramrl: coverage at 16 candidates"] == "not measured"
    assert (lines["reward, first epoch"], lines["reward, last epoch"]) == ("0.25", "0.50")


def test_what_was_not_measured_says_so(scripts):
    rows = scripts["run"].table({"a": made_up(history=6.0), "b": None}).split("\n")
    assert all(row.endswith("| not measured |") for row in rows[2:])
    assert "| arctic | not measured | not measured |" in rows


def test_the_table_of_the_limit_gives_each_drafter_its_share(scripts):
    rows = scripts["limit"].table({"law": 8.0, "drafters": {"rest": 2.0, "history": 6.0}}).split("\n")
    assert rows[2:] == [
        "| the policy's own law | 8.00 | 100% |",
        "| history | 6.00 | 75% |",
        "| rest | 2.00 | 25% |",
    ]


def likeliest_nodes(model, prompt, budget, temperature, deepest, eos):
    """Reach probabilities of the ``budget`` likeliest nodes below ``prompt``, by one whole forward a node."""

    def below(path):
        with torch.inference_mode():
            logits_V = model(torch.tensor([[*prompt, *path]])).logits[0, -1]
        return torch.log_softmax(logits_V / temperature, -1).tolist()

    heap, found = [(-own, (token,)) for token, own in enumerate(below(()))], {}
    heapq.heapify(heap)
    while len(found) < budget:
        cost, path = heapq.heappop(heap)
        found[path] = math.exp(-cost)
        if path[-1] != eos and len(path) < deepest:
            for token, own in enumerate(below(path)):
                heapq.heappush(heap, (cost - own, (*path, token)))
    return found


def drafted_paths(draft):
    paths = []
    for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
        paths.append((*paths[parent], token) if parent >= 0 else (token,))
    return dict(zip(paths, draft.probs.tolist(), strict=True))


@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_the_law_drafts_the_likeliest_nodes_before_and_after_tokens_were_emitted(scripts, temperature):
    eos, rng = 3, np.random.default_rng(0)
    law = scripts["limit"].LawDrafter(tiny("qwen3"), temperature, (eos,))
    params = SamplingParams(temperature=temperature, max_tokens=5)
    requests = [
        RolloutRequest(request_id=str(n), prompt=rng.integers(4, VOCABULARY, 5 + n), params=params) for n in range(3)
    ]
    law.start(requests)
    model, said = tiny("qwen3"), {request.request_id: [] for request in requests}
    for emitted in ([], [7, 9], [8]):
        for name, tokens in said.items():
            if emitted:
                law.commit([Outcome(request_id=name, tokens=as_tokens(emitted), accepted=0, drafted=0)])
                tokens += emitted
        drafts = law.propose(list(said), 8)
        for request, draft in zip(requests, drafts, strict=True):
            context = [*request.prompt.tolist(), *said[request.request_id]]
            wanted = likeliest_nodes(model, context, 8, temperature, 4 - len(said[request.request_id]), eos)
            assert drafted_paths(draft) == pytest.approx(wanted)
            assert draft.length == len(context)


def test_the_law_changes_no_token_and_keeps_what_it_expects(scripts):
    law = scripts["limit"].LawDrafter(tiny("qwen3"), 1.0, (3,))
    engine = HFEngine(
        tiny("qwen3"), drafter=law, budget=8, budget_config=BudgetConfig(mode="fixed"), eos_ids=(3,), seed=1
    )
    params = SamplingParams(max_tokens=40)
    requests = [RolloutRequest(request_id=str(n), prompt=[4 + n, 9, 5], params=params) for n in range(30)]
    drafted = engine.generate(requests)
    with engine.plain():
        plain = engine.generate(requests)
    for a, b in zip(drafted, plain, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
    assert all(0 < foreseen <= going_on + 1e-9 <= 1 + 2e-9 for foreseen, going_on in law.foreseen)
    kept = sum(len(r.tokens) for r in drafted) / sum(r.forwards for r in drafted)
    assert kept > 1.2
    assert kept == pytest.approx(np.mean(law.expected), rel=0.05)
