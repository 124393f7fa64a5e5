"""What a checkpoint says of texts, in any layout: log-probabilities, perplexity, continuations, tasks of a harness."""
