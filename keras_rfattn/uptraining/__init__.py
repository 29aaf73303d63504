"""Bringing a replaced model back to the quality of its softmax original."""
