"""Export of a trained model: GGUF files, comparison with the trained model, model cards, the hub."""
