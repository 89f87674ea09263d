"""The simulator put to the test, and the figures of docs/reports/simulator.md."""
