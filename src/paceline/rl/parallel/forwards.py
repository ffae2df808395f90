"""Pipelines whose pass learns nothing: schedules of several stages a rank without what follows the forwards."""

from typing import Any

_KEPT = ("F", "SEND_F", "RECV_F", "UNSHARD", "RESHARD")


def leave_out_backward(schedule: Any) -> None:
    """Let a schedule of several stages a rank do its forwards alone, in their order.

    Torch's ``eval`` goes through the backwards too, without doing any. But stages that follow one another on a rank
    hand on the gradient of their input, which is not there, and gradients would be reduced.
    """
    for actions in schedule.pipeline_order_with_comms.values():
        every = [part for action in actions for part in action.sub_actions or (action,)]
        actions[:] = [action for action in every if action.computation_type.value in _KEPT]
