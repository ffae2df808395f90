"""Only what the policy generated is replayed; words of environments and tools are context of the turns after them."""

import itertools
import json
import random
from pathlib import Path

import pytest

from paceline.simulate.logs import Reading, load_tokenizer, read_steps
from paceline.simulate.run import replay_traces
from recorded import write_lines

PROMPT = list(range(10, 30))
REPLY = list(range(5000, 5400))
CASES = Path(__file__).parents[1] / "data" / "replay"


def conversations():
    """Three steps of four conversations: 20 tokens of the policy, 400 of a tool that always answers the same, 20 more.

    A first turn is new in every rollout; a second one is that of the step before, but for its last tokens.
    """
    draw = random.Random(3)
    seconds = [[draw.randrange(100, 4000) for _ in range(20)] for _ in range(4)]
    for step in range(3):
        yield [
            ([draw.randrange(100, 4000) for _ in range(20)], [*second[:15], *range(4000 + step, 4005 + step)])
            for second in seconds
        ]


MASK = [1] * 20 + [0] * 400 + [1] * 20


def skyrl(step, first, second):
    return {
        "step": step,
        "prompt_token_ids": PROMPT,
        "response_ids": [*first, *REPLY, *second],
        "loss_masks": MASK,
        "rewards": 1.0,
        "stop_reasons": "stop",
    }


def trl(step, first, second):
    return {"step": step, "prompt_ids": PROMPT, "completion_ids": [*first, *REPLY, *second], "tool_mask": MASK}


def trl_environment(step, first, second):
    return {"step": step, "prompt_ids": PROMPT, "completion_ids": [*first, *REPLY, *second], "env_mask": MASK}


def slime(step, first, second):
    tokens = [*PROMPT, *first, *REPLY, *second]
    sample = {"group_index": 0, "index": 0, "prompt": "p", "tokens": tokens, "response": "..."}
    return {"step": step, **sample, "response_length": 440, "loss_mask": MASK, "status": "completed"}


def nemo_rl(step, first, second):
    """A row of ``train_data_step*.jsonl``: every field is a batch of one, padded to the longest of the batch."""
    ids = [*PROMPT, *first, *REPLY, *second]
    return {
        "step": step,
        "content": ["..."],
        "rewards": [1.0],
        "input_lengths": [len(ids)],
        "token_ids": [[*ids, 0, 0, 0]],
        "token_loss_mask": [[*[0] * 20, *MASK, 0, 0, 0]],
        "sample_loss_mask": [1.0],
        "idx": 0,
    }


def nemo_gym(step, first, second):
    """Items of the Responses API; the last of each model call has the token ids, here as the text that vLLM gives."""
    return {
        "step": step,
        "responses_create_params": {"input": [{"role": "user", "content": "q"}], "tools": []},
        "response": {
            "output": [
                {"type": "reasoning", "summary": [], "id": "r"},
                {
                    "type": "function_call",
                    "name": "f",
                    "arguments": "{}",
                    "call_id": "c",
                    "prompt_token_ids": PROMPT,
                    "generation_token_ids": [str(token) for token in first],
                    "generation_log_probs": [-0.1] * 20,
                },
                {"type": "function_call_output", "call_id": "c", "output": "..."},
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "...", "annotations": []}],
                    "prompt_token_ids": [*PROMPT, *first, *REPLY],
                    "generation_token_ids": second,
                    "generation_log_probs": [-0.1] * 20,
                },
            ]
        },
        "reward": 1.0,
    }


def prime_nodes(step, first, second):
    nodes = [
        {"message": {"role": "user", "content": "q"}, "sampled": False, "token_ids": PROMPT, "mask": [False] * 20},
        {"parent": 0, "message": {"role": "assistant"}, "sampled": True, "token_ids": first, "mask": [True] * 20},
        {"parent": 1, "message": {"role": "tool"}, "sampled": False, "token_ids": REPLY[:-1], "mask": [False] * 399},
        {
            "parent": 2,
            "message": {"role": "assistant"},
            "sampled": True,
            "token_ids": [REPLY[-1], *second],
            "mask": [False] + [True] * 20,
        },
    ]
    return {"step": step, "version": 1, "id": "t", "nodes": nodes, "is_completed": True}


