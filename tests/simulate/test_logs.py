"""Every log format is told by its fields and read into the same steps; what cannot be read is one clear line."""

import gzip
import json
import sys

import numpy as np
import pytest

from paceline.schema import PacelineError
from paceline.simulate import logs
from paceline.simulate.files import LogError, log_files
from paceline.simulate.logs import load_tokenizer, read_steps, trace_name
from recorded import PROMPT, write_lines, write_trace


@pytest.fixture
def words(monkeypatch):
    """A tokenizer named ``words``: every word is the number it spells, messages are their contents."""

    def load(name):
        assert name == "words"

        def encode(text, is_prompt):
            if isinstance(text, list):
                text = " ".join(message["content"] for message in text)
            return [int(word) for word in text.split()]

        return encode

    monkeypatch.setattr(logs, "load_tokenizer", load)


def read(path, tokenizer=None, warnings=None):
    """[(step, [(prompt, tokens, epoch)])] of a log."""
    warn = warnings.append if warnings is not None else pytest.fail
    return [
        (step.number, [(r.prompt.tolist(), r.tokens.tolist(), r.epoch) for r in step.rollouts])
        for step in read_steps(path, tokenizer, warn)
    ]


TWO_STEPS = [(0, [([1, 2], [3, 4], 0), ([1, 2], [5], 0)]), (1, [([1, 2], [6, 7], 1)])]


# paceline's own


def test_a_trace_of_paceline_is_read_with_the_prompts_beside_it(tmp_path):
    path = write_trace(tmp_path, [[[3, 4], [5]], [[6]]])
    assert read(path) == [(0, [([*PROMPT], [3, 4], 0), ([*PROMPT], [5], 0)]), (1, [([*PROMPT], [6], 1)])]


def test_a_run_of_paceline_is_read_by_its_folder(tmp_path):
    row = {"epoch": 0, "step": 0, "prompt_id": 4, "sample_idx": 0, "reward": 1.0, "tokens": [3], "task": "sums"}
    write_lines(tmp_path / "rollouts.jsonl", [{**row, "logprobs": [-0.5], "version": 0, "finish": "stop"}])
    write_lines(tmp_path / "metrics.jsonl", [{"step": 0}])
    prompts = [{"prompt_id": 4, "task": task, "tokens": ids} for task, ids in (("sums", [1, 2]), ("other", [9]))]
    write_lines(tmp_path / "prompts.jsonl", prompts)
    assert read(tmp_path) == [(0, [([1, 2], [3], 0)])]


def test_a_prompt_that_is_not_beside_the_trace_is_named(tmp_path):
    path = write_trace(tmp_path, [[[3]]])
    write_lines(tmp_path / "tiny.prompts.jsonl", [{"prompt_id": 5, "tokens": [1]}])
    with pytest.raises(LogError, match=r"tiny\.jsonl:1: prompt 0 is not in the prompts file beside it"):
        read(path)


# Logs with token ids


def test_slime_samples_are_cut_at_their_response_length(tmp_path):
    samples = [
        {"group_index": 0, "index": i, "prompt": "p", "tokens": [1, 2, *tokens], "response_length": len(tokens)}
        for i, tokens in enumerate(([3, 4], [5], [6, 7]))
    ]
    lines = [{"rollout_id": 8, "samples": samples[:2]}, {"rollout_id": 9, "samples": samples[2:]}]
    assert read(write_lines(tmp_path / "dump.jsonl", lines)) == TWO_STEPS
    write_lines(tmp_path / "rollout_2.jsonl", samples[:2])
    write_lines(tmp_path / "rollout_10.jsonl", samples[2:])
    (tmp_path / "dump.jsonl").unlink()
    assert read(tmp_path) == TWO_STEPS


def test_slime_with_an_impossible_length_names_the_line(tmp_path):
    path = write_lines(tmp_path / "1.jsonl", [{"tokens": [1, 2], "response_length": 2}])
    with pytest.raises(LogError, match=r"1\.jsonl:1: a row of slime that cannot be read: response_length 2 of 2"):
        read(path)


