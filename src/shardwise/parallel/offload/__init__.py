"""States off the device, in host memory or on disk: optimizer states, gradients, parameters."""
