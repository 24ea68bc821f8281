"""Run by Alembic inside the transaction that opens a store."""

from alembic import context

from semkv_rag.store.index.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
