"""The softmax checkpoint and the models that share its weights: finding, checking, loading, comparing."""
