"""Optimizer states, parameters and gradients in host memory or on disk: ZeRO-Offload and ZeRO-Infinity."""
