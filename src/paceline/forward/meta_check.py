"""Says without weights whether the reference engine would refuse a policy: its configuration, on no device."""

from pathlib import Path

import numpy as np

from paceline.files import named
from paceline.forward.attention import PassRow, UnsupportedModelError
from paceline.forward.model_files import CONFIG, foreign, load_config, no_progress_bars
from paceline.forward.pretrained import policy_on_meta
from paceline.forward.runner import Runner


def check_on_meta(source: Path, key: str, context: int = 0) -> None:
    """Raise UnsupportedModelError where the engine would refuse the model at ``source`` for what it is built of.

    The model is built on torch's meta device, from its ``config.json`` alone, and runs one packed pass there, which
    finds options of attention that the engine lacks and layers that attend twice. Logits, which the self-check
    compares, do not exist there. Raises ModelError, which begins with ``key``, where the configuration is
    refused or transformers cannot build the model.
    """
    where = f"{key}={named(source)}"
    config = load_config(source, where)
    with foreign(f"{where}: {named(source / CONFIG)}: makes no causal language model"), no_progress_bars():
        model = policy_on_meta(config)
    runner = Runner(model, self_check=False, context=context)
    runner.kv.resize(1, 4)
    tokens, row = np.zeros(3, dtype=np.int64), PassRow(0, 0, 3, np.empty(0, dtype=np.int32))
    try:
        runner.forward([tokens], [row], np.array([0, 2]))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{type(model).__name__}: {error}") from None
    except Exception:  # noqa: BLE001  routers and some masks look at values, which this device does not have
        return
    finally:
        runner.close()
