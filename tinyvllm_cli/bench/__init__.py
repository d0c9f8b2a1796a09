"""Measurement: what is run, how it is timed, and what the machine could do. Nothing is shown here."""
