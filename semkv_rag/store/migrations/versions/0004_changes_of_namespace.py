"""A namespace's own changes are found without a look at the others'."""

from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_index("changes_of_namespace", "changes", ["model", "namespace", "seq"])
