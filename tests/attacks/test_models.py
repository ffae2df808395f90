"""Hostile and broken files of models: one line with the file, no code that a file names, no memory that it asks for."""

import contextlib
import json
import os
import random
import resource
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.config import DraftModelConfig, HeadConfig, LoraConfig, PolicyConfig
from paceline.cotrain.export import stored_head, write_head
from paceline.drafters import PolicyTraits
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.heads import make_head
from paceline.engines.hf import HFEngine
from paceline.engines.vllm.model_files import default_eos_ids, text_of
from paceline.engines.vllm.weights import Catalogue
from paceline.forward import model_files
from paceline.forward.model_files import ModelError, load_config, require_transformers
from paceline.forward.pretrained import load_pretrained
from paceline.history.snapshot import Snapshot, encode_snapshot, read_snapshot
from paceline.rl import checkpoint
from paceline.rl.lora import read_adapter
from paceline.rl.policy import Policy
from paceline.schema import PacelineError
from tiny_policies import save_tiny

pytestmark = pytest.mark.attacks

#: Room for a load beyond what the process has already, in bytes of address space.
ROOM = 3 << 30
LORA = LoraConfig(r=2, alpha=4.0, layers=2)
DEEP = "[" * 100_000
#: What stands where a setting, or a part of one, was.
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    10**9,
    2**31,
    2**63,
    10**30,
    0.5,
    float("nan"),
    float("inf"),
    1e308,
    "",
    "x",
    "../../x",
    "\x1b[2J[red]",
    "é" * 3000,
    [],
    [1],
    ["x", None],
    [[[]]],
    {},
    {"a": 1},
    {"": {}},
    {"rope_type": "yarn", "factor": -1},
)
#: Bytes that are no JSON object, or none that can be read.
TEXTS: tuple[bytes, ...] = (
    b"",
    b"{",
    b"[]",
    b"null",
    b'"x"',
    b"3",
    b"\xff\xfe\x00",
    b"\x00" * 50,
    DEEP.encode(),
    b'{"a":' * 50_000,
    b"1" * 5_000,
    b"{}",
    b'{"": 1}',
    b"\x80\x04.",
    b"PK\x03\x04",
)


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Within it the process gets no more than ``ROOM`` bytes of address space."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def told(call: Callable[[], Any], *names: str) -> str:
    """What ``call`` was refused with, "" where it was not; one printable line that has one of ``names``."""
    try:
        with bounded():
            call()
    except PacelineError as error:
        line = str(error)
        assert line.isprintable()
        assert len(line) < 2000
        assert any(name in line for name in names), line
        assert "emory" not in line, line
        return line
    return ""


