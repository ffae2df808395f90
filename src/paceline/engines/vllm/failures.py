"""What vLLM raises, told in one line."""

import contextlib
from collections.abc import Iterator

from paceline.engines.vllm.front import VllmError


def refusals() -> tuple[type[Exception], ...]:
    """What vLLM raises for a request that it refuses."""
    from vllm import exceptions

    return ValueError, exceptions.VLLMValidationError


def one_line(error: BaseException) -> str:
    """An error with its kind, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextlib.contextmanager
def named(doing: str, passed: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Whatever vLLM raises, but for ``passed``, becomes a VllmError of one line."""
    try:
        yield
    except VllmError:
        raise
    except Exception as error:
        if isinstance(error, passed):
            raise
        from vllm.v1.engine.exceptions import EngineDeadError

        if isinstance(error, EngineDeadError):
            what = "its process has ended, for a reason that it wrote above"
        else:
            what = one_line(error)
        raise VllmError(f"vLLM failed at {doing}: {what}; close the engine and build another") from error
