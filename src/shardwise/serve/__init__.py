"""Inference with a trained model: an interactive chat, and a server with OpenAI's API."""
