"""Attention whose tokens are divided over several devices."""
