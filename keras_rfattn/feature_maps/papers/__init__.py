"""Estimators for the papers' tables, registered like a third party's maps."""
