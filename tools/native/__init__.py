"""The data path of the shm backend in C, under random calls and delays, with and without sanitizers."""
