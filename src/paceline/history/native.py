"""Loads the compiled history index, or says why its Python version serves instead."""

import os
from importlib import import_module
from types import ModuleType

_EXTENSION = "paceline.history._native"


def load() -> ModuleType | None:
    """The extension module ``paceline.history._native``; None where ``why_not`` has a reason.

    The environment variable ``PACELINE_NATIVE=0`` switches the extension off.
    """
    return _attempt()[0]


def why_not() -> str:
    """Why ``load`` returns None, in one line; the empty string where it returns the module."""
    return _attempt()[1]


def _attempt() -> tuple[ModuleType | None, str]:
    if os.environ.get("PACELINE_NATIVE") == "0":
        return None, "PACELINE_NATIVE=0 switches the native history index off"
    try:
        return import_module(_EXTENSION), ""
    except ModuleNotFoundError as error:
        if error.name != _EXTENSION:
            raise
        return None, "the native history index is not built; install paceline again where a C++17 compiler is present"
    except ImportError as error:
        return None, f"the native history index cannot be loaded: {' '.join(str(error).split())}"