def test_prime_rl_trajectories_are_read_from_their_step_folders(tmp_path):
    def turn(prompt, completion):
        return {"prompt": [], "completion": [], "tokens": {"prompt_ids": prompt, "completion_ids": completion}}

    for step, rollouts in ((2, ([3, 4], [5])), (10, ([6, 7],))):
        folder = tmp_path / "rollouts" / f"step_{step}"
        folder.mkdir(parents=True)
        rows = [{"example_id": 1, "reward": 1.0, "trajectory": [turn([1, 2], tokens)]} for tokens in rollouts]
        write_lines(folder / "train_rollouts.jsonl", rows)
        write_lines(folder / "eval_rollouts.jsonl", [{"example_id": 9}])
        write_lines(folder / "all_rollouts.jsonl", [{"example_id": 9}])
    assert read(tmp_path) == TWO_STEPS


def test_the_turns_of_a_conversation_share_their_history(tmp_path):
    turns = [
        {"tokens": {"prompt_ids": [1, 2], "completion_ids": [3]}},
        {"tokens": {"prompt_ids": [1, 2, 3, 8], "completion_ids": [4]}},
    ]
    path = write_lines(tmp_path / "train_rollouts.jsonl", [{"example_id": 1, "trajectory": turns}])
    (step,) = read_steps(path, None, pytest.fail)
    assert [r.prompt.tolist() for r in step.rollouts] == [[1, 2], [1, 2, 3, 8]]
    assert step.rollouts[0].key == step.rollouts[1].key


def test_prime_rl_message_nodes_are_read_along_their_parents(tmp_path):
    nodes = [
        {"parent": None, "sampled": False, "message": {"role": "user"}, "token_ids": [1, 2], "mask": [False, False]},
        {"parent": 0, "sampled": True, "message": {}, "token_ids": [9, 3, 4], "mask": [False, True, True]},
        {"parent": 1, "sampled": False, "message": {"role": "tool"}, "token_ids": [8], "mask": [False]},
        {"parent": 2, "sampled": True, "message": {}, "token_ids": [9, 5], "mask": [False, True]},
    ]
    path = write_lines(tmp_path / "traces.jsonl", [{"id": "a", "nodes": nodes}])
    assert read(path) == [(0, [([1, 2, 9], [3, 4], 0), ([1, 2, 9, 3, 4, 8, 9], [5], 0)])]


@pytest.mark.parametrize(
    ("prompt", "response"), [("prompt_ids", "completion_ids"), ("prompt_token_ids", "response_ids")]
)
def test_pairs_of_token_ids_are_read(tmp_path, prompt, response):
    rows = [{"step": step, prompt: [1, 2], response: tokens} for step, tokens in ((0, [3, 4]), (0, [5]), (3, [6, 7]))]
    assert read(write_lines(tmp_path / "a.jsonl", rows)) == TWO_STEPS


# Logs of text


def verl(step, output):
    return {"input": "1 2", "output": output, "gts": "x", "score": 1.0, "step": step}


def skyrl(step, text):
    return {"step": step, "prompt": "1 2", "text": text, "tokens": 2, "reward": 1.0, "stop_reason": "stop"}


def skyrl_evaluation(step, text):
    return {"input_prompt": "1 2", "output_response": text, "score": 1.0, "stop_reason": "stop", "step": step}


def trl(step, completion):
    return {"step": str(step), "prompt": "1 2", "completion": completion, "accuracy": 1.0, "advantage": 0.1}


def trl_messages(step, completion):
    answer = [{"role": "assistant", "content": completion}]
    return {"step": step, "prompt": [{"role": "user", "content": "1 2"}], "completion": answer}


def prime_text(step, completion):
    return {"example_id": 4, **trl_messages(step, completion)}


def prime_untokenised(step, completion):
    return {"step": step, "trajectory": [{**trl_messages(step, completion), "tokens": None}]}


def slime_text(step, response):
    return {"step": step, "prompt": "1 2", "response": response}


TEXTS = [verl, skyrl, skyrl_evaluation, trl, trl_messages, prime_text, prime_untokenised, slime_text]


@pytest.mark.parametrize("row", TEXTS, ids=lambda row: row.__name__)
def test_text_is_read_with_the_tokenizer_that_is_named(tmp_path, row, words):
    path = write_lines(tmp_path / "a.jsonl", [row(1, "3 4"), row(1, "5"), row(2, "6 7")])
    assert read(path, "words") == TWO_STEPS


