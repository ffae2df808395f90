"""Audits of vLLM: what every request may ask for, a refit, aborted company, against witnesses that teacher-force."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from transformers import PreTrainedModel

from paceline.audit.certificate import Check
from paceline.audit.conduct import Terms
from paceline.audit.lease import Garage
from paceline.audit.models import Decode, ModelCase, ModelSubject
from paceline.audit.reference import reference_law
from paceline.audit.staged import Staged
from paceline.audit.subject import Laws
from paceline.audit.vllm_faults import explained
from paceline.engines.base import Engine
from paceline.sampling.grammar import Matcher, Vocabulary
from paceline.schema import Grammar, Rollout, RolloutRequest, SamplingParams, Tokens, as_tokens, derive_seed

#: How far a refit of an audit moves each matrix, in standard deviations of its entries.
_REFIT_SPREAD = 0.3
_ABORT_AFTER = 3
#: Two letters to six, then two digits: some tokens are forced, some ends are open.
PATTERN = "[a-h]{2,6}[0-9]{2}"


@dataclass(frozen=True)
class VllmCase(ModelCase):
    """A case of the audit of vLLM.

    ``world`` names the policy that decodes it. Before it the weights may move (``refit``), all of them or those of a
    part of each fused layer; beside its requests others
    may run, of other parameters, and be aborted with ``aborts``. ``repeats`` claims that a request that is decoded
    alone, with its seed, gives the same tokens again. With ``estimates`` responses end where vLLM does not know of it,
    so what was drafted for each is estimated.
    """

    world: str = "policy"
    refit: Literal["", "whole", "part"] = ""
    company: bool = False
    aborts: bool = False
    repeats: bool = False
    estimates: bool = False


@dataclass(frozen=True)
class World:
    """A policy on disk and its witness; ``ties`` says that the output shares the embeddings."""

    path: Path
    witness: PreTrainedModel

    @property
    def ties(self) -> bool:
        """Whether the output's matrix is the embeddings'."""
        return bool(self.witness.config.tie_word_embeddings)


@dataclass(frozen=True)
class Wanted:
    """What an engine is to be like: the directory of its policy, and what differs from engine to engine of an audit."""

    path: Path
    speculate: bool
    logprobs: Literal["processed", "raw"] = "processed"
    slots: int | None = None
    refit_names: tuple[str, ...] | None = None


Build = Callable[[Wanted], Engine]


class VllmSubject(ModelSubject):
    """vLLM on the policies of ``worlds``, ``policy`` the first of them; ``build`` makes its engines.

    ``faults`` are those of vLLM that are to be expected, by name, and how they are called. With ``speculates`` false
    the audit is one of plain decoding. ``tokenizer`` is the witness of grammars. ``folder`` is a temporary directory
    that goes with the subject.
    """

    def __init__(
        self,
        build: Build,
        worlds: Mapping[str, World],
        *,
        name: str,
        engine_name: str,
        settings: dict[str, str],
        prompts: Sequence[Tokens],
        context: int,
        eos_ids: tuple[int, ...],
        decode: Decode,
        tokenizer: Any,
        speculates: bool = True,
        faults: Mapping[str, str] | None = None,
        witness: bool = True,
        siblings: int = 24,
        max_tokens: int = 16,
    ) -> None:
        policy = worlds["policy"].witness
        super().__init__(
            lambda speculate, slots: build(Wanted(worlds["policy"].path, speculate, slots=slots)),
            name=name,
            engine_name=engine_name,
            settings=settings,
            prompts=prompts,
            vocabulary=int(policy.config.get_text_config().vocab_size),
            context=context,
            eos_ids=eos_ids,
            decode=decode,
            witness=policy if witness else None,
            keyed=False,
            siblings=siblings,
            max_tokens=max_tokens,
        )
        self.knows_both_modes = False
        self.folder: Any = None
        self._build_vllm = build
        self._garage = Garage()
        self._worlds = dict(worlds)
        self._speculates = speculates
        self._moved: dict[tuple[str, str], PreTrainedModel] = {}
        self._faults = dict(faults or {})
        self._grammars = Vocabulary(tokenizer)
        self._matchers: dict[tuple[str, str], Matcher] = {}

    def cases(self, scale: float) -> Sequence[VllmCase]:
        """Every parameter by itself, and what an engine does besides."""
        siblings, longest = max(int(self._siblings * scale), 2), self._max_tokens
        few, ids = max(siblings // 2, 2), list(range(self._vocabulary))
        likely = self._likely
        regex = Grammar(kind="regex", text=PATTERN)
        table: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
            ("plain", 2 * siblings, {}, {}),
            ("cool", siblings, {"temperature": 0.7}, {}),
            ("greedy", 2, {"temperature": 0.0}, {}),
            ("top-k", siblings, {"top_k": 5}, {}),
            ("top-p", siblings, {"top_p": 0.8}, {}),
            ("min-p", few, {"min_p": 0.05}, {}),
            ("bias", few, {"logit_bias": {likely[0]: -2.0, likely[-1]: 2.0}}, {}),
            ("repeats", siblings, {"repetition_penalty": 1.3}, {}),
            ("presence", siblings, {"presence_penalty": 0.7}, {}),
            ("frequency", siblings, {"frequency_penalty": 0.7}, {}),
            ("words", few, {"bad_words": ((likely[0],), (likely[1], likely[2]))}, {}),
            ("least", few, {"min_tokens": 6, "stop_token_ids": tuple(likely[:3])}, {}),
            ("allowed", few, {"allowed_token_ids": tuple(ids[::2])}, {}),
            ("stop ids", siblings, {"stop_token_ids": tuple(likely[:2])}, {}),
            ("stop strings", siblings, {"stop": self._stops(likely)}, {"estimates": True}),
            ("past the end", few, {"ignore_eos": True}, {}),
            ("five", siblings, {"max_tokens": 5, "ignore_eos": True}, {}),
            ("limit", few, {"max_tokens": 64, "ignore_eos": True}, {"prompts": self._long(8)}),
            ("short prompts", max(siblings, 8), {"max_tokens": 6}, {"prompts": self._short()}),
            ("grammar", siblings, {"grammar": regex}, {}),
            ("trigger", 2, {"grammar": replaced(regex, trigger=(likely[0],))}, {}),
            ("siblings", 2, {"n": max(siblings // 2, 2)}, {}),
            ("company", few, {}, {"company": True}),
            ("aborts", few, {}, {"company": True, "aborts": True, "estimates": True}),
            ("raw", few, {"temperature": 0.5, "logprobs": "raw"}, {}),
            ("seeds", 2, {}, {"repeats": True}),
            ("refit", few, {}, {"refit": "whole"}),
            ("refit, in part", few, {}, {"refit": "part"}),
        ]
        if "tied" in self._worlds:
            table.append(("refit, tied", few, {}, {"refit": "whole", "world": "tied"}))
        return [
            VllmCase(
                name=name,
                siblings=count,
                params={"max_tokens": longest, **params},
                drafted=self._speculates,
                **{"prompts": self._prompts, **more},
            )
            for name, count, params, more in table
        ]

    def engine(self, case: ModelCase, speculate: bool, *, slots: int | None = None) -> Engine:
        """An engine, and what the case does with it before and beside its requests."""
        assert isinstance(case, VllmCase)
        world = self._worlds[case.world]
        names = tuple(self._tensors(case)) if case.refit == "part" else None
        wanted = Wanted(world.path, speculate, case.params.get("logprobs", "processed"), slots, names)
        # An engine that is asked for by its slots is a second one, which knows nothing of the first.
        engine = self._garage.lease(wanted if slots is None else None, lambda: self._build_vllm(wanted))
        company = self._company(case) if case.company else ()
        if not (case.refit or company):
            return engine
        before = [
            RolloutRequest(request_id=f"before/{case.name}/{index}", prompt=prompt, params=SamplingParams(max_tokens=4))
            for index, prompt in enumerate(case.prompts)
        ]
        return Staged(
            engine,
            before=before if case.refit else (),
            tensors=self._tensors(case) if case.refit else None,
            company=company,
            abort_after=_ABORT_AFTER if case.aborts else None,
        )

    def close(self) -> None:
        """End the engine that is kept, and remove the policies that were written for the audit."""
        self._garage.close()
        if self.folder is not None:
            self.folder.cleanup()

    def terms(self, case: ModelCase, params: SamplingParams) -> Terms:
        """The policy's own stops, those of the parameters, and the form that a grammar gives."""
        return replace(super().terms(case, params), pattern=None if params.grammar is None else PATTERN)

    def laws(self, case: ModelCase, rollout: Rollout, params: SamplingParams) -> Laws:
        """One full forward over prompt and response; a grammar's masks are llguidance's, not vLLM's."""
        if params.grammar is None:
            return super().laws(case, rollout, params)
        raw_TV = self._logits(case, rollout)
        stops = self.terms(case, params).stop_ids
        plain = replaced(params, grammar=None)
        laws = []
        for t, raw_V in enumerate(raw_TV):
            before = rollout.tokens[:t]
            masked = replaced(plain, allowed_token_ids=self._allowed(params.grammar, before, stops))
            laws.append(reference_law(raw_V, masked, rollout.prompt, before, stops))
        return raw_TV, np.stack(laws)

    def at_edge(self, case: ModelCase, rollout: Rollout, position: int, params: SamplingParams) -> bool:
        """Whether rounding decides if the token there is inside a cut-off; it decides nothing about a grammar."""
        return params.grammar is None and super().at_edge(case, rollout, position, params)

    def witness_of(self, case: ModelCase) -> PreTrainedModel | None:
        """The case's policy, after the refit where it has one."""
        if self._witness is None or not isinstance(case, VllmCase):
            return self._witness
        return self._moved_model(case) if case.refit else self._worlds[case.world].witness

    def known_fault(self, check: Check) -> str | None:
        """The known fault of vLLM that explains a check which failed or was refused."""
        case = next((case for case in self.cases(1.0) if case.name == check.case), None)
        if case is None:
            return None
        name = explained(check, case, self._worlds[case.world].ties, self._faults)
        return None if name is None else self._faults[name]

    def _moved_model(self, case: VllmCase) -> PreTrainedModel:
        key = case.world, case.refit
        if key not in self._moved:
            self._moved[key] = moved(self._worlds[case.world].witness, part=case.refit == "part")
        return self._moved[key]

    def _tensors(self, case: VllmCase) -> dict[str, torch.Tensor]:
        """The new weights of a refit, tied ones once; of a refit in part, those that move."""
        model = self._moved_model(case)
        return {
            name: parameter.detach()
            for name, parameter in model.named_parameters()
            if case.refit == "whole" or _is_part(name)
        }

    def _allowed(self, grammar: Grammar, before: Tokens, stops: Sequence[int]) -> tuple[int, ...]:
        """The ids that may follow, those that end the response among them."""
        key = grammar.kind, grammar.text
        if key not in self._matchers:
            self._matchers[key] = self._grammars.matcher(grammar)
        allowed = self._matchers[key].allowed(before)
        if allowed is None:
            return tuple(stops)
        ids = np.flatnonzero(allowed.is_allowed_V).tolist()
        return (*ids, *stops) if allowed.may_end else tuple(ids)

    def _company(self, case: VllmCase) -> list[RolloutRequest]:
        """Requests of other parameters, long enough to be there when they are aborted."""
        others: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"temperature": 0.3},
            {"top_k": 2},
            {"temperature": 1.5, "top_p": 0.5},
            {"frequency_penalty": 1.0},
        ]
        return [
            RolloutRequest(
                request_id=f"company/{case.name}/{index}",
                prompt=prompt,
                params=SamplingParams(max_tokens=48, ignore_eos=True, **others[index % len(others)]),
            )
            for index, prompt in enumerate(case.prompts * 2)
        ]

    @cached_property
    def _likely(self) -> list[int]:
        """Four ids that the policy is likely to say after the prompts, none of them an end."""
        model = self._worlds["policy"].witness
        with torch.inference_mode():
            laws = [model(torch.tensor([prompt.tolist()])).logits[0, -1].softmax(-1) for prompt in self._prompts]
        order = torch.stack(laws).mean(0).argsort(descending=True).tolist()
        return [token for token in order if token not in self._eos_ids][:4]

    def _stops(self, likely: Sequence[int]) -> tuple[str, ...]:
        """Stop strings that come: one token's text, and that of two."""
        assert self._decode is not None
        one, two = self._decode([likely[0]]), self._decode([likely[1], likely[2]])
        return tuple(text for text in (one, two) if text) or ("e",)

    def _short(self) -> tuple[Tokens, ...]:
        """One token each: what is left of a prompt of which the rest is shared."""
        return tuple(prompt[-1:] for prompt in self._prompts)

    def _long(self, room: int) -> tuple[Tokens, ...]:
        """The prompts, each repeated until there is room for ``room`` more tokens or fewer before the context's end."""
        lengths = [self._context - room + index % 4 for index in range(len(self._prompts))]
        return tuple(as_tokens(np.resize(p, length)) for p, length in zip(self._prompts, lengths, strict=True))


def moved(model: PreTrainedModel, *, part: bool = False) -> PreTrainedModel:
    """A copy whose matrices all differ from the model's, the same at every call; with ``part`` some of them do."""
    import copy

    other = copy.deepcopy(model).requires_grad_(False)
    for name, parameter in other.named_parameters():
        if parameter.ndim == 2 and (not part or _is_part(name)):
            generator = torch.Generator().manual_seed(derive_seed("audit", "refit", name) % 2**63)
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(_REFIT_SPREAD * parameter.std() * noise.to(parameter.dtype))
    return other


def _is_part(name: str) -> bool:
    """Whether a parameter is one of several that vLLM fuses to a matrix."""
    return ".q_proj." in name or ".up_proj." in name


def replaced(struct: Any, **changes: Any) -> Any:
    """A copy of a record with some fields changed."""
    return msgspec.structs.replace(struct, **changes)
