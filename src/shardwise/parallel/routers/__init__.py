"""Routers of mixture-of-experts models: their losses, their loads, and the biases that balance them."""
