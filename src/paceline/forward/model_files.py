"""Reads what a model's folder holds: configuration, tokenizer, and weights in safetensors; everything there is foreign.

What transformers, tokenizers or safetensors raise over such a file becomes a ``ModelError`` of one line that names it.
No pickle is read, nothing in a file picks code or a kernel, and sizes are compared with the weights' headers before
memory is taken.
"""

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.files import named, open_regular, read_json_object
from paceline.schema import PacelineError
from paceline.terminal import printable

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
#: Below it transformers runs code that ``config.json`` names (CVE-2026-4372).
OLDEST_TRANSFORMERS = "5.3"
_MAX_CONFIG_BYTES, _MAX_INDEX_BYTES, _MAX_TOKENIZER_BYTES = 16 << 20, 64 << 20, 512 << 20
#: Names of attention and expert functions that transformers itself has; any other, such as ``owner/kernel``, is code.
_BUILT_IN = re.compile(r"(paged\|)?(eager|sdpa|flash_attention_[0-9]|flex_attention|grouped_mm|batched_mm)")
_IMPLEMENTATIONS = re.compile(r"_*(attn|attention|experts)_implementation(_\w+)?")
#: Settings that choose files or code, and which no model needs that paceline can run.
_REFUSED = {
    "kernels": "names code to run",
    "use_kernels": "names code to run",
    "kernel_config": "names code to run",
    "transformers_weights": "names another file of weights; model.safetensors is read",
    "quantization_config": "quantized weights can be neither trained nor updated; give the model unquantized",
}
#: Counts of modules that are made one by one.
_COUNTS = re.compile(r"(n|num)_\w*(layers?|experts|blocks|depths?)|n_layer|depth|num_labels")
_SIZES = re.compile(
    r"vocab_size|hidden_size|intermediate_size|head_dim|n_embd|n_head|n_positions|num_attention_heads"
    r"|num_key_value_heads|max_position_embeddings|num_hidden_layers|n_layer"
)
#: Most modules of a kind where no weights are there to count them by, and what the fewest weights allow: experts may
#: share a tensor.
_MOST_MODULES, _LEAST_MODULES = 10_000, 512
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


class ModelError(PacelineError):
    """A model that cannot be had or used as asked; the message is one line."""


@dataclass(frozen=True)
class Stored:
    """A tensor of a safetensors file, by the file's header."""

    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def is_floating(self) -> bool:
        """Whether the values are floating-point numbers."""
        return self.dtype.startswith(("F", "BF"))


@contextlib.contextmanager
def foreign(where: object) -> Iterator[None]:
    """Turn whatever the body raises over a foreign file into a ModelError that starts with ``where``.

    Errors of paceline pass as they are. A panic of a Rust library is no ``Exception`` and is taken all the same.
    """
    try:
        yield
    except (PacelineError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise ModelError(f"{where}: {one_line(error)}") from error


@contextlib.contextmanager
def about(where: str) -> Iterator[None]:
    """Have every error of the body that paceline raises by name begin with ``where``, as a ModelError."""
    try:
        yield
    except PacelineError as error:
        if str(error).startswith(where):
            raise
        raise ModelError(f"{where}: {error}") from error


def one_line(error: BaseException) -> str:
    """The message of ``error`` in one printable line; its type where it has none, or where the message says little."""
    text = printable(" ".join(str(error).split()))
    if isinstance(error, KeyError) or not text:
        return f"{type(error).__name__} {text}".strip()
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return text


def model_source(path: str, key: str, also: str = "") -> Path | str:
    """Where transformers finds the model ``path``: a directory, or a hub id handed through.

    ``key`` is the configuration's name of the path and ``also`` what else it may be, for the message of ModelError: for
    a directory that is missing or holds no ``config.json``.
    """
    where = f"{key}={named(path)}"
    with foreign(where):  # a path that is too long, holds a NUL byte or may not be looked at
        directory = Path(path).expanduser()
        if directory.is_dir():
            if not (directory / CONFIG).is_file():
                raise ModelError(f"{where}: no config.json in this directory; give a transformers model directory")
            return directory
        if directory.exists():
            raise ModelError(f"{where}: this is a file; give the directory that holds config.json")
    if re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path) and not _parent_is_local(directory):
        return path
    raise ModelError(f"{where}: no such directory; give a model directory{',' if also else ' or'} a hub id{also}")


