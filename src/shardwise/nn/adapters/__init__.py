"""Parameter-efficient methods in PEFT's format, and quantised base weights."""
