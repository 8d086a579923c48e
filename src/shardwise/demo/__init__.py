"""The demo: teaches facts about distributed training to a small pretrained model on a CPU."""
