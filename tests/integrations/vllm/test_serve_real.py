"""The real server: groups over HTTP draft, both families of metrics are there, a token is needed, history is kept."""

import json
import os
import string
import urllib.error
import urllib.request

import pytest

pytest.importorskip("vllm")
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paceline.config import PluginConfig
from paceline.history.snapshot import read_snapshot
from paceline.integrations.vllm.serve import Server
from ports import free_port
from vllm_models import save_tiny

pytestmark = pytest.mark.vllm


def save_tokenizer(directory):
    """A token for each letter, so that any answer of the tiny model is a text."""
    letters = string.ascii_letters + " .,:{}[]"
    vocabulary = {"<eos>": 0, "<unk>": 1, **{letter: 2 + at for at, letter in enumerate(letters)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")
    fast.save_pretrained(directory)


def counted(base, *names):
    with urllib.request.urlopen(f"{base}/metrics", timeout=30) as page:
        lines = [line.split() for line in page.read().decode().splitlines() if not line.startswith("#")]
    return [sum(float(line[1]) for line in lines if line[0].split("{")[0] == name) for name in names]


def answer(url, model, token):
    body = {
        "model": model,
        "prompt": "hello wOrld",
        "max_tokens": 40,
        "temperature": 0,
        "vllm_xargs": {"paceline_group": "a"},
    }
    headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"{url}/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as found:
        return json.load(found)["choices"][0]["text"]


def test_a_served_model_drafts_over_http_and_keeps_its_history(tmp_path):
    model = str(save_tiny(tmp_path / "model"))
    save_tokenizer(model)
    plugin = PluginConfig(snapshot=str(tmp_path / "history.plh"))
    plugin.budget.mode = "fixed"
    environ = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    arguments = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "128"]
    server = Server(model, plugin, port=free_port(), token="secret", arguments=arguments, environ=environ)
    with server.running() as process:
        served = server.wait_until_ready(process, 300)
        base = served.url.removesuffix("/v1")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            answer(served.url, model, "guess")
        first = answer(served.url, model, "secret")
        assert len(first) > 8
        (before,) = counted(base, "paceline_tokens_accepted_total")
        assert answer(served.url, model, "secret") == first
        for _ in range(40):  # counters are handed on twice a second, while something is decoded
            accepted, theirs = counted(
                base, "paceline_tokens_accepted_total", "vllm:spec_decode_num_accepted_tokens_total"
            )
            if accepted > before + len(first) // 2:
                break
            answer(served.url, model, "secret")
        assert accepted > before + len(first) // 2
        assert theirs > 0
    assert process.returncode == 0
    snapshot = read_snapshot(tmp_path / "history.plh")
    assert len(snapshot.records[-1]) >= 2 * len(first)
