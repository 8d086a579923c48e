"""Hand-over of a trained model: GGUF files, checks against the trained one, model cards, the hub."""
