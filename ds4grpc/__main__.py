"""`python -m ds4grpc`: the same as the `ds4grpc` program."""

from ds4grpc.cli import main

main(prog_name="ds4grpc")
