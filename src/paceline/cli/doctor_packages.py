"""What ``paceline doctor`` says of what is installed, without importing more than is asked for."""

import importlib
import importlib.metadata
import importlib.util
import platform
import re
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from paceline.cli.doctor_findings import Finding, ok, reason, refused, warning

AREA = "installed"


@dataclass(frozen=True)
class Package:
    """A package that paceline works with: its distribution, how it is had, and what it is for.

    ``run_with`` are the versions that the tests of paceline run with, as the constraints files have them.
    """

    name: str
    module: str
    install: str
    purpose: str
    run_with: tuple[str, ...] = ()
    tried: bool = False


_TRACK = "pip install 'paceline[track]'"
#: ``tried``: imported in any case, since a broken one is noticed by nobody until a run needs it, and it does not take
#: long.
PACKAGES: tuple[Package, ...] = (
    Package("numpy", "numpy", "pip install numpy", "everything", ("2.4.6", "2.3.5"), True),
    Package("torch", "torch", "pip install 'paceline[hf]'", "every run", ("2.13.0",), True),
    Package("transformers", "transformers", "pip install 'paceline[hf]'", "every run", ("5.24.0", "5.19.0"), True),
    Package("peft", "peft", "pip install 'paceline[train]'", "adapters", ("0.21.2",)),
    Package("llguidance", "llguidance", "pip install 'paceline[grammar]'", "grammars", ("1.9.1", "1.7.6"), True),
    Package("matplotlib", "matplotlib", "pip install 'paceline[report]'", "pictures", ("3.11.2",)),
    Package("trl", "trl", "pip install 'paceline[trl]'", "drafting inside TRL", ("1.16.0",)),
    Package("ray", "ray", "pip install 'paceline[ray]'", "workers and clusters", ("2.60.0",)),
    Package("tensorboard", "tensorboard", _TRACK, "a tracker", ("2.21.0",)),
    Package("wandb", "wandb", _TRACK, "a tracker", ("0.31.0",)),
    Package("mlflow-skinny", "mlflow", _TRACK, "a tracker", ("3.17.2",)),
    Package("prometheus_client", "prometheus_client", _TRACK, "a tracker", ("0.26.0",)),
    Package("trackio", "trackio", _TRACK, "a tracker", ("0.43.0",)),
    Package("reasoning-gym", "reasoning_gym", "pip install 'paceline[demo]'", "the task of that name", ("0.1.25",)),
    Package("gguf", "gguf", "pip install 'paceline[demo]'", "making smollm2-135m", ("0.19.0",)),
)


def installed(needed: Collection[str] = ()) -> Iterator[Finding]:
    """One line a package; the modules that are ``needed`` are imported, and refused where they are not there."""
    yield ok(AREA, "python", f"{platform.python_version()}, {sys.platform}, {platform.machine()}")
    floors = oldest_versions(importlib.metadata.requires("paceline") or ())
    for package in PACKAGES:
        yield found(package, package.module in needed, floors.get(canonical(package.name), ""))
    yield from vllm("vllm" in needed)
    yield native_index()


def found(package: Package, is_needed: bool, oldest: str = "") -> Finding:
    """Whether ``package`` is there, of a version that paceline knows, and can be imported where it is tried."""
    name, version = package.name, version_of(package)
    is_vital = package.purpose in ("everything", "every run")
    if version is None:
        outcome = refused if is_needed else warning if is_vital else ok
        return outcome(AREA, name, f"not installed; for {package.purpose}", package.install)
    spoiled = refused if is_needed or is_vital else warning
    if is_needed or package.tried:
        try:
            importlib.import_module(package.module)
        except Exception as error:  # noqa: BLE001  whatever a broken package raises is what there is to say
            return spoiled(AREA, name, f"{version} cannot be imported: {reason(error)}", "install it anew")
    plain = version.partition("+")[0]
    if plain in package.run_with:
        return ok(AREA, name, f"{version}, which paceline is run with")
    if oldest and numbers(version) < numbers(oldest):
        return spoiled(AREA, name, f"{version} is older than {oldest}", f"{package.install} --upgrade")
    newest = max(package.run_with, key=numbers, default="")
    if newest and numbers(version)[:2] > numbers(newest)[:2]:
        return warning(
            AREA,
            name,
            f"{version} is newer than any that paceline was run with ({newest})",
            f"if something fails: pip install '{name}=={newest}'",
        )
    return ok(AREA, name, f"{version}; paceline is run with {', '.join(package.run_with) or 'none in particular'}")


