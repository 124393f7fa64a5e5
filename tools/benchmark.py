"""Starts a benchmark: python tools/benchmark.py [WHAT] [flags]. `WHAT --help` explains it and its flags.

layouts      training beside PyTorch's own ways, on a CPU; the one without a WHAT
checkpoint   saving and loading
data         preparation of text
delivery     batches from data sets of any size
schedules    pipeline schedules on ranks that sleep, beside their simulation
times        predicted step times beside measured ones, on this CPU
products     fp32 products by oneDNN beside MKL, on a CPU
program      pretrain.py beside a bare loop around plain PyTorch, on a CPU
profile      CPU time of a training step by kind of operation, beside plain PyTorch
families     other families than Llama beside transformers, on a CPU
finetuning   fine-tuning on packs beside the Trainer of transformers, on a CPU
generation   texts continued beside transformers, on a CPU
packing      how full packs of conversations are, beside TRL's
frameworks   checkpoints of other frameworks, read and written
handoff      weights handed over in buckets, and tensor by tensor
restarts     what a lost rank and a snapshot cost
watching     what the flight log, metrics, sinks and hashes take of a step
recompute    step time and kept bytes of each train.recompute
losses       held-out losses of the quickstart by optimizer, for several seeds
fp8_descent  losses of train.fp8 blocks beside bf16, with planted faults
linear_attention   the delta rule beside transformers and flash-linear-attention, and over context-parallel ranks
optimizers   Newton-Schulz by rank, and steps of Muon, QK-clip and optimizer.offload
gpu          training models of billions of weights on one GPU
fp8_probe    rates of FP8 products and of what quantizes on one GPU, and whether they pay
kernels      every fused kernel on one GPU
"""

import importlib
import sys

import tyro
from benchmarks.harness import run

from megapar.launch.reporting import reported

# Each module has Options, and measure. Its docstring is its help.
MODULES = {
    "layouts": "benchmarks.layouts",
    "checkpoint": "benchmarks.checkpoint",
    "data": "benchmarks.data",
    "delivery": "benchmarks.delivery",
    "schedules": "benchmarks.schedules",
    "times": "benchmarks.step_times",
    "products": "benchmarks.cpu_products",
    "program": "benchmarks.program",
    "profile": "benchmarks.cpu_profile",
    "families": "benchmarks.families",
    "finetuning": "benchmarks.finetuning",
    "generation": "benchmarks.generation",
    "packing": "benchmarks.packing",
    "frameworks": "benchmarks.frameworks",
    "handoff": "benchmarks.handoff",
    "restarts": "benchmarks.restarts",
    "watching": "benchmarks.watching",
    "recompute": "benchmarks.recompute",
    "losses": "benchmarks.optimizer_losses",
    "fp8_descent": "benchmarks.fp8_descent",
    "linear_attention": "benchmarks.linear_attention",
    "optimizers": "benchmarks.optimizers",
    "gpu": "benchmarks.gpu",
    "fp8_probe": "benchmarks.fp8_probe",
    "kernels": "benchmarks.kernels.run",
}


def main() -> int:
    name = "layouts"
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        name = sys.argv.pop(1)
    if name not in MODULES:
        print(f"ConfigError: {name}: no such benchmark; {', '.join(MODULES)} are", file=sys.stderr)
        return 2
    with reported():
        # By name, so that only the modules of this one benchmark are imported.
        module = importlib.import_module(MODULES[name])
        options = tyro.cli(module.Options, prog=f"benchmark.py {name}", description=module.__doc__)
        run(module.measure, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
