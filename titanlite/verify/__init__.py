"""The proof that every layout and technique trains like one process: a table of rows, and what runs
them.

May import everything below tools; only cli, tools, tests and scripts import it. Never changes how
training runs."""
