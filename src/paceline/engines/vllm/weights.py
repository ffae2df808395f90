"""The engine's side of weight updates: what a set of weights must hold, and the way it takes to vLLM's workers."""

import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from paceline.engines.vllm.front import Front
from paceline.engines.vllm.workarounds import refit_refusal
from paceline.forward.model_files import WEIGHTS_INDEX, opened_weights, weight_files, weight_headers
from paceline.forward.runner import WeightsError
from paceline.schema import PacelineError

#: How safetensors writes the dtypes that weights have.
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}


@dataclass(frozen=True)
class Catalogue:
    """What a checkpoint holds: the ``shapes`` of its tensors and the ``files`` they are in, by name."""

    shapes: Mapping[str, tuple[int, ...]]
    files: Mapping[str, Path]

    @classmethod
    def read(cls, model: str | Path) -> "Catalogue":
        """The catalogue of a directory or of a hub id that is in the local cache; WeightsError where there is none."""
        shapes, files = {}, {}
        try:
            for name, stored in weight_headers(weight_files(_directory(model))).items():
                shapes[name], files[name] = stored.shape, stored.file
        except PacelineError as error:
            raise WeightsError(f"new weights cannot be checked against the checkpoint: {error}") from None
        return cls(shapes, files)

    def tensors(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Some of the checkpoint's tensors."""
        found = {}
        for name in names:
            with opened_weights(self.files[name]) as opened:
                found[name] = opened.get_tensor(name)
        return found


class Weights:
    """Moves the policy of a running vLLM, and its drafter's model, to new weights; knows when they are void.

    ``model`` is the checkpoint that vLLM was started with, ``drafter`` that of a model that drafts (None: it is not
    known), ``expected`` names what every set must hold (None: all of it). What is fused into one layer is loaded
    together, so a set that names a part of it is completed from the checkpoint. With ``mend`` false sets that a known
    fault would spoil are refused, unless ``allow_lossy``.
    """

    def __init__(
        self,
        front: Front,
        model: str | Path,
        expected: Iterable[str] | None = None,
        *,
        drafter: str | Path | None = None,
        mend: bool = True,
        allow_lossy: bool = False,
    ) -> None:
        self._front = front
        self._mend = mend
        self._allow_lossy = allow_lossy
        self._model = model
        self._catalogue: Catalogue | None = None
        self._drafter_files = drafter
        self._drafter_shapes: dict[str, tuple[int, ...]] | None = None
        layout = front.rpc("paceline_layout")[0]
        self._tied: bool = layout["tied"]
        self._fused = {part: whole for whole, parts in layout["fused"].items() for part in parts}
        self._parameters = frozenset(layout["parameters"])
        self._shared: list[str] = layout.get("shared", [])
        self._expected = None if expected is None else frozenset(expected)
        self._moved: set[str] = set()
        self._drafter: dict[str, torch.Tensor] = {}
        self._drafter_version = 0
        self._has_draft_model: bool | None = None
        self._void = False
        self._level = 0

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """WeightsError that names the first tensor missing, unknown or of another shape; nothing is sent."""
        known = self._known()
        expected = self._complete() if self._expected is None else self._expected
        missing, unknown = sorted(expected - set(tensors)), sorted(set(tensors) - set(known.shapes))
        if missing or unknown:
            what = f"lacks {missing[0]}" if missing else f"has {unknown[0]}, which the policy does not have"
            raise WeightsError(
                f"the set of weights {what} ({len(missing)} missing, {len(unknown)} unknown); none was loaded"
            )
        for name, tensor in tensors.items():
            if tuple(tensor.shape) != known.shapes[name]:
                raise WeightsError(
                    f"{name} has shape {tuple(tensor.shape)}, the policy's is {known.shapes[name]}; none was loaded"
                )
        company = self._company(set(tensors))
        lost = sorted(self._moved - set(tensors) if self._void else self._moved & company)
        if lost:
            raise WeightsError(f"the set of weights lacks {lost[0]}, which was updated before; none was loaded")
        refused = refit_refusal(tied=self._tied, partial=bool(company), mend=self._mend, allow_lossy=self._allow_lossy)
        if refused is not None:
            raise WeightsError(refused)

    def load(self, version: int, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """The policy gets ``tensors``; no pass may run meanwhile. Returns the names of those that reached it.

        The drafter's model keeps its own weights.
        """
        self.check(tensors)
        if self._void and not self._complete() <= set(tensors):
            self._front.rpc("paceline_reload", "policy")
        whole = dict(tensors)
        if self._mend:
            whole |= self._known().tensors(self._company(set(tensors)))
        self._send("start_weight_update", version, whole)
        self._moved |= set(tensors)
        self._void = False
        return self._arrived(tensors)

    def load_drafter(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """The drafter's model gets ``tensors``, by their names in its checkpoint.

        WeightsError where none drafts, and with the first tensor that is missing, unknown, of another shape, or the
        policy's own; nothing is sent then. ``t2d``, which vLLM does not read, is left out.
        """
        if self.drafter_version is None:
            raise WeightsError("no model drafts, so there is none to load weights into; set drafter.kind")
        tensors = {name: tensor for name, tensor in tensors.items() if name != "t2d"}
        self._check_drafter(tensors)
        self._send("start_draft_weight_update", version, tensors)
        self._drafter |= {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        self._drafter_version = version

    def reload_drafter(self) -> bool:
        """Load the drafter's checkpoint again, and what ``load_drafter`` gave it since.

        False where the drafter has no weights of its own.
        """
        if not self._front.rpc("paceline_reload", "drafter")[0]:
            return False
        if self._drafter:
            self._send("start_draft_weight_update", self._drafter_version, self._drafter)
        return True

    def sleep(self, level: int) -> None:
        """Give memory back at one of vLLM's levels; at level 2 the weights of policy and drafter are void."""
        self._front.sleep(level)
        self._level = level

    def wake(self) -> None:
        """Take the memory again. After level 2 the drafter's weights are loaded again at once, and ``void`` holds."""
        self._front.wake()
        if self._level >= 2:
            self._void = True
            self.reload_drafter()
        self._level = 0

    @property
    def drafter_version(self) -> int | None:
        """The version of the drafter's own weights; None where no model drafts."""
        if self._has_draft_model is None:
            self._has_draft_model = bool(self._front.rpc("paceline_has_draft_model")[0])
        return self._drafter_version if self._has_draft_model else None

    @property
    def void(self) -> bool:
        """Whether the policy has no weights, since it slept, until ``load``."""
        return self._void

    def _check_drafter(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name in tensors:
            if self._is_shared(name):
                raise WeightsError(f"{name} is the policy's own where it drafts: leave it out; none was loaded")
        if self._drafter_files is None:
            return
        if self._drafter_shapes is None:
            known = Catalogue.read(self._drafter_files).shapes
            self._drafter_shapes = {
                name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name: shape
                for name, shape in known.items()
                if name != "t2d" and not self._is_shared(name)
            }
        shapes = self._drafter_shapes
        wrong = sorted(shapes.keys() ^ tensors.keys())
        if wrong:
            what = f"lacks {wrong[0]}" if wrong[0] in shapes else f"has {wrong[0]}, which the drafter does not have"
            raise WeightsError(f"the drafter's set of weights {what}; none was loaded")
        for name, tensor in tensors.items():
            if tuple(tensor.shape) != shapes[name]:
                raise WeightsError(
                    f"{name} has shape {tuple(tensor.shape)}, the drafter's is {shapes[name]}; none was loaded"
                )

    def _is_shared(self, name: str) -> bool:
        """Whether the drafter's model has the tensor of that name from the policy."""
        return any(own == name or own.endswith(f".{name}") for own in self._shared)

    def _known(self) -> Catalogue:
        if self._catalogue is None:
            self._catalogue = Catalogue.read(self._model)
        return self._catalogue

    def _complete(self) -> frozenset[str]:
        """The names of a whole checkpoint, tied weights once."""
        names = self._known().shapes
        return frozenset(name for name in names if not (self._tied and name.endswith("lm_head.weight")))

    def _company(self, names: set[str]) -> set[str]:
        """What is fused with some of ``names`` and not among them."""
        touched = {self._layer(name) for name in names}
        return {name for name in self._complete() if self._layer(name) in touched} - names

    def _layer(self, name: str) -> str:
        """The layer of vLLM that a tensor of the checkpoint goes to."""
        path = [self._fused.get(part, part) for part in name.split(".")[:-1]]
        experts = re.match(r".*?\.experts(?=\.|$)", ".".join(path))
        return experts[0] if experts else ".".join(path)

    def _arrived(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` whose layer vLLM says it loaded, and those of which its own names say nothing."""
        loaded = set(self._front.rpc("paceline_loaded")[0]["names"])
        left_out = self._parameters - loaded
        return [name for name in names if f"{self._layer(name)}.{name.rpartition('.')[2]}" not in left_out]

    def _send(self, start: str, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        with _shared_file(tensors) as path:
            self._front.rpc(start)
            self._front.rpc("update_weights", {"path": path, "version": version})
            self._front.rpc("finish_weight_update")


@contextmanager
def _shared_file(tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """A safetensors file of ``tensors`` that other processes of this user can read; it is gone with this process."""
    if hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir():
        with os.fdopen(os.memfd_create("paceline"), "wb") as file:
            write(file, tensors)
            file.flush()
            yield f"/proc/{os.getpid()}/fd/{file.fileno()}"
    else:
        with tempfile.NamedTemporaryFile(prefix="paceline-", suffix=".safetensors") as named:
            write(named, tensors)
            named.flush()
            yield named.name


def write(file: IO[bytes], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file tensor by tensor, so that no second copy of them all is made."""
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        begin, end = end, end + tensors[name].numel() * tensors[name].element_size()
        dtype = _DTYPES[tensors[name].dtype]
        header[name] = {"dtype": dtype, "shape": list(tensors[name].shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write(len(encoded).to_bytes(8, "little"))
    file.write(encoded)
    for name in names:
        flat_N = tensors[name].detach().to("cpu").contiguous().view(-1)
        file.write(flat_N.view(torch.uint8).numpy().data)


def _directory(model: str | Path) -> Path:
    if Path(model).expanduser().is_dir():
        return Path(model).expanduser()
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(model), local_files_only=True, allow_patterns=["*.safetensors", WEIGHTS_INDEX]))
