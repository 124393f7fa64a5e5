"""Every fused kernel beside torch, torch.compile and Liger-Kernel, and other launch configurations of it."""
