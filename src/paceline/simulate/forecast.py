"""What a drafter will gain on the steps ahead, from its gains so far."""

from collections.abc import Sequence

import numpy as np

from paceline.simulate.lengths import Floats
from paceline.simulate.metered import Account

#: Each step counts this much of the one after it: what was seen last is nearest to what comes.
FADES = 0.5
#: A trend is believed as if this many squared steps of no trend had been seen as well.
DOUBT = 2.0
#: Log-speedups that differ by less are alike.
ALIKE = 0.04


def forecast(gains_CT: Floats, ahead: int) -> Floats:
    """(C,): mean log-speedup of C candidates over the ``ahead`` steps after the T that are known.

    A line through each candidate's log-speedups, by least squares with weights ``FADES`` ** age and a slope that is
    shrunk to 0 (ridge; Hoerl & Kennard, Technometrics 12, 1970): histories grow, so what longer drafts gain rises, and
    a mean over the steps seen would be that of a run with less to remember.
    """
    steps = gains_CT.shape[1]
    age_T = np.arange(steps)[::-1].astype(np.float64)
    weight_T = FADES**age_T / np.sum(FADES**age_T)
    middle = float(weight_T @ age_T)
    mean_C = gains_CT @ weight_T
    spread = float(weight_T @ (age_T - middle) ** 2)
    slope_C = (gains_CT - mean_C[:, None]) @ (weight_T * (middle - age_T)) / (spread + DOUBT)
    forecast_C: Floats = mean_C + slope_C * (middle + (1 + ahead) / 2)
    return forecast_C


def steady_drafting(accounts: Sequence[Account]) -> Floats:
    """(T,): seconds of generation and of training the drafter by step, drafting at its median rate over the steps.

    The clock of a busy machine errs upwards, and differently for each candidate.
    """
    rate = float(np.median([account.draft_seconds / account.row_forwards for account in accounts]))
    return np.array([a.pass_seconds + rate * a.row_forwards + a.train_seconds for a in accounts])
