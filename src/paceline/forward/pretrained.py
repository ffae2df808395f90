"""Loads a causal language model of transformers whole, or says in one line why not."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from paceline.schema import PacelineError


class ModelError(PacelineError):
    """A model that cannot be had or used as asked; the message is one line."""


def model_source(path: str, key: str, also: str = "") -> Path | str:
    """Where transformers finds the model ``path``: a directory, or a hub id handed through.

    ``key`` is the configuration's name of the path and ``also`` what else it may be, for the message of ModelError: for
    a directory that is missing or holds no ``config.json``.
    """
    directory = Path(path).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ModelError(f"{key}={path}: no config.json in this directory; give a transformers model directory")
        return directory
    if directory.exists():
        raise ModelError(f"{key}={path}: this is a file; give the directory that holds config.json")
    if re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path) and not _parent_is_local(directory):
        return path
    raise ModelError(f"{key}={path}: no such directory; give a model directory{',' if also else ' or'} a hub id{also}")


def load_pretrained(
    source: Path | str, key: str, path: str, dtype: str, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model at ``source`` with every weight from its files, on the CPU; ``key`` and ``path`` are for the message.

    Raises ModelError where it cannot be loaded, and with the name of the first tensor that the files lack, or hold in
    another shape.
    """
    try:
        with no_progress_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source,
                dtype=getattr(torch, dtype),
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        raise ModelError(f"{key}={path}: cannot be loaded as a causal language model: {one_line(error)}") from None
    model, report = loaded
    for problem in ("missing_keys", "mismatched_keys"):
        if report[problem]:
            first = sorted(map(str, report[problem]))[0]
            raise ModelError(f"{key}={path}: {problem.replace('_keys', '')} tensor {first} in its weights")
    assert isinstance(model, PreTrainedModel)
    return model


def one_line(error: Exception) -> str:
    """The message of ``error`` without its line breaks."""
    return " ".join(str(error).split())


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Within it transformers draws no bars of its own over those of the run."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _parent_is_local(directory: Path) -> bool:
    """Whether ``runs/x`` was meant as a path: its first part is a directory here."""
    return len(directory.parts) > 1 and Path(directory.parts[0]).is_dir()