def load(folder: Path | str, **settings: Any) -> Policy:
    return Policy.load(PolicyConfig(path=str(folder), dtype="float32", device="cpu", **settings), 0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("whole")
    return {kind: save_tiny(home / kind, kind, chat=True) for kind in ("llama", "qwen3", "gpt2")}


@pytest.fixture
def folder(whole: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(whole["llama"], tmp_path / "model")


@pytest.fixture(scope="module")
def heads(whole: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    home = tmp_path_factory.mktemp("heads")
    policy = load(whole["llama"]).model
    found: dict[str, Any] = {"policy": policy}
    for kind, more in (("eagle3", {"vocabulary": 40}), ("block", {"block": 4}), ("mtp", {})):
        made = make_head(kind, HeadConfig(init="random", dtype="float32", **more), policy, seed=1)
        found[kind] = write_head(stored_head(made, policy="p", version=1), home / kind)
    return found


def edited(file: Path, key: str, value: Any) -> None:
    settings = json.loads(file.read_text())
    settings[key] = value
    file.write_text(json.dumps(settings))


def cases(file: Path, count: int, seed: int) -> Iterator[tuple[str, Any]]:
    """``count`` pairs of a setting of ``file`` and what stands there instead, drawn anew each time from ``seed``."""
    drawn = random.Random(seed)
    pairs = [(key, value) for key in json.loads(file.read_text()) for value in VALUES]
    return iter(drawn.sample(pairs, min(count, len(pairs))))


def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def with_header(file: Path, header: Any, body: bytes, size: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text + body)


def spoilt_weights(file: Path) -> Iterator[str]:
    """Write one broken safetensors file after the other to ``file``; yields what is wrong with it."""
    data, (header, body) = file.read_bytes(), header_of(file)
    name = next(key for key in header if key != "__metadata__" and len(header[key]["shape"]) == 2)
    for length in (0, 1, 7, 8, 9, 100, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:length])
        yield f"cut off at {length}"
    for size in (0, 1, len(data), 10**8, 2**40, 2**63, 2**64 - 1):
        with_header(file, header, body, size)
        yield f"a header of {size} bytes"
    for text in TEXTS:
        with_header(file, text, body)
        yield f"a header {text[:20]!r}"
    for key, value in (
        ("dtype", "F99"),
        ("dtype", 3),
        ("dtype", "I64"),
        ("shape", [10**9, 10**9]),
        ("shape", [-1]),
        ("shape", "x"),
        ("shape", [2**63]),
        ("shape", []),
        ("data_offsets", [0, 2**60]),
        ("data_offsets", [5, 1]),
        ("data_offsets", []),
        ("data_offsets", [-1, 3]),
    ):
        with_header(file, header | {name: header[name] | {key: value}}, body)
        yield f"{key}={value}"
    with_header(file, {key: value for key, value in header.items() if key != name}, body)
    yield "a tensor that is not listed"
    for tensors in (
        {},
        {"x\x1b[2J": torch.zeros(3)},
        {key: value.to(torch.int64) for key, value in whole_tensors(data).items()},
        {key: value[..., :1] for key, value in whole_tensors(data).items()},
        {key: value[None] for key, value in whole_tensors(data).items()},
        {key: value for key, value in whole_tensors(data).items() if key != name},
    ):
        save_file({key: value.contiguous() for key, value in tensors.items()}, file)
        yield f"{len(tensors)} other tensors"
    file.unlink()
    yield "no file"
    file.mkdir()
    yield "a folder"
    file.rmdir()
    os.mkfifo(file)
    yield "a pipe"
    file.unlink()
    file.symlink_to("/dev/zero")
    yield "a device"
    file.unlink()
    file.symlink_to(file.name)
    yield "a link to itself"
    file.unlink()
    file.write_bytes(data)


def whole_tensors(data: bytes) -> dict[str, torch.Tensor]:
    from safetensors.torch import load as load_bytes

    return load_bytes(data)


# A policy's folder


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_a_policy_of_any_configuration_loads_or_is_one_line(whole: dict[str, Path], tmp_path: Path, kind: str) -> None:
    folder = shutil.copytree(whole[kind], tmp_path / "model")
    file = folder / "config.json"
    text, refused = file.read_text(), 0
    for key, value in cases(file, 70, seed=1):
        file.write_text(text)
        edited(file, key, value)
        refused += bool(told(lambda: load(folder), "config.json", "model.safetensors"))
    assert refused > 20


def test_a_policy_of_absurd_sizes_takes_no_memory(folder: Path) -> None:
    file = folder / "config.json"
    text = file.read_text()
    for key in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "num_labels",
        "num_nextn_predict_layers",
    ):
        for value in (10**9, 2**31, 2**62, 10**30, -1, 1.5, "16", True):
            file.write_text(text)
            edited(file, key, value)
            line = told(lambda: load(folder), "config.json")
            assert line or key in ("num_labels", "num_nextn_predict_layers")
            assert line or not isinstance(value, int) or value < 10**9


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_file_of_a_policy_that_holds_anything_is_one_line_with_its_name(folder: Path, name: str) -> None:
    file = folder / name
    for text in TEXTS:
        file.write_bytes(text)
        line = told(lambda: load(folder), name)
        assert line or (name.endswith("_config.json") and text in (b"{}", b'{"": 1}')), (name, text[:20])
    file.unlink()
    os.mkfifo(file)
    assert "not a regular file" in told(lambda: load(folder), name) or name == "config.json"
    file.unlink()
    file.symlink_to("/dev/zero")
    assert told(lambda: load(folder), name, str(folder))
    file.unlink()
    file.mkdir()
    assert told(lambda: load(folder), name, str(folder))


def test_generation_settings_of_any_kind_load_or_are_one_line(folder: Path) -> None:
    file = folder / "generation_config.json"
    text = file.read_text()
    for value in (-5, 2**31, "2", [None], [[1]], 1.0, True, {"a": 1}):
        for key in ("eos_token_id", "bos_token_id", "pad_token_id"):
            edited(file, key, value)
            assert told(lambda: load(folder), "generation_config.json: " + key)
            file.write_text(text)
    for key in ("max_length", "temperature", "num_beams", "transformers_version", "do_sample", "stop_strings"):
        for value in random.Random(key).sample(VALUES, 5):
            edited(file, key, value)
            told(lambda: load(folder).eos_ids, "generation_config.json")
            file.write_text(text)


def test_a_tokenizer_of_any_settings_loads_or_is_one_line(folder: Path) -> None:
    for name, count in (("tokenizer_config.json", 60), ("tokenizer.json", 40)):
        file = folder / name
        text = file.read_text()
        for key, value in cases(file, count, seed=2):
            edited(file, key, value)
            told(lambda: load(folder).encode_prompt("a b"), "tokenizer")
            file.write_text(text)
        file.write_bytes(text.encode()[: len(text) // 2])
        assert told(lambda: load(folder), name)
        file.write_text(text)


def test_a_chat_template_that_raises_is_one_line(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    for template in (
        "{{ raise_exception('\x1b[2J no\nwine') }}",
        "{% for %}",
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
    ):
        edited(folder / "tokenizer_config.json", "chat_template", template)
        assert told(lambda: load(folder).encode_prompt("a"), "chat template", "tokenizer")


@pytest.mark.parametrize("name", ["model.safetensors"])
def test_broken_weights_are_one_line_with_their_file(folder: Path, name: str) -> None:
    for what in spoilt_weights(folder / name):
        assert told(lambda: load(folder), str(folder)), what
    load(folder)


# Code and kernels


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("_attn_implementation", "evil/kernel"),
        ("attn_implementation", "evil/kernel:run"),
        ("_attn_implementation_internal", "evil/kernel@v1"),
        ("attn_implementation", {"": "evil/kernel"}),
        ("attn_implementation", {"text_config": "evil/kernel"}),
        ("attn_implementation", "paged|evil/kernel"),
        ("experts_implementation", "evil/experts"),
        ("_experts_implementation_internal", "evil/experts"),
        ("text_config", {"model_type": "llama", "_attn_implementation_internal": "evil/kernel"}),
        ("vision_config", {"text_config": {"attn_implementation": "evil/kernel"}}),
        ("use_kernels", True),
        ("kernel_config", {"RMSNorm": "evil/norm"}),
        ("transformers_weights", "adapter_model.bin"),
        ("quantization_config", {"quant_method": "mxfp4"}),
        ("auto_map", {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}),
        ("to_dict", 3),
        ("__class__", "dict"),
        ("get_text_config", None),
    ],
)
def test_a_configuration_that_names_code_is_refused(
    folder: Path, key: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[object] = []
    monkeypatch.setattr("transformers.integrations.hub_kernels.get_kernel", lambda *a, **_: ran.append(a))
    (folder / "evil.py").write_text("open('ran', 'w')")
    edited(folder / "config.json", key, value)
    line = told(lambda: load(folder), "config.json")
    # Code that is named for others to trust is left where it is; a model that transformers has is loaded without it.
    assert line or key == "auto_map"
    assert ran == []
    assert not Path("ran").exists()


def test_an_attention_that_the_configuration_names_is_not_taken(folder: Path) -> None:
    for name in ("flash_attention_2", "flex_attention", "eager"):
        edited(folder / "config.json", "_attn_implementation", name)
        assert load(folder).model.config._attn_implementation == "sdpa"
        assert load_config(folder, "x")._attn_implementation is None


def test_the_code_of_a_kind_that_transformers_lacks_is_not_run(folder: Path) -> None:
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    edited(folder / "config.json", "model_type", "evil")
    edited(folder / "config.json", "auto_map", {"AutoConfig": "evil.Config"})
    edited(folder / "tokenizer_config.json", "auto_map", {"AutoTokenizer": ["evil.T", "evil.T"]})
    assert told(lambda: load(folder), "config.json", "tokenizer")
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("found", "is_refused"),
    [
        ("4.57.1", True),
        ("5.0.0", True),
        ("5.2.9", True),
        ("5.3.0.dev0", True),
        ("5.3.0rc1", True),
        ("5.3.0", False),
        ("5.24.0", False),
        ("6", False),
        ("garbage", True),
    ],
)
def test_a_transformers_that_runs_named_kernels_is_refused(
    found: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: found)
    if is_refused:
        with pytest.raises(ModelError, match=r"CVE-2026-4372\); pip install 'transformers>=5\.3'"):
            require_transformers()
    else:
        require_transformers()


# Pickles and places


class Mark:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


def test_no_pickle_is_loaded_whatever_it_is_called(folder: Path, heads: dict[str, Any], tmp_path: Path) -> None:
    state, ran = load_file(folder / "model.safetensors"), tmp_path / "ran"
    (folder / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.bin", "model.pt", "consolidated.00.pth", "model.ckpt"):
        torch.save({**state, "x": Mark(ran)}, folder / name)
        for call in (
            lambda: load(folder),
            lambda: HFEngine.from_pretrained(str(folder)),
            lambda: load_pretrained(folder, "k", str(folder), "float32"),
            lambda: Catalogue.read(folder),
        ):
            assert "is a pickle, which is never loaded" in told(call, name)
        (folder / name).rename(folder / "model.safetensors")
        assert told(lambda: load(folder), "model.safetensors: cannot be read as safetensors")
        (folder / "model.safetensors").unlink()
    head = shutil.copytree(heads["eagle3"], tmp_path / "head")
    (head / "paceline.json").unlink()
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    assert "is a pickle" in told(lambda: make_head("eagle3", HeadConfig(path=str(head)), heads["policy"], 0), str(head))
    assert not ran.exists()


def test_an_adapter_beside_a_model_is_not_followed(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "evil/base", "peft_type": "LORA"})
    )
    for call in (
        lambda: HFEngine.from_pretrained(str(folder)),
        lambda: load_pretrained(folder, "k", str(folder), "float32"),
    ):
        assert told(call, "adapter_config.json beside a model")


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "../other.safetensors",
        "a/../../other.safetensors",
        "sub/x.safetensors",
        "x\0.safetensors",
        "link.safetensors",
        "..",
        ".",
        "",
        "model.bin",
        3,
        None,
        ["x"],
        {},
        "x" * 5000 + ".safetensors",
        "a\\b.safetensors",
        "~/x.safetensors",
        "-x.safetensors\n",
        "missing.safetensors",
    ],
)
def test_an_index_that_leads_out_of_its_folder_is_refused(folder: Path, tmp_path: Path, name: Any) -> None:
    outside = tmp_path / "other.safetensors"
    shutil.move(folder / "model.safetensors", outside)
    (folder / "link.safetensors").symlink_to(outside)
    names = load_file(outside)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, name)}))
    for call in (lambda: load(folder), lambda: HFEngine.from_pretrained(str(folder)), lambda: Catalogue.read(folder)):
        line = told(call, "index.json", "missing.safetensors")
        assert line
        assert "no safetensors file of this folder" in line or name == "missing.safetensors"


