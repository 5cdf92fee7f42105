"""Metrics: names, closed label sets, the laws that hold at any scrape, docs and dashboard."""

import json
import random
import re
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from ds4grpc import families as module
from ds4grpc.bank import Admission, MissReason, PersistReason, RecordKind
from ds4grpc.config import Address
from ds4grpc.engine.request import FinishReason, Started
from ds4grpc.engine.slots import SlotState
from ds4grpc.errors import BankCorrupt, ConfigError
from ds4grpc.families import FAMILIES, Family, families_by_sample
from ds4grpc.metrics import BuildInfo, EngineState, Metrics, MetricsListener, StoreState
from ds4grpc.store.database import CatalogError

ROOT = Path(__file__).parents[2]
BUILD = BuildInfo("0.1.0", "smollm2", "0123456789abcdef", "float32", "cpu")


def new_metrics() -> tuple[CollectorRegistry, Metrics]:
    registry = CollectorRegistry()
    return registry, Metrics(registry, BUILD)


def samples(registry: CollectorRegistry) -> dict[str, Counter[tuple[tuple[str, str], ...]]]:
    """One scrape: sample name -> labels -> value."""
    found: dict[str, Counter[tuple[tuple[str, str], ...]]] = {}
    for family in registry.collect():
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            found.setdefault(sample.name, Counter())[labels] = int(sample.value)
    return found


def started(admission: Admission, prompt: int, memory: int, disk: int) -> Started:
    return Started(
        prompt_tokens=prompt,
        memory_tokens=memory,
        disk_tokens=disk,
        hidden_tokens=3,
        admission=admission,
        bank_id="",
        miss_reason=MissReason.NO_RECORD if admission is Admission.COLD else None,
        queue_seconds=0.01,
        pos_base=memory + disk,
        suffix_tokens=prompt - memory - disk,
        seed=0,
        slot=0,
    )


def test_every_combination_of_closed_labels_exists_at_zero() -> None:
    registry, _ = new_metrics()
    seen = samples(registry)
    for family in FAMILIES:
        if family.name == "ds4grpc_build_info":
            continue
        num_series = 1
        for values in family.labels.values():
            num_series *= len(values)
        name = family.name + ("_count" if family.kind == "histogram" else "")
        assert len(seen[name]) == num_series, name
        assert set(seen[name].values()) == {0}, name
    assert set(seen) == set(families_by_sample())


def test_label_values_are_the_enums_of_the_code() -> None:
    assert module.FINISH_REASONS == ("none", *FinishReason)
    assert module.SLOT_STATES == tuple(SlotState)
    assert module.ADMISSIONS == tuple(Admission)
    assert module.MISS_REASONS == tuple(MissReason)
    assert module.CATALOG_FAULTS == CatalogError.KINDS
    kinds = re.findall(r"`(\w+)`", (BankCorrupt.__doc__ or "").split("metrics:")[1])
    assert module.RESTORE_FAULTS == (*kinds, "other")


def test_buckets_reach_from_a_millisecond_to_an_hour() -> None:
    assert module.BUCKETS[0] == 0.001
    assert module.BUCKETS[-1] == 3600
    assert list(module.BUCKETS) == sorted(set(module.BUCKETS))


def test_names_are_base_units_and_counters_end_in_total() -> None:
    for family in FAMILIES:
        assert re.fullmatch(r"ds4grpc(_[a-z0-9]+)+", family.name)
        assert family.name.endswith("_total") == (family.kind == "counter"), family.name
        assert family.name.endswith("_seconds") or family.kind != "histogram", family.name
        assert family.text.endswith("."), family.name


def test_request_moves_through_waiting_running_and_ended() -> None:
    registry, metrics = new_metrics()
    request = metrics.request_started()
    assert samples(registry)["ds4grpc_requests_waiting"][()] == 1
    request.admitted(started(Admission.DISK_PARTIAL, 100, 20, 30))
    seen = samples(registry)
    assert (seen["ds4grpc_requests_waiting"][()], seen["ds4grpc_requests_running"][()]) == (0, 1)
    assert seen["ds4grpc_admissions_total"][(("admission", "disk_partial"),)] == 1
    tokens = seen["ds4grpc_prompt_tokens_total"]
    assert {dict(labels)["source"]: count for labels, count in tokens.items()} == {
        "computed": 50,
        "memory": 20,
        "disk": 30,
    }
    request.first_token(since_slot=0.5, since_arrival=0.75)
    request.ended("ok", FinishReason.LENGTH)
    request.ended("internal")
    request.admitted(started(Admission.COLD, 5, 0, 0))
    seen = samples(registry)
    ended = {labels: count for labels, count in seen["ds4grpc_requests_total"].items() if count}
    assert ended == {(("code", "ok"), ("finish_reason", "length")): 1}
    assert seen["ds4grpc_requests_running"][()] == 0
    assert sum(seen["ds4grpc_prompt_tokens_total"].values()) == 100
    first = seen["ds4grpc_time_to_first_token_seconds_count"]
    assert first[(("admission", "disk_partial"),)] == 1


