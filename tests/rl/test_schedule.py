"""Whatever finishes when: each step learns from its number of groups, none is learned from twice, none is too old."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.rl.curriculum import Item
from paceline.rl.schedule import Schedule
from paceline.rl.tasks.base import Prompt
from paceline.schema import Rollout, RolloutRequest

GROUPS_A_STEP = 2


def make_schedule(steps, max_age, exact=False):
    def items_of(step):
        return [
            Item(task="toy", prompt=Prompt(prompt_id=index, text="x"), tokens=np.array([1, 2], np.int32))
            for index in range(GROUPS_A_STEP * step, GROUPS_A_STEP * (step + 1))
        ]

    def requests_of(step, item):
        return [RolloutRequest(request_id=f"{item.name}/{i}", prompt=item.tokens, group=item.name) for i in range(2)]

    return Schedule(steps, max_age, exact=exact, items_of=items_of, requests_of=requests_of)


def rollout(request, version):
    reals, ids = np.zeros(1), np.ones(1, np.int32)
    return Rollout(
        request_id=request.request_id, group=request.group, prompt_key="", prompt=request.prompt, tokens=ids,
        logprobs=reals, raw_logprobs=reals, logprob_mode="processed", margins=reals, versions=ids * version,
        sources=np.zeros(1, np.uint8), finish_reason="length", forwards=1, drafted=0, accepted=0,
        accept_lengths=ids,
    )  # fmt: skip


def finish(group, version):
    for request in group.order.requests:
        group.rollouts.setdefault(request.request_id, rollout(request, version))


@settings(max_examples=100, deadline=None)
@given(data=st.data(), max_age=st.integers(0, 4), steps=st.integers(1, 8))
def test_every_order_of_events_keeps_the_age_bound_and_learns_from_each_group_once(data, max_age, steps):
    schedule, learned, every = make_schedule(steps, max_age), [], []
    for step in range(steps):
        every += schedule.admit(step)
        assert len(schedule.waiting) <= (max_age + 1) * GROUPS_A_STEP
        while (groups := schedule.ripe(step)) is None:
            group = data.draw(st.sampled_from([group for group in schedule.waiting if not group.is_complete]))
            if group.order.begun is None:
                group.order.begun = step
            else:
                finish(group, group.order.begun)
        assert len(groups) == GROUPS_A_STEP
        assert all(group.is_complete and step - group.oldest <= max_age for group in groups)
        schedule.learned(groups)
        learned += groups
        for group in schedule.waiting:
            if group.order.begun is None and data.draw(st.booleans()):
                group.order.begun = step
    assert schedule.waiting == []
    assert {id(group) for group in learned} == {id(group) for group in every}
    assert len(learned) == len(every) == steps * GROUPS_A_STEP


def test_where_order_matters_a_step_learns_from_its_own_groups_however_early_others_are_complete():
    schedule = make_schedule(3, 1, exact=True)
    first = schedule.admit(0)
    for group in first[GROUPS_A_STEP:]:
        finish(group, 0)
    assert schedule.ripe(0) is None
    for group in first[:GROUPS_A_STEP]:
        finish(group, 0)
    assert schedule.ripe(0) == first[:GROUPS_A_STEP]


def test_a_step_waits_for_what_would_be_too_old_in_the_next_and_lets_the_others_be():
    schedule = make_schedule(6, 2)
    early = schedule.admit(0)
    for group in early:
        group.order.begun = 0
    for group in early[4:]:
        finish(group, 0)
    assert schedule.ripe(0) == early[4:], "two steps are left for the four others"
    schedule.learned(early[4:])
    for group in (late := schedule.admit(1)):
        finish(group, 1)
    assert schedule.ripe(1) is None, "step 2 can take two of the four that began at version 0"
    finish(early[1], 0)
    assert schedule.ripe(1) is None
    finish(early[3], 0)
    assert schedule.ripe(1) == [early[1], early[3]]
    schedule.learned([early[1], early[3]])
    assert schedule.waiting == [early[0], early[2], *late]
