"""The sinks that the options of a run ask for."""

from collections.abc import Callable, Mapping

from megapar.config.options import LogConfig
from megapar.observe.sinks.base import RunInfo, Sink
from megapar.observe.sinks.mlflow import MLflow
from megapar.observe.sinks.prometheus import Prometheus
from megapar.observe.sinks.tensorboard import TensorBoard
from megapar.observe.sinks.wandb import WeightsAndBiases

# By option of the section `log`. A sink is made if its option is set.
SINKS: Mapping[str, Callable[[RunInfo, LogConfig], Sink]] = {
    "tensorboard": lambda run, options: TensorBoard(run),
    "wandb": lambda run, options: WeightsAndBiases(run, options.wandb),
    "mlflow": lambda run, options: MLflow(run, options.mlflow),
    "prometheus_port": lambda run, options: Prometheus(run, options.prometheus_port),
}


def chosen(options: LogConfig, run: RunInfo) -> list[Sink]:
    """Make the sinks that `options` ask for. Raises StorageError if TensorBoard's folder cannot be written."""
    return [make(run, options) for name, make in SINKS.items() if getattr(options, name) not in (False, 0, "none")]


def tracks(options: LogConfig) -> bool:
    """Whether a service keeps a curve of the run."""
    return (options.wandb, options.mlflow) != ("none", "none")
