"""DeepSpeed ZeRO 1, 2 and 3 (arXiv 1910.02054) over the existing process group."""

import warnings
from typing import ClassVar, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peers import Peer, Result, Weights, build, loss_sum, make_optimizer
from megapar.config.options import Config


class DeepSpeedZeRO1(Peer):
    """The plain model in DeepSpeed's engine, with PyTorch's fused AdamW on DeepSpeed's shards."""

    name = "DeepSpeed ZeRO-1"
    package: ClassVar[str] = "deepspeed"
    modules: ClassVar[tuple[str, ...]] = ("deepspeed", "deepspeed.ops")
    stage: ClassVar[Literal[1, 2, 3]] = 1

    def __init__(self, config: Config, weights: Weights, device: torch.device):
        super().__init__(config, weights, device)
        import deepspeed

        # It calls collectives by names that PyTorch will drop, and would say so in every process.
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        # Otherwise DeepSpeed compiles its own all-reduce, which only its inference uses, when it starts.
        if device.type == "cpu":
            deepspeed.ops.__compatible_ops__ = {}
        model = build(config, weights, device)
        # DeepSpeed reads this variable of its launcher, now and in steps.
        patch.dict("os.environ", LOCAL_RANK=str(self.rank)).start()
        self.engine = deepspeed.initialize(
            model=model,
            optimizer=make_optimizer(model.parameters(), config.optimizer),
            config={
                "train_batch_size": config.train.global_batch_size,
                "train_micro_batch_size_per_gpu": config.train.micro_batch_size,
                "gradient_clipping": config.optimizer.clip_grad,
                "zero_optimization": {"stage": self.stage},
                "zero_allow_untested_optimizer": True,
            },
            dist_init_required=False,
        )[0]

    def step(self, tokens_bs: Tensor, targets_bs: Tensor) -> Result:
        batch = self.micro_batches(tokens_bs, targets_bs)
        # DeepSpeed takes the mean over ranks and over micro-batches of what should be summed.
        scale = self.world * len(batch) / targets_bs.numel()
        total = torch.zeros((), device=self.device)
        for micro_tokens_bs, micro_targets_bs in batch:
            loss = loss_sum(self.engine(micro_tokens_bs), micro_targets_bs)
            self.engine.backward(loss * scale)
            self.engine.step()  # does nothing before the last micro-batch
            total += loss.detach()
        dist.all_reduce(total)
        return Result(total.item() / targets_bs.numel(), float(self.engine.get_global_grad_norm()))


class DeepSpeedZeRO2(DeepSpeedZeRO1):
    name = "DeepSpeed ZeRO-2"
    stage: ClassVar[Literal[1, 2, 3]] = 2


class DeepSpeedZeRO3(DeepSpeedZeRO1):
    name = "DeepSpeed ZeRO-3"
    stage: ClassVar[Literal[1, 2, 3]] = 3
