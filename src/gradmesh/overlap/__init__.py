"""Calls that are begun and waited for later, forward and backward."""
