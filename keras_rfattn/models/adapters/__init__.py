"""Facts about other people's models: one table (`known`), and a file a library."""
