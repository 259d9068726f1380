"""Parity, the proof: one table of rows and the harness that compares each with one process.

`titanlite verify` and tests/parity run the same. table.py says which rows there are, subject.py which model they are
run with, harness.py what every rank does, proof.py how a row is run on local processes, faults.py which known faults
the table must notice, report.py and command.py how it is told.
"""
