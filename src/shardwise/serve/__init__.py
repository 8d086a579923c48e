"""Talking to a trained model: `generate` turns a conversation into an answer, `chat` puts a terminal around it."""
