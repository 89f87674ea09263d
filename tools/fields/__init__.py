"""What fields that are cut over ranks cost, and how far they are from whole ones; `python -m tools.fields` shows it."""
