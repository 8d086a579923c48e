"""Methods that train a small part of a model, in PEFT's format, and the few bits that stand in for the rest of it."""
