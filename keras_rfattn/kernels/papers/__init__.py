"""Closed forms that only the papers' tables need, as pure functions of NumPy arrays."""