def prime_episode(step, first, second):
    helper = {"agent": {"trainable": False}, "nodes": prime_nodes(step, second, first)["nodes"]}
    trained = {"agent": {"trainable": True}, **prime_nodes(step, first, second)}
    return {"step": step, "id": "e", "env": {"id": "x"}, "ok": True, "errors": [], "traces": [trained, helper]}


def turns(step, first, second):
    """The truth: what the engine was asked for, turn by turn."""
    asked = [(PROMPT, first), ([*PROMPT, *first, *REPLY], second)]
    return {
        "step": step,
        "trajectory": [{"tokens": {"prompt_ids": prompt, "completion_ids": said}} for prompt, said in asked],
    }


def log(folder, row):
    rows = [row(step, *pair) for step, pairs in enumerate(conversations()) for pair in pairs]
    return write_lines(folder / "log.jsonl", rows)


def figures(path):
    drafters = ["history", "prompt_lookup"]
    found = replay_traces([path], drafters, cost="llama-3.1-8b-h100", warn=lambda _: None).traces["log"]
    return (found.rollouts, found.tokens, found.steps), [
        (one.tokens_per_forward, one.projected_speedup, one.acceptance, one.drafted_per_forward)
        for one in found.drafters.values()
    ]


@pytest.mark.parametrize(
    "row",
    [skyrl, trl, trl_environment, slime, nemo_rl, nemo_gym, prime_nodes, prime_episode],
    ids=lambda row: row.__name__,
)
def test_a_masked_log_gives_the_figures_of_its_turns(row, tmp_path):
    (tmp_path / "truth").mkdir()
    counts, wanted = figures(log(tmp_path / "truth", turns))
    assert counts == (24, 480, 3)
    found_counts, found = figures(log(tmp_path, row))
    assert found_counts == counts
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=1e-9)
    assert wanted[0][0] > 1.2, "second turns repeat, so a history has something to draft"


def test_tokens_of_a_tool_would_make_drafting_look_far_better(tmp_path):
    (tmp_path / "unmasked").mkdir()
    _, true = figures(log(tmp_path, trl))
    unmasked = log(tmp_path / "unmasked", lambda *a: {k: v for k, v in trl(*a).items() if k != "tool_mask"})
    _, false = figures(unmasked)
    assert false[0][1] > 1.3 * true[0][1]


