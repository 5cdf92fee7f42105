"""The commands of `ds4grpc`, a file each, loaded when they are asked for."""
