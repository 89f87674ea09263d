"""A picture of a SARIF file as a code host shows it."""
