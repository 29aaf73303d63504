"""Facts about other libraries' models: a table (`known`) and one file per library."""
