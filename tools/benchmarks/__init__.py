"""All measuring programs; python tools/benchmark.py starts them."""
