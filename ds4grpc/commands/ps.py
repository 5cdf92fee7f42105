"""`ds4grpc ps`: what runs, what waits, what has just ended."""

from __future__ import annotations

import click

from ds4grpc.commands.client import connected
from ds4grpc.commands.options import Target, client_options
from ds4grpc.commands.output import age, json_line, table, word
from ds4grpc.v1 import generation_pb2 as pb
from ds4grpc.v1 import generation_pb2_grpc

COLUMNS = ("REQUEST", "STATE", ">SLOT", "ADMISSION", "MISS", ">CACHED", ">TOKENS", ">AGE", "END")
UNENDED = (pb.GENERATION_STATE_RUNNING, pb.GENERATION_STATE_QUEUED)


@click.command()
@click.option("--all/--running", "show_all", default=True, help="With or without ended ones.")
@client_options
def ps(target: Target, show_all: bool) -> None:
    """List running, queued and recent generations."""
    request = pb.ListGenerationsRequest(states=() if show_all else UNENDED)
    with connected(target) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        found = stub.ListGenerations(request, metadata=target.metadata).generations
    if target.as_json:
        for generation in found:
            json_line(generation)
    else:
        table(COLUMNS, [_row(generation) for generation in found])


def _row(one: pb.Generation) -> list[str]:
    begun = one.admission != pb.ADMISSION_UNSPECIFIED
    finish = word(pb.FinishReason.Name(one.finish_reason), "FINISH_REASON_")
    return [
        one.request_id,
        word(pb.GenerationState.Name(one.state), "GENERATION_STATE_"),
        str(one.slot) if one.state == pb.GENERATION_STATE_RUNNING else "-",
        word(pb.Admission.Name(one.admission), "ADMISSION_") or "-",
        word(pb.MissReason.Name(one.miss_reason), "MISS_REASON_") or "-",
        f"{one.cached_tokens}/{one.prompt_tokens}" if begun else f"-/{one.prompt_tokens}",
        str(one.generated_tokens),
        age(one.create_time),
        finish or one.code.lower() or "-",
    ]