def test_laws_hold_at_every_scrape_while_threads_count() -> None:
    registry, metrics = new_metrics()
    stop = threading.Event()
    prompt_tokens = []

    def count(seed: int) -> None:
        draw = random.Random(seed)
        total = 0
        while not stop.is_set():
            request = metrics.request_started()
            if draw.random() < 0.8:
                memory, disk = draw.randrange(50), draw.randrange(50)
                request.admitted(started(draw.choice(list(Admission)), 100, memory, disk))
                total += 100
            request.ended("ok", draw.choice(list(FinishReason)))
        prompt_tokens.append(total)

    threads = [threading.Thread(target=count, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        seen = samples(registry)
        in_flight = seen["ds4grpc_requests_running"][()] + seen["ds4grpc_requests_waiting"][()]
        ended = sum(seen["ds4grpc_requests_total"].values())
        assert seen["ds4grpc_requests_started_total"][()] == ended + in_flight
        assert sum(seen["ds4grpc_prompt_tokens_total"].values()) % 100 == 0
    stop.set()
    for thread in threads:
        thread.join()
    seen = samples(registry)
    assert sum(seen["ds4grpc_prompt_tokens_total"].values()) == sum(prompt_tokens)
    assert sum(seen["ds4grpc_admissions_total"].values()) * 100 == sum(prompt_tokens)


def test_state_is_read_through_the_callbacks_at_each_scrape() -> None:
    registry, metrics = new_metrics()
    slots = {"free": 7, "active": 1}
    metrics.watch_engine(lambda: EngineState(slots, {"reusable": 2}, 4096, 1e9))
    metrics.watch_store(lambda: StoreState(True, {"quarantined": 1}, 10, 20))
    seen = samples(registry)
    assert seen["ds4grpc_slots"][(("state", "active"),)] == 1
    assert seen["ds4grpc_banks"][(("trust", "reusable"), ("where", "resident"))] == 2
    assert seen["ds4grpc_banks"][(("trust", "quarantined"), ("where", "stored"))] == 1
    assert seen["ds4grpc_disk_enabled"][()] == 1
    assert (seen["ds4grpc_disk_bytes"][()], seen["ds4grpc_disk_quota_bytes"][()]) == (10, 20)
    slots["active"] = 0
    assert samples(registry)["ds4grpc_slots"][(("state", "active"),)] == 0


def test_store_events_are_counted_and_foreign_failures_fold_into_other() -> None:
    registry, metrics = new_metrics()
    metrics.persisted(PersistReason.STOP, 0.25, 1000)
    metrics.persist_failed("strange")
    metrics.restored("ok", 0.07, 2000)
    metrics.restored("checksum", 0.01, 10)
    metrics.evicted("lru")
    metrics.catalog("lookup", 0.002)
    metrics.catalog_error("locked")
    metrics.record(RecordKind.VISIBLE, "built", thinking=True)
    metrics.prefilled(7)
    metrics.generated(5)
    metrics.inter_token(0.03)
    metrics.stage("load", 0.5)
    metrics.compacted(0.3, 500)
    seen = samples(registry)
    assert seen["ds4grpc_bank_persists_total"][(("reason", "stop"),)] == 1
    assert seen["ds4grpc_bank_written_bytes_total"][()] == 1000
    assert seen["ds4grpc_bank_compacted_bytes_total"][()] == 500
    assert seen["ds4grpc_bank_read_bytes_total"][()] == 2010
    assert seen["ds4grpc_bank_persist_failures_total"][(("kind", "other"),)] == 1
    assert sum(seen["ds4grpc_bank_restores_total"].values()) == 2
    assert seen["ds4grpc_bank_restore_seconds_count"][()] == 2
    assert seen["ds4grpc_catalog_seconds_count"][(("op", "lookup"),)] == 1
    assert seen["ds4grpc_catalog_errors_total"][(("kind", "locked"),)] == 1
    record = (("kind", "visible"), ("outcome", "built"), ("thinking", "on"))
    assert seen["ds4grpc_records_total"][record] == 1
    assert seen["ds4grpc_prefill_tokens_total"][()] == 7
    assert seen["ds4grpc_generated_tokens_total"][()] == 5


def test_value_outside_a_closed_set_is_refused() -> None:
    _, metrics = new_metrics()
    with pytest.raises(KeyError):
        metrics.evicted("boredom")


def test_listener_serves_the_registry_until_it_is_closed() -> None:
    registry, _ = new_metrics()
    listener = MetricsListener(registry, Address("127.0.0.1", 0))
    with urllib.request.urlopen(f"http://{listener.address}/metrics", timeout=5) as reply:
        families = {family.name for family in text_string_to_metric_families(reply.read().decode())}
    assert "ds4grpc_build_info" in families
    assert not any(name.endswith("_created") for name in families)
    with pytest.raises(ConfigError, match=rf"cannot listen on {listener.address}"):
        MetricsListener(registry, listener.address)
    listener.close()
    MetricsListener(registry, listener.address).close()


def row(family: Family) -> str:
    """The line of docs/metrics.md for a family."""
    labels = (f"`{name}`: {', '.join(values) or 'any'}" for name, values in family.labels.items())
    return f"| `{family.name}` | {family.kind} | {'; '.join(labels) or '—'} | {family.text} |"


def test_docs_table_lists_every_metric_label_and_value() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `ds4grpc_")]
    assert rows == [row(family) for family in FAMILIES]


DASHBOARDS = [p for p in (files("ds4grpc") / "grafana").iterdir() if p.name.endswith(".json")]


def expressions(dashboard: Any) -> Iterator[str]:
    """Every PromQL expression of a dashboard: panel targets and variable queries."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["definition"].removeprefix("label_values(").removesuffix(")")


def broken(expression: str) -> list[str]:
    """What in an expression does not fit the registry: names, label names, values, types."""
    known = families_by_sample()
    common = {"job", "instance"}
    faults = []
    for match in re.finditer(r"\b(ds4grpc_\w+)(\{[^}]*\})?(\[[^\]]*\])?", expression):
        name, selector, interval = match[1], match[2] or "", match[3]
        family = known.get(name)
        if family is None:
            faults.append(f"unknown metric {name}")
            continue
        for label, operator, value in re.findall(r'(\w+)(=~|!=|!~|=)"([^"]*)"', selector):
            if label in common:
                continue
            allowed = family.labels.get(label)
            if allowed is None:
                faults.append(f"{name} has no label {label}")
            elif allowed:
                parts = value.split("|") if "~" in operator else [value]
                faults += [f"{name} has no {label}={part}" for part in parts if part not in allowed]
        wants_rate = name.endswith("_total") or name.endswith(("_bucket", "_sum", "_count"))
        rated = re.search(r"\b(rate|increase)\($", expression[: match.start()]) is not None
        if wants_rate != (interval is not None) or wants_rate != rated:
            faults.append(f"{name} needs rate() or increase(), or must not have it")
    grouped = set(re.findall(r"\b(?:by|without|ignoring|on) \(([^)]*)\)", expression))
    metric = re.search(r"ds4grpc_\w+", expression)
    family = known.get(metric[0]) if metric else None
    for labels in grouped:
        for label in (part.strip() for part in labels.split(",")):
            if family and label not in {*family.labels, *common, "le"}:
                faults.append(f"{family.name} cannot be grouped by {label}")
    return faults


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_every_dashboard_expression_fits_the_registry(path: Path) -> None:
    dashboard = json.loads(path.read_text(encoding="utf-8"))
    found = list(expressions(dashboard))
    assert found
    assert {e: broken(e) for e in found if broken(e)} == {}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_every_panel_has_description_unit_and_a_place_of_its_own(path: Path) -> None:
    dashboard = json.loads(path.read_text(encoding="utf-8"))
    cells: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        area = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not area & cells, panel["title"]
        assert place["x"] + place["w"] <= 24
        cells |= area
        if panel["type"] != "row":
            assert panel["description"].endswith("."), panel["title"]
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    assert [v["name"] for v in dashboard["templating"]["list"]] == ["datasource", "job", "instance"]


def test_dashboards_show_every_metric() -> None:
    shown = " ".join(
        e for path in DASHBOARDS for e in expressions(json.loads(path.read_text(encoding="utf-8")))
    )
    assert [family.name for family in FAMILIES if family.name not in shown] == []


@pytest.mark.parametrize(
    "expression",
    [
        "sum(rate(ds4grpc_admission_total[5m]))",
        "sum by (kind) (rate(ds4grpc_admissions_total[5m]))",
        'rate(ds4grpc_admissions_total{admission="cool"}[5m])',
        'rate(ds4grpc_admissions_total{way="cold"}[5m])',
        "rate(ds4grpc_disk_bytes[5m])",
        "sum(ds4grpc_hidden_tokens_total)",
        "rate(ds4grpc_queue_seconds[5m])",
    ],
)
def test_expression_check_catches_a_fault(expression: str) -> None:
    assert broken(expression)
