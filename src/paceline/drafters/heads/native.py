"""The multi-token-prediction head that a policy's checkpoint brings along, which transformers leaves where it is."""

from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import cached_file

from paceline.drafters.heads.mtp import Layout, MtpHead, layouts
from paceline.forward.model_files import ModelError, check_finite, opened_weights
from paceline.forward.runner import WeightsError

_FILES = ("model.safetensors.index.json", "model.safetensors")
#: Copies of the policy's own matrices.
_SHARED = ("embed_tokens.weight", "shared_head.head.weight")


def native_head(policy: PreTrainedModel, path: str | None = None) -> MtpHead | None:
    """The head whose tensors lie beside the policy's, or in the directory ``path``; None where there are none.

    Of several heads, each for a deeper token, the first. ModelError, one line, for one that paceline has no counterpart
    of: with experts, quantized, or with tensors missing, unknown or of another shape.
    """
    folder = _folder(str(policy.name_or_path)) if path is None else Path(path).expanduser()
    where = f"policy.path={policy.name_or_path}" if path is None else f"drafter.head.path={path}"
    found = None if folder is None else _tensors(policy, folder, where)
    if found is None:
        return None
    layout, tensors = found
    where += ": its multi-token-prediction head"
    experts = sorted(name for name in tensors if ".experts." in name)
    if experts:
        raise ModelError(f"{where} is a mixture of experts ({experts[0]}), which paceline has none of; use eagle3")
    head = MtpHead(policy, layout)
    try:
        head.load_checkpoint(tensors)
    except WeightsError as error:
        raise ModelError(f"{where} does not fit: {error}; use eagle3") from None
    return head


def _folder(name_or_path: str) -> Path | None:
    """Where the policy's weights were loaded from; None for a model that was made in memory."""
    folder = Path(name_or_path).expanduser()
    if not name_or_path or folder.is_dir():
        return folder if name_or_path else None
    options = {"local_files_only": True, "_raise_exceptions_for_missing_entries": False}
    for name in _FILES:
        try:
            file = cached_file(name_or_path, name, **options)
        except OSError:
            return None
        if file is not None:
            return Path(file).parent
    return None


def _tensors(policy: PreTrainedModel, folder: Path, where: str) -> tuple[Layout, dict[str, Tensor]] | None:
    """The head's tensors, and the layout whose prefix they have."""
    found: dict[str, dict[str, Tensor]] = {}
    known = layouts(policy)
    for file in sorted(folder.glob("*.safetensors")):
        with opened_weights(file) as opened:
            for name in opened.keys():  # noqa: SIM118  it is no mapping
                for family, layout in known.items():
                    if name.startswith(layout.prefix) and not name.endswith(_SHARED):
                        found.setdefault(family, {})[name] = opened.get_tensor(name)
    for family, tensors in found.items():
        check_finite(tensors, where)
        return known[family], tensors
    return None
