"""DeepSpeed's module paths below `deepspeed.runtime`."""
