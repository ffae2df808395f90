"""slime's hooks: called as slime 0.4.0 calls them, with a sample of its fields."""

import asyncio
import inspect
import json
import threading
from dataclasses import dataclass, field
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from paceline.integrations import slime
from paceline.integrations.slime import SlimeError, generating
from paceline.simulate.logs import read_steps


@dataclass
class Sample:
    """The fields of ``slime.utils.types.Sample`` that a hook meets."""

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    prompt: object = "to be continued"
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    rollout_log_probs: list[float] | None = None
    status: Status = Status.PENDING


def test_the_hooks_have_the_parameters_that_slime_passes():
    """As ``slime/ray/rollout.py`` and ``slime/rollout/sglang_rollout.py`` call them: the first by position."""
    recorded = tuple(inspect.signature(slime.record).parameters)
    assert recorded == ("rollout_id", "args", "samples", "rollout_extra_metrics", "rollout_time")
    assert tuple(inspect.signature(slime.generate).parameters) == ("args", "sample", "sampling_params", "evaluation")
    assert inspect.iscoroutinefunction(slime.generate)


def test_what_is_recorded_is_a_log_that_replay_reads(tmp_path):
    args = SimpleNamespace(paceline_log=str(tmp_path / "log"))
    for rollout_id in (2, 10):
        samples = [Sample(tokens=[1, 2, 3, rollout_id], response_length=2), Sample(tokens=[1, 2, 9], response_length=1)]
        assert slime.record(rollout_id, args, samples, {"any": 1.0}, 0.5) is False
    steps = list(read_steps(tmp_path / "log", None, pytest.fail))
    assert [[(one.prompt.tolist(), one.tokens.tolist()) for one in step.rollouts] for step in steps] == [
        [([1, 2], [3, last]), ([1, 2], [9])] for last in (2, 10)
    ]
    assert [step.rollouts[0].epoch for step in steps] == [0, 1]


def test_a_rollout_that_is_repeated_after_a_resume_is_there_once(tmp_path):
    args = SimpleNamespace(paceline_log=tmp_path)
    for last in (3, 4):
        slime.record(0, args, [Sample(tokens=[1, last], response_length=1)], None, 0.5)
    (step,) = read_steps(tmp_path, None, pytest.fail)
    assert [one.tokens.tolist() for one in step.rollouts] == [[4]]


def test_a_folder_that_cannot_be_written_is_told_and_the_training_goes_on(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    sample = Sample(tokens=[1, 2], response_length=1)
    assert slime.record(0, SimpleNamespace(paceline_log=tmp_path / "file"), [sample], None, 0.5) is False
    assert slime.record(0, SimpleNamespace(), [sample], None, 0.5) is False
    assert "is not recorded" in caplog.text
    assert "paceline_log" in caplog.text


@pytest.fixture
def server(monkeypatch):
    """An endpoint that answers as vLLM's completions do; ``requests`` are those it had, ``choice`` what it says."""
    told = SimpleNamespace(
        requests=[],
        tokens=[],
        choice={
            "text": " and so on",
            "token_ids": [7, 8, 9],
            "finish_reason": "stop",
            "logprobs": {"token_logprobs": [-0.5, -0.25, -1.0]},
        },
    )

    class Handler(BaseHTTPRequestHandler):
        def reply(self, body, code=200):
            self.send_response(code)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def do_GET(self):
            self.reply({"data": [{"id": "policy"}]})

        def do_POST(self):
            told.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            told.tokens.append(self.headers.get("Authorization"))
            self.reply(
                {"choices": [told.choice]} if told.choice else {"error": "no such thing"}, 200 if told.choice else 400
            )

        def log_message(self, *_):
            pass

    monkeypatch.setattr(
        generating, "_tokenizer", lambda _path: SimpleNamespace(encode=lambda text, **_: [4, len(text)])
    )
    generating._model.cache_clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()
        told.args = SimpleNamespace(
            paceline_url=f"http://127.0.0.1:{httpd.server_port}/v1", hf_checkpoint="policy", debug_rollout_only=True
        )
        yield told
        httpd.shutdown()


SLIMES_OWN = {
    "temperature": 0.8,
    "top_p": 1.0,
    "top_k": -1,
    "max_new_tokens": 32,
    "stop": None,
    "stop_token_ids": [5],
    "skip_special_tokens": True,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
}


def test_a_sample_comes_back_with_the_tokens_that_were_sampled(server, monkeypatch):
    monkeypatch.setenv("PACELINE_TOKEN", "secret")
    sample = Sample(group_index=3, index=1, prompt="abc")
    assert asyncio.run(slime.generate(server.args, sample, dict(SLIMES_OWN))) is sample
    assert (sample.tokens, sample.response_length, sample.response) == ([4, 3, 7, 8, 9], 3, " and so on")
    assert sample.rollout_log_probs == [-0.5, -0.25, -1.0]
    assert sample.status is Sample.Status.COMPLETED
    (request,) = server.requests
    assert request == {
        "model": "policy", "prompt": [4, 3], "temperature": 0.8, "top_p": 1.0, "top_k": -1, "max_tokens": 32,
        "stop_token_ids": [5], "skip_special_tokens": True, "include_stop_str_in_output": True,
        "spaces_between_special_tokens": False, "logprobs": 0, "return_token_ids": True,
        "vllm_xargs": {"paceline_group": "3"},
    }  # fmt: skip
    assert server.tokens == ["Bearer secret"]


@pytest.mark.parametrize(
    ("reason", "status"), [("length", "TRUNCATED"), ("abort", "ABORTED"), ("error", "FAILED"), (None, "FAILED")]
)
def test_how_a_response_ended_is_told_in_slimes_words(server, reason, status):
    server.choice["finish_reason"] = reason
    sample = asyncio.run(slime.generate(server.args, Sample(), {}, evaluation=False))
    assert sample.status is Sample.Status[status]


def test_weights_that_do_not_follow_are_refused_in_training_alone(server):
    server.args.debug_rollout_only = False
    with pytest.raises(SlimeError, match="does not get the weights that slime trains"):
        asyncio.run(slime.generate(server.args, Sample(), {}))
    assert asyncio.run(slime.generate(server.args, Sample(), {}, evaluation=True)).response


def test_what_cannot_be_honoured_is_one_line(server):
    for sample, params, match in (
        (Sample(), {"ebnf": "x"}, "ebnf is nothing that vLLM honours"),
        (Sample(response="be"), {}, "a response that is begun"),
        (Sample(prompt=[{"role": "user"}]), {}, "--apply-chat-template"),
    ):
        with pytest.raises(SlimeError, match=match):
            asyncio.run(slime.generate(server.args, sample, params))
    assert not server.requests
    server.choice["token_ids"] = None
    with pytest.raises(SlimeError, match="no token ids"):
        asyncio.run(slime.generate(server.args, Sample(), {}))
    server.choice = None
    with pytest.raises(SlimeError, match=r"400.*no such thing"):
        asyncio.run(slime.generate(server.args, Sample(), {}))


def test_a_server_that_is_not_there_is_one_line(server):
    with pytest.raises(SlimeError, match="paceline_url is not set"):
        asyncio.run(slime.generate(SimpleNamespace(debug_rollout_only=True), Sample(), {}))
    server.args.paceline_url = "http://127.0.0.1:9/v1"
    with pytest.raises(SlimeError, match="is paceline serve running there"):
        asyncio.run(slime.generate(server.args, Sample(), {}))
