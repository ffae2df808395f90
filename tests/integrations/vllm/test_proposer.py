"""The plug-in in the real vLLM, against what a vLLM without it says."""

import os
import random
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from vllm_models import save_tiny, started

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

VOCABULARY = 64
TOKENS = 50
SPECULATIVE = {
    "method": "custom_class",
    "model": "paceline.integrations.vllm.HistoryProposer",
    "num_speculative_tokens": 8,
}
PROMPTS = [
    [5], [6, 7], [9, 8, 7, 6, 5], [1, 2, 3, 4] * 3, list(range(10, 30)), [40, 41] * 15, [50, 3, 9, 27] * 11,
]  # fmt: skip


def params(tokens: int = TOKENS, **more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0, **more)


def answers(llm: Any, prompts: Sequence[Sequence[int]], how: Any = None) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], how or params(), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def runner(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def plugin(llm: Any) -> Any:
    return runner(llm).drafter


def with_plugin(
    model: Path, *, drafter: dict[str, Any] | None = None, snapshot: Path | None = None, **more: Any
) -> Any:
    """A vLLM that drafts all that is offered, so that a test does not depend on the clock."""
    settings: dict[str, Any] = {"budget": {"mode": "fixed"}, "drafter": drafter or {}}
    if snapshot is not None:
        settings["snapshot"] = str(snapshot)
    return started(model, speculative_config=SPECULATIVE, additional_config={"paceline": settings}, **more)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def plain(model: Path) -> list[list[int]]:
    """What the policy answers greedily to each prompt, one at a time and without drafts."""
    with started(model) as llm:
        return [answers(llm, [prompt])[0] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def crowded(model: Path, plain: list[list[int]]) -> Iterator[Any]:
    """An engine with the plug-in and too little room: prompts come in pieces, requests are preempted."""
    with with_plugin(
        model, num_gpu_blocks_override=7, block_size=32, max_num_batched_tokens=48, enable_prefix_caching=True
    ) as llm:
        yield llm


def test_greedy_answers_are_those_without_the_plug_in_and_repeats_take_few_passes(
    model: Path, plain: list[list[int]]
) -> None:
    with with_plugin(model) as llm:
        first = answers(llm, PROMPTS)
        before = plugin(llm).report()
        assert answers(llm, PROMPTS) == first == plain
        after = plugin(llm).report()
        rows = after["row_forwards"] - before["row_forwards"]
        assert len(PROMPTS) * TOKENS / rows > 2
        assert after["events"] == before["events"]
        assert {name for name in after["events"] if not name.startswith("mended/")} == set()
        drafted = sum(counts[0] for counts in after["requests"].values())
        assert drafted == after["tokens_drafted"] - before["tokens_drafted"]
        assert len(after["requests"]) == len(PROMPTS)
        assert after["history_bytes"] > 0

        # Nothing is drafted where it is switched off, or not asked for; what is said is remembered all the same.
        plugin(llm).set_drafting(False)
        assert answers(llm, PROMPTS[:2]) == plain[:2]
        assert plugin(llm).report()["tokens_drafted"] == after["tokens_drafted"]
        plugin(llm).set_drafting(True)
        silent = params(extra_args={"paceline_speculate": False})
        assert answers(llm, PROMPTS[:2], silent) == plain[:2]
        assert plugin(llm).report()["tokens_drafted"] == after["tokens_drafted"]

        # The version reaches the drafts and their history.
        plugin(llm).on_weights(3)
        assert answers(llm, PROMPTS[:2]) == plain[:2]
        report = plugin(llm).report()
        assert report["weight_version"] == 3
        assert report["tokens_drafted"] > after["tokens_drafted"]


def test_siblings_are_recognised_by_group_id_and_by_prompt(model: Path, plain: list[list[int]]) -> None:
    with with_plugin(model, drafter={"history": {"elsewhere_tokens": 0}}) as llm:
        engine, states = llm.llm_engine, runner(llm).requests

        def accepted(which: int, second: list[int], extra_first: Any = None, extra_second: Any = None) -> int:
            """Accepted tokens of a request that comes when another one has said most of its answer."""
            engine.add_request("first", {"prompt_token_ids": PROMPTS[which]}, params(extra_args=extra_first))
            engine.step()
            state = next(iter(states.values()))
            while len(state.output_token_ids) < TOKENS - 10:
                engine.step()
            engine.add_request("second", {"prompt_token_ids": second}, params(30, extra_args=extra_second))
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished and output.request_id == "first":
                        assert list(output.outputs[0].token_ids) == plain[which]
            requests = plugin(llm).report()["requests"]
            return next(counts[1] for name, counts in requests.items() if name.startswith("second"))

        # A longer prompt with the same answer: the first one's prompt and the beginning of its answer.
        other = PROMPTS[2] + plain[2][:10]
        strangers = accepted(2, other, {"paceline_prompt_key": "elsewhere"})
        siblings = accepted(2, other, {"paceline_group": "g"}, {"paceline_group": "g"})
        assert siblings > strangers + 5
        assert accepted(4, PROMPTS[4]) > 20


# field F1
# field F2
@pytest.mark.parametrize("seed", range(4))
def test_any_schedule_gives_the_tokens_of_a_plain_engine(crowded: Any, plain: list[list[int]], seed: int) -> None:
    rng, engine = random.Random(seed), crowded.llm_engine
    fed: set[int] = set()
    drafted: set[int] = set()
    asked, forward = plugin(crowded).propose, runner(crowded)._model_forward

    def watched(*arguments: Any, **options: Any) -> list[list[int]]:
        chains = asked(*arguments, **options)
        drafted.update(token for chain in chains for token in chain)
        return chains

    def fed_with(input_ids: Any, *arguments: Any, **options: Any) -> Any:
        fed.update(input_ids.tolist())
        return forward(input_ids, *arguments, **options)

    plugin(crowded).propose, runner(crowded)._model_forward = watched, fed_with
    wanted: dict[str, tuple[int, int]] = {}
    said: dict[str, list[int]] = {}
    aborted = set()
    try:
        for number in range(220):
            if number < 180 and rng.random() < 0.35:
                name, which, tokens = f"{seed}/{number}", rng.randrange(len(PROMPTS)), rng.randrange(1, TOKENS + 1)
                extra = rng.choice([None, {"paceline_group": str(rng.randrange(3))}])
                wanted[name] = which, tokens
                engine.add_request(name, {"prompt_token_ids": PROMPTS[which]}, params(tokens, extra_args=extra))
            if rng.random() < 0.06 and (running := sorted(wanted.keys() - said.keys() - aborted)):
                name = rng.choice(running)
                aborted.add(name)
                engine.abort_request([name])
            if rng.random() < 0.03:
                crowded.reset_prefix_cache()
            said |= {o.request_id: list(o.outputs[0].token_ids) for o in engine.step() if o.finished}
        while engine.has_unfinished_requests():
            said |= {o.request_id: list(o.outputs[0].token_ids) for o in engine.step() if o.finished}
    finally:
        del plugin(crowded).propose, runner(crowded)._model_forward
    assert set(said) | aborted == set(wanted)
    assert len(aborted) > 2
    for name in wanted.keys() - aborted:
        which, tokens = wanted[name]
        assert said[name] == plain[which][:tokens], name
    for ids in (fed, drafted):
        assert len(ids) > 10
        assert ids <= set(range(VOCABULARY))
    report = plugin(crowded).report()
    assert {event for event in report["events"] if not event.startswith("mended/")} == set()


def test_the_schedules_were_hard_ones(crowded: Any) -> None:
    metrics = {metric.name: getattr(metric, "value", 0) for metric in crowded.get_metrics()}
    assert metrics["vllm:num_preemptions"] > 2
    assert metrics["vllm:prefix_cache_hits"] > 0
    report = plugin(crowded).report()
    assert report["tokens_accepted"] > report["forwards"]
    # What was aborted is not remembered, and nothing is in flight: a snapshot holds whole answers only.
    assert plugin(crowded).snapshot()


def test_an_id_that_is_used_again_is_another_request(
    crowded: Any, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import envs

    monkeypatch.setattr(envs, "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", True, raising=False)
    engine = crowded.llm_engine
    for which in (3, 4):
        engine.add_request("again", {"prompt_token_ids": PROMPTS[which]}, params())
        for _ in range(4):
            engine.step()
        assert set(runner(crowded).requests) == {"again"}
        if which == 3:
            engine.abort_request(["again"], internal=True)
    done = []
    while engine.has_unfinished_requests():
        done += [list(o.outputs[0].token_ids) for o in engine.step() if o.finished]
    assert done == [plain[4]]
    assert plugin(crowded).report()["requests"]["again"][2] > 1


# field I3
def test_samples_of_one_prompt_keep_state_and_counters_of_their_own(crowded: Any) -> None:
    from vllm import SamplingParams

    plugin(crowded).report()
    how = SamplingParams(n=3, temperature=1.0, max_tokens=20, ignore_eos=True, detokenize=False, seed=7)
    output = crowded.generate([{"prompt_token_ids": PROMPTS[2]}], how, use_tqdm=False)[0]
    assert [len(sample.token_ids) for sample in output.outputs] == [20, 20, 20]
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 3
    requests = plugin(crowded).report()["requests"]
    assert len(requests) == 3
    assert all(accepted + passes == 20 for _, accepted, passes in requests.values())


# field I4
def test_one_over_long_row_stops_no_other_from_drafting(model: Path, plain: list[list[int]]) -> None:
    with with_plugin(model, max_model_len=64) as llm:
        assert answers(llm, [PROMPTS[0]], params(48)) == [plain[0][:48]]
        engine, before = llm.llm_engine, plugin(llm).report()["tokens_accepted"]
        long = (PROMPTS[6] * 2)[:58]
        engine.add_request("long", {"prompt_token_ids": long}, params(6))
        engine.add_request("short", {"prompt_token_ids": PROMPTS[0]}, params(48))
        done, passes_together = {}, 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    done[output.request_id] = list(output.outputs[0].token_ids)
            if "long" not in done:
                passes_together += 1
                accepted = plugin(llm).report()["tokens_accepted"] - before
        assert len(done["long"]) == 6
        assert done["short"] == plain[0][:48]
        assert passes_together > 2
        assert accepted > passes_together  # while the long row was there


def test_a_drafter_that_fails_costs_drafts_and_no_token(
    model: Path, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from paceline.drafters.history import HistoryDrafter
    from paceline.integrations.vllm.runner import Runner

    with with_plugin(model) as llm:
        assert answers(llm, PROMPTS) == plain
        with monkeypatch.context() as broken:
            broken.setattr(HistoryDrafter, "propose", lambda *_: 1 / 0)
            assert answers(llm, PROMPTS) == plain
        assert plugin(llm).report()["events"]["drafter_lost"] == 1
        said = [record.getMessage() for record in caplog.records if "drafter_lost" in record.getMessage()]
        assert len(said) == 1
        assert "ZeroDivisionError" in said[0]
        drafted = plugin(llm).report()["tokens_drafted"]
        assert answers(llm, PROMPTS) == plain
        assert plugin(llm).report()["tokens_drafted"] == drafted

        # The same where the plug-in itself fails, as it does when vLLM is not what it was.
        monkeypatch.setattr(Runner, "batch", lambda *_: [].pop())
        assert answers(llm, PROMPTS[:3]) == plain[:3]
        assert plugin(llm).report()["events"]["drafter_lost"] == 2


def test_the_death_of_a_drafter_s_process_costs_drafts_and_no_token(model: Path, plain: list[list[int]]) -> None:
    with with_plugin(model, drafter={"isolate": True}) as llm:
        engine, own = llm.llm_engine, plugin(llm)
        assert answers(llm, PROMPTS) == plain
        assert own.snapshot()
        for number, prompt in enumerate(PROMPTS):
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params())
        engine.step()
        os.kill(own._drafter.inner.pid, signal.SIGKILL)
        said = {}
        while engine.has_unfinished_requests():
            said |= {o.request_id: list(o.outputs[0].token_ids) for o in engine.step() if o.finished}
        assert [said[str(number)] for number in range(len(PROMPTS))] == plain
        before = own.report()
        assert before["events"]["drafter_lost"] == 1
        assert own.snapshot() is None

        # The next refit starts another process, which goes on from the last snapshot.
        own.on_weights(1)
        assert answers(llm, PROMPTS) == plain
        after = own.report()
        assert after["events"]["drafter_reloaded"] == 1
        assert len(PROMPTS) * TOKENS / (after["row_forwards"] - before["row_forwards"]) > 2


def test_a_setting_that_is_unknown_stops_vllm_at_its_start(model: Path) -> None:
    additional = {"paceline": {"drafter": {"history": {"windw": 3}}}}
    with (
        pytest.raises(RuntimeError, match=r"did you mean drafter.history.window"),
        started(model, speculative_config=SPECULATIVE, additional_config=additional),
    ):
        pass


def test_the_plug_in_is_built_by_a_model_runner_alone() -> None:
    from types import SimpleNamespace

    from paceline.integrations.vllm import HistoryProposer
    from paceline.integrations.vllm.runner import SeamError

    parallel = SimpleNamespace(world_size=1, distributed_executor_backend=None)
    config = SimpleNamespace(
        additional_config={}, speculative_config=SimpleNamespace(num_speculative_tokens=4), parallel_config=parallel
    )
    with pytest.raises(SeamError, match="let vLLM build it"):
        HistoryProposer(config)
