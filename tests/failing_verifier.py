"""A verifier that fails when a file says so, for tests of workers in other processes."""

import os
from pathlib import Path

from paceline.sampling.accept import accept

#: The folder in which tests leave word: ``once`` is eaten by the worker that finds it, ``always`` stays.
FOLDER = "PACELINE_TEST_FAULTS"


def failing(logits_NV, rows, run_seed):
    """``sampling.accept.accept``, unless there is a file."""
    folder = Path(os.environ[FOLDER])
    if (folder / "always").exists():
        raise RuntimeError("it always fails")
    try:
        (folder / "once").unlink()
    except FileNotFoundError:
        return accept(logits_NV, rows, run_seed)
    raise RuntimeError("it failed once")
