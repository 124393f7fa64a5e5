"""Without a GPU Triton's kernels are interpreted: the variable must be set before anything imports triton."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
