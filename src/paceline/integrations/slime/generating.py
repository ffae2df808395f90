"""slime's samples decoded by vLLM with paceline in it, token ids in and out."""

import asyncio
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from paceline.schema import PacelineError

#: slime's sampling parameters, by what vLLM calls them.
_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "skip_special_tokens": "skip_special_tokens",
    "spaces_between_special_tokens": "spaces_between_special_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "sampling_seed": "seed",
}
#: How a response ended, by slime's name of it; what else vLLM says is a failure.
_STATUS = {"stop": "COMPLETED", "length": "TRUNCATED", "abort": "ABORTED"}
_SECONDS = 3600.0


class SlimeError(PacelineError):
    """A sample that cannot be decoded as slime asks; the message says what to set."""


async def generate(args: Any, sample: Any, sampling_params: Mapping[str, Any], evaluation: bool = False) -> Any:
    """The sample with a response of the model that ``args.paceline_url`` serves, the URL that ``paceline serve`` tells.

    A bearer token comes from the environment variable PACELINE_TOKEN. Samples of a group draft from one another.
    ``rollout_log_probs`` are natural logarithms, raw or processed as the server's ``--logprobs-mode`` says. Weights do
    not follow slime's trainer: for evaluation and ``--debug-rollout-only``. Raises SlimeError, one line, elsewhere, and
    for what vLLM cannot honour.
    """
    if not evaluation and not getattr(args, "debug_rollout_only", False):
        raise SlimeError(
            "--custom-generate-function-path: paceline serve does not get the weights that slime trains, so "
            "the samples would be another policy's; use it with --debug-rollout-only, or for evaluation data alone"
        )
    url = getattr(args, "paceline_url", None)
    if url is None:
        raise SlimeError("paceline_url is not set; put it into the file of --custom-config-path, http://HOST:PORT/v1")
    if sample.response or not isinstance(sample.prompt, str):
        what = "a response that is begun" if sample.response else "chat messages; set --apply-chat-template"
        raise SlimeError(f"sample {sample.index}: {what} cannot be decoded here")
    prompt = _tokenizer(args.hf_checkpoint).encode(sample.prompt, add_special_tokens=False)
    return answered(sample, prompt, await asyncio.to_thread(_complete, url, body(sample, prompt, sampling_params)))


def body(sample: Any, prompt: list[int], sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    """The request for vLLM's completions, without the model's name; SlimeError for a parameter that it has not."""
    given = {name: value for name, value in sampling_params.items() if value is not None}
    if strangers := sorted(set(given) - set(_NAMES)):
        raise SlimeError(f"sampling_params: {strangers[0]} is nothing that vLLM honours; known: {', '.join(_NAMES)}")
    renamed = {_NAMES[name]: value for name, value in given.items()}
    group = {} if sample.group_index is None else {"vllm_xargs": {"paceline_group": str(sample.group_index)}}
    return {**renamed, "prompt": prompt, "logprobs": 0, "return_token_ids": True, **group}


def answered(sample: Any, prompt: list[int], answer: Mapping[str, Any]) -> Any:
    """The sample with what vLLM answered, in slime's fields; SlimeError where the answer lacks token ids."""
    choice = answer["choices"][0]
    tokens = choice.get("token_ids")
    if tokens is None:
        raise SlimeError("the server's answer has no token ids; it is not a vLLM that knows return_token_ids")
    sample.tokens = [*prompt, *tokens]
    sample.response = choice["text"]
    sample.response_length = len(tokens)
    sample.rollout_log_probs = list((choice.get("logprobs") or {}).get("token_logprobs") or [])
    sample.status = getattr(sample.Status, _STATUS.get(choice["finish_reason"], "FAILED"))
    return sample


def _complete(url: str, request: dict[str, Any]) -> dict[str, Any]:
    return _ask(f"{url}/completions", {"model": _model(url), **request})


@lru_cache
def _model(url: str) -> str:
    return str(_ask(f"{url}/models")["data"][0]["id"])


def _ask(url: str, data: dict[str, Any] | None = None) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    if token := os.environ.get("PACELINE_TOKEN"):
        headers["Authorization"] = f"Bearer {token}"
    content = None if data is None else msgspec.json.encode(data)
    try:
        with urllib.request.urlopen(urllib.request.Request(url, content, headers), timeout=_SECONDS) as answer:
            found: dict[str, Any] = msgspec.json.decode(answer.read())
            return found
    except urllib.error.HTTPError as error:
        raise SlimeError(f"{url}: {error.code}: {error.read(400).decode(errors='replace').strip()}") from None
    except (urllib.error.URLError, OSError, msgspec.DecodeError) as error:
        raise SlimeError(f"{url}: {getattr(error, 'reason', error)}; is paceline serve running there?") from None


@lru_cache
def _tokenizer(path: str) -> Any:
    from paceline.files import named
    from paceline.forward.model_files import load_tokenizer, model_source

    return load_tokenizer(model_source(str(path), "hf_checkpoint"), f"hf_checkpoint={named(path)}")
