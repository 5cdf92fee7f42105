"""gRPC services, one file each, and the table from errors to status codes."""
