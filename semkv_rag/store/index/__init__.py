"""The SQL index: what there is, whose it is, and what changed. Private to the store.

`database` opens it and hands out connections; the other modules are the statements, as functions of
a connection, so that the store puts together what belongs into one transaction.
"""
