"""ds4grpc: an LLM inference microservice whose KV banks live on disk."""

__version__ = "0.1.0"