def test_first_turns_that_nobody_could_know_are_drafted_by_nobody(tmp_path):
    """A second turn's prompt holds the first turn; siblings of a replay must not read ahead in it."""
    draw = random.Random(5)
    unique = [[draw.randrange(1, 30000) for _ in range(40)] for _ in range(12)]
    rows = [
        {"step": n // 4, "prompt_ids": PROMPT, "completion_ids": [*u[:20], *REPLY, *u[20:]], "tool_mask": MASK}
        for n, u in enumerate(unique)
    ]
    _, found = figures(write_lines(tmp_path / "log.jsonl", rows))
    assert [one[0] for one in found] == [1.0, 1.0]


def test_masks_cut_a_response_where_they_change_and_share_one_history(tmp_path):
    row = {"step": 0, "prompt_ids": [1], "completion_ids": [2, 3, 4, 5, 6, 7], "tool_mask": [0, 1, 1, 0, 1, 0]}
    (step,) = read_steps(write_lines(tmp_path / "a.jsonl", [row]), None, pytest.fail)
    assert [(r.prompt.tolist(), r.tokens.tolist()) for r in step.rollouts] == [([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6])]
    assert len({r.key for r in step.rollouts}) == 1


@pytest.mark.parametrize("kind", [bool, int, float])
def test_masks_may_be_written_as_booleans_or_numbers(tmp_path, kind):
    row = {"prompt_ids": [1], "completion_ids": [2, 3], "env_mask": [kind(0), kind(1)], "tool_mask": [1, 1]}
    (step,) = read_steps(write_lines(tmp_path / "a.jsonl", [row]), None, pytest.fail)
    assert [r.tokens.tolist() for r in step.rollouts] == [[3]]


def test_many_turns_take_the_memory_of_one_conversation(tmp_path):
    length = 2000
    row = {"prompt_ids": [1], "completion_ids": list(range(length)), "tool_mask": [1, 0] * (length // 2)}
    (step,) = read_steps(write_lines(tmp_path / "a.jsonl", [row]), None, pytest.fail)
    assert len(step.rollouts) == 1000
    assert len({id(r.prompt.base) for r in step.rollouts}) == 1, "prompts are views of one array"


# Text


@pytest.fixture
def tokenizer(tmp_path):
    """Makes a folder of a tokenizer that splits at spaces and punctuation, with a chat template of the cases."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def make(template):
        words = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        made = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
        if template is not None:
            made.chat_template = template
        folder = tmp_path / f"tokenizer-{next(count)}"
        made.save_pretrained(folder)
        return str(folder)

    count = itertools.count()
    yield make
    load_tokenizer.cache_clear()


CHATML = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}<call> {{ c.function | tojson }}{% endfor %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def lengths(path, tokenizer, reading=None, warn=pytest.fail):
    return [[len(r.tokens) for r in step.rollouts] for step in read_steps(path, tokenizer, warn, reading)]


def test_tool_messages_are_context_and_tool_calls_are_generated(tokenizer):
    """Of each conversation the call and the final answer of 7 tokens count; the tool's 100 words do not."""
    call = '{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}'
    written = len(load_tokenizer(tokenizer(None))(call, True))
    assert lengths(CASES / "trl_tools", tokenizer(None)) == [[written, 7] * 4] * 3
    in_template = len(load_tokenizer(tokenizer(CHATML))("<call> " + call, True))
    assert lengths(CASES / "trl_tools", tokenizer(CHATML)) == [[in_template, 7] * 4] * 3


def test_content_in_parts_and_single_messages_are_their_text(tokenizer):
    """One token each: it is the word "four", not the notation of a Python object."""
    for name in ("parts", "dict1"):
        assert lengths(CASES / f"{name}.jsonl", tokenizer(None)) == [[1]]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("alternate", "TemplateError: Conversation roles must alternate"),
        ("broken", "TemplateSyntaxError: "),
        ("no_system", "TemplateError: System role not supported"),
        ("tools", "'NoneType' object is not iterable; the log holds no tools"),
    ],
)
def test_a_chat_template_that_raises_is_one_line_with_the_row(template, message, tokenizer):
    name = tokenizer((CASES / "templates" / f"{template}.jinja").read_text())
    with pytest.raises(ValueError, match=r"completions_00001\.parquet:1: the tokenizer's chat template") as raised:
        lengths(CASES / "trl_tools", name)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_template_that_writes_the_date_is_read(tokenizer):
    assert len(lengths(CASES / "trl_tools", tokenizer((CASES / "templates" / "date.jinja").read_text()))) == 3


def test_pictures_are_left_out_by_name_and_alone_are_one_line(tokenizer):
    with pytest.raises(ValueError, match=r"00001\.parquet:1: .* no rollout .*: 4 x .*content of type image, not text$"):
        lengths(CASES / "trl_vlm", tokenizer(None), warn=lambda _: None)


def test_texts_that_do_not_tell_who_wrote_them_are_named(tokenizer):
    for name, unclear in (("verl_nan", True), ("dict1.jsonl", True), ("parts.jsonl", False), ("trl_tools", False)):
        reading = Reading()
        lengths(CASES / name, tokenizer(None), reading)
        assert [("all of a response counts as generated" in line) for line in reading.unclear] == [True] * unclear


# Cases from the logs of trainers


def test_prime_rl_is_read_from_what_it_trained_on_alone():
    """Of four files a step with the same two rollouts: two requests of three tokens, the scaffold around them left."""
    for name in ("prime_trace", "prime_episode"):
        for folder in (CASES / name, CASES / name / "rollouts"):
            steps = list(read_steps(folder, None, pytest.fail))
            found = [[(r.prompt.tolist(), r.tokens.tolist()) for r in step.rollouts] for step in steps]
            assert found == [[([1, 2, 3, 9], [10, 11, 12])] * 2] * 2


@pytest.mark.parametrize(
    ("name", "counts", "left_out"),
    [
        ("bigint", [[3]], {}),
        ("slime_nan", [[10, 10]], {}),
        ("slime_aborted", [[10]], {"an aborted sample": 1}),
        ("null_response", [[2]], {"no response (null)": 1}),
        ("empty_rows", [[3]], {"an empty response": 1, "an empty prompt": 1}),
        ("verl_nan", [[4, 4, 4, 4]], {}),
    ],
)
def test_rows_without_a_rollout_are_counted_and_the_log_goes_on(name, counts, left_out, tokenizer):
    path, reading, warnings = CASES / name, Reading(), []
    path = path if path.is_dir() else path.with_suffix(".jsonl")
    assert lengths(path, tokenizer(None), reading, warnings.append) == counts
    assert dict(reading.left_out) == left_out
    assert len(warnings) == len(left_out), "a line for the first of each kind"


def test_half_a_surrogate_pair_is_left_out(tokenizer):
    with pytest.raises(ValueError, match=r"surrogate\.jsonl:1: .* 1 x text that is not Unicode"):
        lengths(CASES / "surrogate.jsonl", tokenizer(None), warn=lambda _: None)


def test_nemo_gym_without_token_ids_is_read_message_by_message(tmp_path, tokenizer):
    row = nemo_gym(0, [1], [2])
    row["responses_create_params"]["input"] = "what is it"
    row["response"]["output"] = [
        {"type": "function_call", "name": "look", "arguments": '{"at": "it"}', "call_id": "c"},
        {"type": "function_call_output", "call_id": "c", "output": "a very long answer"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "it is four"}]},
    ]
    name = tokenizer(None)
    call = len(load_tokenizer(name)('{"name": "look", "arguments": "{\\"at\\": \\"it\\"}"}', True))
    assert lengths(write_lines(tmp_path / "rollouts.jsonl", [row]), name) == [[call, 3]]