@pytest.mark.parametrize("row", TEXTS, ids=lambda row: row.__name__)
def test_text_without_a_tokenizer_is_one_line(tmp_path, row):
    path = write_lines(tmp_path / "a.jsonl", [row(1, "3 4")])
    with pytest.raises(LogError, match=r"a\.jsonl:1: holds text, not token ids; name the policy's .* --tokenizer$"):
        read(path)


def test_verl_files_are_read_in_the_order_of_their_steps(tmp_path, words):
    for step, outputs in ((2, ["3 4", "5"]), (10, ["6 7"])):
        write_lines(tmp_path / f"{step}.jsonl", [verl(step, output) for output in outputs])
    assert read(tmp_path, "words") == TWO_STEPS


def test_trl_parquet_files_are_read(tmp_path, words):
    import pyarrow
    import pyarrow.parquet

    for step, completions in ((2, ["3 4", "5"]), (10, ["6 7"])):
        table = pyarrow.Table.from_pylist([trl(step, completion) for completion in completions])
        pyarrow.parquet.write_table(table, tmp_path / f"completions_{step:05d}.parquet")
    assert read(tmp_path, "words") == TWO_STEPS


def test_token_ids_in_parquet_are_read(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"step": 1, "prompt_ids": [1, 2], "completion_ids": [3]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == [(0, [([1, 2], [3], 0)])]


def test_a_real_tokenizer_folder_is_loaded(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]").save_pretrained(tmp_path / "tok")
    path = write_lines(tmp_path / "a.jsonl", [trl(0, "b b c"), trl_messages(0, "a b")])
    found = read(path, str(tmp_path / "tok"))
    assert [tokens for _, tokens, _ in found[0][1]] == [[1, 1, 2], [0, 1]]


def test_a_tokenizer_that_cannot_be_loaded_is_one_line(tmp_path):
    (tmp_path / "tok").mkdir()
    with pytest.raises(PacelineError, match=r"^--tokenizer .*tok: cannot be loaded as a tokenizer: ") as raised:
        load_tokenizer(str(tmp_path / "tok"))
    assert "\n" not in str(raised.value)


# Steps, epochs, files


def test_a_missing_epoch_counts_the_earlier_visits_of_the_prompt(tmp_path):
    rows = [
        {"step": step, "prompt_ids": prompt, "completion_ids": [5]}
        for step, prompt in ((0, [1]), (0, [2]), (1, [1]), (1, [1]), (2, [2]), (3, [1]))
    ]
    found = read(write_lines(tmp_path / "a.jsonl", rows))
    assert [[epoch for _, _, epoch in rollouts] for _, rollouts in found] == [[0, 0], [1, 1], [1], [2]]


def test_a_recorded_epoch_is_kept(tmp_path):
    write_trace(tmp_path, [])
    row = {"epoch": 7, "step": 3, "prompt_id": 0, "sample_idx": 0, "reward": 0.0, "tokens": [1]}
    write_lines(tmp_path / "tiny.jsonl", [row])
    assert read(tmp_path / "tiny.jsonl")[0][1][0][2] == 7


def test_one_step_is_in_memory_at_a_time(tmp_path):
    path = write_trace(tmp_path, [[[1]], [[2]]])
    with path.open("a") as file:
        file.write("{broken\n")
    steps = read_steps(path, None, pytest.fail)
    assert next(steps).rollouts[0].tokens.tolist() == [1], "the first step is there before the file is read to its end"
    with pytest.raises(LogError, match=r"tiny\.jsonl:3: not JSON"):
        list(steps)


def test_gzipped_lines_are_read(tmp_path):
    line = json.dumps({"step": 0, "prompt_ids": [1, 2], "completion_ids": [3]}).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line + b"\n"))
    assert read(tmp_path / "a.jsonl.gz") == [(0, [([1, 2], [3], 0)])]


def test_names_drop_the_suffixes(tmp_path):
    for name in ("a.jsonl", "a.jsonl.gz", "a.parquet"):
        (tmp_path / name).touch()
        assert trace_name(tmp_path / name) == "a"
    (tmp_path / "v1.5").mkdir()
    assert trace_name(tmp_path / "v1.5") == "v1.5"


