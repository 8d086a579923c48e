"""What a model is trained to do: each objective turns a micro-batch into a summed loss."""
