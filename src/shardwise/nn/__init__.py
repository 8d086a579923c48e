"""Models, attention, adapters and kernels: everything that computes within one rank."""