# Bad input


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{broken\n", r"a\.jsonl:2: not JSON: "),
        (b"[1, 2]\n", r"a\.jsonl:2: a rollout is a JSON object, got list"),
        (b"\xff\xfe\n", r"a\.jsonl:2: not JSON: "),
        (
            b'{"loss": 1.0, "lr": 2}\n',
            r"a\.jsonl:2: neither token ids nor text .*it has: loss, lr\); known logs: .*verl",
        ),
        (b'{"prompt_ids": [1], "completion_ids": [1.5]}\n', r"a\.jsonl:2: the response must be a list of token ids"),
        (b'{"prompt_ids": ["x"], "completion_ids": [1]}\n', r"a\.jsonl:2: the prompt must be a list of token ids"),
        (b'{"prompt_ids": [1], "completion_ids": [-1]}\n', r"a\.jsonl:2: the response holds an id below 0"),
        (
            b'{"prompt_ids": [1], "completion_ids": [3000000000]}\n',
            r"a\.jsonl:2: the response holds an id below 0 or ab",
        ),
        (b'{"trajectory": [{"tokens": {"prompt_ids": [1]}}]}\n', r"a\.jsonl:2: .* lacks 'completion_ids'"),
        (b'{"trajectory": [3]}\n', r"a\.jsonl:2: a row of prime-rl \(trajectory\) that cannot be read"),
        (b'{"nodes": [{"parent": 0, "sampled": true}]}\n', r"a\.jsonl:2: .* the nodes form a circle"),
        (b'{"step": "x", "prompt_ids": [1], "completion_ids": [1]}\n', r"a\.jsonl:2: a row of TRL .* cannot be read"),
    ],
)
def test_a_broken_line_is_named_in_one_line(tmp_path, line, message):
    good = b'{"step": 0, "prompt_ids": [1], "completion_ids": [2]}\n'
    (tmp_path / "a.jsonl").write_bytes(good + line)
    with pytest.raises(LogError, match=message) as raised:
        read(tmp_path / "a.jsonl")
    assert "\n" not in str(raised.value)


def test_a_torn_last_line_is_passed_over_with_a_warning(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"step": 0, "prompt_ids": [1], "completion_ids": [2]}\n{"step": 0, "pro')
    warnings = []
    assert read(tmp_path / "a.jsonl", warnings=warnings) == [(0, [([1], [2], 0)])]
    assert warnings == [f"{tmp_path / 'a.jsonl'}:2: the last line is torn and was passed over"]


def test_an_empty_response_is_passed_over_with_a_warning(tmp_path):
    rows = [{"step": 0, "prompt_ids": [1], "completion_ids": tokens} for tokens in ([], [2])]
    warnings = []
    assert read(write_lines(tmp_path / "a.jsonl", rows), warnings=warnings) == [(0, [([1], [2], 0)])]
    assert warnings == [f"{tmp_path / 'a.jsonl'}:1: an empty response was passed over"]


def test_nothing_to_read_is_said(tmp_path):
    with pytest.raises(LogError, match="absent: no such file or folder"):
        log_files(tmp_path / "absent")
    with pytest.raises(LogError, match="holds no rollout log"):
        log_files(tmp_path)
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(LogError, match=r"a\.jsonl: holds no rollout"):
        read(tmp_path / "a.jsonl")


def test_a_pickle_is_refused_with_the_way_out(tmp_path):
    (tmp_path / "rollout_1.pt").touch()
    for path in (tmp_path, tmp_path / "rollout_1.pt"):
        with pytest.raises(LogError, match=r"rollout_1\.pt: a torch pickle, which is never loaded; write its samples"):
            log_files(path)


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(LogError, match=r"reading Parquet needs pyarrow; pip install 'paceline\[parquet\]'"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize(("name", "message"), [("a.parquet", "not a Parquet file"), ("a.jsonl.gz", "cannot be read")])
def test_a_file_that_is_not_what_it_says_is_one_line(tmp_path, name, message):
    (tmp_path / name).write_bytes(b"hello")
    with pytest.raises(LogError, match=message) as raised:
        read(tmp_path / name)
    assert "\n" not in str(raised.value)


def test_token_ids_are_int32(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"prompt_ids": [1], "completion_ids": [2]}])
    (step,) = read_steps(path, None, pytest.fail)
    assert step.rollouts[0].tokens.dtype == step.rollouts[0].prompt.dtype == np.int32