def read_config(folder: Path, modules: int = _MOST_MODULES) -> dict[str, Any]:
    """The settings of ``config.json`` in ``folder``, once they are known to name no code and no absurd count.

    ``modules`` is how many modules of a kind there can be: no more than the weights have tensors. Raises FileReadError
    or ModelError, each with the file.
    """
    file = folder / CONFIG
    config = read_json_object(file, _MAX_CONFIG_BYTES)
    check_settings(config, file, modules)
    return config


def check_settings(config: Mapping[str, Any], file: Path, modules: int = _MOST_MODULES) -> None:
    """ModelError where ``config``, read from ``file``, names code or a kernel, or holds an absurd size or count."""
    for key, value in _settings(config):
        where = f"{named(file)}: {printable(key, 80)}={printable(value, 80)}"
        if _IMPLEMENTATIONS.fullmatch(key):
            names = value.values() if isinstance(value, dict) else [value]
            if not all(name is None or (isinstance(name, str) and _BUILT_IN.fullmatch(name)) for name in names):
                raise ModelError(f"{where}: names code to run, and none is taken from a model's files; remove it")
        if key in _REFUSED and value:
            raise ModelError(f"{where}: {_REFUSED[key]}")
        if isinstance(value, float) and math.isnan(value):
            raise ModelError(f"{where}: not a number")
        if _SIZES.fullmatch(key) and value is not None and not _is_size(value):
            raise ModelError(f"{where}: must be a whole number above 0")
        if _COUNTS.fullmatch(key) and isinstance(value, int | float) and value > max(modules, _LEAST_MODULES):
            raise ModelError(f"{where}: more than the {modules} tensors of its weights can be")


def load_config(source: Path | str, where: str, trust_remote_code: bool = False, modules: int = _MOST_MODULES) -> Any:
    """The configuration of the model at ``source`` as transformers' class has it; ``where`` is for the message.

    Raises ModelError or FileReadError, one line with the file, for one that is malformed, names code or a kernel, or is
    of a kind that transformers does not know.
    """
    require_transformers()
    with about(where):
        return _config(source, where, trust_remote_code, modules)


def _config(source: Path | str, where: str, trust_remote_code: bool, modules: int) -> Any:
    from transformers import AutoConfig, PreTrainedConfig

    folder = fetched(source, where, weights=False)
    raw = read_config(folder, modules)
    check_token_ids(raw, folder / CONFIG)
    file = named(folder / CONFIG)
    if not trust_remote_code and not isinstance(raw.get("model_type"), str):
        raise ModelError(f"{file}: model_type must name the kind of model, got {printable(raw.get('model_type'), 80)}")
    for key, _ in _settings(raw):
        if key.startswith("__") or callable(getattr(PreTrainedConfig, key, None)):
            raise ModelError(f"{file}: {printable(key, 80)} is no setting of a model; remove it")
    with foreign(f"{where}: {file}: not a configuration that can be used"):
        config = AutoConfig.from_pretrained(
            source if trust_remote_code else folder, trust_remote_code=trust_remote_code
        )
        config.get_text_config()
        for name in ("_attn_implementation", "_experts_implementation"):
            if hasattr(type(config), name):  # chosen by who loads, never by the file
                setattr(config, name, None)
    return config


def load_generation_config(folder: Path) -> Any:
    """transformers' generation settings in ``folder``; None where it has none. ModelError with the file."""
    from transformers import GenerationConfig

    file = folder / GENERATION_CONFIG
    if not file.exists():
        return None
    raw = read_json_object(file, _MAX_CONFIG_BYTES)
    check_token_ids(raw, file)
    with foreign(f"{named(file)}: not generation settings that can be used"):
        return GenerationConfig.from_dict(raw)


