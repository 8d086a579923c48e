"""Methods that train a small part of a model: low-rank updates, factors, chosen modules; in PEFT's format."""
