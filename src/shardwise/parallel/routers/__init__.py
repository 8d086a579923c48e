"""Routers of mixture-of-experts models: losses, loads, and the biases that balance them."""
