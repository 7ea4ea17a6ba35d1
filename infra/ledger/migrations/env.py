"""Runs the ledger's migrations on the connection that `engine.migrate` hands over.

Connection, tables and version table come through the config's attributes: this file is loaded by path, and must
not import the package under a second name.
"""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=context.config.attributes["metadata"],
    version_table=context.config.attributes["version_table"],
    render_as_batch=True,  # SQLite can alter a table only by copying it
    transactional_ddl=True,  # both databases roll table changes back; Alembic doubts it for SQLite
)
with context.begin_transaction():
    context.run_migrations()
