"""Training objectives: each turns a micro-batch into a summed loss."""
