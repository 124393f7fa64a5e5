"""Every fused kernel beside torch, torch.compile and Liger-Kernel."""
