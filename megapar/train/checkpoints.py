"""A training state to and from the checkpoints of its run folder."""

from dataclasses import asdict
from pathlib import Path

from megapar.checkpoint.load import choose, load
from megapar.checkpoint.save import save
from megapar.config import flatten
from megapar.data.order import ORDER_VERSION
from megapar.precision import LossScale
from megapar.train.step import TrainState
from megapar.validate import changes, weight_options

FOLDER = "checkpoints"


def write(state: TrainState, run_dir: Path) -> Path:
    """Save weights, moments and position under run_dir/checkpoints, complete or not at all. A collective."""
    config, parallel = state.config, state.config.parallel
    return save(
        run_dir / FOLDER,
        slices=state.optimizer.slices(),
        ctx=state.ctx,
        replicated=not state.grads.sharded,
        step=state.step,
        consumed_samples=state.consumed_samples,
        layout={"tp": parallel.tp, "pp": parallel.pp, "dp": parallel.dp, "vpp": parallel.vpp},
        model_config=weight_options(config),
        trainer={
            "updates": state.optimizer.step_count,
            "loss_scale": asdict(state.loss_scale) if state.loss_scale.dynamic else None,
            "config": flatten(config),
        },
        data={"train": list(config.data.train), "tokenizer": config.data.tokenizer, "order": ORDER_VERSION},
    )


def resume(state: TrainState, run_dir: Path) -> list[str]:
    """Go on from the checkpoint that `checkpoint.resume` names, if there is one; returns what to tell the user.

    Weights and moments are restored bit for bit, whatever layout wrote them. Raises CheckpointError on every rank if
    the checkpoint is damaged or of another model.
    """
    path = choose(state.config.checkpoint.resume, run_dir / FOLDER, state.ctx)
    if path is None:
        return []
    manifest = load(path, slices=state.optimizer.slices(), ctx=state.ctx, model_config=weight_options(state.config))
    state.optimizer.step_count = manifest.trainer["updates"]
    state.optimizer.refresh_params_from_main()
    if state.loss_scale.dynamic and manifest.trainer["loss_scale"]:
        state.loss_scale = LossScale(**manifest.trainer["loss_scale"])
    state.step, state.consumed_samples = manifest.step, manifest.consumed_samples
    different = changes(manifest.trainer["config"], state.config)
    return [f"resumed step {state.step} from {path}", *(f"changed since: {line}" for line in different)]
