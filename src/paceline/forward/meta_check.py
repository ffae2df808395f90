"""Says without weights whether the reference engine would refuse a policy: its configuration, on no device."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.forward.attention import PassRow, UnsupportedModelError
from paceline.forward.pretrained import ModelError, no_progress_bars, one_line
from paceline.forward.runner import Runner


def check_on_meta(source: Path, key: str, context: int = 0) -> None:
    """Raise UnsupportedModelError where the engine would refuse the model at ``source`` for what it is built of.

    The model is built on torch's meta device, from its ``config.json`` alone, and runs one packed pass there, which
    finds options of attention that the engine lacks and layers that attend twice. Logits, which the self-check
    compares, do not exist there. Raises ModelError, with ``key``, where transformers cannot build the model.
    """
    try:
        with no_progress_bars(), torch.device("meta"):
            config = AutoConfig.from_pretrained(source, trust_remote_code=False)
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001  whatever a configuration makes transformers raise
        raise ModelError(f"{key}={source}: no causal language model can be built of it: {one_line(error)}") from None
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
