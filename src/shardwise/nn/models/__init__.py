"""Any Hugging Face causal model: found, built without memory, and filled shard by shard."""
