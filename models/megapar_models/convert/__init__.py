"""Checkpoints of other frameworks to native ones and back. A training run imports nothing of this."""
