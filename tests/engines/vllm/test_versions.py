import importlib.metadata
import importlib.util
import subprocess
import sys
import types

import pytest

from paceline.engines.vllm import versions
from paceline.engines.vllm.versions import (
    NEWEST,
    OLDEST,
    VllmMissingError,
    VllmVersionError,
    installed,
    parsed,
    require_vllm,
)


def pretend(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """A vLLM of this version is imported already."""
    module = types.ModuleType("vllm")
    module.__version__ = version
    monkeypatch.setitem(sys.modules, "vllm", module)


@pytest.mark.parametrize("version", ["0.27.0", "0.27.1rc1", "0.30.0+cpu", "0.32.0", "0.32.4.dev3+gabcdef"])
def test_versions_within_the_range_are_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    pretend(monkeypatch, version)
    assert require_vllm() == version
    assert require_vllm("plugin") == version


@pytest.mark.parametrize("version", ["0.9.2", "0.26.9", "0.33.0", "1.0.0", "0.100.0", "dev"])
def test_versions_outside_the_range_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    pretend(monkeypatch, version)
    with pytest.raises(VllmVersionError) as refused:
        require_vllm()
    message = str(refused.value)
    assert "\n" not in message
    assert version in message
    assert "0.27 to 0.32" in message
    assert "pip install 'vllm>=0.27,<0.33'" in message


def test_the_plug_in_works_in_older_versions_than_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "0.22.0")
    assert require_vllm("plugin") == "0.22.0"
    with pytest.raises(VllmVersionError, match=r"the engine supports, 0.27 to 0.32"):
        require_vllm("engine")
    pretend(monkeypatch, "0.21.0")
    with pytest.raises(VllmVersionError, match=r"the plug-in supports, 0.22 to 0.32"):
        require_vllm("plugin")


def test_where_there_is_no_vllm_the_error_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setattr(versions.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(VllmMissingError, match=r"not installed; versions 0.27 to 0.32 are supported: pip install"):
        require_vllm()


def test_the_module_counts_whatever_distribution_it_came_with(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec("paceline")

    def version(name: str) -> str:
        if name == "vllm-somewhere":
            return "0.31.0"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setattr(versions.importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(versions.importlib.metadata, "version", version)
    providers = {"vllm": ["vllm-somewhere"]}
    monkeypatch.setattr(versions.importlib.metadata, "packages_distributions", lambda: providers)
    assert installed() == "0.31.0"
    providers.clear()
    assert installed() == "unknown"
    with pytest.raises(VllmVersionError, match="'unknown'"):
        require_vllm()


def test_the_ranges_are_those_that_were_checked() -> None:
    assert OLDEST["plugin"] <= OLDEST["engine"] <= NEWEST
    assert parsed("0.32.0") == (0, 32)
    assert parsed("unknown") is None


@pytest.mark.vllm
def test_the_version_is_found_without_importing_vllm() -> None:
    vllm = pytest.importorskip("vllm")
    code = "import sys; from paceline.engines.vllm.versions import require_vllm; v = require_vllm(); "
    code += "print(v, *sorted({'vllm', 'torch'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.split() == [vllm.__version__]
