"""The parallel plans of transformers under `gradmesh check`: tiny models with random weights, release by release."""
