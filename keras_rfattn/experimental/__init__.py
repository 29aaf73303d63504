"""Programs that no timed row supports yet; nothing else of the package imports them.

Each folder says what was measured, what was not, and which row would bring it into the
core of the package.
"""
