"""Execution: operations whose best form depends on the backend or the device."""
