"""What is approximated (`values`), and with what variance."""
