"""The checks of an audit, one file per group of kinds: functions of a `Case` that yield findings (`audit.CHECKS`)."""
