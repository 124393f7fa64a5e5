"""The ops of the models, one file for each: a torch reference, a fused Triton kernel, and the autograd function."""