def check_token_ids(settings: Mapping[str, Any], file: Path) -> None:
    """ModelError where a ``*_token_id`` of ``settings`` is neither a token id, a list of some, nor null."""
    for key in ("eos_token_id", "bos_token_id", "pad_token_id"):
        value = settings.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(i) is int and -1 <= i < 1 << 31 for i in ids):
            raise ModelError(f"{named(file)}: {key}={printable(value, 80)}: must be a token id, or a list of some")


def load_tokenizer(source: Path | str, where: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer at ``source``, a folder or hub id, once it has encoded and decoded a word.

    ``where`` starts the message of ModelError, for one that cannot be loaded or used.
    """
    require_transformers()
    with about(where):
        return _tokenizer(source, where, trust_remote_code)


def _tokenizer(source: Path | str, where: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    with foreign(where):
        folder = Path(source).expanduser()
        is_local = folder.is_dir()
    what = where
    if is_local:
        for name in _TOKENIZER_SETTINGS:
            if (folder / name).exists():
                read_json_object(folder / name, _MAX_INDEX_BYTES)
        present = [folder / name for name in _TOKENIZER_FILES if (folder / name).exists()]
        for file in present:
            with open_regular(file) as opened:
                if opened.seek(0, 2) > _MAX_TOKENIZER_BYTES:
                    raise ModelError(f"{named(file)}: is larger than any tokenizer that is read")
        what = f"{where}: {named(present[0] if present else folder)}"
        if (folder / CONFIG).exists():
            read_config(folder)
    with foreign(f"{what}: cannot be loaded as a tokenizer"), no_progress_bars():
        tokenizer = AutoTokenizer.from_pretrained(folder if is_local else source, trust_remote_code=trust_remote_code)
        tokenizer.decode(tokenizer("a b")["input_ids"])
        if not isinstance(len(tokenizer), int) or not isinstance(tokenizer.chat_template, str | dict | None):
            raise ModelError(f"{what}: chat_template must be text")
    return tokenizer


def has_tokenizer(source: Path | str) -> bool:
    """Whether a folder holds files of a tokenizer; of a hub id that is not known, and taken for true."""
    return not isinstance(source, Path) or any((source / name).exists() for name in _TOKENIZER_FILES)


def fetched(source: Path | str, where: str, *, weights: bool = True) -> Path:
    """The folder of a model: ``source`` itself, or where the files of a hub id that matter here lie once fetched.

    Without ``weights`` those are its configurations alone.
    """
    if isinstance(source, Path):
        return source
    from transformers.utils import cached_file

    def fetch(name: str, is_wanted: bool) -> Path | None:
        with foreign(f"{where}: cannot be fetched from the hub"), no_progress_bars():
            found = cached_file(source, name, _raise_exceptions_for_missing_entries=is_wanted)
            return None if found is None else Path(found)

    config = fetch(CONFIG, is_wanted=True)
    assert config is not None
    fetch(GENERATION_CONFIG, is_wanted=False)
    if not weights:
        return config.parent
    index = fetch(WEIGHTS_INDEX, is_wanted=False)
    for name in [WEIGHTS] if index is None else shard_names(index):
        if fetch(name, is_wanted=False) is None:
            raise ModelError(f"{where}: has no {name}, and weights are read from safetensors alone")
    return config.parent


def shard_names(index: Path) -> list[str]:
    """The files that an index of weights names, each once, sorted. ModelError for one outside the index's folder."""
    listed = read_json_object(index, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ModelError(f"{named(index)}: weight_map must name the file of each tensor")
    names = set()
    for tensor, name in listed.items():
        if (
            not isinstance(name, str)
            or not re.fullmatch(r"[\w.-][^\x00-\x1f/\\]*\.safetensors", name)
            or not _is_inside(index.parent / name)
        ):
            where = f"{named(index)}: weight_map of {printable(tensor, 80)}"
            raise ModelError(f"{where}: {printable(name, 80)} is no safetensors file of this folder")
        names.add(name)
    return sorted(names)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those that its index names, where it has one; ModelError for none."""
    index = folder / WEIGHTS_INDEX
    files = [folder / name for name in shard_names(index)] if index.exists() else sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted(file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        has = f"; {printable(pickles[0], 80)} is a pickle, which is never loaded" if pickles else ""
        raise ModelError(f"{named(folder)}: no weights in safetensors{has}; save the model as safetensors")
    return files


def weight_headers(files: list[Path]) -> dict[str, Stored]:
    """Dtype and shape of every tensor of ``files`` by name; no tensor is read. ModelError names the file."""
    found: dict[str, Stored] = {}
    for file in files:
        with opened_weights(file) as opened:
            for name in opened.keys():  # noqa: SIM118  it is no mapping
                part = opened.get_slice(name)
                found[name] = Stored(file, str(part.get_dtype()), tuple(part.get_shape()))
    return found


@contextlib.contextmanager
def opened_weights(file: Path) -> Iterator[Any]:
    """The safetensors file, open for reading; ModelError with its name for whatever is wrong with it."""
    from safetensors import safe_open

    open_regular(file).close()
    with foreign(f"{named(file)}: cannot be read as safetensors"), safe_open(file, framework="pt") as opened:
        yield opened


def read_tensors(file: Path) -> "dict[str, Tensor]":
    """Every tensor of a safetensors file, by name; ModelError with its name for whatever is wrong with it."""
    with opened_weights(file) as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  it is no mapping


def check_finite(tensors: "Mapping[str, Tensor]", where: object) -> None:
    """ModelError that names the first tensor which holds something else than finite floating-point numbers."""
    import torch

    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ModelError(f"{where}: {printable(name, 120)} holds {kind}, not floating-point numbers")
        if not torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor).all():
            raise ModelError(f"{where}: {printable(name, 120)} holds values that are not finite")


def require_transformers() -> None:
    """ModelError where the installed transformers is older than one that reads foreign configurations safely."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("transformers")
    except PackageNotFoundError:
        raise ModelError("transformers is not installed; pip install 'paceline[hf]'") from None
    if _numbers(found) < _numbers(OLDEST_TRANSFORMERS) or re.match(OLDEST_TRANSFORMERS + r"(\.0)*\.?(dev|a|rc)", found):
        raise ModelError(
            f"transformers {printable(found)} runs code that a model's config.json names (CVE-2026-4372); "
            f"pip install 'transformers>={OLDEST_TRANSFORMERS}'"
        )


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Within it transformers draws no bars of its own over those of the run."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Key and value of every setting, those of configurations inside the configuration too."""
    left: list[Mapping[str, Any]] = [config]
    while left:
        for key, value in left.pop().items():
            yield key, value
            if isinstance(value, dict) and key.endswith("_config"):
                left.append(value)


def _is_size(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return bool(values) and all(type(number) is int and 0 < number < 1 << 62 for number in values)


def _is_inside(file: Path) -> bool:
    """Whether ``file``, if it is there, lies in its folder; the hub's cache keeps links to its own blobs."""
    with contextlib.suppress(OSError, RuntimeError):
        folder, target = file.parent.resolve(), file.resolve()
        blobs = folder.parent.parent / "blobs"
        return target.parent == folder or (folder.parent.name == "snapshots" and target.parent == blobs)
    return False


def _numbers(version: str) -> tuple[int, ...]:
    start = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, start[0].split("."))) if start else ()


def _parent_is_local(directory: Path) -> bool:
    """Whether ``runs/x`` was meant as a path: its first part is a directory here."""
    return len(directory.parts) > 1 and Path(directory.parts[0]).is_dir()
