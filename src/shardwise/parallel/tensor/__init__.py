"""Tensor and sequence parallelism for unmodified Hugging Face models."""
