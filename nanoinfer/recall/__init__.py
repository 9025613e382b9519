"""The text that the project's own small model, "recall", is trained on and asked about."""
