"""One file an op: today the differentiable torch reference of each, the functions that fused kernels stand behind."""
