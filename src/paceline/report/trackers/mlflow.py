"""MLflow: a server, or a database in the run's folder."""

import math
import os
import re
import time
from typing import Any

# Usage reports to the maker, and minutes of waiting for a server that is gone.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from paceline.files import to_json
from paceline.report.trackers.base import Tracked, charted
from paceline.schema import StepRecord

#: MLflow's limits: parameters at once, and characters of a value.
_PARAMS, _VALUE = 100, 6000
#: A metric that every step has.
_ALWAYS = "tokens"


class MlflowTracker:
    """A run of MLflow, in the experiment that is named as the project is."""

    def __init__(self, run: Tracked) -> None:
        track = run.config.track
        uri = track.mlflow.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.out.resolve()}/mlflow.db"
        self._client = MlflowClient(tracking_uri=uri)
        if run.id is not None:
            self.id = run.id
            self.told = max((metric.step for metric in self._client.get_metric_history(self.id, _ALWAYS)), default=-1)
            self._client.update_run(self.id, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(track.project)
        number = self._client.create_experiment(track.project) if experiment is None else experiment.experiment_id
        self.id, self.told = self._client.create_run(number, run_name=run.name).info.run_id, -1
        params = [Param(_name(key), _text(value)) for key, value in run.parameters.items()]
        for start in range(0, len(params), _PARAMS):
            self._client.log_batch(self.id, params=params[start : start + _PARAMS])

    def log(self, record: StepRecord) -> None:
        """The step's numbers that are finite: MLflow's databases have no infinity."""
        now = int(1000 * time.time())
        told = {_name(key): value for key, value in charted(record).items() if math.isfinite(value)}
        self._client.log_batch(self.id, metrics=[Metric(key, value, now, record.step) for key, value in told.items()])

    def close(self) -> None:
        """The run is finished."""
        self._client.set_terminated(self.id)


def _name(key: str) -> str:
    """``key`` with what MLflow refuses replaced."""
    return re.sub(r"[^\w\-. /:]", "_", key)


def _text(value: Any) -> str:
    return (value if isinstance(value, str) else to_json(value))[:_VALUE]
