"""A fake engine with weights, sleep levels and refits that go wrong, behind the sentinel's seam."""

import numpy as np
import torch

from paceline.forward.checksum import checksums
from paceline.schema import Rollout, as_tokens


def weights(seed):
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(3, 5, generator=random) for name in ("embed", "layer.0", "layer.1", "head")}


def rollout(key, tokens=16, accepted=8, reason="length"):
    empty = np.empty(0)
    return Rollout(
        request_id=f"run/{key}", group=key, prompt_key=key, prompt=as_tokens([1, 2, 3]),
        tokens=as_tokens([1] * tokens), logprobs=empty, raw_logprobs=empty, logprob_mode="processed", margins=empty,
        versions=as_tokens([]), sources=np.empty(0, np.uint8), finish_reason=reason, forwards=1, drafted=tokens,
        accepted=accepted, accept_lengths=as_tokens([]),
    )  # fmt: skip


class SleepyEngine:
    """Implements ``engines.sentinel.Watched``. Its drafter accepts ``quality`` of a canary's tokens while its weights
    are those it was made with, and nothing once they are not.

    Sleep of level 1 keeps the weights on the host, level 2 discards them. ``faulty`` says what goes wrong in a refit:
    ``overwrite`` (tensors of the policy land in the drafter of the same names), ``repack`` (the drafter's are laid out
    anew), ``stale`` (the policy keeps the old ones), ``drop`` (the last tensor does not arrive), ``scribble`` (a tensor
    that is not pushed moves). ``on_disk`` is whether the drafter can be loaded again, ``known`` the prompts that it can
    draft for (None: all).
    """

    def __init__(self, quality=0.75, own_weights=True, on_disk=True):
        self.policy, self.drafter = weights(0), weights(1) if own_weights else None
        self.quality, self.on_disk = quality, on_disk
        self.version, self.drafter_version = 0, 0 if own_weights else None
        self.faulty, self.packed = (), False
        self.is_drafting, self.busy = True, False
        self.answered, self.reloads = [], 0
        self.known = None
        self._good = self._sums(self.drafter)

    @staticmethod
    def _sums(tensors):
        return checksums(tensors or {})

    # What the sentinel asks

    def checksums(self, part):
        tensors = self.policy if part == "policy" else self.drafter
        if part == "policy" and self.packed:
            return {"fused": sum(self._sums(tensors).values()) % 2**64}
        return self._sums(tensors)

    def versions(self):
        return self.version, self.drafter_version

    def answer(self, requests):
        if self.busy:
            return None
        self.answered.append([request.request_id for request in requests])
        quality = self.quality if self._sums(self.drafter) == self._good else 0.0
        share = {r.prompt_key: quality if not self.known or r.prompt_key in self.known else 0.0 for r in requests}
        tokens = requests[0].params.max_tokens
        return [rollout(key, tokens, round(tokens * accepted)) for key, accepted in share.items()]

    def set_drafting(self, on):
        self.is_drafting = on

    def reload_drafter(self):
        self.reloads += 1
        if self.on_disk and self.drafter is not None:
            self.drafter = weights(1)
        return self.on_disk and self.drafter is not None

    # What the trainer does

    def load(self, version, tensors):
        loaded = dict(tensors)
        if "drop" in self.faulty:
            loaded.popitem()
        if "stale" not in self.faulty:
            self.policy.update({name: tensor.clone() for name, tensor in loaded.items()})
        if "overwrite" in self.faulty:
            self.drafter.update({name: tensor.clone() for name, tensor in loaded.items()})
        if "repack" in self.faulty:
            self.drafter = {name: tensor.T.contiguous() for name, tensor in self.drafter.items()}
        if "scribble" in self.faulty:
            self.policy["layer.1"][0, 0] += 1
        self.version = version
        return list(loaded)

    def sleep(self, level):
        self._host = (self.policy, self.drafter) if level == 1 else (None, None)
        self.policy, self.drafter = {}, {} if self.drafter is not None else None

    def wake(self):
        policy, drafter = self._host
        self.policy = policy or {name: torch.zeros(3, 5) for name in weights(0)}
        if self.drafter is not None:
            self.drafter = drafter or {name: torch.zeros(3, 5) for name in weights(1)}
