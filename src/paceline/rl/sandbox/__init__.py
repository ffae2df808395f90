"""Confines the process in which rewards run, by what the machine gives: seccomp, Landlock, limits, a clean slate."""

from paceline.rl.sandbox.confine import Confinement, SandboxError, confine
from paceline.rl.sandbox.isolation import NOTHING, Isolation, everywhere, isolation

__all__ = ["NOTHING", "Confinement", "Isolation", "SandboxError", "confine", "everywhere", "isolation"]