def test_what_slime_records_keeps_the_loss_mask(tmp_path):
    from types import SimpleNamespace

    from paceline.integrations import slime as hooks

    status = SimpleNamespace(value="completed")
    sample = SimpleNamespace(tokens=[1, 2, 3, 4, 5], response_length=4, loss_mask=[1, 0, 0, 1], status=status)
    aborted = SimpleNamespace(tokens=[1, 2], response_length=1, loss_mask=None, status=SimpleNamespace(value="aborted"))
    hooks.record(0, SimpleNamespace(paceline_log=str(tmp_path)), [sample, aborted], None, 0.5)
    reading = Reading()
    (step,) = read_steps(tmp_path, None, lambda _: None, reading)
    assert [(r.prompt.tolist(), r.tokens.tolist()) for r in step.rollouts] == [([1], [2]), ([1, 2, 3, 4], [5])]
    assert reading.left_out == {"an aborted sample": 1}


def test_the_summary_is_in_the_table_and_in_the_json(tmp_path):
    from typer.testing import CliRunner

    from paceline.cli import app

    rows = [{"step": n, "prompt_ids": [1], "completion_ids": [2, 3] if n else []} for n in range(4)]
    path = write_lines(tmp_path / "a.jsonl", rows)
    out = tmp_path / "r.json"
    done = CliRunner().invoke(app, ["replay", str(path), "--drafters", "history", "--json", str(out)])
    assert done.exit_code == 0, done.output
    assert "left out: 1 x an empty response" in done.output
    assert json.loads(out.read_text())["traces"]["a"]["left_out"] == {"an empty response": 1}
    arguments = ["tune", str(path), "--drafters", "history", "--cost", "smollm2-cpu", "--json", str(out)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "left out: 1 x an empty response" in done.output
    assert json.loads(out.read_text())["together"]["left_out"] == {"an empty response": 1}


def test_the_command_for_pickles_writes_tensors_and_numpy_values(tmp_path):
    import shlex
    import subprocess
    import sys

    import numpy as np
    import torch

    from paceline.simulate.files import PICKLE_RECIPE

    samples = [
        {
            "tokens": np.arange(5),
            "response_length": np.int64(2),
            "loss_mask": np.array([1, 0]),
            "reward": np.float32("nan"),
        },
        {"tokens": torch.arange(4), "response_length": 1, "loss_mask": None, "label": np.array(["a"])},
    ]
    torch.save({"rollout_id": 3, "samples": samples}, tmp_path / "FILE.pt")
    command = PICKLE_RECIPE.replace("python", shlex.quote(sys.executable), 1)
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    (step,) = read_steps(tmp_path / "FILE.jsonl", None, pytest.fail)
    assert [(r.prompt.tolist(), r.tokens.tolist()) for r in step.rollouts] == [([0, 1, 2], [3]), ([0, 1, 2], [3])]
