"""What is approximated (`exact`), and with what variance."""
