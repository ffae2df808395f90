"""The native index is loaded where it is sound; elsewhere the reason is one line and the Python version serves."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest

from paceline.history import native

EXTENSION = "paceline.history._native"


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    monkeypatch.delenv("PACELINE_NATIVE", raising=False)


def built(monkeypatch):
    extension = SimpleNamespace()
    monkeypatch.setitem(sys.modules, EXTENSION, extension)
    return extension


def test_an_extension_that_was_built_is_loaded(monkeypatch):
    extension = built(monkeypatch)
    assert native.load() is extension
    assert native.why_not() == ""


def test_the_environment_switches_the_extension_off(monkeypatch):
    built(monkeypatch)
    monkeypatch.setenv("PACELINE_NATIVE", "0")
    assert native.load() is None
    assert native.why_not() == "PACELINE_NATIVE=0 switches the native history index off"


def test_an_extension_that_was_not_built_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, EXTENSION, None)  # makes the import fail as if there were no such file
    assert native.load() is None
    assert "is not built" in native.why_not()


def test_an_extension_that_does_not_load_gives_its_reason_in_one_line(monkeypatch):
    def broken(name):
        raise ImportError(f"{name}.so:\nundefined symbol: _Z3foo")

    monkeypatch.setattr(native, "import_module", broken)
    assert native.load() is None
    assert native.why_not() == (
        "the native history index cannot be loaded: paceline.history._native.so: undefined symbol: _Z3foo"
    )


def test_a_module_that_the_extension_misses_is_not_taken_for_the_extension(monkeypatch):
    monkeypatch.setattr(native, "import_module", lambda name: importlib.import_module("absent_module"))
    with pytest.raises(ModuleNotFoundError, match="absent_module"):
        native.load()


def test_a_build_of_this_checkout_is_sound():
    assert (native.load() is not None) == (importlib.util.find_spec(EXTENSION) is not None), native.why_not()
