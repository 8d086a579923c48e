"""The demo: facts about distributed training, taught to a small real model on a CPU."""
