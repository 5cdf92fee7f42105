"""The tables of the catalog. Migrations are what makes them; a test keeps the two equal.

Owns names, types and indexes. Knows no queries. Never key text: only digests.
"""

from __future__ import annotations

from sqlalchemy import (
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
)

metadata = MetaData()

banks = Table(
    "banks",
    metadata,
    # A small number instead of the id in `hashes`, which has dozens of rows for each bank.
    Column("bank_no", Integer, primary_key=True),
    Column("bank_id", String, nullable=False, unique=True),
    Column("namespace", LargeBinary, nullable=False),
    Column("parent_id", String, nullable=False),  # "" when base is 0
    Column("base", Integer, nullable=False),
    Column("frontier", Integer, nullable=False),
    Column("head", Integer, nullable=False),
    Column("windows", LargeBinary, nullable=False),  # u32le pairs, as in the file's header
    Column("tails", LargeBinary, nullable=False),  # u32le
    Column("size_bytes", Integer, nullable=False),
    Column("reason", String, nullable=False),
    Column("record_kinds", String, nullable=False),  # "raw visible": words, sorted
    Column("hidden_tokens", Integer, nullable=False),
    Column("trust", Integer, nullable=False),  # ds4grpc.bank.Trust
    Column("hits", Integer, nullable=False),
    Column("pinned", Integer, nullable=False),  # 0 or 1; the marker file is what counts
    Column("hidden", Integer, nullable=False),  # deleted, its rows still needed by children
    Column("created_at", Float, nullable=False),  # times are seconds since 1970
    Column("last_used_at", Float, nullable=False),
    Column("verified_at", Float),
    Column("ttl_seconds", Float),  # counted from the last use
)

hashes = Table(
    "hashes",
    metadata,
    Column("digest", LargeBinary, primary_key=True),
    Column("bank_no", Integer, ForeignKey("banks.bank_no"), primary_key=True),
    Column("position", Integer, nullable=False),
    Index("hashes_bank_no", "bank_no"),
    sqlite_with_rowid=False,
)
