"""Everything that measures; python tools/benchmark.py starts it."""
