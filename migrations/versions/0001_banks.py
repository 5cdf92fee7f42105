"""Banks and their lookup hashes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "banks",
        sa.Column("bank_no", sa.Integer, primary_key=True),
        sa.Column("bank_id", sa.String, nullable=False, unique=True),
        sa.Column("namespace", sa.LargeBinary, nullable=False),
        sa.Column("parent_id", sa.String, nullable=False),
        sa.Column("base", sa.Integer, nullable=False),
        sa.Column("frontier", sa.Integer, nullable=False),
        sa.Column("head", sa.Integer, nullable=False),
        sa.Column("windows", sa.LargeBinary, nullable=False),
        sa.Column("tails", sa.LargeBinary, nullable=False),
        sa.Column("size_bytes", sa.Integer, nullable=False),
        sa.Column("reason", sa.String, nullable=False),
        sa.Column("record_kinds", sa.String, nullable=False),
        sa.Column("hidden_tokens", sa.Integer, nullable=False),
        sa.Column("trust", sa.Integer, nullable=False),
        sa.Column("hits", sa.Integer, nullable=False),
        sa.Column("pinned", sa.Integer, nullable=False),
        sa.Column("hidden", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("last_used_at", sa.Float, nullable=False),
        sa.Column("verified_at", sa.Float),
        sa.Column("ttl_seconds", sa.Float),
    )
    op.create_table(
        "hashes",
        sa.Column("digest", sa.LargeBinary, primary_key=True),
        sa.Column("bank_no", sa.Integer, sa.ForeignKey("banks.bank_no"), primary_key=True),
        sa.Column("position", sa.Integer, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_index("hashes_bank_no", "hashes", ["bank_no"])


def downgrade() -> None:
    op.drop_table("hashes")
    op.drop_table("banks")