def version_of(package: Package) -> str | None:
    """The installed version, ``unknown`` where the package does not tell; None where it is not there."""
    if package.module not in sys.modules:
        spec = importlib.util.find_spec(package.module)
        if spec is None or spec.origin is None:  # without an origin it is a mere folder of that name
            return None
    try:
        return importlib.metadata.version(package.name)
    except importlib.metadata.PackageNotFoundError:  # another distribution brought the module, as mlflow's does
        names = importlib.metadata.packages_distributions().get(package.module, ())
        return next((importlib.metadata.version(name) for name in names), "unknown")


def vllm(is_needed: bool) -> Iterator[Finding]:
    """Whether the installed vLLM is supported, its faults and, where it is needed, whether its seams are there."""
    from paceline.engines.vllm.versions import VllmMissingError, VllmVersionError, require_vllm

    try:
        version = require_vllm("plugin")
    except VllmMissingError as error:
        yield (refused if is_needed else ok)(AREA, "vllm", str(error))
        return
    except VllmVersionError as error:
        yield refused(AREA, "vllm", str(error))
        return
    try:
        require_vllm("engine")
    except VllmVersionError as error:
        yield (refused if is_needed else warning)(AREA, "vllm", str(error), "the plug-in works, the engine does not")
        return
    if is_needed:
        try:
            importlib.import_module("vllm")
        except Exception as error:  # noqa: BLE001  as above
            yield refused(AREA, "vllm", f"{version} cannot be imported: {reason(error)}", "install it anew")
            return
    yield ok(AREA, "vllm", f"{version}, of which the seams are known")
    from paceline.engines.vllm import workarounds
    from paceline.report.metrics import counted

    faults = workarounds.faults_here() if is_needed else workarounds.faults_of(version)
    for answer in ("mended", "refused"):
        names = [str(fault) for fault in faults.values() if fault.answer == answer]
        if names:
            where = "here" if is_needed else "on one platform or other"
            yield ok(AREA, f"vllm: {answer}", f"{counted(len(names), 'known fault')} {where}: {', '.join(names)}")
    if is_needed:
        yield from seams(version)


def seams(version: str) -> Iterator[Finding]:
    """Whether what is replaced in vLLM is still where it was; imports vLLM."""
    from paceline.engines.vllm import mends

    places = [(owner, attribute) for owner, attribute, _ in mends.replacements().values()]
    gone = [f"{owner.__name__}.{attribute}" for owner, attribute in places if not hasattr(owner, attribute)]
    if mends.head_owner() is None:
        gone.append("SpecDecodeBaseProposer._maybe_share_lm_head")
    if gone:
        yield refused(AREA, "vllm: seams", f"{version} lacks {', '.join(gone)}", "install a version that is supported")
    else:
        yield ok(AREA, "vllm: seams", f"all {len(places) + 1} places that are mended are where they were")


def native_index() -> Finding:
    """Whether the compiled history index serves."""
    from paceline.history.native import why_not

    why = why_not()
    if not why:
        return ok(AREA, "history index", "compiled")
    return warning(AREA, "history index", "in Python: same drafts, slower", why)


def oldest_versions(requirements: Collection[str]) -> dict[str, str]:
    """The oldest version that each requirement allows, by canonical name, from ``name>=version; marker`` lines."""
    parts = (re.match(r"([\w.-]+)(?:\[[^\]]*\])?>=([\w.]+)", requirement) for requirement in requirements)
    return {canonical(part[1]): part[2] for part in parts if part is not None}


def canonical(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub("[-_.]+", "-", name).lower()


def numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version starts with; empty where there are none, which is below all others."""
    start = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, start[0].split("."))) if start is not None else ()
