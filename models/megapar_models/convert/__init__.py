"""Conversion of other frameworks' checkpoints to native ones and back. A training run imports nothing of it."""
