"""The proof that every layout and technique trains like one process: a table, and how its rows run.

May import everything below tools; only cli, tools, tests and scripts import it. Never changes how
training runs."""
