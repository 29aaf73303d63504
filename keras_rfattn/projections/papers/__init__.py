"""Projections that only the papers' tables need."""