@pytest.mark.parametrize("text", [*TEXTS, b'{"weight_map": 3}', b'{"weight_map": []}', b'{"weight_map": {}}'])
def test_a_broken_index_is_one_line(folder: Path, text: bytes) -> None:
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / "model.safetensors.index.json").write_bytes(text)
    assert told(lambda: load(folder), "index.json")


def test_weights_in_the_hub_cache_may_be_links_to_its_blobs(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--a--b"
    shutil.move(folder, cache / "snapshots" / "1")
    (cache / "blobs").mkdir()
    own = cache / "snapshots" / "1"
    shutil.move(own / "model.safetensors", cache / "blobs" / "abc")
    (own / "part.safetensors").symlink_to("../../blobs/abc")
    weight_map = dict.fromkeys(load_file(cache / "blobs" / "abc"), "part.safetensors")
    (own / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    load(own)


# Draft models, vLLM's reading, adapters, heads


def test_a_draft_model_of_broken_files_is_one_line(folder: Path, whole: dict[str, Path]) -> None:
    policy = load(whole["llama"])
    traits = PolicyTraits(vocabulary_size=258, run_seed=0, eos_ids=(256,), tokenizer=policy.tokenizer)

    def draft() -> Any:
        return DraftModelDrafter.from_config(DraftModelConfig(path=str(folder), dtype="float32"), traits)

    draft()
    for name in ("tokenizer.json", "config.json", "model.safetensors"):
        data = (folder / name).read_bytes()
        for text in TEXTS[:10]:
            (folder / name).write_bytes(text)
            assert told(draft, name)
        (folder / name).write_bytes(data)
    file = folder / "config.json"
    text = file.read_text()
    for key, value in cases(file, 30, seed=3):
        edited(file, key, value)
        told(draft, "draft_model.path")
        file.write_text(text)


def test_what_vllm_is_told_of_a_model_is_read_or_one_line(folder: Path) -> None:
    assert default_eos_ids(folder) == (256,)
    for name in ("generation_config.json", "config.json", "tokenizer.json"):
        data = (folder / name).read_bytes()
        for text in TEXTS[:11]:
            (folder / name).write_bytes(text)
            assert told(lambda: (default_eos_ids(folder), text_of(folder)), name) or name == "config.json"
        (folder / name).write_bytes(data)


@pytest.fixture
def adapter(folder: Path, tmp_path: Path) -> Path:
    load(folder, lora=LORA).save_adapter(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_an_adapter_of_any_settings_loads_or_is_one_line(folder: Path, adapter: Path) -> None:
    file = adapter / "adapter_config.json"
    text, refused = file.read_text(), 0
    keys = ("r", "lora_alpha", "target_modules", "layers_to_transform", "peft_type", "bias", "rank_pattern", "use_dora")
    pairs = [(key, value) for key in keys for value in VALUES] + list(cases(file, 20, seed=4))
    for key, value in random.Random(5).sample(pairs, 150):
        edited(file, key, value)
        line = told(lambda: read_adapter(adapter), "policy.adapter")
        if not line and refused % 10 == 0:
            told(lambda: load(folder, adapter=str(adapter)), "policy.adapter", "lora")
        refused += bool(line)
        file.write_text(text)
    assert refused > 60
    for broken in TEXTS:
        file.write_bytes(broken)
        assert told(lambda: read_adapter(adapter), "adapter_config.json")
        assert told(lambda: load(adapter), "adapter_config.json", "names no base model")


def test_an_adapter_of_absurd_rank_takes_no_memory(folder: Path, adapter: Path) -> None:
    for rank in (3, 10**6, 10**9, 2**40):
        edited(adapter / "adapter_config.json", "r", rank)
        assert told(lambda: load(folder, adapter=str(adapter)), "adapter_config.json")


def test_broken_tensors_of_an_adapter_are_one_line(folder: Path, adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    for what in spoilt_weights(file):
        if not told(lambda: read_adapter(adapter), "policy.adapter"):
            assert told(lambda: load(folder, adapter=str(adapter)), "policy.adapter"), what
    tensors = load_file(file)
    for value in (float("nan"), float("inf")):
        save_file({key: torch.full_like(tensor, value) for key, tensor in tensors.items()}, file)
        assert "not finite" in told(lambda: load(folder, adapter=str(adapter)), "adapter_model.safetensors")


@pytest.mark.parametrize("kind", ["eagle3", "block", "mtp"])
def test_a_head_of_any_settings_loads_or_is_one_line(heads: dict[str, Any], tmp_path: Path, kind: Any) -> None:
    folder = shutil.copytree(heads[kind], tmp_path / "head")
    (folder / "paceline.json").unlink()
    file = folder / "config.json"

    def make() -> Any:
        return make_head(kind, HeadConfig(path=str(folder)), heads["policy"], 0)

    make()
    text = file.read_text()
    for key, value in cases(file, 150, seed=6):
        edited(file, key, value)
        told(make, str(folder))
        file.write_text(text)
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim", "block_size", "draft_vocab_size"):
        for value in (10**6, 10**9, 2**62):
            edited(file, key, value)
            assert told(make, str(folder)) or kind == "mtp" or key == "block_size" or key == "draft_vocab_size"
            file.write_text(text)
    for broken in TEXTS:
        file.write_bytes(broken)
        assert told(make, str(folder)) or kind == "mtp"


@pytest.mark.parametrize("kind", ["eagle3", "block", "mtp"])
def test_broken_tensors_of_a_head_are_one_line(heads: dict[str, Any], tmp_path: Path, kind: Any) -> None:
    folder = shutil.copytree(heads[kind], tmp_path / "head")
    (folder / "paceline.json").unlink()
    file = folder / "model.safetensors"

    def make() -> Any:
        return make_head(kind, HeadConfig(path=str(folder)), heads["policy"], 0)

    for what in spoilt_weights(file):
        assert told(make, str(folder)), what
    tensors = load_file(file)
    name = next(key for key in tensors if tensors[key].ndim == 2)
    save_file(tensors | {name: torch.full_like(tensors[name], float("nan"))}, file)
    assert "not finite" in told(make, str(folder))


def test_a_draft_vocabulary_outside_the_policys_is_one_line(heads: dict[str, Any], tmp_path: Path) -> None:
    folder = shutil.copytree(heads["eagle3"], tmp_path / "head")
    (folder / "paceline.json").unlink()
    tensors = load_file(folder / "model.safetensors")
    d2t = tensors["d2t"]
    for wrong in (
        d2t + 10**6,
        d2t - 10**6,
        d2t.flip(0) * 0 - torch.arange(len(d2t)),
        d2t.float(),
        d2t[None],
        d2t[:0],
        torch.full_like(d2t, 2**62),
        torch.full_like(d2t, -(2**63)),
    ):
        save_file(tensors | {"d2t": wrong.contiguous()}, folder / "model.safetensors")
        assert told(lambda: make_head("eagle3", HeadConfig(path=str(folder)), heads["policy"], 0), str(folder))


@pytest.mark.parametrize(
    "text",
    [
        *TEXTS,
        b'{"files": 3}',
        b'{"files": {"../x": "1"}}',
        b'{"files": {"x\\u0000": 1}}',
        b'{"files": {}, "taps": 3}',
        b'{"files": {}, "taps": ["x"]}',
        b'{"files": {}, "taps": [1], "version": "x"}',
        b'{"files": {}, "taps": [true]}',
    ],
)
def test_broken_metadata_of_a_head_are_one_line(heads: dict[str, Any], tmp_path: Path, text: bytes) -> None:
    folder = shutil.copytree(heads["eagle3"], tmp_path / "head")
    (folder / "paceline.json").write_bytes(text)
    assert told(lambda: make_head("eagle3", HeadConfig(path=str(folder)), heads["policy"], 0), str(folder))


@pytest.mark.parametrize(
    "path", ["x" * 5000, "a\0b", "~nobody/x", "\x1b[2J", "/dev/zero", "/proc/self/mem", "../" * 2000, "[/]"]
)
def test_a_path_that_is_no_model_is_one_line(heads: dict[str, Any], path: str) -> None:
    traits = PolicyTraits(vocabulary_size=258, run_seed=0)
    for call in (
        lambda: load(path),
        lambda: HFEngine.from_pretrained(path),
        lambda: make_head("eagle3", HeadConfig(path=path), heads["policy"], 0),
        lambda: DraftModelDrafter.from_config(DraftModelConfig(path=path), traits),
        lambda: read_snapshot(path),
    ):
        assert told(call, "path", ":")


# History and checkpoints


def test_a_snapshot_of_history_of_any_bytes_is_one_line(tmp_path: Path) -> None:
    def array(values: Any, kind: str) -> Any:
        return np.array(values, kind)

    snapshot = Snapshot(
        salt=1,
        version=2,
        shards=array([5, 5], "<i8"),
        are_prompts=array([1, 0], "|u1"),
        versions=array([0, 1], "<i4"),
        starts=array([0, 0], "<i4"),
        offsets=array([0, 2, 5], "<i8"),
        tokens=array([1, 2, 3, 4, 5], "<i4"),
        votes=array([], "<f8"),
    )
    data, file = encode_snapshot(snapshot), tmp_path / "history.bin"
    file.write_bytes(data)
    read_snapshot(file)
    drawn = random.Random(7)
    for _ in range(300):
        wrong = bytearray(data)
        for _ in range(drawn.randint(1, 8)):
            wrong[drawn.randrange(len(wrong))] = drawn.randrange(256)
        if bytes(wrong) != data:
            file.write_bytes(bytes(wrong))
            assert told(lambda: read_snapshot(file), "history.bin")
    for length in range(0, len(data), 7):
        file.write_bytes(data[:length])
        assert told(lambda: read_snapshot(file), "history.bin")


def test_a_broken_checkpoint_is_skipped_by_name_and_the_one_before_is_taken(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path, step, {"policy": {"w": torch.ones(3)}}, {"step": step})
    newest = checkpoint.newest_first(tmp_path)[0]
    files = {file.name: file.read_bytes() for file in newest.iterdir()}
    for name, data in files.items():
        for text in (*TEXTS, data[: len(data) // 2], data[:-1] + b"\x00"):
            (newest / name).write_bytes(text)
            events: list[str] = []
            with bounded():
                found = checkpoint.load_latest(tmp_path, warn=lambda event, line, into=events: into.append(line))
            assert found is not None
            assert found.step == 1, (name, text[:20])
            assert str(newest) in events[0]
        (newest / name).write_bytes(data)


def test_a_hub_id_is_fetched_piece_by_piece_and_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def cached_file(_source: str, name: str, **_options: Any) -> str | None:
        asked.append(name)
        return str(folder / name) if (folder / name).exists() else None

    monkeypatch.setattr("transformers.utils.cached_file", cached_file)
    edited(folder / "config.json", "attn_implementation", "evil/kernel")
    assert told(lambda: load_pretrained("some/model", "k", "some/model", "float32"), "evil/kernel: names code to run")
    assert asked[0] == "config.json"
    assert not any(name.endswith((".bin", ".py", ".pt")) for name in asked)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "../../x.safetensors"}}))
    assert told(lambda: model_files.fetched("some/model", "k"), "no safetensors file of this folder")
    index.unlink()
    (folder / "model.safetensors").unlink()
    assert told(lambda: model_files.fetched("some/model", "k"), "has no model.safetensors")
