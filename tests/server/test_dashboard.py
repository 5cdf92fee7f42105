"""The dashboard against a running server: every metric and label value that a panel asks for."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any

import pytest
from client import connect
from process import ServerProcess

pytestmark = pytest.mark.slow

SELECTOR = re.compile(r"(ds4grpc_[a-z0-9_]+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(=|=~)\s*"([^"]*)"')
TARGET_LABELS = {"job", "instance"}  # put there by Prometheus


def expressions(node: Any) -> list[str]:
    """All PromQL in a dashboard."""
    if isinstance(node, list):
        return [found for item in node for found in expressions(item)]
    if isinstance(node, dict):
        own = [node["expr"]] if isinstance(node.get("expr"), str) else []
        return own + [found for item in node.values() for found in expressions(item)]
    return []


async def test_every_expression_selects_something_of_a_running_server(
    smollm2_server: ServerProcess,
) -> None:
    dashboards = [f for f in (files("ds4grpc") / "grafana").iterdir() if f.name.endswith(".json")]
    found = [e for d in dashboards for e in expressions(json.loads(d.read_text()))]
    assert len(found) >= 8
    async with connect(smollm2_server.target) as client:
        await client.chat([("user", "Hi")], max_tokens=2)
    samples = smollm2_server.metrics()
    for expression in found:
        for name, matchers in SELECTOR.findall(expression):
            wanted = [m for m in MATCHER.findall(matchers) if m[0] not in TARGET_LABELS]
            assert any(
                sample.split("{")[0] == name and all(fits(sample, *m) for m in wanted)
                for sample in samples
            ), (name, matchers, expression)


def fits(sample: str, label: str, operator: str, value: str) -> bool:
    if "$" in value:  # a variable of the dashboard
        return True
    shown = re.search(rf'\b{label}="([^"]*)"', sample)
    if shown is None:
        return False
    return shown[1] == value if operator == "=" else re.fullmatch(value, shown[1]) is not None
