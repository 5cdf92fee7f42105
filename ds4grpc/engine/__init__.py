"""The continuous-batching engine: one thread that owns slots, batches and sampling."""
