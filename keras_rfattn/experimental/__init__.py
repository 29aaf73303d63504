"""Code that no timed row of a results page supports yet; each file says what would."""
