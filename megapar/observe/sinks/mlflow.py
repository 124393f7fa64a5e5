"""Sends the numbers of a run to an MLflow server or folder (log.mlflow)."""

import importlib
import re
import time
from collections.abc import Iterable
from itertools import islice
from typing import Any

from megapar.observe.sinks.base import Line, RunInfo, scalars
from megapar.observe.sinks.curve import replayed

_EXPERIMENT = "megapar"
_TAG = "megapar.curve"
_MOST_METRICS = 1000  # of one request, by MLflow's REST API
_MOST_PARAMS = 100
_MOST_LETTERS = 500  # of a parameter


class MLflow:
    """A sink. The run is found again by a tag with the id of its curve. MLFLOW_EXPERIMENT_NAME names the experiment."""

    name = "MLflow"

    def __init__(self, run: RunInfo, uri: str):
        self._info = run
        self._uri = uri
        self._client: Any = None
        self._metric: Any = None
        self._run_id = ""

    def open(self) -> str:
        """Begin the run, or go on with it. Returns where it is."""
        mlflow = importlib.import_module("mlflow")
        entities = importlib.import_module("mlflow.entities")
        variables = importlib.import_module("mlflow.environment_variables")
        self._metric = entities.Metric
        name = variables.MLFLOW_EXPERIMENT_NAME.get() or _EXPERIMENT
        client = self._client = mlflow.MlflowClient(tracking_uri=self._uri)
        experiment = client.get_experiment_by_name(name)
        number = client.create_experiment(name) if experiment is None else experiment.experiment_id
        found = client.search_runs([number], filter_string=f"tags.`{_TAG}` = '{self._info.curve}'", max_results=1)
        if found:
            self._run_id = found[0].info.run_id
            client.update_run(self._run_id, status="RUNNING")
        else:
            title = self._info.run_dir.resolve().name
            self._run_id = client.create_run(number, tags={_TAG: self._info.curve}, run_name=title).info.run_id
            self._log_options(entities.Param)
        if self._info.replays:
            self.write(replayed(self._info.run_dir, self._info.first_step))
        return f"run {self._run_id} of experiment {name} at {self._uri}"

    def _log_options(self, param: Any) -> None:
        params = [param(key, str(value)[:_MOST_LETTERS]) for key, value in self._info.options.items()]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._run_id, params=params[first : first + _MOST_PARAMS])

    def write(self, lines: Iterable[Line]) -> None:
        """Send the numbers of lines in as few requests as MLflow allows."""
        now = int(time.time() * 1000)
        numbers = (
            self._metric(_allowed(key), float(value), now, line["step"])
            for line in lines
            for key, value in scalars(line)
        )
        while batch := list(islice(numbers, _MOST_METRICS)):
            self._client.log_batch(self._run_id, metrics=batch)

    def close(self) -> None:
        """Mark the run as finished. A run that goes on later is running again."""
        self._client.set_terminated(self._run_id)

    def abandon(self) -> None:
        """Nothing holds up the end of the process."""


def _allowed(name: str) -> str:
    """The name of a metric without letters that MLflow refuses."""
    return re.sub(r"[^\w\-./ ]", "_", name, flags=re.ASCII)
